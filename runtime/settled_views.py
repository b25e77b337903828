"""Has Inductor settle a buffer's strides before it makes a view of it.

Before torch 2.15 a reshape of a buffer whose strides are open (padded, but still to be ordered by
what its loop reads) is given strides as they are just then, and reads elsewhere if they change: a
pooled image of an MViT in another order, beyond its end; the gradient of a table of attention's
biases in an EfficientFormerV2, by stock Inductor as by ours. The loss is wrong, or NaN.
https://github.com/pytorch/pytorch/issues/192575
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.torch_version import TorchVersion

from hot_compile.runtime.pointwise import taught


@taught
def settled() -> None:
    """Mend torches before 2.15, as 2.15 is."""
    if TorchVersion(torch.__version__) >= "2.15":
        return
    from torch._inductor import ir

    own: Any = ir.View.create.__func__  # type: ignore[attr-defined]

    def create(cls: Any, x: Any, new_size: Sequence[Any]) -> Any:
        stored = ir.is_storage_and_layout(x) and list(x.get_size()) != list(new_size)
        if stored and not ir.is_contiguous_storage_and_layout(x):
            ir.as_storage_and_layout(x)  # settles them
        return own(cls, x, new_size)

    ir.View.create = classmethod(create)  # type: ignore[method-assign,assignment]

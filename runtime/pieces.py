"""``hot::side_by_side``: tensors that were worked out in pieces, in one.

Inductor lowers a concatenation of elementwise results as one loop over the whole, which asks of
each element which piece it is of. This operator is lowered to a loop a piece, each writing its own
part: they can go into the kernel that packs the same pieces. Importing this registers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hot_compile.runtime.pointwise import taught

_LIBRARY = torch.library.Library("hot", "FRAGMENT")
_LIBRARY.define("side_by_side(Tensor[] pieces, int dim) -> Tensor")


def _side_by_side(pieces: list[Tensor], dim: int) -> Tensor:
    return torch.cat(pieces, dim)


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("side_by_side", _side_by_side, _device)
torch.library.register_fake("hot::side_by_side")(_side_by_side)


@taught
def lowered() -> None:
    """Teach Inductor the operator."""
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering

    @register_lowering(torch.ops.hot.side_by_side.default, type_promotion_kind=None)
    def _(pieces: Sequence[Any], dim: int) -> Any:
        return ir.TensorBox(ir.ConcatKernel.create(pieces, dim % len(pieces[0].get_size())))

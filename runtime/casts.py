"""``hot::cast_together``: tensors of one dtype in another, in one launch or a few.

``passes/exact/casts.py`` puts it in the place of the casts of a model's weights under autocast, of
which there are a hundred and more a step, each a kernel of its own that runs for a microsecond.
Importing this registers it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("hot", "FRAGMENT")
_LIBRARY.define(
    "cast_together(Tensor[] tensors, ScalarType dtype) -> Tensor[]",
    tags=(torch.Tag.needs_exact_strides,),
)


def _cast_together(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Fresh tensors of the same shapes and strides, rounded as ``Tensor.to`` does it."""
    made = _cast_shapes(tensors, dtype)
    torch._foreach_copy_(made, tensors)
    return made


def _cast_shapes(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("cast_together", _cast_together, _device)
torch.library.register_fake("hot::cast_together")(_cast_shapes)

"""``hot::cast_together``: tensors of one dtype in another, in one launch or a few.

``passes/exact/casts.py`` puts it in the place of the casts of a model's weights under autocast, of
which there are a hundred and more a step, each a kernel of its own that runs for a microsecond.
Inductor makes one kernel of it (``lowered``), whose results it allocates itself: called as an
operator it costs the host ten times that. Importing this registers it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hot_compile.runtime.pointwise import taught

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


@taught
def lowered() -> None:
    """Teach Inductor the operator: as it lowers PyTorch's own operators on lists of tensors.

    And have it schedule such lists beside kernels whose loops it turns.
    """
    from torch._inductor.codegen.common import BackendFeature
    from torch._inductor.lowering import register_lowering, to_dtype
    from torch._inductor.scheduler import ForeachKernelSchedulerNode, SchedulerNode
    from torch._inductor.virtualized import V

    @register_lowering(torch.ops.hot.cast_together.default, type_promotion_kind=None)
    def _(tensors: Sequence[Any], dtype: torch.dtype) -> list[Any]:
        made = [to_dtype(tensor, dtype, copy=True) for tensor in tensors]
        if V.graph.has_feature(tensors[0].get_device(), BackendFeature.FOREACH):
            for one in made:
                one.realize()
            V.graph.register_operation_list([one.get_operation_name() for one in made])
        return made

    # torch before 2.14 asserts that what stands in a list was fused with nothing when it looks for
    # loops in another order; later ones leave such a list as it is
    node: Any = ForeachKernelSchedulerNode
    reorder = node.reorder_loops_by_dep_pair

    @functools.wraps(reorder)
    def reorder_single_ones(self: Any, *deps: Any) -> bool:
        return all(isinstance(n, SchedulerNode) for n in self.snodes) and reorder(self, *deps)

    node.reorder_loops_by_dep_pair = reorder_single_ones

"""What operators do: the one table that all stages read. Each set's docstring is what it claims.

``tests/passes/test_operators.py`` runs every operator on samples: it says which break a claim, and
which keep one and are missing here. To have an operator understood, put it where its facts are.
What works element by element says so itself (``is_pointwise``).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch._inductor import inductor_prims  # noqa: F401  (registers prims.fma, where torch has it)

aten, prims = torch.ops.aten, torch.ops.prims

FLOATS = {torch.float32, torch.bfloat16, torch.float16}
"""Dtypes that layers and storage know."""
SIXTEEN_BITS = {torch.bfloat16, torch.float16}
"""Those of them that autocast casts to."""

TRANSPOSES = {aten.permute.default, aten.t.default, aten.transpose.int}
"""They leave all elements, in another order of dimensions."""
RESHAPES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
"""They leave all elements in their order, in another shape."""
SQUEEZES = {aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default}
"""Likewise: dimensions of one element come or go."""
IN_ORDER = RESHAPES | SQUEEZES | {aten.alias.default}
"""They leave all elements, and leave them in their order."""
PARTS = {aten.slice.Tensor, aten.select.int}
"""They take a part."""
SPLITS: dict[Any, int] = {
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
    aten.unbind.int: 1,
}
"""They return all parts; where they have the dimension among their arguments."""
VIEWS = {
    *(RESHAPES | TRANSPOSES),
    *PARTS,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.expand.default,
    aten.alias.default,
}
"""They show elements of one tensor, and copy none."""
PADS = {aten.constant_pad_nd.default}
"""They surround a tensor by one number."""
MOVES = {
    *PADS,
    aten.cat.default,
    aten.clone.default,
    aten.gather.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.roll.default,
    aten.flip.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
}
"""They place values elsewhere and change none."""
CASTS = {prims.convert_element_type.default, aten._to_copy.default}
"""They change a tensor's dtype."""
SHAPE_ONLY = {
    aten.full_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.sym_size.int,
    aten.avg_pool2d_backward.default,
    aten.max_pool2d_with_indices_backward.default,
}
"""Of what is given for its size, no value matters: a rounded one says as much."""

SUMS = {aten.sum.dim_IntList, aten.sum.default}
"""Sums over dimensions, or over all elements."""
DEVIATIONS = {aten.var_mean.correction, aten.var.correction}
"""How far elements are from their mean: what all of them have in common takes no part."""
EXTREMES = {aten.amax.default, aten.amin.default}
"""One of the elements."""
REDUCTIONS = SUMS | DEVIATIONS | EXTREMES | {aten.mean.dim, aten.mean.default}
"""One number of many elements."""

MATRIX_PRODUCTS: dict[Any, int] = {aten.mm.default: 0, aten.addmm.default: 1}
"""Linear in either factor; the first one's place among their arguments, the other follows."""
BATCHED_PRODUCTS = {aten.bmm.default, aten.baddbmm.default}
"""Likewise of batches: attention by hand."""
CONVOLUTIONS = {aten.convolution.default, aten.convolution_backward.default}
"""Linear in either factor."""
GROUPED_PRODUCTS = {aten._grouped_mm.default}
"""Likewise of rows in groups, each of which has a matrix of its own: experts."""
LIBRARIES_GROUPED_PRODUCTS = {
    "transformers::grouped_mm_fallback",
    "transformers::grouped_mm_fallback_backward",
}
"""Names of those that ATen does not have: of Transformers' experts in fp32."""

SUMS_OF_TWO = {aten.add.Tensor, aten.sub.Tensor}
"""One tensor and another, or less another."""
ADDITIVE = SUMS_OF_TWO | {aten.add.Scalar, aten.sub.Scalar}
"""Likewise, or a number."""
SCALED_BY_TENSOR = {aten.mul.Tensor, aten.div.Tensor}
"""Linear in the first operand."""
DIVISIONS = {aten.div.Tensor, aten.div.Scalar}
"""By a tensor, or a number."""
SCALED = SCALED_BY_TENSOR | {aten.mul.Scalar, aten.div.Scalar}
"""Likewise, or by a number."""
MULTIPLES = {aten.mul.Tensor, aten.neg.default}
"""Multiples of each operand."""
FUSED = {prims.fma.default} if hasattr(prims, "fma") else set()
"""A product and a sum at once."""
LINEAR_IN_GRADIENT = {
    *(SCALED_BY_TENSOR | FUSED),
    aten.where.self,
    aten.addcmul.default,
    aten.neg.default,
}
"""Where one operand is a gradient, the result is linear in it, and errors are relative to it."""
POWERS = {aten.exp.default, aten.expm1.default}
"""e to something, or one less."""
PERIODIC = {aten.sin.default, aten.cos.default}
"""Of an angle: an error of it counts beside a turn, not beside the angle."""
BOUNDED = {
    *PERIODIC,
    aten.tanh.default,
    aten.sigmoid.default,
    aten._softmax.default,
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
}
"""Their results are of about the same size whatever they are given."""


SATURATED = {aten.tanh.default, aten.sigmoid.default, aten.erf.default}
"""Their slopes are worked out of their results, and are what these lack of their ends."""
BOUNDED_BY = {
    aten.clamp.Tensor,
    aten.clamp_min.Tensor,
    aten.clamp_max.Tensor,
    aten.maximum.default,
    aten.minimum.default,
}
"""Each element of their results is one of an operand's."""
GENTLE = {
    *(ADDITIVE | SCALED | BOUNDED_BY),
    aten.neg.default,
    aten.abs.default,
    aten.sgn.default,
    aten.sign.default,
    aten.relu.default,
    aten.leaky_relu.default,
    aten.sigmoid.default,
    aten.tanh.default,
    aten.atan.default,
    aten.asinh.default,
    aten.erf.default,
    aten.gelu.default,
    aten.silu.default,
    aten.addcmul.default,
    aten.clamp.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
    aten.where.self,
    aten.logical_not.default,
    aten.logical_and.default,
    aten.logical_or.default,
    *FUSED,
}
"""No pole, no jump in a value, no slope above about one: a small change of an operand is a small
one of the result."""


def is_layer_product(node: fx.Node) -> bool:
    """Its operator is a layer's product, of the forward or the backward."""
    plain = node.target in MATRIX_PRODUCTS or node.target in CONVOLUTIONS
    return plain or is_grouped_product(node)


def is_grouped_product(node: fx.Node) -> bool:
    """Its operator multiplies groups of rows, each by a matrix of its own."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.name() in LIBRARIES_GROUPED_PRODUCTS:
        return True
    return target in GROUPED_PRODUCTS


def multiplier(node: fx.Node) -> float | None:
    """The number that its operator multiplies the first operand by, if it does that."""
    if node.target is aten.neg.default:
        return -1.0
    factor = node.args[1] if node.target in SCALED else None
    if not isinstance(factor, (int, float)):
        return None
    if node.target in DIVISIONS:
        return 1 / factor if factor else math.inf
    return factor


def is_pointwise(node: fx.Node) -> bool:
    """Its operator works element by element."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())

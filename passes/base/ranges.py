"""What a tensor's elements lie between, read off the operators that make it.

Torch's own analysis (``torch.utils._sympy.value_ranges``) is made for sizes: it knows nothing of a
relu, nor that a tanh ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from hot_compile.passes.base.graph import aten
from hot_compile.passes.base.operators import (
    ADDITIVE,
    CASTS,
    DIVISIONS,
    PERIODIC,
    SCALED,
    VIEWS,
    multiplier,
)

Range = tuple[float, float]
"""The least an element can be, and the most."""
ANY: Range = (-math.inf, math.inf)
_DEEPEST = 8
"""Operators that are followed back."""
_SHARE, _WAVE = (0.0, 1.0), (-1.0, 1.0)
_FIXED: Mapping[Any, Range] = {
    aten.sigmoid.default: _SHARE,
    aten._softmax.default: _SHARE,
    aten.tanh.default: _WAVE,
    aten.erf.default: _WAVE,
    **dict.fromkeys(PERIODIC, _WAVE),
    aten.cosh.default: (1.0, math.inf),
}
_RISING: Mapping[Any, Callable[[float], float]] = {
    aten.exp.default: math.exp,
    aten.expm1.default: math.expm1,
    aten.relu.default: lambda x: max(x, 0.0),
    aten.sqrt.default: lambda x: math.sqrt(max(x, 0.0)),
    aten.log1p.default: lambda x: math.log1p(x) if x > -1 else -math.inf,
    aten.log.default: lambda x: math.log(x) if x > 0 else -math.inf,
    aten.atan.default: math.atan,
}
_SUBTRACTS = {aten.sub.Tensor, aten.sub.Scalar}
_LARGER = {aten.maximum.default, aten.clamp_min.default, aten.clamp_min.Tensor}
_SMALLER = {aten.minimum.default, aten.clamp_max.default, aten.clamp_max.Tensor}


def range_of(node: Any, depth: int = _DEEPEST) -> Range:
    """Of a node, or of a number; nothing is said of NaN."""
    if isinstance(node, (int, float)):
        return (float(node), float(node))
    if not isinstance(node, fx.Node) or not depth or not node.args:
        return ANY
    target = node.target
    if node.kwargs and target not in CASTS:
        return ANY
    if target in _FIXED:
        return _FIXED[target]
    if sign := _of_square(node):
        return (0.0, math.inf) if sign > 0 else (-math.inf, 0.0)
    if target is aten.where.self:
        (low, high), (other_low, other_high) = (range_of(n, depth - 1) for n in node.args[1:])
        return min(low, other_low), max(high, other_high)
    if target is aten.clamp.default:
        ends: Any = (*node.args[1:], None)[:2]
        least, most = (e if n is None else n for n, e in zip(ends, ANY, strict=True))
        return _each(lambda x: min(max(x, least), most), range_of(node.args[0], depth - 1))
    operands = [range_of(n, depth - 1) for n in node.args[:2]]
    return _of_operands(target, operands)


def _of_operands(target: Any, operands: list[Range]) -> Range:
    """Of what an operator makes of tensors, or numbers, in these ranges."""
    (low, high), *others = operands
    if target in VIEWS | CASTS:
        return low, high
    if target in _RISING:
        return _each(_RISING[target], (low, high))
    if target is aten.neg.default:
        return -high, -low
    if target is aten.abs.default:
        return max(low, -high, 0.0), max(-low, high)
    if not others:
        return ANY
    ((least, most),) = others
    if target in _SUBTRACTS:
        return low - most, high - least
    if target in ADDITIVE:
        return low + least, high + most
    if target in DIVISIONS:
        return _product((low, high), (1 / most, 1 / least)) if least > 0 or most < 0 else ANY
    if target in SCALED:
        return _product((low, high), (least, most))
    if target in _LARGER:
        return max(low, least), max(high, most)
    if target in _SMALLER:
        return min(low, least), min(high, most)
    return ANY


def _of_square(node: fx.Node) -> int:
    """The sign of ``node``, if it is a multiple of a square; else nothing."""
    if node.target is aten.pow.Tensor_Scalar:
        return int(node.args[1] % 2 == 0)  # type: ignore[operator]
    if node.target is not aten.mul.Tensor:
        return 0
    (one, sign), (other, other_sign) = (_multiple(n) for n in node.args)
    return sign * other_sign if one is other and isinstance(one, fx.Node) else 0


def _multiple(node: Any) -> tuple[Any, int]:
    """What ``node`` is a multiple of, and the multiple's sign."""
    sign = 1
    while isinstance(node, fx.Node) and (factor := multiplier(node)):
        sign = sign if factor > 0 else -sign
        node = node.args[0]
    return node, sign


def _each(rises: Callable[[float], float], ends: Range) -> Range:
    low, high = (_applied(rises, x) for x in ends)
    return low, high


def _applied(rises: Callable[[float], float], x: float) -> float:
    try:
        return rises(x)
    except OverflowError:
        return math.inf


def _product(one: Range, other: Range) -> Range:
    """Nothing times what has no end is nothing, for elements have one."""
    ends = [0.0 if 0.0 in (x, y) else x * y for x in one for y in other]
    return min(ends), max(ends)

"""Functions of 16-bit numbers in fewer instructions than a GPU's library takes for fp32.

A kernel that restores what was stored and takes its GELU is bound by instructions, not by memory:
78 an element, of which the library's ``erf`` and ``exp`` take 35 and these forms 12. They err by
less than 1e-6, a four thousandth of what separates neighbouring bf16 numbers at 1, so they stand
only where the argument was made of 16-bit numbers and where an error is seen beside 1:
``1 + erf(x)``, ``1 - tanh(x)**2``. ``sigmoid`` errs by less than 1e-5 of its own value. The forms
are ``runtime/pointwise.py``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten
from hot_compile.passes.base.operators import ADDITIVE, CASTS, SIXTEEN_BITS, VIEWS, is_pointwise
from hot_compile.passes.base.site import elements_of
from hot_compile.passes.cost.linear import Rates
from hot_compile.runtime.pointwise import lowered

_SHORT = torch.ops.hot.short_function.default
_ADDITIONS = ADDITIVE | {aten.rsub.Scalar}
_PRODUCTS = {aten.mul.Tensor, aten.pow.Tensor_Scalar}
_DEEPEST = 24
"""Operators between a function and the 16-bit numbers that it is of, at most."""


def shorten_functions(graph: fx.Graph) -> int:
    """Give ``graph``'s functions their short forms in place, where they may have one; how many."""
    found = list(_shortened(graph)) if lowered() else []
    for node in found:
        emit, argument = Emitter(graph, node, node), node.all_input_nodes[0]
        short = emit(_SHORT, emit.cast(argument, torch.float32), _FORMS[node.target][0])
        node.replace_all_uses_with(emit.cast(short, node.meta["val"].dtype))
        graph.erase_node(node)
    return len(found)


def seconds_shortened(graph: fx.Graph, rates_of: Callable[[torch.device], Rates | None]) -> float:
    """Predicted of what short forms save: twelve instructions an element, as long as it takes to
    code one or a little longer."""
    total = 0.0
    for node in _shortened(graph) if lowered() else ():
        value = node.meta["val"]
        rates = rates_of(value.device)
        if rates is not None and rates.coding:
            total += elements_of(value) / rates.coding
    return total


def _shortened(graph: fx.Graph) -> Iterator[fx.Node]:
    """What may have a short form."""
    for target, (_, seen_beside_one) in _FORMS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            if _applies(node) and (not seen_beside_one or all(map(_beside_one, node.users))):
                yield node


def _applies(node: fx.Node) -> bool:
    value, argument = node.meta.get("val"), node.args[0]
    if not isinstance(value, torch.Tensor) or value.device.type != "cuda":
        return False
    if value.dtype not in (torch.float32, *SIXTEEN_BITS) or not isinstance(argument, fx.Node):
        return False
    if node.target is aten.exp.default and not _gaussian(argument):
        return False
    return _of_sixteen_bits(argument)


def _of_sixteen_bits(node: fx.Node) -> bool:
    """``node`` is made of 16-bit numbers alone, element by element."""
    level = {node}
    for _ in range(_DEEPEST + 1):
        level = {made for made in level if not _has_sixteen_bits(made)}
        if not all(_follows(made) for made in level):
            return False
        level = {source for made in level for source in made.all_input_nodes}
    return not level


def _has_sixteen_bits(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in SIXTEEN_BITS


def _follows(node: fx.Node) -> bool:
    """``node`` is made element by element, of something."""
    known = node.target in CASTS or node.target in VIEWS or is_pointwise(node)
    return known and bool(node.all_input_nodes)


def _gaussian(exponent: fx.Node) -> bool:
    """A square times a negative number: the error of its power of e is below 1e-7 of 1."""
    if exponent.target is not aten.mul.Tensor:
        return False
    square, factor = exponent.args
    negative = isinstance(factor, (int, float)) and -1.0 <= factor < 0.0
    return negative and isinstance(square, fx.Node) and _is_square(square)


def _is_square(node: fx.Node) -> bool:
    if node.target is aten.mul.Tensor:
        return node.args[0] is node.args[1]
    return node.target is aten.pow.Tensor_Scalar and bool(node.args[1] == 2)


def _beside_one(reader: fx.Node) -> bool:
    """``reader`` adds about 1 to its operand, or squares it, which then is taken from 1."""
    if reader.target in CASTS:
        return all(map(_beside_one, reader.users))
    if reader.target in _PRODUCTS:
        return _is_square(reader) and all(map(_beside_one_itself, reader.users))
    return _beside_one_itself(reader)


def _beside_one_itself(reader: fx.Node) -> bool:
    if reader.target not in _ADDITIONS:
        return False
    addends = [a for a in reader.args[:2] if not isinstance(a, fx.Node) or _constant(a) is not None]
    values = [_constant(a) if isinstance(a, fx.Node) else a for a in addends]
    return any(isinstance(v, (int, float)) and abs(v) >= 0.5 for v in values)


def _constant(node: fx.Node) -> Any:
    """The number that ``node`` fills a tensor with, or None."""
    return node.args[1] if node.target is aten.full.default else None


_FORMS: dict[Any, tuple[str, bool]] = {
    aten.erf.default: ("erf", True),
    aten.tanh.default: ("tanh", True),
    aten.sigmoid.default: ("sigmoid", False),
    aten.exp.default: ("exp", False),
}
"""By operator: its short form, and whether that form's error is small beside 1 only."""

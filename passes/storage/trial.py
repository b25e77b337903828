"""A chain of pointwise operators as a value: tried on samples once, however many layers have it.

A model of thirty blocks asks the same of the same functions thirty times, and an evaluation costs
milliseconds: so what a chain computes is taken off its graph, and what was found of it is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from hot_compile.passes.base.graph import aten
from hot_compile.passes.base.operators import SUMS_OF_TWO, is_pointwise
from hot_compile.passes.base.schemes import Scheme, Unit
from hot_compile.passes.base.site import hint
from hot_compile.passes.storage import probe

_ROOT_STEPS = 16
_SUMS = SUMS_OF_TWO | {aten.where.self}
_CASTS = {torch.ops.prims.convert_element_type.default}


@dataclasses.dataclass(frozen=True)
class _Place:
    """An argument: the chain's value of this number."""

    number: int


@dataclasses.dataclass(frozen=True)
class _Coin:
    """An argument: a mask that is no part of the chain."""


@dataclasses.dataclass(frozen=True)
class _Constant:
    """An argument: this value, a tensor of no dimensions where ``dtype`` is given."""

    text: str
    """Two are the same if they read the same and are of one type: 1 and 1.0 are not, nor 0 and
    -0."""
    value: Any = dataclasses.field(compare=False)
    dtype: torch.dtype | None = None


@dataclasses.dataclass(frozen=True)
class _Step:
    """One operator."""

    target: Any
    arguments: tuple[Any, ...]
    form: str
    """How ``arguments`` nest, to compare."""
    nesting: Any = dataclasses.field(compare=False)
    dtype: torch.dtype | None
    moves: bool
    """It moves or casts its first argument of the chain and computes nothing."""
    mask: bool
    """It is carried without loss."""


@dataclasses.dataclass(frozen=True)
class _Values:
    """What a tensor is known to be: a function of one whose values may be anything."""

    root: torch.dtype
    steps: tuple[_Step, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Function:
    """What a backward recomputes from a saved tensor."""

    values: _Values
    """Of the saved tensor."""
    steps: tuple[_Step, ...]
    """Step n makes value n + 1; value 0 is the saved tensor."""
    ends: tuple[tuple[int, bool], ...]
    """Values that readers are linear in, or in the inverse of."""


def function_of(
    made: fx.Node,
    chain: Sequence[fx.Node],
    masks: Collection[fx.Node],
    ends: Iterable[tuple[fx.Node, bool]],
) -> Function:
    """What a chain computes, without its graph.

    Args:
        made: the forward's node of the saved tensor.
        chain: the saved tensor in the backward, then what is recomputed from it, in order.
        masks: of these, what is carried without loss.
        ends: of these, what readers are linear in, or in the inverse of.
    """
    places = {node: place for place, node in enumerate(chain)}
    steps = tuple(_step(node, places, node in masks) for node in chain[1:])
    return Function(_values_of(made), steps, tuple((places[n], inverse) for n, inverse in ends))


def _values_of(made: fx.Node) -> _Values:
    """What ``made`` is computed by, as far back as by functions of one tensor."""
    path: list[fx.Node] = []
    node = made
    while len(path) < _ROOT_STEPS and _is_unary(node):
        path.append(node)
        (node,) = node.all_input_nodes
    value = node.meta["val"]
    floating = isinstance(value, Tensor) and value.is_floating_point()
    steps = tuple(_step(n, dict.fromkeys(n.all_input_nodes, 0), False) for n in reversed(path))
    return _Values(value.dtype if floating else torch.float32, steps, made.meta["val"].dtype)


@lru_cache(maxsize=4096)
def problem(function: Function, scheme: Scheme) -> str:
    """Why ``function`` does not tolerate that its argument is stored as ``scheme``, '' if it does.

    Raises whatever an operator raises that samples do not suit.
    """
    with _one_thread():
        return _problem(function, scheme)


def _problem(function: Function, scheme: Scheme) -> str:
    x = _typical(function.values)
    if scheme.spec.unit is Unit.CENTRED_ROW and not _is_homogeneous(function, x):
        return "bends near zero, where codes around another mean are coarse"
    values = _evaluated(function, x, probe.restored(x, scheme))
    limit = probe.CENTRED if scheme.spec.unit is Unit.CHANNEL else probe.USUAL
    limit = probe.FOUR_BITS if scheme is Scheme.INT4 else limit
    for place, inverse in function.ends:
        exact, rounded = values[place]
        if inverse:
            exact, rounded = exact.reciprocal(), rounded.reciprocal()
        for within in (None, *_regions(function, values)):
            found = probe.verdict(exact, rounded, x, limit, within)
            if found:
                return found
    return ""


@contextmanager
def _one_thread() -> Iterator[None]:
    """Samples are small: threads gain nothing, and where several processes of one machine compile
    at once (a rank a GPU) they wait for each other's."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _typical(values: _Values) -> Tensor:
    """Samples of a tensor: of what it is a function of, through that function."""
    value = probe.samples(values.root)
    for step in values.steps:
        value = _call(step, [value])
    return value.to(values.dtype)


def _evaluated(function: Function, x: Tensor, other: Tensor) -> list[tuple[Tensor, Tensor]]:
    """All values at ``x`` and at ``other``, masks as they are at ``x``."""
    values = [(x, other)]
    for step in function.steps:
        exact, rounded = (_call(step, [pair[side] for pair in values]) for side in (0, 1))
        values.append((exact, exact if step.mask else rounded))
    return values


def _is_homogeneous(function: Function, x: Tensor) -> bool:
    """Twice the argument gives twice the result, or the same, as of a ReLU and its slope.

    Such a function has no scale of its own: it bends no finer than its values are spread.
    """
    values = _evaluated(function, x, 2 * x)
    pairs = [values[place] for place, _ in function.ends]
    fine = [(one.isfinite() & two.isfinite(), one, two) for one, two in pairs]
    return all(
        torch.allclose(two[ok], 2 * one[ok], 1e-2) or torch.allclose(two[ok], one[ok], 1e-2)
        for ok, one, two in fine
    )


def _regions(function: Function, values: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Where each mask holds, and where not, and what two have in common: a gradient may be let
    through there alone (a clamp's is, between two comparisons)."""
    masks = [values[n + 1][0] for n, step in enumerate(function.steps) if step.mask]
    sides = [(mask, ~mask) for mask in masks]
    both = [a & b for one, other in combinations(sides, 2) for a in one for b in other]
    return [side for pair in sides for side in pair] + both


def _step(node: fx.Node, places: dict[fx.Node, int], mask: bool) -> _Step:
    flat, nesting = pytree.tree_flatten((node.args, node.kwargs))
    arguments = tuple(_argument(leaf, node, places) for leaf in flat)
    inside = any(isinstance(argument, _Place) for argument in arguments)
    moves = not is_pointwise(node) or (inside and node.target in _CASTS)
    result = node.meta.get("val")
    dtype = result.dtype if isinstance(result, Tensor) else None
    return _Step(node.target, arguments, str(nesting), nesting, dtype, moves, mask)


def _argument(leaf: Any, node: fx.Node, places: dict[fx.Node, int]) -> Any:
    """What stands for one of ``node``'s arguments."""
    if not isinstance(leaf, fx.Node):
        return _Constant(f"{type(leaf).__name__} {leaf!r}", leaf)
    if leaf in places:
        return _Place(places[leaf])
    value = leaf.meta.get("val")
    if not isinstance(value, Tensor):
        return _Constant(f"size {hint(value)}", hint(value))
    if leaf.target is aten.full.default:
        return _Constant(f"full {leaf.args[1]!r}", leaf.args[1], value.dtype)
    if value.dtype is torch.bool:
        return _Coin()
    number = 0 if node.target in _SUMS else 1
    return _Constant(f"tensor {number}", number, value.dtype)


def _call(step: _Step, values: list[Tensor]) -> Tensor:
    if step.moves:
        first = next(values[a.number] for a in step.arguments if isinstance(a, _Place))
        return first if step.dtype is None else first.to(step.dtype)
    given = [_given(argument, values) for argument in step.arguments]
    args, kwargs = pytree.tree_unflatten(given, step.nesting)
    result: Tensor = step.target(*args, **kwargs)
    return result


def _given(argument: Any, values: list[Tensor]) -> Any:
    if isinstance(argument, _Place):
        return values[argument.number]
    if isinstance(argument, _Coin):
        like = values[0]
        return (torch.arange(like.numel(), device="cpu") % 3 > 0).view(like.shape)
    if argument.dtype is None:
        return argument.value
    return torch.full((), argument.value, dtype=argument.dtype, device="cpu")


def _is_unary(node: fx.Node) -> bool:
    """A pointwise function of one floating-point tensor."""
    pointwise = is_pointwise(node)
    if node.op != "call_function" or not pointwise or len(node.all_input_nodes) != 1:
        return False
    value = node.all_input_nodes[0].meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()

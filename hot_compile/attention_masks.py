"""Attention masks that are known when a graph is compiled, and hide nothing or just the future.

Models that look at a mask's values in eager mode cannot do so while they are traced: they hand over
a mask of ones, or a causal one. Attention with a mask is another kernel, which reads it, or is even
computed as plain products. Attention without one, or with ``is_causal``, computes the same.
"""

from __future__ import annotations

import logging
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .again import twin

log = logging.getLogger("hot_compile")
ATTENTION = torch._C._nn.scaled_dot_product_attention
CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
_MOST_BYTES = 2**28
"""Of a value that is computed here as a whole."""
_MOST = 2**31
"""Elements of a mask: two of 32768 x 32768."""
_BLOCK = 2**24
"""Elements that are computed at a time, where rows can be computed apart."""

_OPERATORS = {
    *(operator.add, operator.sub, operator.mul, operator.neg),
    *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
    *(operator.and_, operator.or_, operator.xor, operator.invert),
}
_BY_ELEMENT = {
    *_OPERATORS,
    *(f"__{function.__name__.strip('_')}__" for function in _OPERATORS),  # == before torch 2.14
    *(abs, torch.abs, torch.where, torch.logical_and, torch.logical_not, torch.logical_or),
    *("abs", "bool", "float", "int", "logical_not", "long", "masked_fill", "to", "type"),
}
_REPEAT = {"contiguous", "expand"}
_PURE = {
    *_BY_ELEMENT,
    *_REPEAT,
    *(torch.arange, torch.full, torch.ones, torch.zeros, operator.getitem),
    *(torch.cumsum, torch.diff, torch.tril, torch.triu),
    *("cumsum", "diff", "new_full", "new_ones", "new_zeros", "reshape", "squeeze", "tril", "triu"),
    *("unsqueeze", "view"),
}
"""Functions, and methods by name, that do the same each time and write to no operand."""
_TORCHS = {"_operator", "torch", "torch._C._nn", "torch.nn.functional"}
"""Modules whose functions say by their names, or are told, whether they write to an operand."""
_IN_PLACE = {"setitem", "iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod"}
_IN_PLACE |= {"imul", "ior", "ipow", "irshift", "isub", "itruediv", "ixor"}
_CPU = torch.device("cpu")


def without_masks(gm: fx.GraphModule) -> fx.GraphModule:
    """Dynamo's graph, or a copy of it in which attention reads no mask that it does not need.

    Left alone: masks that are inputs or follow from some (what hides padding), that are larger than
    2**31 elements, that something may write to, or by whose shape a result would be larger. What
    the graph checkpoints is part of it, and changed in place.
    """
    graphs = _Graphs(gm)
    found = [
        (node, causal) for node in graphs.attention() if (causal := graphs.causal(node)) is not None
    ]
    if not found:
        return gm
    log.info("hot: %d attentions lose masks that hide nothing, or just the future", len(found))
    own = twin(gm)
    same = dict(zip(gm.graph.nodes, own.graph.nodes, strict=True))
    for node, causal in found:
        _unmask(same.get(node, node), causal)
    for module in (own, *(module for module, _ in checkpointed(gm))):
        module.recompile()
    return own


def checkpointed(gm: fx.GraphModule) -> list[tuple[fx.GraphModule, fx.Node]]:
    """The graphs that a graph checkpoints, each called once, with the calls."""
    calls = [n for n in gm.graph.nodes if n.target is CHECKPOINT and isinstance(n.args[0], fx.Node)]
    times = Counter(str(node.args[0].target) for node in calls)
    named = ((getattr(gm, name := str(n.args[0].target), None), n, times[name]) for n in calls)
    return [(m, n) for m, n, k in named if isinstance(m, fx.GraphModule) and k == 1]


def argument(node: fx.Node, place: int, name: str) -> Any:
    """What a function is called with by place or by name; None if it is not."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def _mask(node: fx.Node) -> Any:
    """What an attention is masked with."""
    return argument(node, 3, "attn_mask")


def traced_with(node: Any) -> Tensor | None:
    """What Dynamo traced a node with."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def _fits(attention: fx.Node) -> bool:
    """Every size of the mask is 1 or that of the scores, which so are no larger without it."""
    mask, query, key = map(traced_with, (_mask(attention), *attention.args[:2]))
    if mask is None or query is None or key is None:
        return False
    scores = (*query.shape[:-1], key.shape[-2])
    sizes = list(zip(reversed(mask.shape), reversed(scores), strict=False))
    known = (statically_known_true(a == 1) or statically_known_true(a == b) for a, b in sizes)
    return mask.ndim <= len(scores) and all(known)


class _Graphs:
    """A graph of Dynamo's and those that it checkpoints: what is known of their values."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._calls: list[fx.Node] = []
        """Of checkpointed graphs that are looked into."""
        self._outer: dict[fx.Node, fx.Node] = {}
        """By an input of a checkpointed graph: what it is given."""
        self._graphs = [gm.graph]
        self._known: dict[fx.Node, bool | None] = {}
        self._values: dict[fx.Node, Any] = {}
        for inner, call in checkpointed(gm):
            self._calls.append(call)
            self._graphs.append(inner.graph)
            pairs = zip(inner.graph.find_nodes(op="placeholder"), call.args[1:], strict=False)
            self._outer.update((own, arg) for own, arg in pairs if isinstance(arg, fx.Node))

    def attention(self) -> Iterator[fx.Node]:
        """Those with a mask, which may go by its shape."""
        for graph in self._graphs:
            for node in graph.find_nodes(op="call_function", target=ATTENTION):
                if _fits(node) and not argument(node, 5, "is_causal"):
                    yield node

    def causal(self, attention: fx.Node) -> bool | None:
        """True: its mask hides the future and no more. False: nothing. None: neither is known."""
        mask = _mask(attention)
        mask = self._outer.get(mask, mask)
        if mask not in self._known:
            self._known[mask] = self._hides(mask)
        return self._known[mask]

    def _hides(self, mask: fx.Node) -> bool | None:
        base = mask
        while base.op == "call_method" and base.target in _REPEAT:  # by sizes that may be dynamic
            base = base.args[0]  # type: ignore[assignment]
        try:
            with torch.no_grad(), _CPU:
                causal = self._compared(base, traced_with(mask))
            return None if self._may_change(mask) else causal
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
            return None  # it follows from an input, or by what is not computed here

    def _compared(self, base: fx.Node, mask: Tensor | None) -> bool | None:
        """As :meth:`causal`, of a mask that repeats ``base``; a block of rows after the other."""
        sizes = _sizes(base)
        if not sizes or mask is None or math.prod(sizes) > _MOST:
            return None
        ends = [*sizes[-2:], *mask.shape[-2:]]
        square = len(ends) == 4 and all(isinstance(n, int) for n in ends) and len(set(ends)) == 1
        rows = sizes[-2] if len(sizes) > 1 else 1
        step = max(1, _BLOCK * rows // max(math.prod(sizes), 1))
        everything, causal = True, square
        for first in range(0, rows, step):
            last = min(first + step, rows)
            shown = _shown(self._rows(base, first, last))
            everything = everything and bool(shown.all())
            if causal:
                past = torch.arange(rows) <= torch.arange(first, last)[:, None]
                causal = torch.equal(shown, past.expand_as(shown))
            if not everything and not causal:
                return None
        return not everything

    def _rows(self, node: Any, first: int, last: int) -> Any:
        """A block of a matrix's rows, from those of what it is computed of by element."""
        sizes = _sizes(node)
        if len(sizes) < 2 or sizes[-2] == 1:
            return self._value(node)

        def part(operand: Any) -> Any:
            ours = _sizes(operand)[-2:-1] == sizes[-2:-1]
            return self._rows(operand, first, last) if ours else self._value(operand)

        if node.target in _BY_ELEMENT and _is_pure(node):
            return _call(node, part)
        return self._value(node)[..., first:last, :]

    def _value(self, node: Any) -> Any:
        """What ``node`` is in every step, on the CPU.

        Raises:
            LookupError: it follows from an input, or is not to be computed here.
        """
        if not isinstance(node, fx.Node):
            return _CPU if isinstance(node, (str, torch.device)) else node
        node = self._outer.get(node, node)
        if node not in self._values:
            value = traced_with(node)
            if value is not None and math.prod(_sizes(node)) * value.itemsize > _MOST_BYTES:
                raise LookupError(f"{node} is too large")
            if not _is_pure(node):
                raise LookupError(f"{node} is no constant")
            self._values[node] = _call(node, self._value)
        return self._values[node]

    def _may_change(self, mask: fx.Node) -> bool:
        """Something may write to what it is made of, or to a view of that."""
        made, ahead = set[fx.Node](), [mask]
        while ahead:
            node = ahead.pop()
            if node not in made:
                made.add(node)
                ahead += [self._outer.get(n, n) for n in node.all_input_nodes]
        nodes = (n for graph in self._graphs for n in graph.nodes if n not in self._calls)
        return may_be_written(made, nodes)


def may_be_written(made: Iterable[fx.Node], nodes: Iterable[fx.Node]) -> bool:
    """One of ``nodes`` may write to what is ``made``, or to what shares memory with that."""
    ours = {_storage(node) for node in made} - {None}
    reads = (n for n in nodes if any(_storage(a) in ours for a in n.all_input_nodes))
    return any(map(_may_write, reads))


def _call(node: fx.Node, value_of: Callable[[Any], Any]) -> Any:
    """What a node's function makes of the values of its arguments."""
    args = fx.node.map_aggregate(node.args, value_of)
    kwargs = fx.node.map_aggregate(node.kwargs, value_of)
    function = getattr(Tensor, node.target) if isinstance(node.target, str) else node.target
    return function(*args, **kwargs)  # type: ignore[operator, misc]


def _shown(value: Any) -> Tensor:
    """Which keys a mask shows.

    Raises:
        ValueError: it changes their scores otherwise.
    """
    if value.dtype == torch.bool:
        return value
    shown, hidden = value == 0, value <= torch.finfo(value.dtype).min
    if not (shown | hidden).all():
        raise ValueError("a mask that weighs")
    return shown


def _sizes(node: Any) -> tuple[int, ...]:
    """Of a tensor; none if one of them is dynamic: to compare that would be a guard."""
    value = traced_with(node)
    sizes = () if value is None else tuple(value.shape)
    return sizes if all(isinstance(n, int) for n in sizes) else ()


def _storage(node: fx.Node) -> int | None:
    value = traced_with(node)
    return None if value is None else value.untyped_storage()._cdata


def _is_pure(node: fx.Node) -> bool:
    called = node.op in ("call_function", "call_method")
    return called and node.target in _PURE and "out" not in node.kwargs


def _may_write(node: fx.Node) -> bool:
    """By its name, as operators are called that write to an operand; or it is none of torch's."""
    if _is_pure(node) or node.op == "output":
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "_")
    torchs = node.op == "call_method" or getattr(node.target, "__module__", None) in _TORCHS
    told = "out" in node.kwargs or any(a is True for a in (*node.args, node.kwargs.get("inplace")))
    return not torchs or name.endswith("_") or name in _IN_PLACE or told


def _unmask(attention: fx.Node, causal: bool) -> None:
    """Take its mask from it, and what only the mask was made of from the graph."""
    ahead = {_mask(attention): None}
    given = dict(zip(("attn_mask", "dropout_p", "is_causal"), attention.args[3:], strict=False))
    attention.kwargs = {**given, **attention.kwargs, "attn_mask": None, "is_causal": causal}
    attention.args = attention.args[:3]
    while ahead:
        node, _ = ahead.popitem()
        if not node.users and node.op != "placeholder":
            ahead.update(dict.fromkeys(node.all_input_nodes))
            node.graph.erase_node(node)

"""One of Dynamo's graphs in stretches: what crosses between them is kept, the rest computed again.

The last stretch may be a head's: from its logits on, which then exist in chunks of rows only.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from hot_compile.detached_logits import PRODUCTS
from hot_compile.observing.draws import Draws, draws_numbers
from hot_compile.passes.base.site import bytes_of, hint
from hot_compile.runtime.head.products import chunk_rows

_MARGIN = 1.3
"""What operators keep to themselves, and what the allocator cannot use, of what is predicted.
Predictions are 1.1 to 1.9 times what a ViT, a BERT and a GPT took on a CPU."""
_NEAR = 16
"""So many nodes to either side of where stretches would be equal, they may end."""
_INPLACE = (operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv)


@dataclasses.dataclass(frozen=True)
class Head:
    """The end of a graph, from the first of its logits on."""

    nodes: list[fx.Node]
    bytes: int
    """That it takes, its logits in chunks."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a graph is run."""

    stretches: list[list[fx.Node]]
    head: Head | None = None
    """It computes the last of them."""


class Sizes:
    """Bytes that each node of one of Dynamo's graphs makes, and what it makes them of."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.nodes = [n for n in gm.graph.nodes if n.op.startswith("call_")]
        self.made: dict[fx.Node, int] = {}
        """A view makes nothing."""
        self.owners: dict[fx.Node, fx.Node] = {}
        """What made the memory that a node's value lies in, perhaps an input of the graph."""
        first: dict[int, fx.Node] = {}
        for node in gm.graph.nodes:
            value = _value(node)
            if value is not None:
                owner = self.owners[node] = first.setdefault(_memory(value), node)
                called = node.op.startswith("call_") and owner is node
                self.made[node] = bytes_of(value) if called else 0
        self._gradient = max(map(_bytes, gm.graph.find_nodes(op="placeholder")), default=0)
        self.together = _together(self)

    def cut(self, count: int, head: Head | None = None) -> Cut:
        """About so many stretches of about equally many bytes, between which little is kept; then
        the head."""
        nodes = self.nodes[: len(self.nodes) - len(head.nodes)] if head else self.nodes
        made = list(itertools.accumulate(map(self._bytes, nodes)))
        first, stretches = 0, list[list[fx.Node]]()
        for number in range(1, count):
            place = bisect.bisect_right(made, made[-1] * number / count if made else 0)
            near = range(max(first + 1, place - _NEAR), min(len(nodes), place + _NEAR))
            last = min(near, key=lambda n: self._crossing[n], default=first)
            if last > first and nodes[last] not in self.together:
                stretches.append(nodes[first:last])
                first = last
        stretches += [nodes[first:], *([head.nodes] if head else [])]
        return Cut(list(filter(None, stretches)), head)

    @functools.cached_property
    def _crossing(self) -> list[float]:
        """By place of a node: bytes that are made before it and read from there on."""
        places = {node: place for place, node in enumerate(self.nodes)}
        changes = [0] * (len(self.nodes) + 1)
        for owner, last in self._last_reads(places).items():
            changes[places[owner] + 1] += self.made[owner]
            changes[last + 1] -= self.made[owner]
        forbidden = (math.inf if node in self.together else 0 for node in self.nodes)
        return [c + f for c, f in zip(itertools.accumulate(changes), forbidden, strict=False)]

    def _last_reads(self, places: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
        last: dict[fx.Node, int] = {}
        for node, owner in self.owners.items():
            if owner in places:
                read = max((places.get(user, len(places) - 1) for user in node.users), default=0)
                last[owner] = max(read, places[owner], last.get(owner, 0))
        return last

    def need(self, cut: Cut) -> int:
        """Bytes that it takes: what crosses between, and the largest stretch, or the head."""
        front = cut.stretches[:-1] if cut.head else cut.stretches
        made = max((sum(map(self._bytes, stretch)) for stretch in front), default=0)
        given = {self.owners.get(n) for s in cut.stretches[:-1] for n in _given(s)}
        between = sum(self._bytes(n) for n in given if n is not None)
        copies = (self._bytes(n) * self._copies(n, cut) for stretch in front for n in stretch)
        within = max(copies, default=0)
        head = between + cut.head.bytes if cut.head else 0
        return max(int(_MARGIN * (made + between + within)), head) + self._gradient

    def _copies(self, node: fx.Node, cut: Cut) -> int:
        """How many times its bytes an operator may keep to itself: a loss computes in fp32."""
        value = _value(node)
        half = value is not None and value.dtype in (torch.bfloat16, torch.float16)
        return 6 if half and not cut.head else 3

    def _bytes(self, node: fx.Node) -> int:
        return self.made.get(node, 0)


def can_be_cut(sizes: Sizes) -> bool:
    """Nothing is changed in place that was there before the graph, and is read elsewhere in it."""
    changed = [n for n in map(_changes, sizes.nodes) if n is not None]
    owners = {sizes.owners.get(n) for n in changed}
    given = [n for n in owners if n is not None and not n.op.startswith("call_")]
    readers = [[u for n, o in sizes.owners.items() if o is g for u in n.users] for g in given]
    return None not in owners and all(len(set(each)) <= 1 for each in readers)


def run(
    gm: fx.GraphModule,
    args: Sequence[Any],
    cut: Cut,
    draws: Draws | None,
    run_head: Callable[..., Sequence[Any]],
) -> Sequence[Any]:
    """The graph's outputs; between stretches only what crosses is kept, the rest computed again.

    Args:
        gm, args, cut: the graph, its inputs, and how it is cut.
        draws: where its random numbers come from, if it draws any.
        run_head: given a head's nodes and what they read: what later nodes, or the caller, read of
            them.
    """
    env: dict[fx.Node, Any] = dict(zip(gm.graph.find_nodes(op="placeholder"), args, strict=True))
    for node in gm.graph.find_nodes(op="get_attr"):
        env[node] = fx.Interpreter(gm).run_node(node)
    left = set(gm.graph.nodes)
    for stretch in cut.stretches:
        needs, gives = _needed(stretch), _given(stretch)
        values = [env[n] for n in needs]
        if cut.head and stretch is cut.head.nodes:
            made = run_head(stretch, *values)
        else:
            mark = draws.mark if draws else None
            computed = functools.partial(_stretch, gm, stretch, needs, gives, draws, mark)
            with set_checkpoint_early_stop(False):  # a mode that is switched on is to go off
                made = checkpoint(
                    computed, *values, use_reentrant=False, preserve_rng_state=draws is not None
                )
        env.update(zip(gives, made, strict=True))
        left.difference_update(stretch)
        for node in needs:
            if left.isdisjoint(node.users):
                del env[node]
        del values, made
    results: Any = gm.graph.output_node().args[0]
    return fx.node.map_arg(results, env.__getitem__)


def _stretch(
    gm: fx.GraphModule,
    stretch: Sequence[fx.Node],
    needs: Sequence[fx.Node],
    gives: Sequence[fx.Node],
    draws: Draws | None,
    mark: Any,
    *values: Any,
) -> tuple[Any, ...]:
    interpreter = fx.Interpreter(gm)
    interpreter.env = dict(zip(needs, values, strict=True))
    last = _last_reads(stretch, gives)
    with draws.since(mark) if draws else contextlib.nullcontext():
        for node in stretch:
            interpreter.env[node] = interpreter.run_node(node)
            for read in last.get(node, ()):
                del interpreter.env[read]
    return tuple(interpreter.env[n] for n in gives)


def _last_reads(
    stretch: Sequence[fx.Node], gives: Sequence[fx.Node]
) -> dict[fx.Node, list[fx.Node]]:
    """By node: what nobody reads behind it."""
    readers = {read: node for node in stretch for read in (node, *node.all_input_nodes)}
    last: dict[fx.Node, list[fx.Node]] = {}
    for read, node in readers.items():
        if read not in gives:
            last.setdefault(node, []).append(read)
    return last


def find_head(sizes: Sizes, least: int) -> Head | None:
    """The head of a graph, if logits of at least so many bytes are about the largest it makes."""
    most = max((_elements(n) for n, made in sizes.made.items() if made), default=0)
    for place, node in enumerate(sizes.nodes):
        logits, x = _value(node), next(iter(map(_value, node.all_input_nodes)), None)
        large = 2 * _elements(node) > most and _bytes(node) >= least
        if not large or node.target not in PRODUCTS or logits is None or x is None:
            continue
        nodes = sizes.nodes[place:]
        if node in sizes.together or any(map(draws_numbers, nodes)):
            return None
        rows, (outputs, inputs) = _elements(node), map(hint, (logits.shape[-1], x.shape[-1]))
        rows, size = rows // outputs, logits.dtype.itemsize
        chunk = chunk_rows(rows, outputs, inputs, size, True) * outputs * size
        small = sum(sizes.made[n] for n in nodes if 2 * _elements(n) < _elements(node))
        weights = [_value(n) for n in node.all_input_nodes[1:]]
        trained = any(w is not None and w.requires_grad for w in weights)
        each = (10 if size == 2 else 8) * trained  # g_w in fp32, that scaled, the weight in halves
        return Head(nodes, int(_MARGIN * (small + chunk)) + each * outputs * inputs)
    return None


def without_logits(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph, changed in place, without outputs that are detached: nobody's gradient needs them.

    They are None instead.
    """
    output = gm.graph.output_node()
    results: Any = output.args[0]
    left = [n for n in results if isinstance(n, fx.Node) and n.target == "detach"]
    output.args = (tuple(None if n in left else n for n in results),)
    while left:
        node = left.pop()
        if not node.users and node.op.startswith("call_") and _changes(node) is None:
            left.extend(node.all_input_nodes)
            gm.graph.erase_node(node)
    gm.recompile()
    return gm


def part(gm: fx.GraphModule, nodes: Sequence[fx.Node]) -> fx.GraphModule:
    """Some nodes of a graph as one of its own: from what they read to what is read of them."""
    graph, same = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in _needed(nodes):
        same[node] = graph.placeholder(node.name)
        same[node].meta = dict(node.meta)
    for node in nodes:
        same[node] = graph.node_copy(node, same.__getitem__)
    graph.output(tuple(same[n] for n in _given(nodes)))
    return fx.GraphModule(gm, graph)


def _needed(stretch: Sequence[fx.Node]) -> list[fx.Node]:
    own = set(stretch)
    return list(dict.fromkeys(n for s in stretch for n in s.all_input_nodes if n not in own))


def _given(stretch: Sequence[fx.Node]) -> list[fx.Node]:
    """What later stretches, or the caller, read of this one."""
    own = set(stretch)
    return [n for n in stretch if any(user not in own for user in n.users)]


def _together(sizes: Sizes) -> set[fx.Node]:
    """In front of these there is no cut: a mode is switched, or what is read is to be changed."""
    places = {node: place for place, node in enumerate(sizes.nodes)}
    found, open_modes, off = set(), 0, False
    for place, node in enumerate(sizes.nodes):
        if open_modes or off:
            found.add(node)
        name = _name(node)
        open_modes += ("_enter_autocast" in name) + ("increment_nesting" in name)
        open_modes -= ("_exit_autocast" in name) + ("decrement_nesting" in name)
        off = not node.args[0] if "grad_enabled" in name else off
        changed = _changes(node)
        made = places.get(sizes.owners.get(changed, node)) if changed else None
        if made is not None:
            found.update(sizes.nodes[made + 1 : place + 1])
    return found


def _changes(node: fx.Node) -> fx.Node | None:
    """What it changes in place."""
    name = _name(node)
    inplace = name.endswith("_") and not name.endswith("__")
    ours = node.kwargs.get("inplace") or node.target in _INPLACE
    changed = node.args[0] if (inplace or ours) and node.args else node.kwargs.get("out")
    return changed if isinstance(changed, fx.Node) and _value(changed) is not None else None


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _value(node: fx.Node) -> Tensor | None:
    value = node.meta.get("example_value")
    return value if isinstance(value, Tensor) else None


def _memory(value: Tensor) -> int:
    return value.untyped_storage()._cdata


def _bytes(node: fx.Node) -> int:
    value = _value(node)
    return 0 if value is None else bytes_of(value)


def _elements(node: fx.Node) -> int:
    value = _value(node)
    return 0 if value is None else bytes_of(value) // value.dtype.itemsize

"""Where one of Dynamo's graphs can be cut, how much memory its parts take, and its head.

A head goes from its logits on, which exist in chunks of rows only.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

from hot_compile.detached_logits import PRODUCTS
from hot_compile.observing.draws import draws_numbers
from hot_compile.passes.base.site import bytes_of, hint
from hot_compile.runtime.head.products import chunk_rows

_MARGIN = 1.3
"""What a head keeps to itself, and what the allocator cannot use, of what is predicted of it."""
_CROSSING = 4
"""So many times what crosses counts, beside how unequal both sides of a cut are."""
_REGIONS = (
    torch.ops.higher_order.tag_activation_checkpoint,
    torch.ops.higher_order.wrap_activation_checkpoint,
)
_INPLACE = {operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv}
_INPLACE |= {operator.ifloordiv, operator.imod, operator.ipow, operator.imatmul}
_INPLACE |= {operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift}


@dataclasses.dataclass(frozen=True)
class Head:
    """The end of a graph, from the first of its logits on."""

    nodes: list[fx.Node]
    bytes: int
    """That it takes, its logits in chunks."""
    weights: int
    """Of these for the gradients of its weights."""


class Sizes:
    """Bytes that each node of one of Dynamo's graphs makes, and what it makes them of."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.nodes = [n for n in gm.graph.nodes if n.op.startswith("call_")]
        self.places = {node: place for place, node in enumerate(self.nodes)}
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
        self.together = _together(self)

    def backward(self, node: fx.Node) -> int:
        """Bytes of the gradients that its backward makes."""
        return sum(map(_bytes, node.all_input_nodes))

    def need(self, first: int, last: int) -> int:
        """Bytes that forward and backward of these nodes take, roughly."""
        largest = max((self.backward(n) for n in self.nodes[first:last]), default=0)
        return self._sums[last] - self._sums[first] + largest

    def middle(self, first: int, last: int) -> int | None:
        """A place between these to cut at: in two about equal parts, where little crosses."""
        sums, crossing = self._sums, self._crossing
        allowed = [p for p in range(first + 1, last) if crossing[p] < math.inf]

        def cost(place: int) -> float:
            larger = max(sums[place] - sums[first], sums[last] - sums[place])
            return larger + _CROSSING * crossing[place]

        return min(allowed, key=cost, default=None)

    def crossing(self, place: int) -> list[fx.Node]:
        """Nodes in front of a place that are read from there on."""
        front = (n for n in self.nodes[:place] if not enters_autocast(n))
        return [n for n in front if self.last_read(n) >= place]

    def autocasts(self, node: fx.Node) -> list[fx.Node]:
        """Those that are entered in front of a node, and not left there, outermost first."""
        entered: dict[fx.Node, None] = {}
        for before in self.nodes[: self.places[node]]:
            if enters_autocast(before):
                entered[before] = None
            elif leaves_autocast(before):
                entered.pop(before.args[0])  # type: ignore[arg-type]
        return list(entered)

    def last_read(self, node: fx.Node) -> int:
        """The place of the last node that reads it; -1: none does."""
        return max((self.places.get(user, -1) for user in node.users), default=-1)

    @functools.cached_property
    def _sums(self) -> list[int]:
        """By place: bytes that are made in front of it."""
        return [0, *itertools.accumulate(self.made.get(n, 0) for n in self.nodes)]

    @functools.cached_property
    def _crossing(self) -> list[float]:
        """By place: bytes that are made in front of it and read from there on; infinite: no cut."""
        changes = [0.0] * (len(self.nodes) + 1)
        last: dict[fx.Node, int] = {}
        for node, owner in self.owners.items():
            last[owner] = max(last.get(owner, -1), self.last_read(node))
        for owner, place in last.items():
            if owner in self.places and place > self.places[owner]:
                changes[self.places[owner] + 1] += self.made[owner]
                changes[place + 1] -= self.made[owner]
        forbidden = (math.inf if node in self.together else 0 for node in self.nodes)
        return [c + f for c, f in zip(itertools.accumulate(changes), forbidden, strict=False)]


def can_be_cut(sizes: Sizes) -> bool:
    """Nothing is changed in place that was there before the graph, and is read elsewhere in it."""
    changed = [n for n in map(_changes, sizes.nodes) if n is not None]
    owners = {sizes.owners.get(n) for n in changed}
    given = [n for n in owners if n is not None and not n.op.startswith("call_")]
    readers = [[u for n, o in sizes.owners.items() if o is g for u in n.users] for g in given]
    return None not in owners and all(len(set(each)) <= 1 for each in readers)


def last_reads(
    stretch: Sequence[fx.Node], kept: Mapping[fx.Node, Any]
) -> dict[fx.Node, list[fx.Node]]:
    """By node of a stretch: what nobody in it reads behind that, and nobody keeps."""
    readers = {read: node for node in stretch for read in (node, *node.all_input_nodes)}
    last: dict[fx.Node, list[fx.Node]] = {}
    for read, node in readers.items():
        if read not in kept:
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
        whole = node in sizes.together or sizes.autocasts(node)
        if whole or any(map(draws_numbers, nodes)):
            return None
        rows, (outputs, inputs) = _elements(node), map(hint, (logits.shape[-1], x.shape[-1]))
        rows, size = rows // outputs, logits.dtype.itemsize
        chunk = chunk_rows(rows, outputs, size, outputs * inputs) * outputs * size
        small = sum(sizes.made.get(n, 0) for n in nodes if 2 * _elements(n) < _elements(node))
        weights = [_value(n) for n in node.all_input_nodes[1:]]
        trained = any(w is not None and w.requires_grad for w in weights)
        each = (10 if size == 2 else 8) * trained  # g_w in fp32, that scaled, the weight in halves
        weight = each * outputs * inputs
        return Head(nodes, int(_MARGIN * (small + chunk)) + weight, weight)
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


def without_regions(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph in which what ``torch.utils.checkpoint`` runs is part of the graph.

    Run operator by operator a region of its own is not computed again in every torch: 2.11 keeps
    all that it makes. Nor could it be cut.
    """
    flat = fx.GraphModule(gm, fx.Graph())
    flat.graph.output(_flattened(flat, gm, {}))
    flat.recompile()
    return flat


def _flattened(flat: fx.GraphModule, gm: fx.GraphModule, same: dict[fx.Node, Any]) -> Any:
    """Write ``gm``'s nodes behind those of ``flat``, regions' in their place; gives its results.

    ``same``: what stands for the inputs of ``gm``, if they are no inputs of ``flat``.
    """
    for node in gm.graph.nodes:
        if node in same or (node.op == "get_attr" and all(map(_region, node.users))):
            continue
        if node.op == "output":
            break
        if (region := _region(node)) is not None:
            given = zip(region.graph.find_nodes(op="placeholder"), node.args[1:], strict=True)
            inputs = {n: same[a] if isinstance(a, fx.Node) else a for n, a in given}
            same[node] = _flattened(flat, region, inputs)
        elif node.target is operator.getitem and isinstance(same.get(node.args[0]), (tuple, list)):
            same[node] = same[node.args[0]][node.args[1]]
        else:
            same[node] = flat.graph.node_copy(node, same.__getitem__)
            if node.op in ("get_attr", "call_module"):
                same[node].target = name = f"own_{len(flat.graph.nodes)}"
                setattr(flat, name, operator.attrgetter(node.target)(gm))
    return fx.node.map_arg(gm.graph.output_node().args[0], same.__getitem__)


def _region(node: fx.Node) -> fx.GraphModule | None:
    """What ``torch.utils.checkpoint`` runs there, given nothing by name; None: nothing."""
    if node.target not in _REGIONS:
        return None
    held: Any = node.args[0]
    region = operator.attrgetter(held.target)(node.graph.owning_module)
    given = len(node.args) - 1 == len(region.graph.find_nodes(op="placeholder"))
    return region if given else None


def enters_autocast(node: fx.Node) -> bool:
    """It is the begin of ``with torch.autocast``; its value is what ends it."""
    return "_enter_autocast" in _name(node)


def leaves_autocast(node: fx.Node) -> bool:
    """It is the end of the one that it reads."""
    return "_exit_autocast" in _name(node)


def part(gm: fx.GraphModule, nodes: Sequence[fx.Node]) -> fx.GraphModule:
    """Some nodes of a graph as one of its own: from what they read to what is read of them."""
    graph, same = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in needed(nodes):
        same[node] = graph.placeholder(node.name)
        same[node].meta = dict(node.meta)
    for node in nodes:
        same[node] = graph.node_copy(node, same.__getitem__)
    graph.output(tuple(same[n] for n in given(nodes)))
    return fx.GraphModule(gm, graph)


def needed(stretch: Sequence[fx.Node]) -> list[fx.Node]:
    """What a stretch reads of others."""
    own = set(stretch)
    read = dict.fromkeys(n for s in stretch for n in s.all_input_nodes if n not in own)
    return [n for n in read if not enters_autocast(n)]


def given(stretch: Sequence[fx.Node]) -> list[fx.Node]:
    """What later stretches, or the caller, read of this one."""
    own = set(stretch)
    read = (n for n in stretch if any(user not in own for user in n.users))
    return [n for n in read if not enters_autocast(n)]


def _together(sizes: Sizes) -> set[fx.Node]:
    """In front of these there is no cut: where ``torch.func`` transforms something, where gradients
    are off, or what is read is to be changed."""
    places = sizes.places
    found, open_modes, off = set(), 0, False
    for place, node in enumerate(sizes.nodes):
        if open_modes or off:
            found.add(node)
        name = _name(node)
        open_modes += ("increment_nesting" in name) - ("decrement_nesting" in name)
        off = not node.args[0] if "grad_enabled" in name else off
        if isinstance(node.meta.get("example_value"), (tuple, list)):
            found.update(sizes.nodes[place + 1 : sizes.last_read(node) + 1])
        changed = _changes(node)
        made = places.get(sizes.owners.get(changed, node)) if changed else None
        if made is not None:
            found.update(sizes.nodes[made + 1 : place + 1])
    return found


def _changes(node: fx.Node) -> fx.Node | None:
    """What it changes in place."""
    name = _name(node)
    inplace = name.endswith("_") and not name.endswith("__")
    asked = _is_asked(node) or node.target in _INPLACE
    changed = node.args[0] if (inplace or asked) and node.args else node.kwargs.get("out")
    return changed if isinstance(changed, fx.Node) and _value(changed) is not None else None


def _is_asked(node: fx.Node) -> bool:
    """It is called with ``inplace``, by name or, as modules call ``leaky_relu``, by place."""
    place = _place_of_inplace(node.target)
    given = node.args[place] if place is not None and place < len(node.args) else None
    return bool(node.kwargs.get("inplace", given))


@functools.cache
def _place_of_inplace(function: Any) -> int | None:
    """Among the arguments of a function of Python's; None: it has none, or says nothing of them."""
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    return parameters.index("inplace") if "inplace" in parameters else None


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _value(node: fx.Node) -> Tensor | None:
    value = node.meta.get("example_value")
    while isinstance(value, Tensor) and is_functorch_wrapped_tensor(value):
        value = get_unwrapped(value)
    return value if isinstance(value, Tensor) else None


def _memory(value: Tensor) -> int:
    return value.untyped_storage()._cdata


def _bytes(node: fx.Node) -> int:
    value = _value(node)
    return 0 if value is None else bytes_of(value)


def _elements(node: fx.Node) -> int:
    value = _value(node)
    return 0 if value is None else bytes_of(value) // value.dtype.itemsize

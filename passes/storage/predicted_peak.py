"""How high a step's memory rises above what stands before it, by its two graphs: a prediction.

Every tensor that a kernel writes takes its bytes from the place where it is made to the last place
where it is read; what crosses does so from the forward into the backward, gradients until the
backward is over. What Inductor works out inside a kernel takes none. Parameters and inputs stand
before. What a kernel needs for itself (a library's workspace), and another order of kernels than
the graph's, are not foreseen: that is measured.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Set

import torch
from torch import fx

from hot_compile.passes.base.graph import (
    aten,
    is_tangent,
    made_of_tangents,
    placeholders,
    returned,
    through_views,
)
from hot_compile.passes.base.operators import VIEWS
from hot_compile.passes.base.schemes import Scheme
from hot_compile.passes.base.site import bytes_of
from hot_compile.passes.storage.crossers import Crosser, base, saved_pairs
from hot_compile.passes.storage.prices import fuses, held_bytes

Fused = Callable[[Crosser, Scheme], bool]
"""Whether the kernels that read a tensor restore it on their way, so that it is never whole."""
_NONE: frozenset[Crosser] = frozenset()
LEAST = 2**25
"""Bytes by which a step may rise higher for a layer's sake."""
_TOLERANCE = 100
"""Which part of its peak it may, too."""


class Rise:
    """Of a step whose forward and backward are these, as they are before anything is stored."""

    def __init__(
        self, forward: fx.Graph, backward: fx.Graph, num_fwd_outputs: int, fused: Fused | None
    ) -> None:
        self._fused = fused
        self._ahead, self._back = _Half(forward), _Half(backward)
        self._turn = len(forward.nodes)
        self._length = self._turn + len(backward.nodes)
        seen = {base(n) for n in returned(forward)[:num_fwd_outputs] if isinstance(n, fx.Node)}
        self._pairs: dict[fx.Node, list[tuple[fx.Node, fx.Node]]] = {}
        for saved, restored in saved_pairs(forward, backward, num_fwd_outputs):
            self._pairs.setdefault(base(saved), []).append((saved, restored))
        self._fixed = [0] * (self._length + 1)
        for node in self._ahead.written:
            if node not in self._pairs:
                end = self._length - 1 if node in seen else self._ahead.last[node]
                self._add(self._fixed, self._ahead.place[node], end, _bytes(node))
        given = [node for node in placeholders(backward) if is_tangent(node)]
        ends = {base(n) for n in returned(backward) if isinstance(n, fx.Node)}
        for node in (*given, *self._back.written):
            first = 0 if node.op == "placeholder" else self._back.place[node]
            last = len(backward.nodes) - 1 if node in ends else self._back.last[node]
            self._add(self._fixed, self._turn + first, self._turn + last, _bytes(node))

    def __call__(
        self, chosen: Mapping[Crosser, Scheme] | None = None, hosted: Set[Crosser] = _NONE
    ) -> int:
        """Bytes at the highest place, with what crosses stored by these schemes.

        ``hosted``: what waits in host memory between forward and backward.
        """
        return max(self.curve(chosen, hosted))

    def held(
        self, chosen: Mapping[Crosser, Scheme] | None = None, hosted: Set[Crosser] = _NONE
    ) -> int:
        """Bytes between forward and backward."""
        return self.curve(chosen, hosted)[self._turn - 1]

    def curve(
        self, chosen: Mapping[Crosser, Scheme] | None = None, hosted: Set[Crosser] = _NONE
    ) -> list[int]:
        """Bytes at every place of the forward, then of the backward."""
        changes, schemes = self._fixed.copy(), chosen or {}
        elsewhere = {c for c, s in schemes.items() if s is not Scheme.EXACT} | hosted
        stored = {c.saved: (c, schemes.get(c, Scheme.EXACT)) for c in elsewhere}
        fetched = self._fetched(hosted)
        for memory, pairs in self._pairs.items():
            begin, end = self._ahead.place[memory], self._ahead.last[memory]
            kept = [restored for saved, restored in pairs if saved not in stored]
            if kept:
                end = self._turn + max(map(self._back.last.__getitem__, kept))
            self._add(changes, begin, end, _bytes(memory))
            for saved, restored in pairs:
                if saved in stored:
                    self._add_stored(changes, *stored[saved], restored, fetched.get(saved))
        return list(itertools.accumulate(changes[:-1]))

    def _fetched(self, hosted: Set[Crosser]) -> dict[fx.Node, int]:
        """Where copies back from the host begin: where the one before is wanted."""
        wanted = sorted((self._turn + self._back.span(c.restored)[0], c.saved) for c in hosted)
        begins = [self._turn, *(place for place, _ in wanted)]
        return {saved: begin for begin, (_, saved) in zip(begins, wanted, strict=False)}

    def _add_stored(
        self,
        changes: list[int],
        crosser: Crosser,
        scheme: Scheme,
        restored: fx.Node,
        fetched: int | None,
    ) -> None:
        """Packed behind the last use in the forward, whole from the first use on, if at all.

        ``fetched``: where it comes back from the host, if it waits there. What is copied from is a
        copy.
        """
        begin = self._ahead.last[base(crosser.saved)]
        whole, size = held_bytes(crosser, scheme)
        first, last = (self._turn + place for place in self._back.span(restored))
        if fetched is not None:
            self._add(changes, begin, begin, size if scheme is Scheme.EXACT else 2 * size)
            begin = fetched
        if scheme is Scheme.EXACT or (self._fused is not None and self._fused(crosser, scheme)):
            first = last
        else:
            self._add(changes, first, last, whole)
        self._add(changes, begin, first, size)

    @staticmethod
    def _add(changes: list[int], first: int, last: int, size: int) -> None:
        changes[first] += size
        changes[max(first, last) + 1] -= size


class Room:
    """How much a layer's backward may make until a step rises above what it does exact.

    Of a joint graph that is exact yet. What the forward makes and the backward reads waits in half
    of its bytes at most, if it is to be stored (``stores``): that room is there, too.
    """

    def __init__(self, joint: fx.Graph, stores: bool) -> None:
        self._joint, self._stores = joint, stores

    def __call__(self, first: fx.Node) -> int:
        """Where the layer's first exact product, ``first``, stands."""
        place, curve, waiting = self._curves
        peak, at = max(curve), place[first]
        spare = waiting[at] // 2 if self._stores else 0
        return peak + max(peak // _TOLERANCE, LEAST) - (curve[at] - _bytes(first)) + spare

    @functools.cached_property
    def _curves(self) -> tuple[dict[fx.Node, int], list[int], list[int]]:
        """Each node's place, bytes at every place, and those of them that cross."""
        graph, backward = self._joint, made_of_tangents(self._joint)
        half, ends = _Half(graph), {base(n) for n in returned(graph) if isinstance(n, fx.Node)}
        turn = min(half.place[n] for n in backward if n.op != "placeholder")
        last, again = dict(half.last), dict[fx.Node, int]()
        for node in half.written:
            if node not in backward and last[node] > turn and (source := _smaller(node)):
                last[source] = max(last[source], last[node])
                again[node] = last[node] = half.last_before(node, backward)
        every, waiting = ([0] * (len(graph.nodes) + 1) for _ in range(2))
        for node in half.written:
            if again.get(node, 0) >= 0:
                end = len(graph.nodes) - 1 if node in ends else last[node]
                Rise._add(every, half.place[node], end, _bytes(node))
                if node not in backward and end > turn and node not in ends:
                    Rise._add(waiting, half.place[node], end, _bytes(node))
        curve, crossing = (list(itertools.accumulate(c[:-1])) for c in (every, waiting))
        return half.place, curve, crossing


def _smaller(node: fx.Node) -> fx.Node | None:
    """What ``node`` is worked out of, element by element, if that takes less memory: it crosses
    then, and the backward's kernels work ``node`` out again."""
    source, size = node, _bytes(node)
    while _in_kernel(source) or source.target in VIEWS:
        large = [n for n in source.all_input_nodes if 4 * _bytes(n) >= size]
        if len(large) != 1:
            break
        source = large[0]
    source = base(source)
    return source if _bytes(source) < size else None


class _Half:
    """When each piece of memory of one graph is first written and last read."""

    def __init__(self, graph: fx.Graph) -> None:
        self.place: dict[fx.Node, int] = {node: place for place, node in enumerate(graph.nodes)}
        self._levels = levels = _levels(graph)
        self.written = [node for node in graph.nodes if _is_written(node, levels)]
        for node in self.written:  # a part is there when all of them are
            if node.target is operator.getitem:
                self.place[node] = self.place[node.args[0]]  # type: ignore[index]
        self.last: dict[fx.Node, int] = dict(self.place)
        self._first: dict[fx.Node, int] = {}
        for reader in graph.nodes:
            if reader.op == "output" or reader.target in VIEWS:
                continue
            for node in reader.all_input_nodes:
                memory, place = base(node), self.place[reader]
                for read in {node, memory}:
                    self.last[read] = max(self.last[read], place)
                    self._first.setdefault(read, place)

    def last_before(self, node: fx.Node, later: Set[fx.Node]) -> int:
        """Where ``node`` is last read but by ``later``; -1: that needs it nowhere in memory."""
        others = [user for user in through_views(node) if user not in later]
        if not _is_read(node, self._levels, others):
            return -1
        return max(self.place[user] for user in others)

    def span(self, node: fx.Node) -> tuple[int, int]:
        """First and last place where ``node`` is read."""
        last = self.last[node]
        return self._first.get(node, last), last


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return bytes_of(value) if isinstance(value, torch.Tensor) else 0


def _is_written(node: fx.Node, levels: Mapping[fx.Node, int]) -> bool:
    """``node`` is memory of its own: it is not a view, and not worked out within a kernel."""
    if node.op != "call_function" or node.target in VIEWS or not _bytes(node):
        return False
    if not _in_kernel(node):
        return True
    return _is_read(node, levels, through_views(node))


def _is_read(node: fx.Node, levels: Mapping[fx.Node, int], users: Iterable[fx.Node]) -> bool:
    """Some of ``users`` are no part of the kernel that makes ``node``."""
    return any(
        user.op == "output" or not _in_kernel(user) or levels[user] != levels[node]
        for user in users
    )


def _levels(graph: fx.Graph) -> dict[fx.Node, int]:
    """How many kernels that are not Inductor's lie before each node, at most.

    What is of one level and feeds each other may become one kernel. What only kernels of Inductor's
    read can be worked out where the first of them is.
    """
    levels: dict[fx.Node, int] = {}
    for node in graph.nodes:
        before = max((levels[given] for given in node.all_input_nodes), default=0)
        levels[node] = before + (node.op == "call_function" and not _passes(node))
    for node in reversed(graph.nodes):
        readers = list(node.users)
        if node.op == "call_function" and _passes(node) and readers and all(map(_passes, readers)):
            levels[node] = max(levels[node], min(levels[reader] for reader in readers))
    return levels


def _in_kernel(node: fx.Node) -> bool:
    """``fuses``, or values picked by index (of labels), or a constant, or one with another value in
    some places (labels' one-hot)."""
    base = node.args[0] if node.target is aten.scatter.value else node
    constant = isinstance(base, fx.Node) and base.target is aten.full.default
    return constant or node.target is aten.gather.default or fuses(node)


def _passes(node: fx.Node) -> bool:
    """It is a kernel of Inductor's, or none."""
    return _in_kernel(node) or node.target in VIEWS or node.target is operator.getitem

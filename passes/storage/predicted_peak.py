"""How high a step's memory rises above what stands before it, by its two graphs: a prediction.

Every tensor that a kernel writes takes its bytes from the place where it is made to the last place
where it is read; what crosses does so from the forward into the backward, gradients until the
backward is over. What Inductor works out inside a kernel takes none. Parameters and inputs stand
before. What a kernel needs for itself (a library's workspace), and another order of kernels than
the graph's, are not foreseen: that is measured.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Set

import torch
from torch import fx

from hot_compile.passes.base.graph import is_tangent, placeholders, returned, through_views
from hot_compile.passes.base.operators import VIEWS
from hot_compile.passes.base.schemes import Scheme
from hot_compile.passes.base.site import bytes_of
from hot_compile.passes.storage.crossers import Crosser, base, saved_pairs
from hot_compile.passes.storage.prices import fuses, held_bytes

Fused = Callable[[Crosser, Scheme], bool]
"""Whether the kernels that read a tensor restore it on their way, so that it is never whole."""
_NONE: frozenset[Crosser] = frozenset()


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


class _Half:
    """When each piece of memory of one graph is first written and last read."""

    def __init__(self, graph: fx.Graph) -> None:
        self.place: dict[fx.Node, int] = {node: place for place, node in enumerate(graph.nodes)}
        levels = _levels(graph)
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
    if not fuses(node):
        return True
    return any(
        user.op == "output" or not fuses(user) or levels[user] != levels[node]
        for user in through_views(node)
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


def _passes(node: fx.Node) -> bool:
    """It is a kernel of Inductor's, or none."""
    return fuses(node) or node.target in VIEWS or node.target is operator.getitem

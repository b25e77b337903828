"""Moves the cut between a forward and a backward: saves what the backward would make again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx
from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput

from hot_compile.passes.base.graph import is_tangent, placeholders, returned


class CutEditor:
    """What the forward returns for the backward, and the backward's placeholders, in step."""

    def __init__(self, forward: fx.Graph, backward: fx.Graph, num_fwd_outputs: int) -> None:
        self._forward, self._backward = forward, backward
        self._user_outputs = num_fwd_outputs
        self._unread = {n.name for n in placeholders(backward) if not n.users}
        self._done = 0

    def add(self, saved: fx.Node, restored: fx.Node, there: fx.Node, later: fx.Node) -> fx.Node:
        """Have the forward return ``there`` beside ``saved``, and let it arrive where it was
        recomputed. Returns the backward's placeholder for it."""
        name = later.name
        later.name = f"{name}_recomputed"
        arriving = self.keep(there, saved, restored, name)
        later.replace_all_uses_with(arriving)
        return arriving

    def keep(self, there: fx.Node, saved: fx.Node, restored: fx.Node, name: str = "") -> fx.Node:
        """Have the forward return ``there`` beside ``saved``, which arrives as ``restored``.
        Returns the backward's placeholder for it, of its own name if no other is given."""
        with self._backward.inserting_before(restored):
            arriving = self._backward.placeholder(name or there.name)
        arriving.target = arriving.name = name or there.name
        arriving.meta = {"val": there.meta["val"]}
        outputs: list[Any] = []
        for place, value in enumerate(returned(self._forward)):
            is_slot = value is saved and place >= self._user_outputs
            outputs += [there, value] if is_slot else [value]
        self._forward.output_node().args = (tuple(outputs),)
        self._done += 1
        return arriving

    def read_as(self, there: fx.Node, saved: fx.Node, arriving: fx.Node) -> fx.Node:
        """Have the forward return ``there`` in the place of ``saved``, itself or a view of it.
        Returns the backward's placeholder for it."""
        chain = [saved]
        while chain[-1] is not there:
            chain += chain[-1].all_input_nodes
        if len(chain) == 1:
            return arriving
        kept = self.keep(there, saved, arriving)
        self.remake(arriving, chain[-2::-1], {there: kept})
        return kept

    def read_instead(self, readers: Iterable[fx.Node], whole: fx.Node, other: fx.Node) -> None:
        """Have the backward's ``readers`` of ``whole`` read ``other``, of the same values."""
        for reader in readers:
            reader.replace_input_with(whole, other)
        self._done += 1

    def remake(
        self, arriving: fx.Node, chain: list[fx.Node], there: dict[fx.Node, fx.Node]
    ) -> None:
        """Have the backward make again what arrives as ``arriving``.

        ``chain``: the forward's nodes that make it, in order. ``there``: what the backward has of
        what they read.
        """
        copies = dict(there)
        with self._backward.inserting_before(min(arriving.users)):
            for node in chain:
                copies[node] = self._backward.node_copy(node, copies.__getitem__)
        arriving.replace_all_uses_with(copies[chain[-1]])
        self._done += 1

    def finish(self) -> int:
        """Drop what nobody in the backward reads any more; how many tensors were moved."""
        if not self._done:
            return 0
        self._backward.eliminate_dead_code()
        dead = {n for n in placeholders(self._backward) if not n.users and not is_tangent(n)}
        dead = {n for n in dead if n.name not in self._unread}
        names = {n.name for n in dead}
        for node in dead:
            self._backward.erase_node(node)
        outputs = returned(self._forward)
        seen, saved = outputs[: self._user_outputs], outputs[self._user_outputs :]
        saved = [v for v in saved if not (isinstance(v, fx.Node) and v.name in names)]
        output = self._forward.output_node()
        output.args = ((*seen, *saved),)
        if "desc" in output.meta:
            described = list(output.meta["desc"])[: self._user_outputs]
            described += [SavedForBackwardsAOTOutput(index) for index in range(len(saved))]
            output.meta["desc"] = described
        self._forward.eliminate_dead_code()
        for graph in (self._forward, self._backward):
            graph.lint()
        return self._done

"""Moves the cut past what does not tolerate rounding: saves the result of a difference instead.

The partitioner may save what a norm or a softmax starts from, and recompute the norm in the
backward. Rounded there, the difference with the mean loses its digits; rounded after it, nothing is
lost. So the recomputed node itself, what it reads, or one that all its readers go through, is
saved: in place of the tensor where nothing else reads that, or reads what can be made again of the
node; else beside it, if all of them rounded take no more than it does. Two tensors that are added
up, as at the end of a ResNet's stage, do so together: the sum is saved for both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set

import networkx as nx
import torch
from torch import fx

from hot_compile.passes.base.schemes import Scheme
from hot_compile.passes.base.site import bytes_of, hint
from hot_compile.passes.storage.crossers import Judge, base, saved_pairs, seen_by_user
from hot_compile.passes.storage.cut import CutEditor
from hot_compile.passes.storage.put_back import put_back, steps_of_norm
from hot_compile.passes.storage.readers import read

_READERS = "readers"
"""The node of the recomputed graph that stands for all its readers."""
_MOST_CUTS = 2
_LOOK_BACK = 3
_LEAST_PART = 1 / 8


def advance(
    forward: fx.Graph,
    backward: fx.Graph,
    num_fwd_outputs: int,
    judge: Judge,
    wider: bool = False,
) -> dict[str, str]:
    """Save tolerant results of what refuses rounding; both graphs change in place.

    ``wider``: also of a wider dtype, as norms work in, if that may be stored by rows; where it is
    not, it is taken back (``take_back.py``).
    Returns the names of tensors that are saved and were recomputed before, each with that of the
    tensor in place of, or beside, which it is.
    """
    cut = _Advance(forward, backward, num_fwd_outputs, judge, wider)
    dear: dict[frozenset[fx.Node], list[_Move]] = {}
    for saved, restored in saved_pairs(forward, backward, num_fwd_outputs):
        move = cut.past(saved, restored) if saved.meta["val"].is_floating_point() else None
        if move is not None and move.pays:
            cut.make(move)
        elif move is not None:
            dear.setdefault(move.cuts, []).append(move)
    for moves in dear.values():
        if len(moves) > 1 and _pay_together(moves) and all(n.users for n in moves[0].cuts):
            cut.make(moves[0])
    cut.finish()
    return cut.names


@dataclasses.dataclass(frozen=True)
class _Move:
    """What to save so that a tensor need not stay exact."""

    saved: fx.Node
    restored: fx.Node
    cuts: frozenset[fx.Node]
    """Of the backward."""
    taken: int
    """Bytes that these take, rounded."""
    rest: int
    """Bytes that the tensor takes, rounded, if it is still read."""
    steps: tuple[fx.Node, ...]
    """Of a norm, the backward's: undone, they make the tensor of what is saved, for whoever still
    reads it."""

    @property
    def pays(self) -> bool:
        """It takes no more than the tensor does as it is."""
        rest = 0 if self.steps else self.rest
        return self.taken + rest <= bytes_of(self.saved.meta["val"])


def _pay_together(moves: Sequence[_Move]) -> bool:
    whole = sum(bytes_of(move.saved.meta["val"]) for move in moves)
    return moves[0].taken + sum(move.rest for move in moves) <= whole


def _replaces(there: fx.Node, later: fx.Node, saved: fx.Node, wider: bool) -> bool:
    """``there``, in the forward, is what the backward recomputes as ``later``, no larger.

    Nor a statistic of it: a part (a gate's half, one of q, k and v) has a good share of its size.
    """
    mine, value = saved.meta["val"], there.meta.get("val")
    if not isinstance(value, torch.Tensor) or there.target is not later.target:
        return False
    if value.shape != later.meta["val"].shape:
        return False
    share = hint(value.numel()) / max(1, hint(mine.numel()))
    return _LEAST_PART <= share <= 1 and (wider or bytes_of(value) <= bytes_of(mine))


def _bottlenecks(start: fx.Node, judge: Judge) -> list[fx.Node]:
    """``start`` and the recomputed nodes through which all its readers go, the first one first."""
    graph, stack, seen = nx.DiGraph(), [start], {start}
    while stack:
        node = stack.pop()
        for user in node.users:
            outside = user.op != "call_function" or user in judge.facts.gradients
            graph.add_edge(_READERS if outside else user, node)  # from the readers backwards
            if not outside and user not in seen:
                seen.add(user)
                stack.append(user)
    path = [start]
    if _READERS in graph:
        above = nx.immediate_dominators(graph, _READERS)
        while above.get(path[-1], _READERS) != _READERS:
            path.append(above[path[-1]])
    return path


def _made_of(node: fx.Node) -> list[fx.Node]:
    """The last few recomputed values that ``node`` is made of, the nearest first."""
    found: dict[fx.Node, None] = {}
    level = [node]
    for _ in range(_LOOK_BACK):
        level = [n for last in level for n in last.all_input_nodes if n.op == "call_function"]
        found.update(dict.fromkeys(level))
    return list(found)


class _Advance(CutEditor):
    """Finds what to save instead of what refuses rounding."""

    def __init__(
        self,
        forward: fx.Graph,
        backward: fx.Graph,
        num_fwd_outputs: int,
        judge: Judge,
        wider: bool,
    ) -> None:
        super().__init__(forward, backward, num_fwd_outputs)
        self._wider = wider
        self._judge = judge
        names = {node.name: node for node in forward.nodes}
        self._made = {later: names[later.name] for later in backward.nodes if later.name in names}
        """What the backward makes again -> what it is in the forward. What is added to the backward
        from here on may have the name of something else there."""
        self._seen_by_user = seen_by_user(forward, num_fwd_outputs)
        self.names: dict[str, str] = {}
        """Of what was saved and was recomputed before: what it was saved for."""

    def past(self, saved: fx.Node, restored: fx.Node) -> _Move | None:
        """What to save so that ``saved`` need not stay exact; None if it need not anyway, or if
        nothing helps."""
        if not restored.users or self._judge.unfit(saved):
            return None
        if not read(restored, self._judge.facts).refusal:
            return None
        cuts = self._cuts(restored, saved, frozenset())
        if not cuts:
            return None
        pairs = [(self._made[later], later) for later in sorted(cuts)]
        rest = [(saved, restored)] if read(restored, self._judge.facts, cuts).readers else []
        crossers = [self._judge(there, later, cuts) for there, later in (*pairs, *rest)]
        if any(c.schemes == (Scheme.EXACT,) for c in crossers):
            return None
        *taken, last = [c.held(c.schemes[1]) for c in crossers] + [0] * (not rest)
        (there, later), *others = pairs
        steps = () if others or not rest else steps_of_norm(there, saved, later)
        return _Move(saved, restored, cuts, sum(taken), last, steps)

    def make(self, move: _Move) -> None:
        """Save them."""
        for later in sorted(move.cuts):
            there = self._made[later]
            arriving = self.add(move.saved, move.restored, there, later)
            self.names[there.name] = move.saved.name
            put_back(move.restored, arriving, move.steps)

    def _cuts(
        self, root: fx.Node, saved: fx.Node, cuts: frozenset[fx.Node]
    ) -> frozenset[fx.Node] | None:
        """``cuts`` and what else to save so that ``root`` need not be exact; None: impossible."""
        while len(cuts) <= _MOST_CUTS:
            reading = read(root, self._judge.facts, cuts)
            if not reading.refusal:
                return cuts
            candidates = self._candidates(saved, reading.culprit)
            tried = (self._cuts(n, saved, cuts | {n}) for n in candidates if n not in cuts)
            most = bytes_of(saved.meta["val"])
            possible = [c for c in tried if c and self._tolerant(c - cuts, c, most)]
            if not possible:
                return None
            cuts = min(possible, key=lambda found: (self._refused(root, found), len(found)))
        return None

    def _refused(self, root: fx.Node, cuts: Set[fx.Node]) -> bool:
        return bool(read(root, self._judge.facts, cuts).refusal)

    def _tolerant(self, nodes: Set[fx.Node], cuts: Set[fx.Node], most: int) -> bool:
        """None of ``nodes`` need be exact where ``cuts`` are saved, and those of more than ``most``
        bytes may be stored by rows, which takes no kernel of its own."""
        for node in nodes:
            schemes = self._judge(self._made[node], node, cuts).schemes
            large = bytes_of(node.meta["val"]) > most
            if schemes == (Scheme.EXACT,) or (large and Scheme.ROWS8 not in schemes):
                return False
        return True

    def _candidates(self, saved: fx.Node, culprit: fx.Node | None) -> list[fx.Node]:
        """What could be saved beside ``saved``, which ``culprit`` does not want rounded."""
        gradients = self._judge.facts.gradients
        if culprit is None or culprit.op != "call_function" or culprit in gradients:
            return []
        before, found = _made_of(culprit), []
        for later in (*_bottlenecks(culprit, self._judge), *before):
            there = self._made.get(later)
            if there is None or not _replaces(there, later, saved, self._wider):
                continue
            if base(there) not in self._seen_by_user and not self._judge.unfit(there):
                found.append(later)
        return found

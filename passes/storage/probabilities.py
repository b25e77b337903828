"""Probabilities are kept as the forward's product reads them.

Autocast has a softmax in fp32 and the product behind it in 16 bits. Min-cut keeps the scores, of
which the backward works out the softmax again and casts it for its own product; or the softmax
itself; or, beside the cast, either. Kept is the cast, which takes no more and which the forward
writes anyway: so nothing is worked out again, nor is anything packed and restored, for which 12
bits are too few less than 16.

A softmax's backward is right to a share of each probability's distance from 0 and from 1 only where
rows sum to 1, as rounded ones do not: so they are divided by their sum, in the kernel that reads
them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten, through_views, walk
from hot_compile.passes.base.operators import CASTS, SIXTEEN_BITS, VIEWS
from hot_compile.passes.base.schemes import Scheme
from hot_compile.passes.base.site import bytes_of
from hot_compile.passes.storage.bounds import sums_to_one
from hot_compile.passes.storage.crossers import Judge, base, saved_pairs, seen_by_user
from hot_compile.passes.storage.cut import CutEditor
from hot_compile.passes.storage.prices import fuses


def keep_as_multiplied(
    forward: fx.Graph, backward: fx.Graph, num_fwd_outputs: int, judge: Judge
) -> int:
    """Save 16-bit casts of softmaxes that ``judge`` would have stored, where that frees as much.

    Both graphs change in place. Returns how many.
    """
    cut = CutEditor(forward, backward, num_fwd_outputs)
    later, moved = {node.name: node for node in backward.nodes}, 0
    shown = seen_by_user(forward, num_fwd_outputs)
    for there in list(filter(_is_multiplied_softmax, forward.nodes)):
        softmax = there.all_input_nodes[0]
        again, whole = later.get(there.name), later.get(softmax.name)
        if whole is None or base(there) in shown:
            continue
        if Scheme.GROUPS12 not in judge(softmax, whole).schemes:
            continue
        pairs = saved_pairs(forward, backward, num_fwd_outputs)
        freed = _freed(whole, pairs)
        made = again if again is not None and again.target is there.target else None
        crosses = next((pair for pair in pairs if _is_view_of(there, pair[0])), None)
        added = 0 if made is None else bytes_of(there.meta["val"])
        gained = sum(bytes_of(saved.meta["val"]) for saved, _ in freed)
        if not freed or gained < added:
            continue
        if made is not None:
            arriving = cut.add(*freed[0], there, made)
        elif crosses is not None:
            arriving = cut.read_as(there, *crosses)
        else:
            continue
        moved += 1
        readers = [reader for reader in whole.users if reader is not again]
        if readers:
            rows = _divided_by_sums(Emitter(backward, min(readers), whole), arriving)
            cut.read_instead(readers, whole, rows)
    cut.finish()
    return moved


def _is_view_of(there: fx.Node, saved: fx.Node) -> bool:
    """Whether it is all of it, of sizes that are known."""
    same = bytes_of(saved.meta["val"]) == bytes_of(there.meta["val"])
    while same and saved.target in VIEWS and len(saved.all_input_nodes) == 1:
        saved = saved.all_input_nodes[0]
    return same and saved is there


def _freed(
    whole: fx.Node, pairs: Sequence[tuple[fx.Node, fx.Node]]
) -> list[tuple[fx.Node, fx.Node]]:
    """Of ``pairs`` of what is saved and arrives, those that are there for ``whole`` alone."""
    alone = {whole}
    for node in sorted(walk([whole], lambda n: n.all_input_nodes), reverse=True):
        if node.users.keys() <= alone:
            alone.add(node)
    return [pair for pair in pairs if pair[1] in alone]


def _is_multiplied_softmax(node: fx.Node) -> bool:
    """The 16-bit cast of one, which a library reads."""
    if node.target not in CASTS or node.meta["val"].dtype not in SIXTEEN_BITS:
        return False
    (made,) = node.all_input_nodes
    return sums_to_one(made) and not any(map(fuses, through_views(node)))


def _divided_by_sums(emit: Emitter, rounded: fx.Node) -> fx.Node:
    """Rows, in fp32, that sum to 1 again."""
    values = emit.cast(rounded, torch.float32)
    return emit(aten.div.Tensor, values, emit(aten.sum.dim_IntList, values, [-1], True))

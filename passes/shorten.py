"""Partitioned backward -> the same without storage round trips that store nothing.

Where x is in the backward anyway (attention's output, a checkpointed region, a user input), min-cut
puts the compression there too. Packing to INT4 only to unpack at once would cost a pass and
accuracy: such an x goes straight to the INT8 grid of its column. Where the scales of g_y's rows are
folded into it on the way (``rescale_int4``), it waits in INT8 instead, which moves as many bytes as
reading x twice would.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_OPS = torch.ops.hot


def shorten(backward: fx.Graph) -> int:
    """Replace, in place, ``expand_int4(compress_int4(x))`` by ``quantize_columns(x)`` and
    ``rescale_int4(compress_int4(x))`` by ``rescale_int8(compress_int8(x))``.

    Returns how many were replaced.
    """
    packs = [node for node in backward.nodes if node.target is _OPS.compress_int4.default]
    done = sum(_shorten(backward, pack) or _widen(backward, pack) for pack in packs)
    if done:
        backward.eliminate_dead_code()
        backward.lint()
    return done


def _shorten(graph: fx.Graph, pack: fx.Node) -> int:
    expands = {user for part in pack.users for user in part.users}
    if not expands or any(user.target is not _OPS.expand_int4.default for user in expands):
        return 0
    whole = _instead(graph, pack, _OPS.quantize_columns.default, 0, 1, 8, True, False)
    parts = [_part(graph, whole, index) for index in (1, 0)]
    for expand in expands:
        _replace(expand, q=parts[1], scale=parts[0])
    return 1


def _widen(graph: fx.Graph, pack: fx.Node) -> int:
    rescales = {user for part in pack.users for user in part.users}
    if not rescales or any(user.target is not _OPS.rescale_int4.default for user in rescales):
        return 0
    whole = _instead(graph, pack, _OPS.compress_int8.default, 0, 1)
    scale, stored = (_part(graph, whole, index) for index in (1, 0))
    for rescale in rescales:
        rescale.target = _OPS.rescale_int8.default
        rescale.args = (stored, scale, *rescale.args[3:])
    return 1


def _instead(graph: fx.Graph, pack: fx.Node, op: Any, *args: Any) -> fx.Node:
    """``op`` on what ``pack`` packs, right behind it."""
    x = pack.args[0]
    assert isinstance(x, fx.Node)
    with graph.inserting_after(pack):
        whole = graph.call_function(op, (x, *args))
    whole.meta = dict(pack.meta)
    fake = x.meta["val"]
    with fake.fake_mode:
        whole.meta["val"] = op(fake, *args)
    return whole


def _part(graph: fx.Graph, whole: fx.Node, index: int) -> fx.Node:
    with graph.inserting_after(whole):
        part = graph.call_function(operator.getitem, (whole, index))
    part.meta = {**whole.meta, "val": whole.meta["val"][index]}
    return part


def _replace(expand: fx.Node, q: fx.Node, scale: fx.Node) -> None:
    """Point the product at the symmetric grid: it has no zero point, so no rank-1 term either."""
    for part in list(expand.users):
        if part.args[1] == 2:
            for product in list(part.users):
                product.args = (*product.args[:4], None, None, *product.args[6:])
        else:
            part.replace_all_uses_with(q if part.args[1] == 0 else scale)

"""Fused attention's q and k: who they are, and what tells that they cannot be stored any more."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from types import NoneType
from typing import Any

import torch
from torch import fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten, made_of, made_of_tangents, named_arguments
from hot_compile.passes.base.operators import CASTS, MOVES, VIEWS
from hot_compile.passes.base.schemes import Scheme
from hot_compile.passes.base.site import hint
from hot_compile.passes.storage.crossers import Crosser
from hot_compile.passes.storage.logit_errors import Attention, Operand, as_text
from hot_compile.passes.storage.readers import is_attention


@dataclasses.dataclass(frozen=True)
class Pair:
    """What one fused attention's q and k are made of, of all that crosses."""

    query: tuple[Crosser, ...]
    key: tuple[Crosser, ...]
    factor: float
    """What logits are multiplied by."""
    width: int
    known: bool
    """They are views, casts and parts of it: what is measured of it is true of them."""


def pairs(backward: fx.Graph, found: Iterable[Crosser]) -> list[Pair]:
    """Of every fused attention in a backward that is as min-cut made it."""
    attentions = [
        operands for n in backward.nodes if is_attention(n) and (operands := _operands(n))
    ]
    if not attentions:
        return []
    crossers = {crosser.restored: crosser for crosser in found}
    floats = {n for n, c in crossers.items() if n.meta["val"].is_floating_point() and not c.region}
    gradients = made_of_tangents(backward)
    result = []
    for query, key, factor in filter(None, attentions):
        made = [made_of(side) - gradients for side in (query, key)]
        ours, theirs = (tuple(crossers[n] for n in sorted(m & floats)) for m in made)
        moved = all(n in crossers or _is_moved(n) for m in made for n in m)
        known = moved and bool(ours and theirs) and isinstance(factor, (float, NoneType))
        width = hint(query.meta["val"].shape[-1])
        result.append(Pair(ours, theirs, factor if known and factor else width**-0.5, width, known))
    return result


def _is_moved(node: fx.Node) -> bool:
    return node.target in VIEWS | CASTS | MOVES or node.target is operator.getitem


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node, Any] | None:
    """(q, k, what logits are multiplied by) of an attention's backward; None: whoever wrote it has
    other names for them, and nothing it reads is stored."""
    named = dict(named_arguments(node))
    if "query" in named:
        return named["query"], named["key"], named.get("scale")
    if hasattr(node.target, "_schema"):
        return None
    query, key, *_ = node.all_input_nodes
    return query, key, "a flex attention's function, whatever that does"


def kept_exact(
    found: Sequence[Crosser], attentions: Sequence[Pair], error: float | None, watched: bool
) -> list[Crosser]:
    """``found``, of which what q and k are made of is not to be stored where that is too coarse, or
    would not be noticed if it were.

    Args:
        found: what crosses. attentions: what of it fused attentions read.
        error: of the logits, if that was measured to be too large.
        watched: somebody looks at the logits, and compiles again.
    """
    if error is not None:
        reason = f"attention's logits are too large for 12 bits: they were off by {error:.2g}"
    elif not watched:
        reason = "attention's q or k: whether 12 bits are enough cannot be watched here"
    else:
        reason = "attention's q or k is computed of it: whether 12 bits are enough is not known"
    all_of_them = error is not None or not watched
    unfit = [pair for pair in attentions if all_of_them or not pair.known]
    concerned = {crosser for pair in unfit for crosser in (*pair.query, *pair.key)}
    return [
        dataclasses.replace(c, schemes=(Scheme.EXACT,), by_measure=(), reason=reason)
        if c in concerned and len(c.schemes) > 1
        else c
        for c in found
    ]


def watch(
    forward: fx.Graph,
    attentions: Iterable[Pair],
    stored: Mapping[Crosser, tuple[Scheme, tuple[fx.Node, ...]]],
    hosted: Set[Crosser],
    key: str,
) -> int:
    """Let the forward measure, now and then, what storing q and k does; returns of how many.

    What waits in host memory is left out: its copy may not be over when the forward is.
    """
    tensors: list[fx.Node] = []
    watched = []
    for pair in attentions:
        every = {*pair.query, *pair.key}
        in_12 = {c for c in every if stored.get(c, (Scheme.EXACT,))[0] is Scheme.GROUPS12}
        if not in_12 or every & hosted or not pair.known:
            continue
        sides = []
        for crossers in (pair.query, pair.key):
            given = [_given(c, stored[c][1] if c in in_12 else None) for c in crossers]
            sides.append(tuple(Operand(len(nodes), pair.width) for nodes in given))
            tensors += (node for nodes in given for node in nodes)
        watched.append(Attention(pair.factor, *sides))
    if watched:
        last = forward.output_node()
        emit = Emitter(forward, last, tensors[0])
        device = tensors[0].meta["val"].device
        seen = emit(aten.full.default, [], 0, dtype=torch.int32, device=device)
        emit(torch.ops.hot.watch_logits.default, seen, tensors, as_text(watched), key)
    return len(watched)


def _given(crosser: Crosser, parts: tuple[fx.Node, ...] | None) -> tuple[fx.Node, ...]:
    """What the operator is given: of codes their upper planes, and their scales."""
    if parts is None:
        return (crosser.saved,)
    *upper, _, scale = parts
    return (*upper, scale)

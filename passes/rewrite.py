"""Plan -> ``hot::`` nodes in the joint graph. Never chooses.

Builds first, then swaps, so that a layer whose rewriting fails is left exactly as it was.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

import hot_compile.runtime.ops  # noqa: F401  (registers the operators this stage inserts)
from hot_compile.config import BASELINES, Strategy
from hot_compile.passes.baselines import baseline_products
from hot_compile.passes.emit import describe, fake_mode
from hot_compile.passes.graph import CASTS, VIEWS, strip
from hot_compile.passes.plan import Decision, Plan
from hot_compile.passes.rewrite_conv import build_convolution
from hot_compile.passes.rewrite_shared import build_shared
from hot_compile.passes.site import ConvNodes, Site, SiteNodes


def rewrite(graph: fx.Graph, sites: Sequence[Site], plan: Plan, pin: bool) -> Plan:
    """Apply ``plan`` to ``graph`` in place.

    ``pin``: the compressed x crosses to the backward even where x is cheap to recompute.

    Returns the plan as carried out: a layer whose nodes could not be built stays exact, with the
    error as its reason.
    """
    by_name = {site.name: site for site in sites}
    done = tuple(_apply(graph, by_name[d.site], d, pin) for d in plan)
    graph.eliminate_dead_code()
    graph.lint()
    return dataclasses.replace(plan, decisions=done)


def _apply(graph: fx.Graph, site: Site, decision: Decision, pin: bool) -> Decision:
    if decision.strategy is Strategy.EXACT or site.nodes is None:
        return decision
    builder = Builder(graph, site.nodes)
    try:
        build = build_convolution if isinstance(site.nodes, ConvNodes) else _build
        swaps = build(builder, site, decision)
    except Exception as error:
        builder.discard()
        reason = f"could not be rewritten: {type(error).__name__}: {error}"
        return dataclasses.replace(decision, strategy=Strategy.EXACT, reason=reason)
    for old, new in swaps:
        old.replace_all_uses_with(new)
    if decision.strategy in BASELINES:
        return decision
    if pin and decision.gw and decision.strategy is not Strategy.GX_ONLY:
        _pin(site.nodes.x)
    return decision


class Builder:
    """Inserts operator nodes with the metadata the partitioner and Inductor need."""

    def __init__(self, graph: fx.Graph, nodes: SiteNodes | ConvNodes) -> None:
        self.graph = graph
        self.nodes = nodes
        self.made: list[fx.Node] = []

    def call(
        self, at: fx.Node, after: bool, like: fx.Node, op: Any, *args: Any, **kwargs: Any
    ) -> fx.Node:
        """``op(*args, **kwargs)`` next to ``at``, with ``like``'s metadata and its own value."""
        insert = self.graph.inserting_after if after else self.graph.inserting_before
        with insert(at):
            node = self.graph.call_function(op, args, kwargs)
        self.made.append(node)
        node.meta = describe(like)
        fake = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
        with fake_mode(self.nodes.x):
            node.meta["val"] = op(*fake, **kwargs)
        return node

    def parts(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The outputs of a multi-output node, as nodes placed right behind it."""
        made = []
        for index in reversed(range(len(node.meta["val"]))):
            made.append(self.call(node, True, node, operator.getitem, node, index))
        return tuple(reversed(made))

    def discard(self) -> None:
        """Take back everything built so far."""
        for node in reversed(self.made):
            if not node.users:
                self.graph.erase_node(node)


def _build(b: Builder, site: Site, d: Decision) -> list[tuple[fx.Node, fx.Node]]:
    """New nodes for one layer: [(old product, its replacement)]."""
    ops = torch.ops.hot
    if d.strategy in BASELINES:
        return baseline_products(b.call, site, d.strategy, d.rank)
    if d.shared:
        return build_shared(b, site, d)
    nodes = site.nodes
    assert isinstance(nodes, SiteNodes)
    gw = d.gw and d.strategy is not Strategy.GX_ONLY
    saved = _compress(b, d) if gw else ()
    first = min(n for n in (nodes.grad_input, nodes.grad_weight) if n)  # nodes order by place
    rows, columns = _quantize_grad(b, d, first, gw)
    swaps = []
    if nodes.grad_input is not None:
        at = nodes.grad_input
        w_q, w_scale = _quantize_weight(b, d, at)
        args: tuple[Any, ...] = (rows[0], w_q, rows[1], w_scale, None, None, site.dtype)
        swaps.append((at, b.call(at, False, at, ops.scaled_int_mm.default, *args)))
    if gw and nodes.grad_weight is not None:
        at = nodes.grad_weight
        x_q, x_scale, x_zero = _expand(b, d, saved, at)
        g_q, g_scale, g_total = columns
        total = g_total if x_zero is not None else None
        args = (g_q, x_q, g_scale, x_scale, total, x_zero, site.dtype)
        if nodes.grad_weight_is_io:
            args = (x_q, g_q, x_scale, g_scale, x_zero, total, site.dtype)
        swaps.append((at, b.call(at, False, at, ops.scaled_int_mm.default, *args)))
    return swaps


def _compress(b: Builder, d: Decision) -> tuple[fx.Node, ...]:
    """What the forward keeps of x, made right behind the forward product."""
    ops, nodes = torch.ops.hot, b.nodes
    at, like = nodes.forward, nodes.forward
    if d.strategy is Strategy.INT4:
        return b.parts(b.call(at, True, like, ops.compress_int4.default, nodes.x))
    args = (nodes.x, d.rank, d.tokens, 8, d.per_channel, False)
    return b.parts(b.call(at, True, like, ops.quantize_columns.default, *args))


def _expand(
    b: Builder, d: Decision, saved: tuple[fx.Node, ...], at: fx.Node
) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """(q [I, K], scale [I], zero [I] or None) of the kept x, as the integer product wants it."""
    if d.strategy is not Strategy.INT4:
        return saved[0], saved[1], None
    q, scale, zero = b.parts(b.call(at, False, at, torch.ops.hot.expand_int4.default, *saved))
    return q, scale, zero


def _quantize_grad(
    b: Builder, d: Decision, at: fx.Node, gw: bool
) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    """(row form for g_x, column form for g_w) of g_y, in one operator where both are wanted."""
    ops, g = torch.ops.hot, b.nodes.grad_output
    gx = b.nodes.grad_input is not None
    if gx and gw:
        per_row = d.per_channel or d.per_token
        args: tuple[Any, ...] = (g, d.gx_bits, per_row, d.rank, d.tokens, d.per_channel)
        parts = b.parts(b.call(at, False, at, ops.quantize_grad.default, *args, *_packed(d)))
        return parts[:2], parts[2:]
    if gx:
        args = (g, d.gx_bits, d.per_channel or d.per_token, True)
        return b.parts(b.call(at, False, at, ops.quantize_rows.default, *args, *_packed(d))), ()
    args = (g, d.rank, d.tokens, 8, d.per_channel, True)
    return (), b.parts(b.call(at, False, at, ops.quantize_columns.default, *args))


def _quantize_weight(b: Builder, d: Decision, at: fx.Node) -> tuple[fx.Node, fx.Node]:
    """W transformed along O and quantised: (q [I, O padded], scale [I])."""
    ops, nodes = torch.ops.hot, b.nodes
    assert isinstance(nodes, SiteNodes)
    w = nodes.weight
    if nodes.weight_is_io:
        args: tuple[Any, ...] = (w, d.gx_bits, d.per_channel, False, *_packed(d))
        node = b.call(at, False, at, ops.quantize_rows.default, *args)
    else:
        args = (w, 16, 1, d.gx_bits, d.per_channel, False, *_packed(d))
        node = b.call(at, False, at, ops.quantize_columns.default, *args)
    q, scale, *_ = b.parts(node)
    return q, scale


def _packed(d: Decision) -> tuple[bool, ...]:
    """The operators' last argument, which graphs show only where it says something."""
    return (True,) if d.packed else ()


def _pin(x: fx.Node) -> None:
    """Keep the compressed tensor, not x, on the edge from forward to backward.

    min-cut would otherwise move the compression into the backward wherever x is cheap to recompute.
    MUST_SAVE on x's producer forbids recomputing x; the cut then goes through the small tensor.
    """
    producer = strip(x, VIEWS | CASTS)
    if producer.op == "call_function" and "recompute" not in producer.meta:
        producer.meta["recompute"] = CheckpointPolicy.MUST_SAVE

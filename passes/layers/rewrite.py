"""Decisions -> ``hot::`` nodes in the joint graph. Never chooses.

A strategy's function (``strategies``) runs on nodes in the place of tensors. All new nodes of a
layer are built before any old one is replaced, so that a layer whose rewriting fails is left
exactly as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from hot_compile.config import Strategy
from hot_compile.passes.base.emit import Emitter, node_of
from hot_compile.passes.base.graph import strip
from hot_compile.passes.base.operators import CASTS, VIEWS
from hot_compile.passes.base.site import ConvNodes, Site, SiteNodes
from hot_compile.passes.layers.bias import precedes, total
from hot_compile.passes.layers.decision import Decision
from hot_compile.passes.layers.rewrite_conv import ConvStrategy
from hot_compile.passes.layers.strategies import STRATEGIES

Swaps = list[tuple[fx.Node, fx.Node]]
"""(old result, its replacement)."""


def rewrite(
    graph: fx.Graph, sites: Sequence[Site], decisions: Iterable[Decision], pin: bool
) -> tuple[Decision, ...]:
    """Carry ``decisions`` out in ``graph``, in place.

    ``pin``: what a strategy keeps of x is made in the forward and crosses to the backward, even
    where x is cheap to recompute. Else it is made in the backward, and storage is left to the
    partitioner's stages.

    Returns them as carried out: a layer whose nodes could not be built stays exact, with the error
    as its reason.
    """
    by_name = {site.name: site for site in sites}
    done = tuple(_apply(graph, by_name[d.site], d, pin) for d in decisions)
    graph.eliminate_dead_code()
    graph.lint()
    return done


def _apply(graph: fx.Graph, site: Site, decision: Decision, pin: bool) -> Decision:
    if decision.strategy is Strategy.EXACT or site.nodes is None:
        return decision
    pin = pin and decision.gw and STRATEGIES[decision.strategy].quantises_x
    build = _convolution if isinstance(site.nodes, ConvNodes) else _linear
    try:
        swaps = build(graph, site, decision, pin)
    except Exception as error:  # what was built so far is used by nobody
        reason = f"could not be rewritten: {type(error).__name__}: {error}"
        return dataclasses.replace(decision, strategy=Strategy.EXACT, reason=reason)
    for old, new in swaps:
        old.replace_all_uses_with(new)
    if pin:
        assert site.nodes.x is not None  # what has a g_w has an x
        _pin(site.nodes.x)
    return decision


def _linear(graph: fx.Graph, site: Site, d: Decision, pin: bool) -> Swaps:
    nodes, spec = site.nodes, STRATEGIES[d.strategy]
    assert isinstance(nodes, SiteNodes)
    gx, gw, g = nodes.grad_input, nodes.grad_weight, nodes.grad_output
    bias = nodes.grad_bias if d.one_read else None
    if bias is not None and not (bias.users and precedes(g, bias)):
        bias = None
    first = min(n for n in (gx, gw, bias) if n is not None)  # nodes order by place
    how = dataclasses.replace(d.how(nodes), summed=bias is not None)
    emit = Emitter(graph, first, gx or gw or first, stays=True)
    kept: tuple[Tensor, ...] = ()
    if how.gw:
        assert nodes.x is not None
        keep_at = _behind(graph, nodes.forward) if pin else emit
        made = spec.keep(keep_at.traced(nodes.x), how)
        kept = tuple(emit.traced(node_of(part)) for part in made)
    found = spec.gradients(emit.traced(g), kept, emit.traced(nodes.weight), how)
    swaps = _swaps((gx, gw), found[:2])
    if bias is not None and found.sums is not None:
        swaps.append((bias, total(emit, bias, node_of(found.sums))))
    return swaps


def _convolution(graph: fx.Graph, site: Site, d: Decision, pin: bool) -> Swaps:
    nodes = site.nodes
    assert isinstance(nodes, ConvNodes)
    strategy = ConvStrategy(site, d)
    emit = Emitter(graph, nodes.backward, nodes.backward, stays=True)
    keep_at = _behind(graph, nodes.forward) if pin else emit
    kept = tuple(emit.traced(node_of(part)) for part in strategy.keep(keep_at.traced(nodes.x)))
    g, weight = emit.traced(nodes.grad_output), emit.traced(nodes.weight)
    found = strategy.gradients(g, weight, kept)
    return _swaps((nodes.grad_input, nodes.grad_weight, nodes.grad_bias), found)


def _behind(graph: fx.Graph, forward: fx.Node | None) -> Emitter:
    assert forward is not None
    return Emitter(graph, forward.next, forward)


def _swaps(old: Sequence[fx.Node | None], new: Sequence[Tensor | None]) -> Swaps:
    pairs = zip(old, new, strict=True)
    return [(o, node_of(n)) for o, n in pairs if o is not None and n is not None]


def _pin(x: fx.Node) -> None:
    """Keep the compressed tensor, not x, on the edge from forward to backward.

    min-cut would otherwise move the compression into the backward wherever x is cheap to recompute.
    MUST_SAVE on x's producer forbids recomputing x; the cut then goes through the small tensor.
    """
    producer = strip(x, VIEWS | CASTS)
    if producer.op == "call_function" and "recompute" not in producer.meta:
        producer.meta["recompute"] = CheckpointPolicy.MUST_SAVE

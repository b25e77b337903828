"""Heads that the plan takes -> operators that go through them in chunks. Never chooses."""

from __future__ import annotations

import dataclasses
import logging

from torch import fx

from hot_compile.config import HotConfig, Strategy
from hot_compile.passes.base.graph import settle
from hot_compile.passes.cost.linear import Pricing
from hot_compile.passes.head.chunks import write_chunks
from hot_compile.passes.head.find import Head, find_heads
from hot_compile.passes.head.fused import write_softmax
from hot_compile.passes.head.picks import pick_rows_first
from hot_compile.passes.head.plan import FORWARD, OFF, HeadDecision, plan_head
from hot_compile.passes.head.stacks import unstack

log = logging.getLogger("hot_compile")


def chunk_heads(
    graph: fx.Graph, config: HotConfig, pricing: Pricing, observed: bool = False
) -> tuple[HeadDecision, ...]:
    """Replace every head that pays by its operators; says what became of each that is large.

    A head whose rewriting fails stays as it is, with a warning.

    Args:
        graph: a joint graph, changed in place.
        config: the user's options.
        pricing: of the heads' devices; asked only where products are to be integers.
        observed: all is to be exact, whatever the options say.
    """
    decisions = []
    if config.head != "off" and config.keep_head:
        unstack(graph, config.head_min_bytes)
        pick_rows_first(graph, config.head_min_bytes)
    for found in find_heads(graph, config.head_min_bytes):
        decision = plan_head(found, config, pricing)
        if observed:
            decision = dataclasses.replace(decision, strategy=Strategy.EXACT)
        if decision.chunked and isinstance(found, Head) and not _replace(graph, found, decision):
            decision = dataclasses.replace(decision, way=OFF, reason="its rewriting failed")
        decisions.append(decision)
    return tuple(decisions)


def _replace(graph: fx.Graph, head: Head, decision: HeadDecision) -> bool:
    """Whether the head's operators took its place."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    in_forward, softmax = decision.way == FORWARD, head.softmax
    try:
        if softmax is not None and not (in_forward and softmax.needs_statistics()):
            swaps = write_softmax(head.chunks, softmax, in_forward, decision.int8)
        else:
            swaps = write_chunks(head.chunks, in_forward)
    except Exception:  # what was built so far is used by nobody
        log.warning("hot: the head %s stays as it is", head.name, exc_info=True)
        graph.eliminate_dead_code()
        return False
    for old, new in swaps:
        old.replace_all_uses_with(new)
    settle(graph, places)
    graph.eliminate_dead_code()
    graph.lint()
    return True

"""Plan -> INT8 products in the forward of the joint graph. Never chooses.

The backward's products read the same x and W as before: gradients pass straight through what is
rounded here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from hot_compile.passes.base.emit import Emitter, ForwardEmitter, node_of
from hot_compile.passes.base.graph import aten
from hot_compile.passes.base.site import Site, SiteNodes
from hot_compile.passes.forward.choose import ForwardDecision
from hot_compile.passes.forward.product import Form, int8_product


def rewrite_forwards(
    graph: fx.Graph, sites: Sequence[Site], decisions: Sequence[ForwardDecision]
) -> tuple[ForwardDecision, ...]:
    """Put the chosen layers' forward products on INT8, in place.

    Returns the decisions as carried out: a layer whose nodes could not be built stays exact, with
    the error as its reason.
    """
    by_name = {site.name: site for site in sites}
    done = tuple(_apply(graph, by_name[d.site], d) for d in decisions)
    if any(d.int8 for d in done):
        graph.eliminate_dead_code()
        graph.lint()
    return done


def _apply(graph: fx.Graph, site: Site, decision: ForwardDecision) -> ForwardDecision:
    if not decision.int8:
        return decision
    assert site.nodes is not None
    assert site.nodes.forward is not None
    old = site.nodes.forward
    emit = ForwardEmitter(graph, old, old)
    try:
        new = _replacement(emit, site, decision)
        if new.meta["val"].shape != old.meta["val"].shape:
            raise ValueError(f"{new.meta['val'].shape} in the place of {old.meta['val'].shape}")
    except Exception as error:  # what was built so far is used by nobody
        reason = f"could not be rewritten: {type(error).__name__}: {error}"
        return dataclasses.replace(decision, int8=False, reason=reason)
    emit.put_in_place(new)
    return decision


def _replacement(emit: Emitter, site: Site, decision: ForwardDecision) -> fx.Node:
    assert isinstance(site.nodes, SiteNodes)
    return _product(emit, site.nodes, Form(decision.rotated, site.nodes.weight_is_io))


def _product(emit: Emitter, nodes: SiteNodes, form: Form) -> fx.Node:
    """What takes the place of the forward's mm or addmm."""
    old, rows = nodes.forward, nodes.x
    assert old is not None
    assert rows is not None
    dtype = old.meta["val"].dtype
    addend: Any = old.args[0] if old.target is aten.addmm.default else None
    in_epilogue = addend is not None and addend.meta["val"].dim() == 1
    ones = bias = None
    if in_epilogue:
        ones = emit.traced(_ones(emit, rows))
        bias = emit.traced(emit.cast(addend, torch.float32))
    x, weight = emit.traced(rows), emit.traced(nodes.weight)
    new = node_of(int8_product(x, weight, ones, bias, form, dtype))
    return new if addend is None or in_epilogue else emit(aten.add.Tensor, new, addend)


def _ones(emit: Emitter, rows: fx.Node) -> fx.Node:
    """One for each row: what the bias is multiplied with in the epilogue."""
    device = rows.meta["val"].device
    return emit(aten.full.default, [emit.size(rows, 0)], 1.0, dtype=torch.float32, device=device)

"""One self-contained HTML page of what was done to a model: layers, memory, graphs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from .config import Rows, Strategy
from .graphs import FORWARD, Fact, Snapshot, stage_of
from .passes.base.operators import CASTS, VIEWS
from .passes.base.schemes import Scheme, Unit
from .passes.layers.decision import Decision
from .passes.profile.profile import LayerProfile, Profile, gw_variant, gx_variant
from .passes.storage.record import Crossing
from .record import GraphReport
from .timeline import held_over_step

_LOOKED_THROUGH = {str(target) for target in VIEWS | CASTS}
_PRODUCTS = ("aten.addmm.", "aten.mm.", "aten.convolution.", "aten.bmm.")
_PLACE = "__DATA__"


def save_page(
    path: str | Path,
    graphs: Sequence[GraphReport],
    measured: Mapping[str, Any] | None = None,
    profile: Profile | str | Path | None = None,
    title: str = "",
    stock: Mapping[str, Sequence[GraphReport]] | None = None,
    note: str = "",
) -> None:
    """Write the page to ``path``. It reads nothing from anywhere else.

    Args:
        graphs: with their stages, as ``explain`` and ``memory_report`` keep them.
        measured: by configuration, ``Measured`` of ``memory_report``.
        profile: what calibration measured, or its file, for the layers' errors.
        title: what it is a report of.
        stock: by configuration, what others would make of the same graphs.
        note: what is to be known of the predictions.

    Raises:
        ValueError: the reports have no graphs.
        ProfileFormatError: ``profile`` is a file that is none.
    """
    profile = Profile.load(profile) if isinstance(profile, (str, Path)) else profile
    content = {"title": title, "note": note, **page_data(graphs, measured, profile, stock)}
    data = json.dumps(content, separators=(",", ":"))
    template = resources.files("hot_compile").joinpath("page.html").read_text(encoding="utf-8")
    Path(path).write_text(template.replace(_PLACE, _harmless(data)), encoding="utf-8")


def _harmless(data: str) -> str:
    """JSON that no HTML parser takes for a tag or an entity, wherever it stands."""
    for letter in "<>&":
        data = data.replace(letter, f"\\u{ord(letter):04x}")
    return data


def page_data(
    graphs: Sequence[GraphReport],
    measured: Mapping[str, Any] | None = None,
    profile: Profile | None = None,
    stock: Mapping[str, Sequence[GraphReport]] | None = None,
) -> dict[str, Any]:
    """All that the page shows, JSON-ready; sizes in bytes."""
    timeline = held_over_step(graphs)
    crossing = [c for graph in graphs for c in graph.crossing]
    return {
        "torch": torch.__version__,
        "recipe": graphs[0].plan.recipe if graphs else "",
        "held": sum(c.bytes for c in crossing),
        "uncompressed": sum(c.bytes_before for c in crossing),
        "measured": {k: dataclasses.asdict(m) for k, m in (measured or {}).items()},
        "layers": [row for n, graph in enumerate(graphs) for row in _layers(n, graph, profile)],
        "forwards": [
            {**dataclasses.asdict(f), "way": f.way} for graph in graphs for f in graph.plan.forwards
        ],
        "forms": [dataclasses.asdict(f) for graph in graphs for f in graph.plan.exact_forms],
        "heads": [
            {**dataclasses.asdict(h), "left_out": h.bytes_left_out}
            for graph in graphs
            for h in graph.plan.heads
        ],
        "crossing": [
            {**dataclasses.asdict(c), "graph": n, "as": _words(c)}
            for n, graph in enumerate(graphs)
            for c in graph.crossing
        ],
        "timeline": [[round(p.at, 5), p.stored, p.uncompressed] for p in timeline.points],
        "stock": {
            name: [[round(p.at, 5), p.stored] for p in held_over_step(others, timeline.turn).points]
            for name, others in (stock or {}).items()
        },
        "turn": timeline.turn,
        "graphs": [
            {stage: _nodes(stage_of(graph, stage)) for stage in ("before", "after")}
            for graph in graphs
        ],
    }


def _layers(number: int, graph: GraphReport, profile: Profile | None) -> list[dict[str, Any]]:
    inputs = _inputs(graph)
    rows = []
    for d in graph.plan:
        layer = d.site.split("#")[0]
        kept = inputs.get(layer)
        row = {
            "graph": number,
            "site": d.site,
            "layer": layer,
            "shape": d.shape,
            "dtype": d.dtype,
            "strategy": d.strategy.value,
            "way": d.way,
            "gain": d.predicted_gain if d.strategy is not Strategy.EXACT else None,
            "before": d.bytes_before,
            "kept": kept.bytes if kept else 0,
            "kept_as": _words(kept) if kept else "",
            "reason": d.reason,
            "errors": _errors(d, profile.layers.get(d.site) if profile else None),
        }
        rows.append(row)
    return rows


def _inputs(graph: GraphReport) -> dict[str, Crossing]:
    """By layer: what crosses of the x that its product reads, through views and casts."""
    facts = {n.name: n for n in stage_of(graph, "before").nodes}
    crossing = {c.name: c for c in graph.crossing}
    found: dict[str, Crossing] = {}
    for n in facts.values():
        if n.side == FORWARD and n.layer and n.target.startswith(_PRODUCTS):
            for operand in n.inputs:
                kept = next(
                    (crossing[s.name] for s in _through(operand, facts) if s.name in crossing), None
                )
                if kept is not None:
                    found.setdefault(n.layer, kept)
    return found


def _through(name: str, facts: Mapping[str, Fact]) -> list[Fact]:
    """The node and what it is a view or cast of."""
    chain = [facts[name]]
    while chain[-1].target in _LOOKED_THROUGH:
        chain.append(facts[chain[-1].inputs[0]])
    return chain


def _errors(d: Decision, layer: LayerProfile | None) -> dict[str, float]:
    """Measured relative errors of the chosen strategy: of g_x, of g_w, where there are any."""
    if layer is None or d.strategy is Strategy.EXACT:
        return {}
    rows = Rows.BATCH if d.tokens > 1 or d.tiles else Rows.CONSECUTIVE
    gx = layer.grad_input.get(gx_variant(d.gx_bits, d.per_channel)) if d.gx else None
    gw = layer.grad_weight.get(gw_variant(d.strategy, rows, d.per_channel)) if d.gw else None
    return {name: m.error for name, m in (("gx", gx), ("gw", gw)) if m is not None}


def _words(c: Crossing) -> str:
    """How and where it is stored, for people."""
    return _as_what(c) + (", in host memory" if c.host_bytes else "")


def _as_what(c: Crossing) -> str:
    scheme = Scheme(c.scheme)
    if scheme is Scheme.EXACT:
        return c.dtype
    if scheme is Scheme.BITS:
        return "1 bit (a mask, lossless)"
    spec = scheme.spec
    shared = "" if spec.unit is Unit.NONE else f", a scale per {spec.unit.value}"
    return f"{spec.bits} bits{shared}" + (", a mask beside" if scheme is not scheme.plain else "")


def _nodes(shot: Snapshot) -> list[list[Any]]:
    """Each node as [name, operator, shape, dtype, bytes, backward?, layer, places of inputs]."""
    place = {n.name: number for number, n in enumerate(shot.nodes)}
    return [
        [
            n.name,
            n.op if n.op == "placeholder" else n.target,
            " x ".join(n.shape),
            n.dtype,
            n.bytes,
            int(n.side != FORWARD),
            n.layer,
            [place[name] for name in n.inputs],
        ]
        for n in shot.nodes
    ]

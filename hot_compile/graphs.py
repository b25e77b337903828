"""The graphs of a compiled step for programs: facts of each node, as networkx."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import networkx
import torch
from torch import fx

from .passes.base.graph import closure, is_tangent, module_path, placeholders, returned
from .passes.base.site import bytes_of
from .passes.plan import Plan
from .passes.storage.record import Crossing

FORWARD, BACKWARD = "forward", "backward"
STAGES = {
    "before": "the joint graph as it was traced",
    "after": "the joint graph with the plan carried out",
    "stored": "forward and backward, with what crosses stored compressed",
}


@dataclasses.dataclass(frozen=True)
class Fact:
    """One node of a graph, without what keeps the graph alive."""

    name: str
    op: str
    """fx's kind: ``placeholder``, ``call_function``, ``get_attr``."""
    target: str
    """The operator, e.g. ``aten.mm.default``."""
    shape: tuple[str, ...]
    """Symbolic sizes keep their symbol; empty of what is no tensor."""
    dtype: str
    """'' of what is no tensor."""
    bytes: int
    """What its value would take, symbolic sizes by hint. A view shares its base's memory."""
    side: str
    """``forward`` or ``backward``."""
    layer: str
    """Path of the module whose work it is, '' if unknown."""
    inputs: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A graph as one stage left it."""

    nodes: tuple[Fact, ...]
    """In order, without the output."""
    returned: tuple[str, ...]
    """Names of what the graph returns, in order; '' for what is no node."""


class Reported(Protocol):
    """What is needed of a ``GraphReport``."""

    @property
    def plan(self) -> Plan:
        """What each layer gets."""

    @property
    def crossing(self) -> tuple[Crossing, ...]:
        """What crosses."""

    @property
    def stages(self) -> Mapping[str, Snapshot]:
        """By stage: ``joint.before``, ``joint.after``, ``forward``, ``backward``."""


def snapshot(stage: str, graph: fx.Graph | fx.GraphModule) -> Snapshot:
    """Facts of ``graph``, which may change afterwards. Takes milliseconds for thousands of nodes.

    ``stage``: ``forward`` or ``backward`` where the graph is one side, else sides are found out.
    """
    graph = graph.graph if isinstance(graph, fx.GraphModule) else graph
    late = closure(filter(is_tangent, placeholders(graph)))
    facts = []
    for node in graph.nodes:
        if node.op != "output":
            tagged = str(node.meta.get("partitioner_tag", "")).endswith(BACKWARD)
            side = BACKWARD if node in late or tagged else FORWARD
            facts.append(_fact(node, stage if stage in (FORWARD, BACKWARD) else side))
    names = (value.name if isinstance(value, fx.Node) else "" for value in returned(graph))
    return Snapshot(tuple(facts), tuple(names))


def _fact(node: fx.Node, side: str) -> Fact:
    value = node.meta.get("val")
    parts = value if isinstance(value, (list, tuple)) else (value,)
    one = value if isinstance(value, torch.Tensor) else None
    return Fact(
        name=node.name,
        op=node.op,
        target=str(node.target) if node.op != "call_function" else _operator(node.target),
        shape=() if one is None else tuple(map(str, one.shape)),
        dtype="" if one is None else str(one.dtype).removeprefix("torch."),
        bytes=sum(bytes_of(part) for part in parts if isinstance(part, torch.Tensor)),
        side=side,
        layer=module_path(node) or "",
        inputs=tuple(operand.name for operand in node.all_input_nodes),
    )


def _operator(target: Any) -> str:
    plain = isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator))
    return str(target) if plain else getattr(target, "__name__", str(target))


def arrivals(forward: Snapshot, backward: Snapshot) -> dict[str, str]:
    """By name of a backward's placeholder: the forward's node that arrives there.

    The forward returns tensors before sizes, the backward takes sizes before tensors.
    """
    waiting = [n for n in backward.nodes if n.op == "placeholder" and "tangents" not in n.target]
    known = {n.name: n for n in forward.nodes}
    sent = [known[name] for name in forward.returned[-len(waiting) :] if name in known]
    pairs = list(zip(_tensors_first(sent), _tensors_first(waiting), strict=False))
    alike = all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in pairs)
    if len(sent) == len(waiting) and alike:
        return {b.name: a.name for a, b in pairs}
    return {b.name: b.name for b in waiting if b.name in known}


def _tensors_first(facts: Iterable[Fact]) -> list[Fact]:
    return sorted(facts, key=lambda fact: not fact.dtype)


def joined(forward: Snapshot, backward: Snapshot) -> tuple[Snapshot, frozenset[str]]:
    """Both sides as one graph, and the names of what crosses between them.

    What the backward does again, though the forward did it, has ``.again`` behind its name.
    """
    crossing, taken = arrivals(forward, backward), {n.name for n in forward.nodes}
    own = (n.name for n in backward.nodes if n.name not in crossing)
    name_of = {**crossing, **{n: f"{n}.again" if n in taken else n for n in own}}
    later = (
        dataclasses.replace(n, name=name_of[n.name], inputs=tuple(name_of[i] for i in n.inputs))
        for n in backward.nodes
        if n.name not in crossing
    )
    ends = tuple(name_of.get(name, "") for name in backward.returned)
    return Snapshot((*forward.nodes, *later), ends), frozenset(crossing.values())


def stage_of(report: Reported, stage: str) -> tuple[Snapshot, frozenset[str]]:
    """One stage's graph, and the names of what crosses (only ``stored`` knows).

    Raises:
        ValueError: no such stage, or the graph did not get there.
    """
    if stage not in STAGES:
        raise ValueError(f"got stage={stage!r}; expected one of {list(STAGES)}.")
    kept = report.stages
    try:
        if stage == "stored":
            return joined(kept[FORWARD], kept[BACKWARD])
        after = kept.get("joint.after", kept["joint.before"])  # none where it could not be read
        return (kept["joint.before"] if stage == "before" else after), frozenset()
    except KeyError as missing:
        raise ValueError(
            f"got a report without its graphs ({missing}); expected one of hot_compile.explain "
            "or hot_compile.memory_report."
        ) from None


def digraph(report: Reported, stage: str = "after") -> networkx.DiGraph:
    """One compiled graph as ``stage`` left it, a node for each of its nodes, by name.

    Attributes of a node: the fields of ``Fact`` but inputs, which are the edges (``shape`` as text,
    e.g. ``8 x 197 x 768``); ``strategy``: what its layer got, '' if it is none of ours;
    ``crosses_as``: how it is kept for the backward, '' if it is not; ``stored_bytes``: what that
    takes; ``output``: the graph returns it. All are text, numbers or truth values.

    Raises:
        ValueError: no such stage, or the report has no graphs.
    """
    shot, cut = stage_of(report, stage)
    kept, given = {c.name: c for c in report.crossing}, strategies(report.plan)
    graph = networkx.DiGraph(stage=stage)
    for n in shot.nodes:
        crossing = kept.get(n.name) if n.side == FORWARD else None
        own = {f.name: getattr(n, f.name) for f in dataclasses.fields(n) if f.name != "inputs"}
        graph.add_node(
            n.name,
            **{**own, "shape": " x ".join(n.shape)},
            stage=stage,
            strategy=given.get(n.layer, ""),
            crosses_as=crossing.scheme if crossing else "exact" if n.name in cut else "",
            stored_bytes=crossing.bytes if crossing else 0,
            output=n.name in shot.returned,
        )
    graph.add_edges_from((i, n.name) for n in shot.nodes for i in n.inputs)
    return graph


def strategies(plan: Plan) -> dict[str, str]:
    """By module path: the strategies of its products, most often one."""
    found: dict[str, dict[str, None]] = {}
    for decision in plan:
        found.setdefault(decision.site.split("#")[0], {})[decision.strategy.value] = None
    return {layer: ", ".join(given) for layer, given in found.items()}


def union(reports: Sequence[Reported], stage: str = "after") -> networkx.DiGraph:
    """All compiled graphs side by side; node ``mm`` of the second one is called ``1:mm``.

    Nodes also have the attribute ``graph``: the number of theirs.
    """
    whole = networkx.DiGraph(stage=stage)
    for number, report in enumerate(reports):
        own = digraph(report, stage)
        networkx.set_node_attributes(own, number, "graph")
        whole.update(networkx.relabel_nodes(own, {name: f"{number}:{name}" for name in own}))
    return whole


def neighbourhood(graph: networkx.DiGraph, layer: str, radius: int = 1) -> networkx.DiGraph:
    """A copy of the part of ``graph`` that is ``layer``'s, and what is ``radius`` edges around it.

    Args:
        graph: what ``digraph`` or ``union`` made.
        layer: a module's path; what lies below it counts: a block is a layer, too.
        radius: 0 leaves the layer alone.

    Raises:
        KeyError: the graph has no such layer.
    """
    found = {n for n, own in graph.nodes(data="layer") if f"{own}.".startswith(f"{layer}.")}
    if not found:
        known = sorted({own for _, own in graph.nodes(data="layer") if own})
        raise KeyError(f"got layer {layer!r}; the graph has {known}")
    edge = found
    for _ in range(radius):
        edge = {other for n in edge for other in (*graph.pred[n], *graph.succ[n])} - found
        found |= edge
    part = networkx.DiGraph(**graph.graph)
    part.add_nodes_from((n, dict(facts)) for n, facts in graph.nodes(data=True) if n in found)
    part.add_edges_from((a, b) for a, b in graph.edges if a in found and b in found)
    return part

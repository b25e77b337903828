"""Facts of each node of a compiled step's graphs, which keep none of the graphs alive."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import fx

from .passes.base.graph import closure, is_tangent, module_path, placeholders, returned
from .passes.base.site import bytes_of

FORWARD, BACKWARD = "forward", "backward"


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


def stage_of(report: Reported, stage: str) -> Snapshot:
    """The joint graph, ``before`` or ``after`` the plan was carried out.

    Raises:
        ValueError: the report has no graphs.
    """
    kept = report.stages
    try:
        # none where it could not be read
        after = kept.get("joint.after", kept["joint.before"])
        return kept["joint.before"] if stage == "before" else after
    except KeyError as missing:
        raise ValueError(
            f"got a report without its graphs ({missing}); expected one of hot_compile.explain "
            "or hot_compile.memory_report."
        ) from None

"""What was done to a graph in a few figures, and digests that tell graphs apart."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .config import OBJECTS, HotConfig, Strategy
from .passes.base.graph import module_path, readable
from .passes.layers.match import GraphInputs
from .passes.pipeline import sources_hash
from .passes.plan import Plan
from .passes.profile.profile import Profile
from .record import GraphReport
from .runtime.native.providers import runtime_version


@dataclasses.dataclass(frozen=True)
class Figures:
    """What was done to one graph."""

    layers: str
    """Digest of its layers' names and widths: the same for every batch."""
    products: int
    rewritten: int
    held: int
    uncompressed: int
    why: str = ""
    """The most frequent reason why products stay exact."""

    @classmethod
    def of(cls, report: GraphReport) -> Figures:
        """The figures of a graph that was compiled."""
        layers = repr([(d.site, d.shape[1:]) for d in report.plan])
        return cls(
            layers=hashlib.sha256(layers.encode()).hexdigest(),
            products=len(report.plan.decisions),
            rewritten=len(report.plan.rewritten),
            held=report.held_bytes,
            uncompressed=sum(c.bytes_before for c in report.crossing),
            why=most_frequent_reason(report.plan),
        )


def most_frequent_reason(plan: Plan) -> str:
    """Why most products stay exact. Reasons that differ in a number count as one."""
    reasons = [d.reason for d in plan if d.strategy is Strategy.EXACT and d.reason]
    counts = Counter(_without_numbers(reason) for reason in reasons)
    return max(reasons, key=lambda reason: counts[_without_numbers(reason)], default="")


def _without_numbers(reason: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "#", reason)


def graph_key(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    mode: str | None,
    options: Mapping[str, Any] | None,
) -> str:
    """Digest of :func:`graph_facts`."""
    facts = graph_facts(gm, example_inputs, mode, options)
    return hashlib.sha256(facts.encode()).hexdigest()


def code_key(
    gm: fx.GraphModule,
    inputs: GraphInputs,
    config: HotConfig,
    profile: Profile | None,
    more: object,
) -> str:
    """Digest of all that changes the compiled code besides the graph itself, ``more`` among it.

    Module paths count because include, exclude and override match on them.
    """
    paths = sorted({module_path(node) or "" for node in gm.graph.nodes})
    content = profile.content_hash() if profile else None
    ours = sources_hash(), runtime_version(), config.stable_hash()
    return hashlib.sha256(repr((*ours, inputs, paths, content, more)).encode()).hexdigest()


def graph_facts(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    mode: str | None,
    options: Mapping[str, Any] | None,
) -> str:
    """One of Dynamo's graphs and how it is to be compiled: alike in every process."""
    inputs = [
        (str(x.dtype), str(x.device), list(map(str, x.shape)), x.requires_grad)
        if isinstance(x, torch.Tensor)
        else str(type(x))
        for x in example_inputs
    ]
    settings = sorted(
        (key, type(value).__name__ if key in OBJECTS else repr(value))
        for key, value in (options or {}).items()
    )
    versions = torch.__version__, sources_hash(), runtime_version()
    parts = readable(gm), inputs, mode, settings, versions
    return repr(parts)

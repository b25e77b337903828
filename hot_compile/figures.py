"""What was done to a graph in a few figures, kept beside the caches that may hold its code.

On a hit in Inductor's cache no pass runs and nobody is told of anything: what was kept counts then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor.runtime.cache_dir_utils import cache_dir

from .config import OBJECTS, HotConfig, Strategy
from .passes.base.files import write_whole
from .passes.base.graph import module_path, readable
from .passes.layers.match import GraphInputs
from .passes.pipeline import sources_hash
from .passes.plan import Plan
from .passes.profile.profile import Profile
from .record import GraphReport, Listener
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

    def save(self, digest: str) -> None:
        """Keep them for a process that gets this graph from Inductor's cache; or do nothing."""
        with contextlib.suppress(OSError):
            write_whole(_noted(digest), json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, digest: str) -> Figures | None:
        """What was kept of a graph; None if nothing was, or it cannot be read."""
        try:
            return cls(**json.loads(_noted(digest).read_text()))
        except (OSError, ValueError, TypeError):
            return None


def keeping(digest: str, listener: Listener | None) -> Listener:
    """Keeps the figures of the graph of this digest, and tells the listener."""

    def listen(report: GraphReport) -> None:
        Figures.of(report).save(digest)
        if listener is not None:
            listener(report)

    return listen


def most_frequent_reason(plan: Plan) -> str:
    """Why most products stay exact. Reasons that differ in a number count as one."""
    reasons = [d.reason for d in plan if d.strategy is Strategy.EXACT and d.reason]
    counts = Counter(_without_numbers(reason) for reason in reasons)
    return max(reasons, key=lambda reason: counts[_without_numbers(reason)], default="")


def _without_numbers(reason: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "#", reason)


def _noted(digest: str) -> Path:
    return Path(cache_dir()) / "hot_compile" / f"{digest[:32]}.json"


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

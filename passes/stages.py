"""What the steps of the pipeline hand on: a joint graph's, and a partitioned one's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set
from typing import Any

from torch import fx

from hot_compile.config import Memory
from hot_compile.passes.base.schemes import Scheme
from hot_compile.passes.base.site import Site
from hot_compile.passes.context import Context
from hot_compile.passes.exact.forms import Candidate
from hot_compile.passes.head.plan import HeadDecision
from hot_compile.passes.plan import Plan, Prices
from hot_compile.passes.storage.choose import Asked
from hot_compile.passes.storage.crossers import Crosser, Judge
from hot_compile.passes.storage.fit_budget import BudgetReport, Fit
from hot_compile.passes.storage.step_time import StepTime


@dataclasses.dataclass
class Joint:
    """What the steps on a joint graph hand on."""

    context: Context
    graph: fx.Graph
    heads: tuple[HeadDecision, ...] = ()
    sites: list[Site] = dataclasses.field(default_factory=list)
    found: list[Candidate] = dataclasses.field(default_factory=list)
    prices: Prices = dataclasses.field(default_factory=dict)
    step: StepTime | None = None
    """About what a step takes as it comes, where storing is to be measured against that: not that
    its device was seen to wait."""
    plan: Plan = dataclasses.field(default_factory=lambda: Plan("exact", ()))


@dataclasses.dataclass
class Partitioned:
    """What the steps on a partitioned graph hand on."""

    context: Context
    plan: Plan | None
    forward: fx.GraphModule
    backward: fx.GraphModule
    num_fwd_outputs: int
    found: list[Crosser] = dataclasses.field(default_factory=list)
    advanced: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Names of what is saved so that it may be stored, and was to be made again; each with that of
    what it is saved for."""
    before: frozenset[str] = frozenset()
    """Names of what was saved before that."""
    chosen: dict[Crosser, Scheme] = dataclasses.field(default_factory=dict)
    hosted: frozenset[Crosser] = frozenset()
    """What waits for the backward in host memory, as it is stored."""
    seconds: dict[Crosser, float | None] = dataclasses.field(default_factory=dict)
    """Predicted for each of ``chosen`` and ``hosted``."""
    stored: dict[Crosser, Any] = dataclasses.field(default_factory=dict)
    names: dict[Crosser, str] = dataclasses.field(default_factory=dict)
    """What profiles and options call ``found``."""
    asked: dict[Crosser, Asked] = dataclasses.field(default_factory=dict)
    """How options, or a monitor, want some of ``found`` stored."""
    too_dear: Set[Crosser] = frozenset()
    """What could be stored and is not, for the time it would take."""
    verdicts: dict[Crosser, str] = dataclasses.field(default_factory=dict)
    """What was measured of some of ``found``, and who asked for their bits, in words."""
    fit: Fit | None = None
    """Where there is a budget of the step's peak: how the graph was cut to stay within it."""
    met: BudgetReport | None = None
    """How that is met, as predicted."""
    step: StepTime | None = None
    """About what a step takes as it comes, where storing is to be measured against that."""
    spent: float = 0.0
    """Seconds of what storing may take that making again takes."""
    by_user: bool = False
    """What is made again is what the user wants: by a partitioner or a budget of torch's."""

    @property
    def graphs(self) -> tuple[fx.Graph, fx.Graph]:
        """Of the forward and of the backward."""
        return self.forward.graph, self.backward.graph

    @property
    def named(self) -> dict[str, fx.Graph]:
        """The graphs by the names that reports have for them."""
        return dict(zip(("forward", "backward"), self.graphs, strict=True))

    @property
    def stores(self) -> bool:
        """Something may be stored compressed: the graph has layers, and the user wants it."""
        return self.plan is not None and self.context.config.memory is not Memory.OFF

    @property
    def forms(self) -> bool:
        """Forms that are as exact, and faster, may be taken."""
        return self.plan is not None and self.context.config.exact_forms

    @property
    def fits(self) -> bool:
        """It is within a budget of the step's peak as it is."""
        return self.fit is not None and not self.fit.stores

    def judge(self) -> Judge:
        """What says of the graphs, as they are now, which tensors tolerate rounding."""
        config = self.context.config
        seen = not self.context.captured
        return Judge(*self.graphs, self.context.inputs, config.memory_min_bytes, seen)

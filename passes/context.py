"""What the stages know besides the graph, and where they leave what they did."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import fx

from hot_compile.config import HotConfig
from hot_compile.passes.base.schemes import Scheme
from hot_compile.passes.cost.linear import Pricing, Rates
from hot_compile.passes.layers.match import GraphInputs
from hot_compile.passes.measure.observe import Observation
from hot_compile.passes.plan import Plan
from hot_compile.passes.profile.profile import Profile
from hot_compile.passes.storage.crossers import Crosser
from hot_compile.passes.storage.fit_budget import Allowance, BudgetReport
from hot_compile.passes.storage.predicted_peak import Fused
from hot_compile.passes.storage.prices import (
    StoragePrice,
    host_seconds,
    host_storing_seconds,
    restored_by_readers,
    storing_seconds,
)
from hot_compile.passes.storage.record import Crossing
from hot_compile.passes.storage.step_time import StepTime


class Recorder(Protocol):
    """Where stages leave what they did."""

    def graph(self, stage: str, graph: fx.Graph | fx.GraphModule) -> None:
        """Keep a stage's graph."""

    def finished(
        self, plan: Plan | None, crossing: tuple[Crossing, ...], met: BudgetReport | None
    ) -> None:
        """Keep the outcome of a whole training graph; ``met``: how it stays within a budget of the
        step's peak, if there is one.
        """


@dataclasses.dataclass(frozen=True)
class Context:
    """What the stages know besides the graph. One per backend call: calls may nest or overlap."""

    config: HotConfig
    inputs: GraphInputs
    pricing: Pricing
    recorder: Recorder
    identity: str
    """Digest of everything outside the graph that changes the code, for Inductor's cache key."""
    profile: Profile | None = None
    """What calibration measured of this model."""
    observation: Observation | None = None
    """Shown every layer's operands in each backward; the graph is then left exact."""
    asked: HotConfig | None = None
    """The user's own options, if ``config`` has more: warnings are about these."""
    raised: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Why a monitor has some tensors stored in more bits, by their names in a profile."""
    allowance: Allowance | None = None
    """What the graph may add to the device's memory, if there is a budget of a step's peak."""
    captured: bool = False
    """Steps are to be CUDA graphs."""
    timed: StepTime | None = None
    """How long a step takes, if that was measured."""
    known: str = ""
    """What earlier runs found and this one heeds, in words."""

    def rates(self, device: torch.device) -> Rates | None:
        """Of a device, the user's own laid over them; None: nothing can run there."""
        found = self.pricing(device)
        return None if isinstance(found, str) else found.override(dict(self.config.rates))

    def rates_of(self, nodes: Iterable[fx.Node]) -> dict[fx.Node, Rates | None]:
        """Of each node's device."""
        devices = {node: node.meta["val"].device for node in nodes}
        known = {device: self.rates(device) for device in set(devices.values())}
        return {node: known[device] for node, device in devices.items()}

    def storage_prices(self, found: Sequence[Crosser], by_launch: bool = False) -> StoragePrice:
        """What says how many seconds storing one of ``found`` costs a step.

        ``by_launch``: one whose device waits for its host.
        """
        return self._prices(found, host_storing_seconds if by_launch else storing_seconds)

    def host_prices(self, found: Sequence[Crosser]) -> StoragePrice:
        """What says how many seconds one of ``found`` is under way to host memory and back.

        A CUDA graph has no such ways: they cross from one graph to another.
        """
        return self._prices(found, (lambda *_: None) if self.captured else host_seconds)

    def _prices(
        self, found: Sequence[Crosser], seconds: Callable[[Crosser, Scheme, Rates], float | None]
    ) -> StoragePrice:
        known = self.rates_of(crosser.saved for crosser in found)

        def price(crosser: Crosser, scheme: Scheme) -> float | None:
            rates = known[crosser.saved]
            return None if rates is None else seconds(crosser, scheme, rates)

        return price

    def restores(self, found: Sequence[Crosser]) -> Fused:
        """What says which of ``found`` the backward's kernels restore on their way."""
        restored = self._prices(found, restored_by_readers)
        return lambda crosser, scheme: bool(restored(crosser, scheme))

"""The stages as Inductor hooks: one joint-graph pass (match, plan, rewrite) and one partitioner."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn

from hot_compile.config import HotConfig, Memory
from hot_compile.errors import HotError
from hot_compile.passes.crossing import Crossing, crossing
from hot_compile.passes.head.rewrite import chunk_heads
from hot_compile.passes.layouts import mark_channels_last
from hot_compile.passes.match import GraphInputs, match
from hot_compile.passes.observe import Observer, observe
from hot_compile.passes.partition import store
from hot_compile.passes.patches import patches_as_products
from hot_compile.passes.plan import Plan, Pricing, plan
from hot_compile.passes.plan_memory import plan_storage
from hot_compile.passes.pools import gather_pool_gradients
from hot_compile.passes.profile import Profile
from hot_compile.passes.rewrite import rewrite
from hot_compile.passes.shorten import shorten
from hot_compile.passes.stems import stems_over_blocks
from hot_compile.passes.tolerance import crossers

log = logging.getLogger("hot_compile")


class Recorder(Protocol):
    """Where stages leave what they did."""

    def graph(self, stage: str, graph: fx.Graph | fx.GraphModule) -> None:
        """Keep a stage's graph."""

    def finished(self, plan: Plan | None, crossing: tuple[Crossing, ...]) -> None:
        """Keep the outcome of a whole training graph."""


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
    observer: Observer | None = None
    """Shown every layer's operands in each backward; the graph is then left exact."""


@cache
def sources_hash() -> str:
    """Digest of this package's own source, so that an upgrade never hits an old cache entry."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class JointPass(CustomGraphPass):
    """match -> plan -> rewrite on the joint graph, after whatever pass the user had there.

    Before that heads and their losses are taken out (``chunk_heads``): they are no layers.

    Then what stays exact and has a faster form that is as exact (``patches_as_products``,
    ``stems_over_blocks``, ``gather_pool_gradients``).
    """

    def __init__(self, context: Context, before: Sequence[Any] = ()) -> None:
        self._context = context
        self._before = tuple(before)
        self.plan: Plan | None = None

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite ``graph`` in place; on any failure to read it, leave it exact and warn."""
        for step in self._before:
            step(graph)
        self.plan = None
        context = self._context
        context.recorder.graph("joint.before", graph)
        try:
            heads = chunk_heads(graph, context.config)
            sites = match(graph, context.inputs)
            if not sites and not heads:
                return
            chosen = plan(sites, context.config, context.pricing, context.profile)
            chosen = dataclasses.replace(chosen, heads=heads)
            if context.observer is not None:
                observe(graph, sites, context.observer, chosen)
                return
        except HotError:  # the user's mistake, e.g. a profile of another model
            raise
        except Exception:
            log.warning(
                "hot: the joint graph could not be read; this graph stays exact", exc_info=True
            )
            return
        self.plan = rewrite(graph, sites, chosen, pin=not context.config.recompute)
        if context.config.recipe != "exact":
            patches_as_products(graph)
            stems_over_blocks(graph)
            gather_pool_gradients(graph)
        context.recorder.graph("joint.after", graph)

    def uuid(self) -> Any:
        """Key for Inductor's caches; None (bypass) if a user's own pass has none."""
        return _uuid(self._context.identity, self._before)


class Partitioner(CustomPartitionerFn):
    """min-cut (or the user's own partitioner), then the list of what crosses."""

    def __init__(
        self, context: Context, joint: JointPass, inner: CustomPartitionerFn | None = None
    ) -> None:
        self._context = context
        self._joint = joint
        self._inner = inner

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split the joint graph, store what crosses by plan, and record what came of it."""
        forward, backward = self._split(gm, joint_inputs, kwargs)
        try:
            mark_channels_last(forward)
            kept = self._compress(forward.graph, backward.graph, kwargs["num_fwd_outputs"])
        except Exception:
            log.warning("hot: what crosses could not be stored; it stays exact", exc_info=True)
            forward, backward = self._split(gm, joint_inputs, kwargs)  # the graphs half changed
            kept = ()
        forward.recompile()
        backward.recompile()
        recorder = self._context.recorder
        recorder.graph("forward", forward)
        recorder.graph("backward", backward)
        recorder.finished(self._joint.plan, kept)
        return forward, backward

    def _split(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], kwargs: dict[str, Any]
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        partition: Callable = self._inner or min_cut_rematerialization_partition
        with self._recomputation():
            forward, backward = partition(gm, joint_inputs, **kwargs)
        shorten(backward.graph)
        return forward, backward

    def _compress(
        self, forward: fx.Graph, backward: fx.Graph, num_fwd_outputs: int
    ) -> tuple[Crossing, ...]:
        """Store what crosses by plan, if the graph has layers at all."""
        config, inputs = self._context.config, self._context.inputs
        found = crossers(forward, backward, num_fwd_outputs, inputs, config.memory_min_bytes)
        chosen = plan_storage(found, config) if self._joint.plan is not None else {}
        return crossing(found, store(forward, backward, num_fwd_outputs, chosen))

    def _recomputation(self) -> contextlib.AbstractContextManager[None]:
        """Where we change the graph: min-cut may recompute pointwise inputs of backward products.

        Inductor bans that by default, because an exact product reads such an x from memory anyway;
        but what is stored compressed is restored by a pointwise kernel in any case.
        """
        plan, config = self._joint.plan, self._context.config
        changed = plan is not None and (plan.rewritten or config.memory is not Memory.OFF)
        if not changed or not config.recompute:
            return contextlib.nullcontext()
        return functorch_config.patch(ban_recompute_materialized_backward=False)

    def uuid(self) -> Any:
        """Key for Inductor's caches."""
        return _uuid(self._context.identity, () if self._inner is None else (self._inner,))


def _uuid(identity: str, others: Sequence[Any]) -> Any:
    theirs = [other.uuid() if hasattr(other, "uuid") else None for other in others]
    if any(uuid is None for uuid in theirs):
        return None
    return hashlib.sha256(repr((identity, theirs, torch.__version__)).encode()).hexdigest()

"""The two hooks of Inductor's in which the pipeline runs: a joint graph's, a partitioner's."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch.utils.checkpoint import CheckpointPolicy

from hot_compile.config import Memory
from hot_compile.passes.base.steps import run, traced
from hot_compile.passes.context import Context
from hot_compile.passes.measure.observe import Observation, observe_stored, unobserved
from hot_compile.passes.measure.stored import fed_by
from hot_compile.passes.option_warnings import check_peak, idle_bits, tell, unmet_budget, unmet_peak
from hot_compile.passes.pipeline import CROSSING, HEADS, JOINT, OBSERVED, PARTITIONED
from hot_compile.passes.plan import Plan
from hot_compile.passes.spared_work import spare_work
from hot_compile.passes.stages import Joint, Partitioned
from hot_compile.passes.storage.crossers import saved_pairs
from hot_compile.passes.storage.fit_budget import (
    Allowance,
    BudgetTrial,
    Way,
    fit,
    recomputes_collectives,
    saved_sizes,
)
from hot_compile.passes.storage.kept_casts import casts_to_keep
from hot_compile.passes.storage.made_again import (
    forget_asked,
    gathered_again,
    joined_again,
    kept_nodes,
    made_of_changed,
)
from hot_compile.passes.storage.predicted_peak import Rise
from hot_compile.passes.storage.record import Crossing, crossing
from hot_compile.passes.storage.step_time import StepTime
from hot_compile.runtime.kernel_order import ordered
from hot_compile.runtime.mixed_order import row_by_row
from hot_compile.runtime.peak_estimate import estimated
from hot_compile.runtime.read_back import awaited
from hot_compile.runtime.settled_views import settled
from hot_compile.runtime.written_views import kept

log = logging.getLogger("hot_compile")

_TWIN_BUDGET = 0.3
"""Share of its activations that an observed graph keeps; the rest it computes again. About what
compressed storage takes of exact storage, so that an observed step fits where a usual one does."""

Pass = TypeVar("Pass", bound="_Uncopied")


class _Uncopied:
    """Stays one object where Inductor copies its configuration, as it does to write a trace.

    What a pass holds, fake tensors in graphs among it, must not be copied: that crashed. Nor must
    it be in the keys of Inductor's caches, for which that pickles its configuration: a listener of
    ``hot-compile run`` cannot be, and then nothing was cached.
    """

    def __deepcopy__(self: Pass, memo: dict[int, Any]) -> Pass:
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self.uuid()),)

    def uuid(self) -> Any:
        """Key for Inductor's caches; None (bypass) if a user's own pass has none."""
        raise NotImplementedError


class JointPass(_Uncopied, CustomGraphPass):
    """``JOINT``, or ``OBSERVED``, after whatever pass the user had there."""

    def __init__(self, context: Context, before: Sequence[Any] = ()) -> None:
        self._context = context
        self._before = tuple(before)
        self.plan: Plan | None = None
        self.intended: Plan | None = None
        """The plan, also where the graph was left exact to be observed."""
        self.step: StepTime | None = None

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite ``graph`` in place."""
        spare_work()
        settled()
        kept()
        awaited()
        estimated()
        ordered()
        row_by_row()
        for step in self._before:
            step(graph)
        self.plan, self.intended = None, None
        context = self._context
        context.recorder.graph("joint.before", graph)
        joint = Joint(context, graph)
        graphs = {"joint": graph}
        run("joint", HEADS, joint, graphs)
        self.step = joint.step
        observed = context.observation is not None
        if run("joint", OBSERVED if observed else JOINT, joint, graphs):
            self.intended = joint.plan
            if not observed:
                self.plan = joint.plan
                context.recorder.graph("joint.after", graph)

    def uuid(self) -> Any:
        """As for every pass."""
        return _uuid(self._context.identity, self._before)


class Partitioner(_Uncopied, CustomPartitionerFn):
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

        self._observe(gm, joint_inputs, kwargs)

        observed, allowance = self._context.observation is not None, self._context.allowance
        cut_graph = functools.partial(
            self._partitioned, gm, joint_inputs, kwargs, self._joint.plan, observed
        )
        if not observed and allowance is not None and self._joint.plan is not None:
            recompute = not recomputes_collectives(gm.graph)
            cut = self._fitted(allowance, cut_graph, recompute)
        else:
            cut = cut_graph()
        kept = self._stored(cut)
        self._record(cut)
        cut.forward.recompile()
        cut.backward.recompile()
        if self._joint.plan is not None:
            traced("hot_plan", self._joint.plan.to_json)
        traced("hot_crossing", lambda: [dataclasses.asdict(c) for c in kept])
        self._context.recorder.finished(self._joint.plan, kept, cut.met)
        return cut.forward, cut.backward

    def _fitted(
        self, allowance: Allowance, cut: Callable[..., Partitioned], recompute: bool
    ) -> Partitioned:
        """Cut so that the step adds no more than it may, as far as cutting can do that."""
        halves: dict[Way, Partitioned] = {}

        def tried(way: Way) -> BudgetTrial:
            halves[way] = found = cut(way)
            sizes = *found.graphs, found.num_fwd_outputs
            rise = Rise(*sizes, None)
            counted = rise.held() if allowance.between else rise()
            return BudgetTrial(way, counted, saved_sizes(saved_pairs(*sizes)))

        found = fit(allowance.rise, tried, recompute and self._context.config.recompute)
        return dataclasses.replace(halves[found.way], fit=found)

    def _stored(self, cut: Partitioned) -> tuple[Crossing, ...]:
        """Store what crosses; gives the record of it."""
        run("partitioned", PARTITIONED, cut, cut.named)
        facts = cut.seconds, cut.verdicts, cut.asked, cut.hosted
        kept = crossing(cut.found, cut.stored, *facts)
        if (met := cut.met) is not None:
            assert self._context.allowance is not None
            check_peak(met, self._context.allowance)
            tell(unmet_peak(met, self._context.config))
            self._context.allowance.tell(met)
        elif cut.stores:
            tell(unmet_budget(cut.found, cut.chosen, kept, self._context.config, cut.asked))
        if cut.stores:
            tell(idle_bits(cut.names.values(), self._context.asked or self._context.config))
        return kept

    def _record(self, cut: Partitioned) -> None:
        """Show the graphs while every operator of a layer is still a node of its own."""
        for name, half in (("forward", cut.forward), ("backward", cut.backward)):
            self._context.recorder.graph(name, half)

    def _observe(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], kwargs: dict[str, Any]
    ) -> None:
        """Ready an observed graph, once: half a graph that failed is cut anew from the same."""
        observation = self._context.observation
        if observation is not None:
            _keep_random_draws(gm.graph)
            if observation.wants_stored and self._context.config.memory is not Memory.OFF:
                self._show_crossing(gm, joint_inputs, kwargs, observation)

    def _partitioned(
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        kwargs: dict[str, Any],
        plan: Plan | None,
        observed: bool,
        way: Way | None = None,
    ) -> Partitioned:
        partition: Callable = self._inner or min_cut_rematerialization_partition
        rates = self._context.rates
        keep, spent = (way.keep, 0.0) if way else casts_to_keep(gm.graph, self._joint.step, rates)
        keep = [*keep, *made_of_changed(gm.graph)]
        with kept_nodes(gm, keep), self._recomputation(gm, plan, observed, way):
            forward, backward = partition(gm, joint_inputs, **kwargs)
        for half in (forward, backward):
            forget_asked(half.graph)
        outputs, step = kwargs["num_fwd_outputs"], self._joint.step
        by_user = self._inner is not None or functorch_config.activation_memory_budget < 1
        graphs = forward, backward, outputs
        return Partitioned(self._context, plan, *graphs, step=step, spent=spent, by_user=by_user)

    def _show_crossing(
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        kwargs: dict[str, Any],
        observation: Observation,
    ) -> None:
        """Let an observed graph show what would cross if it were compiled for good.

        A copy is partitioned as then to find out. What fails costs the measurements of storage
        only.
        """
        try:
            bare = unobserved(gm)
            cut = self._partitioned(bare, joint_inputs, kwargs, self._joint.intended, False)
            run("crossing", CROSSING, cut, cut.named)
            crossing = fed_by(bare.graph, cut.found, cut.chosen, *cut.graphs)
            observe_stored(gm.graph, crossing, observation)
        except Exception:
            log.warning("hot: what crosses could not be measured", exc_info=True)

    def _recomputation(
        self, gm: fx.GraphModule, plan: Plan | None, observed: bool, way: Way | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Where we change the graph: min-cut may recompute pointwise inputs of backward products.

        Inductor bans that by default, because an exact product reads such an x from memory anyway;
        but what is stored compressed is restored by a pointwise kernel in any case. An observed
        graph, which stores nothing compressed, recomputes what it takes to hold no more than that.

        ``way``: what a budget of the step's peak allows, where there is one.
        """
        config = self._context.config
        if observed:
            return functorch_config.patch(
                ban_recompute_materialized_backward=False, activation_memory_budget=_TWIN_BUDGET
            )
        stores = config.memory not in (Memory.OFF, Memory.FREE)  # recomputing is not for free
        changed = plan is not None and (plan.rewritten or stores)
        recompute = changed and config.recompute if way is None else way.recompute
        if not recompute:
            return contextlib.nullcontext()
        return _inputs_made_again(gm, config.memory_min_bytes)

    def uuid(self) -> Any:
        """As for every pass."""
        return _uuid(self._context.identity, () if self._inner is None else (self._inner,))


@contextlib.contextmanager
def _inputs_made_again(gm: fx.GraphModule, min_bytes: int) -> Iterator[None]:
    made = functorch_config.patch(ban_recompute_materialized_backward=False)
    with made, joined_again(), gathered_again(gm, min_bytes):
        yield


def _uuid(identity: str, others: Sequence[Any]) -> Any:
    theirs = [other.uuid() if hasattr(other, "uuid") else None for other in others]
    if any(uuid is None for uuid in theirs):
        return None
    return hashlib.sha256(repr((identity, theirs, torch.__version__)).encode()).hexdigest()


def _keep_random_draws(graph: fx.Graph) -> None:
    """A backward that drew again would draw something else; Inductor's seeds are a few bytes."""
    for node in graph.nodes:
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags and "recompute" not in node.meta:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

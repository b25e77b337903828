"""``torch.compile(model, backend="hot")``: wires the stages into Inductor's hooks, no more."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.cudagraph_trees import reset_cudagraph_trees

from .again import compiled_for, trains, twin
from .attention import for_fast_kernels
from .budget import Budget, Budgeted, Ledger, ledger_of, note_of
from .config import RECIPES, HotConfig, refuse_misplaced, split_options
from .detached_logits import detach_logits, tied
from .figures import code_key
from .frameworks import trace_past_warnings
from .generated import lightened
from .guarantee import Guaranteed, Way
from .inductor import existing_passes, inductor_patches, keyed_by_graph
from .observing import acceptance
from .observing.acceptance import Acceptance, Findings
from .observing.auto import Notes, Observing, code_being_compiled, graph_digest
from .observing.collector import Collector
from .observing.draws import drawn_alike, draws
from .observing.eager import Eager, Heads, room
from .observing.forgetting import kept_while_open
from .observing.gauge import Differs, Gauge, Watched
from .observing.monitor import Monitor, monitor_of
from .observing.stretches import without_logits, without_regions
from .observing.walk import TooLarge
from .observing.watching import Doubled, Twin, Watch
from .passes.base.graph import readable
from .passes.base.site import bytes_of
from .passes.context import Context
from .passes.cost.devices import pricing
from .passes.cost.linear import Pricing
from .passes.exact.decompositions import decompositions
from .passes.hooks import JointPass, Partitioner
from .passes.layers.match import GraphInputs, graph_inputs
from .passes.measure.observe import Observation, Observer
from .passes.measure.stored import is_vector
from .passes.profile.profile import Profile
from .passes.spared_work import collected_later
from .passes.storage.step_time import StepTime
from .record import NO_PLAN, Dump, GraphReport, Held, Listener, Recorder, run_uncompiled
from .stand_in import stand_in

_NEW_GRAPH = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
"""Compile the graph anew. AOTAutograd's cache heeds these too; kernels found compiled are used."""


def hot(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    recorder: Recorder | None = None,
    observer: Observer | None = None,
    listener: Listener | None = None,
    inner_compile: Callable[..., Any] = compile_fx_inner,
    prices: Pricing | None = None,
    ledger: Callable[[torch.device, int], Ledger] = ledger_of,
    **others: Any,
) -> Any:
    """Compile one of Dynamo's graphs: HOT for the backward of its layers, Inductor for the rest.

    Users do not call this; ``torch.compile(model, backend="hot", options={...})`` does.

    Args:
        gm: Dynamo's graph. example_inputs: its inputs.
        mode: as for the default backend ("reduce-overhead", "max-autotune", ...).
        options: ours (see ``HotConfig``) and Inductor's, mixed.
        recorder: told of every stage of every graph (used by ``explain``); by default one that
            writes to the folder of option ``dump`` or HOT_DUMP, if any.
        observer: shown every layer's operands in each backward, and how far the gradients are from
            exact. Used by ``calibrate``; option ``lqs`` is not heeded then.
        listener: told of each graph's outcome when it is compiled. Unlike a recorder it leaves
            Inductor's caches on, and hears nothing of what comes from there.
        inner_compile: lowers the finished forward and backward graphs; Inductor, unless replaced.
        prices: rates of each device, for planning; by default this machine's, where operators run,
            as option ``prices`` says.
        ledger: of a device and a budget of its memory; by default this process's.

    Raises:
        OptionError: an option is unknown, has a bad value, or is no part of ``options``, or a
            budget of memory cannot be met.
        PassDisabledError: the mode or options would switch joint graph passes off.
        ProfileFormatError, ProfileMismatchError: option ``profile`` names a file that is no
            profile, or one of another model.
    """
    refuse_misplaced(others)
    if recorder is None and observer is None and (other := stand_in()):
        return other(gm, example_inputs, mode=mode, options=options)
    trace_past_warnings()
    ours, theirs = split_options(options)
    config = HotConfig.from_options(ours)
    monitor = monitor_of(ours)
    if monitor is None and observer is None and config.accept != "off":
        monitor = acceptance.of_step_being_compiled()
    patches = inductor_patches(mode, theirs)
    if inner_compile is not compile_fx_inner:  # torch's caches do not know who lowers: no sharing
        patches |= _NEW_GRAPH
    how: dict[str, Any] = {"inner_compile": inner_compile, "config_patches": patches}
    stock: Callable[..., Any] = functools.partial(compile_fx, **how)
    if not trains(example_inputs):
        return stock(gm, example_inputs)
    path = acceptance.path_of(gm, example_inputs, mode, options)
    if isinstance(monitor, Acceptance):
        config = config.changed(monitor.begins(path).lighter)
    prices = prices or functools.partial(pricing, prices=config.prices)
    code = code_being_compiled()

    def compile_graph(
        gm: fx.GraphModule, example_inputs: Sequence[Any], way: Way, done: list[GraphReport]
    ) -> Callable[..., Any]:
        own, logits = detach_logits(gm, way.config)
        if way.stock:
            return tied(stock(own, example_inputs), logits, gm)
        own = for_fast_kernels(own) if way.config.exact_forms else own
        graph = _Graph(
            own, example_inputs, graph_inputs(gm), inner_compile, {**patches, **way.patches},
            recorder, way.config, prices, code, done, listener,
            monitor.raised if monitor else {}, ledger, path,
        )  # fmt: skip
        run = kept_while_open(_compiled(graph, way.config, monitor, observer))
        return tied(run, logits, gm)

    if config.strict:
        return compile_graph(gm, example_inputs, Way("", config), [])
    asked = {"mode": mode, "options": options}
    return Guaranteed(gm, example_inputs, config, compile_graph, asked)


def check_options(options: Mapping[str, Any] | None) -> None:
    """Raises what :func:`hot` would of these options: OptionError, PassDisabledError."""
    ours, theirs = split_options(options)
    monitor_of(ours)
    HotConfig.from_options(ours)
    inductor_patches(None, theirs)


def _compiled(
    graph: _Graph, config: HotConfig, monitor: Monitor | None, observer: Observer | None
) -> Callable[..., Any]:
    """The graph as the options say."""
    if config.lqs == "auto" and observer is None:
        return _auto(graph, config, monitor)
    profile = Profile.load(config.profile) if config.profile else None
    if observer is not None:
        return graph.watched(config, profile, observer, graph.finished)
    return _final(graph, config, profile, monitor)


trace_past_warnings()
hot.reset = reset_cudagraph_trees  # type: ignore[attr-defined]  # torch.compiler.reset() calls it


@dataclasses.dataclass(frozen=True)
class _Graph:
    """One of Dynamo's graphs, to be compiled in one or several ways."""

    gm: fx.GraphModule
    example_inputs: Sequence[Any]
    inputs: GraphInputs
    inner_compile: Callable[..., Any]
    patches: dict[str, Any]
    recorder: Recorder | None
    asked: HotConfig
    """The user's options; a monitor adds to them."""
    prices: Pricing
    code: CodeType | None
    """What Dynamo compiled it of."""
    done: list[GraphReport]
    """Is told of it as soon as what is done to it is known."""
    listener: Listener | None = None
    raised: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Why a monitor has tensors stored in more bits, by their names."""
    ledger: Callable[[torch.device, int], Ledger] = ledger_of
    path: Path = Path()
    """Where findings of looks at it are kept."""
    known: Findings = dataclasses.field(default_factory=Findings)
    """What earlier compiles of it found."""

    def compile(
        self,
        config: HotConfig,
        profile: Profile | None = None,
        observation: Observation | None = None,
    ) -> Any:
        """The graph as ``config`` and ``profile`` say, reported to the recorder and dumped.

        With ``observation``: exact, its layers shown, and not reported.
        """
        patches = dict(self.patches)
        if not self.captured:  # parts are for CUDA graphs; finding them took 3 % of a compile
            patches.setdefault("graph_partition", False)
        dump = config.dump or os.environ.get("HOT_DUMP")  # the one variable, for debugging
        recorder = Dump() if observation else self.recorder or Dump(dump)
        budget = None if observation else self.budget
        if dump or self.recorder or observation or budget:
            patches |= _NEW_GRAPH  # on a cache hit no pass runs: none to report
        key = self._identity(config, profile)
        listener = None if observation else self.listener
        held = Held(recorder, listener, self.done, None if observation else self._kept_as(key))
        context = Context(
            config=config,
            inputs=self.inputs,
            pricing=self.prices,
            recorder=held,
            identity=key,
            profile=profile,
            observation=observation,
            asked=self.asked,
            raised=self.raised,
            allowance=budget.allowance() if budget else None,
            captured=self.captured,
            timed=self.known.step,
            known=self.known.summary,
        )
        patches["joint_custom_pre_pass"] = joint = JointPass(context, existing_passes(patches))
        inner = patches.get("custom_partitioner_fn", inductor_config.custom_partitioner_fn)
        partitioner = Partitioner(context, joint, inner)
        if partitioner.uuid() is None:  # the user's has none; torch would cache its work regardless
            patches |= _NEW_GRAPH
        patches["custom_partitioner_fn"] = partitioner
        lower = keyed_by_graph(self.inner_compile)
        with collected_later(), lightened():  # here, too, for what comes from a cache
            apart = decompositions(patches) if config.exact_forms else None
            run: Any = compile_fx(self.gm, self.example_inputs, lower, patches, apart)
        held.tell()
        return run

    @property
    def devices(self) -> list[torch.device]:
        """Of its inputs, each once, in the order of their names."""
        tensors = (x for x in self.example_inputs if isinstance(x, torch.Tensor))
        return [torch.device(name) for name in sorted({str(x.device) for x in tensors})]

    @functools.cached_property
    def budget(self) -> Budget | None:
        """What it may add to its device's memory, if the user asked for a budget of that."""
        asked = self.asked.peak
        given = [x for x in self.example_inputs if isinstance(x, torch.Tensor)]
        if asked is None or not given:
            return None
        trained = [x for _, x in self._parameters if x.requires_grad]
        key = repr([(x.dtype, x.device, list(map(str, x.shape)), x.requires_grad) for x in given])
        counted = next((d for d in self.devices if d.type == "cuda"), self.devices[0])
        ledger = self.ledger(counted, asked)
        share = ledger.share(self.code, (self.inputs, key))
        share.note = share.note or note_of(self._digest(counted, key))
        return Budget(ledger, share, sum(map(bytes_of, given)), 2 * sum(map(bytes_of, trained)))

    def _digest(self, device: torch.device, key: str) -> str:
        """Of the graph, its inputs and how it is compiled: the same in every process."""
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        identity = self._identity(self.asked, None)
        parts = readable(self.gm), key, self._patches, identity, torch.__version__, gpu
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @property
    def _patches(self) -> list[tuple[str, str]]:
        """Inductor's configuration for it, in words."""
        return sorted((name, repr(value)) for name, value in self.patches.items())

    def _kept_as(self, key: str) -> str | None:
        """The name that what is done to it is kept under; None if no cache may have its code."""
        if self.inner_compile is not compile_fx_inner:
            return None
        return hashlib.sha256(repr((self.path.stem, key, self._patches)).encode()).hexdigest()

    def _identity(self, config: HotConfig, profile: Profile | None) -> str:
        prices = [repr(self.prices(device)) for device in self.devices]
        return code_key(self.gm, self.inputs, config, profile, (prices, self.known.step))

    @property
    def _parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Those of its inputs that are parameters or buffers, with their names."""
        named = zip(self.inputs.parameters, self.example_inputs, strict=False)
        return [(name, x) for name, x in named if name and isinstance(x, torch.Tensor)]

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of its parameters that want gradients."""
        return tuple(name for name, x in self._parameters if x.requires_grad)

    @property
    def matrices(self) -> tuple[str, ...]:
        """Those of them that are weights of products, or tables; a number a channel is neither."""
        trained = ((name, x) for name, x in self._parameters if x.requires_grad)
        return tuple(name for name, x in trained if not is_vector(x))

    @property
    def captured(self) -> bool:
        """Its steps are to be CUDA graphs."""
        return self.patches.get("triton.cudagraphs", inductor_config.triton.cudagraphs)

    @property
    def _compiles_again(self) -> bool:
        """Steps may be measured, and the graph compiled again by that: not inside CUDA graphs, nor
        where all processes compile, or none."""
        return not (self.captured or torch._dynamo.config.enable_compiler_collectives)

    def watched(
        self,
        config: HotConfig,
        profile: Profile | None,
        observer: Observer,
        finish: Callable[[HotConfig, Profile | None], Callable[..., Any]],
    ) -> Watch:
        """What ``finish`` makes of the graph, to be compared with an exact twin where called."""
        exact = self._twin(twin(self.gm), config, profile, observer)
        return Watch(finish(config, profile), exact, self.inputs.parameters, observer)

    def looked_at(self, config: HotConfig, profile: Profile | None, gauge: Gauge) -> Watch:
        """The graph for good, to be compared with itself, run operator by operator.

        Compiled twins only follow a doubt, or where nobody knows what numbers the code draws.
        """
        gm, names = without_logits(twin(self.gm)), self.inputs.parameters
        plain, random = dataclasses.replace(self, inner_compile=run_uncompiled), draws(gm)
        run = self.finished(config, profile)
        free, heads = config.accept == "free", self._heads(config)
        other = random and not (drawn_alike(gm) and self.inner_compile is compile_fx_inner)
        flat = gm if other else without_regions(gm)
        quick = Eager(flat, names, self.example_inputs, free, heads, gauge.short)
        if other:
            exact = self._twin(gm, config, profile, gauge, quick.in_one_piece)
            return Watch(run, exact, names, gauge)
        halves = acceptance.computes_halves(gm, self.example_inputs)
        compiled, plainly = (g._twin(gm, config, profile, gauge) for g in (self, plain))
        cheap_first = [plainly, compiled]
        thorough = [compiled] if random else cheap_first[::-1] if halves else cheap_first
        gauge.rounds = not random and halves
        shows = cheap_first if gauge.rounds else ()
        return Watch(run, Doubled(quick, thorough, gauge, random, shows), names, gauge)

    def changes_by(self, config: HotConfig, profile: Profile | None) -> Differs:
        """What says whether it comes out otherwise if a step takes so long; nothing is lowered."""
        if self.budget:  # a ledger is not to be asked twice
            return lambda args, step: True
        gm, bare, before = twin(self.gm), self._bare, self.known.step

        def digest(args: Sequence[Any], step: StepTime | None) -> str:
            def planned(gm: fx.GraphModule, fakes: Sequence[Any]) -> Any:
                known = dataclasses.replace(bare.known, step=step)
                own = dataclasses.replace(bare, gm=gm, example_inputs=fakes, done=[], known=known)
                own.compile(config, profile)
                return own.done[-1].digest

            return compiled_for(gm, args, planned)[0]  # type: ignore[return-value]

        return lambda args, step: digest(args, step) != digest(args, before)

    def _heads(self, config: HotConfig) -> Heads | None:
        """How a part of the graph is computed exactly, with heads in chunks; None if it has none.

        Where the graph's code came from a cache, nothing is known of its heads: then one is tried.
        """
        if self.done and not any(head.chunked for head in self.done[-1].plan.heads):
            return None
        kept = {name: getattr(config, name) for name in ("head", "keep_head", "head_min_bytes")}
        exact = dataclasses.replace(RECIPES["exact"], **kept)
        bare = dataclasses.replace(self._bare, asked=exact)

        def compile_part(gm: fx.GraphModule, fakes: Sequence[Any]) -> Callable[..., Any]:
            inputs = graph_inputs(gm)
            part = dataclasses.replace(bare, gm=gm, example_inputs=fakes, inputs=inputs, done=[])
            run = part.compile(exact)
            if any(head.chunked for report in part.done for head in report.plan.heads):
                return run
            raise TooLarge("a head's logits are too large as a whole")

        return Heads(config.head_min_bytes, compile_part)

    @property
    def _bare(self) -> _Graph:
        """To compile parts of it, or it again, without lowering: nobody else is told of that."""
        return dataclasses.replace(
            self, gm=fx.GraphModule({}, fx.Graph()), example_inputs=(), recorder=Dump(),
            listener=None, inner_compile=run_uncompiled, patches=self.patches | _NEW_GRAPH,
        )  # fmt: skip

    def _twin(
        self,
        gm: fx.GraphModule,
        config: HotConfig,
        profile: Profile | None,
        observer: Observer,
        room: Callable[[Sequence[Any]], None] | None = None,
    ) -> Twin:
        """An exact twin of ``gm``, which is kept; ``room``: as of :class:`Twin`."""
        patches = {**self.patches, "triton.cudagraphs": False}  # an observer is Python
        inner = self.inner_compile
        bare = dataclasses.replace(self._bare, inner_compile=inner, patches=patches)

        def compile_twin(gm: fx.GraphModule, fakes: Sequence[Any], seen: Observation) -> Any:
            other = dataclasses.replace(bare, gm=gm, example_inputs=fakes)
            return other.compile(config, profile, seen)

        return Twin(gm, compile_twin, observer, room)

    @property
    def unseen(self) -> str:
        """Why nobody can look at its steps; empty if they can be looked at."""
        if self.captured:
            return "its steps are CUDA graphs"
        if torch._dynamo.config.enable_compiler_collectives:
            return "all processes of the job compile together"
        return acceptance.cannot_be_repeated(self.gm, self.example_inputs)

    @property
    def changed(self) -> bool:
        """As far as is known something of it is not exact."""
        return not self.done or self.done[-1].changed

    def gauge(self, monitor: Monitor, config: HotConfig) -> Gauge:
        """What its steps will be shown to."""
        gauge = Gauge(monitor.rotate, config, self.trained, self.matrices)
        gauge.path = self.path
        gauge.settled, gauge.as_stock = self.known.settled, self.known.as_stock
        return gauge

    def told(self, watch: Watch, gauge: Gauge, monitor: Monitor) -> Watched:
        """Let the gauge know what was done to the graph, which is watched from now on."""
        known = self.done[-1] if self.done else None
        plan, crossing = (known.plan, known.crossing) if known else (NO_PLAN, ())
        gauge.compiled(plan, crossing, functools.partial(room, self.devices))
        made_of = (self.code, *(id(x) for _, x in self._parameters if x.requires_grad))
        return Watched(watch.usual, watch, gauge, monitor, made_of)

    def finished(self, config: HotConfig, profile: Profile | None = None) -> Any:
        """The graph for good."""
        if self.known.as_stock:
            return compile_fx(self.gm, self.example_inputs, self.inner_compile, self.patches)
        run = self.compile(config, profile)
        return Budgeted(run, self.budget) if self.budget and self._compiles_again else run


def _final(
    graph: _Graph, config: HotConfig, profile: Profile | None, monitor: Monitor | None
) -> Callable[..., Any]:
    """The graph for good, watched if asked; what was found wanting is done more exactly."""
    if monitor is None:
        return graph.finished(config, profile)
    if isinstance(monitor, Acceptance):
        return _accepted(graph, config, profile, monitor)
    config = monitor.applied(config, graph.inputs.parameters)
    gauge = graph.gauge(monitor, config)
    watch = graph.watched(config, profile, gauge, graph.finished)
    return monitor.watches(graph.told(watch, gauge, monitor))


def _accepted(
    graph: _Graph, config: HotConfig, profile: Profile | None, monitor: Acceptance
) -> Callable[..., Any]:
    """The graph as looks found it to be right, to be looked at where that is possible."""
    graph = dataclasses.replace(graph, known=monitor.begins(graph.path))
    config = monitor.applied(config, graph.inputs.parameters)
    if config.accept == "remembered" or monitor.cannot_see(graph.path, graph.unseen):
        return graph.finished(config, profile)
    gauge = graph.gauge(monitor, config)
    clock = monitor.clock(graph.path, graph.devices)
    differs = graph.changes_by(config, profile) if clock else None
    watched = graph.told(graph.looked_at(config, profile, gauge), gauge, monitor)
    gauge.exact = not (graph.changed or graph.known.stored)
    if clock and differs:
        watched.clock, watched.differs = clock, differs
    return monitor.watches(watched)


def _auto(graph: _Graph, config: HotConfig, monitor: Monitor | None) -> Callable[..., Any]:
    """The graph by what was observed of it so far, to be observed again while that is due."""
    digest = graph_digest(graph.gm, graph.inputs.parameters, config.rank)
    notes = Notes(config, digest)
    if notes.due is None or not _runs_operators(graph):
        return _final(graph, config, notes.profile, monitor)
    collector = Collector(config.rank)

    def finish(config: HotConfig, profile: Profile | None) -> Callable[..., Any]:
        return _final(graph, config, profile, monitor)

    watch = graph.watched(config, notes.profile, collector, finish)
    return Observing(watch.usual, watch, collector, config, notes, graph.code)


def _runs_operators(graph: _Graph) -> bool:
    """Every device has a runtime: else nothing is rewritten, and there is nothing to choose."""
    return not any(isinstance(graph.prices(device), str) for device in graph.devices)

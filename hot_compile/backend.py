"""``torch.compile(model, backend="hot")``: wires the stages into Inductor's hooks, no more."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.cudagraph_trees import reset_cudagraph_trees

from .auto import Notes, Observing, code_being_compiled, graph_digest, twin
from .calibration import Collector
from .config import HotConfig, split_options
from .errors import PassDisabledError
from .frameworks import trace_past_warnings
from .inspect import Dump, run_uncompiled
from .monitor import Gauge, Monitor, Watched, monitor_of
from .passes.devices import pricing
from .passes.graph import clean_path, module_path
from .passes.match import GraphInputs
from .passes.observe import Observer
from .passes.pipeline import Context, JointPass, Partitioner, Recorder, sources_hash
from .passes.profile import Profile
from .returned import detach_logits, tied
from .runtime.providers import runtime_version
from .schedule import Scheduled

_DISABLING = "use_joint_graph_passes"


def hot(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    recorder: Recorder | None = None,
    observer: Observer | None = None,
    inner_compile: Callable[..., Any] = compile_fx_inner,
    **_: Any,
) -> Any:
    """Compile one of Dynamo's graphs: HOT for the backward of its layers, Inductor for the rest.

    Users do not call this; ``torch.compile(model, backend="hot", options={...})`` does.

    Args:
        gm: Dynamo's graph. example_inputs: its inputs.
        mode: as for the default backend ("reduce-overhead", "max-autotune", ...).
        options: ours (see ``HotConfig``) and Inductor's, mixed.
        recorder: told of every stage of every graph (used by ``explain``); by default one that
            writes to the folder of option ``dump`` or HOT_DUMP, if any.
        observer: shown every layer's operands in each backward; the gradients are then exact, and
            ``inner_compile`` must be one that runs the graphs as they are.
        inner_compile: lowers the finished forward and backward graphs; Inductor, unless replaced.

    Raises:
        OptionError: an option is unknown or has a bad value.
        PassDisabledError: the mode or options would switch joint graph passes off.
        ProfileFormatError, ProfileMismatchError: option ``profile`` names a file that is no
            profile, or one of another model.
    """
    trace_past_warnings()
    ours, theirs = split_options(options)
    monitor = monitor_of(ours)
    config = HotConfig.from_options(ours)
    patches = _inductor_patches(mode, theirs)
    if not _trains(example_inputs):
        return compile_fx(gm, example_inputs, inner_compile, config_patches=patches)
    own, logits = detach_logits(gm, config)
    graph = _Graph(own, example_inputs, inner_compile, patches, recorder)
    return tied(_compiled(graph, config, monitor, observer), logits, gm)


def _compiled(
    graph: _Graph, config: HotConfig, monitor: Monitor | None, observer: Observer | None
) -> Callable[..., Any]:
    """The graph as the options say."""
    if config.lqs == "auto" and observer is None:
        return _auto(graph, config, monitor)
    profile = Profile.load(config.profile) if config.profile else None
    if observer is not None:
        return graph.compile(config, profile, observer)
    return _final(graph, config, profile, monitor)


trace_past_warnings()  # Dynamo traces a model before it calls us: this cannot wait until then
hot.reset = reset_cudagraph_trees  # type: ignore[attr-defined]  # torch.compiler.reset() calls it


@dataclasses.dataclass(frozen=True)
class _Graph:
    """One of Dynamo's graphs, to be compiled in one or several ways."""

    gm: fx.GraphModule
    example_inputs: Sequence[Any]
    inner_compile: Callable[..., Any]
    patches: dict[str, Any]
    recorder: Recorder | None

    def compile(
        self, config: HotConfig, profile: Profile | None = None, observer: Observer | None = None
    ) -> Any:
        """The graph as ``config`` and ``profile`` say, reported to the recorder and dumped.

        With ``observer``: exact, its layers shown to the observer, and not reported.
        """
        patches = dict(self.patches)
        dump = config.dump or os.environ.get("HOT_DUMP")  # the one variable, for debugging
        recorder = Dump() if observer else self.recorder or Dump(dump)
        if dump or self.recorder or observer:
            patches["force_disable_caches"] = True  # on a cache hit no pass runs: none to report
        inputs = _graph_inputs(self.gm)
        context = Context(
            config=config,
            inputs=inputs,
            pricing=pricing,
            recorder=recorder,
            identity=_identity(self.gm, config, inputs, self.example_inputs, profile),
            profile=profile,
            observer=observer,
        )
        joint = JointPass(context, _existing_passes(patches))
        patches["joint_custom_pre_pass"] = joint
        inner = patches.get("custom_partitioner_fn", inductor_config.custom_partitioner_fn)
        partitioner = Partitioner(context, joint, inner)
        if partitioner.uuid() is None:  # the user's has none; torch would cache its work regardless
            patches["force_disable_caches"] = True
        patches["custom_partitioner_fn"] = partitioner
        return compile_fx(self.gm, self.example_inputs, self.inner_compile, config_patches=patches)

    def finished(self, config: HotConfig, profile: Profile | None = None) -> Any:
        """The graph for good: compiled once, or once for every width of a schedule."""
        if not config.schedule:
            return self.compile(config, profile)
        compiled = {}
        for bits in {phase.gx_bits for phase in config.schedule}:
            own = dataclasses.replace(config, schedule=(), gx_bits=bits)
            compiled[bits] = dataclasses.replace(self, gm=twin(self.gm)).compile(own, profile)
        return Scheduled(config.schedule, compiled)


def _final(
    graph: _Graph, config: HotConfig, profile: Profile | None, monitor: Monitor | None
) -> Callable[..., Any]:
    """The graph for good, watched if asked; layers that were found wanting stay exact."""
    if monitor is None:
        return graph.finished(config, profile)
    config, gauge = monitor.applied(config), Gauge(monitor.rotate)
    other = dataclasses.replace(graph, gm=twin(graph.gm), inner_compile=run_uncompiled)
    observed = other.compile(config, profile, gauge)
    usual = graph.finished(config, profile)
    return Watched(usual, observed, gauge, monitor, code_being_compiled())


def _auto(graph: _Graph, config: HotConfig, monitor: Monitor | None) -> Callable[..., Any]:
    """The graph by what was observed of it so far, to be observed again while that is due."""
    digest = graph_digest(graph.gm, _graph_inputs(graph.gm).parameters, config.rank)
    notes = Notes(config, digest)
    if notes.due is None:
        return _final(graph, config, notes.profile, monitor)
    collector = Collector(config.rank)
    other = dataclasses.replace(graph, gm=twin(graph.gm), inner_compile=run_uncompiled)
    observed = other.compile(config, notes.profile, collector)
    usual = _final(graph, config, notes.profile, monitor)
    return Observing(usual, observed, collector, config, notes)


def _inductor_patches(mode: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Inductor's config patches for this mode and these options, validated by Inductor itself."""
    wrapper = torch._TorchCompileInductorWrapper(mode or "default", options or None, None)
    patches = dict(wrapper.config)
    if not patches.get(_DISABLING, getattr(inductor_config, _DISABLING)):
        raise PassDisabledError(
            f"got mode={mode!r}, options={sorted(options)}: these set {_DISABLING}=False, which "
            "switches HOT off in silence. Remove that option, or use backend='inductor'."
        )
    return patches


def _trains(example_inputs: Sequence[Any]) -> bool:
    """Some input needs a gradient: the same test AOTAutograd makes before it traces a backward."""
    tensors = (x for x in example_inputs if isinstance(x, torch.Tensor))
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _existing_passes(patches: dict[str, Any]) -> tuple[Any, ...]:
    """The joint pass(es) a user or library already put into Inductor's hook."""
    current = patches.get("joint_custom_pre_pass", inductor_config.joint_custom_pre_pass)
    if current is None:
        return ()
    return tuple(current) if isinstance(current, (list, tuple)) else (current,)


def _graph_inputs(gm: fx.GraphModule) -> GraphInputs:
    """Which of the graph's inputs are parameters or buffers, by Dynamo's own record."""
    names: list[str | None] = []
    for node in gm.graph.nodes:
        if node.op != "placeholder":
            continue
        source = getattr(node.meta.get("grapharg"), "source", None)
        names.append(_parameter_name(source, node.meta.get("example_value")))
    return GraphInputs(tuple(names) if any(names) else ())


def _parameter_name(source: Any, value: Any) -> str | None:
    if source is None:
        return None
    text = source.name if isinstance(source.name, str) else source.name()
    held = "_parameters[" in text or "_buffers[" in text
    if held or isinstance(value, torch.nn.Parameter):
        return clean_path(text)
    return None


def _identity(
    gm: fx.GraphModule,
    config: HotConfig,
    inputs: GraphInputs,
    example_inputs: Sequence[Any],
    profile: Profile | None,
) -> str:
    """Digest of all that changes the compiled code besides the graph itself.

    Module paths count because include, exclude and override match on them.
    """
    paths = sorted({module_path(node) or "" for node in gm.graph.nodes})
    devices = sorted({str(x.device) for x in example_inputs if isinstance(x, torch.Tensor)})
    prices = [repr(pricing(torch.device(device))) for device in devices]
    content = profile.content_hash() if profile else None
    parts = (
        sources_hash(),
        runtime_version(),
        config.stable_hash(),
        inputs,
        paths,
        prices,
        content,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()

"""A compiled graph whose gradients are compared with exact ones, without touching the training.

A watched step is a usual one. Beside its backward, an exact twin of the graph runs forward and
backward on the same inputs, tangents and random state; its backward shows every layer's operands to
an observer, which is also told how far the usual gradients, with all that was rewritten and stored
compressed, are from the twin's. The twin runs before the usual backward where what that has stored
is less than the gradients it makes, else after it, when what it stored is freed: so both together
take no more memory than an exact step. Of the twin's gradients only sketches are kept. It is
compiled like any other graph, when it is first wanted. Whatever fails in it ends the watching of
this graph with one warning; the step gets its gradients all the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from hot_compile.memory import saved_by, storage_bytes
from hot_compile.passes.measure.observe import Observation, Observer
from hot_compile.passes.measure.sketch import sketch

_SHAPES = 4
"""The twin is compiled for static shapes; steps of more shapes than this are not watched."""
_SAMPLE = 4096
"""Values of each output by which a twin's forward is recognised as that of the watched step."""
_SAME = 0.05
"""Relative difference of these values up to which it is the same: more than what bf16 loses where
kernels fuse otherwise, less than what other random draws make."""

Compile = Callable[[fx.GraphModule, Sequence[Any], Observation], Callable[..., Any]]
"""(Dynamo's graph, example inputs, who is shown the layers) -> compiled function."""


@dataclasses.dataclass(frozen=True)
class _Code:
    """An exact twin, compiled for the shapes of some inputs."""

    run: Callable[..., Any]
    mutated: frozenset[int]
    """Places of the inputs that it changes."""
    observation: Observation
    """Kept alive: its graph knows it by number only."""


class Twin:
    """The exact twin of one of Dynamo's graphs, compiled for the inputs it is asked for."""

    def __init__(self, gm: fx.GraphModule, compile_graph: Compile, observer: Observer) -> None:
        """``gm``: is kept, and must be nobody else's: compiling changes graphs in place."""
        self._gm = gm
        self._compile = compile_graph
        self._observer = observer
        self._codes: dict[tuple[bool, object], _Code] = {}

    def code(self, args: Sequence[Any]) -> _Code | None:
        """The twin for inputs such as ``args``; None if there are too many shapes to compile for.

        Another one where the observer wants to be shown what crosses, too.

        Raises whatever compiling it raises.
        """
        shapes = tuple(
            (a.shape, a.stride(), a.requires_grad) if isinstance(a, Tensor) else a for a in args
        )
        key = self._observer.wants_stored, shapes
        alike = [known for known in self._codes if known[0] == key[0]]
        if key not in self._codes and len(alike) < _SHAPES:
            self._codes[key] = self._compiled(args)
        return self._codes.get(key)

    def _compiled(self, args: Sequence[Any]) -> _Code:
        mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
        fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
        observation, context = Observation(self._observer), TracingContext(mode)
        with tracing(context), torch.random.fork_rng(devices=_cuda_devices(args)):
            run = self._compile(twin(self._gm), fakes, observation)
        metadata = context.fw_metadata
        assert metadata is not None
        infos = enumerate(metadata.input_info)
        mutated = frozenset(i for i, info in infos if info.mutates_data or info.mutates_metadata)
        return _Code(run, mutated, observation)


class Watch:
    """A compiled graph, each forward and backward of which is watched while nothing fails."""

    def __init__(
        self,
        usual: Callable[..., Any],
        exact: Twin,
        names: Sequence[str | None],
        observer: Observer,
    ) -> None:
        """``names``: of the graph's inputs that are parameters."""
        self.usual = usual
        """The same, unwatched."""
        self._twin = exact
        self._names = names
        self._observer = observer
        self._deviations: list[Tensor] = []

    def __call__(self, *args: Any) -> Any:
        """One forward of the usual graph; what it returns is just what that does."""
        self._check_deviations()
        if self._observer.problem is not None:
            return self.usual(*args)
        try:
            code = self._twin.code(args)
        except Exception as error:
            self._observer.failed("the exact twin of a graph could not be compiled", error)
            code = None
        if code is None:
            return self.usual(*args)
        look = _Look(code, args)
        outputs = self.usual(*args)
        try:
            look.attach(outputs, self._names, self._rerun, self._compare)
        except Exception as error:
            self._observer.failed("a step could not be watched", error)
        return outputs

    def _rerun(self, look: _Look) -> None:
        """Run the twin; called before or after a usual backward."""
        try:
            look.rerun()
        except Exception as error:
            self._observer.failed("the exact twin of a step could not be run", error)

    def _compare(self, look: _Look, usual: Mapping[str, Tensor]) -> None:
        """Tell the observer how far gradients are from the twin's; called after both backwards."""
        if look.deviation is None:
            return
        self._deviations.append(look.deviation)
        for name, want in look.exact.items():
            if name in usual:
                got = torch.where(look.deviation < _SAME, sketch(usual[name]), torch.nan)
                self._observer.gradient(name, got, want)

    def _check_deviations(self) -> None:
        pending, self._deviations = self._deviations, []
        worst = max((float(deviation) for deviation in pending), default=0.0)
        if worst >= _SAME:
            error = RuntimeError(f"its outputs differ by {worst:.2g} from the watched step's")
            self._observer.failed("an exact twin computed something else", error)


class _Look:
    """One watched step: what the twin needs to do the same."""

    def __init__(self, code: _Code, args: Sequence[Any]) -> None:
        """Before the step's forward."""
        self._code = code
        self._args = [_copied(a) if i in code.mutated else a for i, a in enumerate(args)]
        self._tangents: dict[int, Tensor | None] = {}
        self.deviation: Tensor | None = None
        """How far the twin's outputs are from the step's; None if the twin did not run."""
        self.exact: dict[str, Tensor] = {}
        """Sketches of the twin's gradients, by parameter."""
        self._random = _Random(args)

    def attach(
        self,
        outputs: Sequence[Any],
        names: Sequence[str | None],
        rerun: Callable[[_Look], None],
        compare: Callable[[_Look, Mapping[str, Tensor]], None],
    ) -> None:
        """After the forward: both follow at the first backward, ``compare`` with its gradients."""
        self._versions = _versions(self._args)
        self._sample = _sampled(outputs)
        node = compiled_node(outputs, self._args)
        if node is None:
            return
        storages = {_storage(a) for a in self._args if isinstance(a, Tensor)}
        for place, output in enumerate(outputs):
            if _differentiable(output) and _storage(output) not in storages:
                output.register_hook(functools.partial(self._tangents.__setitem__, place))
        leaves = {id(a): place for place, a in enumerate(self._args) if _differentiable(a)}
        owners = [leaves.get(id(getattr(n, "variable", None))) for n, _ in node.next_functions]
        named = dict(enumerate(names))
        known = [None if place is None else named.get(place) for place in owners]
        early = self._stores_less(node)

        @torch.compiler.disable
        def begins(_: Any) -> None:
            before.remove()
            if early:
                rerun(self)

        @torch.compiler.disable
        def finished(gradients: Sequence[Tensor | None], _: Any) -> None:
            after.remove()
            if not early:
                rerun(self)
            pairs = zip(known, gradients, strict=True)
            compare(self, {name: g for name, g in pairs if name is not None and g is not None})
            self._args, self._tangents, self.exact = [], {}, {}

        before, after = node.register_prehook(begins), node.register_hook(finished)

    def _stores_less(self, node: Node) -> bool:
        """What the step holds for its backward is less than the gradients that this makes."""
        given = {_storage(a) for a in self._args if isinstance(a, Tensor)}
        saved = {_storage(t): t for t in saved_by(node)}
        held = [t for key, t in saved.items() if key not in given]
        made = sum(a.nbytes for a in self._args if _differentiable(a))
        return storage_bytes(held) < made

    @property
    def stale(self) -> bool:
        """An input was changed, or its memory given back, since the forward."""
        tensors = [a for a in self._args if isinstance(a, Tensor)]
        gone = any(t.untyped_storage().nbytes() == 0 and t.numel() for t in tensors)
        return gone or _versions(self._args) != self._versions

    def rerun(self) -> None:
        """Find ``deviation`` and ``exact``, unless the inputs are not what they were."""
        if self.stale:
            return
        inputs = [_fresh(a) if isinstance(a, Tensor) else a for a in self._args]
        given = [a.clone() if i in self._code.mutated else a for i, a in enumerate(inputs)]
        self._code.observation.taken()
        with self._random.again():
            with torch.enable_grad():
                outputs = self._code.run(*given)
            deviation = _deviation(_sampled(outputs), self._sample)
            # of an output that nobody's loss depends on, hooks are told of no gradient
            tangents = {place: t for place, t in self._tangents.items() if t is not None}
            ends = [outputs[place] for place in tangents]
            del outputs, given
            leaves = [a for a in inputs if _differentiable(a)]
            torch.autograd.grad(ends, leaves, list(tangents.values()), allow_unused=True)
        self.deviation, self.exact = deviation, self._code.observation.taken()


class _Random:
    """The random state of the CPU and of some tensors' devices, as it is now."""

    def __init__(self, args: Sequence[Any]) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = {n: torch.cuda.get_rng_state(n) for n in _cuda_devices(args)}

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside, what is drawn is what was drawn then; afterwards all is as if nothing was."""
        with torch.random.fork_rng(devices=list(self._cuda)):
            torch.set_rng_state(self._cpu)
            for number, state in self._cuda.items():
                torch.cuda.set_rng_state(state, number)
            yield


def twin(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of Dynamo's graph that can be compiled on its own: compiling edits graphs in place."""
    graph, same = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(gm.graph, same))
    for old, new in same.items():  # Dynamo marks nodes by attributes of its own, too
        for name in vars(old).keys() - vars(new).keys():
            setattr(new, name, getattr(old, name))
    copy = fx.GraphModule(gm, graph, gm.__class__.__name__)
    for name, value in vars(gm).items():
        copy.__dict__.setdefault(name, value)
    copy.meta = dict(gm.meta)
    return copy


def _cuda_devices(args: Sequence[Any]) -> list[int]:
    devices = {a.device for a in args if isinstance(a, Tensor) and a.device.type == "cuda"}
    return sorted(device.index or 0 for device in devices)


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _copied(value: Any) -> Any:
    """The value before a graph changes it."""
    return _fresh(value.clone()) if isinstance(value, Tensor) else value


def _fresh(tensor: Tensor) -> Tensor:
    """The same memory as a leaf of a graph of its own."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _versions(values: Sequence[Any]) -> list[int]:
    return [v._version for v in values if isinstance(v, Tensor) and not v.is_inference()]


def compiled_node(outputs: Sequence[Any], args: Sequence[Any]) -> Node | None:
    """The autograd node of the compiled graph that made ``outputs`` of ``args``."""
    for output in outputs:
        node = output.grad_fn if _differentiable(output) else None
        while node is not None and not node.name().startswith("CompiledFunction"):
            sources = node.next_functions  # a view of one of the graph's results
            node = sources[0][0] if sources else None
        if node is not None and _reads(node, args):
            return node
    return None


def _reads(node: Node, args: Sequence[Any]) -> bool:
    """The node's inputs are among ``args``: it belongs to no graph before this one."""
    given = [a for a in args if _differentiable(a)]
    sources = [source for source, _ in node.next_functions if source is not None]
    return any(
        getattr(source, "variable", None) is a if a.is_leaf else source is a.grad_fn
        for source in sources
        for a in given
    )


def _sampled(outputs: Sequence[Any]) -> Tensor:
    """Values of the outputs that have a gradient, as one fp32 vector."""
    parts = []
    for output in outputs:
        if _differentiable(output):
            count = min(_SAMPLE, output.numel())
            where = torch.linspace(0, output.numel() - 1, count, dtype=torch.float64)
            parts.append(torch.take(output.detach(), where.long().to(output.device)).float())
    return torch.cat(parts) if parts else torch.empty(0)


def _deviation(got: Tensor, want: Tensor) -> Tensor:
    """Relative difference; 0 of nothing, not finite of what is not finite."""
    return (got - want).norm() / want.norm().clamp_min(torch.finfo(torch.float32).tiny)

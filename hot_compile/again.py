"""A step of a compiled graph that is done once more, by other code, on the same inputs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from hot_compile.passes.base.graph import graphs_of
from hot_compile.passes.cost.tuned import in_job

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_SAMPLE = 4096
"""Values of each output by which a forward is recognised as that of the same step."""


class Again:
    """What it takes to do a step once more: inputs, those that it changes as they were, and the
    random state.
    """

    def __init__(self, args: Sequence[Any], mutated: Set[int]) -> None:
        """Before the step's forward. ``mutated``: places of the inputs that it changes."""
        self._given = args
        self.mutated = mutated
        self.coming = 0
        """Bytes that the step will take in any case, beside what it has."""
        self.args = [_copied(a) if i in mutated else a for i, a in enumerate(args)]
        self.random = RandomState(args)
        kinds = sorted({"cpu", *(a.device.type for a in args if isinstance(a, Tensor))})
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in kinds
        ]
        self.full = False
        """It is done again in fp32."""
        self._versions = versions(self.args)

    def sample(self, outputs: Sequence[Any]) -> None:
        """After the forward: know its outputs again."""
        self._samples = samples_of(outputs)

    @property
    def stale(self) -> bool:
        """An input was changed, or its memory given back, since the beginning."""
        tensors = [a for a in self.args if isinstance(a, Tensor)]
        gone = any(t.untyped_storage().nbytes() == 0 and t.numel() for t in tensors)
        return gone or versions(self.args) != self._versions

    def put_back(self) -> None:
        """Give inputs that the forward changed, and the random state, as they were."""
        for place in self.mutated:
            tensor, before = self._given[place], self.args[place]
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tensor):
                tensor.copy_(before)
        self.random.restore()

    def run(self, function: Callable[..., Any]) -> tuple[list[Any], Sequence[Any]]:
        """(leaves in the inputs' places, what ``function`` makes of them), as autocast was."""
        inputs = [fresh(a) if isinstance(a, Tensor) else a for a in self.args]
        with self.modes():
            given = [a.clone() if i in self.mutated else a for i, a in enumerate(inputs)]
            return inputs, function(*given)

    @contextlib.contextmanager
    def in_full(self) -> Iterator[None]:
        """Inside, the step is done again in fp32: without autocast, and of inputs of 32 bits."""
        before = self._autocast
        self._autocast, self.full = [(kind, dtype, False) for kind, dtype, _ in before], True
        try:
            yield
        finally:
            self._autocast, self.full = before, False

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        """Inside, autograd and autocast are as they were in the step's forward."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled))
            yield

    def deviation(self, samples: Mapping[int, Tensor]) -> Tensor:
        """Relative difference from the step's own; 0 of nothing, not finite of what is not.

        ``samples``: by place, what :func:`sampled` makes of outputs.
        """
        return apart(samples, self._samples)


def apart(got: Mapping[int, Tensor], want: Mapping[int, Tensor]) -> Tensor:
    """Relative difference of outputs' values, by place; 0 of nothing, not finite of what is not."""
    places = sorted(got.keys() & want.keys())
    if not places:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    mine, theirs = (torch.cat([samples[i] for i in places]) for samples in (got, want))
    return (mine - theirs).norm() / theirs.norm().clamp_min(torch.finfo(torch.float32).tiny)


class RandomState:
    """The random state of the CPU and of some tensors' devices, as it is now."""

    def __init__(self, args: Sequence[Any]) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = {n: torch.cuda.get_rng_state(n) for n in cuda_devices(args)}

    def restore(self) -> None:
        """Draw again what was drawn since."""
        torch.set_rng_state(self._cpu)
        for number, state in self._cuda.items():
            torch.cuda.set_rng_state(state, number)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside, what is drawn is what was drawn then; afterwards all is as if nothing was.

        What is saved inside is nobody's but the caller's: hooks of users do not hear of it.
        """
        with torch.random.fork_rng(devices=list(self._cuda)), _without_hooks():
            self.restore()
            yield


def hooked() -> bool:
    """Somebody's hooks get what a forward saves: it may lie elsewhere, or be computed again."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


@contextlib.contextmanager
def _without_hooks() -> Iterator[None]:
    """Inside, what a forward saves is kept as it is."""
    found = []
    while pair := torch._C._autograd._top_saved_tensors_default_hooks(False):
        found.append(pair)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(found):
            torch._C._autograd._push_saved_tensors_default_hooks(*pair)


def compiled_for(
    gm: fx.GraphModule,
    args: Sequence[Any],
    compile_graph: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
) -> tuple[Callable[..., Any], frozenset[int]]:
    """(Dynamo's graph compiled for the shapes of ``args``, places of the inputs that it changes).

    For when Dynamo compiles nothing: the graph gets a tracing context of its own. Raises whatever
    compiling it raises.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
    context = TracingContext(mode)
    with tracing(context), torch.random.fork_rng(devices=cuda_devices(args)):
        return compile_graph(twin(gm), fakes), mutated_places(context, fakes)


def mutated_places(context: TracingContext | None, inputs: Sequence[Any]) -> frozenset[int]:
    """Places of ``inputs`` that the graph compiled last in ``context`` changes.

    Code from AOTAutograd's cache leaves no word of it: then all that are no parameters and have no
    gradient. What else it changes gets another version, by which :class:`Again` is stale.
    """
    metadata = context.fw_metadata if context else None
    if metadata is None:
        tensors = ((i, x) for i, x in enumerate(inputs) if isinstance(x, Tensor))
        return frozenset(
            i for i, x in tensors if not (x.requires_grad or isinstance(x, torch.nn.Parameter))
        )
    infos = enumerate(metadata.input_info)
    return frozenset(i for i, info in infos if info.mutates_data or info.mutates_metadata)


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


def compiled_node(outputs: Sequence[Any], args: Sequence[Any]) -> Node | None:
    """The autograd node of the compiled graph that made ``outputs`` of ``args``."""
    for output in outputs:
        node = output.grad_fn if differentiable(output) else None
        while node is not None and not node.name().startswith("CompiledFunction"):
            sources = node.next_functions  # a view of one of the graph's results
            node = sources[0][0] if sources else None
        if node is not None and _reads(node, args):
            return node
    return None


def _reads(node: Node, args: Sequence[Any]) -> bool:
    """The node's inputs are among ``args``: it belongs to no graph before this one."""
    given = [a for a in args if differentiable(a)]
    sources = [source for source, _ in node.next_functions if source is not None]
    return any(
        getattr(source, "variable", None) is a if a.is_leaf else source is a.grad_fn
        for source in sources
        for a in given
    )


def cuda_devices(args: Sequence[Any]) -> list[int]:
    """Numbers of the GPUs that some tensors are on."""
    devices = {a.device for a in args if isinstance(a, Tensor) and a.device.type == "cuda"}
    return sorted(device.index or 0 for device in devices)


def only_once(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> str:
    """Why a step of one of Dynamo's graphs cannot be done again; empty if it can be.

    What a step sends to other processes, they await once, and where DTensors send is not known.
    """
    if any(hasattr(x, "device_mesh") for x in example_inputs):
        return "its tensors are DTensors"
    if in_job() and any(map(sends, called_in(gm))):
        return "it sends something to other processes"
    return ""


def called_in(gm: fx.GraphModule) -> Iterator[str]:
    """Names of all that one of Dynamo's graphs calls, with their modules'."""
    return (called_by(node) for graph in graphs_of(gm) for node in graph.nodes)


def called_by(node: fx.Node) -> str:
    """What a node calls, by name, with its module's.

    Without the address of a function that Dynamo made, as torch 2.11 does of what DTensors do:
    processes of a job know a graph by these names, and waited two minutes for each other at each.
    """
    return _ADDRESS.sub("", f"{node.target} {getattr(node.target, '__module__', '')}")


def sends(called: str) -> bool:
    """It may talk to other processes."""
    return "c10d" in called or "torch.distributed" in called


def differentiable(value: Any) -> bool:
    """A tensor with a gradient."""
    return isinstance(value, Tensor) and value.requires_grad


def trains(example_inputs: Sequence[Any]) -> bool:
    """Some input needs a gradient: the same test AOTAutograd makes before it traces a backward."""
    tensors = (x for x in example_inputs if isinstance(x, torch.Tensor))
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def fresh(tensor: Tensor) -> Tensor:
    """The same memory as a leaf of a graph of its own."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _copied(value: Any) -> Any:
    """The value before a graph changes it."""
    return fresh(value.clone()) if isinstance(value, Tensor) else value


def versions(values: Sequence[Any]) -> list[int]:
    """Of the tensors among them; one changes when its tensor is changed in place."""
    return [v._version for v in values if isinstance(v, Tensor) and not v.is_inference()]


def sampled(output: Tensor) -> Tensor:
    """Some values of an output, fp32; of a ragged one those that it has."""
    output = output.values() if output.is_nested else output
    count = min(_SAMPLE, output.numel())
    where = torch.linspace(0, output.numel() - 1, count, dtype=torch.float64, device="cpu")
    return torch.take(output.detach(), where.long().to(output.device)).float()


def samples_of(outputs: Sequence[Any]) -> dict[int, Tensor]:
    """By place: some values of each output that has a gradient."""
    return {i: sampled(x) for i, x in enumerate(outputs) if differentiable(x)}

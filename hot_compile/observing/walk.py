"""Forward and backward of one of Dynamo's graphs, by autograd, in no more memory than there is.

What does not fit is halved: what its first half gives is computed without a graph of autograd's,
its second half goes first, then the first. So what crosses a few cuts is kept, and one part's
activations. Before each operator, in both directions, it is asked whether there is room for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hot_compile.again import Again, RandomState, cuda_devices, differentiable, fresh, sampled
from hot_compile.observing.draws import Draws, Mark, draws_numbers
from hot_compile.observing.stretches import (
    Head,
    Sizes,
    enters_autocast,
    given,
    last_reads,
    leaves_autocast,
    needed,
)
from hot_compile.passes.base.operators import BATCHED_PRODUCTS, MATRIX_PRODUCTS
from hot_compile.passes.measure.sketch import sketch

_LITTLE = 2**26
"""Bytes that a look may take however little steps do."""
_FREE = 0.9
"""Share of a device's free memory that may be used with ``accept="free"``."""
_SPARE, _FULL = 0.25, 0.95
"""Without that: such a share of it where a look cannot do with what steps take, as long as no more
of the device than this is in use."""

aten = torch.ops.aten

_PRODUCTS = {op.overloadpacket for op in (*MATRIX_PRODUCTS, *BATCHED_PRODUCTS)}
_SMALL = (aten.embedding, aten.index, aten.sum, aten.mean, aten.nll_loss_forward, aten._unsafe_view)
"""They make less than they read, of weights perhaps."""

HALVES = torch.bfloat16, torch.float16
_CASTS = ("to", "type", "type_as", "bfloat16", "half")
"""Methods that make another dtype of a tensor."""

Values = Mapping[fx.Node, Any]


class TooLarge(RuntimeError):
    """The memory that is free is too little for a look."""


class _Full(RuntimeError):
    """There is no room for the next operator."""

    def __init__(self, size: float, left: float) -> None:
        super().__init__(
            f"an operator takes {size / 2**20:.0f} MiB more, {left / 2**20:.0f} are to spare"
        )


class Room:
    """What a look may take of GPUs' memory: what steps have taken, and freed; else a bit more."""

    def __init__(self, args: Sequence[Any], coming: int = 0, free: bool = False) -> None:
        """``coming``: bytes that the step will take in any case. ``free``: all that is free, too"""
        self._limits = {}
        for device in cuda_devices(args):
            now, more = allocated(device), max(_LITTLE, coming)
            if free:
                more = max(more, int(_FREE * unused(device)))
            self._limits[device] = max(highest(device), now + more)
        self._usual = dict(self._limits)

    def widen(self) -> bool:
        """For what does not fit: take some of what is free besides, until it is narrow again.
        Whether there is more than there was."""
        before = dict(self._limits)
        for device in before if before == self._usual else ():
            self._limits[device] = max(before[device], allocated(device) + spare(device))
        return self._limits != before

    def narrow(self) -> None:
        """What needed more is through."""
        self._limits = dict(self._usual)

    @property
    def left(self) -> float:
        """Bytes; infinite on a CPU, whose memory nobody counts."""
        lefts = (limit - allocated(device) for device, limit in self._limits.items())
        return min(lefts, default=float("inf"))

    def ask(self, size: int) -> None:
        """Raises _Full if so many bytes do not fit."""
        if self._limits and size and size > (left := self.left):
            raise _Full(size, left)

    def __bool__(self) -> bool:
        """Somebody counts."""
        return bool(self._limits)

    def before(self, operator: Any, *operands: Any) -> None:
        """Raises _Full if what an operator of ATen makes does not fit: a product, a cast, or as
        much as it reads."""
        if not self._limits or operator.is_view or operator._schema.is_mutable:
            return
        kind, tensors = operator.overloadpacket, _tensors(operands)
        if kind in _SMALL or not tensors:
            return
        made = sum(x.numel() * x.itemsize for x in tensors)
        if kind in _PRODUCTS:
            a, b = tensors[-2:]
            made = a.numel() // max(1, a.shape[-1]) * b.shape[-1] * a.itemsize
        elif kind is aten._to_copy:
            dtype = operands[1].get("dtype") or tensors[0].dtype
            made = tensors[0].numel() * dtype.itemsize
        self.ask(made)


def _tensors(nest: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(nest) if isinstance(x, Tensor)]


class _Asking(TorchDispatchMode):
    """Asks before each operator."""

    def __init__(self, room: Room) -> None:
        super().__init__()
        self._room = room

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._room.before(func, args, kwargs)
        return func(*args, **kwargs)


class _Autocasts:
    """Runs a stretch's nodes; whatever ``torch.autocast`` they enter is left with the stretch."""

    def __init__(self, interpreter: fx.Interpreter, full: bool) -> None:
        """``full``: what they enter is off."""
        self._interpreter, self._full = interpreter, full
        self._entered: dict[fx.Node, Any] = {}

    def __enter__(self) -> _Autocasts:
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._entered.values()):
            mode.__exit__(*error)

    def enter(self, node: fx.Node) -> None:
        """Once more, what was entered in front of the stretch."""
        self._interpreter.env[node] = self.run(node)

    def run(self, node: fx.Node) -> Any:
        """What the node makes."""
        if enters_autocast(node):
            device, dtype, enabled, cached = node.args
            made = node.target(device, dtype, enabled and not self._full, cached)  # type: ignore
            self._entered[node] = made
            return made
        with _any_but_cudnn() if _may_be_any(node) else contextlib.nullcontext():
            made = self._interpreter.run_node(node)
        if self._full and isinstance(made, Tensor) and made.dtype in HALVES:
            made = self._widened(node, made)
        if leaves_autocast(node):
            self._entered.pop(node.args[0])  # type: ignore[arg-type]
        return made

    def _widened(self, node: fx.Node, made: Tensor) -> Tensor:
        """What the graph itself casts to what autocast made of something else is not cast."""
        read = node.all_input_nodes[0] if node.target in _CASTS else node
        given = self._interpreter.env.get(read)
        wide = given if isinstance(given, Tensor) and given.is_floating_point() else made
        return wide.to(made.device, torch.float32, copy=True)  # it may be changed in place


def _may_be_any(node: fx.Node) -> bool:
    """An attention that other kernels than cuDNN's compute as well, in as little memory."""
    masks = node.kwargs.get("attn_mask", node.args[3] if len(node.args) > 3 else None) is not None
    plain = not draws_numbers(node) and not (masks and node.kwargs.get("enable_gqa"))
    plain = plain and torch.backends.cuda.flash_sdp_enabled()
    return plain and "attention" in str(getattr(node.target, "__name__", node.target))


@contextlib.contextmanager
def _any_but_cudnn() -> Iterator[None]:
    """Inside, attention is not cuDNN's: torch keeps plans of its backward without the strides of
    the gradient that comes to it (``passes/exact/attention.py``), and a cut may change these."""
    usual = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(usual)


@dataclasses.dataclass(frozen=True)
class Graph:
    """One of Dynamo's graphs, and how it is run."""

    gm: fx.GraphModule
    sizes: Sizes
    whole: bool
    """It cannot be cut."""
    head: Head | None
    names: Mapping[fx.Node, str]
    """Of the inputs that are parameters."""
    head_code: Callable[[Sequence[fx.Node], Sequence[Any]], Callable[..., Sequence[Any]]]
    """Of a head's nodes, for the values they read: to what is read of them. Raises TooLarge."""

    @functools.cached_property
    def inputs(self) -> list[fx.Node]:
        """Its placeholders."""
        return self.gm.graph.find_nodes(op="placeholder")

    @functools.cached_property
    def outputs(self) -> dict[fx.Node, list[int]]:
        """What it returns, and at which places."""
        found: Any = self.gm.graph.output_node().args[0]
        places: dict[fx.Node, list[int]] = {}
        for place, node in enumerate(found):
            if isinstance(node, fx.Node):
                places.setdefault(node, []).append(place)
        return places

    def middle(self, first: int, last: int) -> int | None:
        """Where to cut between these places; None if that is not possible."""
        if self.whole:
            return None
        start = len(self.sizes.nodes) - len(self.head.nodes) if self.head else last
        return start if first < start < last else self.sizes.middle(first, min(start, last))

    def is_head(self, first: int) -> bool:
        """From there on it is the head."""
        return self.head is not None and self.sizes.nodes[first] is self.head.nodes[0]


class Walk:
    """One forward and backward of a graph, for one step."""

    def __init__(
        self, graph: Graph, step: Again, tangents: Mapping[int, Tensor], room: Room, draws: bool,
        keep: Callable[[Tensor], Tensor] = sketch,
    ) -> None:  # fmt: skip
        """``tangents``: gradients of the outputs at these places. ``draws``: random numbers.

        ``keep``: what is kept of a parameter's gradient.
        """
        self._graph, self._step, self._room, self._keep = graph, step, room, keep
        self._nodes = graph.sizes.nodes
        self._given: dict[fx.Node, Any] = dict(zip(graph.inputs, step.args, strict=True))
        for node in graph.gm.graph.find_nodes(op="get_attr"):
            self._given[node] = fx.Interpreter(graph.gm).run_node(node)
        self._changed = {n for i, n in enumerate(graph.inputs) if i in step.mutated}
        self._tangents: dict[fx.Node, Tensor] = {}
        """Gradients of nodes' values, as far as they are known."""
        for node, places in graph.outputs.items():
            for place in tangents.keys() & set(places):
                self._add(node, tangents[place])
        self._draws = Draws() if draws else None
        self._marks: dict[int, tuple[Mark, RandomState]] = {}
        """By place: how far random numbers are in front of it."""
        self._outputs: dict[fx.Node, Tensor] = {}
        """Few values of each output."""
        self._done = len(self._nodes)
        """From this place on gradients are known."""
        self._found: dict[str, Tensor] = {}
        self._left_out: set[str] = set()
        self._why = ""

    def run(self) -> None:
        """Raises TooLarge where memory is too short; what was found until then counts."""
        self._back(0, len(self._nodes), {})

    @property
    def found(self) -> dict[str, Tensor]:
        """What is kept of gradients, by parameter: of those that are known whole."""
        places = self._graph.sizes.places
        whole = {
            name
            for node, name in self._graph.names.items()
            if all(places.get(user, self._done) >= self._done for user in node.users)
        }
        return {n: g for n, g in self._found.items() if n in whole - self._left_out}

    @property
    def samples(self) -> dict[int, Tensor]:
        """By place: few values of each output."""
        places = self._graph.outputs
        return {i: known for node, known in self._outputs.items() for i in places[node]}

    def _back(self, first: int, last: int, env: Values) -> None:
        """Gradients of nodes between these places. ``env``: what is read of those in front."""
        graph, middle = self._graph, self._graph.middle(first, last)
        fits = graph.sizes.need(first, last) <= self._room.left
        for chunked, trained in self._ways(first, middle is None, fits):
            if self._tries(first, last, env, chunked, trained):
                self._done = first
                self._room.narrow()
                return
        if middle is None:
            raise TooLarge(self._why)
        self._back(middle, last, self._forward(first, middle, env))
        self._back(first, middle, env)

    def _ways(self, first: int, smallest: bool, fits: bool) -> Iterator[tuple[bool, bool]]:
        """(whether logits go in chunks, whether gradients of parameters are wanted)."""
        head = self._graph.head if self._graph.is_head(first) else None
        if fits:
            yield False, True
        for turn, trained in enumerate((True, True, False) if smallest else ()):
            if turn == 1 and not self._room.widen():
                continue
            if head and head.bytes - (not trained) * head.weights <= self._room.left:
                yield True, trained
            if turn or not fits:
                yield False, trained

    def _tries(self, first: int, last: int, env: Values, chunked: bool, trained: bool) -> bool:
        """It fitted."""
        try:
            gradients, found = self._gradients(first, last, env, chunked, trained)
        except (_Full, TooLarge, torch.OutOfMemoryError) as error:
            self._why = str(error)
            return False
        for node in self._nodes[first:last]:
            self._tangents.pop(node, None)
        for node, gradient in gradients.items():
            self._add(node, gradient)
        for name, gradient in found.items():
            self._found[name] = self._found[name] + gradient if name in self._found else gradient
        if not trained:
            names = self._graph.names
            self._left_out |= {names[n] for n in needed(self._nodes[first:last]) if n in names}
        return True

    def _gradients(
        self, first: int, last: int, env: Values, chunked: bool, trained: bool
    ) -> tuple[dict[fx.Node, Tensor], dict[str, Tensor]]:
        """Of what these nodes read of those in front, and sketches of those of parameters."""
        stretch, found = self._nodes[first:last], dict[str, Tensor]()
        leaves = {n: self._leaf(n, env, trained) for n in needed(stretch)}
        for node in leaves.keys() & self._graph.names.keys():
            if differentiable(leaves[node]):
                keep = functools.partial(_keep, found, self._graph.names[node], self._keep)
                leaves[node].register_post_accumulate_grad_hook(keep)
        values = {n: v.clone() if n in self._changed else v for n, v in leaves.items()}
        kept = {n: self._tangents[n] for n in stretch if n in self._tangents}
        if chunked:
            with self._step.modes():
                code = self._graph.head_code(stretch, list(values.values()))
        with self._as_the_step(first):
            if chunked:
                made = code(*values.values())
                results = dict(zip(given(stretch), made, strict=True))
            else:
                results = self._run(stretch, values, kept)
        for node, value in results.items():
            self._sample(node, value)
        del values
        ends = {n: results.pop(n) for n in kept if differentiable(results[n])}
        wanted = {n: leaf for n, leaf in leaves.items() if differentiable(leaf)}
        del leaves, results
        if ends and wanted:
            tangents = [kept[n].to(end.dtype) for n, end in ends.items()]
            with _Asking(self._room) if self._room else contextlib.nullcontext():
                torch.autograd.backward(list(ends.values()), tangents, inputs=list(wanted.values()))
        gradients = {n: v.grad for n, v in wanted.items() if v.grad is not None}
        return gradients, found

    def _leaf(self, node: fx.Node, env: Values, trained: bool) -> Any:
        """A value that a stretch reads, as a leaf if its gradient is wanted."""
        if node in env:
            value, example = env[node], node.meta.get("example_value")
            wanted = isinstance(example, Tensor) and example.requires_grad
            return value.detach().requires_grad_() if wanted else value
        value = self._wide(node)
        if not isinstance(value, Tensor):
            return value
        return fresh(value) if trained and node in self._graph.names else value.detach()

    def _forward(self, first: int, last: int, env: Values) -> Values:
        """What is made in front of ``last`` and read from there on."""
        stretch, crossing = self._nodes[first:last], self._graph.sizes.crossing(last)
        try:
            values = {n: env[n] if n in env else self._input(n) for n in needed(stretch)}
            with self._as_the_step(first):
                made = self._run(stretch, values, dict.fromkeys(crossing))
        except _Full as error:
            if not self._room.widen():
                raise TooLarge(str(error)) from None
            made = None
        if made is None:  # again, when the error's frames are gone, and what they had made
            return self._forward(first, last, env)
        self._room.narrow()
        return {n: made[n] if n in made else env[n] for n in crossing}

    def _wide(self, node: fx.Node) -> Any:
        """What the graph is given; in full, as everything, in 32 bits."""
        value = self._given[node]
        if self._step.full and isinstance(value, Tensor) and value.dtype in HALVES:
            self._room.ask(2 * value.nbytes)
            return value.detach().float().requires_grad_(value.requires_grad)
        return value

    def _input(self, node: fx.Node) -> Any:
        value = self._wide(node)
        if not isinstance(value, Tensor):
            return value
        return value.clone() if node in self._changed else value.detach()

    def _run(self, stretch: Sequence[fx.Node], values: Values, kept: Values) -> dict[fx.Node, Any]:
        """Values of these nodes that are ``kept``, and of others that are."""
        interpreter, sizes, room = fx.Interpreter(self._graph.gm), self._graph.sizes, self._room
        interpreter.env = dict(values)
        last = last_reads(stretch, kept)
        with _Autocasts(interpreter, self._step.full) as autocasts:
            for node in sizes.autocasts(stretch[0]):
                autocasts.enter(node)
            for node in stretch:
                room.ask(sizes.made.get(node, 0))
                made = interpreter.env[node] = autocasts.run(node)
                if room and differentiable(made):
                    made.register_hook(functools.partial(_ask, room, sizes.backward(node)))
                del made
                for read in last.get(node, ()):
                    self._sample(read, interpreter.env.pop(read, None))
        return {n: interpreter.env[n] for n in kept if n in interpreter.env}

    def _sample(self, node: fx.Node, value: Any) -> None:
        """An output, when nobody changes it any more."""
        wanted = node in self._graph.outputs and node not in self._outputs
        if wanted and isinstance(value, Tensor) and value.is_floating_point():
            self._outputs[node] = sampled(value)

    @contextlib.contextmanager
    def _as_the_step(self, first: int) -> Iterator[None]:
        """Inside, modes and random numbers are those of the step in front of this place."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._step.modes())
            if self._draws:
                if first not in self._marks:
                    self._marks[first] = self._draws.mark, RandomState(self._step.args)
                mark, state = self._marks[first]
                state.restore()
                stack.enter_context(self._draws.since(mark, self._room.before))
            elif self._room:
                stack.enter_context(_Asking(self._room))
            yield

    def _add(self, node: fx.Node, tangent: Tensor) -> None:
        if node in self._graph.sizes.places:
            known = self._tangents.get(node)
            self._tangents[node] = tangent if known is None else known + tangent


def _keep(
    found: dict[str, Tensor], name: str, keep: Callable[[Tensor], Tensor], leaf: Tensor
) -> None:
    """A gradient is there. Sparse ones, of embeddings, are exact anyway."""
    if leaf.grad is not None and not leaf.grad.is_sparse:
        found[name] = keep(leaf.grad)
    leaf.grad = None


def _ask(room: Room, size: int, _: Tensor) -> None:
    room.ask(size)


def allocated(device: int) -> int:
    """Bytes of a GPU that tensors have."""
    return torch.cuda.memory_allocated(device)


def highest(device: int) -> int:
    """Bytes of a GPU that tensors had at most."""
    return torch.cuda.max_memory_allocated(device)


def spare(device: int) -> int:
    """Bytes of a GPU that a look may take where it cannot do without."""
    free, total = unused(device), torch.cuda.mem_get_info(device)[1]
    return max(0, int(min(_SPARE * free, free - (1 - _FULL) * total)))


def unused(device: int) -> int:
    """Bytes of a GPU that no tensor has."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached

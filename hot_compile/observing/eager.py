"""The exact twin of one of Dynamo's graphs: that graph itself, operator by operator, by autograd.

Nothing is compiled for it. Its activations take what the step before it took, and are computed
again in stretches where they would take more.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext
from torch.utils.checkpoint import checkpoint

from hot_compile.again import Again, cuda_devices, differentiable, mutated_places
from hot_compile.passes.base.graph import graphs_of
from hot_compile.passes.base.site import bytes_of
from hot_compile.passes.measure.sketch import sketch

_STRETCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Into how many a graph may be cut."""
_MARGIN = 1.3
"""What operators keep to themselves, and what the allocator cannot use, of what is predicted."""
_COPIES = (3, 6)
"""Times its bytes that what an operator keeps to itself takes; of a bf16 or fp16 tensor: a loss
computes in fp32. Predictions are 1.1 to 1.9 times what a ViT and a BERT took on a CPU."""
_FREE = 0.9
"""Share of a device's free memory that may be used with ``accept="free"``."""
_LITTLE = 2**26
"""Bytes that a look may take however little steps do."""
_RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "normal_", "rrelu", "exponential_")
"""What draws random numbers has one of these in its name."""


class TooLarge(RuntimeError):
    """The memory that is free is too little for a look."""


class Eager:
    """Dynamo's graph as its own exact twin."""

    mutated: frozenset[int]
    """Places of the inputs that it changes."""

    def __init__(
        self,
        gm: fx.GraphModule,
        names: Sequence[str | None],
        examples: Sequence[Any],
        free: bool = False,
    ) -> None:
        """To be made while Dynamo compiles the graph, after AOTAutograd has.

        Args:
            gm: is kept, and never compiled. names: of its inputs that are parameters.
            examples: its inputs. free: it may take what is free of a GPU; else its memory is not
                to rise above what steps take.
        """
        self._gm = gm
        self._names = names
        self._free = free
        self.mutated = mutated_places(TracingContext.try_get(), examples)

    def code(self, args: Sequence[Any]) -> Eager:
        """It runs as it is, for any sizes."""
        return self

    def gradients(
        self, step: Again, tangents: Mapping[int, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(how far its outputs are from the step's, sketches of gradients by parameter).

        Args:
            step: what is done again. tangents: gradients of the outputs at these places.

        Raises:
            TooLarge: memory is too short.
        """
        inputs, outputs = step.run(self._run)
        deviation, found = step.deviation(outputs), dict[str, Tensor]()
        ends = [outputs[place] for place in tangents]
        del outputs
        leaves = [leaf for leaf in inputs if differentiable(leaf)]
        for leaf, name in itertools.zip_longest(inputs, self._names):
            if differentiable(leaf):
                leaf.register_post_accumulate_grad_hook(functools.partial(_keep, found, name))
        torch.autograd.backward(ends, list(tangents.values()), inputs=leaves)
        return deviation, found

    def _run(self, *args: Any) -> Sequence[Any]:
        count = self._stretches(args)
        if count == 1:
            return self._gm(*args)
        return _in_stretches(self._gm, args, _cut(self._gm, count))

    def _stretches(self, args: Sequence[Any]) -> int:
        return self._fitting(args, self._needs)

    def in_one_piece(self, args: Sequence[Any]) -> None:
        """Compiled code of the graph cannot be cut.

        Raises:
            TooLarge: memory is too short for that.
        """
        self._fitting(args, {1: self._need(1)})

    def _fitting(self, args: Sequence[Any], need: Mapping[int, int]) -> int:
        """The fewest stretches with which it stays below the highest that steps have reached."""
        devices = cuda_devices(args)
        for count, size in need.items():
            if all(size <= max(_risen(d), _LITTLE) for d in devices):
                return count
        least = min(need, key=lambda n: need[n])
        if self._free and all(need[least] <= _FREE * _unused(d) for d in devices):
            return least
        more = "is free" if self._free else "steps do; with accept='free' looks take what is free"
        raise TooLarge(f"a look takes {need[least] / 2**20:.0f} MiB, more than {more}")

    @functools.cached_property
    def _needs(self) -> dict[int, int]:
        """Predicted bytes, by number of stretches."""
        return {n: self._need(n) for n in (_STRETCHES if _can_be_cut(self._gm) else (1,))}

    def _need(self, count: int) -> int:
        """Bytes that it takes in so many stretches: what crosses between, and the largest one."""
        nodes = _calls(self._gm)
        sizes = _sizes(nodes)
        stretches = _cut(self._gm, count)
        largest = max((sum(sizes[n] for n in stretch) for stretch in stretches), default=0)
        between = sum(sizes[n] for n in {n for s in stretches[:-1] for n in _given(s)})
        given = self._gm.graph.find_nodes(op="placeholder")
        gradient = max((_bytes(n) for n in given), default=0)
        several = between if count > 1 else 0
        within = max((size * _COPIES[_is_half(n)] for n, size in sizes.items()), default=0)
        return int(_MARGIN * (largest + several + within) + gradient)


def draws(gm: fx.GraphModule) -> bool:
    """Some operator of the graph draws random numbers: compiled code draws others."""
    return any(_draws(node) for graph in graphs_of(gm) for node in graph.nodes)


def _draws(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    name = str(getattr(node.target, "__name__", node.target))
    if "scaled_dot_product" in name:
        return bool(node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0))
    if name == "dropout":
        given = dict(zip(("input", "p", "training"), node.args, strict=False)) | node.kwargs
        return bool(given.get("training", True)) and bool(given.get("p", 0.5))
    return any(word in name for word in _RANDOM) or "rnn" in name or name in ("lstm", "gru")


def _keep(found: dict[str, Tensor], name: str | None, leaf: Tensor) -> None:
    """A gradient is there: keep its sketch alone."""
    if name is not None and leaf.grad is not None:
        found[name] = sketch(leaf.grad)
    leaf.grad = None


def _risen(device: int) -> int:
    """Bytes by which a GPU's memory was higher than it is now."""
    return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)


def _unused(device: int) -> int:
    """Bytes of a GPU that no tensor has."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def _calls(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op in ("call_function", "call_method", "call_module")]


def _can_be_cut(gm: fx.GraphModule) -> bool:
    """Nothing is changed in place, and no mode switched, which running twice would do twice."""

    def harmless(node: fx.Node) -> bool:
        name = str(getattr(node.target, "__name__", node.target))
        inplace = name.endswith("_") and not name.endswith("__")
        modes = "autocast" in name or "grad_enabled" in name
        ours = node.kwargs.get("inplace") or node.target in (operator.iadd, operator.imul)
        return not (inplace or modes or ours or node.target is operator.setitem)

    return all(map(harmless, _calls(gm)))


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("example_value")
    return bytes_of(value) if isinstance(value, Tensor) else 0


def _is_half(node: fx.Node) -> bool:
    return getattr(node.meta.get("example_value"), "dtype", None) in (torch.bfloat16, torch.float16)


def _sizes(nodes: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """Bytes that each node makes; a view makes none."""
    seen, sizes = set[int](), dict[fx.Node, int]()
    for node in nodes:
        value = node.meta.get("example_value")
        given = [n.meta.get("example_value") for n in node.all_input_nodes]
        seen.update(g.untyped_storage()._cdata for g in given if isinstance(g, Tensor))
        made = isinstance(value, Tensor) and value.untyped_storage()._cdata not in seen
        sizes[node] = _bytes(node) if made else 0
    return sizes


def _cut(gm: fx.GraphModule, count: int) -> list[list[fx.Node]]:
    """Stretches of the graph's nodes that make about equally many bytes."""
    nodes = _calls(gm)
    sizes = _sizes(nodes)
    share, stretches, made = sum(sizes.values()) / count, [list[fx.Node]()], 0
    for node in nodes:
        if made > share * len(stretches):
            stretches.append([])
        stretches[-1].append(node)
        made += sizes[node]
    return stretches


def _given(stretch: Sequence[fx.Node]) -> list[fx.Node]:
    """What later stretches, or the caller, read of this one."""
    own = set(stretch)
    return [n for n in stretch if any(user not in own for user in n.users)]


def _in_stretches(
    gm: fx.GraphModule, args: Sequence[Any], stretches: Sequence[Sequence[fx.Node]]
) -> Sequence[Any]:
    """The graph's outputs; between stretches only what crosses is kept, the rest computed again."""
    env: dict[fx.Node, Any] = dict(zip(gm.graph.find_nodes(op="placeholder"), args, strict=True))
    for node in gm.graph.find_nodes(op="get_attr"):
        env[node] = fx.Interpreter(gm).run_node(node)
    left = set(gm.graph.nodes)
    for stretch in stretches:
        needs = list(dict.fromkeys(n for s in stretch for n in s.all_input_nodes if n in env))
        gives = _given(stretch)
        run = functools.partial(_stretch, gm, stretch, needs, gives)
        values = [env[n] for n in needs]
        made = checkpoint(run, *values, use_reentrant=False, preserve_rng_state=False)
        env.update(zip(gives, made, strict=True))
        left.difference_update(stretch)
        for node in needs:
            if left.isdisjoint(node.users):
                del env[node]
        del values, made
    results: Any = gm.graph.output_node().args[0]
    return fx.node.map_arg(results, env.__getitem__)


def _stretch(
    gm: fx.GraphModule,
    stretch: Sequence[fx.Node],
    needs: Sequence[fx.Node],
    gives: Sequence[fx.Node],
    *values: Any,
) -> tuple[Any, ...]:
    interpreter = fx.Interpreter(gm)
    interpreter.env = dict(zip(needs, values, strict=True))
    for node in stretch:
        interpreter.env[node] = interpreter.run_node(node)
    return tuple(interpreter.env[n] for n in gives)

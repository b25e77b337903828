"""The exact twin of one of Dynamo's graphs: that graph itself, operator by operator, by autograd.

Nothing of Inductor's is compiled for it, but the code of its random numbers. Its activations take
what the step before it took, and are computed again in stretches where they would take more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext

from hot_compile.again import Again, compiled_for, cuda_devices, differentiable, mutated_places
from hot_compile.observing.draws import Draws, draws
from hot_compile.observing.stretches import (
    Cut,
    Sizes,
    can_be_cut,
    find_head,
    part,
    run,
)
from hot_compile.passes.measure.sketch import sketch

_STRETCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Into how many a graph may be cut."""
_FREE = 0.9
"""Share of a device's free memory that may be used with ``accept="free"``."""
_LITTLE = 2**26
"""Bytes that a look may take however little steps do."""


class TooLarge(RuntimeError):
    """The memory that is free is too little for a look."""


@dataclasses.dataclass(frozen=True)
class Heads:
    """How heads go in chunks."""

    least: int
    """Bytes of the logits of one that does."""
    compile: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
    """(part of a graph, its inputs) -> the same, exact, its logits in chunks. Raises TooLarge."""


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
        heads: Heads | None = None,
    ) -> None:
        """To be made while Dynamo compiles the graph, after AOTAutograd has.

        Args:
            gm: is kept, and never compiled. names: of its inputs that are parameters.
            examples: its inputs. free: it may take what is free of a GPU; else its memory is not
                to rise above what steps take. heads: how those of the graph go in chunks.
        """
        self._gm = gm
        self._heads = heads
        self._codes: dict[object, Callable[..., Any]] = {}
        self._draws = draws(gm)
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
        cut = self._fitting(args)
        draws_ = Draws() if self._draws else None
        if cut.head or len(cut.stretches) > 1:
            return run(self._gm, args, cut, draws_, self._run_head)
        with draws_.since(draws_.mark) if draws_ else contextlib.nullcontext():
            return self._gm(*args)

    def in_one_piece(self, args: Sequence[Any]) -> None:
        """Compiled code of the graph cannot be cut.

        Raises:
            TooLarge: memory is too short for that.
        """
        self._first(args, self._ways[:1])

    def _fitting(self, args: Sequence[Any]) -> Cut:
        """In as few stretches as stay below the highest that steps have reached."""
        return self._first(args, self._ways)

    def _first(self, args: Sequence[Any], ways: Sequence[tuple[int, Cut]]) -> Cut:
        devices = cuda_devices(args)
        for need, cut in ways:
            if all(need <= max(_risen(d), _LITTLE) for d in devices):
                return cut
        least, cut = min(ways, key=lambda way: way[0])
        if self._free and all(least <= _FREE * _unused(d) for d in devices):
            return cut
        more = "is free" if self._free else "steps do; with accept='free' looks take what is free"
        raise TooLarge(f"a look takes {least / 2**20:.0f} MiB, more than {more}")

    @functools.cached_property
    def _ways(self) -> list[tuple[int, Cut]]:
        """(predicted bytes, how it is cut); those that take least time first."""
        sizes = Sizes(self._gm)
        if not can_be_cut(sizes):
            cut = sizes.cut(1)
            return [(sizes.need(cut), cut)]
        head = find_head(sizes, self._heads.least) if self._heads else None
        ends = (None, head) if head else (None,)
        cuts = [sizes.cut(count, end) for end in ends for count in _STRETCHES]
        return [(sizes.need(cut), cut) for cut in cuts]

    def _run_head(self, nodes: Sequence[fx.Node], *values: Any) -> Sequence[Any]:
        """Compiled, with its logits in chunks, for the shapes of what it reads."""
        assert self._heads is not None
        shapes = tuple(v.shape if isinstance(v, Tensor) else v for v in values)
        if shapes not in self._codes:
            self._codes[shapes], _ = compiled_for(
                part(self._gm, nodes), values, self._heads.compile
            )
        return self._codes[shapes](*values)


def _keep(found: dict[str, Tensor], name: str | None, leaf: Tensor) -> None:
    """A gradient is there: keep its sketch alone."""
    if name is not None and leaf.grad is not None:
        found[name] = sketch(leaf.grad)
    leaf.grad = None


def _risen(device: int) -> int:
    """Bytes by which a GPU's memory was higher than it is now."""
    return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)


def room(devices: Sequence[torch.device]) -> float:
    """Bytes that no tensor has where steps' memory is highest; of a CPU nobody counts them."""
    numbers = [d.index or 0 for d in devices if d.type == "cuda"]
    return min((float(_unused(n) - _risen(n)) for n in numbers), default=math.inf)


def _unused(device: int) -> int:
    """Bytes of a GPU that no tensor has."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached

"""The exact twin of one of Dynamo's graphs: that graph itself, operator by operator, by autograd.

Nothing of Inductor's is compiled for it, but the code of its random numbers. It takes no more
memory than steps do, in as many parts as that needs (``walk``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext

from hot_compile.again import Again, compiled_for, mutated_places
from hot_compile.observing.draws import draws
from hot_compile.observing.stretches import Sizes, can_be_cut, find_head, part
from hot_compile.observing.walk import Graph, Room, TooLarge, Walk, allocated, highest, unused
from hot_compile.passes.measure.sketch import sketch


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
        short: Callable[[str], None] = lambda why: None,
    ) -> None:
        """To be made while Dynamo compiles the graph, after AOTAutograd has.

        Args:
            gm: is kept, and never compiled. names: of its inputs that are parameters.
            examples: its inputs. free: it may take what is free of a GPU; else its memory is not
                to rise above what steps take. heads: how those of the graph go in chunks.
            short: told why a look was not finished.
        """
        self._gm = gm
        self._heads = heads
        self._codes: dict[object, Callable[..., Any]] = {}
        self._draws = draws(gm)
        self.samples: dict[int, Tensor] = {}
        """Values of the outputs that were computed last, by place."""
        self._names = names
        self._short = short
        self._free = free
        self.mutated = mutated_places(TracingContext.try_get(), examples)

    def code(self, args: Sequence[Any]) -> Eager:
        """It runs as it is, for any sizes."""
        return self

    def gradients(
        self, step: Again, tangents: Mapping[int, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(how far its outputs are from the step's, sketches of gradients by parameter).

        Of fewer parameters, those read last, where memory is too short for all.

        Args:
            step: what is done again. tangents: gradients of the outputs at these places.

        Raises:
            TooLarge: memory is too short for any.
        """
        return self._walked(step, tangents, sketch)

    def whole(self, step: Again, tangents: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """As ``gradients``, the gradients themselves."""
        return self._walked(step, tangents, Tensor.detach)[1]

    def _walked(
        self, step: Again, tangents: Mapping[int, Tensor], keep: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        room = Room(step.args, step.coming, self._free)
        walk = Walk(self._graph, step, tangents, room, self._draws, keep)
        try:
            walk.run()
        except TooLarge as error:
            if not walk.found:
                raise
            self._short(str(error))
        self.samples = walk.samples
        return step.deviation(self.samples), walk.found

    def in_one_piece(self, args: Sequence[Any], coming: int = 0) -> None:
        """Compiled code of the graph cannot be cut.

        Raises:
            TooLarge: memory is too short for that.
        """
        sizes, room = self._graph.sizes, Room(args, coming, self._free)
        need = sizes.need(0, len(sizes.nodes))
        if need > room.left and not (room.widen() and need <= room.left):
            raise TooLarge(
                f"a look takes {need / 2**20:.0f} MiB at once, {room.left / 2**20:.0f} are to spare"
            )

    @functools.cached_property
    def _graph(self) -> Graph:
        sizes = Sizes(self._gm)
        cut = can_be_cut(sizes)
        head = find_head(sizes, self._heads.least) if cut and self._heads else None
        inputs = zip(self._gm.graph.find_nodes(op="placeholder"), self._names, strict=False)
        names = {node: name for node, name in inputs if name is not None}
        return Graph(self._gm, sizes, not cut, head, names, self._head_code)

    def _head_code(
        self, nodes: Sequence[fx.Node], values: Sequence[Any]
    ) -> Callable[..., Sequence[Any]]:
        """Compiled, with its logits in chunks, for the shapes of what it reads."""
        assert self._heads is not None
        shapes = tuple(
            (v.shape, v.dtype, v.requires_grad, torch.is_autocast_enabled(v.device.type))
            if isinstance(v, Tensor)
            else v
            for v in values
        )
        if shapes not in self._codes:
            self._codes[shapes], _ = compiled_for(
                part(self._gm, nodes), values, self._heads.compile
            )
        return self._codes[shapes]


def room(devices: Sequence[torch.device]) -> float:
    """Bytes that no tensor has where steps' memory is highest; of a CPU nobody counts them."""
    numbers = [d.index or 0 for d in devices if d.type == "cuda"]
    lefts = (unused(n) + allocated(n) - highest(n) for n in numbers)
    return min(map(float, lefts), default=float("inf"))

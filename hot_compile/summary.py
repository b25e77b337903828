"""What was done to the graphs of a run, in one line, whether compiled now or found in a cache."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import fx

from .inspect import megabytes
from .passes.graph import readable
from .passes.pipeline import sources_hash
from .record import GraphReport, Listener
from .runtime.native.build import cache_dir
from .runtime.native.providers import runtime_version


@dataclasses.dataclass(frozen=True)
class Figures:
    """What was done to one graph."""

    layers: str
    """Digest of its layers' names and widths: the same for every batch."""
    products: int
    rewritten: int
    held: int
    uncompressed: int

    @classmethod
    def of(cls, report: GraphReport) -> Figures:
        """The figures of a graph that was compiled."""
        layers = repr([(d.site, d.shape[1:]) for d in report.plan])
        return cls(
            layers=hashlib.sha256(layers.encode()).hexdigest(),
            products=len(report.plan.decisions),
            rewritten=len(report.plan.rewritten),
            held=report.held_bytes,
            uncompressed=sum(c.bytes_before for c in report.crossing),
        )

    def save(self, digest: str) -> None:
        """Keep them for a process that gets this graph from Inductor's cache; or do nothing."""
        with contextlib.suppress(OSError):
            path = _noted(digest)
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
                json.dump(dataclasses.asdict(self), file)
            Path(file.name).replace(path)

    @classmethod
    def load(cls, digest: str) -> Figures | None:
        """What was kept of a graph; None if nothing was, or it cannot be read."""
        try:
            return cls(**json.loads(_noted(digest).read_text()))
        except (OSError, ValueError, TypeError):
            return None


def _noted(digest: str) -> Path:
    return cache_dir() / "figures" / f"{digest[:32]}.json"


def graph_key(
    gm: fx.GraphModule, example_inputs: Sequence[Any], mode: str | None, options: Mapping[str, Any]
) -> str:
    """Digest of one of Dynamo's graphs and of how it is to be compiled."""
    inputs = [
        (str(x.dtype), str(x.device), list(map(str, x.shape)), x.requires_grad)
        if isinstance(x, torch.Tensor)
        else str(type(x))
        for x in example_inputs
    ]
    settings = sorted((key, repr(value)) for key, value in options.items())
    versions = torch.__version__, sources_hash(), runtime_version()
    parts = readable(gm), inputs, mode, settings, versions
    return hashlib.sha256(repr(parts).encode()).hexdigest()


class Summary:
    """Hears of every graph of a run; prints itself in one line."""

    def __init__(self) -> None:
        self._asked: list[str] = []
        self._told: dict[str, Figures] = {}
        self._rank = 0

    def listener(self, digest: str) -> Listener:
        """A graph is being compiled: who is to be told what becomes of it.

        No one will be if it comes from Inductor's cache; then what was kept of it counts.
        """
        self._asked.append(digest)
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._rank = torch.distributed.get_rank() if distributed else 0

        def listen(report: GraphReport) -> None:
            self._told[digest] = figures = Figures.of(report)
            figures.save(digest)

        return listen

    @property
    def is_first(self) -> bool:
        """Of several processes that train together, this is the one that tells."""
        return self._rank == 0

    def print(self) -> None:
        """To stderr, on the first of several processes."""
        if self.is_first:
            Console(stderr=True, highlight=False, markup=False).print(str(self), soft_wrap=True)

    def __str__(self) -> str:
        if not self._asked:
            return "hot: nothing compiled: nobody asked for torch.compile's default, or had a graph"
        count = len(self._asked)
        seconds = torch._dynamo.utils.calculate_time_spent()["total_wall_time"]
        parts = [f"{count} graph{'s' * (count > 1)} compiled", *self._of_layers()]
        return f"hot: {', '.join(parts)}; {seconds:.1f} s compiling"

    def _of_layers(self) -> list[str]:
        """Of layers that were compiled several times, for other batches say, the last counts."""
        found = {digest: self._told.get(digest) or Figures.load(digest) for digest in self._asked}
        last = {figures.layers: figures for figures in found.values() if figures}.values()
        held, uncompressed = (sum(getattr(f, n) for f in last) for n in ("held", "uncompressed"))
        parts = [
            f"{sum(f.rewritten for f in last)} of {sum(f.products for f in last)} "
            "products rewritten",
            f"{megabytes(held)} held for the backward ({megabytes(uncompressed)} uncompressed)",
        ]
        cached = sum(1 for digest, figures in found.items() if figures and digest not in self._told)
        others = sum(1 for figures in found.values() if figures is None)
        notes = [f"{cached} from Inductor's cache"] * bool(cached)
        notes += [f"{others} without a backward, or not known of"] * bool(others)
        return (parts if last else []) + notes

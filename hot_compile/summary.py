"""What was done to the graphs of a run, in one line, whether compiled now or found in a cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import torch
from rich.console import Console

from .figures import Figures
from .inspect import megabytes
from .record import GraphReport, Listener
from .runtime.native.build import TIMED_AS

_STOCKS = 1.1, 1.5
"""A first compile takes so many times stock's seconds, as measured of six models on an H200."""


class Summary:
    """Hears of every graph of a run; prints itself in one line."""

    def __init__(self) -> None:
        self._asked: list[str] = []
        self._without_backward = 0
        self._told: dict[str, GraphReport] = {}
        self._rank = 0

    def listener(self, digest: str) -> Listener:
        """A graph is being compiled: who is to be told what becomes of it.

        No one will be if its code comes from a cache and nothing was kept of it.
        """
        self._asked.append(digest)
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._rank = torch.distributed.get_rank() if distributed else 0

        def listen(report: GraphReport) -> None:
            self._told[digest] = report

        return listen

    def without_backward(self) -> None:
        """A graph is being compiled that has no backward."""
        self._without_backward += 1

    @property
    def is_first(self) -> bool:
        """Of several processes that train together, this is the one that tells."""
        return self._rank == 0

    def print(self) -> None:
        """To stderr, on the first of several processes."""
        if self.is_first:
            Console(stderr=True, highlight=False, markup=False).print(str(self), soft_wrap=True)

    def __str__(self) -> str:
        count = len(self._asked) + self._without_backward
        if not count:
            return (
                'hot: nothing compiled: nobody asked torch.compile for its default or for "hot", '
                "or had a graph"
            )
        parts = [f"{count} graph{'s' * (count > 1)} compiled", *self._of_layers()]
        return f"hot: {', '.join(parts)}{self._cost()}"

    def _cost(self) -> str:
        """Seconds of compiling, without the operators' build, beside a guess of stock's.

        Nothing if the script has reset Dynamo, as ``explain`` does, and with it these times.
        """
        spent = torch._dynamo.utils.calculate_time_spent()
        seconds = spent["total_wall_time"] - spent.get(TIMED_AS, 0.0)
        if seconds <= 0:
            return ""
        said = f"; {seconds:.1f} s compiling"
        if not self._asked or not self._told.keys() >= set(self._asked):
            return said
        least, most = (f"{seconds / factor:.0f}" for factor in reversed(_STOCKS))
        return f"{said} (stock, by a guess: {least} to {most} s)"

    def _of_layers(self) -> list[str]:
        """Of layers that were compiled several times, for other batches say, the last counts."""
        told = (Figures.of(self._told[d]) for d in self._asked if d in self._told)
        last = {figures.layers: figures for figures in told}.values()
        held, uncompressed = (sum(getattr(f, n) for f in last) for n in ("held", "uncompressed"))
        parts = [
            f"{sum(f.rewritten for f in last)} of {sum(f.products for f in last)} "
            f"products rewritten{_why(last)}",
            f"{megabytes(held)} held for the backward ({megabytes(uncompressed)} uncompressed)",
        ]
        others = len(set(self._asked) - self._told.keys())
        counts = {
            "from Inductor's cache": sum(report.cached for report in self._told.values()),
            "without a backward": self._without_backward,
            "from Inductor's cache, where nothing is kept of what was done": others,
        }
        notes = [f"{number} {what}" for what, number in counts.items() if number]
        return (parts if last else []) + notes


def _why(graphs: Collection[Figures]) -> str:
    """If nothing was rewritten: the reason that most had."""
    if any(figures.rewritten for figures in graphs):
        return ""
    reasons = Counter({figures.why: figures.products for figures in graphs if figures.why})
    return "".join(f" (most: {reason})" for reason, _ in reasons.most_common(1))

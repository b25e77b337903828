"""What looks showed of parameters' gradients: errors, what these share, the batch's own noise."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Set

from torch import Tensor

from hot_compile.passes.measure.linear import compare
from hot_compile.passes.measure.stored import LOST, Quiet

_OF_NOISE = 0.3
"""Share of the batch's noise that an error may be: it then adds 9 % to a gradient's variance."""
_OF_ROUNDING = 2.0
"""An error is fine up to so many times what exact code of two kinds differs by."""
_NOTHING = 0.5
"""Where exact code of two kinds differs by more than this, there is no gradient but rounding."""
_LOOKS = 4
"""Fewest looks whose errors' mean is judged."""


class Trace:
    """One parameter's gradient over the looks at one compiled graph.

    Kept are sketches (``sketch.py``), in host memory: of the last exact gradient, and of the sum of
    all errors.
    """

    def __init__(self) -> None:
        self.looks = 0
        self.error = 0.0
        """Norm of the last look's error over that of the exact gradient."""
        self.cosine = 1.0
        """Of the last look's gradient with the exact one."""
        self.norm = 0.0
        """Of the last exact gradient."""
        self.noise: float | None = None
        """One deviation of the exact gradient from batch to batch, over its norm. The last two
        looks' gradients differ by sqrt(2) of it and by what the parameters moved in between: so it
        is an upper bound, tight where looks are close. None before the second look."""
        self.rounding = 0.0
        """What exact code of two kinds differs by, over the gradient's norm, where that was seen:
        nothing can be more right than that."""
        self._exact: Tensor | None = None
        self._sum: Tensor | None = None
        self._squares = 0.0
        self._norms = 0.0

    def add(self, got: Tensor, want: Tensor, difference: Tensor | None = None) -> bool:
        """Sketches of a step's gradient and of the exact one; False if that is not finite, or zero.

        ``difference``: of another exact one from that.
        """
        norm = float(want.norm())
        if not (math.isfinite(norm) and norm):
            return False
        error, cosine = (float(figure) for figure in compare(got, want))
        if not (error < LOST and math.isfinite(cosine)):  # infinite, or as good as that
            self.error, self.cosine, self.norm = LOST, 0.0, norm
            self.looks = max(1, self.looks)
            return True
        if self._exact is not None:
            self.noise = float((want - self._exact).norm()) / 2**0.5 / norm
        if difference is not None:
            self.rounding = float(difference.norm()) / norm
        lost = got - want
        self.error, self.cosine, self.norm, self._exact = error, cosine, norm, want
        self._sum = lost if self._sum is None else self._sum + lost
        self._squares += float(lost.square().sum())
        self._norms += norm**2
        self.looks += 1
        return True

    @property
    def bias(self) -> float | None:
        """What all looks' errors have in common, over the gradient's norm; None of few looks.

        Of errors that are independent the mean's square is, on average, that of one over their
        number; what is above that is common to them.
        """
        if self.looks < _LOOKS or self._sum is None or not self._norms:
            return None
        pairs = float(self._sum.square().sum()) - self._squares
        return (max(0.0, pairs) / (self.looks - 1) / self._norms) ** 0.5

    def limit(self, budget: float) -> float:
        """Up to which its error is fine: the budget, a share of the batch's noise, or rounding."""
        return max(budget, _OF_NOISE * (self.noise or 0.0), _OF_ROUNDING * self.rounding)

    @property
    def only_rounding(self) -> bool:
        """The exact gradient is nothing else, and the error is finite."""
        return self.rounding > _NOTHING and self.error < LOST

    def fault(self, budget: float) -> str:
        """What is wrong with it; nothing if it is fine. Noise excuses chance, but no bias."""
        if self.error > self.limit(budget):
            noise = "" if self.noise is None else f", the batch's noise {self.noise:.2g}"
            return f"error {self.error:.3g} over budget {budget:g}{noise}"
        if self.bias is not None and self.bias > max(budget, _OF_ROUNDING * self.rounding):
            return f"its errors have {self.bias:.3g} in common, over budget {budget:g}"
        return ""


@dataclasses.dataclass(frozen=True)
class Spread:
    """A figure of every parameter, in short."""

    median: float
    worst: float
    name: str
    """Whose the worst is."""

    @classmethod
    def of(cls, figures: Mapping[str, float]) -> Spread | None:
        """None of nothing."""
        if not figures:
            return None
        name = max(figures, key=lambda each: figures[each])
        return cls(statistics.median(figures.values()), figures[name], name)


def faults(traces: Mapping[str, Trace], budget: float | None) -> dict[str, str]:
    """What is wrong with gradients of a graph, by parameter; nothing without a ``budget``.

    A gradient that is only rounding has no fault, a bias's in front of a norm, say; unless all of
    them are: then what is added to them is not small beside anything.
    """
    if budget is None:
        return {}
    firm = {name: trace for name, trace in traces.items() if not trace.only_rounding}
    found = {name: trace.fault(budget) for name, trace in (firm or traces).items()}
    return {name: why for name, why in found.items() if why}


def judged(traces: Mapping[str, Trace], matrices: Set[str]) -> dict[str, Trace]:
    """Of the parameters by name: all whose gradients are more than rounding."""
    quiet = Quiet.of(trace.norm for trace in traces.values())
    return {
        name: trace
        for name, trace in traces.items()
        if trace.looks and trace.norm > quiet.least(vector=name not in matrices)
    }

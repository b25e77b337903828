"""What Inductor as it is, and told that it may recompute, would keep: traced beside "hot"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor.compile_fx import compile_fx

from .again import twin
from .backend import hot
from .config import split_options
from .inductor import inductor_patches
from .record import GraphReport, Recorder, Reports, run_uncompiled
from .stand_in import laid_over

STOCK = {"recipe": "exact", "memory": "off", "exact_forms": False, "head": "off"}
"""Options that leave a graph as Inductor has it."""
FLAGS: Mapping[str, Mapping[str, bool]] = {
    "exact": {},
    "exact+recompute": {"ban_recompute_materialized_backward": False},
}
"""By configuration: functorch's settings. ``exact`` is Inductor as it is; ``exact+recompute`` is
Inductor told that it may recompute pointwise results."""


def inductor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Inductor as it is, where a script may ask for "hot": our options are left out."""
    _, theirs = split_options(options)
    return compile_fx(gm, example_inputs, config_patches=inductor_patches(mode, theirs))


class Compared:
    """Keeps every graph's report, as "hot" and as each of ``FLAGS``."""

    def __init__(self) -> None:
        self.ours = Reports()
        self._stock = {name: Reports() for name in FLAGS}

    @property
    def graphs(self) -> list[GraphReport]:
        """As "hot"."""
        return self.ours.graphs

    @property
    def stock(self) -> dict[str, list[GraphReport]]:
        """By configuration: the same graphs, in the same order."""
        return {name: reports.graphs for name, reports in self._stock.items()}

    def recorder(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Recorder:
        """Trace one of Dynamo's graphs as stock; returns whom "hot" is to tell of it."""
        for name, reports in self._stock.items():
            with functorch_config.patch(dict(FLAGS[name])):
                hot(
                    twin(gm), example_inputs, options=STOCK, recorder=reports,
                    inner_compile=run_uncompiled,
                )  # fmt: skip
        return self.ours

    def backend(self, options: Mapping[str, Any] | None) -> Any:
        """``torch.compile``'s backend "hot", compared; ``options`` lie over those it is given."""

        def compared(
            gm: fx.GraphModule, example_inputs: Sequence[torch.Tensor], **asked: Any
        ) -> Any:
            recorder = self.recorder(gm, example_inputs)
            asked = laid_over(options, asked)
            if asked["options"].get("accept") != "off":  # a look is no part of a usual step
                asked["options"]["accept"] = "remembered"
            return hot(gm, example_inputs, recorder=recorder, **asked)

        return compared

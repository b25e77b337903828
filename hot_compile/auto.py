"""``options={"lqs": "auto"}``: observe the first steps, then recompile once with what they told.

A graph's observations are kept as a profile in the user's cache (or in the file of option
``profile``), under a digest of its layers: the next process finds them and compiles its final code
at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import fx

from .calibration import Collector
from .config import HotConfig, Strategy
from .errors import CalibrationError, ProfileFormatError
from .passes.graph import module_path
from .passes.profile import Profile
from .runtime.build import cache_dir

log = logging.getLogger("hot_compile")

_PATIENCE = 4
"""Observe at most this many times the wanted batches: some may have no backward, or overflow."""


def graph_digest(gm: fx.GraphModule, names: Sequence[str | None], rank: int) -> str:
    """Digest of a graph's layers: the same for every batch size, in every process."""
    shapes = [
        (name, tuple(node.meta["example_value"].shape))
        for name, node in zip(names, gm.graph.find_nodes(op="placeholder"), strict=False)
        if name is not None
    ]
    paths = sorted({module_path(node) or "" for node in gm.graph.nodes})
    return hashlib.sha256(repr((rank, sorted(shapes), paths)).encode()).hexdigest()


def profile_path(config: HotConfig, digest: str) -> Path:
    """Where the observations of this graph are kept."""
    if config.profile is not None:
        return Path(config.profile)
    return cache_dir() / "profiles" / f"{digest[:32]}.json"


def saved_profile(path: Path, digest: str) -> Profile | None:
    """The profile in ``path`` if it holds observations of this graph."""
    if not path.exists():
        return None
    profile = Profile.load(path)
    return profile if digest in profile.graphs else None


def cautious(config: HotConfig) -> HotConfig:
    """The configuration for steps before anything is measured: no HLA on trust.

    A recipe without a budget (``paper``) takes its strategies whatever they measure, also then.
    """
    if config.error_budget is None:
        return config
    safe = tuple(s for s in config.strategies if s is not Strategy.HLA8)
    return dataclasses.replace(config, strategies=safe or (Strategy.INT8,))


class Observing:
    """A compiled graph in its first steps: as usual, then observed, then asked to be recompiled.

    Gradients of observed steps are exact. The call convention is that of ``usual``.
    """

    def __init__(
        self,
        usual: Callable[..., Any],
        observed: Callable[..., Any],
        collector: Collector,
        config: HotConfig,
        keep: Callable[[Profile], None],
    ) -> None:
        self._usual = usual
        self._observed = observed
        self._collector = collector
        self._warm_up, self._wanted = config.lqs_warm_up, config.lqs_batches
        self._keep = keep
        self._calls = 0
        self._code = code_being_compiled()

    def __call__(self, *args: Any) -> Any:
        """One forward; what the last backwards showed is read here, outside of any graph."""
        self._calls += 1
        observed = self._calls - 1 - self._warm_up
        if observed < 0 or self._wanted == 0:
            return self._usual(*args)
        self._collector.flush()
        if self._collector.batches < self._wanted and observed < _PATIENCE * self._wanted:
            return self._observed(*args)
        self._wanted = 0
        self._finish()
        return self._usual(*args)

    def _finish(self) -> None:
        try:
            self._keep(self._collector.profile())
        except (CalibrationError, ProfileFormatError, OSError) as error:
            log.warning("hot: lqs='auto' keeps the static choice: %s", error)
            return
        forget(self._code)


def keep_in(path: Path, digest: str) -> Callable[[Profile], None]:
    """Adds a graph's profile to those in ``path`` (a model may have several graphs)."""

    def keep(profile: Profile) -> None:
        before = Profile.load(path) if path.exists() else None
        mine = profile.of_graph(digest)
        (before.merged(mine) if before and before.rank == mine.rank else mine).save(path)

    return keep


def code_being_compiled() -> CodeType | None:
    """The Python code that Dynamo is compiling right now."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx().f_code
    except AttributeError:  # no compilation under way, e.g. the backend called by hand
        return None


def forget(code: CodeType | None) -> None:
    """Drop what was compiled of ``code``, so that its next call compiles it again."""
    if code is None:
        torch._dynamo.reset()
    else:
        torch._dynamo.eval_frame.reset_code(code)


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

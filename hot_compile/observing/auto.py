"""``options={"lqs": "auto"}``: observe the first steps, then recompile with what they told.

A graph starts with what can be taken on trust (no HLA), is observed once its gradients have
settled, and is compiled again if that changes a layer's strategy. It is observed again later, at
most ``lqs_rechecks`` times: early gradients are not late ones. What was seen is kept as a profile
in the user's cache (or in the file of option ``profile``), under a digest of the graph's layers:
the next process finds it and compiles by it at once.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import fx
from torch._dynamo.eval_frame import innermost_backend

from hot_compile.config import HotConfig
from hot_compile.errors import CalibrationError, ProfileFormatError
from hot_compile.observing.collector import Collector
from hot_compile.observing.forgetting import forget
from hot_compile.passes.base.graph import module_path
from hot_compile.passes.cost.devices import prices_of
from hot_compile.passes.plan import plan
from hot_compile.passes.profile.lqs import storage_choice
from hot_compile.passes.profile.profile import Profile
from hot_compile.runtime.native.build import cache_dir

log = logging.getLogger("hot_compile")

_PATIENCE = 4
"""Observe at most this many times the wanted batches: some may have no backward, or overflow."""
_STRETCH = 4
"""Each look is due after this many times the forwards of the one before."""


def graph_digest(gm: fx.GraphModule, names: Sequence[str | None], rank: int) -> str:
    """Digest of a graph's layers: the same for every batch size, in every process."""
    shapes = [
        (name, tuple(node.meta["example_value"].shape))
        for name, node in zip(names, gm.graph.find_nodes(op="placeholder"), strict=False)
        if name is not None
    ]
    paths = sorted({module_path(node) or "" for node in gm.graph.nodes})
    return hashlib.sha256(repr((rank, sorted(shapes), paths)).encode()).hexdigest()


class Notes:
    """What was observed of one graph so far, and the file it is kept in."""

    def __init__(self, config: HotConfig, digest: str) -> None:
        self._config = config
        self._digest = digest
        chosen = config.profile
        self._path = Path(chosen) if chosen else _cached_path(digest)
        found = self._file()
        self.profile = found if found and digest in found.graphs else None
        """Observations of this graph, perhaps of others too; None before the first look."""

    @property
    def looks(self) -> int:
        """How often the graph was observed, by this process or an earlier one."""
        return self.profile.graphs[self._digest] if self.profile else 0

    @property
    def due(self) -> int | None:
        """Forwards of the present code before the next look; None if there is none to come."""
        if self.looks > self._config.lqs_rechecks:
            return None
        if self.looks == 0:
            return self._config.lqs_warm_up
        return max(1, self._config.lqs_warm_up) * _STRETCH**self.looks

    def add(self, collector: Collector) -> bool:
        """Keep what was collected; True if it changes what a layer gets or how a tensor is stored.

        What changes nothing is not kept, only that there was a look: the compiled code, whose
        cache key has the profile in it, is still found by the next process.

        Raises:
            CalibrationError: nothing was collected.
            ProfileFormatError, OSError: the file cannot be read or written.
        """
        seen, before = collector.profile(), self.profile
        known = before.merged(seen) if before and before.rank == seen.rank else seen
        changed = self._choice(known, collector) != self._choice(before, collector)
        kept = (known if changed or before is None else before).of_graph(
            self._digest, self.looks + 1
        )
        file = self._file()  # another graph's code may have written it since
        merged = file.merged(kept) if file and file.rank == kept.rank else kept
        merged.save(self._path)
        self.profile = merged
        return changed

    def _choice(self, profile: Profile | None, collector: Collector) -> object:
        prices = prices_of(collector.sites, self._config.prices)
        layers = plan(collector.sites, self._config, prices, profile).choice
        return layers, storage_choice(profile, self._config)

    def _file(self) -> Profile | None:
        """What the file holds now; a cached one that cannot be read is made anew."""
        if not self._path.exists():
            return None
        try:
            return Profile.load(self._path)
        except ProfileFormatError:
            if self._config.profile:
                raise
            return None


def _cached_path(digest: str) -> Path:
    return cache_dir() / "profiles" / f"{digest[:32]}.json"


class Observing:
    """A compiled graph that is observed when its notes say so, and recompiled if that changes it.

    ``usual`` and ``observed`` compute the same; the latter shows the layers to the collector.
    """

    def __init__(
        self,
        usual: Callable[..., Any],
        observed: Callable[..., Any],
        collector: Collector,
        config: HotConfig,
        notes: Notes,
        code: CodeType | None,
    ) -> None:
        """``code``: what Dynamo compiled the graph of."""
        self._usual = usual
        self._observed = observed
        self._collector = collector
        self._wanted = config.lqs_batches
        self._notes = notes
        self._due = notes.due
        self._calls = 0
        self._code = code

    def __call__(self, *args: Any) -> Any:
        """One forward; what the last backwards showed is read here, outside of any graph."""
        self._calls += 1
        if self._due is None or self._calls <= self._due:
            return self._usual(*args)
        self._collector.flush()
        if self._collector.problem is not None:
            self._due = None
            return self._usual(*args)
        tried = self._calls - 1 - self._due
        if self._collector.batches < self._wanted and tried < _PATIENCE * self._wanted:
            return self._observed(*args)
        self._conclude()
        return self._usual(*args)

    def _conclude(self) -> None:
        self._due = None
        try:
            changed = self._notes.add(self._collector)
        except (CalibrationError, ProfileFormatError, OSError) as error:
            log.warning("hot: lqs='auto' keeps the choice it has: %s", error)
            return
        if changed:
            forget(self._code)  # whoever compiles it again makes an Observing for the next look
            return
        self._collector.clear()
        self._due = self._notes.due


def code_being_compiled() -> CodeType | None:
    """The Python code that Dynamo is compiling right now."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx().f_code
    except AttributeError:  # no compilation under way, e.g. the backend called by hand
        return None


def step_being_compiled() -> Any:
    """What ``torch.compile`` made for the step that Dynamo is compiling; None if that is unknown.

    It lives as long as the compiled step does.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        given: Any = InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:
        return None
    given = innermost_backend(given)
    given = getattr(getattr(given, "__self__", None), "backend_compile_fn", given)  # DDP's
    given = innermost_backend(given)
    return given if isinstance(given, torch._TorchCompileWrapper) else None

"""What is on by default: a run's gradients are looked at, repaired, and what was found remembered.

A monitor without paths. Its looks are few and cheap: the exact twin is the graph itself, run
operator by operator (``eager``); only where that finds a fault a thorough twin is compiled. What
was found is kept beside Inductor's caches: the next process starts with it. All processes of a job
take what the first of them found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, fx
from torch._inductor.runtime.cache_dir_utils import cache_dir

from hot_compile.again import called_in, only_once
from hot_compile.observing.auto import step_being_compiled
from hot_compile.observing.monitor import KEPT_AS, Monitor, Qualities
from hot_compile.observing.raising import Stored, bits_by_tensor
from hot_compile.passes.base.files import write_whole
from hot_compile.passes.cost.tuned import in_job

if TYPE_CHECKING:
    from hot_compile.observing.gauge import Gauge

log = logging.getLogger("hot_compile")

BUDGET = 0.2
"""Relative error that a gradient may have: a cosine of 0.98."""
_FIRST = (1, 2, 4, 8)
"""Forwards of new code that are looked at; then each power of the last, from 64 on."""
_HARMLESS = frozenset({"accept", "dump", "monitor", "strict"})
"""Options that change nothing that looks find."""
_AWAITED = 4
"""For so many forwards after a look it is asked what other processes of the job found."""


@dataclasses.dataclass
class Findings:
    """What looks at one graph found."""

    demoted: dict[str, str] = dataclasses.field(default_factory=dict)
    """Layers that are exact, and why."""
    raised: dict[str, str] = dataclasses.field(default_factory=dict)
    """Tensors that are stored in more bits: how many, and why."""
    stored: dict[str, str] = dataclasses.field(default_factory=dict)
    """Layers whose graph stores nothing compressed, and why."""
    settled: bool = False
    """The first looks found nothing any more."""

    def __bool__(self) -> bool:
        return bool(self.demoted or self.raised or self.stored)

    @classmethod
    def load(cls, path: Path) -> Findings:
        """What was kept; nothing if it cannot be read."""
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            return cls.from_text(path.read_text())
        return cls()

    @classmethod
    def from_text(cls, text: str) -> Findings:
        """Of JSON. Raises ValueError, TypeError or AttributeError for anything else."""
        found = cls(**json.loads(text))
        list(bits_by_tensor(found.raised))
        if not all(isinstance(part, dict) for part in (found.demoted, found.stored)):
            raise TypeError(text)
        return found

    @property
    def text(self) -> str:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"

    def save(self, path: Path) -> None:
        """Write it whole or not at all; a folder that cannot be written is none."""
        with contextlib.suppress(OSError):
            write_whole(path, self.text)


def folder() -> Path:
    """Where findings lie: beside Inductor's caches."""
    return Path(cache_dir()) / "hot_compile" / "accepted"


def path_of(facts: str) -> Path:
    """The file of a graph, by all that tells it from others; GPUs of a job count as one."""
    digest = hashlib.sha256(re.sub(r"cuda:\d+", "cuda", facts).encode()).hexdigest()
    return folder() / f"{digest[:32]}.json"


class Acceptance(Monitor):
    """Looks at steps by itself, and keeps what it found."""

    def __init__(self) -> None:
        super().__init__(budget=BUDGET)
        self._known: dict[Path, Findings] = {}
        self.unseen: dict[str, str] = {}
        """Graphs that nobody can look at, and why."""

    def begins(self, path: Path) -> Findings:
        """A graph is being compiled: start with what is known of it."""
        found = self._known.get(path)
        if found is None:
            mine = Findings.load(path)
            found = self._known[path] = _agreed(path, 0, mine) or mine
            if found:
                log.warning(
                    "hot: %d layers or tensors are more exact from the beginning, as looks at "
                    "earlier runs found (%s). `hot-compile profile forget` forgets it, "
                    "options={'accept': 'off'} goes without.",
                    len({*found.demoted, *found.raised, *found.stored}),
                    path,
                )
        self._take(found)
        return found

    def cannot_see(self, path: Path, why: str) -> bool:
        """A graph's steps cannot be looked at, if there is a reason, which is said once."""
        if why and why not in self.unseen.values():
            log.warning(
                "hot: gradients are not compared with exact ones: %s (docs/acceptance.md)", why
            )
        if why:
            self.unseen[path.stem] = why
        return bool(why)

    def due(self, forwards: int, settled: bool = False) -> bool:
        """As of a monitor; code that was found settled is looked at seldom from the beginning."""
        if forwards <= _FIRST[-1]:
            return not settled and forwards in _FIRST
        while forwards % _FIRST[-1] == 0:
            forwards //= _FIRST[-1]
        return forwards == 1

    def repair(
        self, step: int, found: Qualities, stored: Mapping[str, Stored], gauge: Gauge
    ) -> None:
        """As a monitor does; the first process of a job decides for all."""
        before = [dict(part) for part in self._parts()]
        super().repair(step, found, stored, gauge)
        path, number = gauge.path, gauge.repairs + 1
        if path is None:
            return
        mine = dataclasses.replace(self._known[path], settled=False)
        names = ("demoted", "raised", "stored")
        for name, old, now in zip(names, before, self._parts(), strict=True):
            new = {key: why for key, why in now.items() if old.get(key) != why}
            setattr(mine, name, {**getattr(mine, name), **new})
        self._keep(path, _agreed(path, number, mine) or mine)

    def follows(self, gauge: Gauge, forwards: int) -> bool:
        """Another process of the job has repaired this graph: do the same."""
        lately = any(self.due(forwards - n, gauge.settled) for n in range(1, _AWAITED))
        if gauge.path is None or not (lately and in_job()):
            return False
        theirs = _agreed(gauge.path, gauge.repairs + 1, None)
        if theirs is None:
            return False
        self._keep(gauge.path, theirs)
        return True

    def settles(self, gauge: Gauge) -> None:
        """A look at a graph found no fault."""
        known = self._known.get(gauge.path) if gauge.path else None
        if known is not None and gauge.looks >= len(_FIRST) and not known.settled:
            gauge.settled = known.settled = True
            assert gauge.path is not None
            known.save(gauge.path)

    def _parts(self) -> Iterator[dict[str, str]]:
        yield from (self.demoted, self.raised, self.stored)

    def _take(self, found: Findings) -> None:
        self.demoted.update(found.demoted)
        self.raised.update(found.raised)
        self.stored.update(found.stored)

    def _keep(self, path: Path, found: Findings) -> None:
        self._known[path] = found
        self._take(found)
        found.save(path)


def of_step_being_compiled() -> Acceptance:
    """What looks at it: one and the same however often it is compiled, kept where the step is."""
    step = step_being_compiled()
    return Acceptance() if step is None else vars(step).setdefault(KEPT_AS, Acceptance())


def settings_of(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Those of ``options`` that change what looks find."""
    return {k: v for k, v in (options or {}).items() if k.removeprefix("hot.") not in _HARMLESS}


def cannot_be_repeated(gm: fx.GraphModule, examples: Sequence[Any]) -> str:
    """Why a graph cannot be run a second time, operator by operator; empty if it can be."""
    if any("flex_attention" in name for name in called_in(gm)):
        return "flex attention takes too much memory uncompiled"
    return only_once(gm, examples)


def computes_halves(examples: Sequence[Any]) -> bool:
    """A graph computes in bf16 or fp16, where compiled code rounds less often."""
    halves = torch.bfloat16, torch.float16
    tensors = [x for x in examples if isinstance(x, torch.Tensor)]
    kinds = {x.device.type for x in tensors}
    return any(x.dtype in halves for x in tensors) or any(map(torch.is_autocast_enabled, kinds))


def _agreed(path: Path, number: int, mine: Findings | None) -> Findings | None:
    """What the first process of the job to find anything found; alone: ``mine``.

    It is told through the job's store, not by a collective: not every process may look.

    Args:
        path: of the graph. number: of its repair; 0: what was known before.
        mine: what this process would have; None: nothing, it only asks.
    """
    if not in_job():
        return mine
    try:
        store = distributed.distributed_c10d._get_default_store()
        key = f"hot_compile/accepted/{path.name}/{number}"
        if mine is None:
            return Findings.from_text(store.get(key).decode()) if store.check([key]) else None
        return Findings.from_text(store.compare_set(key, "", mine.text).decode())
    except (RuntimeError, ValueError, TypeError, AttributeError):
        log.debug("hot: the job's store does not answer", exc_info=True)
        return mine

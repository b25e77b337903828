"""What the backend did to each graph: who is told of every stage, and what they keep of it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from functorch.compile import make_boxed_func
from torch import fx
from torch._inductor.runtime.cache_dir_utils import cache_dir

from .errors import OptionError
from .graphs import Snapshot, snapshot
from .passes.base.files import write_whole
from .passes.base.graph import readable
from .passes.plan import Plan
from .passes.storage.fit_budget import BudgetReport
from .passes.storage.record import Crossing

log = logging.getLogger("hot_compile")
NO_PLAN = Plan("exact", ())


@dataclasses.dataclass(frozen=True)
class GraphReport:
    """One compiled training graph: its plan as carried out, and what crosses to the backward."""

    plan: Plan
    crossing: tuple[Crossing, ...]
    stages: Mapping[str, Snapshot] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )
    """The graph as each stage left it, for ``hot_compile.graphs``; empty where nobody asked."""
    budget: BudgetReport | None = None
    """How its step stays within a budget of the device's memory, if there is one."""
    cached: bool = dataclasses.field(default=False, compare=False)
    """Its code was found in a cache: no pass ran, this was kept beside it."""

    def save(self, key: str) -> None:
        """Keep it for whoever gets this graph's code from a cache; or do nothing."""
        bare = dataclasses.replace(self, stages={})
        try:
            write_whole(_kept_as(key), pickle.dumps(bare))
        except Exception:  # of a disk, or of what a plan holds that is no plain data
            log.debug("hot: what was done to a graph cannot be kept", exc_info=True)

    @classmethod
    def load(cls, key: str) -> GraphReport | None:
        """What was kept of a graph, of our own sources; None: nothing, or it cannot be read."""
        try:
            found = pickle.loads(_kept_as(key).read_bytes())
        except Exception:  # whatever bytes that are no pickle may raise
            return None
        return dataclasses.replace(found, cached=True) if isinstance(found, cls) else None

    @property
    def held_bytes(self) -> int:
        """Bytes kept from forward to backward, parameters and inputs aside."""
        return sum(c.bytes for c in self.crossing)

    @property
    def changed(self) -> bool:
        """Something of it is computed, or stored, otherwise than exactly."""
        stored = any(c.scheme != "exact" for c in self.crossing)
        integers = any(f.int8 for f in self.plan.forwards) or any(h.int8 for h in self.plan.heads)
        return stored or bool(self.plan.rewritten) or integers

    @property
    def predicted_seconds(self) -> dict[str, float | None]:
        """How much longer than exact a step takes, by cause; None: no rates known."""
        return {"layers": 0.0 - self.plan.seconds_won, "storing": self.storing_seconds}

    @property
    def storing_seconds(self) -> float | None:
        """Predicted time that storing takes of a step, less what it saves; None: no rates known."""
        seconds = [c.seconds for c in self.crossing]
        return None if None in seconds else sum(s for s in seconds if s is not None)

    @property
    def digest(self) -> str:
        """Short hash of what was chosen: equal where layers, heads and storage come out the same.

        Reasons, predicted gains and the names of nodes have no part in it.
        """
        stored = [(c.module, c.shape, c.dtype, c.scheme, c.bytes) for c in self.crossing]
        return hashlib.sha256(repr((self.plan.choice, stored)).encode()).hexdigest()[:12]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "digest": self.digest,
            "plan": self.plan.to_json(),
            "crossing": [dataclasses.asdict(c) for c in self.crossing],
            "held_bytes": self.held_bytes,
            "predicted_seconds": self.predicted_seconds,
            "budget": dataclasses.asdict(self.budget) if self.budget else None,
        }


Listener = Callable[[GraphReport], None]
"""Told of each graph that is compiled; of one from a cache, if what was kept of it is found."""


class Recorder(Protocol):
    """Who is told of every stage of a graph, and of its outcome when it is compiled at last."""

    def graph(self, stage: str, graph: fx.Graph | fx.GraphModule) -> None:
        """The graph as it is after (or before) ``stage``; it changes later."""

    def finished(self, report: GraphReport) -> None:
        """The graph is compiled."""


class Dump:
    """Recorder that writes every stage's graph, plan.json and crossing.json below a folder.

    Raises:
        OptionError: the folder cannot be made or written.
    """

    def __init__(self, folder: str | None = None) -> None:
        self._folder = _next_graph_folder(folder) if folder else None
        self._count = itertools.count()

    def graph(self, stage: str, graph: fx.Graph | fx.GraphModule) -> None:
        """Write it."""
        if self._folder is not None:
            self._write(f"{next(self._count):02d}.{stage}.py", readable(graph))

    def finished(self, report: GraphReport) -> None:
        """Write plan.json and crossing.json, and budget.json if there is one."""
        data = report.to_json()
        for name in ("plan", "crossing", "budget"):
            if data[name] is not None:
                self._write(f"{name}.json", json.dumps(data[name], indent=1, default=str) + "\n")

    def _write(self, name: str, text: str) -> None:
        if self._folder is not None:
            with _writing(self._folder):
                (self._folder / name).write_text(text)


class Reports:
    """Recorder that keeps each training graph's report, with its stages."""

    def __init__(self) -> None:
        self.graphs: list[GraphReport] = []
        self._stages: dict[str, Snapshot] = {}

    def graph(self, stage: str, graph: fx.Graph | fx.GraphModule) -> None:
        """Keep the facts of a stage's graph."""
        self._stages[stage] = snapshot(stage, graph)

    def finished(self, report: GraphReport) -> None:
        """Keep the report."""
        stages, self._stages = self._stages, {}
        self.graphs.append(dataclasses.replace(report, stages=stages))


class Held:
    """What passes tell: a recorder and a listener hear of a graph's outcome when it is compiled at
    last, and not of one that failed.
    """

    def __init__(
        self,
        recorder: Recorder,
        listener: Listener | None,
        done: list[GraphReport],
        key: str | None,
    ) -> None:
        """``done``: is told of each graph as soon as what is done to it is known.

        ``key``: of code that a cache may have; what is told of it is kept, and found again. None: a
        cache has none.
        """
        self.graph = recorder.graph
        self._told = [recorder.finished, *([listener] if listener else [])]
        self._done, self._mine, self._key = done, list[GraphReport](), key

    def finished(
        self, plan: Plan | None, crossing: tuple[Crossing, ...], met: BudgetReport | None
    ) -> None:
        """Keep the outcome."""
        self._mine.append(GraphReport(plan or NO_PLAN, crossing, budget=met))
        self._done.append(self._mine[-1])

    def tell(self) -> None:
        """The graph is compiled, or its code was found."""
        if self._key and self._mine:
            self._mine[-1].save(self._key)
        elif self._key and (kept := GraphReport.load(self._key)):
            self._mine.append(kept)
            self._done.append(kept)
        for report in self._mine:
            for told in self._told:
                told(report)


def _kept_as(key: str) -> Path:
    return Path(cache_dir()) / "hot_compile" / "reports" / f"{key[:32]}.pickle"


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        expected = f"a folder that can be made and written, but: {error}"
        raise OptionError.value("dump", str(folder), expected) from error


def _next_graph_folder(folder: str) -> Path:
    """``folder/graph_NNN``, the first number not taken (other processes may be dumping too)."""
    root = Path(folder)
    with _writing(root):
        root.mkdir(parents=True, exist_ok=True)
        for number in itertools.count():
            path = root / f"graph_{number:03d}"
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return path
    raise AssertionError("unreachable")


def run_uncompiled(gm: fx.GraphModule, *_: Any, **__: Any) -> Callable[..., Any]:
    """Stand-in for Inductor's lowering: the finished graph, run node by node."""
    return make_boxed_func(gm.forward)

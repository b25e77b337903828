"""What each statement of a step's generated code takes its host, stock and hot in turns.

    python benchmarks/host_time.py --model timm:efficientnet_b0 --batch 128

Hosts differ by a factor of two from one process to the next, and from one minute to the next. So
both are compiled in one process and step in turns; a statement's time is its median over steps, and
each step begins with nothing for the device to do. Page faults are told, too: on a GPU they should
be a handful; hundreds are Python mapping its frames anew (``hot_compile/frames.py``). Looks are
off. A model is one of ``zoo.py``'s, or one of timm's by its own name; what a step's forwards and
backwards are is told by their order.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import functools
import re
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar
from unittest import mock

import timm
import torch
import torch._functorch.config as functorch_config
import typer
import zoo_clock
import zoo_models
from report import show, write_json
from step import compiler_settings, synchronize
from tables import Lines
from torch._inductor import config as inductor_config
from torch._inductor.codecache import PyCodeCache

from hot_compile.backend import hot

WARM_UP = 10
"""Rounds."""
CALL = "def call("
"""How the function begins that runs a graph."""
KINDS = {
    "assertion": r"^assert_",
    "Triton launch": r"\.run\(",
    "C++ kernel": r"^cpp_",
    "convolution": r"convolution(_backward)?(\.default)?\(",
    "product": r"extern_kernels\.\w*mm",
    "allocation": r"empty_strided",
    "deletion": r"^del |^\w+ = None$",
    "another operator": r"torch\.ops\.",
    "view": r"reinterpret_tensor",
}
"""A statement is of the first kind whose pattern is found in it."""


@dataclass
class Row:
    """Statements of one kind in one graph's code."""

    arm: str
    graph: int
    """By the order in which the arm's were compiled: mostly the forward's, then the backward's."""
    kind: str
    count: int = 0
    us: float = 0.0
    """Of all of them together."""


class Code:
    """One graph's generated code, each of whose statements is timed."""

    made: ClassVar[list[Code]] = []
    """All of them: generated code finds its own here."""
    noting: ClassVar[bool] = False

    def __init__(self) -> None:
        self.statements: list[str] = []
        self.steps: list[list[int]] = []
        Code.made.append(self)

    def timed(self, source: str) -> str:
        """``source``, whose ``call`` marks the time after each statement."""
        tree = ast.parse(source)
        (call,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "call")
        begin = f"""
import sys, time
_code = sys.modules[{__name__!r}].Code.made[{len(Code.made) - 1}]
_now, _marks = time.perf_counter_ns, []
_mark = _marks.append
_mark(_now())
"""
        call.body = ast.parse(begin).body + self._marked(call.body)
        return ast.unparse(ast.fix_missing_locations(tree))

    def _marked(self, body: list[ast.stmt]) -> list[ast.stmt]:
        marked: list[ast.stmt] = []
        for statement in body:
            if isinstance(statement, ast.With):
                statement.body = self._marked(statement.body)
                marked.append(statement)
            elif isinstance(statement, ast.Return):
                marked += [*ast.parse("_code.done(_marks)").body, statement]
            else:
                self.statements.append(ast.unparse(statement))
                marked += [statement, *ast.parse("_mark(_now())").body]
        return marked

    def done(self, marks: list[int]) -> None:
        """A step has run through it."""
        if Code.noting:
            self.steps.append(marks)

    def rows(self, arm: str, graph: int) -> list[Row]:
        """One of each kind."""
        found = dict[str, Row]()
        for place, statement in enumerate(self.statements):
            kind = next((k for k, text in KINDS.items() if re.search(text, statement)), "other")
            row = found.setdefault(kind, Row(arm, graph, kind))
            took = statistics.median(m[place + 1] - m[place] for m in self.steps) / 1e3
            row.count, row.us = row.count + 1, row.us + took
        return list(found.values())


def _maker(name: str) -> Callable[[], zoo_models.Built]:
    known, own = zoo_models.every_model(), name.removeprefix("timm:")
    if name not in known and own not in timm.list_models():
        raise typer.BadParameter(f"got {name!r}; expected a name of zoo.py's, or timm:<its own>")
    return known.get(name) or functools.partial(zoo_models.image_model, own)


@contextlib.contextmanager
def _marking() -> Iterator[None]:
    """Code that Inductor writes meanwhile is timed; none comes from its caches."""
    write = PyCodeCache.write.__func__  # type: ignore[attr-defined]

    def marked(cls: Any, source: str, *args: Any, **kwargs: Any) -> Any:
        return write(cls, Code().timed(source) if CALL in source else source, *args, **kwargs)

    with (
        mock.patch.object(PyCodeCache, "write", classmethod(marked)),
        inductor_config.patch(fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


def _compiled(
    built: zoo_models.Built, device: torch.device
) -> dict[str, tuple[zoo_clock.Timed, list[Code]]]:
    """Each way's steps and codes."""
    found = {}
    ways = {"stock": "inductor", "hot": functools.partial(hot, options={"accept": "off"})}
    for name, backend in ways.items():
        arm, before = zoo_clock.Timed(built, backend, device), len(Code.made)
        with _marking():
            arm.compile()
        found[name] = arm, Code.made[before:]
    return found


def main(
    model: Annotated[str, typer.Option(help="one of zoo.py's, or timm:<name>")],
    batch: int = 128,
    device: str = "cuda",
    steps: int = 30,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> list[Row]:
    """Print a table, and what steps take by the clock."""
    make, where = _maker(model), torch.device(device)
    with compiler_settings("fp32"):
        arms = _compiled(zoo_clock.built_by(make, batch, where), where)
        for _ in range(WARM_UP):
            for arm, _ in arms.values():
                arm.round()
        clock = collections.defaultdict[str, list[float]](list)
        faults = collections.Counter[str]()
        for _ in range(steps):
            for name, (arm, _) in arms.items():
                synchronize(where)
                faults[name] -= _page_faults()
                Code.noting, begin = True, time.perf_counter()
                arm.step()
                Code.noting = False
                synchronize(where)
                clock[name].append(1e3 * (time.perf_counter() - begin))
                faults[name] += _page_faults()
    rows = [
        row
        for name, (_, codes) in arms.items()
        for graph, code in enumerate(code for code in codes if code.steps)
        for row in code.rows(name, graph)
    ]
    took = {name: statistics.median(times) for name, times in clock.items()}
    page_faults = {name: round(count / steps) for name, count in faults.items()}
    says = [f"{k}: {ms:.1f} ms and {page_faults[k]} page faults a step" for k, ms in took.items()]
    show(lines(rows), ", ".join(says))
    if json_file:
        arguments = {"model": model, "batch": batch, "steps": steps, "ms": took}
        arguments |= {"page_faults": page_faults}
        write_json(json_file, where, arguments, rows)
    return rows


def _page_faults() -> int:
    """This process's that were served without reading a disk, so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def lines(rows: list[Row]) -> Lines:
    """A table, graph by graph."""
    head = ("graph", "statements", "", "count", "us each", "us")
    return [head] + [
        (str(r.graph), r.kind, r.arm, str(r.count), f"{r.us / r.count:.2f}", f"{r.us:.0f}")
        for r in sorted(rows, key=lambda r: (r.graph, r.kind))
    ]


if __name__ == "__main__":
    typer.run(main)

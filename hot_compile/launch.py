"""``hot-compile run script.py``: backend "hot" where a script asks torch.compile for its default.

Where it asks for "hot" itself, that counts and is reported, too.

The one seam is :func:`hot_by_default`, which replaces ``torch.compile`` while the script runs, in
this process only. ``nn.Module.compile``, Hugging Face's Trainer, accelerate and others call it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import os
import runpy
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor.cudagraph_trees import reset_cudagraph_trees

from .again import trains
from .backend import check_options, hot
from .errors import OptionError, ScriptError
from .figures import Figures, graph_key
from .page import save_page
from .stock import Compared
from .summary import Summary


def parse_settings(settings: Sequence[str], recipe: str | None = None) -> dict[str, Any]:
    """Options from ``key=value`` texts: values are Python literals, true and false in either case,
    or else strings.

    Raises:
        OptionError: a text has no key, a key comes twice or is unknown, a value is not valid.
    """
    options: dict[str, Any] = {} if recipe is None else {"recipe": recipe}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not key or not equals:
            raise OptionError(
                f"got {setting!r} as a setting; expected key=value, e.g. recipe=fast or "
                "'exclude=[\"head*\"]'. Write it so, quoted for your shell."
            )
        if key in options:
            raise OptionError(f"got option {key!r} twice; expected one value. Remove the other.")
        options[key] = _literal(text)
    check_options(options)
    return options


_WORDS = {"true": True, "false": False}


def _literal(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


class _Default:
    """The backend that stands in for Inductor: "hot" with options of its own."""

    __name__ = "hot"  # torch shows it

    def __init__(
        self, options: Mapping[str, Any], summary: Summary, compared: Compared | None
    ) -> None:
        self._options = dict(options)
        self._summary = summary
        self._compared = compared
        self.reset = reset_cudagraph_trees  # torch.compiler.reset() calls it, as the backend's own

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        merged = {**(options or {}), **self._options}
        listener = None
        if trains(example_inputs):
            listener = self._summary.listener(graph_key(gm, example_inputs, mode, merged))
        else:
            self._summary.without_backward()
        recorder = self._compared.recorder(gm, example_inputs) if self._compared else None
        return hot(
            gm, example_inputs, mode=mode, options=merged, recorder=recorder, listener=listener
        )


@contextlib.contextmanager
def hot_by_default(
    options: Mapping[str, Any], compared: Compared | None = None
) -> Iterator[Summary]:
    """Inside, ``torch.compile`` without a backend, with "inductor" or "hot", compiles by "hot".

    Every other backend stays. ``options`` lie over those that torch.compile's caller gives.
    ``compared`` keeps all of every graph, which is then traced as stock, too, and compiled anew.
    """
    summary = Summary()
    with by_default(_Default(options, summary, compared)):
        yield summary


@contextlib.contextmanager
def by_default(default: Any) -> Iterator[None]:
    """Inside, what :func:`hot_by_default` compiles by "hot" is compiled by this backend."""
    stock = torch.compile

    @functools.wraps(stock)
    def compile_so(model: Any = None, *, backend: Any = None, **keywords: Any) -> Any:
        wanted = _default_backend() if backend is None else backend
        ours = wanted in ("inductor", "hot", torch._dynamo.lookup_backend("hot"))
        return stock(model, backend=default if ours else wanted, **keywords)

    torch.compile = compile_so  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = stock


def _default_backend() -> Any:
    """What torch would take: since 2.13 it can be set."""
    return getattr(torch.compiler, "get_default_backend", lambda: "inductor")()


def run(
    script: str,
    arguments: Sequence[str],
    options: Mapping[str, Any],
    module: bool,
    report: Path | None = None,
) -> int:
    """Run a script, or a module, as Python does, and print the summary; returns the exit code.

    With ``report`` all that was done is written there too, as one page of HTML.

    ``sys.argv``, ``sys.path[0]`` and ``__main__`` are the script's own, and stay so. SystemExit is
    passed on; any other exception is shown by ``sys.excepthook``, from the script's own frame on.

    Raises:
        ScriptError: there is no such script or module, or no folder for the report.
    """
    report = _writable(report)
    compared = Compared() if report else None
    start = starting(script, arguments, module)
    with hot_by_default(options, compared) as summary:
        try:
            return ended(start)
        finally:
            summary.print()
            if report and compared and summary.is_first:
                _save(report, compared, script)


def starting(script: str, arguments: Sequence[str], module: bool) -> Callable[[], Any]:
    """What runs a script, or a module, as ``__main__``. Raises ScriptError if there is none."""
    start = (_module_as_main if module else _script_as_main)(script, arguments)
    sys.excepthook = sys.__excepthook__  # the command line's parser has put its own there
    return start


def ended(start: Callable[[], Any]) -> int:
    """Run it to its end; the exit code. Exceptions are shown, but SystemExit, which passes."""
    try:
        start()
    except SystemExit:
        raise
    except BaseException as error:
        error = error.with_traceback(_own_frames(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _save(path: Path, compared: Compared, title: str) -> None:
    """Write the page, if anything was compiled; of the same layers the last graph counts."""
    last = {Figures.of(graph).layers: n for n, graph in enumerate(compared.graphs)}.values()
    graphs = [compared.graphs[n] for n in last]
    stock = {name: [each[n] for n in last] for name, each in compared.stock.items()}
    if graphs:
        rates = sorted({name for graph in graphs for name in graph.plan.rates})
        note = f"Predicted by these rates: {'; '.join(rates)}." if rates else ""
        save_page(path, graphs, title=title, stock=stock, note=note)
        print(f"hot: wrote {path}", file=sys.stderr)


def _writable(report: Path | None) -> Path | None:
    """Where the page goes, whatever folder the script may change to."""
    if report is None:
        return None
    path = report.absolute()
    if path.is_dir() or not path.parent.is_dir():
        raise ScriptError(
            f"got report {str(report)!r}; expected a file's name in a folder that exists. Correct "
            "it, or make the folder."
        )
    return path


def _script_as_main(script: str, arguments: Sequence[str]) -> functools.partial[Any]:
    path = Path(script)
    if path.is_dir() or not path.exists():
        found = "a folder" if path.is_dir() else "which does not exist"
        raise ScriptError(
            f"got script {script!r}, {found}; expected a Python file. Correct the path, put "
            "options of hot-compile before it, or use -m for a module."
        )
    file = os.path.abspath(script)  # a link is not followed, as Python does not
    code = compile(path.read_bytes(), file, "exec", dont_inherit=True)
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=file, __cached__=None, __builtins__=__builtins__)
    sys.argv[:] = [script, *arguments]
    sys.path[0] = str(path.resolve().parent)
    sys.modules["__main__"] = main
    return functools.partial(exec, code, main.__dict__)


def _module_as_main(name: str, arguments: Sequence[str]) -> functools.partial[Any]:
    sys.path[0] = str(Path.cwd())
    try:
        found = importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):
        found = None
    if found is None:
        raise ScriptError(
            f"got module {name!r}, which is not found; expected one that can be imported from "
            f"{Path.cwd()} or is installed. Correct the name, or leave -m out for a file."
        )
    sys.argv[:] = [name, *arguments]
    return functools.partial(runpy.run_module, name, run_name="__main__", alter_sys=True)


def _own_frames(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Without what lies above the script's first frame."""
    above = (__file__, runpy.__file__, "<frozen runpy>")
    while traceback is not None and traceback.tb_frame.f_code.co_filename in above:
        traceback = traceback.tb_next
    return traceback

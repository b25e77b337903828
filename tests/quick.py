"""How a process of the tests compiles: strictly, and quicker, which changes nothing it makes."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@contextlib.contextmanager
def quick_compiling() -> Iterator[None]:
    """Dynamo leaves out what takes a third of the time in which a step is compiled.

    Resetting it forgets what shapes operators have returned, which are then all found out again;
    every compile looks for garbage, empties the processor's caches to time its guards, and
    writes its graphs as text, for a trace that nobody keeps.
    """
    import torch
    from torch._dynamo import guards
    from torch._functorch._aot_autograd import graph_compile
    from torch._subclasses import FakeTensorMode

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo.config, "run_gc_after_compile", False, raising=False)
        patch.setattr(guards, "profile_guard_manager", lambda *_: 0.0, raising=False)
        patch.setattr(FakeTensorMode, "cache_clear", lambda: None, raising=False)
        for name, nothing in (("_log_joint_graph", None), ("_log_fw_bw_graphs", (None, None))):
            if hasattr(graph_compile, name):
                patch.setattr(graph_compile, name, _unless_heard(graph_compile, name, nothing))
        yield


def _unless_heard(module: Any, name: str, nothing: Any) -> Callable[..., Any]:
    """The function of that name, called only where a trace or a log takes what it writes."""
    from torch._logging._internal import trace_log

    write, logs = getattr(module, name), (module.aot_joint_log, module.aot_graphs_log)

    def written(*args: Any, **keywords: Any) -> Any:
        heard = trace_log.handlers or any(log.isEnabledFor(logging.INFO) for log in logs)
        return write(*args, **keywords) if heard else nothing

    return written


@contextlib.contextmanager
def strict_by_default() -> Iterator[None]:
    """What goes wrong in our part is raised: nothing hides behind the guarantee."""
    from hot_compile.config import RECIPES

    with pytest.MonkeyPatch.context() as patch:
        for name, recipe in RECIPES.items():
            patch.setitem(RECIPES, name, dataclasses.replace(recipe, strict=True, accept="off"))
        yield

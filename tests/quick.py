"""How a process of the tests compiles: strictly, and quicker, which changes nothing it makes."""

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def quick_compiling() -> Iterator[None]:
    """Dynamo leaves out what takes a third of the time in which a step is compiled.

    Resetting it forgets what shapes operators have returned, which are then all found out again;
    every compile looks for garbage, and empties the processor's caches to time its guards.
    """
    import torch
    from torch._dynamo import guards
    from torch._subclasses import FakeTensorMode

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo.config, "run_gc_after_compile", False, raising=False)
        patch.setattr(guards, "profile_guard_manager", lambda *_: 0.0, raising=False)
        patch.setattr(FakeTensorMode, "cache_clear", lambda: None, raising=False)
        yield


@contextlib.contextmanager
def strict_by_default() -> Iterator[None]:
    """What goes wrong in our part is raised: nothing hides behind the guarantee."""
    from hot_compile.config import RECIPES

    with pytest.MonkeyPatch.context() as patch:
        for name, recipe in RECIPES.items():
            patch.setitem(RECIPES, name, dataclasses.replace(recipe, strict=True, accept="off"))
        yield

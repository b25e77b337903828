"""What makes compiling quicker in a process of the tests, and changes nothing that it makes."""

import contextlib
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

"""What Inductor generates for hot, made cheaper for its host to run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch._inductor.codecache import PyCodeCache

from .frames import give_room
from .launches import shorten_launches


@contextlib.contextmanager
def lightened() -> Iterator[None]:
    """Code that Inductor generates or loads meanwhile has room for its calls, and launches its
    kernels by fewer of them."""
    before = len(PyCodeCache.modules)
    yield
    for module in PyCodeCache.modules[before:]:
        give_room(module)
        shorten_launches(module)

"""Room behind the Python frames of long generated functions.

CPython before 3.13.13 and 3.14.4 keeps frames in pages of 16 KiB, which it maps anew when a frame
does not fit into what is left and unmaps when the call returns (python/cpython#142183). The code of
a deep network's step is one function of a thousand locals; where it just fits, each call that it
makes, a kernel's launch for one, maps pages, faults on them and unmaps them: 7 us on one machine,
13 us on another. It is luck; what ``hot`` saves makes such functions longer, so it meets it more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType

from torch._inductor.codecache import PyCodeCache

_LONG = 512
"""Locals and operands, eight bytes each, of a function that is worth pages of its own: mapping
those takes it as long as one or two of its hundreds of calls."""
_ROOM = 4096
"""Operands that it is said to have beside its own: more than 16 KiB, so it never fits into pages
that are there. What gets new ones has a thousand left at least, which calls use; what is only
said to be used is never touched, and takes no memory."""


@contextlib.contextmanager
def room_for_calls() -> Iterator[None]:
    """Long functions that Inductor generates or loads meanwhile get pages of their own."""
    before = len(PyCodeCache.modules)
    yield
    for module in PyCodeCache.modules[before:]:
        for function in _functions(module):
            function.__code__ = _with_room(function.__code__)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """Those that its text defines, or that are methods of what it makes."""
    for value in vars(module).values():
        function = value.__func__ if isinstance(value, MethodType) else value
        if isinstance(function, FunctionType) and function.__globals__ is vars(module):
            yield function


def _with_room(code: CodeType) -> CodeType:
    size = code.co_nlocals + code.co_stacksize
    if size < _LONG or code.co_stacksize >= _ROOM:
        return code
    return code.replace(co_stacksize=code.co_stacksize + _ROOM)

"""Room behind the Python frames of long generated functions.

CPython before 3.14.4 (3.13: before April 2026) keeps frames in chunks of 16 KiB. It maps a new one
when a frame does not fit into what is left, and unmaps it when the call returns
(python/cpython#142183). The code of a deep network's step is one function of a thousand locals.
Where it just fits, each call that it makes, a kernel's launch for one, maps pages, faults on them
and unmaps them: 7 us on one machine, 13 us on another. Who meets that is luck. What ``hot`` stores
makes such functions longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType

_LONG = 512
"""Locals and operands, eight bytes each, of a function that is worth a chunk of its own: mapping it
takes about as long as one or two of the hundreds of calls that such a function makes."""
_ROOM = 4096
"""Operands that it is said to have beside its own: more than 16 KiB, so it never fits into a chunk
that is there. A new one leaves a thousand values at least to what is called. Pages that are only
said to be used are never touched, and take no memory."""


def give_room(module: ModuleType) -> None:
    """Long functions of a generated ``module`` get chunks of their own."""
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

"""When compiled code is dropped: not while something that it computed will be computed again.

``torch.utils.checkpoint`` runs a region a second time in the backward, and wants the same tensors
saved as the first time. Other code would save others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any
from weakref import WeakSet

import torch

from hot_compile.again import compiled_node, hooked


class _Region:
    """A forward whose saved tensors somebody's hooks stand for. Its autograd node keeps it."""


_OPEN: WeakSet[_Region] = WeakSet()
"""Regions of which a backward is still to come."""
_WAITING: dict[CodeType | None, None] = {}
"""What is to be dropped when there are none."""


def forget(code: CodeType | None) -> None:
    """Drop what was compiled of ``code``, so that its next call compiles it again; not before the
    backwards of what it computes under hooks are through."""
    _WAITING[code] = None
    _drop()


def _drop() -> None:
    while _WAITING and not _OPEN:
        code, _ = _WAITING.popitem()
        if code is None:
            torch._dynamo.reset()
        else:
            torch._dynamo.eval_frame.reset_code(code)


def kept_while_open(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, a compiled graph, whose code stays for as long as its forwards may be repeated."""

    @functools.wraps(run, updated=())
    def call(*args: Any) -> Any:
        if not hooked():
            if _WAITING:
                _drop()
            return run(*args)
        region = _Region()
        _OPEN.add(region)
        try:
            outputs = run(*args)
            _close_behind(region, outputs, args)
        except BaseException:
            _OPEN.discard(region)
            raise
        return outputs

    return call


def _close_behind(region: _Region, outputs: Sequence[Any], args: Sequence[Any]) -> None:
    """Close it when its backward is through, and no other may follow."""
    node = compiled_node(outputs, args)
    if node is None:
        return

    @torch.compiler.disable
    def finished(*_: Any) -> None:
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            _OPEN.discard(region)
            _drop()

    node.register_hook(finished)

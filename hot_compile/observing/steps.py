"""Which forwards of a graph begin a training step, as far as its own backwards and parameters show.

Gradients of a step's backwards add up, and may cancel: what is compared of them begins where a step
does. A compiled graph is called several times in one where a loss takes two passes, or batches are
accumulated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hot_compile.again import compiled_node, versions


class _Forward:
    """Lives as long as the backward that it waits for is possible."""


class Steps:
    """Told of a graph's forwards; those behind each other are to be told without a gap."""

    def __init__(self) -> None:
        self._open: Callable[[], _Forward | None] = lambda: None
        """The last forward, while its backward did not run."""
        self._versions: list[int] | None = None
        """Of the parameters at the last forward; None before it."""

    def begins(self, args: Sequence[Any]) -> bool:
        """The next forward, with these inputs, is the first of a step: gradients were taken of the
        one before, and are gone, or an optimizer has used them."""
        if self._open() is not None:
            return False
        parameters = _trained(args)
        used = self._versions is not None and versions(parameters) != self._versions
        return used or all(p.grad is None for p in parameters)

    def passed(self, outputs: Any, args: Sequence[Any]) -> None:
        """A forward ran."""
        self._versions = versions(_trained(args))
        node: Any = compiled_node(outputs, args) if isinstance(outputs, Sequence) else None
        if node is None:
            return
        forward = _Forward()

        @torch.compiler.disable
        def finished(*_: Any) -> None:
            after.remove()
            if self._open() is forward:
                self._open = lambda: None

        after = node.register_hook(finished)
        self._open = weakref.ref(forward)


def _trained(args: Sequence[Any]) -> list[torch.nn.Parameter]:
    return [a for a in args if isinstance(a, torch.nn.Parameter) and a.requires_grad]

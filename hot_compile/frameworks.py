"""What frameworks do that would keep a model's loss out of the graph its head is in."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from torch._dynamo import config as dynamo_config


def trace_past_warnings() -> None:
    """Let Dynamo skip ``logger.warning_once`` where Hugging Face Transformers is loaded.

    It breaks the graph there. GPT-2's, for one, warns between logits and loss in every step (its
    class names no loss of its own), so that all logits would have to cross from one graph to the
    next. What is skipped is a message, never a computation.
    """
    warn = getattr(logging.Logger, "warning_once", None)
    if "transformers" not in sys.modules or warn is None:
        return
    for name in ("ignore_logging_functions", "ignore_logger_methods"):  # since, and before, 2.13
        if hasattr(dynamo_config, name):
            getattr(dynamo_config, name).add(_Named(warn))
            return


class _Named(str):
    """A function's name that is found where the function is looked for.

    Dynamo writes its settings to its log as JSON, which a function does not go into.
    """

    _function: Callable[..., Any]

    def __new__(cls, function: Callable[..., Any]) -> _Named:
        self = super().__new__(cls, getattr(function, "__qualname__", str(function)))
        self._function = function
        return self

    def __hash__(self) -> int:
        return hash(self._function)

    def __eq__(self, other: object) -> bool:
        return (
            other is self._function
            or other is self
            or (isinstance(other, _Named) and other._function is self._function)
        )

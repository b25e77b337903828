"""What frameworks do that would keep a model's loss out of the graph its head is in."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from torch._dynamo import config as dynamo_config


class _Skipped(set[Callable[..., Any]]):
    """Functions that Dynamo skips: those put in, and what ``_warns_once`` says when it is asked.

    A set of functions would have to wait until Transformers is imported. That may happen after
    this package's import, and Dynamo traces a model before it calls a backend.
    """

    def __contains__(self, function: object) -> bool:
        return super().__contains__(function) or _warns_once(function)


def _warns_once(function: object) -> bool:
    """Whether it is the method that Transformers gives all loggers."""
    known = getattr(logging.Logger, "warning_once", None)
    return known is not None and function is known and "transformers" in sys.modules


def trace_past_warnings() -> None:
    """Let Dynamo skip ``logger.warning_once`` where Hugging Face Transformers is loaded.

    It breaks the graph there. GPT-2's, for one, warns between logits and loss in every step (its
    class names no loss of its own), so that all logits would have to cross from one graph to the
    next. What is skipped is a message, never a computation.

    Called when ``hot`` is imported, since Dynamo traces a model before it calls ``hot``; and by
    ``hot``, for the models that follow, since the user may have replaced the setting since.
    """
    if not isinstance(dynamo_config.ignore_logging_functions, _Skipped):
        dynamo_config.ignore_logging_functions = _Skipped(dynamo_config.ignore_logging_functions)

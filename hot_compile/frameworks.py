"""What frameworks do that would keep a model's loss out of the graph its head is in."""

from __future__ import annotations

import logging
import sys

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
            getattr(dynamo_config, name).add(warn)
            return

"""A compiled graph whose attention's logits are looked at (``passes/storage/logit_errors.py``)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import CodeType
from typing import Any

from hot_compile.passes.storage.logit_errors import Logits

from .auto import forget

log = logging.getLogger("hot_compile")


class LogitGuard:
    """Compiled again, with q and k exact, as soon as steps had logits too large for 12 bits."""

    def __init__(self, run: Callable[..., Any], logits: Logits, code: CodeType | None) -> None:
        self._run = run
        self._logits = logits
        self._code = code
        logits.begin()

    def __call__(self, *args: Any) -> Any:
        """One forward."""
        outputs = self._run(*args)
        if self._logits.found_wanting():
            log.warning(
                "hot: attention's logits are too large to store q and k in 12 bits: those of a step"
                " were off by %.2g (standard deviation). They stay exact from the next step on.",
                self._logits.error,
            )
            forget(self._code)
        return outputs

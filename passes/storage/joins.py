"""What is joined of parts that are kept anyway is joined again, not kept beside them.

Min-cut does not know that a ``cat`` may be computed twice: a DenseNet's layer keeps all that the
layers before it made once more, a U-Net what it skips, a transformer with one product behind
attention and MLP both of these. Here it may choose, where it may have layers' inputs made again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch._functorch import partitioners

from hot_compile.passes.base.graph import aten

_LOCK = threading.RLock()
"""One graph is cut at a time, so that each puts back what it found."""


@contextlib.contextmanager
def joined_again() -> Iterator[None]:
    """Min-cut may leave a ``cat`` for the backward to compute again (tried on torch 2.11, 2.14)."""
    with _LOCK:
        listed: Any = getattr(partitioners, "get_default_op_list", None)

        def with_joins() -> Any:
            kinds = listed()
            kinds.recomputable_ops.add(aten.cat)
            return kinds

        if listed is None:
            yield
            return
        partitioners.get_default_op_list = with_joins
        try:
            yield
        finally:
            partitioners.get_default_op_list = listed

"""Spares Inductor work that changes nothing of the code it writes, and so nothing of what runs."""

from __future__ import annotations

import functools
from typing import Any

from hot_compile.runtime.pointwise import taught

_TAIL_SIZES = "tail_size", "inner_tail_size", "outer_tail_size"


@taught
def spare_work() -> None:
    """Have Inductor leave out what it does in vain, or again and again (torch 2.11 to 2.14)."""
    _write_dtype_rules_once()
    _skip_empty_tails()
    _keep_equal_bounds()


def _write_dtype_rules_once() -> None:
    """The table of operators' dtypes is written anew only when rules were added to it."""
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
    from torch._inductor.utils import op_dtype_propagation_rules

    table: Any = DtypePropagationOpsHandler
    write = table.__init__

    @functools.wraps(write)
    def write_once(self: Any) -> None:
        if vars(self).get("rules_written") != len(op_dtype_propagation_rules):
            write(self)
            self.rules_written = len(op_dtype_propagation_rules)

    table.__init__ = write_once


def _skip_empty_tails() -> None:
    """Where vectors fill a loop, the code for what would be left over is not written.

    Inductor writes it, in vectors, and drops it for its empty range. Buffers and arguments were
    settled when the loop was written for single elements, before.
    """
    from torch._inductor.scheduler import SchedulerNode
    from torch._inductor.virtualized import V

    node: Any = SchedulerNode
    write = node.codegen

    @functools.wraps(write)
    def write_unless_empty(self: Any, index_vars: Any) -> None:
        if not any(getattr(V.kernel, size, None) == 0 for size in _TAIL_SIZES):
            write(self, index_vars)

    node.codegen = write_unless_empty


def _keep_equal_bounds() -> None:
    """Bounds met with equal ones stay; sympy compares the numbers of every constant at length."""
    from torch.utils._sympy.value_ranges import ValueRanges

    ranges: Any = ValueRanges
    meet = ranges.__and__

    @functools.wraps(meet)
    def meet_others(self: Any, other: Any) -> Any:
        return self if self == other else meet(self, other)

    ranges.__and__ = meet_others

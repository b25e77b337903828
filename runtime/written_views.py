"""Has Inductor keep a buffer's memory as long as what an operator wrote to a view of it is read.

What is joined by a ``cat`` is computed where the ``cat`` wants it. Where an operator of torch's
writes it in place (``scatter_reduce``), Inductor knows the result by another name, and of that not
whose memory it is: it gives the memory away after the last reader of the whole, and who reads the
part later reads something else. Stock Inductor does so, too; by torch 2.11, 2.14 and 2.15 it was
seen. The gradient of a maximum over a graph's edges, whose ties were counted so, was NaN.
"""

from __future__ import annotations

from typing import Any

from hot_compile.runtime.pointwise import taught


@taught
def kept() -> None:
    """Mend it."""
    from torch._inductor.scheduler import BaseSchedulerNode
    from torch._inductor.virtualized import V

    own = BaseSchedulerNode.used_or_aliased_buffer_names

    def used(self: Any) -> Any:
        found = own(self)
        real = self.scheduler.mutation_real_name
        left = [real[name] for name in found if name in real]
        while left:
            name = left.pop()
            found.add(name)
            buffer = V.graph.name_to_buffer.get(name)
            owners = buffer.get_inputs_that_alias_output() if buffer else ()
            left += [owner for owner in owners if owner not in found]
        return found

    BaseSchedulerNode.used_or_aliased_buffer_names = used  # type: ignore[method-assign]

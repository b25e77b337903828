"""Has Inductor count an input by its bytes where it looks for the order with the lowest peak.

Of the orders of a graph's kernels Inductor takes the one whose peak it estimates lowest. What a
kernel frees by being the last to read an input it takes for as much as the kernel's loop runs
through: a scale that a block of 128 elements shares counted 128 times, codes of which four make a
byte four times. So a backward seemed to begin with more than it is given, and to free more than it
holds: gradients of weights went to its end (the backward of a Swin-T of 8 images took 474 MiB, 361
in the order that is estimated lowest since).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hot_compile.runtime.pointwise import taught


@taught
def weighed() -> None:
    """Mend the estimate."""
    from torch._inductor import memory
    from torch._inductor.dependencies import StarDep
    from torch._inductor.virtualized import V

    own = memory.get_freeable_input_buf

    def by_bytes(nodes: Sequence[Any], graph_inputs: Any) -> Any:
        found = own(nodes, graph_inputs)  # type: ignore[arg-type]
        for name, buffer in found.items():
            whole = V.graph.get_dep_size_hint(StarDep(name))
            buffer.mpi_buffer.size_free = whole or buffer.mpi_buffer.size_free
        return found

    memory.get_freeable_input_buf = by_bytes

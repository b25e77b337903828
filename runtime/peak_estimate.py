"""Has Inductor count what takes memory, and no more, where it looks for the order of lowest peak.

Of the orders of a graph's kernels Inductor takes the one whose peak it estimates lowest. Twice it
counts too much, and once too little:

* What a kernel frees by being the last to read an input it takes for as much as the kernel's loop
  runs through: a scale that a block of 128 elements shares counted 128 times, codes of which four
  make a byte four times. So a backward seemed to free more than it is given, and gradients of
  weights went to its end.
* What one kernel makes and reads itself is never written, but counted while it ran, in fp32 often.
  So a forward's own order seemed as high as one that stores images at its end.
* An attention's backward is counted by what it returns. It also sums the gradient of queries in
  fp32, and makes those of keys and values for each head, though heads share them. So it seemed no
  place where gradients of weights should be done with, which kept what they read.

By the code written for an H100 a Swin-T of 8 images took 474 MiB in its backward, 361 since; a
ConvNeXt-T of 16 695, 460 since; the forward of an EfficientNet-B0 of 16 287, 221 since. A step of a
StarCoder2 of 12 heads a key took 3860 MiB on an H200, 3442 since.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hot_compile.runtime.pointwise import taught

aten = torch.ops.aten
_ATTENTION = {
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
}


@taught
def estimated() -> None:
    """Mend all three."""
    from torch._inductor import memory
    from torch._inductor.dependencies import StarDep
    from torch._inductor.scheduler import FusedSchedulerNode
    from torch._inductor.virtualized import V

    inputs = memory.get_freeable_input_buf
    buffers = memory.assign_memory_planning_info_for_scheduler_buffers

    def by_bytes(*given: Any, **more: Any) -> Any:
        found = inputs(*given, **more)
        for name, buffer in found.items():
            whole = V.graph.get_dep_size_hint(StarDep(name))
            buffer.mpi_buffer.size_free = whole or buffer.mpi_buffer.size_free
        return found

    def written_ones(nodes: Sequence[Any], *given: Any, **more: Any) -> None:
        buffers(nodes, *given, **more)  # type: ignore[arg-type]
        outputs = set(V.graph.get_output_names())
        for buffer in (buffer for node in nodes for buffer in node.get_outputs()):
            within = _bytes_within(buffer.node)
            buffer.mpi_buffer.size_alloc += within
            buffer.mpi_buffer.size_free += within
        for node in nodes:
            for buffer in node.get_outputs() if isinstance(node, FusedSchedulerNode) else ():
                if not buffer.mpi_buffer.succ_nodes and buffer.get_name() not in outputs:
                    buffer.mpi_buffer.size_alloc = buffer.mpi_buffer.size_free = 0

    memory.get_freeable_input_buf = by_bytes
    memory.assign_memory_planning_info_for_scheduler_buffers = written_ones  # type: ignore[assignment]


def _bytes_within(operator: Any) -> int:
    """What Inductor's ``operator`` takes while it runs, beside what it is given and returns.

    As torch's backwards of attention of 64 to 256 channels do on an H200 (torch 2.11, cuDNN 9.19).
    """
    from torch._inductor.virtualized import V

    if getattr(operator, "op_overload", None) not in _ATTENTION:
        return 0
    query, key = operator.inputs[1:3]
    shared = query.get_size()[1] != key.get_size()[1]
    each = torch.float32.itemsize + (2 * query.get_dtype().itemsize if shared else 0)
    return each * int(V.graph.sizevars.optimization_hint(math.prod(query.get_size()), fallback=0))

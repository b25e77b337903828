"""Has a kernel of Inductor's wait where it reads back what it wrote.

A loop of a reduction may store what the kernel's next loop loads: a norm's values, of which then
the largest is found, and then the codes. Triton gives each thread its elements by what is loaded or
stored: four of a store of fp32, up to sixteen of a load whose values become codes of one byte. So
a thread reads what another wrote, perhaps before it was written. Then a code is made of whatever
the memory held, and where that is beyond the row's largest, it is infinity's. Whether it happens
depends on the configuration that was fastest: of a ViT's norm, rows of 192, in 3 compiles of 18 all
gradients before it were NaN.

Torch 2.14 writes these barriers itself: https://github.com/pytorch/pytorch/pull/190519,
https://github.com/triton-lang/triton/issues/10924.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.torch_version import TorchVersion

from hot_compile.runtime.pointwise import taught


@taught
def awaited() -> None:
    """Mend torches before 2.14, as that is."""
    if TorchVersion(torch.__version__) >= "2.14":
        return
    from torch._inductor.codegen.common import DeferredLine
    from torch._inductor.codegen.triton import TritonKernel

    load: Any = TritonKernel.load
    load_buffer: Any = TritonKernel.get_load_buffer

    def load_behind_stores(kernel: Any, name: str, index: Any) -> Any:
        kernel.reads_back = name if name in kernel.cse.invalidated_stores else None
        try:
            return load(kernel, name, index)
        finally:
            kernel.reads_back = None

    def where_loads_go(kernel: Any, indexing: Any) -> Any:
        lines = load_buffer(kernel, indexing)
        if name := getattr(kernel, "reads_back", None):
            lines.writeline(DeferredLine(name, "tl.debug_barrier()"))
        return lines

    TritonKernel.load = load_behind_stores  # type: ignore[method-assign,assignment]
    TritonKernel.get_load_buffer = where_loads_go  # type: ignore[method-assign]

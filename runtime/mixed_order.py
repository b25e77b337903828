"""One row at a time in kernels that sum along rows and across them, where rows are codes.

Inductor gives a norm's backward one kernel that sums the gradient along rows and, for the weight's
gradient, across them, several rows at once. Triton gives each thread 16 bytes of what it reads: of
codes as many elements as two threads have of bf16. So a warp has two rows, the sum across rows goes
through shared memory, and that takes four times as long as all the rest: 0.136 ms for 25088 x 384
on an H100, for bf16's 0.028; with one row at a time 0.035.
"""

from __future__ import annotations

import re
from typing import Any

from hot_compile.runtime.pointwise import taught

_SHORTEST = 512
"""Elements of a row's block from which on more than one warp goes over a row. Of so many, Inductor
takes four rows at once."""
_MANY = 64
"""Rows a block from which on it takes several of longer ones, too."""
_MOST_WARPS = 8
_HEURISTIC = re.compile(
    r"@triton_heuristics\.persistent_reduction\(\s*size_hints=\{[^}]*\},\s*reduction_hint=[\w.]+,"
)
_CODES = re.compile(r"'in_ptr\d+': '\*[iu]8'")
_BLOCK = re.compile(r"R0_BLOCK: tl\.constexpr = (\d+)")


@taught
def row_by_row() -> None:
    """Have Inductor write them so (tried on torch 2.11, 2.14, 2.15)."""
    from torch._inductor.codegen.simd import SIMDScheduling

    own: Any = SIMDScheduling._generate_kernel_code_for_mix_order_reduction

    def generate(self: Any, *given: Any, **more: Any) -> tuple[Any, ...]:
        *made, code = own(self, *given, **more)
        # the kernel is made here; as of torch 2.15 it is given
        for kernel in (k for k in (*made, *given, *more.values()) if hasattr(k, "rsplit_size")):
            code = one_row_at_a_time(code, kernel.rsplit_size)
        return (*made, code)

    SIMDScheduling._generate_kernel_code_for_mix_order_reduction = generate  # type: ignore[assignment]


def one_row_at_a_time(code: str, rows: int) -> str:
    """A kernel's source with its configuration fixed; as it is, where that is not wanted.

    Args:
        code: of a kernel that goes over ``rows`` rows a block.
    """
    found = _BLOCK.search(code)
    block = int(found[1]) if found and _CODES.search(code) else 0
    if not (block == _SHORTEST or (block > _SHORTEST and rows >= _MANY)):
        return code
    fixed = {"XBLOCK": 1, "RSPLIT_SIZE": rows, "NUM_STAGES": 1}
    fixed |= {"num_warps": min(_MOST_WARPS, block // 256), "num_stages": 1}
    return _HEURISTIC.sub(f"@triton_heuristics.fixed_config(config={fixed},", code, count=1)

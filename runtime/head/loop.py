"""All chunks of a head by one call into C++, where Triton makes its kernels.

What a chunk is made of takes a GPU 0.1 ms, and Python, between one launch and the next, takes the
GPU's host as long. So ``csrc/head/chunks.cpp`` goes through them: it is told the kernels that
Triton compiled, as handles of CUDA's, and for each argument what it is for the first row and how
many bytes are added a row. It needs a C++ compiler once, as Inductor does, and no CUDA toolkit.
Where it cannot be had, or a kernel is launched in some other way, ``products.py`` goes on by
itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hot_compile.errors import BuildError
from hot_compile.runtime.head.parts import Part
from hot_compile.runtime.head.rows import has_triton
from hot_compile.runtime.native.build import load_extension
from hot_compile.runtime.native.extensions import head_extension

if TYPE_CHECKING:
    from hot_compile.runtime.head.triton_kernels import Call

_log = logging.getLogger(__name__)

_LIBRARY = torch.library.Library("hot", "FRAGMENT")
_LIBRARY.define(
    "head_chunks(Tensor x, Tensor[] weights, Tensor[] biases, Tensor? target, int outputs,"
    " Tensor(a!) room, Tensor(b!)? logits, Tensor(c!) grad_x, Tensor(d!) grad_weight,"
    " Tensor(e!) grad_bias, int[] launches, int stream) -> ()"
)

_chunks = torch.ops.hot.head_chunks
_WARP = 32
_SCRATCH = "global_scratch_size", "profile_scratch_size"
"""Of a kernel's metadata: memory that it would be given, by pointers behind its arguments."""
_OTHERWISE = "launch_cooperative_grid", "launch_pdl", "instrumentation_mode"
"""Of a kernel's metadata: what is not empty where it is launched in another way."""
_TYPES = {"i32": int, "i64": int, "fp32": float}
"""Of arguments that are no tensors, by Triton's name of their type."""
_UNKNOWN = AttributeError, KeyError, TypeError, ValueError, AssertionError
"""What looking at a kernel raises that another Triton made."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What CUDA launches."""

    compiled: Any
    """By Triton; the handle lives as long."""
    passed: tuple[bool, ...]
    """Of its arguments; others are constants of its code."""
    scratch: int
    """Pointers behind them, that point to nothing."""

    @staticmethod
    def of(call: Call) -> Kernel | None:
        """None if it is launched in some other way than by its arguments."""
        compiled = call.compiled()
        if compiled is None:
            return None
        metadata, types = compiled.metadata, compiled.src.signature
        scratch = [getattr(metadata, name) for name in _SCRATCH if hasattr(metadata, name)]
        if metadata.num_ctas != 1 or any(scratch):
            return None
        if any(getattr(metadata, name, None) for name in _OTHERWISE):
            return None
        constants = {place for place, *_ in compiled.src.constants}
        names = [types.get(name, "constexpr") for name in call.kernel.arg_names]
        passed = [n != "constexpr" and i not in constants for i, n in enumerate(names)]
        for name, arg in itertools.compress(zip(names, call.args, strict=True), passed):
            if not isinstance(arg, Tensor if name.startswith("*") else _TYPES.get(name, ())):
                return None
        return Kernel(compiled, tuple(passed), len(scratch))

    def launch(self, call: Call, room: Tensor) -> list[int]:
        """As ``csrc/head/chunks.cpp`` reads it; ``room`` is every chunk's."""
        steps = call.steps + (0,) * (len(call.args) - len(call.steps))
        values = list[int]()
        for arg, step, passed in zip(call.args, steps, self.passed, strict=True):
            if passed:
                values += [_bits(arg), 0 if arg is room else step]
        values += [0, 0] * self.scratch
        metadata = self.compiled.metadata
        threads, count = metadata.num_warps * _WARP, len(values) // 2
        return [self.compiled.function, call.grid[1], threads, metadata.shared, count, *values]


@functools.cache
def _kernels(device: int) -> dict[Any, Kernel | None]:
    """What was compiled for a device, by kinds of arguments."""
    return {}


@functools.cache
def _library_found() -> bool:
    try:
        load_extension(head_extension())
    except BuildError as error:
        _log.info("heads' chunks are gone through in Python: %s", error)
        return False
    return True


def serves(x: Tensor) -> bool:
    """There is such a call for heads that read ``x``."""
    return has_triton(x) and not torch.version.hip and _library_found()


def run(
    x: Tensor,
    parts: tuple[Part, ...],
    outputs: int,
    room: Tensor,
    logits: Tensor | None,
    sums: tuple[Tensor, Tensor, Tensor],
    target: Tensor | None,
    calls: Iterable[Call],
) -> bool:
    """Products and ``calls`` of all chunks; False: nothing was done.

    Args:
        x: [R, I].
        parts: of the weight.
        outputs: of it, without those that are zeros.
        room: [C, P], for the gradient of as many rows as a chunk has, and their products.
        logits: [R, P], the products if they are kept.
        sums: g_x, g_w and g_b, empty if not asked for.
        target: [R], if labels are to be checked.
        calls: of all rows; of ``room``, of a chunk's.
    """
    launches = list[int]()
    for call in calls:
        kernel = _kernel(call, len(x), len(room))
        if kernel is None:
            return False
        launches += kernel.launch(call, room)
    weights = [part.weight for part in parts]
    biases = [part.bias for part in parts if part.bias is not None]
    stream = torch.cuda.current_stream(x.device).cuda_stream
    _chunks(x, weights, biases, target, outputs, room, logits, *sums, launches, stream)
    return True


def _kernel(call: Call, rows: int, chunk: int) -> Kernel | None:
    """What serves all chunks of so many rows."""
    from hot_compile.runtime.head.triton_kernels import ALIGNED, kind_of

    if chunk < rows and any(step * chunk % ALIGNED for step in call.steps):
        return None  # the next chunk lies otherwise
    known = _kernels(call.args[0].device.index)
    kind = (call.kernel, *map(kind_of, call.args))
    if kind not in known:
        known[kind] = None
        with contextlib.suppress(*_UNKNOWN):
            known[kind] = Kernel.of(call)
    return known[kind]


def _bits(arg: Any) -> int:
    """An argument as CUDA gets it."""
    own = type(arg)
    if own is int:
        return arg
    return struct.unpack("<i", struct.pack("<f", arg))[0] if own is float else arg.data_ptr()

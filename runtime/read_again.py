"""Has Inductor read again what a value is made of, rather than write it, where that is less.

It writes a value with several readers that is made of more than four tensors, and counts the mean,
the deviation, the weight and the bias of a norm like the image itself. So a normalised image whose
activation a convolution reads was written in fp32, twice its own bytes, kept until that
convolution's backward was through, and read once more: 3.2 GiB of a Wav2Vec2's 11 (253 samples,
H200). Each reader makes it anew since, where it reads hardly more bytes for that than the value
has: then what would be written is spared, and the peak hardly rises for what is kept instead.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import torch

from hot_compile.runtime.pointwise import taught

_MOST = 1.125
"""Times the bytes of a value that a reader may read to make it: two tensors of bf16, say, and the
mean and the deviation of each of their rows, for one of fp32."""

_active = contextvars.ContextVar("hot_reads_again", default=False)


@contextlib.contextmanager
def read_again() -> Iterator[None]:
    """What Inductor lowers meanwhile for a GPU reads again what is less to read."""
    _taught()
    before = _active.set(True)
    try:
        yield
    finally:
        _active.reset(before)


@taught
def _taught() -> None:
    """Have Inductor ask (tried on torch 2.11, 2.14 and 2.15). Other threads' graphs, and those of
    other backends, are lowered as ever."""
    from torch._inductor import config
    from torch._inductor.ir import Pointwise, StorageBox

    own: Any = StorageBox.should_realize_on_reuse

    def should_realize_on_reuse(box: Any, *users: Any, **more: Any) -> bool:
        said: bool = own(box, *users, **more)
        if not (said and _active.get() and isinstance(box.data, Pointwise)):
            return said
        for_reads = box.num_reads() > config.realize_reads_threshold
        return box.has_large_inner_fn() or not (for_reads and _reads_less(box))

    StorageBox.should_realize_on_reuse = should_realize_on_reuse  # type: ignore[method-assign,assignment]


def _reads_less(box: Any) -> bool:
    """Than it would write, on a GPU; and each element at a place that is known beforehand."""
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.virtualized import V

    device, reads = box.get_device(), box.get_reads()
    if device is None or device.type == "cpu" or box.get_dtype() != torch.float32:
        return False
    if not all(isinstance(read, MemoryDep) and not read.is_indirect() for read in reads):
        return False
    written = V.graph.sizevars.optimization_hint(box.data.get_numel(), fallback=0)
    read = sum(map(V.graph.get_dep_size_hint, reads))
    return 0 < read <= _MOST * written * box.get_dtype().itemsize

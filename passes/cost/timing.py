"""What a device sustains, timed on it: a few seconds, best of several rounds.

Every round times each job once, so that a moment in which the machine is busy spoils one round of
a few jobs and not one job altogether. What a job moves or computes is counted as the cost model
counts it: a rate is what makes the model's prediction right. A GPU's calls are timed in a row, as
they follow each other in a step, at the clock that it has under load.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hot_compile.passes.cost.linear import PRICES, Rates, Sized

hot, aten = torch.ops.hot, torch.ops.aten
Call = Callable[[], object]

_ROUNDS = 4
_CALLS = 5
"""Of a job on a GPU, in a row, to learn how long one takes; on a CPU one is all."""
_SUSTAINED = 0.03
"""Seconds that a GPU does nothing else before a job is timed, and then for as long.

What draws much power is slowed down after some milliseconds, and stays slow in a training step:
bf16 products more than INT8's.
"""
_LIMIT = 0.9
"""Seconds that a job may take in all; then it gets no more rounds."""
_TINY_CALLS = 100
_PAUSE = 20_000_000
"""Cycles of a GPU that outlast the host's ``_TINY_CALLS`` calls: about 10 ms."""
_INT4_PAYS = 1.1
"""INT4 products that are not so many times as fast as INT8's are not worth their packing."""

_PRODUCTS = {  # M, N, K
    "cuda": ((16384, 1024, 1024), (16384, 768, 3072), (8192, 2048, 2048), (8192, 4096, 4096)),
    "cpu": ((512, 512, 512), (1024, 768, 768), (1024, 768, 2048)),
}
_TENSORS = {"cuda": ((16384, 1024), (8192, 4096)), "cpu": ((1024, 768), (1024, 2048))}
"""Rows and columns of what is transformed and packed."""
_COPIED = {"cuda": 2**27, "cpu": 2**25}
"""Bytes: more than caches hold."""
_PINNED = 2**25
"""Bytes: pinned memory stays the process's own."""
_IMAGE, _KERNEL = (8, 64, 28, 28), (64, 64, 3, 3)


@dataclasses.dataclass(frozen=True)
class Job:
    """One thing that is timed."""

    rate: str
    """Which of the device's rates it tells; of jobs with one name the geometric mean counts."""
    amount: float
    """Operations or bytes of a call."""
    make: Callable[[], Call]
    """Makes its operands, which live only while it is timed, and gives what is called."""
    results: float = 0.0
    """Elements that an integer product writes: the model counts them as a transform's bytes."""
    calls: int = 1
    """As the model counts them: each takes a time of its own."""


def measure(device: torch.device, table: Rates) -> Rates:
    """``table``'s entry for ``device`` with every rate that can be timed as it was timed there.

    The operators must be loaded. What says how a device works (``asynchronous``, ``one_read``, ...)
    stays the table's. The caller's random state, autocast and modes are not touched.

    Raises:
        RuntimeError: the device could not do it, for want of memory among others.
    """
    with undisturbed(device):
        host, start = _calls(device)
        called = dataclasses.replace(table, launch=host, start=start)
        jobs = _jobs(device, called)
        return _rates(jobs, _best(jobs, device), called, device)


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Nothing of what surrounds a compilation reaches the operators: fake tensors, autocast."""
    plain = torch.autocast(device.type, enabled=False)
    here = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with _disable_current_modes(), torch.no_grad(), plain, here:
        try:
            yield
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()  # the user's step finds its memory as it was


def _best(jobs: list[Job], device: torch.device) -> list[float]:
    """Seconds of a call of each job in its best round."""
    best, spent = [math.inf] * len(jobs), [0.0] * len(jobs)
    for _ in range(_ROUNDS):
        for index, job in enumerate(jobs):
            if spent[index] > _LIMIT:
                continue
            began = time.perf_counter()
            best[index] = min(best[index], _round(job.make(), device))
            spent[index] += time.perf_counter() - began
    return best


def _round(call: Call, device: torch.device) -> float:
    call()  # the first call of a shape may look for an algorithm
    if device.type == "cpu":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    once = between_events(call, _CALLS, device) / _CALLS
    calls = max(_CALLS, round(_SUSTAINED / once))
    return between_events(call, calls, device, before=calls) / calls


def between_events(
    call: Call, times: int, device: torch.device, *, before: int = 0, pause: int = 0
) -> float:
    """Seconds that a GPU works on ``times`` calls in a row.

    ``before``: so many of them come untimed first; ``pause``: and cycles of waiting.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if pause:
        torch.cuda._sleep(pause)
    for _ in range(before):
        call()
    start.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1e3


def _rates(jobs: list[Job], best: list[float], table: Rates, device: torch.device) -> Rates:
    """``table`` with the rates by which the model predicts ``best`` of ``jobs``."""
    call = table.start if table.asynchronous else table.launch

    def mean(name: str, result: float = 0.0) -> float:
        """Geometric mean of a rate; ``result``: seconds of writing an element that are not its."""
        logs = []
        for job, spent in zip(jobs, best, strict=True):
            if job.rate == name:
                other = job.results * result + job.calls * call
                logs.append(math.log(job.amount / max(spent / 2, spent - other)))
        return math.exp(statistics.mean(logs))

    transform = mean("transform")
    element = (8 * table.int32_result + _wide(device).itemsize) / transform
    integer = mean("integer", element)
    names = {job.rate for job in jobs}
    int4 = mean("int4", element) if "int4" in names else integer
    slower = transform / table.transform
    return dataclasses.replace(
        table,
        exact={dtype: mean(dtype) for dtype in table.exact},
        convolution={dtype: mean(f"convolution {dtype}") for dtype in table.convolution},
        integer=integer,
        int4=int4 if int4 > _INT4_PAYS * integer else integer,
        transform=transform,
        unfold=table.unfold * slower,  # passes over memory as well: no operator does them alone
        fold=table.fold * slower,
        copy=mean("copy"),
        packing=mean("packing"),
        host_copy=mean("host_copy") if table.host_copy else 0.0,
    )


def _wide(device: torch.device) -> torch.dtype:
    """What layers usually compute in there."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _jobs(device: torch.device, table: Rates) -> list[Job]:
    kind = device.type
    jobs = [_copy(device, _COPIED[kind])]
    if table.host_copy:
        jobs.append(_host_copy(device, _PINNED))
    for shape in _PRODUCTS[kind]:
        jobs += [_exact(device, dtype, *shape) for dtype in table.exact]
        jobs.append(_integer(device, *shape, packed=False))
        if table.int4 > table.integer:
            jobs.append(_integer(device, *shape, packed=True))
    for rows, columns in _TENSORS[kind]:
        jobs += _transforms(device, rows, columns, table.one_read)
    return jobs + [_convolution(device, dtype) for dtype in table.convolution]


def random_numbers(device: torch.device, dtype: torch.dtype, *size: int) -> Tensor:
    """Numbers of a generator of our own: a GPU's clock depends on what it multiplies."""
    own = torch.Generator(device).manual_seed(0)
    if dtype in (torch.int8, torch.uint8):
        low, high = (-127, 128) if dtype is torch.int8 else (0, 256)
        return torch.randint(low, high, size, device=device, dtype=dtype, generator=own)
    numbers = torch.empty(size, device=device, dtype=torch.float32)
    return numbers.uniform_(-1, 1, generator=own).to(dtype)


def _exact(device: torch.device, name: str, m: int, n: int, k: int) -> Job:
    dtype = torch.float32 if name == "tfloat32" else getattr(torch, name)

    def make() -> Call:
        a, b = random_numbers(device, dtype, m, k), random_numbers(device, dtype, n, k).t()
        if dtype is not torch.float32 or device.type != "cuda":
            return lambda: aten.mm.default(a, b)
        precision = "tf32" if name == "tfloat32" else "ieee"

        def call() -> None:
            with _fp32_products(precision):
                aten.mm.default(a, b)

        return call

    return Job(name, 2.0 * m * n * k, make)


@contextlib.contextmanager
def _fp32_products(precision: str) -> Iterator[None]:
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = precision
    try:
        yield
    finally:
        products.fp32_precision = before


def _integer(device: torch.device, m: int, n: int, k: int, packed: bool) -> Job:
    dtype, width = (torch.uint8, k // 2) if packed else (torch.int8, k)

    def make() -> Call:
        a, b = random_numbers(device, dtype, m, width), random_numbers(device, dtype, n, width)
        scales = (torch.ones(rows, device=device, dtype=torch.float32) for rows in (m, n))
        args = (a, b, *scales, None, None, _wide(device))
        return lambda: hot.scaled_int_mm.default(*args)

    return Job("int4" if packed else "integer", 2.0 * m * n * k, make, results=float(m * n))


def _transforms(device: torch.device, rows: int, columns: int, one_read: bool) -> list[Job]:
    """The default strategy's, of a gradient and of x; and one that is as fast as packing."""
    once = [(hot.quantize_one_read.default, (0, 1)), (hot.compress_int8.default, (0, 1))]
    twice = [
        (hot.quantize_grad.default, (8, True, 0, 1, True)),
        (hot.quantize_columns.default, (0, 1, 8, True, False)),
    ]
    shape, chosen = (device, rows, columns), once if one_read else twice
    jobs = [_operator("transform", *shape, op, args) for op, args in chosen]
    return [*jobs, _operator("packing", *shape, hot.quantize_rows.default, (8, True, False))]


def _operator(
    rate: str, device: torch.device, rows: int, columns: int, op: Any, args: tuple[Any, ...]
) -> Job:
    dtype = _wide(device)

    def make() -> Call:
        x = random_numbers(device, dtype, rows, columns)
        return lambda: op(x, *args)

    sized = Sized([], *map(sympy.Integer, (rows, columns, dtype.itemsize)))
    cost, _ = PRICES[op](sized, *args)
    return Job(rate, float(cost.bytes), make, calls=cost.calls)


def _copy(device: torch.device, size: int) -> Job:
    def make() -> Call:
        source, target = (torch.ones(size, device=device, dtype=torch.uint8) for _ in range(2))
        return lambda: target.copy_(source)

    return Job("copy", 2.0 * size, make)


def _host_copy(device: torch.device, size: int) -> Job:
    """To pinned memory: the way back is as wide."""

    def make() -> Call:
        source = torch.ones(size, device=device, dtype=torch.uint8)
        target = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        return lambda: target.copy_(source, non_blocking=True)

    return Job("host_copy", float(size), make)


def _convolution(device: torch.device, name: str) -> Job:
    """Both products of a 3 x 3 kernel's backward."""
    dtype, (batch, outputs, *size) = getattr(torch, name), _IMAGE
    no = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])

    def make() -> Call:
        x, weight = random_numbers(device, dtype, *_IMAGE), random_numbers(device, dtype, *_KERNEL)
        return lambda: aten.convolution_backward.default(x, x, weight, None, *no)

    products = 2 * 2.0 * batch * math.prod(size) * outputs * math.prod(_KERNEL[1:])
    return Job(f"convolution {name}", products, make)


def _calls(device: torch.device) -> tuple[float, float]:
    """(the host's, a GPU's own) seconds of an operator that has next to nothing to do."""
    tiny = torch.zeros(32, 32, device=device, dtype=torch.float32)

    def call() -> None:
        hot.quantize_rows.default(tiny, 8, True, False)

    host = min(_host(call, device) for _ in range(_ROUNDS))
    if device.type != "cuda":
        return host, 0.0
    # queued behind a pause, it does not wait for the host
    queued = [between_events(call, _TINY_CALLS, device, pause=_PAUSE) for _ in range(_ROUNDS)]
    return host, min(queued) / _TINY_CALLS


def _host(call: Call, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(_TINY_CALLS):
        call()
    return (time.perf_counter() - began) / _TINY_CALLS

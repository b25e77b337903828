"""A model at its true width against stock: gradients beside eager's floor, peaks, and times.

Five gradients of one step from the same weights: eager PyTorch's in fp32, which the others are
compared with; the same by a noisy backward (``zoo_compare.py``); eager's, stock Inductor's and
hot's in bf16 on a GPU, as people train (on a CPU in fp32). Options of hot are the default ones; a
graph that is compiled without a part of hot since something failed is told of by its warning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from report import environment
from step import compiler_settings, synchronize
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from zoo_compare import Result, cosines, gradients, noisy_gradients, note_gradients, note_graphs
from zoo_compare import warmed as warm_up
from zoo_models import Built

from hot_compile.backend import hot
from hot_compile.memory import peak_bytes
from hot_compile.record import Reports

ROUNDS, STEPS, LOOKS = 4, 5, 3
OPTIONS = {"accept": "off"}
"""What is measured is the first step's code, which looks have not changed yet."""
OF_MEMORY = "OutOfMemoryError"


@dataclasses.dataclass
class DeviceResult(Result):
    """The same with stock beside it."""

    stock_error: str = ""
    notes: str = ""
    """What hot warned of."""
    parameters: int = 0
    floor: float = 0.0
    """Relative error of all gradients together, against eager's in fp32: eager's own in bf16."""
    stock_off: float = 0.0
    hot_off: float = 0.0
    stock_seconds: float = 0.0
    """Of the first step by stock; by hot: ``seconds``."""
    stock_ms: float = 0.0
    hot_ms: float = 0.0
    stock_kernels_ms: float = 0.0
    """Of a step's kernels and copies, one after the other: no host's time, so no neighbour's."""
    hot_kernels_ms: float = 0.0
    stock_launches: int = 0
    hot_launches: int = 0
    stock_peak: int = 0
    """Bytes above what stands between steps."""
    hot_peak: int = 0
    date: str = ""
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)


class Arm:
    """The model compiled in one way, or not at all."""

    def __init__(self, built: Built, backend: Any, device: torch.device) -> None:
        self.built, self.device = built, device
        self.forward = torch.compile(built.model, backend=backend) if backend else built.model
        self.best_ms, self.peak = float("inf"), 0
        self.kernels_ms, self.launches = float("inf"), 0

    def loss(self) -> Tensor:
        """A forward, in bf16 on a GPU."""
        on = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=on):
            return self.built.loss(self.forward)

    def gradients(self) -> tuple[float, dict[str, Tensor], float]:
        """(the loss, every parameter's gradient, seconds that both took)."""
        torch.manual_seed(1)
        begin = time.perf_counter()
        loss = self.loss()
        found = gradients(loss, self.built.model)
        synchronize(self.device)
        return float(loss), found, time.perf_counter() - begin

    def step(self) -> None:
        """Forward and backward."""
        self.loss().backward()
        self.built.model.zero_grad()

    def time(self) -> None:
        """One round."""
        synchronize(self.device)
        begin = time.perf_counter()
        for _ in range(STEPS):
            self.step()
        synchronize(self.device)
        self.best_ms = min(self.best_ms, (time.perf_counter() - begin) / STEPS * 1e3)

    def look_at_kernels(self) -> None:
        """The least of some steps."""
        for _ in range(LOOKS):
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                self.step()
                synchronize(self.device)
            events = [e for e in seen.key_averages() if e.device_type == DeviceType.CUDA]
            self.launches = sum(event.count for event in events)
            taken = sum(event.self_device_time_total for event in events) / 1e3
            self.kernels_ms = min(self.kernels_ms, taken)


def measured(
    name: str, make: Callable[[], Built], device: torch.device, gate: Path
) -> DeviceResult:
    """What was found of one model; who holds ``gate`` may time."""
    result = DeviceResult(name, lowered=True, date=time.strftime("%Y-%m-%d"))
    torch.manual_seed(0)
    result.environment = environment(device)
    try:
        with device:
            built = make()
        warm_up(built)
        Arm(built, None, device).step()
    except Exception as error:
        result.error = f"not trained by eager PyTorch here: {brief(error)}"
        return result
    with compiler_settings("fp32"), _heard() as told:
        _compare(result, built, device, gate)
    result.notes = "; ".join(dict.fromkeys(told))[:300]
    return result


def brief(error: BaseException) -> str:
    """Its kind and first line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:160]}"


@contextlib.contextmanager
def _heard():
    """What the package warns of meanwhile."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage().splitlines()[0][:160])  # type: ignore[method-assign]
    log = logging.getLogger("hot_compile")
    log.addHandler(handler)
    try:
        yield told
    finally:
        log.removeHandler(handler)


def _compare(result: DeviceResult, built: Built, device: torch.device, gate: Path) -> None:
    model, reports = built.model, Reports()
    result.parameters = sum(p.numel() for p in model.parameters())
    torch.manual_seed(1)
    loss = built.loss(model)
    exact = gradients(loss, model)
    result.loss = float(loss)
    del loss
    kept = cosines(noisy_gradients(built), exact)
    result.floor = _off(Arm(built, None, device).gradients()[1], exact)
    arms = {"stock": Arm(built, "inductor", device)}
    backend = functools.partial(hot, recorder=reports, options=OPTIONS)
    arms["hot"] = Arm(built, backend, device)
    try:
        _, got, result.stock_seconds = arms["stock"].gradients()
        result.stock_off = _off(got, exact)
    except Exception as error:
        result.stock_error = brief(error)
        del arms["stock"]
    try:
        loss, got, result.seconds = arms["hot"].gradients()
    except Exception as error:
        alone = f"stock fails, too ({result.stock_error}): " if result.stock_error else ""
        result.error = alone + brief(error)
        return
    result.hot_off = _off(got, exact)
    result.loss_off = abs(loss - result.loss) / max(abs(result.loss), 1e-12)
    note_gradients(result, got, exact, kept)
    note_graphs(result, reports)
    del got, exact
    with FileLock(gate):
        _time(result, arms)


def _off(got: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Relative error of all gradients as one vector."""
    missing = (got.get(n, torch.zeros_like(g)) for n, g in exact.items())
    pairs = zip(missing, exact.values(), strict=True)
    squares = [
        (torch.dist(a.float(), b.float()).square(), b.float().norm().square()) for a, b in pairs
    ]
    error, norm = (torch.stack(part).sum() for part in zip(*squares, strict=True))
    return float((error / norm).sqrt())


def _time(result: DeviceResult, arms: dict[str, Arm]) -> None:
    """Interleaved rounds, the best of each arm."""
    for arm in arms.values():
        arm.step()
        arm.peak = peak_bytes(arm.step, arm.device)
    for _ in range(ROUNDS):
        for arm in arms.values():
            arm.time()
    for name, arm in arms.items():
        if arm.device.type == "cuda":
            arm.look_at_kernels()
            setattr(result, f"{name}_kernels_ms", arm.kernels_ms)
            setattr(result, f"{name}_launches", arm.launches)
        setattr(result, f"{name}_ms", arm.best_ms)
        setattr(result, f"{name}_peak", arm.peak)

"""One step by hot beside eager PyTorch's and stock Inductor's: gradients, bytes, peaks, times.

Gradients of one step from the same weights: eager PyTorch's in fp32, which the others are compared
with; eager's, stock Inductor's and hot's in bf16 on a GPU, as people train, on a CPU in fp32. There
graphs run uncompiled, and nothing is timed, unless they are to be lowered.

Some gradients are nearly nothing: of a bias in front of a norm, say, whose terms cancel. Any error
that is small beside the terms is large beside such a gradient. So eager's own backward runs once
more with noise of 1 %, which is what 8 bits err by: of the norm of the gradient that every layer
with a matrix of weights gets, and of every value of the large activations that it reads. What this
leaves a cosine below 0.95 of is not *firm*. It knows nothing of hot. Cosines of firm gradients
stand beside those of all, never instead of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from report import environment
from step import compiler_settings, synchronize
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from zoo_models import Built

from hot_compile.backend import hot
from hot_compile.config import HotConfig
from hot_compile.memory import peak_bytes
from hot_compile.record import Reports, run_uncompiled
from hot_compile.testing import cosine

WARM_UP, RATE = 3, 1e-3
LOOKS = 3
OPTIONS = {"accept": "off"}
"""What is measured is the first step's code, which looks have not changed yet."""
UNCOMPILED = {**OPTIONS, "min_gain": 0, "strict": True}
"""On a CPU layers would not pay."""
OF_MEMORY = "OutOfMemoryError"
NOISE, FIRM = 0.01, 0.95
"""Relative error put on every layer's gradient and on large activations, and the cosine that a firm
gradient keeps."""
LARGE = HotConfig().memory_min_bytes


@dataclasses.dataclass
class Result:
    """What was found of one model."""

    name: str
    error: str = ""
    stock_error: str = ""
    notes: str = ""
    """What hot warned of."""
    parameters: int = 0
    loss: float = 0.0
    loss_off: float = 0.0
    """Of hot's loss from exact's, relative."""
    floor: float = 0.0
    """Relative error of all gradients together, against eager's in fp32: eager's own."""
    stock_off: float = 0.0
    hot_off: float = 0.0
    products: int = 0
    rewritten: int = 0
    uncompressed: int = 0
    held: int = 0
    exact: int = 0
    """Bytes held that are larger than the least worth storing, and stay as they are."""
    reason: str = ""
    """The commonest one for that."""
    worst: float = 1.0
    worst_name: str = ""
    percentile: float = 1.0
    """The fifth, of the parameters' gradient cosines with exact."""
    median: float = 1.0
    worst_norm: float = 0.0
    """Of the exact gradient of ``worst_name``, relative to the largest of the model's."""
    worst_noisy: float = 1.0
    """Cosine of the same gradient with itself by a noisy backward."""
    compared: int = 0
    """Gradients that the cosines are of."""
    firm: int = 0
    """Of these, as many as keep a cosine of ``FIRM`` by a noisy backward."""
    firm_worst: float = 1.0
    firm_worst_name: str = ""
    firm_percentile: float = 1.0
    firm_median: float = 1.0
    not_finite: int = 0
    stock_seconds: float = 0.0
    """Of the first step by stock; by hot: ``seconds``."""
    seconds: float = 0.0
    stock_kernels_ms: float = 0.0
    """Of a step's kernels and copies, one after the other: no host's time, so no neighbour's."""
    hot_kernels_ms: float = 0.0
    stock_launches: int = 0
    hot_launches: int = 0
    stock_peak: int = 0
    """Bytes above what stands between steps."""
    hot_peak: int = 0
    lowered: bool = False
    date: str = ""
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)
    tree: str = ""
    """The commit that was measured."""


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Every parameter's, which are then cleared."""
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def noisy_gradients(built: Built) -> dict[str, Tensor]:
    """Every parameter's, by a backward whose every input comes with an error of ``NOISE``."""
    weights = {p.untyped_storage().data_ptr() for p in built.model.parameters()}

    def disturb(gradient: Tensor) -> Tensor:
        noise = torch.randn_like(gradient)
        return gradient + NOISE * gradient.norm() / noise.norm().clamp_min(1e-30) * noise

    def listen(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(disturb)

    def restored(saved: Tensor) -> Tensor:
        own = saved.untyped_storage().data_ptr() in weights
        if own or not saved.is_floating_point() or saved.nbytes < LARGE:
            return saved
        once = saved[tuple(slice(1) if step == 0 else slice(None) for step in saved.stride())]
        noisy = once * (1 + NOISE * torch.randn_like(once))  # zeros and signs, so masks, stay
        # as it lies in memory: kernels of attention read no bias whose rows begin anywhere
        return (
            torch.empty_strided(once.shape, once.stride(), dtype=once.dtype, device=once.device)
            .copy_(noisy)
            .expand_as(saved)
        )

    handles = [m.register_forward_hook(listen) for m in built.model.modules() if _multiplies(m)]
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, restored):
            loss = built.loss(built.model)
        return gradients(loss, built.model)
    finally:
        for handle in handles:
            handle.remove()


def _multiplies(module: nn.Module) -> bool:
    """It has a matrix of weights of its own, and is no table."""
    weight = getattr(module, "weight", None)
    matrix = isinstance(weight, Tensor) and weight.dim() >= 2
    return matrix and not isinstance(module, (nn.Embedding, nn.EmbeddingBag))


def _warm_up(built: Built) -> None:
    """Some steps away from the initialisation; batch norms' statistics are then kept."""
    optimizer = torch.optim.SGD(built.model.parameters(), lr=RATE, momentum=0.9)
    for _ in range(WARM_UP):
        optimizer.zero_grad()
        built.loss(built.model).backward()
        nn.utils.clip_grad_norm_(built.model.parameters(), 1.0)
        optimizer.step()
    optimizer.zero_grad()


class Arm:
    """The model compiled in one way, or not at all."""

    def __init__(self, built: Built, backend: Any, device: torch.device) -> None:
        self.built, self.device = built, device
        self.forward = torch.compile(built.model, backend=backend) if backend else built.model
        self.kernels_ms, self.launches, self.peak = float("inf"), 0, 0

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
    name: str, make: Callable[[], Built], device: torch.device, lower: bool, gate: Path
) -> Result:
    """What was found of one model; who holds ``gate`` may time."""
    result = Result(name, lowered=lower, date=time.strftime("%Y-%m-%d"))
    torch.manual_seed(0)
    result.environment = environment(device)
    try:
        with device:
            built = make()
        _warm_up(built)
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


def _compare(result: Result, built: Built, device: torch.device, gate: Path) -> None:
    model, reports = built.model, Reports()
    result.parameters = sum(p.numel() for p in model.parameters())
    torch.manual_seed(1)
    loss = built.loss(model)
    exact = gradients(loss, model)
    result.loss = float(loss.detach())
    del loss
    kept = cosines(noisy_gradients(built), exact)
    result.floor = _off(Arm(built, None, device).gradients()[1], exact)
    ours: dict[str, Any] = {"options": OPTIONS}
    if not result.lowered:
        ours = {"options": UNCOMPILED, "inner_compile": run_uncompiled}
    backend = functools.partial(hot, recorder=reports, **ours)
    arms = {"stock": Arm(built, "inductor", device), "hot": Arm(built, backend, device)}
    try:
        if result.lowered:
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
    if result.lowered:
        with FileLock(gate):
            _time(result, arms)


def _off(got: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Relative error of all gradients as one vector."""
    missing = (got.get(n, torch.zeros_like(g)) for n, g in exact.items())
    pairs = zip(missing, exact.values(), strict=True)
    squares = [
        (float(torch.dist(a.float(), b.float())) ** 2, float(b.float().norm()) ** 2)
        for a, b in pairs
    ]
    error, norm = map(sum, zip(*squares, strict=True))
    return math.sqrt(error / norm) if norm else math.nan


def _time(result: Result, arms: dict[str, Arm]) -> None:
    """Peaks, and kernels' times."""
    for arm in arms.values():
        arm.step()
        arm.peak = peak_bytes(arm.step, arm.device)
    for name, arm in arms.items():
        if arm.device.type == "cuda":
            arm.look_at_kernels()
            setattr(result, f"{name}_kernels_ms", arm.kernels_ms)
            setattr(result, f"{name}_launches", arm.launches)
        setattr(result, f"{name}_peak", arm.peak)


def note_gradients(
    result: Result, got: dict[str, Tensor], exact: dict[str, Tensor], kept: dict[str, float]
) -> None:
    """Cosines of ``got`` with ``exact``; ``kept``: those of exact gradients by a noisy backward."""
    largest = max((float(g.norm()) for g in exact.values()), default=0.0)
    found = []
    for name, want in exact.items():
        mine = got.get(name)
        if mine is None or (want.isfinite().all() and not mine.isfinite().all()):
            result.not_finite += 1
        elif want.norm() > 1e-5 * largest:  # less is rounding: a bias in front of a norm, say
            found.append((cosine(mine, want), name))
    if not found:
        return
    found.sort()
    result.worst, result.worst_name = found[0]
    result.percentile, result.median = _summary(found)
    result.worst_norm = float(exact[result.worst_name].norm()) / largest
    result.worst_noisy = kept[result.worst_name]
    firm = [(cosine, name) for cosine, name in found if kept[name] >= FIRM]
    result.compared, result.firm = len(found), len(firm)
    if firm:
        result.firm_worst, result.firm_worst_name = firm[0]
        result.firm_percentile, result.firm_median = _summary(firm)


def _summary(ascending: list[tuple[float, str]]) -> tuple[float, float]:
    """(the fifth percentile, the median)."""
    return ascending[len(ascending) // 20][0], ascending[len(ascending) // 2][0]


def cosines(got: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """By parameter."""
    return {name: cosine(got[name], want) for name, want in exact.items()}


def note_graphs(result: Result, reports: Reports) -> None:
    """What was rewritten and is held, of what was reported."""
    crossing = [c for graph in reports.graphs for c in graph.crossing]
    result.products = sum(len(graph.plan.decisions) for graph in reports.graphs)
    result.rewritten = sum(len(graph.plan.rewritten) for graph in reports.graphs)
    result.uncompressed = sum(c.bytes_before for c in crossing)
    result.held = sum(c.bytes for c in crossing)
    stays = [c for c in crossing if c.scheme == "exact" and not c.packed and c.reason != "small"]
    result.exact = sum(c.bytes for c in stays)
    reasons = sorted({c.reason for c in stays})
    sizes = {r: sum(c.bytes for c in stays if c.reason == r) for r in reasons}
    result.reason = max(sizes, key=lambda r: sizes[r], default="")

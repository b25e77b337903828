"""One step by hot beside one by eager PyTorch: gradients, and what is held between.

Some gradients are nearly nothing: of a bias in front of a norm, say, whose terms cancel. Any error
that is small beside the terms is large beside such a gradient. So eager's own backward runs once
more with noise of 1 %, which is what 8 bits err by: of the norm of the gradient that every layer
with a matrix of weights gets, and of every value of the large activations that it reads. What this
leaves a cosine below 0.95 of is not *firm*. It knows nothing of hot. Cosines of firm gradients
stand beside those of all, never instead of them.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

import torch
from torch import Tensor, nn
from zoo_models import Built

from hot_compile.backend import hot
from hot_compile.config import HotConfig
from hot_compile.record import Reports, run_uncompiled

STEPS, RATE = 3, 1e-3
OPTIONS = {"min_gain": 0, "strict": True, "accept": "off"}
NOISE, FIRM = 0.01, 0.95
"""Relative error put on every layer's gradient and on large activations, and the cosine that a firm
gradient keeps."""
LARGE = HotConfig().memory_min_bytes


@dataclasses.dataclass
class Result:
    """What was found of one model."""

    name: str
    error: str = ""
    loss: float = 0.0
    loss_off: float = 0.0
    """Of hot's loss from exact's, relative."""
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
    worst_norm: float | None = None
    """Of the exact gradient of ``worst_name``, relative to the largest of the model's; None, as in
    what follows: an earlier run, which did not measure it."""
    worst_noisy: float | None = None
    """Cosine of the same gradient with itself by a noisy backward."""
    compared: int | None = None
    """Gradients that the cosines are of."""
    firm: int | None = None
    """Of these, as many as keep a cosine of ``FIRM`` by a noisy backward."""
    firm_worst: float | None = None
    firm_worst_name: str = ""
    firm_percentile: float | None = None
    firm_median: float | None = None
    not_finite: int = 0
    seconds: float = 0.0
    """Of the first step by hot: tracing, passes, and with ``lower`` compiling."""
    lowered: bool = False
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
        return saved * (1 + NOISE * torch.randn_like(saved))  # keeps zeros and signs, so masks, too

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


def warmed(built: Built) -> None:
    """Some steps away from the initialisation; batch norms' statistics are then kept."""
    optimizer = torch.optim.SGD(built.model.parameters(), lr=RATE, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        built.loss(built.model).backward()
        nn.utils.clip_grad_norm_(built.model.parameters(), 1.0)
        optimizer.step()
    optimizer.zero_grad()


def compared(name: str, built: Built, lower: bool) -> Result:
    """One step by hot beside one by eager PyTorch."""
    model = built.model
    warmed(built)
    torch.manual_seed(1)
    loss = built.loss(model)
    exact = gradients(loss, model)
    torch.manual_seed(1)
    kept = cosines(noisy_gradients(built), exact)
    reports = Reports()
    keywords: dict[str, Any] = {} if lower else {"inner_compile": run_uncompiled}
    backend = functools.partial(hot, options=OPTIONS, recorder=reports, **keywords)
    torch._dynamo.reset()
    torch.manual_seed(1)
    begin = time.perf_counter()
    own = built.loss(torch.compile(model, backend=backend))
    got = gradients(own, model)
    result = Result(name, loss=float(loss), seconds=time.perf_counter() - begin, lowered=lower)
    result.loss_off = abs(float(own) - float(loss)) / max(abs(float(loss)), 1e-12)
    note_gradients(result, got, exact, kept)
    note_graphs(result, reports)
    return result


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
            found.append((_cosine(mine, want), name))
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
    return {name: _cosine(got[name], want) for name, want in exact.items()}


def _cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return float(a.flatten() @ b.flatten() / (a.norm() * b.norm() + 1e-30))


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

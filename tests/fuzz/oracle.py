"""Is hot's step as good as exact's? The answer, with a bound that exact's own noise justifies.

Exact is eager mode. Hot runs its finished graphs node by node, or lowered. A gradient may differ
by the rounding of what an integer product reads, which a bound of 14 % (cosine 0.99) covers, and by
no more than that, except where exact itself is as uncertain. That is measured: 1. in fp64 against
the dtype; 2. with weights and inputs changed by a thousandth; 3. with every gradient that reaches a
layer's product or a norm known to 1 %, as any integer product knows it. A bias or a scale before a
batch norm, whose gradient is a sum that cancels, moves by 3 as it moves under hot.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx

from hot_compile.backend import hot
from hot_compile.inspect import GraphReport, Reports
from hot_compile.memory import held_bytes

from .cases import Built, Case, build

BOUND = 0.14
"""Relative error of a gradient: cosine 0.99."""
OUTLIER_BOUND = 0.2
"""Of ordinary channels beside outliers: cosine 0.98."""
PART_FLOOR = 1e-3
"""Of a whole gradient's norm: so much error may fall on rows that are zero in exact's."""
COARSE_BOUND = 0.45
"""Where four bits were asked for: cosine 0.9."""
DRAWS = 3
INPUT_NOISE, PRODUCT_NOISE = 1e-3, 1e-2
FOUR_BIT_NOISE = 0.16
"""What four bits change in a product: 12 % each in g_y's rows and W's columns (absmax / 7 steps,
normal values). ``gx_bits=4`` has it in every layer, so it adds up along a chain of layers."""
PRODUCTS = (
    *("AddmmBackward", "MmBackward", "ConvolutionBackward", "LinearBackward", "BmmBackward"),
    *("NativeBatchNormBackward", "NativeLayerNormBackward"),
)
"""What sums gradients over rows: a norm's scale before another gets a sum that cancels, too."""


@dataclasses.dataclass
class Step:
    """One training step's results."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    held: int = 0
    """Bytes that autograd held between forward and backward."""


@dataclasses.dataclass
class Verdict:
    """What was found of one case."""

    failures: list[str]
    worst: float
    """Largest error relative to what was allowed; above 1 is a failure."""
    counts: dict[str, Counter[str]]


def uncompiled() -> Callable[..., Any]:
    """What stands in for Inductor's lowering: graphs run node by node."""
    from hot_compile.inspect import run_uncompiled

    return run_uncompiled


def step(
    loss: Callable[..., Tensor], model: nn.Module, inputs: tuple[Tensor, ...], noise: float = 0
) -> Step:
    """A forward and backward; ``noise`` disturbs what reaches a layer's product by that much."""
    torch.manual_seed(0)
    model.zero_grad(set_to_none=True)
    inputs = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in inputs)
    value = loss(model, *inputs)
    with disturbed_products(value, noise):
        held = held_bytes(value, model, inputs)
        value.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    gradients |= {f"input {i}": t.grad for i, t in enumerate(inputs) if t.requires_grad}
    return Step(value.detach(), gradients, held)


@contextlib.contextmanager
def disturbed_products(value: Tensor, noise: float) -> Iterator[None]:
    """Every gradient that reaches a layer's product, known only to a relative ``noise``."""
    handles, stack, seen = [], [value.grad_fn] if noise else [], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [parent for parent, _ in node.next_functions]
        if node.name().startswith(PRODUCTS):
            handles.append(node.register_prehook(lambda gs: tuple(disturb(g, noise) for g in gs)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def disturb(x: Tensor | None, noise: float) -> Tensor | None:
    """Every element times ``1 + noise * n``, n normal."""
    return x if x is None else x * (1 + noise * torch.randn_like(x))


def hot_step(
    built: Built, case: Case, lower: bool, steps: int = 1
) -> tuple[Step, list[GraphReport], list[str]]:
    """The last of so many steps under ``backend="hot"``: (results, reports, warnings)."""
    reports, warnings = Reports(), Warnings()
    keywords: dict[str, Any] = {} if lower else {"inner_compile": uncompiled()}
    backend = functools.partial(hot, options=dict(case.options), recorder=reports, **keywords)
    with warnings:
        got = compiled_step(built, backend, case.dynamic, steps)
    return got, reports.graphs, [] if steps > 1 else warnings.messages


def compiled_step(built: Built, backend: Any, dynamic: bool, steps: int = 1) -> Step:
    """The last of so many steps under a backend, compiled afresh."""
    torch._dynamo.reset()
    run = torch.compile(built.loss, backend=backend, dynamic=True if dynamic else None)
    try:
        for _ in range(steps - 1):
            step(run, built.model, built.inputs)
        return step(run, built.model, built.inputs)
    finally:
        torch._dynamo.reset()


class Warnings(logging.Handler):
    """Collects what our package warns of inside ``with``."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        cause = f": {record.exc_info[1]!r}" if record.exc_info else ""
        self.messages.append(record.getMessage() + cause)

    def __enter__(self) -> None:
        logger = logging.getLogger("hot_compile")
        self.propagated, logger.propagate = logger.propagate, False
        logger.addHandler(self)

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger("hot_compile")
        logger.propagate = self.propagated
        logger.removeHandler(self)


def exact_step(built: Built, case: Case, lower: bool) -> Step:
    """The step without us: eager, but as Inductor draws where there are random numbers."""
    if lower:
        return compiled_step(built, "inductor", case.dynamic)
    if built.random:
        plain = functools.partial(_inductor_uncompiled, inner=uncompiled())
        return compiled_step(built, plain, case.dynamic)
    return step(built.loss, built.model, built.inputs)


def _inductor_uncompiled(gm: Any, inputs: Any, inner: Callable[..., Any], **_: Any) -> Any:
    return compile_fx(gm, inputs, inner)


def uncertainty(
    built: Built, exact: Step, four_bits: bool = False
) -> list[tuple[float, dict[str, Tensor]]]:
    """Differences (factor, {gradient: difference}) by which exact itself is uncertain.

    ``four_bits``: also with every product's gradient as uncertain as four bits make it.
    """
    found: list[tuple[float, dict[str, Tensor]]] = []
    model, inputs, base = built.model, built.inputs, exact
    if built.random:
        base = step(built.loss, model, inputs)
    else:
        with contextlib.suppress(Exception):  # not every operator knows fp64 beside its sample
            wide = copy.deepcopy(model).double()
            wide_inputs = tuple(t.detach().double().requires_grad_(t.requires_grad) for t in inputs)
            fine = step(built.loss, wide, wide_inputs)
            found.append((2.0, differences(exact, fine)))
            model, inputs, base = wide, wide_inputs, fine
    for draw in range(DRAWS):
        torch.manual_seed(draw)
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in moved.parameters():
                parameter.copy_(disturb(parameter, INPUT_NOISE))
        x = disturb(inputs[0].detach(), INPUT_NOISE).requires_grad_(inputs[0].requires_grad)
        found.append((1.5, differences(step(built.loss, moved, (x, *inputs[1:])), base)))
        found.append((4.0, differences(step(built.loss, model, inputs, PRODUCT_NOISE), base)))
        if four_bits:
            coarse = step(built.loss, model, inputs, FOUR_BIT_NOISE)
            found.append((1.5, differences(coarse, base)))
    return found


def differences(one: Step, other: Step) -> dict[str, Tensor]:
    """Of the loss and the gradients that both have, where finite."""
    return {
        name: (g.double() - other.gradients[name].double()).nan_to_num(0, 0, 0)
        for name, g in one.gradients.items()
        if g is not None and other.gradients.get(name) is not None
    } | {"loss": (one.loss.double() - other.loss.double()).nan_to_num(0, 0, 0)}


def parts(gradient: Tensor) -> dict[str, Tensor]:
    """Masks: the whole; of a matrix also its rows and columns without outliers, if it has any."""
    masks = {"": torch.ones_like(gradient, dtype=torch.bool)}
    if gradient.dim() < 2 or min(gradient.shape[:2]) < 8:
        return masks
    for dim, name in ((0, " ordinary rows"), (1, " ordinary columns")):
        others = [d for d in range(gradient.dim()) if d != dim]
        norms = gradient.double().square().sum(others, keepdim=True).sqrt()
        ordinary = norms <= 5 * norms.median()
        if not ordinary.all():
            masks[name] = ordinary.expand_as(gradient)
    return masks


def bound_of(case: Case, reports: list[GraphReport]) -> float:
    """Relative error that the options ask for; infinite for methods that lose on purpose."""
    lossy = {"hla8", "int4-naive", "luq", "lbp-wht"}
    options = dict(case.options)
    if options.get("recipe") == "paper" or any(
        str(d.strategy) in lossy for g in reports for d in g.plan
    ):
        return math.inf
    coarse = 4 in (options.get("memory_bits"), options.get("gx_bits"))
    coarse |= "paper" in (options.get("memory"), options.get("recipe"))
    outliers = case.input_tweak != "x" or any(s.tweaks for s in case.stages)
    if coarse:
        return math.inf if outliers else COARSE_BOUND
    return OUTLIER_BOUND if outliers else BOUND


def judge(case: Case, got: Step, exact: Step, noise: list, bound: float) -> tuple[list[str], float]:
    """(failures, largest error relative to the allowed one)."""
    failures, worst = [], 0.0
    rounding = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}[case.dtype]
    rounding += 2 * max((float(d["loss"].abs()) for _, d in noise[:1]), default=0.0)
    if not torch.allclose(got.loss.double(), exact.loss.double(), 1e-4, rounding, True):
        failures.append(f"loss {got.loss.item():.7g}, exact {exact.loss.item():.7g}")
    norms = [float(g.double().norm()) for g in exact.gradients.values() if g is not None]
    floor = 1e-4 * max([n for n in norms if math.isfinite(n)], default=0.0)
    for name, want in exact.gradients.items():
        g = got.gradients[name]
        if want is None or g is None:
            if (want is None) != (g is None) and float((want if g is None else g).abs().max()) > 0:
                failures.append(f"{name}: gradient {g is not None}, exact {want is not None}")
            continue
        if g.shape != want.shape or g.dtype != want.dtype:
            failures.append(f"{name}: {g.dtype} {g.shape}, exact {want.dtype} {want.shape}")
            continue
        if not want.isfinite().all():
            continue
        if not g.isfinite().all():
            failures.append(f"{name}: {int((~g.isfinite()).sum())} of {g.numel()} not finite")
            continue
        error, want = g.double() - want.double(), want.double()
        for part, mask in parts(want).items():
            moves = [c * float((d[name] * mask).norm()) for c, d in noise if name in d]
            size = float((want * mask).norm())
            least = max(bound, OUTLIER_BOUND) if part else bound
            smallest = max(floor, PART_FLOOR * float(want.norm())) if part else floor
            allowed = max([least * size, smallest, *moves])
            off = float((error * mask).norm())
            worst = max(worst, off / max(allowed, 1e-30))
            if off > max(allowed, 1e-30):
                got_part, want_part = (want + error) * mask, want * mask
                cosine = float((got_part * want_part).sum() / (got_part.norm() * size + 1e-300))
                failures.append(
                    f"{name}{part}: error {off:.3g}, allowed {allowed:.3g}, norm {size:.3g}, "
                    f"cosine {cosine:.4f}"
                )
    return failures, worst


def crashes(work: Callable[[], Any]) -> str | None:
    """The error that ``work`` ends with, in one line."""
    try:
        work()
    except Exception as error:
        cause = error.__cause__ or error
        return f"{type(error).__name__}: {str(cause) or str(error)}".split("\n")[0][:300]
    return None


def examine(case: Case, lower: bool = False, steps: int = 1) -> Verdict:
    """Hot's step of the case against exact's; of several the last, after looks have repaired it.

    Raises:
        NotBuilt: the case does not run in eager mode.
    """
    built = build(case)
    try:
        exact = exact_step(built, case, lower)
    except Exception as error:
        cause = error.__cause__ or error
        return Verdict([], 0.0, {"inductor fails": Counter([str(cause)[:300]])})
    try:
        got, reports, warnings = hot_step(built, case, lower, steps)
    except Exception as error:
        plain = "inductor" if lower else functools.partial(_inductor_uncompiled, inner=uncompiled())
        if theirs := crashes(lambda: compiled_step(built, plain, case.dynamic)):
            return Verdict([], 0.0, {"inductor fails": Counter([theirs])})
        message = f"{type(error).__name__}: {error}"
        return Verdict([f"crash: {message[:600]}"], math.inf, {})
    noise = uncertainty(built, exact, dict(case.options).get("gx_bits") == 4)
    failures, worst = judge(case, got, exact, noise, bound_of(case, reports))
    failures += [f"warning: {w[:300]}" for w in warnings]
    failures += [
        f"refused by mistake: {d.reason[:200]}"
        for g in reports
        for d in g.plan
        if "could not" in d.reason
    ]
    return Verdict(failures, worst, counts(reports, got))


def counts(reports: list[GraphReport], got: Step) -> dict[str, Counter[str]]:
    """Tensors by how they are stored and why exactly, layers by strategy and why refused."""
    crossers = [c for g in reports for c in g.crossing]
    layers = [d for g in reports for d in g.plan]
    reported = sum(c.bytes for c in crossers)
    return {
        "graphs": Counter(graphs=len(reports)),
        "stored": Counter(c.scheme for c in crossers),
        "exact because": Counter(c.reason or "-" for c in crossers if c.scheme == "exact"),
        "layers": Counter(str(d.strategy) for d in layers),
        "refused because": Counter(d.reason for d in layers if str(d.strategy) == "exact"),
        "bytes": Counter({"reported": reported, "held": got.held}),
        "accounting": Counter([accounting(reported, got.held) if len(reports) == 1 else "-"]),
    }


def accounting(reported: int, held: int) -> str:
    """Whether what the report says is kept is what autograd keeps."""
    if reported == held:
        return "held as reported"
    return "more is held (views of larger storages)" if held > reported else "less is held"

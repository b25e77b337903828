"""The oracle sees the defects it is there for, and does not cry wolf at harmless rounding.

The step under test is an exact one in which everything that autograd saves is rounded, whoever
reads it: what a backend does that takes any reader to tolerate rounding.
"""

import pytest
import torch
from torch import Tensor

from fuzz.cases import Case, Stage, build
from fuzz.oracle import BOUND, OUTLIER_BOUND, judge, step, uncertainty


def linear(width: int = 128, *tweaks: str) -> Stage:
    return Stage("{0}(x)", (f"nn.Linear({{c}}, {width})",), tweaks)


def mlp(*tweaks: str) -> Stage:
    return Stage("{1}(F.gelu({0}(x)))", ("nn.Linear({c}, 256)", "nn.Linear(256, {c})"), tweaks)


def attention(factor: int) -> tuple[Stage, ...]:
    read = "F.scaled_dot_product_attention(*(t[:, None] for t in x.chunk(3, -1)))[:, 0]"
    first = Stage("{0}(x)", ("nn.Linear({c}, 96)",), (f"{{0}}.weight[:64] *= {factor}",))
    return first, Stage(read), linear(32)


TOKENS, IMAGE, MATRIX = (8, 32, 64), (4, 16, 8, 8), (256, 64)
NEAR = {"loss": "F.mse_loss(torch.tanh(y), torch.tanh(target))", "near": 0.01}

DEFECTS = {
    "equality mask": (TOKENS, (linear(), Stage("x.amax(1)"), linear(16)), 8, {}),
    "scale by the largest": (TOKENS, (linear(), Stage("x / x.max()"), linear(16)), 8, {}),
    "largest norm": (TOKENS, (linear(),), 8, {"loss": "y.norm(p=float('inf'), dim=-1).mean()"}),
    "root": (TOKENS, (linear(), Stage("(F.relu(x) + 1e-4).pow(0.5)"), linear(16)), 4, {}),
    "pole": (TOKENS, (linear(), Stage("1 / (F.relu(x) + 1e-2)"), linear(16)), 8, {}),
    "square pole": (TOKENS, (linear(), Stage("1 / (x.square() + 1e-3)"), linear(16)), 4, {}),
    "difference with a target": (MATRIX, (linear(),), 4, NEAR),
    "absolute difference": (
        MATRIX,
        (linear(),),
        4,
        {"loss": "F.huber_loss(y, target, delta=1e-3)"},
    ),
    "steep": (TOKENS, (linear(), Stage("torch.sin(30 * x)"), linear(16)), 4, {}),
    "steeper": (TOKENS, (linear(), Stage("torch.sin(300 * x)"), linear(16)), 8, {}),
    "batch norm of large means": (
        MATRIX,
        (linear(128, "{0}.bias *= 1000"), Stage("{0}(x)", ("nn.BatchNorm1d({c})",)), linear(16)),
        8,
        {},
    ),
    "outlier channel": (TOKENS, (mlp("{0}.bias[7] += 100"),), 4, {}),
    "outlier input": (TOKENS, (mlp(),), 4, {"input_tweak": "x + 100 * (torch.arange(64) == 9)"}),
    "large logits": (TOKENS, attention(20), 8, {}),
}

HARMLESS = {
    "mlp": (TOKENS, (mlp(), mlp()), {}),
    "layer norm": (TOKENS, (Stage("{0}(x)", ("nn.LayerNorm({c})",)), mlp()), {}),
    "gates": (TOKENS, (linear(), Stage("F.glu(x)"), linear(24)), {}),
    "attention": (TOKENS, attention(1), {}),
    "batch norm and a bias it cancels": (
        IMAGE,
        (
            Stage("{0}(x)", ("nn.Conv2d({c}, 16, 3, padding=1)",)),
            Stage("F.relu({0}(x))", ("nn.BatchNorm2d({c})",)),
            Stage("{0}(x)", ("nn.Conv2d({c}, 8, 1)",)),
        ),
        {},
    ),
    "bf16": (TOKENS, (mlp(), mlp()), {"dtype": "bfloat16"}),
}


def rounded(x: Tensor, bits: int) -> Tensor:
    """In groups of 128 consecutive elements, between the least and the largest of each."""
    if not x.is_floating_point() or x.is_leaf or x.numel() % 128 or bits == 32:
        return x
    groups = x.detach().float().reshape(-1, 128)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).clamp_min(1e-6).bfloat16().float()
    return (((groups - low) / scale).round() * scale + low).view(x.shape).to(x.dtype)


def judged(case: Case, bits: int, bound: float) -> list[str]:
    """Failures of a step that stores everything rounded."""
    built = build(case)
    exact = step(built.loss, built.model, built.inputs)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: rounded(x, bits), lambda x: x):
        got = step(built.loss, built.model, built.inputs)
    return judge(case, got, exact, uncertainty(built, exact), bound)[0]


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_seen(name):
    shape, stages, bits, settings = DEFECTS[name]
    assert judged(Case(0, shape, stages, **settings), bits, OUTLIER_BOUND)


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_rounding_is_not_reported(name):
    shape, stages, settings = HARMLESS[name]
    assert judged(Case(0, shape, stages, **settings), 8, BOUND) == []


@pytest.mark.parametrize("name", [*DEFECTS, *HARMLESS])
def test_exact_agrees_with_itself(name):
    shape, stages, *_, settings = (DEFECTS | HARMLESS)[name]
    assert judged(Case(0, shape, stages, **settings), 32, BOUND) == []


@pytest.mark.parametrize("factor", [-1.0, 0.0, 1.3, 45_000.0, float("nan")])
def test_a_wrong_gradient_is_seen(factor):
    built = build(case := Case(0, TOKENS, (mlp(),)))
    exact = step(built.loss, built.model, built.inputs)
    got = step(built.loss, built.model, built.inputs)
    got.gradients["m0.weight"] = got.gradients["m0.weight"] * factor
    assert judge(case, got, exact, uncertainty(built, exact), OUTLIER_BOUND)[0]

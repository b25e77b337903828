"""A random model as a value: drawn from a seed, written as source, built from that source."""

from __future__ import annotations

import copy
import dataclasses
import linecache
import math
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import vocabulary as words
from .operators import Operator, Reader, database, sample_call, samples

DRAWS = 8
"""Losses that tell whether a case draws random numbers: a few channels may be kept twice alike."""
LARGEST = 2**15
"""Elements of the largest tensor: two hundred models are to take two minutes."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """One step of the model: ``x = forward``, with the modules it needs."""

    forward: str
    modules: tuple[str, ...] = ()
    tweaks: tuple[str, ...] = ()
    """Statements on the modules, before the first step: an outlier channel, large logits."""
    fits: bool = False
    """The module has ``fit(x)``, to be called with what it will read."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One model, its input, loss and options; everything else follows from them."""

    seed: int
    shape: tuple[int, ...]
    stages: tuple[Stage, ...]
    loss: str = words.LOSSES[0]
    dtype: str = "float32"
    layout: str = "contiguous"
    wants_input_gradient: bool = False
    input_tweak: str = "x"
    dynamic: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    near: float = 0.01
    """How far the target is from the first output, in its deviations: small as near convergence."""

    @property
    def name(self) -> str:
        """On one line."""
        parts = [str(self.shape), self.dtype, self.layout, self.input_tweak]
        parts += ["dynamic"] if self.dynamic else []
        parts += [str(s.modules or s.forward) for s in self.stages]
        return " | ".join([*parts, self.loss, str(dict(self.options))])

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Case:
        """The case that ``to_json`` gave."""
        stages = tuple(
            Stage(s["forward"], tuple(s["modules"]), tuple(s["tweaks"]), s["fits"])
            for s in data["stages"]
        )
        options = tuple((key, value) for key, value in data["options"])
        return cls(**{**data, "shape": tuple(data["shape"]), "stages": stages, "options": options})


class NotBuilt(Exception):
    """The case cannot be run even in eager mode."""


def source(case: Case) -> str:
    """The case as a program that defines ``model``, ``x``, ``target`` and ``loss``."""
    inits, forwards, fits, tweaks = [], [], [], []
    x, count = _input(case), 0
    for stage in case.stages:
        names = [f"self.m{count + i}" for i in range(len(stage.modules))]
        made = [m.replace("{c}", str(channels(x))) for m in stage.modules]
        count += len(made)
        inits += [f"{name} = {m}" for name, m in zip(names, made, strict=True)]
        tweaks += [tweak.format(*names).replace("self.", "model.") for tweak in stage.tweaks]
        line = f"x = {stage.forward.format(*names)}"
        fits += [f"{name}.fit(x)" for name in names if stage.fits] + [line]
        forwards.append(line)
        x = apply(stage, x)
    last = max((i for i, line in enumerate(fits) if ".fit(" in line), default=-1)
    return "\n".join(_program(case, inits, forwards, fits[: last + 1], tweaks))


def _program(case: Case, inits, forwards, fits, tweaks) -> list[str]:
    methods = [
        ("def __init__(self):", ["super().__init__()", *inits]),
        ("def forward(self, x):", [*forwards, "return x"]),
        *([("def fit(self, x):  # operators within their domain", fits)] if fits else []),
    ]
    lines = ["class Model(nn.Module):"]
    for head, body in methods:
        lines += [f"    {head}", *(f"        {line}" for line in body)]
    dtype = f"torch.{case.dtype}"
    lines += ["", f"torch.manual_seed({case.seed})", f"x = torch.randn({case.shape})"]
    lines += [f"x = {case.input_tweak}"] if case.input_tweak != "x" else []
    lines += ["model = Model()", "with torch.no_grad():"]
    lines += [f"    {line}" for line in [*tweaks, *(["model.fit(x)"] if fits else []), "pass"]]
    if case.dtype != "float32":
        lines += [f"model, x = model.to({dtype}), x.to({dtype})"]
    if case.layout == "channels_last":
        memory = "memory_format=torch.channels_last"
        lines += [f"model, x = model.to({memory}), x.to({memory})"]
    if case.layout == "transposed":
        lines += ["x = x.transpose(0, -1).contiguous().transpose(0, -1)"]
    lines += ["with torch.no_grad(), torch.random.fork_rng():", "    y = model(x)"]
    lines += [f"    target = y + {case.near} * y.float().std(correction=0) * torch.randn_like(y)"]
    lines += [f"x.requires_grad_({case.wants_input_gradient})", ""]
    return [
        *lines,
        "def loss(model, x, target):",
        "    y = model(x)",
        f"    return {case.loss}",
        "",
    ]


@dataclasses.dataclass
class Built:
    """What a case's program defines."""

    model: nn.Module
    inputs: tuple[Tensor, Tensor]
    loss: Any
    text: str
    random: bool
    """Whether it draws random numbers: two ways to compile it may then draw others."""


def namespace() -> dict[str, Any]:
    """The names that a case's program may use."""
    return {"torch": torch, "nn": nn, "F": F, "Operator": Operator, "Reader": Reader}


def build(case: Case) -> Built:
    """The case, ready to run.

    Raises:
        NotBuilt: no training step of it runs in eager mode.
    """
    try:
        text = source(case)
        filename = f"fuzz_case_{case.seed}"
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        names = namespace()
        exec(compile(text, filename, "exec"), names)
        model, x, target, loss = (names[key] for key in ("model", "x", "target", "loss"))
        twin, values = copy.deepcopy(model), []
        for seed in range(DRAWS):
            torch.manual_seed(seed)
            values.append(loss(twin, x, target))
        values[0].backward()
        x.grad = None
    except Exception as error:
        raise NotBuilt(f"{type(error).__name__}: {error}") from error
    return Built(model, (x, target), loss, text, len({float(v.detach()) for v in values}) > 1)


def _input(case: Case) -> Tensor:
    torch.manual_seed(case.seed)
    return eval(case.input_tweak, {"x": torch.randn(case.shape), "torch": torch})


def channels(x: Tensor) -> int:
    """Of an image [N, C, H, W] the second dimension, else the last."""
    return x.shape[1] if x.dim() == 4 else x.shape[-1]


@torch.no_grad()
def apply(stage: Stage, x: Tensor) -> Tensor:
    """``x`` after the stage, with fresh modules, for the sake of its shape and range.

    Raises:
        NotBuilt: it cannot be applied, or gives nothing a model could go on with.
    """
    names = namespace() | {"x": x}
    try:
        made = [eval(m.replace("{c}", str(channels(x))), names) for m in stage.modules]
        names.update({f"made{i}": module for i, module in enumerate(made)})
        if stage.fits:
            made[0].fit(x)
        y = eval(stage.forward.format(*(f"made{i}" for i in range(len(made)))), names)
    except Exception as error:
        raise NotBuilt(f"{type(error).__name__}: {error}") from error
    if not (isinstance(y, Tensor) and y.is_floating_point() and 1 < y.numel() <= LARGEST):
        raise NotBuilt("not a tensor that a layer could read")
    if not y.isfinite().all() or not 1e-3 < float(y.float().std()) < 1e4:
        raise NotBuilt("out of range")
    return y


def draw(seed: int) -> Case:
    """The seed's case: half of them random nets, half about one operator of the database."""
    chance = random.Random(seed)
    for _ in range(100):
        case = _net(seed, chance) if chance.random() < 0.5 else _around_operator(seed, chance)
        case = dataclasses.replace(case, **_settings(chance, case))
        try:
            build(case)
        except NotBuilt:
            continue
        return case
    raise AssertionError(f"seed {seed}: no model in a hundred tries")


def _settings(chance: random.Random, case: Case) -> dict[str, Any]:
    floats = ["float32"] * 6 + ["bfloat16", "float16"]
    layouts = ["contiguous"] * 3 + ["transposed"]
    layouts += ["channels_last"] * 3 if len(case.shape) == 4 else []
    options = chance.choice(
        [{}] * 8
        + [{"recipe": "int8"}, {"memory_budget": 0.5}, {"recompute": False}, {"memory_bits": 8}]
        + [{"recipe": "fast", "lqs": "off"}, {"recipe": "paper"}, {"memory": "paper"}]
        + [{"memory_bits": 4}, {"gx_bits": 4}, {"keep_head": False}, {"memory": "off"}]
    )
    if chance.random() < 0.8:
        options = {"min_gain": 0, **options}
    return {
        "dtype": chance.choice(floats),
        "layout": chance.choice(layouts),
        "wants_input_gradient": chance.random() < 0.4,
        "dynamic": chance.random() < 0.15,
        "options": tuple({"memory_min_bytes": 0, **options}.items()),
        "near": chance.choice([0.01, 0.03, 1.0]),
        "input_tweak": chance.choice(["x"] * 6 + _outliers(case.shape)),
    }


def _outliers(shape: tuple[int, ...]) -> list[str]:
    """Inputs with a channel far off, with rows far larger than others, with a large mean."""
    dim = 1 if len(shape) == 4 else len(shape) - 1
    one = [f"torch.arange({shape[dim]}) == {shape[dim] // 3}", *["None"] * (len(shape) - 1 - dim)]
    mask = f"({one[0]})" + "".join("[..., None]" for _ in one[1:])
    return [f"x + 100.0 * {mask}", f"x * (1 + 100.0 * {mask})", "x + 10.0", "x + 100.0", "x * 10"]


def _net(seed: int, chance: random.Random) -> Case:
    batch = chance.choice([1, 2, 3, 4, 8, 16])
    width = chance.choice([16, 32, 33, 48, 64, 96, 128])
    kind = chance.choice(["tokens", "tokens", "image", "image", "matrix"])
    shape: tuple[int, ...] = {
        "tokens": (batch, chance.choice([1, 4, 7, 16, 17, 32]), width),
        "matrix": (batch * chance.choice([1, 8]), width),
        "image": (batch, chance.choice([3, 4, 8, 16]), *chance.choices([4, 7, 8, 9, 16], k=2)),
    }[kind]
    stages: list[Stage] = []
    x = torch.randn(shape)
    for _ in range(chance.randint(2, 6)):
        stage = _stage(chance, x)
        try:
            x = apply(stage, x)
        except NotBuilt:
            continue
        stages.append(stage)
    if chance.random() < 0.7:
        head = ["nn.Conv2d({c}, 8, 1)"] if x.dim() == 4 else ["nn.Linear({c}, 24)"]
        stages.append(Stage("{0}(x)", tuple(head)))
    return Case(seed, shape, tuple(stages), chance.choice(words.LOSSES))


def _stage(chance: random.Random, x: Tensor) -> Stage:
    if chance.random() < 0.15:
        return _elementwise(chance)
    plain = chance.choices(
        [words.POINTWISE, words.STEEP, words.DIFFERENCES, words.EXTREMES, words.ROWS],
        weights=[5, 1, 1, 1, 2],
    )[0]
    if x.dim() == 4:
        tables = [words.CONVOLUTIONS, words.IMAGES, plain]
    elif x.dim() == 3:
        tables = [words.LAYERS, words.LAYERS, words.NORMS, words.ATTENTION, words.TOKENS, plain]
        tables += [plain]
    else:
        tables = [words.LAYERS, words.LAYERS, words.NORMS + words.MATRIX, plain, plain]
    word = chance.choice(chance.choice(tables))
    return Stage(word) if isinstance(word, str) else _layer(chance, *word)


def _layer(chance: random.Random, modules: list[str], forward: str) -> Stage:
    tweak = []
    if chance.random() < 0.15 and not modules[0].startswith(("nn.Conv", "nn.Multi", "nn.PReLU")):
        scale = chance.choice([30, 100])
        tweak = chance.choice(
            [[f"{{0}}.weight[3] *= {scale}"], ["{0}.weight.mul_(4)"]]
            + ([] if "bias=False" in modules[0] or "RMS" in modules[0]
               else [[f"{{0}}.bias[3] += {scale}"], ["{0}.bias.add_(10)"]])
        )  # fmt: skip
    return Stage(forward, tuple(modules), tuple(tweak))


def elementwise() -> list[str]:
    """The database's operators of one tensor, element by element."""
    kind = "UnaryUfuncInfo"
    return [name for name, op in database().items() if type(op).__name__ == kind]


def _elementwise(chance: random.Random) -> Stage:
    name = chance.choice(elementwise())
    low, high = database()[name].domain
    inside = "x"
    if low is not None and high is not None:
        inside = f"{low} + {high - low} * torch.sigmoid(x)"
    elif low is not None:
        inside = f"{low + 0.1} + F.softplus(x)"
    return Stage(f"{{0}}({inside}).view(x.shape)", (f"Operator({name!r}, 0)",))


def _around_operator(seed: int, chance: random.Random) -> Case:
    name = chance.choice(sorted(database()))
    found = samples(name)
    if not found:
        return _around_operator(seed, chance)
    return around(name, chance.randrange(len(found)), seed, chance)


def around(name: str, index: int, seed: int, chance: random.Random) -> Case:
    """A model in which the operator's sample call reads a Linear's output.

    At the end, before another layer, or between MLPs.
    """
    _, tensors, hole = sample_call(name, index, torch.float32)
    shape = tensors[hole].shape
    size = math.prod(shape)
    rows = size // shape[-1] if len(shape) > 1 and size // shape[-1] <= 64 else min(size, 16)
    rows = chance.choice([rows, max(rows, 16)])
    features = max(32, -(-rows // 16) * 16)
    before, after = chance.choice([(0, 0), (0, 1), (1, 1), (1, 0)])
    width = 16 if after else 0
    read = f"Reader({name!r}, {index}, x.shape, width={width})".replace(
        "x.shape", str((rows, features))
    )
    mlp = ("nn.Linear({c}, 64)", "nn.Linear(64, {c})")
    stages = [Stage("{1}(F.gelu({0}(x)))", mlp)] * before
    stages += [Stage("{0}(x)", (read,), fits=True)]
    stages += [Stage("{1}(F.gelu({0}(x)))", ("nn.Linear({c}, 64)", "nn.Linear(64, 24)"))] * after
    plain = [words.LOSSES[0], "y.float().square().mean()"]
    return Case(seed, (rows, features), tuple(stages), chance.choice(plain))

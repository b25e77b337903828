"""Every block of code in the manual is run here, or names the test that runs its like.

``torch.compile`` reads its options and gives back what it was given, unless ``slow`` looks inside:
that models train so is what the other tests are for.
"""

import functools
import re
import shlex
import typing
from pathlib import Path

import pytest
import torch
import typer
from torch import nn
from torch.nn import functional as F

import hot_compile
from hot_compile.cli import app
from hot_compile.config import HotConfig, option_names

ROOT = Path(__file__).parent.parent
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "recipes").glob("*.md")),
    ROOT / "examples" / "README.md",
]
ELSEWHERE = {
    "TrainingArguments(": "test_trainers.py",
    "SFTConfig(": "test_upstream.py",
    "TorchDynamoPlugin(": "test_accelerate_sharded.py",
    ".fit(": "test_trainers_whole.py",
    "fully_shard(": "test_two_processes.py",
    "UNet2DModel(": "test_trainers_whole.py",
    "get_peft_model(": "test_lora.py",
    "add_adapter(": "test_examples.py",
    "torchao.optim": "test_trainers_whole.py",
    "compress_boundaries(": "test_boundaries.py",
    "certificate(": "test_certificate.py",
}
"""What needs a library or several processes, by what is in the block: a test of it."""
WIDTH, WORDS = 16, 11


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(x)))


class Output(typing.NamedTuple):
    loss: torch.Tensor | None
    logits: torch.Tensor


class Model(nn.Module):
    """Of features, or of words as Hugging Face's models are."""

    def __init__(self):
        super().__init__()
        self.words, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WORDS)
        self.layers, self.model = self.blocks, self

    def __setattr__(self, name, value):
        own = name in ("layers", "model")
        object.__setattr__(self, name, value) if own else super().__setattr__(name, value)

    def forward(self, x=None, input_ids=None, labels=None):
        found = self.words(input_ids) if x is None else x
        for block in self.blocks:
            found = block(found)
        found = self.head(found)
        if x is not None:
            return found
        loss = None if labels is None else F.cross_entropy(found.flatten(0, 1), labels.flatten())
        return {"loss": loss} if labels is not None else Output(loss, found)

    def disable_input_require_grads(self):
        pass

    def gradient_checkpointing_enable(self, settings=None):
        pass


def names():
    """What the manual's blocks take for granted."""
    torch.manual_seed(0)
    model, x, y = Model(), torch.randn(8, WIDTH), torch.randint(WORDS, (8,))
    ids = torch.randint(WORDS, (2, 6))
    given = {
        **{"torch": torch, "hot_compile": hot_compile, "F": F, "model": model, "x": x, "y": y},
        **{"ids": ids, "labels": ids, "criterion": F.cross_entropy, "loss_fn": F.cross_entropy},
        **{"batches": [(x, y)] * 2, "batch": (x, y), "dpo": lambda *given: None},
    }
    given["train_step"] = lambda batch: F.cross_entropy(model(batch[0]), batch[1]).backward()
    return given


def blocks(languages):
    for page in PAGES:
        text = page.read_text()
        for number, found in enumerate(re.finditer(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)):
            if found[1] in languages:
                yield pytest.param(found[2], id=f"{page.relative_to(ROOT)}:{number}")


def elsewhere(text):
    """Whether other tests have what is in ``text``."""
    found = {part: test for part, test in ELSEWHERE.items() if part in text}
    for part, test in found.items():
        assert part.rstrip("(") in (ROOT / "tests" / test).read_text()
    return bool(found)


def looks_inside(text):
    return re.search(r"explain\(|memory_report\(|calibrate\(", text)


@pytest.fixture
def uncompiled(monkeypatch):
    """``torch.compile`` reads what it is given, no more."""

    def compile_(model=None, *, backend="inductor", options=None, **more):
        if model is None:
            return functools.partial(compile_, backend=backend, options=options, **more)
        assert backend == "hot"
        ours = {key: value for key, value in (options or {}).items() if key in option_names()}
        HotConfig.from_options(ours)
        return model

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(nn.Module, "compile", lambda self, **given: compile_(self, **given))


@pytest.mark.parametrize("text", [b for b in blocks(["python"]) if not looks_inside(b.values[0])])
def test_python(text, uncompiled, tmp_path, monkeypatch):
    if elsewhere(text):
        return
    monkeypatch.chdir(tmp_path)
    exec(text, names())


@pytest.mark.slow
@pytest.mark.parametrize("text", [b for b in blocks(["python"]) if looks_inside(b.values[0])])
def test_python_that_looks_inside(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = names()
    if "loss_fn=" not in text:
        given["loss_fn"] = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
    exec(text, given)


def lines(text):
    whole = text.replace("\\\n", " ")
    return [line for line in whole.splitlines() if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("text", [*blocks(["sh", "bash"])])
def test_commands(text):
    """Their options are those that the command has."""
    variables = {}
    for line in lines(text):
        if assigned := re.fullmatch(r'(\w)="(.*)"', line):
            variables[f"${assigned[1]}"] = assigned[2]
            continue
        for name, value in variables.items():
            line = line.replace(name, value)
        words = shlex.split(line, comments=True)
        if words[0] == "pip" or "..." in words:
            continue
        if words[0] == "python":
            options_exist(ROOT / words[1], words[2:])
        else:
            start = words.index("hot_compile") if "hot_compile" in words else 0
            assert words[start] in ("hot-compile", "hot_compile"), line
            parses(*words[start + 1 :])


def parses(name, *given):
    """The command takes these arguments; nothing runs."""
    command = typer.main.get_command(app).commands[name]
    command.make_context(name, list(given))


def options_exist(script, given):
    text = script.read_text() + (ROOT / "examples" / "common.py").read_text()
    for option in (word for word in given if word.startswith("--")):
        name = option.removeprefix("--")
        assert option in text or re.search(rf"\b{name.replace('-', '_')}\b\s*[:=]", text), option

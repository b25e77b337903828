"""One script, one plan: whatever the order in which sets and dictionaries give what they hold."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hot_compile import explain

PROGRAM = """
import contextlib, io, json, sys
import torch
import test_conv_models, test_models
from hot_compile import explain
digests = {}
for name in sys.argv[1:]:
    torch.manual_seed(0)
    makers = {**test_models.MODELS, "bert": test_models.bert}
    model, inputs = makers[name]() if name in makers else test_conv_models.build(name)
    with contextlib.redirect_stdout(io.StringIO()):
        options = {"min_gain": 0, "memory_min_bytes": 0, "head_min_bytes": 0}
        digests[name] = explain(model, *inputs, options=options).digest
print(json.dumps(digests))
"""


def test_explain_says_by_which_rates_and_which_plan_it_is():
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    x = torch.randn(64, 64)
    found = explain(model, x, options={"min_gain": 0})
    exact = explain(model, x, options={"recipe": "exact"})
    assert f"plan {found.digest}" in str(found)
    assert "rates: the table's of a CPU" in str(found)
    assert found.to_json()["graphs"][0]["plan"]["rates"][0].startswith("the table's")
    assert found.digest == explain(model, x, options={"min_gain": 0}).digest != exact.digest


def digests(*names):
    """Of two processes that run at once, with other seeds of Python's hashes."""
    tests = str(Path(__file__).parent)
    command = [sys.executable, "-c", PROGRAM, *names]
    started = [
        subprocess.Popen(
            command,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": tests},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    said = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    return [json.loads(text) for text in said]


@pytest.mark.parametrize(
    "names",
    [
        ("gpt2_conv1d",),
        pytest.param(
            (
                "bert",
                "resnet18",
                "vit_tiny",
                "mixer",
                "swin_tiny",
                "efficientnetv2_s",
                "convnext_tiny",
            ),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_processes_side_by_side_come_to_one_plan(names):
    first, second = digests(*names)
    assert first == second
    assert len({*first.values()}) == len(names)


ON_A_GPU = """
import contextlib, io, sys
import timm, torch, transformers
from hot_compile import explain
name, batch = sys.argv[1:]
torch.manual_seed(0)
if name.endswith("Config"):
    config = getattr(transformers, name)()
    model = transformers.AutoModelForCausalLM.from_config(config)
    x = torch.randint(1000, (int(batch), 512))
else:
    model, x = timm.create_model(name), torch.randn(int(batch), 3, 224, 224)
with contextlib.redirect_stdout(io.StringIO()), torch.autocast("cuda", torch.bfloat16):
    found = explain(model.cuda().train(), x.cuda())
print(found.digest)
"""
MODELS = {
    "efficientnet_b0": 128,
    "swin_base_patch4_window7_224": 48,
    "BertConfig": 32,
    "GPT2Config": 8,
    "OPTConfig": 8,
    "vit_base_patch16_224": 128,
    "convnext_base": 48,
    "resnet50": 128,
    "regnety_032": 64,
    "mixer_b16_224": 64,
}


@pytest.mark.gpu
def test_ten_models_come_to_one_plan_beside_nineteen_other_processes():
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", ON_A_GPU, name, str(batch)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, batch in MODELS.items()
        for seed in ("1", "2")
    ]
    said = [run.communicate()[0] for run in runs]
    assert all(run.returncode == 0 for run in runs)
    assert said[::2] == said[1::2]
    assert len({*said}) == len(MODELS)

"""One script, one plan: whatever the order in which sets and dictionaries give what they hold."""

import contextlib
import io
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
import json, sys
from quick import quick_compiling, strict_by_default
from test_one_plan import digests
with quick_compiling(), strict_by_default():
    print(json.dumps(digests(sys.argv[1:])))
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


def digests(names):
    """By name, of models of the tests."""
    import test_conv_models
    import test_models

    makers, found = {**test_models.MODELS, "bert": test_models.bert}, {}
    for name in names:
        torch.manual_seed(0)
        model, inputs = makers[name]() if name in makers else test_conv_models.build(name)
        with contextlib.redirect_stdout(io.StringIO()):
            options = {"min_gain": 0, "memory_min_bytes": 0, "head_min_bytes": 0}
            found[name] = explain(model, *inputs, options=options).digest
    return found


def both_digests(names):
    """Of this process, and of one that runs at once, with another seed of Python's hashes."""
    tests = str(Path(__file__).parent)
    paths = os.pathsep.join([tests, os.path.join(tests, "passes"), os.path.join(tests, "runtime")])
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *names],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        mine = digests(names)
        said = other.communicate()[0]
    assert other.returncode == 0
    return mine, json.loads(said)


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
    first, second = both_digests(names)
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

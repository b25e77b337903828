"""What Inductor keeps on disk: the next process takes it for the same options and profile."""

import json
import subprocess
import sys

import torch
from own_cache import own_cache
from torch import nn

from hot_compile import calibrate

SCRIPT = """
import json, shutil, sys, torch
from torch._dynamo.utils import counters
path = sys.argv[1]
for options, profile in map(json.loads, sys.argv[2:]):
    options = {"min_gain": 0, "keep_head": False, **options}
    if profile:
        shutil.copy(profile, path)
        options["profile"] = path
    counters.clear()
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 64))
    torch.compile(model, backend="hot", options=options)(torch.randn(40, 64)).sum().backward()
    seen = counters["aot_autograd"]
    value = model[0].weight.grad.sum().item()
    print(seen["autograd_cache_hit"], seen["autograd_cache_miss"], value)
"""
HIT, MISS = (1, 0), (0, 1)
UNDER_RUN = ("-m", "hot_compile", "run")


def test_caches_hit_for_the_same_options_and_profile_and_miss_for_others(
    tmp_path, calibrated_node_by_node
):
    """A profile counts by its content: its path is always the same here.

    The listener of ``hot-compile run``, which is of its process, is no part of the keys.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
    found = calibrate(
        model, [torch.randn(40, 64)], lambda m, b: m(b).square().mean(), progress=False
    )
    one, other, env = tmp_path / "one.json", tmp_path / "other.json", own_cache(tmp_path / "cache")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    found.save(one)
    data = found.to_json()
    data["layers"]["1"]["grad_weight"]["int8"]["error"] = 0.9
    other.write_text(json.dumps(data))

    def run(*steps, under=()):
        arguments = [json.dumps([options, profile and str(profile)]) for options, profile in steps]
        done = subprocess.run(
            [sys.executable, *under, str(script), str(tmp_path / "profile.json"), *arguments],
            capture_output=True, text=True, env=env, check=True,
        )  # fmt: skip
        assert "pickle" not in done.stderr
        lines = [line.split() for line in done.stdout.splitlines()]
        return [((int(hits), int(misses)), value) for hits, misses, value in lines]

    hot, int8, profiled = ({"recipe": "hot"}, None), ({"recipe": "int8"}, None), ({}, one)
    first = run(hot, profiled)
    assert [seen for seen, _ in first] == [MISS, MISS]
    second = run(hot, profiled, int8, ({}, other), under=UNDER_RUN)
    assert second[:2] == [(HIT, value) for _, value in first]  # bit-equal gradients
    assert [seen for seen, _ in second[2:]] == [MISS, MISS]

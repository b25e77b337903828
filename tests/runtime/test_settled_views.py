"""What Inductor reads through a view is what it wrote: tables of attention's biases."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import absent_gpu


def test_no_view_of_memory_is_older_than_its_layout(tmp_path):
    program = Path(absent_gpu.__file__)
    said = subprocess.run(
        [sys.executable, program, "biased"],
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr[-2000:]
    assert json.loads(said.stdout)["graphs"] == [["forward", ""], ["backward", ""]]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["hot", "inductor"])
def test_the_gradient_of_a_table_of_biases(backend):
    torch._dynamo.reset()
    with torch.device("cuda"):
        model, loss = absent_gpu.biased()
    if backend == "inductor":  # which the mend reaches once hot has compiled anything
        torch.compile(torch.nn.Linear(4, 4, device="cuda"), backend="hot")(
            torch.randn(4, 4, device="cuda")
        ).sum().backward()
    loss(model).backward()
    exact = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    compiled = torch.compile(model, backend=backend)
    loss(compiled).backward()
    for name, parameter in model.named_parameters():
        off = (parameter.grad - exact[name]).norm() / exact[name].norm()
        assert off < 0.1, name  # what storing in 8 bits and more rounds

"""What only a GPU's code shows when it is made: lowered for one, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("absent_gpu.py")


@pytest.mark.parametrize(
    "arguments", [(), *(pytest.param(("--kernels",), marks=pytest.mark.slow),)], ids=str
)
def test_blocks_are_lowered_for_a_gpu(arguments, tmp_path):
    settings = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path)}
    said = subprocess.run(
        [sys.executable, PROGRAM, *arguments],
        env=os.environ | settings, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr[-2000:]
    result = json.loads(said.stdout)
    assert result["error"] == ""
    assert [side for side, _ in result["graphs"]] == ["forward", "backward"]
    for side, trace in result["graphs"]:
        assert not trace, f"{side}: {trace}"

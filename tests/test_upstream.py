"""The patches for other projects: each applies to the version it names, and does what it is for."""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PATCHES = sorted((Path(__file__).parent.parent / "docs" / "upstream").glob("*.patch"))
ACCELERATE = """
import pickle
import pytest
from accelerate.utils import DynamoBackend, TorchDynamoPlugin

member = DynamoBackend("HOT")
assert member is DynamoBackend("HOT") is pickle.loads(pickle.dumps(member))
assert member == "HOT" and member != DynamoBackend.NO
assert TorchDynamoPlugin(backend="hot").to_kwargs()["backend"] == "hot"
with pytest.raises(ValueError, match="not a valid DynamoBackend"):
    DynamoBackend("NOTHING")
"""
TRL = """
import pytest
from trl import SFTConfig

text = '{"recipe": "fast"}'
config = SFTConfig(output_dir="out", use_cpu=True, bf16=False, torch_compile_options=text)
assert config.torch_compile_options == {"recipe": "fast"}
with pytest.raises(ValueError, match="cannot be used together"):
    SFTConfig(output_dir="out", torch_compile_options=text, torch_compile_mode="default")
"""
TORCHTITAN = """
from types import SimpleNamespace
import torch
from torch import nn
from torchtitan.config.configs import CompileConfig
from torchtitan.distributed.compile import apply_compile

class Block(nn.Module):
    def compile(self, **keywords):
        self.told = keywords

model = nn.Module()
model.layers = nn.ModuleDict({"0": Block()})
config = CompileConfig(enable=True, backend="hot", options='{"keep_head": false}')
apply_compile(model, compile_config=config, parallel_dims=SimpleNamespace(tp_enabled=False))
assert model.layers["0"].told["options"] == {"keep_head": False}
assert model.layers["0"].told["backend"] == "hot"
"""
TRIED = {"accelerate": ACCELERATE, "trl": TRL, "torchtitan": TORCHTITAN}


def patched(patch, folder):
    """A copy of the installed package, patched; skips where it, or its version, is another."""
    package, version = re.match(r"Against (\S+) ([\d.]+\d)", patch.read_text()).groups()
    found = importlib.util.find_spec(package)
    if found is None or importlib.metadata.version(package) != version:
        pytest.skip(f"wants {package} {version}")
    whole = Path(found.origin).parent
    for path in whole.rglob("*"):
        if path.is_file() and path.suffix != ".pyc":
            copy = folder / path.relative_to(whole.parent)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    subprocess.run(["git", "apply", "--verbose", str(patch)], cwd=folder, check=True)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_applies(patch, tmp_path):
    patched(patch, tmp_path)
    for name in re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(), re.M):
        compile((tmp_path / name).read_text(), name, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_does_what_it_is_for(patch, tmp_path):
    patched(patch, tmp_path)
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, "-c", TRIED[patch.stem]]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, check=True)

"""Every command and every line of Python in README.md is run by a test, most of them here."""

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
ELSEWHERE = {
    "pip install -e '.[examples]' && python examples/train_vit_digits.py": "test_examples.py",
    "pip install -e '.[dev]' && python -m pytest -n 2": ".ci/run",
}
INSTALL = "git clone <this repository> && cd hot-compile && pip install . && hot-compile doctor"
ON_A_SCRIPT = {
    "hot-compile run train.py": "2 of 2 products rewritten",
    "torchrun --nproc-per-node 2 -m hot_compile run train.py": "2 of 2 products rewritten",
    "hot-compile report train.py": "hot: wrote",
    "hot-compile certify train.py": "2 of 2 layers on integers",
}
PLAN = "hot-compile plan --model timm:vit_base_patch16_224 --batch 256 --device h200 --memory 24GiB"
TRAIN = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512))
step = torch.compile(model, backend="hot", options={"min_gain": 0, "keep_head": False})
step(torch.randn(64, 512)).square().mean().backward()
"""


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def commands():
    lines = (line for block in blocks("bash") for line in block.splitlines() if line)
    return [line.split("  #")[0] for line in lines]


def run(command, cwd, **more):
    """What a command prints, with this environment's programs in front."""
    command = re.sub(r"^torchrun", "python -m torch.distributed.run", command)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **more}
    done = subprocess.run(
        ["bash", "-euc", command], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_every_command_is_run_by_a_test():
    assert set(commands()) == {*ELSEWHERE, INSTALL, *ON_A_SCRIPT, PLAN}


def test_compiling_is_written_as_it_works(monkeypatch):
    """The blocks that compile: their options are taken, for a model with such layers."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    texts = [block for block in blocks("python") if "torch.compile" in block]
    assert len(texts) == 2
    for text in texts:
        space = {"torch": torch, "model": model}
        exec(text, space)
        assert isinstance(space["step"](torch.randn(4, 8)), torch.Tensor)
    torch._dynamo.reset()


@pytest.mark.slow
def test_looking_is_written_as_it_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (text,) = [block for block in blocks("python") if "explain" in block]
    exec(text, {"model": nn.Linear(64, 64), "x": torch.randn(32, 64)})
    assert (tmp_path / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", ON_A_SCRIPT)
def test_on_a_script(command, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    assert ON_A_SCRIPT[command] in run(command, tmp_path)


@pytest.mark.slow
def test_the_plan(tmp_path):
    assert "largest that fits into 24GiB so counted: batch" in run(PLAN, tmp_path)


@pytest.mark.slow
def test_the_clone_installs(tmp_path):
    """In an environment of its own; what the package needs comes from this one."""
    venv.create(tmp_path / "fresh", with_pip=True, symlinks=True)
    site = next((tmp_path / "fresh").glob("lib/python*/site-packages"))
    places = {str(Path(path)) for path in sys.path if path.endswith("site-packages")}
    (site / "outside.pth").write_text("\n".join(places) + "\n")
    command = INSTALL.replace("<this repository>", str(ROOT)).replace("cd hot-compile", "cd clone")
    command = command.replace(str(ROOT), f"{ROOT} clone")
    command = command.replace("pip install .", "pip install --no-deps .")
    path = f"{tmp_path / 'fresh' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    shutil.rmtree(tmp_path / "clone", ignore_errors=True)
    assert "ready" in run(command, tmp_path, PATH=path)

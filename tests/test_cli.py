"""``hot-compile`` as a whole: groups, examples, JSON, ``doctor``, and what the package shows."""

import json
import subprocess
import sys

import pytest
import torch
import typer
from typer.testing import CliRunner

import hot_compile
from hot_compile import cli
from hot_compile.cli import app, doctor
from hot_compile.runtime.native import build as building

NARROW = {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}


def invoke(*arguments, code=0):
    done = CliRunner(env=NARROW).invoke(app, arguments)
    assert done.exit_code == code, done.output
    return done.output


def test_the_version():
    assert invoke("--version").strip() == f"hot-compile {hot_compile.__version__}"


def test_public_names_are_shown_and_load_late():
    assert set(hot_compile.__all__) <= set(dir(hot_compile))
    code = "import hot_compile, sys; dir(hot_compile); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    for name in hot_compile.__all__:
        assert getattr(hot_compile, name).__doc__


def test_commands_are_in_groups_and_shells_complete_them():
    text = invoke("--help")
    for group in (cli.TRAINING, cli.LOOKING, cli.MACHINE):
        assert f" {group} " in text
    assert "--install-completion" in text
    assert "Commands" not in text  # the group of what has none


@pytest.mark.parametrize("name", [*typer.main.get_command(app).commands])
def test_every_help_has_an_example(name):
    commands = typer.main.get_command(app).commands
    below = getattr(commands[name], "commands", {})
    for words in [(name, sub) for sub in below] or [(name,)]:
        assert f"Example: hot-compile {' '.join(words)}" in invoke(*words, "--help")


@pytest.fixture
def cpu_only(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_what_doctor_calls_ready_has_been_run(cpu_only, monkeypatch):
    ran, step = [], doctor._gradients
    monkeypatch.setattr(doctor, "_gradients", lambda *given: ran.append(given) or step(*given))
    text = invoke("doctor")
    assert [type(model).__name__ for model, *_ in ran] == ["Sequential", "OptimizedModule"]
    assert "Ready: cpu. There is no GPU that torch finds." in text
    assert "not ready" in text or "not needed" in text  # the GPU


def test_what_does_not_run_is_not_ready(cpu_only, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setattr(doctor, "_gradients", broken)
    text = " ".join(invoke("doctor", code=1).split())
    assert "a training step failed: RuntimeError: no such instruction" in text
    assert "Nothing is ready" in text


def test_a_cache_that_cannot_be_written_is_named(cpu_only, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(doctor, "tried", lambda kind: "no folder")
    told = json.loads(invoke("doctor", "--json", code=1))
    assert "cannot be written" in told["operators' cache"]
    assert "XDG_CACHE_HOME" in told["operators' cache"]
    assert told["ready"] == []


def test_without_inductors_cache_nothing_is_ready(tmp_path):
    """torch cannot even import Inductor then."""
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "hot_compile", "doctor", "--json"]
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "file" / "x"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    told = json.loads(done.stdout)
    assert str(tmp_path / "file" / "x") in told["Inductor's cache"]
    assert "NotADirectoryError" in told["cpu"]
    assert told["ready"] == []


def test_all_libraries_of_a_device_are_built(monkeypatch):
    monkeypatch.setattr(building, "load", lambda device: f"of_{device}.so")
    monkeypatch.setattr(building, "load_extension", lambda extension: f"{extension.name}.so")
    assert invoke("build", "--device", "cpu").split() == ["cpu:", "of_cpu.so"]
    built = invoke("build", "--device", "cuda").split()
    assert built == ["cuda:", "hot_head.so", "cuda:", "of_cuda.so"]


def test_findings_are_forgotten(tmp_path, monkeypatch):
    from hot_compile.observing import acceptance

    monkeypatch.setattr(acceptance, "folder", lambda: tmp_path)
    (tmp_path / "one.json").write_text("{}")
    assert "forgot the findings of 1 graphs" in invoke("profile", "forget")
    assert not list(tmp_path.iterdir())


def test_rates_and_plans_as_json(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    told = json.loads(invoke("tune", "--show", "--json", "--device", "cpu"))["cpu"]
    assert told["measured"] is told["kept_in"] is None
    assert told["table"]["products, INT8"] > 0
    invoke("tune", "--json", code=2)
    (tmp_path / "made.py").write_text(
        "import torch\n"
        "def make(batch):\n"
        "    return torch.nn.Linear(64, 96), (torch.empty(batch, 64),)\n"
    )
    monkeypatch.chdir(tmp_path)
    text = CliRunner(env=NARROW).invoke(
        app, ["plan", "--model", "made:make", "--batch", "64", "--device", "h200", "--json"]
    )
    plan = json.loads(text.stdout)
    assert plan["bytes"]["hot"]["weights"] == (64 * 96 + 96) * 4
    assert len(plan["graphs"]) == 1

"""``hot-compile run``: a script as Python runs it, with "hot" where it asks for the default."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from samples_models import MLP
from typer.testing import CliRunner

from hot_compile import launch
from hot_compile.backend import hot
from hot_compile.cli import app
from hot_compile.errors import OptionError, ScriptError
from hot_compile.launch import hot_by_default, parse_settings
from hot_compile.record import run_uncompiled
from hot_compile.stock import FLAGS

ALWAYS = {"min_gain": 0, "keep_head": False}
X = torch.randn(48, 64)


@pytest.fixture
def seen(monkeypatch):
    """(mode, options) of every graph; nothing is lowered."""
    calls, stock = [], launch.hot

    def unlowered(gm, inputs, *, mode, options, **told):
        calls.append((mode, options))
        return stock(gm, inputs, options=options, inner_compile=run_uncompiled, **told)

    monkeypatch.setattr(launch, "hot", unlowered)
    torch._dynamo.reset()
    yield calls
    torch._dynamo.reset()


@pytest.fixture
def process(monkeypatch):
    """What a script finds as its process is put back afterwards."""
    for name in ("argv", "path", "excepthook"):
        value = getattr(sys, name)
        monkeypatch.setattr(sys, name, list(value) if isinstance(value, list) else value)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


def in_place(**keywords):
    model = MLP()
    model.compile(**keywords)
    return model


def decorated(**keywords):
    return torch.compile(**keywords)(MLP())


DEFAULTS = {
    "none": lambda: torch.compile(MLP()),
    "named": lambda: torch.compile(MLP(), backend="inductor"),
    "in place": in_place,
    "in place, named": lambda: in_place(backend="inductor"),
    "decorator": decorated,
    "dynamic": lambda: torch.compile(MLP(), dynamic=True),
    "fullgraph": lambda: decorated(fullgraph=True),
}


@pytest.mark.parametrize("ask", DEFAULTS.values(), ids=DEFAULTS)
def test_who_asks_for_the_default_gets_hot(seen, ask):
    stock = torch.compile
    with hot_by_default(ALWAYS) as told:
        ask()(X).sum().backward()
    assert torch.compile is stock
    assert seen == [(None, ALWAYS)]
    assert "1 graph compiled, 2 of 2 products rewritten" in str(told)


@pytest.mark.parametrize("compiled", [torch.compile, decorated, in_place], ids=lambda f: f.__name__)
def test_other_backends_stay(seen, compiled):
    graphs = []

    def own(gm, inputs):
        graphs.append(gm)
        return gm.forward

    arguments = (MLP(),) if compiled is torch.compile else ()
    with hot_by_default(ALWAYS) as told:
        compiled(*arguments, backend=own)(X).sum().backward()
        compiled(*arguments, backend="eager")(X)
    assert graphs
    assert not seen
    assert "nothing compiled" in str(told)


@pytest.mark.skipif(not hasattr(torch.compiler, "set_default_backend"), reason="since torch 2.13")
def test_a_default_that_the_script_sets_stays(seen):
    torch.compiler.set_default_backend("eager")
    try:
        with hot_by_default(ALWAYS):
            torch.compile(MLP())(X)
            assert not seen
            torch.compile(MLP(), backend="inductor")(X)
    finally:
        torch.compiler.set_default_backend(None)
    assert seen


def test_options_of_script_and_command_line_are_joined(seen):
    with hot_by_default(ALWAYS):
        torch.compile(MLP(), options={"max_autotune": False, "epilogue_fusion": True})(X)
        torch.compile(MLP(), mode="max-autotune-no-cudagraphs")(X)
    assert seen[0] == (None, {"max_autotune": False, "epilogue_fusion": True, **ALWAYS})
    assert seen[1] == ("max-autotune-no-cudagraphs", ALWAYS)


def test_what_a_plain_run_has_compiled_is_known_in_the_next(tmp_path, monkeypatch):
    """The caches are warm from a run without hot-compile's command."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, options = MLP(), {**ALWAYS, "recipe": "int8"}
    torch._dynamo.reset()
    torch.compile(model, backend="hot", options=options)(X).sum().backward()

    def launched(**more):
        torch._dynamo.reset()
        with hot_by_default(more) as told:
            torch.compile(model, backend="hot", options=options)(X).sum().backward()
        return str(told)

    known = launched()
    assert "1 graph compiled, 2 of 2 products rewritten" in known
    assert "1 from Inductor's cache" in known
    assert "cache" not in launched(recipe="paper")
    for file in tmp_path.rglob("*.pickle"):
        if file.parent.name == "reports":
            file.unlink()
    assert "nothing is kept of what was done" in launched()


@pytest.mark.parametrize("ask", [decorated, in_place], ids=lambda f: f.__name__)
@pytest.mark.parametrize("backend", ["hot", hot], ids=["name", "function"])
def test_a_script_that_says_hot_itself_is_told_of_too(seen, ask, backend):
    with hot_by_default({"min_gain": 0}) as told:
        ask(backend=backend, options={"keep_head": False, "min_gain": 9})(X).sum().backward()
    assert seen == [(None, ALWAYS)]
    assert "1 graph compiled, 2 of 2 products rewritten" in str(told)


def test_nothing_rewritten_says_why(seen):
    with hot_by_default({"exclude": ["*"]}) as told, torch.no_grad():
        torch.compile(MLP())(X)
        with torch.enable_grad():
            torch.compile(MLP())(X).sum().backward()
    assert "2 graphs compiled, 0 of 2 products rewritten (most: in exclude" in str(told)
    assert "1 without a backward" in str(told)


def test_the_same_layers_compiled_again_count_once(seen):
    with hot_by_default(ALWAYS) as told:
        model = torch.compile(MLP(), dynamic=False)
        for rows in (48, 64):
            model(torch.randn(rows, 64)).sum().backward()
    assert "2 graphs compiled, 2 of 2 products rewritten" in str(told)


SETTINGS = [
    "keep_head=False",
    "recompute=FALSE",
    "exclude=['a', 'b']",
    "min_gain=0",
    "max_autotune=true",
    "rows=batch",
]


def test_settings_are_typed():
    assert parse_settings(SETTINGS, "fast") == {
        "recipe": "fast",
        "keep_head": False,
        "recompute": False,
        "exclude": ["a", "b"],
        "min_gain": 0,
        "max_autotune": True,
        "rows": "batch",
    }


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["min_gian=0"], "did you mean 'min_gain'"),
        (["min_gain=much"], "expected a number"),
        (["recipe=quick"], "one of"),
        (["min_gain"], "key=value"),
        (["=0"], "key=value"),
        (["min_gain=0", "min_gain=1"], "twice"),
    ],
)
def test_bad_settings_are_refused_before_the_script_runs(settings, told, process, tmp_path):
    with pytest.raises(OptionError, match=told):
        parse_settings(settings)
    script = tmp_path / "script.py"
    script.write_text("raise AssertionError")
    flags = [part for setting in settings for part in ("--set", setting)]
    result = CliRunner().invoke(app, ["run", *flags, str(script)])
    assert result.exit_code == 2


def run(script, *arguments, module=False):
    return launch.run(str(script), arguments, ALWAYS, module)


def test_a_script_finds_what_python_gives_it(process, tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 5")
    script = tmp_path / "script.py"
    script.write_text(
        "import pickle, sys, beside\n"
        "class Own: pass\n"
        "assert __name__ == '__main__' and __file__ == sys.argv[0] and __spec__ is None\n"
        "assert sys.argv[1:] == ['--recipe', 'its own'], sys.argv\n"
        "assert type(pickle.loads(pickle.dumps(Own()))) is Own\n"
        "sys.exit(beside.VALUE)\n"
    )
    with pytest.raises(SystemExit) as left:
        run(script, "--recipe", "its own")
    assert left.value.code == 5
    (tmp_path / "beside.py").unlink()


def test_arguments_of_the_script_are_its_own(process, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nassert sys.argv[1:] == ['--set', 'x', '-m', '--help']")
    command = ["run", "--set", "min_gain=0", str(script), "--set", "x", "-m", "--help"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output


def test_errors_are_shown_from_the_scripts_own_frame(process, tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("def f():\n    raise ValueError('told')\nf()\n")
    assert run(script) == 1
    shown = capsys.readouterr().err
    assert f'Traceback (most recent call last):\n  File "{script}", line 3' in shown
    assert "ValueError: told" in shown
    script.write_text("raise KeyboardInterrupt")
    assert run(script) == 130
    script.write_text("import sys\nsys.excepthook = lambda *_: print('mine')\nraise ValueError")
    assert run(script) == 1
    assert "mine" in capsys.readouterr().out


def test_a_module_runs_too(process, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text("import sys\nassert sys.argv[1:] == ['x'] and sys.exit(3)")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        run("own", "x", module=True)


STEP = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 64))
torch.compile(model)(torch.randn(48, 64)).square().mean().backward()
"""


@pytest.mark.parametrize("said", ["model", 'model, backend="hot"'])
def test_a_page_of_what_a_script_did(seen, process, tmp_path, monkeypatch, said):
    script = tmp_path / "script.py"
    step = STEP.replace("torch.compile(model)", f"torch.compile({said})")
    script.write_text(f"import os\nos.chdir('/')\n{step}")
    monkeypatch.chdir(tmp_path)
    command = ["run", "--report", "page.html", "--set", "min_gain=0", str(script)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    data = page_of(tmp_path / "page.html")
    assert data["title"] == str(script)
    assert "rates: " in data["note"]
    assert [layer["strategy"] for layer in data["layers"]] == ["int8", "exact"]  # and the head


def page_of(path):
    text = path.read_text()
    return json.loads(re.search(r'id="data"[^>]*>(.*?)</script>', text, re.S).group(1))


def test_report_compares_a_script_with_stock(seen, process, tmp_path, monkeypatch):
    """Of layers that are compiled for two batches the last counts."""
    twice = STEP.replace("torch.compile(model)(torch.randn(48, 64)", "STEP(torch.randn(N, 64)")
    script = tmp_path / "script.py"
    script.write_text(
        twice.replace(
            "STEP(", "step = torch.compile(model, dynamic=False)\nfor N in (48, 64): step("
        )
    )
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(
        app, ["report", "--set", "min_gain=0", str(script), "--output", "x"]
    )
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "x").exists()  # that is the script's own
    data = page_of(tmp_path / "report.html")
    assert [layer["shape"][0] for layer in data["layers"]] == ["64", "64"]
    exact, flag = (max(held for _, held in data["stock"][name]) for name in FLAGS)
    assert exact > flag >= data["held"] > 0


@pytest.mark.parametrize("report", ["nowhere/page.html", "."])
def test_a_report_that_cannot_be_written_is_refused_before(process, tmp_path, report):
    script = tmp_path / "script.py"
    script.write_text("raise AssertionError")
    command = ["run", "--report", str(tmp_path / report), str(script)]
    assert CliRunner().invoke(app, command).exit_code == 2


@pytest.mark.parametrize("module", [False, True])
def test_what_is_not_there_is_named(process, tmp_path, module):
    for name in ("nowhere", "no.where", str(tmp_path)):
        with pytest.raises(ScriptError, match=name):
            run(name, module=module)


SCRIPT = """
import sys
import torch
from torch import nn

if "alone" not in sys.argv:
    torch.distributed.init_process_group("gloo")
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x):
        return self.last(self.first(x).relu())

model = Net()
if "alone" not in sys.argv:
    model = nn.parallel.DistributedDataParallel(model)
torch.compile(model)(torch.randn(48, 64)).square().mean().backward()
if "alone" not in sys.argv:
    torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["python", "torchrun", "accelerate"])
def test_launchers(tmp_path, launcher):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    starts = {
        "python": "-m",
        "torchrun": "-m torch.distributed.run --nproc-per-node 2 -m",
        "accelerate": "-m accelerate.commands.launch --cpu --num_processes 1 --num_machines 1 "
        "--mixed_precision no --dynamo_backend no -m",
    }
    command = [*starts[launcher].split(), "hot_compile", "run", "--set", "min_gain=0", str(script)]
    command += [] if launcher == "torchrun" else ["alone"]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("products rewritten") == 1, done.stderr

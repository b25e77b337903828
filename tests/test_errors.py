"""What users get wrong: an error or a warning that says what to do, never a raw traceback."""

from __future__ import annotations

import dataclasses
import json
import warnings

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from hot_compile import Monitor
from hot_compile.backend import hot
from hot_compile.cli import app, doctor
from hot_compile.config import Strategy, option_names
from hot_compile.errors import BuildError, OptionError, OptionWarning, ProfileFormatError
from hot_compile.inspect import Explanation, explain
from hot_compile.passes.option_warnings import warn_once
from hot_compile.passes.plan import Plan
from hot_compile.passes.profile.profile import Profile
from hot_compile.passes.storage.record import Crossing
from hot_compile.record import NO_PLAN, Dump, GraphReport
from hot_compile.runtime.native import build
from hot_compile.runtime.native.providers import Provider
from hot_compile.testing import hot_step

ALWAYS = {"min_gain": 0, "keep_head": False}


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))


def compile_with(options):
    return hot(torch.fx.symbolic_trace(mlp()), [torch.randn(4, 64)], options=options)


def warned(options, rows=32, module=None):
    """OptionWarnings of one step, and its reports."""
    module = module or mlp()
    warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x = torch.randn(rows, 64)
        _, graphs = hot_step(lambda x: module(x).square().mean(), x, options={**ALWAYS, **options})
    return [str(w.message) for w in caught if w.category is OptionWarning], graphs


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("memory_bit", "memory_bits"),
        ("memory-bits", "memory_bits"),
        ("gxbits", "gx_bits"),
        ("Recipe", "recipe"),
        ("hot.excludes", "exclude"),
        ("max_autotun", "max_autotune"),
        ("moniter", "monitor"),
    ],
)
def test_a_misspelt_option_is_answered_with_the_nearest(key, meant):
    with pytest.raises(OptionError) as error:
        compile_with({key: 8})
    text = str(error.value)
    assert f"did you mean {meant!r}?" in text
    assert all(name in text for name in option_names())
    assert "torch._inductor.config" in text
    assert len(text) < 1500


def test_an_option_like_no_other_is_answered_with_ours():
    with pytest.raises(OptionError) as error:
        compile_with({"zzzzz": 8, "memory_bits": 8})
    assert "did you mean" not in str(error.value)
    assert "memory_bits" in str(error.value)


@pytest.mark.parametrize("key", [1, None, ("rank",), b"rank"])
def test_keys_are_strings(key):
    with pytest.raises(OptionError, match="names of options, which are strings"):
        compile_with({key: 2})


@pytest.mark.parametrize("option", ["include", "exclude", "override"])
def test_a_glob_that_matches_nothing(option):
    value = {"nothing.*": "int8"} if option == "override" else ["*", "nothing.*"]
    told, graphs = warned({option: value})
    assert len(told) == 1
    assert option in told[0]
    assert "'nothing.*'" in told[0]
    assert "'0', '2'" in told[0]
    assert len(graphs) == 1


def test_a_glob_that_matches_no_tensor():
    told, _ = warned({"memory_override": {"nothing.*": 8, "0": 8}})
    assert len(told) == 1
    assert "memory_override with 'nothing.*'" in told[0]
    assert "'0:addmm'" in told[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"include": ["0"], "exclude": "2"},
        {"override": {"0": "int8", "*": "exact"}},
        {"memory_budget": 0.9, "memory_min_bytes": 1},
        {"memory_override": {"0:addmm": "exact"}},
        {"recipe": "exact"},
        {"recipe": "paper"},
    ],
)
def test_what_can_be_had_is_not_warned_of(options):
    told, _ = warned(options)
    assert not told


def test_a_demoted_layer_of_another_graph_is_no_mistake():
    told, _ = warned({"monitor": Monitor(demoted={"elsewhere.fc": "error 0.9"})})
    assert not told


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x):
        q, k, v = self.qkv(nn.functional.layer_norm(x, x.shape[-1:])).chunk(3, dim=-1)
        return torch.softmax(q @ k.T, dim=-1) @ v


def test_an_override_that_cannot_be_followed():
    told, graphs = warned({"override": {"*": "hla8"}}, rows=8)
    assert len(told) == 1
    assert "'hla8'" in told[0]
    assert "batch of 8, grouping wants 16" in told[0]
    assert "'0', '2'" in told[0]
    assert "batch of 8" in str(Explanation(tuple(graphs)))
    told, _ = warned({"override": {"*": "int8"}}, module=Attention())
    assert not told  # the products of activations were not meant
    plan = warned({}, module=Attention())[1][0].plan
    name = next(d.site for d in plan if d.strategy is Strategy.EXACT)
    told, _ = warned({"override": {name: "int8"}}, module=Attention())
    assert "cannot be followed" in told[0]


@pytest.mark.parametrize("budget", [0, 0.0, 0.01])
def test_a_memory_budget_that_cannot_be_met(budget):
    told, graphs = warned({"memory_budget": budget, "memory_min_bytes": 1})
    held = graphs[0].held_bytes
    assert len(told) == 1
    assert f"memory_budget={budget}" in told[0]
    assert f"the least that it can hold is {held} bytes" in told[0]
    fits, again = warned({"memory_budget": held, "memory_min_bytes": 1})
    assert not fits
    assert again[0].held_bytes == held


def test_warnings_come_once(recwarn):
    warnings.simplefilter("always")
    warn_once.cache_clear()
    for _ in range(3):
        module = mlp()
        hot_step(
            lambda x, module=module: module(x).sum(),
            torch.randn(8, 64),
            options={**ALWAYS, "exclude": "only.once.*"},
        )
    assert len([w for w in recwarn if w.category is OptionWarning]) == 1


def test_a_graph_counts_once():
    explanation = explain(mlp(), torch.randn(64, 64), options=ALWAYS)
    assert len(explanation.graphs) == 1
    assert [d.site for d in explanation.plan] == ["0", "2"]
    assert {d.gx_bits for d in explanation.plan} == {8}


def test_a_dump_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", "nul\0l"):
        with pytest.raises(OptionError, match="a folder that can be made and written"):
            Dump(str(path))
    dump = Dump(str(tmp_path / "graphs"))
    (tmp_path / "graphs" / "graph_000").rmdir()
    with pytest.raises(OptionError, match="a folder that can be made and written"):
        dump.finished(GraphReport(NO_PLAN, ()))


@pytest.mark.parametrize(
    "fields",
    [
        {"every": 0},
        {"every": 2.0},
        {"rotate": "4"},
        {"budget": "x"},
        {"budget": 0},
        {"budget": -1.0},
        {"budget": float("nan")},
        {"budget": True},
        {"path": 3},
        {"writer": "runs"},
        {"callback": "print"},
        {"demoted": ["0"]},
        {"raised": ["0"]},
    ],
)
def test_a_monitor_checks_its_fields(fields):
    with pytest.raises(OptionError, match=rf"got {next(iter(fields))}=.*; expected"):
        Monitor(**fields)


@pytest.mark.parametrize("command", ["g++ 'x", 'g++ "', "g++ \\"])
def test_a_compiler_with_an_open_quote(monkeypatch, command):
    monkeypatch.setenv("CXX", command)
    with pytest.raises(BuildError, match=r"CXX=.*which is no command"):
        build.find_compiler()


def test_a_compiler_that_cannot_run(monkeypatch, tmp_path):
    file = tmp_path / "c++[red]"
    file.write_bytes(b"\0no program")
    file.chmod(0o755)
    monkeypatch.setenv("CXX", str(file))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(BuildError, match="could not run"):
        build.build(build.extension_for("cpu"))


GOOD = {
    "format": "hot-compile profile",
    "version": 1,
    "environment": {"[/red]": "[/blue]"},
    "graphs": {},
    "rank": 8,
    "layers": {
        "blocks[/red].0": {
            "outputs": 4, "inputs": 4, "rows": 4, "dtype": "float32", "batches": 1,
            "grad_input": {"int8[/x]": {"error": 0.01, "cosine": 0.999}},
            "grad_weight": {"int8": {"error": 0.01, "cosine": 0.999}},
            "token_error": 0.1, "tensor_error": None, "stats": {},
        }
    },
}  # fmt: skip


def bad_profiles():
    """Name and text of files that are no profile, or not a sound one."""
    good = json.dumps(GOOD)
    replaced = {
        "infinite rank": ('"rank": 8', '"rank": 1e400'),
        "fractional rank": ('"rank": 8', '"rank": 8.5'),
        "a rank of true": ('"rank": 8', '"rank": true'),
        "infinite error": ('"error": 0.01', '"error": 1e400'),
        "huge whole error": ('"error": 0.01', '"error": 1' + "0" * 400),
        "whole number beyond Python's limit": ('"rank": 8', '"rank": 1' + "0" * 5000),
        "infinite size": ('"outputs": 4', '"outputs": 1e400'),
        "huge size": ('"outputs": 4', '"outputs": 1' + "0" * 30),
        "infinite looks": ('"graphs": {}', '"graphs": {"a": 1e400}'),
        "layers in a list": ('"layers": {', '"layers": [], "other": {'),
        "no number": ('"error": 0.01', '"error": NaN'),
        "strange environment": ('{"[/red]": "[/blue]"}', "[1]"),
    }
    for name, (old, new) in replaced.items():
        assert old in good
        yield pytest.param(good.replace(old, new, 1), id=name)
    deep = 200_000
    yield pytest.param("[" * deep + "]" * deep, id="deep lists")
    yield pytest.param('{"a":' * deep + "1" + "}" * deep, id="deep objects")
    yield pytest.param("", id="empty")
    yield pytest.param("[/red]", id="markup")


@pytest.mark.parametrize("text", [*bad_profiles()])
def test_bad_profiles(tmp_path, text):
    path = tmp_path / "[/red].json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ProfileFormatError, match="expected"):
        Profile.load(path)


def test_markup_in_modules_is_shown_as_it_is():
    from hot_compile.accounting import Measured, MemoryReport

    graph = warned({"exclude": "0"})[1][0]
    names = {"0": "[/red]", "2": "[bold]"}
    decisions = [
        dataclasses.replace(d, site=names[d.site], reason=f"[/x] {d.reason}") for d in graph.plan
    ]
    graph = dataclasses.replace(graph, plan=Plan("[/green]", tuple(decisions)))
    text = str(Explanation((graph,)))
    assert "[/red]" in text
    assert "[bold]" in text
    entry = Crossing("[/a]", "[/red]", "float32", ("4",), 4, 4, "exact", "[/b]", False)
    measured = dict.fromkeys(("exact", "hot"), Measured(1, 0, 1))
    assert "[/red]" in str(MemoryReport((entry,), measured))


@pytest.mark.parametrize(("gpu", "said"), [(False, "torch finds no GPU"), (True, "missing")])
def test_doctor_misses_what_a_gpu_needs_only_where_there_is_one(gpu, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(doctor, "tried", lambda kind: "")
    found = doctor.status
    nothing = Provider("cuda", False, "no nvcc")
    monkeypatch.setattr(doctor, "status", lambda kind: nothing if kind == "cuda" else found(kind))
    told = CliRunner().invoke(app, ["doctor"]).output
    assert said in told
    assert ("missing" in told) is gpu


def test_doctor_and_build_show_paths_as_they_are(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "tried", lambda kind: "")
    monkeypatch.setenv("CXX", "g++ '[/red]")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "[/red]"))
    done = CliRunner().invoke(app, ["doctor"])
    assert "[/red]" in done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)

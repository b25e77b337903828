"""The fidelity suite: cells, reports, and its reference in float8."""

import copy
import dataclasses
import gzip
import json
import pickle
from pathlib import Path

import pytest
import torch
import typer
from PIL import Image
from torch import nn

pytestmark = pytest.mark.slow  # it trains


def _cell(folder, task, recipe, seed, score, metric="accuracy", **raw):
    data = {"task": task, "recipe": recipe, "seed": seed, "metric": metric, "score": score}
    data |= {"held_bytes": 1_000_000, "strategies": {}, "reasons": {}, "losses": [], **raw}
    with (folder / "cells.jsonl").open("a") as file:
        print(json.dumps(data), file=file)


def _lines(folder):
    return [json.loads(line) for line in (folder / "cells.jsonl").read_text().splitlines()]


def test_fidelity_cell_is_trained_once_and_resumed(program, tmp_path, capsys):
    fidelity = program("fidelity")
    fidelity.cells("digits", "fast", "0,1", out=tmp_path, quick=True)
    _, cell = _lines(tmp_path)
    assert cell["seed"] == 1
    assert 0 <= cell["score"] <= 1
    assert len(cell["losses"]) == cell["steps"] == 8
    assert cell["strategies"]["blocks.0.mlp.fc2"] in ("hla8", "int8")
    assert "LQS" in cell["reasons"]["blocks.0.mlp.fc2"]
    assert (tmp_path / "profiles" / "digits.fast.1.json").exists()
    fidelity.run(tasks="digits", recipes="fast", seeds=2, quick=True, out=tmp_path)
    assert len(_lines(tmp_path)) == 2


def test_fidelity_tells_what_lqs_chooses(program, tmp_path):
    from hot_compile.passes.profile.profile import LayerProfile, Measure, Profile

    def layer(hla, int8, token):
        errors = {"hla8/batch": hla, "int8": int8}
        weight = {name: Measure(error, 1.0) for name, error in errors.items()}
        return LayerProfile(64, 64, 64, "float32", 2, {}, weight, token, 0.05, {})

    layers = {"a": layer(0.25, 0.05, 0.01), "b": layer(0.45, 0.3, 0.04), "head": layer(1, 1, 1)}
    Profile(8, layers).save(tmp_path / "profiles" / "glyph-scratch.fast.0.json")
    chosen = {"a": "hla8", "b": "int8", "head": "exact"}
    _cell(tmp_path, "glyph-scratch", "fast", 0, 0.9, strategies=chosen)
    report = program("fidelity_report")
    table = report.choice_table(report.Cells.load(tmp_path), tmp_path).splitlines()
    assert table[2:] == [
        "| a | 0.250 | 0.050 | 0.0100 / 0.0500 | int8 | hla8 | per token |",
        "| b | 0.450 | 0.300 | 0.0400 / 0.0500 | exact | int8 | per tensor |",
    ]


def test_fidelity_runs_what_is_missing_in_order(program, tmp_path, monkeypatch):
    fidelity = program("fidelity")
    assert {r for recipes in fidelity.SUITE.values() for r in recipes} <= set(fidelity.IMPORTANCE)
    assert set(fidelity.IMPORTANCE) == set(fidelity.RECIPES)
    assert set(fidelity.SUITE) == set(fidelity.SMALL)
    real = {task: recipes for suite in fidelity.SUITES.values() for task, recipes in suite.items()}
    assert set(real) == set(fidelity.REAL)
    assert {
        r for suite in fidelity.SUITES.values() for some in suite.values() for r in some
    } <= set(fidelity.RECIPES)
    name = ("glyph-scratch", "hot")
    groups = fidelity._groups(*name, 0, ())
    assert groups == [(*name, [0]), (*name, [1, 2, 3]), (*name, [4, 5])]
    assert fidelity._groups(*name, 3, {(*name, 1)}) == [(*name, [0]), (*name, [2])]
    assert len(fidelity._groups("digits", "fast", 0, {("digits", "fast", 1)})) == 2
    began = []
    monkeypatch.setattr(fidelity.Team, "run", lambda team, jobs: began.extend(team._groups))
    given = {"suite": "table2,images", "tasks": "images-vit", "out": tmp_path}
    fidelity.run(recipes="paper, r=8;exact", seeds=2, **given)
    firsts = [("images-vit", "exact", [0]), ("images-vit", "paper, r=8", [0])]
    assert began[:2] == firsts  # the first seeds, then the next
    began.clear()
    fidelity.run(seeds=1, **given)
    assert len(began) == len({recipe for _, recipe, _ in began}) == 5 + 8
    with pytest.raises(typer.BadParameter, match="expected some of images-resnet18"):
        fidelity.run(suite="images", tasks="digits", out=tmp_path)


def test_fidelity_goes_on_after_a_failure(program, tmp_path, monkeypatch, capfd):
    fidelity = program("fidelity")

    def train(task, recipe, seeds, setting, lower):
        if recipe == "exact":
            raise RuntimeError("no such luck")
        (tmp_path / f"{recipe}.txt").write_text(str(seeds))

    monkeypatch.setattr(fidelity, "_train_group", train)
    fidelity.run(tasks="digits", recipes="exact;hot;paper", seeds=2, jobs=1, out=tmp_path)
    assert (tmp_path / "hot.txt").read_text() == "[0, 1]"
    assert (tmp_path / "paper.txt").exists()
    assert "digits exact [0, 1]: FAILED" in capfd.readouterr().err
    assert "no such luck" in (tmp_path / "log.txt").read_text()


def test_fidelity_trainings_take_turns_without_a_trace_of_each_other(program):
    program("fidelity")
    train, tasks = program("fidelity_train"), program("fidelity_tasks")
    task = tasks.TASKS["digits"](tasks.Setting(Path(), quick=True))

    def losses(*seeds):
        trainings = [train.Training(task, "eager", seed, 3) for seed in seeds]
        for _ in range(3):
            for training in trainings:
                training.step()
        return [training.finish()[0] for training in trainings]

    assert losses(0, 1) == [*losses(0), *losses(1)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fidelity_replays_what_it_would_do_step_by_step(program):
    program("fidelity")
    train, tasks = program("fidelity_train"), program("fidelity_tasks")
    task = tasks.TASKS["digits"](tasks.Setting(Path(), "cuda", quick=True))

    def losses(eager):
        training = train.Training(task, "aot_eager", 0, eager)
        for _ in range(8):
            training.step()
        assert (training._replay is None) == (eager == 8)
        return training.finish()[0]

    assert losses(3) == pytest.approx(losses(8), rel=1e-4)


def test_fidelity_on_images_of_idx_files(program, tmp_path):
    """What is missing says how to get it."""
    fidelity, real = program("fidelity"), program("fidelity_real")
    with pytest.raises(FileNotFoundError, match="apt install dataset-fashion-mnist"):
        real.images("vit", fidelity.Setting(tmp_path, quick=True, weights=tmp_path))
    for part, count in (("train", 32), ("t10k", 16)):
        pixels = torch.randint(256, (count, 28, 28), dtype=torch.uint8)
        for kind, data in (("images-idx3", pixels), ("labels-idx1", torch.arange(count) % 10)):
            sizes = b"".join(n.to_bytes(4, "big") for n in data.shape)
            head = bytes((0, 0, 8, data.dim())) + sizes
            content = gzip.compress(head + data.to(torch.uint8).numpy().tobytes())
            (tmp_path / f"{part}-{kind}-ubyte.gz").write_bytes(content)
    setting = fidelity.Setting(tmp_path, quick=True, weights=tmp_path)
    for recipe in ("exact", "paper"):
        fidelity._train_group("images-vit", recipe, [0], setting, False)
    file = tmp_path / "figures.json"
    fidelity.figures(file, tmp_path)
    document = tmp_path / "docs" / "measured" / "page.md"
    document.parent.mkdir(parents=True)
    document.write_text("<!-- papers: page_images.json -->\n<!-- end -->\n")
    fidelity.report(tmp_path, document)
    head, _, row = document.read_text().splitlines()[1:-1]
    assert head.startswith("| model | exact | INT4 |")
    assert row.startswith("| vit | ")


@pytest.mark.parametrize("folder", ["cifar-100-python", "pictures"])
def test_fidelity_on_images_of_ones_own(program, tmp_path, folder):
    """CIFAR-100, or any folder of train and val, with one option."""
    fidelity, data = program("fidelity"), tmp_path / folder
    if folder == "pictures":
        for part in ("train", "val"):
            for kind in ("cat", "dog"):
                (data / part / kind).mkdir(parents=True)
                for n in range(8):
                    pixels = torch.randint(256, (40, 48, 3), dtype=torch.uint8).numpy()
                    Image.fromarray(pixels).save(data / part / kind / f"{n}.png")
    else:
        data.mkdir()
        for part in ("train", "test"):
            pixels = torch.randint(256, (16, 3072), dtype=torch.uint8).numpy()
            content = {b"data": pixels, b"fine_labels": [n % 10 for n in range(16)]}
            (data / part).write_bytes(pickle.dumps(content))
    given = {"quick": True, "steps": 2, "images": data, "out": tmp_path}
    fidelity.run(suite="images", tasks="images-vit", recipes="hot, memory", seeds=1, **given)
    (cell,) = _lines(tmp_path)
    assert cell["data"] == str(data)
    assert len(cell["losses"]) == cell["steps"] == 2


def test_a_convolution_as_a_product(program):
    program("fidelity")
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3, stride=2, padding=1))
    changed = program("fidelity_real").as_products(copy.deepcopy(model))
    assert type(changed[0]) is nn.Conv2d
    x = torch.randn(2, 1, 11, 9)
    torch.testing.assert_close(changed(x), model(x))


def test_docstrings_and_their_functions(program):
    program("fidelity")
    for held_out in (False, True):
        pairs = program("fidelity_real")._pairs(held_out, 50)
        assert len(pairs) == 50
        assert not any(told in code for told, code in pairs)


def test_fidelity_goes_on_from_a_published_run(program, tmp_path):
    fidelity, report = program("fidelity"), program("fidelity_report")
    _cell(tmp_path, "digits", "exact", 0, 0.9)
    document = tmp_path / "docs" / "measured" / "fidelity.md"
    document.parent.mkdir(parents=True)
    cells = report.Cells.load(tmp_path)
    report.write_report(cells, tmp_path, document, ("exact", "hot"))
    elsewhere = tmp_path / "elsewhere"
    fidelity.restore(elsewhere, document)
    (cell,) = report.Cells.load(elsewhere).all()
    assert (cell.task, cell.recipe, cell.seed, cell.score) == ("digits", "exact", 0, 0.9)


def test_fidelity_report(program, tmp_path):
    report = program("fidelity_report")
    for seed, (exact, hot) in enumerate([(0.90, 0.891), (0.80, 0.80)]):
        _cell(tmp_path, "digits", "exact", seed, exact)
        _cell(tmp_path, "digits", "hot", seed, hot)
        _cell(tmp_path, "char-gpt", "exact", seed, 2 * exact, "loss")
        _cell(tmp_path, "char-gpt", "hot", seed, 2 * hot, "loss")
        _cell(tmp_path, "glyph-scratch", "exact", seed, exact)
        _cell(tmp_path, "glyph-scratch", "paper, r=4", seed, hot)
        _cell(tmp_path, "lora", "LoRA both", seed, hot)
    cells = report.Cells.load(tmp_path)
    assert cells.relative("digits", "hot") == pytest.approx([-0.01, 0])
    assert cells.relative("char-gpt", "hot") == pytest.approx([0.01, 0])  # a lower loss is better
    document = tmp_path / "docs" / "measured" / "fidelity.md"
    document.parent.mkdir(parents=True)
    document.write_text("Before.\n<!-- table relative -->\nold\n<!-- end -->\nAfter.\n")
    lines = report.write_report(cells, tmp_path, document, ("exact", "hot"))
    text = document.read_text()
    assert text.startswith("Before.")
    assert text.endswith("After.\n")
    assert "old" not in text
    assert "| hot | -0.50 ± 0.71 | 0.50 ± 0.71 |  |  |" in text
    assert any("| 4 | 84.55 ± 6.43 |" in line for line in lines)
    assert any("| yes | yes | 84.55 ± 6.43 |" in line for line in lines)
    assert (tmp_path / "docs" / "measured" / "fidelity.png").stat().st_size > 1000
    assert len(json.loads((tmp_path / "docs" / "benchmarks" / "fidelity.json").read_text())["rows"])


def test_fidelity_tells_of_eight_bit_forwards(program, tmp_path):
    plan = {"int8": ["a", "b"], "exact: classifier head": ["c"], "exact: convolution": ["d", "e"]}
    for seed, (exact, hot) in enumerate([(2.0, 2.02), (3.0, 3.0)]):
        _cell(tmp_path, "char-gpt", "exact", seed, exact, "loss")
        _cell(tmp_path, "char-gpt", "8-bit forward", seed, hot, "loss", forwards=plan)
    _cell(tmp_path, "digits", "exact", 0, 0.0)
    _cell(tmp_path, "digits", "float8, fake", 0, 0.5, date="2026-11-23")
    file = tmp_path / "figures.json"
    fidelity, tables = program("fidelity"), program("tables").TABLES
    fidelity.figures(file, tmp_path)
    documents = [json.loads(file.read_text())]
    head, *rows = tables["eight_bits"](documents)
    assert head[:5] == ("task", "exact", "hot, memory", "8-bit forward", "float8, fake")
    scores = ("2.500 ± 0.707", "", "2.510 ± 0.693", "")
    assert rows[0] == ("char-gpt, loss", *scores, "", "-0.50 ± 0.71", "")
    assert rows[1] == ("digits, %", "0.00", "", "", "50.00", "", "", "")
    why = "1 × classifier head; 2 × convolution"
    assert tables["forwards"](documents)[1:] == [("char-gpt", "2", "3", why)]


@pytest.mark.parametrize("recipe", ["8-bit forward", "float8, fake"])
@pytest.mark.parametrize("task", ["digits", "two-digits"])
def test_fidelity_trains_with_eight_bits_forward(program, tmp_path, recipe, task):
    fidelity = program("fidelity")
    for name in ("exact", recipe):
        fidelity.cells(task, name, "0", out=tmp_path, quick=True)
    exact, ours = _lines(tmp_path)
    assert ours["losses"] != exact["losses"]
    assert ours["losses"] == pytest.approx(exact["losses"], rel=0.05)
    assert bool(ours["forwards"]) == (recipe == "8-bit forward")


def _layers():
    torch.manual_seed(0)
    convs = (nn.Conv2d(1, 16, 3), nn.Conv2d(16, 32, 3, stride=2, bias=False), nn.Flatten())
    return nn.Sequential(*convs, nn.Linear(288, 48), nn.GELU(), nn.Linear(48, 10))


def _step(model, x):
    """Output, and gradients of everything."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().mean().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.fixture
def float8(program):
    return program("float8_reference")


def test_float8_takes_what_hardware_can(float8):
    model = float8.in_float8(_layers())
    kinds = [type(module).__name__ for module in model]
    assert kinds == ["Conv2d", "Float8Conv2d", "Flatten", "Float8Linear", "GELU", "Linear"]
    heads = nn.ModuleDict({"head": nn.Linear(16, 16), "body": nn.Linear(16, 16)})
    assert type(float8.in_float8(heads)["head"]) is nn.Linear
    assert isinstance(heads["body"], float8.Float8Linear)


def test_float8_rounds_all_operands_of_all_products(float8):
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    for layer in (nn.Linear(32, 48), nn.Conv2d(16, 32, 3)):
        x = torch.randn(4, 32) if isinstance(layer, nn.Linear) else torch.randn(2, 16, 5, 5)
        y = layer(x)
        g = torch.randn_like(y)
        operands = float8.round_to(x, e4m3), float8.round_to(layer.weight, e4m3)
        x_, w_ = (t.detach().requires_grad_() for t in operands)
        exact = torch.func.functional_call(layer, {"weight": w_}, (x_,))
        expected = torch.autograd.grad(exact, (x_, w_), float8.round_to(g, e5m2))
        ours = float8.in_float8(nn.ModuleList([layer]))[0]
        x.requires_grad_()
        result = ours(x)
        found = torch.autograd.grad(result, (x, ours.weight, ours.bias), g)
        torch.testing.assert_close(result, exact)
        torch.testing.assert_close(found[:2], expected)
        exact_sum = g.sum(0) if g.dim() == 2 else g.sum((0, 2, 3))
        torch.testing.assert_close(found[2], exact_sum)
        assert (y - result).norm() < 0.05 * y.norm()


def test_float8_is_the_same_compiled(float8):
    model, x = float8.in_float8(_layers()), torch.randn(4, 1, 9, 9)
    compiled = torch.compile(copy.deepcopy(model), backend="hot", options={"recipe": "exact"})
    torch.testing.assert_close(_step(compiled, x), _step(model, x), rtol=1e-4, atol=1e-6)


def test_float8_is_torchaos_tensorwise(float8):
    torchao = pytest.importorskip("torchao.float8")
    model, x = _layers()[3:], torch.randn(4, 288)
    theirs = torchao.convert_to_float8_training(
        copy.deepcopy(model), module_filter_fn=float8.takes_float8,
        config=dataclasses.replace(torchao.Float8LinearConfig(), emulate=True),
    )  # fmt: skip
    torch.testing.assert_close(_step(float8.in_float8(model), x), _step(theirs, x))

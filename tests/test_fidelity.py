"""The fidelity suite: cells and reports."""

import copy
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
    setting = fidelity.Setting(tmp_path, "cpu", True)
    fidelity._train_group("digits", "fast", [0, 1], setting, False)
    _, cell = _lines(tmp_path)
    assert cell["seed"] == 1
    assert 0 <= cell["score"] <= 1
    assert len(cell["losses"]) == cell["steps"] == 8
    assert cell["strategies"]["blocks.0.mlp.fc2"] in ("hla8", "int8")
    assert "LQS" in cell["reasons"]["blocks.0.mlp.fc2"]
    assert (tmp_path / "profiles" / "digits.fast.1.json").exists()
    fidelity.run(tasks="digits", recipes="fast", seeds=2, quick=True, out=tmp_path)
    assert len(_lines(tmp_path)) == 2


def test_fidelity_runs_what_is_missing_in_order(program, tmp_path, monkeypatch):
    fidelity = program("fidelity")
    assert set(fidelity.IMPORTANCE) == set(fidelity.RECIPES)
    real = {task: recipes for suite in fidelity.SUITES.values() for task, recipes in suite.items()}
    assert set(real) == set(fidelity.TASKS)
    assert {
        r for suite in fidelity.SUITES.values() for some in suite.values() for r in some
    } <= set(fidelity.RECIPES)
    name = ("char-gpt", "hot")
    groups = fidelity._groups(*name, 6, ())
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
    assert (tmp_path / "hot.txt").read_text() == "[1]"
    assert (tmp_path / "paper.txt").exists()
    assert "digits exact [1]: FAILED" in capfd.readouterr().err
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


def test_fidelity_report_and_what_goes_on_from_it(program, tmp_path):
    fidelity = program("fidelity")
    for seed, (exact, hot) in enumerate([(0.90, 0.891), (0.80, 0.80)]):
        _cell(tmp_path, "digits", "exact", seed, exact)
        _cell(tmp_path, "digits", "hot, memory", seed, hot)
        _cell(tmp_path, "char-gpt", "exact", seed, 2 * exact, "loss")
        _cell(tmp_path, "char-gpt", "hot, memory", seed, 2 * hot, "loss")
    cells = fidelity.Cells.load(tmp_path)
    assert cells.relative("digits", "hot, memory") == pytest.approx([-0.01, 0])
    assert cells.relative("char-gpt", "hot, memory") == pytest.approx([0.01, 0])  # lower is better
    document = tmp_path / "docs" / "measured" / "fidelity.md"
    document.parent.mkdir(parents=True)
    document.write_text(
        "Before.\n<!-- scores: fidelity_small.json -->\nold\n<!-- end -->\nAfter.\n"
    )
    fidelity.report(tmp_path, document)
    text = document.read_text()
    assert text.startswith("Before.")
    assert text.endswith("After.\n")
    assert "old" not in text
    assert "|  | hot, memory | 84.55 ± 6.43 % | -0.50 ± 0.71 | 2 |" in text
    assert "|  | hot, memory | 1.691 ± 0.129 loss | 0.50 ± 0.71 | 2 |" in text
    elsewhere = tmp_path / "elsewhere"
    fidelity.restore(elsewhere, document)
    assert fidelity.Cells.load(elsewhere).keys() == cells.keys()


@pytest.mark.parametrize("task", ["digits", "two-digits"])
def test_fidelity_trains_with_eight_bits_forward(program, tmp_path, task):
    fidelity = program("fidelity")
    for name in ("exact", "8-bit forward"):
        fidelity._train_group(task, name, [0], fidelity.Setting(tmp_path, "cpu", True), False)
    exact, ours = _lines(tmp_path)
    assert ours["losses"] != exact["losses"]
    assert ours["losses"] == pytest.approx(exact["losses"], rel=0.05)
    assert ours["forwards"]

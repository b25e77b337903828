"""Benchmarks run, account for memory rightly, and give every configuration code of its own."""

import json

import pytest
import torch
import typer

pytestmark = pytest.mark.slow  # three minutes of compiling what no user runs


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet10t", "llama12x2048"])
def test_workloads_have_a_loss(program, name):
    models = program("models")
    vit = name.startswith("vit")
    size = {"depth": 1, "width": 128} if name != "resnet10t" else {}
    sizes = models.Size(batch=2, tokens=16, image=32 if vit else None, **size)
    work = models.build(name, sizes)
    loss = work.loss(work.model, *work.inputs)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is not None for p in work.model.parameters())


def test_budgets_from_stocks_peak_to_the_least(program, tmp_path):
    """What fails is a row, and the JSON has every row."""
    file = tmp_path / "rows.json"
    rows = program("budget").main(
        cases="vit-tiny", device="cpu", dtype="fp32", points=2, jobs=2, limit=600, json_file=file,
        child=None, config="", asked=0,
    )  # fmt: skip
    stock, least, *others = rows
    assert (stock.config, least.config) == ("exact", "hot:memory_budget=0")
    assert 0 < least.peak_bytes < stock.peak_bytes
    assert [row.asked_bytes for row in others] == [stock.peak_bytes, 0, least.peak_bytes, 0]
    assert not any(row.error for row in rows)
    assert all(row.best_ms > 0 for row in rows)
    assert len(json.loads(file.read_text())["rows"]) == 6


def test_times_at_the_same_peak(program):
    rows = [
        {"config": config, "best_ms": ms, "peak_bytes": peak, "error": ""}
        for config, ms, peak in (("exact", 10.0, 300), ("torch:0.5", 20.0, 100), ("hot", 1.0, 50))
    ]
    at_peak = program("tables").at_peak
    assert [at_peak(rows, peak) for peak in (400, 200, 100, 50)] == [10.0, 15.0, 20.0, None]


def test_a_table_of_rows_with_a_budget_and_without(program):
    peaks = {"exact": (300, 0), "torch:0.5": (60, 0), "hot": (50, 100)}
    rows = [
        {"case": "a", "config": config, "best_ms": 10.0, "peak_bytes": peak << 20, "error": "",
         "asked_bytes": asked << 20}
        for config, (peak, asked) in peaks.items()
    ]  # fmt: skip
    lines = program("tables").budgets([{"rows": [*rows, {**rows[1], "error": "it died"}]}])
    assert lines[1:] == [
        ("a: stock", "", "300", "", "10.0", ""),
        ("", "100", "50", "0.50", "10.0", "its least is 60"),
    ]


def test_against_stock(program, tmp_path):
    """A process a row; what is measured of each configuration stands beside stock's."""
    file = tmp_path / "rows.json"
    rows = program("against_stock").main(
        rows="vit-tiny",
        device="cpu",
        dtype="fp32",
        configs="exact,hot",
        rounds=1,
        jobs=1,
        json_file=file,
        child=None,
    )
    assert [row.config for row in rows] == ["exact", "hot"]
    stock, ours = rows
    assert ours.loss == pytest.approx(stock.loss, rel=1e-4)
    assert 0 < ours.peak_bytes < stock.peak_bytes
    assert min(stock.best_ms, stock.host_ms, ours.best_ms, ours.host_ms) > 0
    assert len(json.loads(file.read_text())["rows"]) == 2


def test_layers(program, tmp_path, monkeypatch):
    layers, file = program("layers"), tmp_path / "layers.json"
    monkeypatch.setitem(layers.SHAPES, "small", [("small", 20, 48, 32)])
    layers.main(shapes="small", batch=16, rounds=2, json_file=file)
    (row,) = json.loads(file.read_text())["layers"]
    assert set(row["rounds"]) == set(layers.METHODS)
    assert all(len(times) == 2 for times in row["rounds"].values())
    with pytest.raises(Exception, match="CUDA graphs want --device cuda"):
        layers.main(shapes="small", graph=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_layers_as_captured_graphs(program):
    layers = program("layers")
    sizes = (64, 96, 128), 4
    times = layers.measure(*sizes, torch.bfloat16, torch.device("cuda"), 2, graph=True)
    assert all(min(times[name]) > 0 for name in layers.METHODS)


@pytest.mark.parametrize("row", ["gpt2-tiny-loss", "300x40009x64", "mlps"])
def test_heads_and_small_layers_against_stock(program, row):
    benchmark, (exact, *others) = (
        program("against_stock"),
        ("exact", "hot", "hot:head=int8:min_gain=0"),
    )
    device = torch.device("cpu")
    *_, (stock, *rows) = benchmark.measure(row, [exact, *others], device, "fp32", 1)
    for ours in rows:
        assert ours.loss == pytest.approx(stock.loss, rel=1e-5)
        assert row == "mlps" or ours.peak_bytes < stock.peak_bytes


def test_others_losses_are_of_models_that_return_theirs_only(program):
    benchmark = program("against_stock")
    with pytest.raises(ValueError, match="returns nothing else"):
        next(benchmark.measure("mlps", ["liger"], torch.device("cpu"), "fp32", 1))
    with pytest.raises(Exception, match="known are LxOxI"):
        benchmark.case_of("8x8")


def test_a_gradient_whose_terms_cancel_is_not_firm(program):
    """A bias in front of a norm along rows, off by an epsilon: nearly nothing is left of it."""
    zoo = program("zoo_measure")
    torch.manual_seed(0)
    first, second = torch.nn.Linear(32, 64), torch.nn.Linear(64, 8)
    model = torch.nn.Sequential(first, torch.nn.BatchNorm1d(64, eps=1e-2), second)
    x, target = torch.randn(512, 32), torch.randn(512, 8)
    built = program("zoo_models").Built(model, lambda m: (m(x) * target).mean())
    exact = zoo.gradients(built.loss(model), model)
    kept = zoo.cosines(zoo.noisy_gradients(built), exact)
    assert kept["0.bias"] < zoo.FIRM
    assert min(cosine for name, cosine in kept.items() if name != "0.bias") > 0.99
    result = zoo.Result("x")
    got = {**exact, "0.bias": -exact["0.bias"] + 1e-3 * exact["2.bias"].norm()}
    exact["0.bias"] += 1e-3 * exact["2.bias"].norm()  # not below what counts as rounding
    kept["0.bias"] = -1.0
    zoo.note_gradients(result, got, exact, kept)
    assert result.worst_name == "0.bias"
    assert result.firm == result.compared - 1
    assert result.firm_worst == pytest.approx(1.0)


PLACE = "# A page\n\n<!-- zoo -->\nold\n<!-- end -->\n\nCauses, by hand.\n"


def test_a_model_of_the_zoo(program, tmp_path):
    """Uncompiled; on the page what was written by hand stays."""
    zoo, results, page = program("zoo"), tmp_path / "zoo.jsonl", tmp_path / "zoo.md"
    models = zoo.every_model()
    assert len(models) >= 150
    setting = zoo.Setting(torch.device("cpu"), False, results, "abc")
    name = "transformers:gpt2"
    setting.write(setting._tried(name, models[name]))
    setting.write(zoo.Result("broken", error="why", parameters=1))
    zoo.run(only=name, out=results)  # is there
    result = zoo.known(results)[name]
    assert result.rewritten == result.products - 1  # but the head
    assert 0 < result.held < 0.4 * result.uncompressed
    assert result.worst > 0.99
    assert result.loss_off < 1e-6
    assert 0 < result.hot_off < 0.05
    assert result.firm == result.compared > 20
    assert 0 < result.worst_norm <= 1
    page.write_text(PLACE)
    zoo.page(results, page)
    text = page.read_text()
    assert "1 ran, 1 failed (broken)" in " ".join(text.split())
    assert f"| {name} | " in text
    assert "kernels" not in text.replace("Causes", "")
    assert "| broken | why |" in text
    assert "old" not in text
    assert text.endswith("Causes, by hand.\n")


def test_the_zoo_beside_stock(program, tmp_path, monkeypatch):
    zoo, models = program("zoo"), program("zoo_models")
    with monkeypatch.context() as lent:
        lent.setattr(models, "MOST", 1000)
        with pytest.raises(ValueError, match="at most 1,000"):
            models._configured("bert", "BertForMaskedLM", models._text)
    results, name = tmp_path / "zoo.jsonl", "torchvision:fast_rcnn"
    setting = zoo.Setting(torch.device("cpu"), True, results, "")
    setting.write(setting._tried(name, zoo.every_model()[name]))
    (row,) = zoo.known(results).values()
    assert not row.error
    assert row.rewritten == 0  # sixteen rows: products on integers take longer there
    assert row.floor == 0  # fp32 on a CPU
    assert row.stock_off < 1e-4 < row.hot_off < 0.05
    assert row.firm_worst > 0.99
    assert min(row.stock_peak, row.hot_peak) > 0
    (tmp_path / "zoo.md").write_text(PLACE)
    zoo.page(results, tmp_path / "zoo.md")
    page = (tmp_path / "zoo.md").read_text()
    assert f"| {name} | 14 | 0 of 4 |" in page


def test_float8_takes_what_hardware_can(program):
    step, layer = program("step"), torch.nn.Linear(48, 32)
    assert step.takes_float8(layer, "body")
    assert not step.takes_float8(layer, "head")
    assert not step.takes_float8(torch.nn.Linear(48, 10), "body")
    assert not step.takes_float8(torch.nn.Conv2d(1, 16, 3), "stem")


def test_models_by_the_clock_stand_by_how_much_is_won(program):
    clock = program("zoo_clock")
    rows = [
        clock.Row("a", 8, (10.0, 12.5), peak_bytes=(4 << 20, 2 << 20)),
        clock.Row("b", 8, (10.0, 8.0), peak_bytes=(4 << 20, 1 << 20), first_s=(3.2, 4.1)),
        clock.Row("c", error="it died"),
    ]
    head, *found = clock.lines(rows)
    assert head[4:7] == ("speed", "peak MiB", "of stock's")
    assert [(line[0], *line[4:]) for line in found] == [
        ("b", "1.25", "1", "0.25", "3 -> 4"), ("a", "0.80", "2", "0.50", "0 -> 0"),
    ]  # fmt: skip


def test_statements_of_generated_code_are_timed(program):
    host = program("host_time")
    code, space = host.Code(), {}
    exec(
        code.timed("def call(args):\n    x, = args\n    buf0 = x + 1\n    del x\n    return buf0"),
        space,
    )
    assert space["call"]([1]) == 2
    assert code.steps == []  # not asked to
    host.Code.noting = True
    assert space["call"]([2]) == 3
    host.Code.noting = False
    assert [len(marks) for marks in code.steps] == [4]
    found = {row.kind: row for row in code.rows("hot", 1)}
    assert {kind: row.count for kind, row in found.items()} == {"other": 2, "deletion": 1}
    assert all(row.us > 0 for row in found.values())
    (line,) = host.lines([host.Row("hot", 1, "deletion", 2, 3.0)])[1:]
    assert line == ("1", "deletion", "hot", "2", "1.50", "3")


def test_a_model_the_zoo_has_not_is_named(program):
    with pytest.raises(typer.BadParameter, match="timm:nothing"):
        program("zoo_clock").main(models="timm:nothing", device="cpu")
    with pytest.raises(typer.BadParameter, match="timm:nothing"):
        program("host_time").main(model="timm:nothing", device="cpu")

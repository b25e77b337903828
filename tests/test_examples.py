"""Every example runs as a user would run it; the data loaders read what they say."""

import functools
import importlib
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from torch._inductor.compile_fx import compile_fx

from hot_compile.backend import hot
from hot_compile.inspect import Reports, run_uncompiled

EXAMPLES = Path(__file__).parents[1] / "examples"
HELPERS = {"common", "data"}
NOW, LATER = "gradients in the forward", "logits twice"


@pytest.fixture
def example(monkeypatch):
    """Import one example as if started with ``python examples/<name>.py``."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    torch._dynamo.reset()
    yield importlib.import_module
    for name in HELPERS | {p.stem for p in EXAMPLES.glob("*.py")}:
        sys.modules.pop(name, None)


def test_every_example_has_a_main(example):
    for path in EXAMPLES.glob("*.py"):
        if path.stem not in HELPERS:
            assert callable(example(path.stem).main)


@pytest.mark.parametrize("checkpointed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_lora_learns(example, tmp_path, checkpointed):
    """The tiny model on Python's source: node by node, as ``test_minimal`` is lowered."""
    pytest.importorskip("peft")
    backend = functools.partial(hot, inner_compile=run_uncompiled)
    tiny = {"batch": 2, "length": 64, "out": tmp_path, "quick": True, "checkpointed": checkpointed}
    losses = example("finetune_lora").main(backend=backend, **tiny)
    assert losses[-1] < losses[0]
    assert (tmp_path / "adapter_model.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "heads"),
    [("finetune_dpo", [LATER, NOW]), pytest.param("distil", [NOW], marks=pytest.mark.slow)],
)
def test_losses_of_two_models_learn_without_logits(example, name, heads):
    """Policy and reference, student and teacher, in one graph: node by node."""
    pytest.importorskip("peft")
    reports = Reports()
    backend = functools.partial(
        hot, inner_compile=run_uncompiled, recorder=reports, options={"head_min_bytes": 0}
    )
    losses = example(name).main(backend=backend, length=48, quick=True)
    assert min(losses) < losses[0]
    (graph,) = reports.graphs
    assert sorted(head.way for head in graph.plan.heads) == sorted(heads)


def test_minimal(example):
    assert 0 < example("minimal").main() < 1


@pytest.fixture
def node_by_node(example, monkeypatch):
    """What the example compiles runs so: ``test_minimal`` is lowered as in a user's run."""
    whole = {"inductor": compile_fx, "hot": hot}

    def compiled(variant, model):
        backend = functools.partial(whole[variant.backend], inner_compile=run_uncompiled)
        return torch.compile(model, backend=backend, options=variant.options)

    monkeypatch.setattr(example("common").Variant, "compile", compiled)


@pytest.mark.usefixtures("node_by_node")
@pytest.mark.parametrize(
    ("name", "picture"),
    [("train_vit_digits", "vit_digits.png"), ("train_char_gpt", "char_gpt.png")],
)
def test_quick_training(example, tmp_path, name, picture):
    trains(example, tmp_path, name, picture)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "picture"),
    [
        ("train_vit_digits", "vit_digits.png"),
        ("train_resnet_digits", "resnet_digits.png"),
        ("train_resnet_digits --task glyphs", "resnet_glyphs.png"),
        ("train_char_gpt", "char_gpt.png"),
    ],
)
def test_quick_training_lowered(example, tmp_path, name, picture):
    trains(example, tmp_path, name, picture)


def trains(example, tmp_path, name, picture):
    name, _, task = name.partition(" --task ")
    exact, hot = example(name).main(quick=True, out=tmp_path, **({"task": task} if task else {}))
    assert (tmp_path / picture).stat().st_size > 1000
    assert len(exact.losses) == len(hot.losses) == 8
    assert exact.losses[0] == pytest.approx(hot.losses[0], rel=1e-5)  # the forward is exact
    assert exact.losses[-1] == pytest.approx(hot.losses[-1], rel=0.1)
    assert 0 < hot.held <= exact.held


def _write_folder(path, size):
    from PIL import Image

    for part in ("train", "val"):
        for number, name in enumerate(("cat", "dog")):
            (path / part / name).mkdir(parents=True)
            for shade in range(4):
                colour = (60 * shade, 200 * number, 30)
                Image.new("RGB", (size, size), colour).save(path / part / name / f"{shade}.png")


def test_batches_of_images_of_ones_own(example, tmp_path):
    _write_folder(tmp_path, 40)
    _write_cifar(tmp_path / "cifar" / "train", 8)
    _write_cifar(tmp_path / "cifar" / "test", 3)
    module, draw = example("train_images"), torch.Generator().manual_seed(0)
    read = {
        (8, 8, 3): module.cifar_data(tmp_path / "cifar", 48, 4),
        (2, 8, 8): module.folder_data(tmp_path, 48, 4, workers=0),
    }
    for (classes, images, unseen), data in read.items():
        assert data[:2] == (classes, images)
        batches = data[2](draw)
        for _ in range(5):  # more than an epoch
            x, y = next(batches)
            assert x.shape == (4, 3, 48, 48)
            assert y.shape == (4,)
        held_out = list(data[3]())
        assert sum(len(y) for _, y in held_out) == unseen
        first = torch.eye(classes)[:1]  # what a model says that always answers 0
        right = module.accuracy(lambda x, y=first: y.expand(len(x), -1), held_out, x.device)
        assert right == pytest.approx(sum(int((y == 0).sum()) for _, y in held_out) / unseen)


@pytest.mark.slow
@pytest.mark.parametrize("data", ["cifar100", "folder"])
def test_quick_training_on_images_of_ones_own(example, tmp_path, data):
    if data == "folder":
        _write_folder(tmp_path, 40)
    else:
        _write_cifar(tmp_path / "train", 8)
        _write_cifar(tmp_path / "test", 3)
    module = example("train_images")
    runs = module.main(data, tmp_path, model="test_resnet", workers=0, out=tmp_path, quick=True)
    exact, hot = runs
    assert (tmp_path / f"{data}_test_resnet_default.png").stat().st_size > 1000
    assert len(exact.losses) == len(hot.losses) == 8
    assert exact.losses[0] == pytest.approx(hot.losses[0], rel=1e-5)
    assert 0 <= hot.score <= 1
    assert 0 < hot.held < exact.held


def test_every_row_of_every_table_is_valid(example):
    from hot_compile.backend import check_options

    module = example("train_images")
    for table in module.TABLES:
        exact, *rows = module.variants(table)
        assert exact.backend == "inductor"
        assert rows
        for row in rows:
            check_options(row.options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": "faces"}, "cifar100 or folder"),
        ({"table": "9"}, "one of default, 1, 2, 3, 4"),
        ({"table": "3"}, "--lora"),
        ({"lora": True}, "--lora"),
    ],
)
def test_what_does_not_fit_is_answered(example, tmp_path, options, message):
    with pytest.raises(Exception, match=message):
        example("train_images").main(**{"data": "folder", "path": tmp_path, **options})


def test_a_folder_without_held_out_images(example, tmp_path):
    _write_folder(tmp_path, 40)
    (tmp_path / "val").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match="without a folder val"):
        example("train_images").main("folder", tmp_path, model="test_resnet", quick=True)


@pytest.mark.slow
@pytest.mark.parametrize("table", ["1", "2", "3", "4"])
def test_tables_of_the_paper_run(example, tmp_path, table):
    """A few steps of every row; table 3 by peft."""
    lora = table == "3"
    if lora:
        pytest.importorskip("peft")
    _write_cifar(tmp_path / "train", 8)
    _write_cifar(tmp_path / "test", 3)
    main, kind = example("train_images").main, "test_vit"
    runs = main("cifar100", tmp_path, kind, lora=lora, table=table, out=tmp_path, quick=True)
    assert len(runs) == 1 + len(example("train_images").TABLES[table])
    assert all(len(run.losses) == 8 and all(np.isfinite(run.losses)) for run in runs)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["hot"])
def test_digits_accuracy_is_kept(example, tmp_path, recipe):
    exact, hot = example("train_vit_digits").main(recipe=recipe, out=tmp_path)
    assert exact.score > 0.95
    assert abs(exact.score - hot.score) < 0.02  # one seed; the mean of three is in the benchmarks


@pytest.mark.slow
def test_resnet_accuracy_is_kept(example, tmp_path):
    exact, hot = example("train_resnet_digits").main(task="glyphs", out=tmp_path)
    assert exact.score > 0.85
    assert abs(exact.score - hot.score) < 0.02  # one seed; the mean of three is in the benchmarks


def test_unknown_task_lists_the_valid_ones(example, tmp_path):
    with pytest.raises(Exception, match="two-digits, glyphs"):
        example("train_resnet_digits").main(task="faces", quick=True, out=tmp_path)


@pytest.mark.usefixtures("node_by_node")
def test_unknown_recipe_lists_the_valid_ones(example, tmp_path):
    with pytest.raises(Exception, match="fast"):
        example("train_vit_digits").main(recipe="warm", quick=True, out=tmp_path)


def test_variants_start_equal_and_see_the_same_batches(example):
    task = example("train_vit_digits").digits_task(quick=True)
    first, second = (next(task.batches(torch.Generator().manual_seed(3))) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_digits(example):
    split = example("data").digits()
    assert split.train_x.shape == (1347, 1, 32, 32)
    assert split.held_out_x.shape == (450, 1, 32, 32)
    assert set(split.train_y.tolist()) == set(split.held_out_y.tolist()) == set(range(10))


def test_shifted_moves_whole_images(example):
    shifted = example("data").shifted
    x = torch.randn(64, 1, 8, 8)
    moved = shifted(x, 1, torch.Generator().manual_seed(0))
    centre = moved[:, :, 1:-1, 1:-1]
    patches = x.unfold(2, 6, 1).unfold(3, 6, 1).flatten(2, 3)
    assert (patches == centre.unsqueeze(2)).flatten(3).all(-1).any(-1).all()


def test_python_source(example):
    data = example("data")
    train, held_out = data.python_source(limit=300_000)
    assert train.dtype == torch.uint8
    assert int(train.max()) < len(data.CHARACTERS)
    assert len(held_out) == 30_000
    assert 200_000 < len(train) <= 270_000
    assert "import" in "".join(data.CHARACTERS[i] for i in train[:20_000].tolist())


def test_glyphs(example):
    data = example("data")
    split = data.glyphs(classes=5, per_class=10, first=95)
    assert split.train_x.shape == (40, 1, 32, 32)
    assert split.held_out_x.shape == (10, 1, 32, 32)
    assert torch.isfinite(split.train_x).all()
    assert len(set(data.GLYPHS)) == len(data.GLYPHS) >= 100
    with pytest.raises(ValueError, match="at most"):
        data.glyphs(classes=5, first=len(data.GLYPHS))


def test_glyphs_render_differently(example):
    data = example("data")
    font = data._fonts(32)[0]
    pictures = {data._render(c, font, 32).numpy().tobytes() for c in data.GLYPHS}
    assert len(pictures) == len(data.GLYPHS)


def _write_cifar(path, count):
    path.parent.mkdir(exist_ok=True)
    raw = {
        b"data": np.random.default_rng(0).integers(0, 256, (count, 3072), dtype=np.uint8),
        b"fine_labels": list(range(count)),
    }
    path.write_bytes(pickle.dumps(raw, protocol=2))


def test_cifar100(example, tmp_path):
    data = example("data")
    _write_cifar(tmp_path / "train", 6)
    _write_cifar(tmp_path / "test", 3)
    split = data.cifar100(tmp_path)
    assert split.train_x.shape == (6, 3, 32, 32)
    assert split.held_out_y.tolist() == [0, 1, 2]
    assert split.train_x.abs().max() < 3


def test_cifar100_missing_or_hostile(example, tmp_path):
    data = example("data")
    with pytest.raises(FileNotFoundError, match="cifar-100-python"):
        data.cifar100(tmp_path)
    (tmp_path / "train").write_bytes(pickle.dumps(print))
    with pytest.raises(pickle.UnpicklingError, match="expected only arrays"):
        data.cifar100(tmp_path)


@pytest.mark.parametrize("train", [True, False])
def test_image_folder(example, tmp_path, train):
    from PIL import Image

    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (50, 40), (200, 30, 30)).save(tmp_path / name / "0.png")
    images = example("data").image_folder(tmp_path, size=32, train=train)
    picture, label = images[1]
    assert len(images) == 2
    assert picture.shape == (3, 32, 32)
    assert label == 1


@pytest.mark.slow
def test_diffusion_learns_by_lora(example, tmp_path):
    """The tiny UNet, adapted by ``add_adapter``, on digits: node by node."""
    pytest.importorskip("diffusers")
    backend = functools.partial(hot, inner_compile=run_uncompiled)
    losses = example("finetune_diffusion").main(backend=backend, out=tmp_path, quick=True)
    assert losses[-1] < losses[0]
    assert (tmp_path / "pytorch_lora_weights.safetensors").exists()


def test_diffusion_wants_a_model_and_images(example, tmp_path):
    pytest.importorskip("peft")
    module = example("finetune_diffusion")
    with pytest.raises(typer.BadParameter, match="go together"):
        module.main(model="some/pipeline")
    with pytest.raises(FileNotFoundError, match=r"no \.jpg"):
        module.main(model="some/pipeline", images=tmp_path)

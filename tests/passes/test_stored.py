"""What storing a tensor does to the gradients that it feeds, of those that anybody judges."""

import functools
import json

import pytest
import torch
from samples_looks import compiled
from torch import nn

import hot_compile
from hot_compile.passes.measure.stored import Fed, Quiet, is_vector


class Gained(nn.Module):
    """One number over all channels, which a norm behind the next convolution takes out again."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.gain * x


class Channelwise(nn.Module):
    """As RepVGG, MobileOne and FastViT have it: one more branch of a number a channel, normed."""

    def __init__(self, channels):
        super().__init__()
        self.scale = nn.Conv2d(channels, channels, 1, groups=channels, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        nn.init.ones_(self.scale.weight)  # far from where the norm's eps counts

    def forward(self, x):
        return x + self.norm(self.scale(x))


def images(middle):
    torch.manual_seed(0)
    conv = functools.partial(nn.Conv2d, kernel_size=3, padding=1, bias=False)
    return nn.Sequential(
        conv(3, 16), nn.BatchNorm2d(16), nn.ReLU(), middle, conv(16, 16), nn.BatchNorm2d(16),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


def trained(run, model, steps):
    x, labels = torch.randn(16, 3, 24, 24), torch.randint(10, (16,))
    for _ in range(steps):
        model.zero_grad()
        nn.functional.cross_entropy(run(x), labels).backward()


def test_nobody_is_blamed_for_a_gradient_that_nobody_judges(tmp_path):
    """It is not zero, but for a thousandth of the others, and wrong by many times itself."""
    model = images(Gained())
    monitor = hot_compile.Monitor(every=1, budget=1e-6, rotate=1, path=tmp_path / "looks")
    trained(compiled(model, memory_min_bytes=0, monitor=monitor), model, 4)
    lines = [json.loads(line) for line in (tmp_path / "looks").read_text().splitlines()]
    stored = next(line["stored"] for line in lines if line.get("stored"))
    assert stored
    for name, tensor in stored.items():
        assert 0 < tensor["errors"][tensor["scheme"]]["error"] < 0.2, name


def test_a_number_a_channel_in_front_of_a_norm_costs_nothing():
    """Its gradient is zero but for rounding, though it is a convolution's weight."""
    model = images(Channelwise(16))
    run = compiled(model, memory_min_bytes=0)
    trained(run, model, 6)
    found = hot_compile.certificate(run)
    assert len(found.looks) >= 3
    assert not found.repaired
    assert found.errors.worst < 0.2


@pytest.mark.parametrize(
    ("shape", "is_one"),
    [((), True), ((64,), True), ((64, 1, 1, 1), True), ((1, 1, 64), True), ((64, 2), False)],
)
def test_what_a_vector_is(shape, is_one):
    assert is_vector(torch.empty(shape)) is is_one


def test_of_a_size_that_nobody_knows_nothing_is_asked():
    shape_env = torch.fx.experimental.symbolic_shapes.ShapeEnv()
    with torch._subclasses.FakeTensorMode(shape_env=shape_env):
        rows = shape_env.create_unbacked_symint()
        assert not is_vector(torch.empty(rows, 4))
        assert is_vector(torch.empty(rows, 1))
    assert not shape_env.guards


@pytest.mark.parametrize(
    ("own", "vector", "norm", "error"),
    [
        (True, True, 1e-6, 0.1), (True, False, 1e-6, 5.0), (False, True, 1e-6, 5.0),
        (True, False, 1e-12, 0.1), (False, False, 1e-12, 5.0),
    ],
)  # fmt: skip
def test_what_is_passed_on_counts_and_matrices_do_sooner(own, vector, norm, error):
    fed = Fed("x", None, (True, own), (False, vector), {"rows8": None})
    errors = {
        "norms": torch.tensor([1.0, norm]),
        "": torch.tensor([0.0, 1e-3]),
        "rows8": torch.tensor([0.1, 5.0]),
    }
    found = fed.measures(errors, Quiet(1e-3, 1e-7))["rows8"]
    assert max(found.error, found.passed) == pytest.approx(error)

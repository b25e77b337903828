"""Every form of a convolution is found and rewritten or refused aloud; gradients agree."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hot_compile.backend import hot
from hot_compile.inspect import Reports, run_uncompiled
from hot_compile.testing import cosine, hot_step

ALWAYS = {"recipe": "int8", "min_gain": 0, "override": {"*": "int8"}}


def check(model, *inputs, options=ALWAYS, floor=0.98, lower=False, **compile_options):
    """Run exact and hot from the same weights; every gradient must agree; return the decisions."""
    model.zero_grad()
    exact = copy.deepcopy(model)
    want = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    exact(*want).float().square().mean().backward()
    _, graphs = hot_step(
        lambda *a: model(*a).float().square().mean(),
        *inputs,
        options=options,
        lower=lower,
        **compile_options,
    )
    pairs = list(zip(model.named_parameters(), exact.parameters(), strict=True))
    pairs += [(("input", t), w) for t, w in zip(inputs, want, strict=True) if t.requires_grad]
    for (name, got), wanted in pairs:
        assert got.grad.shape == wanted.grad.shape
        assert got.grad.stride() == wanted.grad.stride(), name
        assert cosine(got.grad, wanted.grad) > floor, name
    return {d.site: d for graph in graphs for d in graph.plan}


def strategies(decisions):
    return {name: d.strategy.value for name, d in decisions.items()}


def images(channels=8, size=(9, 10), batch=3, **kwargs):
    return torch.randn(batch, channels, *size, **kwargs)


FORMS = {
    "3x3": nn.Conv2d(8, 20, 3, padding=1),
    "bias-free": nn.Conv2d(8, 20, 3, bias=False),
    "1x1": nn.Conv2d(8, 20, 1),
    "1x1 stride 2": nn.Conv2d(8, 20, 1, stride=2),
    "1x1 padded": nn.Conv2d(8, 20, 1, padding=1),
    "patches": nn.Conv2d(8, 20, 2, stride=2),
    "stride 2": nn.Conv2d(8, 20, 3, stride=2, padding=1),
    "dilated": nn.Conv2d(8, 20, 3, padding=2, dilation=2),
    "uneven": nn.Conv2d(8, 20, (3, 1), stride=(1, 2), padding=(2, 0), dilation=(2, 1)),
    "same": nn.Conv2d(8, 20, 3, padding="same"),
    "reflect": nn.Conv2d(8, 20, 3, padding=1, padding_mode="reflect"),
    "transposed": nn.ConvTranspose2d(8, 20, 3, stride=2, padding=1, output_padding=1),
    "transposed 1x1": nn.ConvTranspose2d(8, 20, 1),
    "transposed patches": nn.ConvTranspose2d(8, 20, 2, stride=2),
}


HLA8 = {"3x3", "1x1", "uneven", "transposed"}
"""Forms that the quick run has by both recipes: how a layer becomes a product is the same."""


@pytest.mark.parametrize(
    ("form", "recipe"),
    [
        *((form, "int8") for form in FORMS),
        *(
            pytest.param(form, "hla8", marks=() if form in HLA8 else pytest.mark.slow)
            for form in FORMS
        ),
    ],
)
def test_forms(form, recipe):
    layer = copy.deepcopy(FORMS[form])
    floor = {"int8": 0.98, "hla8": 0.5}[recipe]
    options = {**ALWAYS, "override": {"*": recipe}}
    for memory_format in (torch.contiguous_format, torch.channels_last):
        model = nn.Sequential(layer).to(memory_format=memory_format)
        x = images().to(memory_format=memory_format).requires_grad_()
        found = check(model, x, options=options, floor=floor)
        assert strategies(found) == {"0": recipe}, found["0"].reason
        assert found["0"].gx


@pytest.mark.parametrize("form", ["3x3", "1x1", "stride 2", "transposed"])
def test_the_papers_recipe(form):
    """HLA(8) on 16 consecutive rows of the unfolded x, INT8 per tensor; random data loses half."""
    layer = copy.deepcopy(FORMS[form])
    options = {"recipe": "paper", "min_gain": 0, "override": {"*": "hla8"}}
    found = check(nn.Sequential(layer), images(requires_grad=True), options=options, floor=0.4)
    assert (found["0"].strategy, found["0"].tiles, found["0"].gx_bits) == ("hla8", False, 4)


@pytest.mark.parametrize("recipe", ["int8", "hla8"])
def test_other_dimensions(recipe):
    options = {**ALWAYS, "override": {"*": recipe}}
    floor = 0.5 if recipe == "hla8" else 0.97
    one = nn.Sequential(nn.Conv1d(8, 12, 5, padding=2), nn.ReLU(), nn.Conv1d(12, 8, 1))
    assert set(strategies(check(one, torch.randn(3, 8, 50), options=options, floor=floor))) == {
        "0",
        "2",
    }
    three = nn.Sequential(nn.Conv3d(4, 12, 3, padding=1), nn.ReLU(), nn.Conv3d(12, 4, 1))
    found = check(three, torch.randn(2, 4, 5, 6, 7), options=options, floor=floor)
    assert set(strategies(found).values()) == {recipe}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    options = {**ALWAYS, "override": {"*": "int8"}}
    model = nn.Sequential(nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 8, 1)).to(dtype)
    found = check(model, images().to(dtype), options=options, floor=0.97)
    assert set(strategies(found).values()) == {"int8"}


def test_autocast():
    model = nn.Sequential(nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 8, 1))

    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x)

    found = check(Cast(), images())
    assert strategies(found) == {"inner.0": "int8", "inner.2": "int8"}
    assert found["inner.0"].dtype == "bfloat16"


def test_first_convolution_is_left_alone_unless_overridden():
    model = nn.Sequential(nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 8, 3))
    found = check(model, images(), options={"recipe": "int8", "min_gain": 0})
    assert strategies(found) == {"0": "exact", "2": "int8"}
    assert "first convolution" in found["0"].reason
    assert not found["0"].gx
    assert strategies(check(model, images()))["0"] == "int8"


def test_refusals_say_why():
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 3, groups=2))
    found = check(model, images(), floor=1 - 1e-5)
    assert "depthwise" in found["0"].reason
    assert "grouped (2 groups)" in found["1"].reason
    double = check(nn.Conv2d(8, 8, 3).double(), images().double(), floor=1 - 1e-9)
    assert all("float64" in d.reason for d in double.values())

    class Dynamic(nn.Module):
        def __init__(self):
            super().__init__()
            self.make = nn.Conv2d(8, 8, 3)

        def forward(self, x):
            return F.conv2d(self.make(x), self.make(x[:, :, :5, :5]))

    found = check(Dynamic(), images(batch=8), floor=0.98)
    assert any("both operands are activations" in d.reason for d in found.values())


def test_frozen_weight():
    model = nn.Sequential(nn.Conv2d(8, 12, 3), nn.ReLU(), nn.Conv2d(12, 8, 3))
    model[2].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    model.zero_grad()
    options = {"recipe": "int8", "min_gain": 0, "override": {"0": "int8"}}
    x = images()
    exact = copy.deepcopy(model)
    exact(x).square().mean().backward()
    _, (graph,) = hot_step(lambda x: model(x).square().mean(), x, options=options)
    assert graph.plan["2"].strategy == "gx-only"
    assert cosine(model[0].weight.grad, exact[0].weight.grad) > 0.98


def test_gx_only_leaves_the_weight_gradient_exact():
    model = nn.Sequential(nn.Conv2d(8, 12, 3), nn.ReLU(), nn.Conv2d(12, 8, 3))
    check(model, images(), options={**ALWAYS, "override": {"*": "gx-only"}})


def test_shared_module():
    layer = nn.Conv2d(8, 8, 3, padding=1)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(self.layer(x).relu())

    assert strategies(check(Twice(), images())) == {"layer": "int8", "layer#2": "int8"}


@pytest.mark.parametrize(
    ("recipe", "lower"),
    [
        ("int8", False),
        ("hla8", False),
        *(pytest.param(r, True, marks=pytest.mark.slow) for r in ("int8", "hla8")),
    ],
)
def test_dynamic_batch_compiles_once(recipe, lower):
    model = nn.Sequential(
        nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 8, 1), nn.Conv2d(8, 4, 2, stride=2)
    )
    reports = Reports()
    options = {**ALWAYS, "override": {"*": recipe}}
    keywords = {} if lower else {"inner_compile": run_uncompiled}
    backend = functools.partial(hot, options=options, recorder=reports, **keywords)
    compiled = torch.compile(model, backend=backend)
    for batch in (3, 5, 4):
        x = images(batch=batch)
        torch._dynamo.mark_dynamic(x, 0)
        compiled(x).square().mean().backward()
    assert len(reports.graphs) == 1
    assert len(reports.graphs[0].plan.rewritten) == 3


def test_symbolic_spatial_sizes_are_refused():
    model = nn.Conv2d(8, 12, 3, padding=1)
    x = images()
    torch._dynamo.mark_dynamic(x, 2)
    found = check(model, x, floor=1 - 1e-5)
    assert all("symbolic" in d.reason for d in found.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "memory_format"),
    [
        ("int8", torch.channels_last),
        ("hla8", torch.contiguous_format),
        ("int8", torch.contiguous_format),
        ("hla8", torch.channels_last),
    ],
)
def test_lowered_by_inductor(recipe, memory_format):
    """As a user's run is: a residual block with normalisation, strides and a shortcut."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
            self.b = nn.Conv2d(16, 16, 3, padding=1, bias=False)
            self.short = nn.Conv2d(8, 16, 1, stride=2, bias=False)
            self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(3))

        def forward(self, x):
            y = self.norms[1](self.b(self.norms[0](self.a(x)).relu()))
            return (y + self.norms[2](self.short(x))).relu()

    model = Block().to(memory_format=memory_format)
    x = images(size=(12, 12), batch=4).to(memory_format=memory_format).requires_grad_()
    options = {**ALWAYS, "override": {"*": recipe}}
    found = check(model, x, options=options, floor=0.4 if recipe == "hla8" else 0.97, lower=True)
    assert set(strategies(found).values()) == {recipe}

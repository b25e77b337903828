"""The 8-bit forward in graphs: what takes its place, what passes through, what stays."""

import warnings
from functools import partial

import pytest
import torch
from samples_forward import ALWAYS, EXACT_BACKWARD, PRODUCT, QUANTISE, Checkpointed, calls, step
from torch import nn
from torch.nn import functional as F

from hot_compile.backend import hot
from hot_compile.errors import OptionWarning
from hot_compile.inspect import Explanation, run_uncompiled
from hot_compile.page import page_data
from hot_compile.passes.forward import rewrite as rewriting
from hot_compile.passes.forward.product import Form, int8_product
from hot_compile.testing import sqnr


class Block(nn.Module):
    """A norm and a MLP around a residual: nothing reads the input but the norm."""

    def __init__(self, width=64, bias=True):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width, bias=bias)
        self.fc2 = nn.Linear(2 * width, width, bias=bias)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


def test_gradients_pass_straight_through():
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 48), torch.randn(33, 64, requires_grad=True)
    y, (g_w, g_b), reports = step(layer, x, options=EXACT_BACKWARD)
    assert calls(reports, PRODUCT) == 1
    want = int8_product(
        x.detach(), layer.weight.detach(), torch.ones(33), layer.bias.detach(), Form(), y.dtype
    )
    assert torch.equal(y, want), "the bias is added in the epilogue"
    g_y = 2 * y / y.numel()
    torch.testing.assert_close(g_w, g_y.t() @ x.detach())
    torch.testing.assert_close(g_b, g_y.sum(0))
    torch.testing.assert_close(x.grad, g_y @ layer.weight.detach())


def test_convolutions_stay_exact_and_say_so():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 8, 1))
    _, _, reports = step(net, torch.randn(2, 3, 16, 16), options=EXACT_BACKWARD)
    first, *others = reports[0].plan.forwards
    assert first.reason == "first layer: it reads the graph's input"
    assert [(f.int8, f.reason) for f in others] == [
        (False, "convolution: it has no 8-bit forward")
    ] * 2


@pytest.mark.parametrize(
    ("autocast", "bias"),
    [
        (None, True),
        (torch.bfloat16, False),
        pytest.param(None, False, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("lower", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_block_trains_nearly_as_exact_and_holds_no_more(autocast, bias, lower):
    torch.manual_seed(0)
    model, x = Block(bias=bias), torch.randn(16, 17, 64)
    args = {"autocast": autocast, "lower": lower}
    y, gradients, reports = step(model, x, options=ALWAYS, **args)
    default = step(model, x, options={**ALWAYS, "forward": "exact"}, **args)
    assert calls(reports, PRODUCT) == 2
    assert calls(default[2], PRODUCT) == 0
    assert reports[0].held_bytes == default[2][0].held_bytes
    assert sqnr(y, default[0]) > 38
    for mine, theirs in zip(gradients, default[1], strict=True):
        assert sqnr(mine, theirs) > 25


def test_inductor_has_code_for_what_evens_columns():
    from torch._inductor.lowering import lowerings

    _, _, reports = step(Block(), torch.randn(5, 3, 64), options=ALWAYS)
    nodes = [node for r in reports for node in r.stages["forward"].nodes]
    targets = {node.target for node in nodes if node.target.startswith(("aten.", "prims."))}
    known = {str(target) for target in lowerings}
    assert "aten.amax.default" in targets
    assert targets <= known


@pytest.mark.slow
def test_lowered_it_is_the_same():
    torch.manual_seed(0)
    model, x = Block(), torch.randn(5, 3, 64)
    (y, *_), (lowered, *_) = (step(model, x, options=ALWAYS, lower=low) for low in (False, True))
    torch.testing.assert_close(lowered, y, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("lower", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_operands_that_need_no_rotation_are_left_to_inductor(lower, monkeypatch):
    monkeypatch.setattr(rewriting, "Form", lambda rotated, weight_is_io: Form(False, weight_is_io))
    torch.manual_seed(0)
    model, x = Block(), torch.randn(16, 17, 64)
    y, gradients, reports = step(model, x, options=ALWAYS, lower=lower)
    assert calls(reports, PRODUCT) == 2
    assert calls(reports, QUANTISE) == 0
    assert sqnr(y, model(x).detach()) > 38
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("recipe", ["int8", "fast", "paper", "luq"])
def test_it_goes_with_every_recipe(recipe):
    model, x = Block(), torch.randn(16, 17, 64)
    *_, gradients, reports = step(model, x, options={**ALWAYS, "recipe": recipe, "lqs": "off"})
    assert [forward.way for forward in reports[0].plan.forwards] == ["int8", "int8"]
    assert all(g.isfinite().all() for g in gradients)


class Shared(nn.Module):
    """q, k and v of one x, as separate layers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.parts = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        x = self.norm(x)
        return torch.cat([part(x) for part in self.parts])


def test_what_several_layers_read_is_quantised_once():
    *_, reports = step(Shared(), torch.randn(32, 64), options=ALWAYS)
    assert calls(reports, PRODUCT) == 3
    assert calls(reports, QUANTISE) == 4, "x, and three weights"
    assert calls(reports, "aten.full.default") == 1


class Added(nn.Module):
    """addmm of a matrix, and W as [I, O]."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x):
        return torch.addmm(x, self.norm(x), self.weight)


def test_any_addend_and_layout_is_taken():
    model, x = Added(), torch.randn(32, 64)
    y, (*_, g_w), reports = step(model, x, options=EXACT_BACKWARD)
    assert calls(reports, PRODUCT) == 1
    assert sqnr(y, model(x).detach()) > 40
    assert g_w.isfinite().all()


def test_dynamic_rows():
    model = Block()
    options = {**ALWAYS, "recipe": "exact"}
    run = torch.compile(
        model, dynamic=True, backend=partial(hot, options=options, inner_compile=run_uncompiled)
    )
    for rows in (40, 33, 17):
        x = torch.randn(rows, 64)
        y = run(x)
        y.sum().backward()
        assert 38 < sqnr(y.detach(), model(x).detach()) < 80


def test_without_a_backward_nothing_changes():
    model, x = Block(), torch.randn(32, 64)
    run = torch.compile(model, backend=partial(hot, options=ALWAYS, inner_compile=run_uncompiled))
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
    model.requires_grad_(False)
    torch.testing.assert_close(run(x), model(x))


@pytest.mark.parametrize("recipe", ["hot", "exact"])
def test_a_checkpointed_region_is_computed_again_as_it_was(recipe):
    torch.manual_seed(0)
    model, x = Block(), torch.randn(32, 8, 64, requires_grad=True)
    options = {**ALWAYS, "recipe": recipe, "memory": "off"}

    y, gradients, reports = step(Checkpointed(model), x, options=options)
    plain = step(model, x, options=options)
    assert torch.equal(y, plain[0])
    assert calls(reports, PRODUCT) == 2
    again = calls(reports, PRODUCT, "backward") - calls(plain[2], PRODUCT, "backward")
    *_, exact = step(Checkpointed(model), x, options={**options, "forward": "exact"})
    assert again == calls(exact, "aten.addmm.default", "backward") > 0
    assert reports[0].held_bytes < plain[2][0].held_bytes
    for mine, theirs in zip(gradients, plain[1], strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_first_layer_stays_exact_but_not_one_that_reads_activations():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(32, 64)
    *_, reports = step(model, x, options=ALWAYS)
    assert [f.int8 for f in reports[0].plan.forwards] == [False, True]
    *_, reports = step(model, x.requires_grad_(), options=ALWAYS)
    assert [f.int8 for f in reports[0].plan.forwards] == [True, True], "as in a block of a model"


@pytest.mark.parametrize("scores", [F.cross_entropy, lambda x, y: x.softmax(1).square().mean()])
def test_heads_and_routers_stay_exact_wherever_the_loss_is(scores):
    class Scored(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.head = Block(), nn.Linear(64, 96)

        def forward(self, x, y):
            with torch.autocast("cpu", torch.bfloat16):
                return scores(self.head(self.block(x)).flatten(0, 1), y)

    model, y = Scored(), torch.randint(0, 96, (32,))
    for keep_head, ways in ((True, ["int8", "int8", "exact"]), (False, ["int8"] * 3)):
        options = {**ALWAYS, "keep_head": keep_head}
        *_, reports = step(model, torch.randn(4, 8, 64), y, options=options)
        assert [forward.way for forward in reports[0].plan.forwards] == ways


def test_patches_of_an_image_are_an_input():
    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(48, 64)

        def forward(self, x):
            x = x.unflatten(2, (4, 4)).unflatten(4, (4, 4)).permute(0, 2, 4, 1, 3, 5)
            return self.layer(x.reshape(x.shape[0], 16, 48))

    *_, reports = step(Patches(), torch.randn(8, 3, 16, 16), options=ALWAYS)
    assert "first layer" in reports[0].plan.forwards[0].reason


def test_a_layer_that_cannot_be_built_stays_exact(monkeypatch):
    build = rewriting.int8_product

    def fails(x, weight, *args):
        if weight.shape[0] == 128:
            raise RuntimeError("no")
        return build(x, weight, *args)

    monkeypatch.setattr(rewriting, "int8_product", fails)
    model, x = Block(), torch.randn(32, 64)
    y, gradients, reports = step(model, x, options=ALWAYS)
    first, second = reports[0].plan.forwards
    assert first.reason == "could not be rewritten: RuntimeError: no"
    assert (first.int8, second.int8) == (False, True)
    assert calls(reports, PRODUCT) == 1
    assert sqnr(y, model(x).detach()) > 40
    assert all(g.isfinite().all() for g in gradients)


def test_an_option_without_effect_is_told():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), torch.randn(32, 64)
    with pytest.warns(
        OptionWarning, match="forward='int8' changes nothing .*'0', '2': first layer"
    ):
        step(model, x, options={"forward": "int8"})
    with warnings.catch_warnings():
        warnings.simplefilter("error", OptionWarning)
        step(Block(), x, options=ALWAYS)


def test_explain_shows_each_layer_and_why():
    *_, reports = step(Block(), torch.randn(32, 64), options=ALWAYS | {"exclude": "fc2"})
    text = str(Explanation(tuple(reports)))
    assert "forward: 1 of 2 products on INT8" in text
    assert "in exclude=['fc2']" in text
    assert [row["way"] for row in page_data(reports)["forwards"]] == ["int8", "exact"]
    *_, reports = step(Block(), torch.randn(32, 64), options=ALWAYS | {"forward": "exact"})
    assert "forward:" not in str(Explanation(tuple(reports)))

"""What samples have in common is kept apart: round trips, layouts, gradients that nearly cancel."""

import pytest
import torch
from samples_packing import AS_ON_GPU, round_trip
from samples_storage import ALL
from torch import nn

from hot_compile.passes.base.schemes import Scheme
from hot_compile.passes.storage import pack as packing
from hot_compile.passes.storage.around import sample_of
from hot_compile.testing import hot_step

AROUND = [scheme for scheme in Scheme if scheme.spec.around]
FINE = {12: 0.001, 8: 0.02, 6: 0.08}


def alike(*shape, common=30.0, dtype=torch.float32):
    """Samples that have ``common`` times as much in common as tells them apart."""
    torch.manual_seed(0)
    return (torch.randn(1, *shape[1:]) * common + torch.randn(shape)).to(dtype)


def apart(x):
    return x.float() - x.float().mean(0, keepdim=True)


def error(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


LAYOUTS = {
    "tokens": lambda x: x,
    "permuted": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "channels last": lambda x: x.unflatten(1, (4, -1)).permute(0, 3, 1, 2),
    "rows": lambda x: x[:, 0].contiguous(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", AROUND)
def test_what_tells_samples_apart_keeps_its_digits(scheme, layout):
    x = LAYOUTS[layout](alike(16, 12, 64))
    _, y = round_trip(x, scheme)
    assert error(apart(y), apart(x)) < FINE[scheme.spec.bits]
    assert error(apart(round_trip(x, scheme.spec.around)[1]), apart(x)) > FINE[scheme.spec.bits]


@pytest.mark.parametrize(
    ("scheme", "as_on_gpu"),
    [
        pytest.param(s, g, marks=() if (s, g) == (Scheme.AROUND6, False) else pytest.mark.slow)
        for s in AROUND
        for g in (False, True)
    ],
)
def test_compiled_code_restores_the_same(scheme, as_on_gpu, monkeypatch):
    if as_on_gpu:
        monkeypatch.setattr(packing, "_on_gpu", lambda _: True)
    x = alike(8, 12, 64)
    with torch._inductor.config.patch(AS_ON_GPU):
        (*_, mean), y = round_trip(x, scheme, compiled=True)
    assert mean.shape == (1, 12, 64)
    assert error(apart(y), apart(x)) < FINE[scheme.spec.bits]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", AROUND)
def test_on_a_gpu(scheme, layout, dtype):
    x = LAYOUTS[layout](alike(16, 12, 64, common=4.0)).to("cuda", dtype)
    _, y = round_trip(x, scheme, compiled=True)
    rounding = 0.02 if dtype is torch.bfloat16 else 0.0  # of the whole, four times as large
    assert error(apart(y), apart(x)) < FINE[scheme.spec.bits] + rounding


def test_the_mean_has_the_tensors_dtype_and_costs_no_digits():
    x = alike(8, 12, 64, common=1000.0, dtype=torch.bfloat16)
    (*_, mean), y = round_trip(x, Scheme.AROUND8)
    assert mean.dtype == torch.bfloat16
    assert error(y, x) < 2**-8


@pytest.mark.parametrize("scheme", AROUND)
def test_nan_and_infinity_come_back_and_leave_other_samples_alone(scheme):
    x = alike(8, 4, 64)
    x[1, 2, 7], x[2, 0, 9], x[3, 1] = torch.nan, torch.inf, -torch.inf
    _, y = round_trip(x, scheme)
    finite = x.isfinite()
    assert torch.equal(y[~finite].nan_to_num(1), x[~finite].nan_to_num(1))
    assert y[finite].isfinite().all()
    assert error(y[finite], x[finite]) < 0.01


def traced(function, *shape, strides=None):
    """The first node behind the input of a graph, and its value."""
    given = torch.empty(shape) if strides is None else torch.empty_strided(shape, strides)
    made = torch.fx.experimental.proxy_tensor.make_fx(function, tracing_mode="fake")(given)
    node = next(n for n in made.graph.nodes if n.op == "call_function")
    return node, node.meta["val"]


@pytest.mark.parametrize(
    ("function", "shape", "sample"),
    [
        (lambda x: (x + 1).view(16, 12, 64) * 2, (192, 64), (12, 64)),
        (lambda x: (x + 1).view(16, 12, 2, 32) * 2, (192, 64), (12, 2, 32)),
        (lambda x: x.view(192, 64) * 2, (16, 12, 64), (12, 64)),
        (lambda x: x + 1, (16, 12, 64), ()),
        (lambda x: x + 1, (192, 64), ()),  # samples of one row each, for all that is known
        (lambda x: (x + 1).unsqueeze(0) * 2, (192, 64), ()),
        (lambda x: x + 1, (3, 12, 64), None),  # too few
        (lambda x: x + 1, (192,), None),
        (lambda x: x.transpose(0, 1) * 1, (16, 12, 64), None),
        (lambda x: x.narrow(-1, 0, 32) * 1, (16, 12, 64), None),
    ],
)
def test_where_samples_are(function, shape, sample):
    assert sample_of(*traced(function, *shape)) == sample


@pytest.mark.parametrize(
    "dynamic", [pytest.param("nothing", marks=pytest.mark.slow), "batch", "all"]
)
@pytest.mark.parametrize("lower", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_that_nearly_cancel(lower, dynamic):
    """Samples much alike, and a loss whose gradient adds up to nothing over the batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    x, target = alike(16, 12, 64, common=20.0), apart(torch.randn(16, 12, 64))

    if dynamic == "batch":
        for given in (x, target):
            torch._dynamo.mark_dynamic(given, 0)

    def gradients(**options):
        model.zero_grad()
        options = {**ALL, "exclude": "*", **options}
        loss = lambda x, target: (model(x) * target).sum()  # noqa: E731
        shapes = {"nothing": False, "all": True, "batch": None}[dynamic]
        _, graphs = hot_step(loss, x, target, options=options, lower=lower, dynamic=shapes)
        kept = {c.scheme for graph in graphs for c in graph.crossing}
        return model[3].weight.grad, kept

    want, _ = gradients(memory="off")
    got, kept = gradients(memory_override={"*": "around6"})
    if dynamic == "all":  # rows' places in samples are not known
        assert "around6" not in kept
        return
    assert "around6" in kept
    plain, kept = gradients()
    assert "groups6" in kept
    assert 4 * error(got, want) < error(plain, want)
    assert error(got, want) < 0.1

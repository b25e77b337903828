"""A head's gradients on integers: how far from fp64, what stays exact, on every device."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from hot_compile.runtime.head import integers
from hot_compile.runtime.head import products as head
from hot_compile.runtime.native import build
from hot_compile.testing import cosine

FORM = (1.0, False, 1.0)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", autouse=True)
def a_gpus_kernels():
    if torch.cuda.is_available():
        build.load("cuda")


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 32 or 64 rows."""
    monkeypatch.setattr(head, "CHUNK_BYTES", 2**18)
    monkeypatch.setattr(head, "_LEAST_BYTES", 1)


def operands(rows, outputs, inputs=64, sharpness=1.0, dtype=torch.float32, device="cpu"):
    """x, weight, and labels of which ``sharpness`` makes most the likeliest."""
    of = torch.Generator().manual_seed(rows * outputs)
    weight = torch.randn(outputs, inputs, generator=of)
    target = torch.randint(0, outputs, (rows,), generator=of)
    x = torch.randn(rows, inputs, generator=of) * 0.2 + sharpness * weight[target] / inputs**0.5
    return x.to(device, dtype), weight.to(device, dtype), target.to(device)


def coefficients_of(target, smoothing=0.0, ignored=None, outputs=1):
    """Of the mean cross entropy: p, one-hot and constant."""
    counts = torch.ones_like(target, dtype=torch.float32)
    if ignored is not None:
        counts = (~ignored).float()
    share = counts / counts.sum()
    return torch.stack([share, -(1 - smoothing) * share, -smoothing / outputs * share])


def both(x, weight, target, coefficients, int8=True):
    wanted = [True] * 3
    return torch.ops.hot.head_both(
        x, weight, None, target, None, coefficients, *FORM, None, wanted, int8
    )


def truth(x, weight, target, **options):
    x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
    F.cross_entropy(x @ weight.t(), target, **options).backward()
    return x.grad, weight.grad


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 3.0], ids=["at first", "later", "sure"])
@pytest.mark.parametrize(
    ("rows", "outputs"), [(1, 1000), (15, 1000), (17, 1000), (197, 1000), (40, 50257)]
)
def test_gradients_are_about_as_close_as_a_layers(rows, outputs, sharpness, device, small_chunks):
    x, weight, target = operands(rows, outputs, sharpness=sharpness, device=device)
    coefficients = coefficients_of(target)
    got, exact = (both(x, weight, target, coefficients, int8) for int8 in (True, False))
    torch.testing.assert_close(got[0], exact[0], rtol=1e-5, atol=1e-3)  # other chunks of rows
    for one, other, want in zip(got[2:4], exact[2:4], truth(x, weight, target), strict=True):
        assert one.shape == want.shape
        floor = error(other, want)  # of p - 1 where p is almost that
        assert error(one, want) < 0.04 + 2 * floor
        assert cosine(one, want) > 0.999 - 2 * floor
    torch.testing.assert_close(got[4], exact[4])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype, device, small_chunks):
    x, weight, target = operands(100, 1000, dtype=dtype, device=device)
    scale = 1.0 if dtype == torch.bfloat16 else 1024.0
    got = both(x, weight, target, scale * coefficients_of(target))
    for one, want in zip(got[2:4], truth(x, weight, target), strict=True):
        assert error(one.double() / scale, want) < 0.04
    assert got[2].dtype == dtype


def test_what_is_ignored_smoothed_and_multiplied_out_again(small_chunks):
    x, weight, target = operands(100, 1000)
    ignored = target % 3 == 0
    coefficients = coefficients_of(target, 0.1, ignored, 1000)
    labels = target.masked_fill(ignored, -100)
    want = truth(x, weight, labels, label_smoothing=0.1, ignore_index=-100)
    got = both(x, weight, target, coefficients)[2:4]
    given = (x, weight, None, target, None, coefficients, None, 1.0, *FORM, [True] * 3, True)
    again = torch.ops.hot.head_gradients(*given)[:2]
    assert all(torch.equal(one, other) for one, other in zip(got, again, strict=True))
    assert all(error(one, other) < 0.04 for one, other in zip(got, want, strict=True))
    assert not got[0][ignored].any()


def test_the_label_is_exact_where_it_is_all_there_is():
    """Rows whose other probabilities are nil leave no rounding at all."""
    x, weight, target = operands(40, 300)
    coefficients = coefficients_of(target) * torch.tensor([[0.0], [1.0], [0.0]])
    got = both(x, weight, target, coefficients)
    spike = F.one_hot(target, 300) * coefficients[1][:, None]
    torch.testing.assert_close(got[2], spike @ weight)
    torch.testing.assert_close(got[3], spike.t() @ x)


def test_the_error_is_noise():
    """Over many batches it adds up as chance says, in the rows of words that are no labels too."""
    _, weight, _ = operands(1, 500)
    total, noise = 0, 0.0
    for batch in range(24):
        x, _, target = operands(64 + batch, 500)
        target = target % 100
        off = both(x, weight, target, coefficients_of(target))[3] - truth(x, weight, target)[1]
        total, noise = total + off[100:], noise + float(off[100:].square().sum())
    assert float(total.norm()) < 1.5 * noise**0.5


@pytest.mark.parametrize("wanted", [*itertools.product((True, False), repeat=3)])
def test_what_is_not_wanted_is_empty(wanted):
    x, weight, target = operands(20, 100)
    given = (x, weight, None, target, None, coefficients_of(target), *FORM, None)
    got = torch.ops.hot.head_both(*given, list(wanted), True)[2:]
    assert [bool(t.numel()) for t in got] == list(wanted)


def test_panels_are_the_whole(monkeypatch):
    a, b = (torch.randint(-127, 128, (n, 64), dtype=torch.int8) for n in (50, 24))
    scales = torch.rand(50), torch.rand(24)
    whole = torch.ops.hot.scaled_int_mm(a, b, *scales, None, None, torch.float32)
    monkeypatch.setattr(integers, "_PANEL", 24 * 7)
    total = torch.full((50, 24), float("nan"))
    integers.add_product(total, a, b, *scales, True)
    assert torch.equal(total, whole)
    integers.add_product(total, a, b, *scales, False)
    assert torch.equal(total, whole + whole)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(32, 1000, 64), (1056, 50272, 768)])
def test_a_product_adds_to_its_result_on_a_gpu(rows, outputs, inputs):
    """The same bits as the product and a sum, whatever kernel the device has for it."""
    of = torch.Generator().manual_seed(0)
    a, b = (
        torch.randint(-127, 128, (n, rows), dtype=torch.int8, generator=of).cuda()
        for n in (outputs, inputs)
    )
    scales = torch.rand(outputs, generator=of).cuda(), torch.rand(inputs, generator=of).cuda()
    whole = torch.ops.hot.scaled_int_mm(a, b, *scales, None, None, torch.float32)
    total = torch.full((outputs, inputs), float("nan"), device="cuda")
    integers.add_product(total, a, b, *scales, True)
    assert torch.equal(total, whole)
    integers.add_product(total, a, b, *scales, False)
    torch.testing.assert_close(total, 2 * whole, rtol=1e-6, atol=0)


@pytest.mark.gpu
def test_a_gpus_integers_are_a_cpus(small_chunks):
    """Quantised alike; exps differ in their last bits, and with them some roundings."""
    given = operands(100, 1000)
    coefficients = coefficients_of(given[2])
    here = both(*given, coefficients)
    there = both(*(t.cuda() for t in given), coefficients.cuda())
    for one, other in zip(here[2:4], there[2:4], strict=True):
        assert error(other.cpu(), one.double()) < 0.02


def test_operators_keep_their_contracts():
    x, weight, target = operands(40, 100)
    given = (x, weight, torch.randn(100), target, None, coefficients_of(target))
    torch.library.opcheck(
        torch.ops.hot.head_both.default, (*given, *FORM, None, [True, True, False], True)
    )
    torch.library.opcheck(
        torch.ops.hot.head_gradients.default, (*given, None, 1.0, *FORM, [True] * 3, True)
    )

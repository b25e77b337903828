"""The operators of a head in chunks against their definition, in fp64."""

import itertools

import head_definition as reference_head
import pytest
import torch

from hot_compile.runtime.head import parts as head_parts
from hot_compile.runtime.head import products as head
from hot_compile.runtime.head import rows as head_rows
from hot_compile.testing import cosine

OUTPUTS, INPUTS = 301, 24
FORMS = {"plain": (1.0, False, 1.0), "scaled": (1.0, False, 0.0625), "capped": (1 / 3, True, 3.0)}


@pytest.fixture(autouse=True, params=[False, True], ids=["", "padded"])
def small_chunks(monkeypatch, request):
    """Several chunks of a head that a test can afford, the last of them narrower; as on a CPU, and
    with the columns that a GPU's chunks have behind their own."""
    if request.param:
        monkeypatch.setattr(head_parts, "missing_outputs", lambda w: -w.shape[0] % 16)
    monkeypatch.setattr(head, "CHUNK_BYTES", 16 * 4 * OUTPUTS)
    monkeypatch.setattr(head, "_LEAST_BYTES", 1)
    monkeypatch.setattr(head_rows, "_BLOCK", 5 * OUTPUTS)


def operands(rows, dtype=torch.float32, bias=False, column=False):
    torch.manual_seed(rows)
    x = torch.randn(rows, INPUTS).to(dtype)
    weight = torch.randn(OUTPUTS, INPUTS).to(dtype)
    return (
        x,
        weight,
        torch.randn(OUTPUTS).to(dtype) if bias else None,
        torch.randint(0, OUTPUTS, (rows,)),
        torch.rand(OUTPUTS) if column else None,
    )


def truth(given, coefficients, form, extra=None, extra_scale=1.0):
    """(statistics, logits, gradient of y's products) by the definition, in fp64."""
    x, weight, bias, target, column = (
        t.double() if t is not None and t.is_floating_point() else t for t in given
    )
    z = reference_head.logits(x, weight, bias, *form)
    statistics = reference_head.statistics(z, target, column)
    gradient = reference_head.logits_gradient(
        z, statistics[1], coefficients, target, column, extra, extra_scale, *form
    )
    return statistics, z, reference_head.products(x, weight, gradient, (True, True, True))


def close(got, want, dtype):
    assert got.shape == want.shape
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    scale = want.abs().max().clamp_min(1e-30) if want.numel() else 1
    torch.testing.assert_close(got.double() / scale, want / scale, atol=tolerance, rtol=0)
    if want.numel():
        assert cosine(got, want) > 1 - tolerance


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(("bias", "column"), [*itertools.product((False, True), repeat=2)])
@pytest.mark.parametrize("rows", [0, 1, 50])
def test_both_is_its_definition(form, bias, column, rows):
    given, coefficients = operands(rows, bias=bias, column=column), torch.randn(3, rows)
    got = torch.ops.hot.head_both(*given, coefficients, *form, torch.float32, [True] * 3)
    statistics, logits, gradients = truth(given, coefficients, form)
    for one, other in zip(got, (statistics, logits, *gradients), strict=True):
        close(one, other, torch.float32)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("rows", [0, 1, 50])
def test_gradients_multiply_the_logits_out_again(form, rows):
    given, coefficients = operands(rows, bias=True, column=True), torch.randn(3, rows)
    extra = torch.randn(rows, OUTPUTS)
    statistics, logits = torch.ops.hot.head_statistics(*given, *form, None)
    assert logits.numel() == 0
    got = torch.ops.hot.head_gradients(*given, coefficients, extra, 0.5, *form, [True] * 3)
    expected, _, gradients = truth(given, coefficients, form, extra, 0.5)
    close(statistics, expected, torch.float32)
    for one, other in zip(got, gradients, strict=True):
        close(one, other, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_close_as_the_dtype(dtype):
    given, coefficients = operands(50, dtype, bias=True), torch.randn(3, 50) / 50
    form = FORMS["plain"]
    got = torch.ops.hot.head_both(*given, coefficients, *form, dtype, [True] * 3)
    again = torch.ops.hot.head_gradients(*given, coefficients, None, 1.0, *form, [True] * 3)
    statistics, logits, gradients = truth(given, coefficients, form)
    for one, other in zip(got, (statistics, logits, *gradients), strict=True):
        close(one, other, dtype)
    for one, other in zip(again, gradients, strict=True):
        close(one, other, dtype)
    assert [t.dtype for t in got] == [torch.float32, dtype, dtype, torch.float32, torch.float32]


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("rows", [0, 1, 17, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("one_launch", [True, False])
def test_a_gpus_chunks_are_the_definition(form, rows, dtype, one_launch, monkeypatch):
    monkeypatch.setattr(head_rows, "_FILLING", 1 if one_launch else 2**30)
    given, coefficients = operands(rows, dtype, bias=True, column=True), torch.randn(3, rows) / 50
    there = [t if t is None else t.cuda() for t in given]
    scales = coefficients.cuda()
    got = torch.ops.hot.head_both(*there, scales, *form, dtype, [True] * 3)
    again = torch.ops.hot.head_gradients(*there, scales, None, 1.0, *form, [True] * 3)
    statistics, logits, gradients = truth(given, coefficients, form)
    for one, other in zip(got, (statistics, logits, *gradients), strict=True):
        close(one.cpu(), other, dtype)
    for one, other in zip(again, gradients, strict=True):
        close(one.cpu(), other, dtype)


def test_what_is_not_wanted_is_empty():
    given, form = operands(9), FORMS["plain"]
    got = torch.ops.hot.head_both(*given, torch.ones(3, 9), *form, None, [True, False, False])
    assert [t.numel() for t in got[1:]] == [0, 9 * INPUTS, 0, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_propagates_as_in_the_definition(value):
    given, coefficients = operands(20), torch.ones(3, 20)
    given[0][3, 0] = value
    got = torch.ops.hot.head_both(*given, coefficients, *FORMS["plain"], None, [True] * 3)
    x, weight, bias, target, column = given
    z = reference_head.logits(x, weight, bias, *FORMS["plain"])
    torch.testing.assert_close(
        got[0], reference_head.statistics(z, target, column), equal_nan=True, atol=1e-4, rtol=1e-4
    )
    lse = reference_head.statistics(z, target, column)[1]
    gradient = reference_head.logits_gradient(
        z, lse, coefficients, target, column, None, 1.0, *FORMS["plain"]
    )
    for one, other in zip(
        got[2:], reference_head.products(x, weight, gradient, (True,) * 3), strict=True
    ):
        assert torch.equal(one.isfinite(), other.isfinite())
    assert got[2][3].isnan().all()
    assert got[2][:3].isfinite().all()


@pytest.mark.parametrize("label", [-1, OUTPUTS])
def test_a_label_out_of_range_is_an_error(label):
    given = operands(20)
    given[3][17] = label
    with pytest.raises(RuntimeError, match="out of bounds"):
        torch.ops.hot.head_statistics(*given, *FORMS["plain"], None)


def test_operators_keep_their_contracts():
    given, form = operands(20, bias=True, column=True), FORMS["capped"]
    coefficients = torch.ones(3, 20)
    args = (*given, *form, torch.float32)
    torch.library.opcheck(torch.ops.hot.head_statistics.default, args)
    args = (*given, coefficients, *form, None, [True, True, False])
    torch.library.opcheck(torch.ops.hot.head_both.default, args)
    transposed = (given[0], given[1].t().contiguous().t(), *given[2:])
    args = (*transposed, coefficients, torch.ones(20, OUTPUTS), 1.0, *form, [True] * 3)
    torch.library.opcheck(torch.ops.hot.head_gradients.default, args)


def test_autocast_around_the_step_changes_nothing():
    given, coefficients = operands(20), torch.ones(3, 20)
    rest = (coefficients, *FORMS["plain"], torch.float32, [True] * 3)
    expected = torch.ops.hot.head_both(*given, *rest)
    with torch.autocast("cpu", torch.bfloat16):
        for got, want in zip(torch.ops.hot.head_both(*given, *rest), expected, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("outputs", [288, OUTPUTS])
def test_logits_for_the_caller_are_the_product(outputs):
    """Written by the product itself where their rows are aligned, copied where they are not."""
    x, weight = torch.randn(50, INPUTS), torch.randn(outputs, INPUTS)
    target, coefficients = torch.randint(0, outputs, (50,)), torch.ones(3, 50)
    rest = (target, None, coefficients, *FORMS["plain"])
    got = torch.ops.hot.head_both(x, weight, None, *rest, torch.float32, [True] * 3)
    without = torch.ops.hot.head_both(x, weight, None, *rest, None, [True] * 3)
    torch.testing.assert_close(got[1], x @ weight.t())
    for one, other in zip(got[2:], without[2:], strict=True):
        assert torch.equal(one, other)


def test_logits_for_the_caller_are_one_product(monkeypatch):
    """Whose rows are as long as the product's: no chunk makes its own."""
    made = []
    own = head.multiply_parts
    monkeypatch.setattr(head, "multiply_parts", lambda *a: made.append(len(a[0])) or own(*a))
    x, weight, *others = operands(50)
    rest = *others, torch.ones(3, 50), *FORMS["plain"]
    padded = head_parts.missing_outputs(weight) > 0
    for dtype in (torch.float32, torch.bfloat16, None):
        made.clear()
        torch.ops.hot.head_both(x, weight, *rest, dtype, [True] * 3)
        assert sum(made) == 50
        assert (len(made) == 1) == (dtype is torch.float32 and not padded)


def test_kept_logits_without_a_gradient_take_no_room(monkeypatch):
    """They are one chunk, where their rows are as long as the product's."""
    x, weight, *others = operands(50)
    given, taken = (x, weight, *others, *FORMS["plain"]), []
    own = head._Gradients.new_room
    monkeypatch.setattr(head._Gradients, "new_room", lambda made: taken.append(made) or own(made))
    statistics, logits = torch.ops.hot.head_statistics(*given, torch.float32)
    padded = head_parts.missing_outputs(weight) > 0
    assert len(taken) == padded
    torch.testing.assert_close(logits, torch.mm(x, weight.t()))
    close(statistics, torch.ops.hot.head_statistics(*given, None)[0].double(), torch.float32)
    assert len(taken) == 1 + padded


def test_chunks_cover_the_rows_evenly():
    for rows, grad_weight in itertools.product((1, 7, 8192, 8191), (50257 * 768, 0)):
        size = head.chunk_rows(rows, 50257, 2, grad_weight)
        chunks = -(-rows // size)
        assert size * (chunks - 1) < rows <= size * chunks
        assert size <= rows
        assert chunks == 1 or size < 16 or size % 16 == 0

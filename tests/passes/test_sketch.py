"""Sketches stand for gradients in comparisons."""

import pytest
import torch

from hot_compile.memory import peak_bytes
from hot_compile.passes.measure.linear import compare
from hot_compile.passes.measure.sketch import SIZE, sketch


def test_small_tensors_are_their_own():
    x = torch.randn(3, 5, dtype=torch.bfloat16)
    assert torch.equal(sketch(x), x.float().flatten())


@pytest.mark.parametrize("kind", ["dense", "one channel", "few rows", "of rank one"])
@pytest.mark.parametrize("shape", [(512, 1024), (1023, 77)])
def test_errors_and_cosines_are_those_of_the_tensors(kind, shape):
    torch.manual_seed(0)
    want = torch.randn(shape)
    if kind == "one channel":
        want[:, 5] *= 1000
    if kind == "few rows":
        want[16:] = 0
    if kind == "of rank one":
        want = torch.randn(shape[0], 1) * torch.randn(1, shape[1])
    got = 0.98 * want + 0.1 * want.abs() * torch.randn(shape)
    error, cosine = compare(got, want)
    same_error, same_cosine = compare(sketch(got), sketch(want))
    assert float(same_error) == pytest.approx(float(error), rel=0.08)
    assert 1 - float(same_cosine) == pytest.approx(1 - float(cosine), rel=0.16)


def test_it_depends_on_no_layout_and_is_linear():
    x, y = torch.randn(300, 400), torch.randn(300, 400)
    assert torch.equal(sketch(x.t().contiguous().t()), sketch(x))
    torch.testing.assert_close(sketch(x + y), sketch(x) + sketch(y))
    assert sketch(x).shape == (SIZE,)


def test_it_takes_little_memory():
    x = torch.randn(4096, 1024)
    sketch(x)
    assert peak_bytes(lambda: sketch(x), x.device) < x.nbytes / 10


def test_what_is_not_finite_stays_so():
    x = torch.randn(300, 400)
    x[7, 9] = torch.inf
    assert not sketch(x).isfinite().all()

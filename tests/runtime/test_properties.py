"""Random shapes and values: kernels against the reference, and what the reference promises."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hot_compile.runtime import reference
from hot_compile.runtime.reference.sizes import round_up

SPECIAL = (0.0, -0.0, float("inf"), float("nan"), 1e-42, 3e38, 1.0, 127.0)
quick = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@st.composite
def matrices(draw, max_rows: int = 300) -> torch.Tensor:
    """A float matrix of any shape, dtype and size of values, perhaps with special ones."""
    rows, cols = draw(st.integers(0, max_rows)), draw(st.integers(0, 80))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(rows, cols, generator=generator) * 2.0 ** draw(st.integers(-130, 120))
    if rows and cols:
        for value in draw(st.lists(st.sampled_from(SPECIAL), max_size=3)):
            x[draw(st.integers(0, rows - 1)), draw(st.integers(0, cols - 1))] = value
    return x.to(draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16))))


bits = st.sampled_from((4, 8))
flags = st.booleans()


@quick
@given(x=matrices(), bits=bits, each=flags, stochastic=flags)
def test_rows(assert_same, x, bits, each, stochastic):
    args = (x, bits, each, stochastic)
    assert_same(torch.ops.hot.quantize_rows(*args), reference.quantize_rows(*args))


@quick
@given(
    x=matrices(),
    rank=st.integers(0, 16),
    tokens=st.integers(1, 9),
    bits=bits,
    each=flags,
    stochastic=flags,
)
def test_columns(assert_same, x, rank, tokens, bits, each, stochastic):
    x = x[: x.shape[0] // tokens * tokens]
    args = (x, rank, tokens, bits, each, stochastic)
    got = torch.ops.hot.quantize_columns(*args)
    assert_same(got, reference.quantize_columns(*args))
    assert got[0].shape[1] % 32 == 0


@quick
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 40),
    k=st.integers(0, 200),
    seed=st.integers(0, 2**31),
    terms=flags,
)
def test_product(assert_same, m, n, k, seed, terms):
    g = torch.Generator().manual_seed(seed)
    a, b = (
        torch.randint(-128, 128, (r, round_up(k, 32)), dtype=torch.int8, generator=g)
        for r in (m, n)
    )
    row, col = (torch.randn(size, generator=g) for size in (m, n))
    extra = (row, col) if terms else (None, None)
    args = (a, b, row, col, *extra, torch.float32)
    assert_same(torch.ops.hot.scaled_int_mm(*args), reference.scaled_int_mm(*args))

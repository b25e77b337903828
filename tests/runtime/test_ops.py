"""Schemas, fakes and argument checks of the operators as torch sees them."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from hot_compile.runtime import reference
from hot_compile.runtime.ops import SCHEMAS

hot = torch.ops.hot


def _product_args(terms: bool) -> tuple:
    a, b = (torch.randint(-127, 128, (r, 64), dtype=torch.int8) for r in (6, 7))
    extra = (torch.rand(6), torch.rand(7)) if terms else (None, None)
    return (a, b, torch.rand(6), torch.rand(7), *extra, torch.bfloat16)


def _grad_weight_args(outputs_last: bool) -> tuple:
    a, b = (torch.randint(-127, 128, (r, 64), dtype=torch.int8) for r in (48, 7))
    return (a, torch.ones(48), b, torch.rand(7), 40, outputs_last, torch.bfloat16)


CALLS = {
    "quantize_rows": lambda x: (x, 4, True, True),
    "quantize_columns": lambda x: (x, 8, 1, 8, True, True),
    "quantize_grad": lambda x: (x, 4, True, 8, 5, True),
    "scaled_int_mm": lambda x: _product_args(terms=x.shape[0] > 20),
    "quantize_one_read": lambda x: (x, 8, 5, True),
    "hadamard_int_mm": lambda x: _grad_weight_args(x.shape[0] > 20),
    "compress_int8": lambda x: (x, 8, 1),
    "rescale_int8": lambda x: (*reference.compress_int8(x, 0, 1), torch.rand(32), torch.rand(2)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
def test_opcheck(name, layout):
    x = {
        "contiguous": torch.randn(20, 33),
        "transposed": torch.randn(33, 20).t(),
        "sliced": torch.randn(50, 66)[::2, ::2],
    }[layout]
    opcheck(getattr(hot, name).default, CALLS[name](x))


def test_ops_run_on_meta_and_under_compile():
    def step(x: torch.Tensor) -> torch.Tensor:
        q, scale = hot.quantize_columns(x, 8, 1, 8, True, False)
        return hot.scaled_int_mm(q, q, scale, scale, None, None, x.dtype)

    x = torch.randn(64, 40)
    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    assert torch.equal(compiled(x), step(x))
    assert step(x.to("meta")).shape == (40, 40)


def test_results_do_not_alias_inputs():
    a, b = (torch.randint(-127, 128, (4, 32), dtype=torch.int8) for _ in range(2))
    copy = a.clone()
    out = hot.scaled_int_mm(a, b, torch.ones(4), torch.ones(4), None, None, torch.float32)
    out.zero_()
    assert torch.equal(a, copy)


X = torch.zeros(6, 8)
Q = torch.zeros(6, 32, dtype=torch.int8)
ONES = torch.ones(6)
MISTAKES = [
    ("quantize_rows", (torch.zeros(3), 8, True, True), r"2-D x; got 1-D \[3\]"),
    ("quantize_rows", (X.double(), 8, True, True), "float32, bfloat16 or float16; got"),
    ("quantize_rows", (X, 5, True, True), "bits 4 or 8; got 5"),
    ("quantize_columns", (X, 17, 1, 8, True, True), r"rank in 0\.\.16; got 17"),
    ("quantize_columns", (X, -1, 1, 8, True, True), r"rank in 0\.\.16; got -1"),
    ("quantize_columns", (X, 8, 4, 8, True, True), "divides the rows of x; got tokens 4 for 6"),
    ("quantize_columns", (X, 8, 0, 8, True, True), "got tokens 0"),
    ("quantize_grad", (X[0], 4, True, 8, 1, True), "2-D grad_output; got 1-D"),
    ("scaled_int_mm", (X, Q, ONES, ONES, None, None, torch.float32), "a of dtype int8"),
    ("scaled_int_mm", (Q, Q[:, :16], ONES, ONES, None, None, torch.float32), "of one K; got"),
    ("scaled_int_mm", (Q, Q, ONES[:2], ONES, None, None, torch.float32), r"shape \[6\]; got"),
    ("scaled_int_mm", (Q, Q, ONES, ONES, ONES, None, torch.float32), "both or neither"),
    ("scaled_int_mm", (Q, Q, ONES, ONES, ONES, ONES[:1], torch.float32), "col_term of shape"),
    ("scaled_int_mm", (Q, Q, ONES, ONES, None, None, torch.float64), "out_dtype of dtype"),
]


@pytest.mark.parametrize(("name", "args", "message"), MISTAKES)
def test_mistakes_are_explained(name, args, message):
    with pytest.raises(RuntimeError, match=message):
        getattr(hot, name)(*args)


ONE_READ = {
    *("quantize_one_read", "hadamard_int_mm", "compress_int8", "rescale_int8"),
}


def test_the_cpu_has_kernels_for_what_its_plans_use():
    """One read of grad_output is for Hopper: elsewhere its definition stands in, in tests only."""
    found = {
        name
        for name in SCHEMAS
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"hot::{name}", "CPU")
    }
    assert found == set(SCHEMAS) - ONE_READ


def test_keywords_and_defaults_reach_the_fakes():
    x = torch.randn(20, 40, device="meta")
    q, _ = hot.quantize_rows(x, bits=4, per_row=True, stochastic=True, packed=True)
    assert (q.shape, q.dtype) == ((20, 32), torch.uint8)
    assert hot.quantize_one_read(x, 0, 1)[-1].shape == (0, 40)

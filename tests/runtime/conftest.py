"""The CPU operators, one ISA at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hot_compile.runtime import build, ops

ISAS = ("scalar", "avx2", "avx512")


@pytest.fixture(scope="session", autouse=True)
def isa_library():
    """``hot_isa``: every operator of ``hot`` with an ISA's name as a keyword."""
    build.load("cpu")
    library = torch.library.Library("hot_isa", "DEF")
    for name, schema in ops.SCHEMAS.items():
        library.define(name + schema.replace(") ->", ", *, str isa) ->", 1))
    return library


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def _machine_runs(isa: str) -> bool:
    try:
        torch.ops.hot_isa.quantize_rows(torch.ones(1, 1), 8, True, False, isa=isa)
    except RuntimeError:
        return False
    return True


@pytest.fixture(params=ISAS)
def provider(request) -> Callable:
    """``provider(name, *args)``: that operator by one ISA's kernels."""
    isa = request.param
    if not _machine_runs(isa):
        pytest.skip(f"this machine or build has no {isa}")
    return lambda name, *args: getattr(torch.ops.hot_isa, name)(*args, isa=isa)


@pytest.fixture(scope="session")
def assert_same() -> Callable:
    """Asserts that results are equal bit for bit (any NaN equals any NaN) and contiguous."""

    def check(got, want) -> None:
        if isinstance(want, torch.Tensor):
            got, want = (got,), (want,)
        assert len(got) == len(want)
        for index, (g, w) in enumerate(zip(got, want, strict=True)):
            what = f"output {index}"
            assert (g.shape, g.dtype) == (w.shape, w.dtype), what
            assert g.is_contiguous(), what
            if g.is_floating_point():
                assert torch.equal(g.isnan(), w.isnan()), what
                g, w = g.nan_to_num(nan=0.0), w.nan_to_num(nan=0.0)
            assert torch.equal(g, w), what

    return check

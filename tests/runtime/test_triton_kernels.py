"""The Triton kernels' arithmetic, run by Triton's interpreter: no GPU is needed to check it."""

import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

PROGRAM = """
import itertools, sys
import torch
from hot_compile.runtime.head import rows as head_rows, triton_kernels as head_triton
from hot_compile.runtime.head.rows import Chunk, Form, Gradient

head_triton._BLOCK = 64
torch.manual_seed(0)
low, every = torch.bfloat16, sys.argv[1] == "every"
for dtype, cap, more in itertools.product((torch.float32, low), (False, True), (False, True)):
    if not every and (dtype is low) ^ cap ^ more:
        continue  # half of them: any two of the three in all four ways
    y = torch.randn(5, 160).to(dtype)
    y[1, 3], y[2, 5], y[3] = float("inf"), float("nan"), -float("inf")
    target = torch.tensor([0, 149, -3, 200, 7])
    column = torch.rand(150) if more else None
    extra = torch.randn(5, 150).to(dtype) if more else None
    chunk = Chunk(y, 150, target if more else None, column, Form(0.5, cap, 2.0))
    coefficients = torch.randn(3, 9)[:, 2:7]
    found = []
    for triton in (False, True):
        out, g, logits = torch.zeros(4, 5), torch.empty_like(y), torch.full((5, 150), 7).to(dtype)
        gradient = Gradient(g, coefficients, extra, 0.5)
        if triton:
            head_triton.statistics_call(chunk, out, logits).launch(None)
            head_triton.gradient_call(chunk, out[1], gradient).launch(None)
        else:
            known = (target >= 0) & (target < 150)  # gather knows no label out of range
            own = Chunk(y, 150, target.where(known, 0) if more else None, column, chunk.form)
            given = coefficients.clone()
            given[1] *= known if more else 1
            head_rows.chunk_pass(own, out, logits, Gradient(g, given, extra, 0.5))
            if more:
                out[2] = torch.where(known, out[2], 0.0)
        found.append((out, g, logits))
    (out, g, logits), (their_out, their_g, their_logits) = found
    torch.testing.assert_close(their_logits, logits, equal_nan=True)
    their_out[0] = torch.where(out[0].isnan(), out[0], their_out[0])  # max skips a NaN there
    torch.testing.assert_close(their_out, out, equal_nan=True)
    torch.testing.assert_close(their_g, g, equal_nan=True)
    if not more:
        both, in_place = torch.zeros(4, 5), Chunk(y.clone(), 150, None, None, chunk.form)
        gradient = Gradient(in_place.y, coefficients)
        head_triton.statistics_call(in_place, both, None, gradient).launch(None)
        torch.testing.assert_close(both[1:], their_out[1:], equal_nan=True)
        torch.testing.assert_close(in_place.y, their_g, equal_nan=True)
    else:  # labels, beside the logits
        apart, mine = torch.empty_like(y), Gradient(torch.empty_like(y), coefficients)
        head_triton.gradient_call(chunk, their_out[1], mine).launch(None)
        head_triton.statistics_call(chunk, out, logits, Gradient(apart, coefficients)).launch(None)
        torch.testing.assert_close(apart, mine.out, equal_nan=True)
print("equal")
"""


@pytest.mark.parametrize("forms", ["half", pytest.param("every", marks=pytest.mark.slow)])
def test_kernels_do_what_the_plain_passes_do(forms, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    command = [sys.executable, "-c", PROGRAM, forms]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "equal", done.stderr


class Jit:
    """A kernel that tells how it was launched."""

    def __init__(self):
        self.seen = []

    def __getitem__(self, grid):
        def launch(*args, num_warps=None):
            self.seen.append(("compiled" if num_warps is None else "looked at", grid, args))
            return self

        return launch

    @property
    def ways(self):
        return [way for way, *_ in self.seen]


def test_chunks_of_a_kind_are_looked_at_once():
    from hot_compile.runtime.head.triton_kernels import Repeated

    launches, kernel, other = Repeated(), Jit(), Jit()
    y = torch.zeros(6, 16)
    for rows in y.split(2):
        launches.launch(kernel, (2, 1, 1), rows, 16, True)
    assert kernel.ways == ["looked at", "compiled", "compiled"]
    assert kernel.seen[2][1:] == ((2, 1, 1), (rows, 16, True))
    launches.launch(other, (2, 1, 1), y, 16, True)
    assert other.ways == ["looked at"]  # another kernel is known by itself
    for args in ((y, 15, True), (y.bfloat16(), 15, True), (y[:, 1:], 15, True), (y, 15, False)):
        launches.launch(kernel, (6, 1, 1), *args)
    assert kernel.ways[3:] == ["looked at"] * 4
    launches.launch(kernel, (3, 1, 1), y[:3], 15, False)  # fewer rows
    assert kernel.ways[-1] == "compiled"

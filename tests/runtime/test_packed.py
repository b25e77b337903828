"""INT4 operands of the product, two values a byte: their layout, and whole steps with them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hot_compile
from hot_compile.runtime import reference
from hot_compile.testing import hot_step

OPERATORS = {
    "quantize_rows": (4, True, True, True),
    "quantize_columns": (16, 1, 4, True, False, True),
    "quantize_grad": (4, False, 8, 1, True, True),
}


def test_even_entries_lie_in_low_nibbles():
    q = torch.tensor([[1, -1, -8, 7]], dtype=torch.int8)
    assert reference.pack_int4(q).tolist() == [[0xF1, 0x78]]
    assert torch.equal(reference.unpack_int4(reference.pack_int4(q)), q)


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name):
    op = getattr(torch.ops.hot, name).default
    torch.library.opcheck(op, (torch.randn(20, 33), *OPERATORS[name]))


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("quantize_rows", (8, True, True, True), "at most 4 bits with packed=True; got 8"),
        ("quantize_grad", (8, True, 0, 1, True, True), "at most 4 bits"),
        ("quantize_columns", (0, 1, 8, True, True, True), "at most 4 bits"),
    ],
)
def test_eight_bits_do_not_pack(name, args, message):
    with pytest.raises(RuntimeError, match=message):
        getattr(torch.ops.hot, name)(torch.zeros(4, 8), *args)


@pytest.mark.parametrize("recipe", ["hot", "paper"])
def test_a_step_that_packs_equals_one_that_does_not(recipe):
    """Rates may say that a device multiplies INT4 faster: the same integers, the same gradients."""

    def gradients(rates):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 80), nn.ReLU())
        for parameter in model[2].parameters():
            parameter.requires_grad_(False)  # g_x alone: quantize_rows
        x = torch.randn(70, 64, requires_grad=True)
        options = {"recipe": recipe, "min_gain": 0, "gx_bits": 4, "rates": rates}
        _, (graph,) = hot_step(lambda x: model(x).sum(), x, options=options)
        packed = {d.packed for d in graph.plan.rewritten}
        return packed, [x.grad, *(p.grad for p in model[0].parameters())]

    integer = hot_compile.passes.cost.devices.RATES["cpu-vnni"].integer
    plain, want = gradients({"int4": integer, "integer": integer})
    packed, got = gradients({"int4": 2 * integer, "integer": integer})
    assert (plain, packed) == ({False}, {True})
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)

"""What a permutation scattered is gathered: the same numbers, and repeated rows in fp32."""

import pytest
import torch
from samples_graphs import forms_pay
from torch import nn

from hot_compile.passes.exact import permutations
from hot_compile.testing import hot_step

OPTIONS = {"min_gain": 99, "memory": "off"}  # layers stay exact
NAME = "permutation's gradient gathered"


class Moved(nn.Module):
    """Rows in another order, or each ``each`` times in one, or put back from one."""

    def __init__(self, kind, each=1):
        super().__init__()
        self.linear, self.kind, self.each = nn.Linear(24, 24), kind, each

    def forward(self, x, keys):
        y, order = self.linear(x), keys.sort()[1]
        if self.kind == "back":
            places = torch.empty_like(order)
            places[order] = torch.arange(len(order))
            order = places
        elif self.kind == "stable":
            order = keys.sort(stable=True, descending=True)[1]
        elif self.kind == "some":
            order = order[: len(order) // 2]
        elif self.kind == "any":
            order = keys.argsort() // 2 * 2 % len(x)
        y = y[order // self.each] if self.each > 1 else y[order]
        return (y.sin() * torch.arange(y.shape[0])[:, None]).mean()


def check(model, *inputs, dynamic=False):
    model(*inputs).backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    hot_step(model, *inputs, options=OPTIONS, dynamic=dynamic)
    for p, expected in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(p.grad, expected, rtol=1e-5, atol=1e-5)  # fp32 sums


@pytest.mark.parametrize(
    ("kind", "each", "rows", "taken"),
    [
        ("by keys", 1, 17, 1),
        ("by keys", 1, 1, 1),
        ("stable", 1, 40, 1),
        ("back", 1, 40, 1),
        ("by keys", 2, 20, 1),
        ("back", 4, 20, 1),
        ("by keys", 8, 64, 1),
        ("some", 1, 40, 0),  # not all rows: who is missing gets none
        ("any", 1, 40, 0),  # some twice
        ("by keys", 3, 20, 0),  # the last one gets fewer
    ],
)
def test_gradients_are_those_of_the_scatter(monkeypatch, kind, each, rows, taken):
    took = forms_pay(monkeypatch, permutations)
    torch.manual_seed(0)
    check(Moved(kind, each), torch.randn(-(-rows // each), 24), torch.randn(rows))
    assert took == [[NAME] * taken]


def test_sizes_that_are_symbols_stay(monkeypatch):
    took = forms_pay(monkeypatch, permutations)
    check(Moved("by keys"), torch.randn(40, 24), torch.randn(40), dynamic=True)
    assert took == [[]]


def test_repeated_rows_are_added_in_fp32(monkeypatch):
    """Atomic additions round to bf16 each time: 1 + 7 x 2^-9 would stay 1."""
    took = forms_pay(monkeypatch, permutations)
    x, keys = torch.zeros(64, 24, dtype=torch.bfloat16), torch.randn(512)
    order = keys.argsort()
    scales = torch.full((512, 1), 2.0**-9)
    scales[(order % 8 == 0).nonzero()[:, 0]] = 1.0
    own, layer = nn.Parameter(x), nn.Linear(24, 24)  # without a layer the graph stays as it is

    def loss(keys, scales):
        rows = ((own * 1.0)[keys.sort()[1] // 8].float() * scales).sum()
        return rows + layer(scales.expand(512, 24)).sum()

    hot_step(loss, keys, scales, options=OPTIONS)
    assert took == [[NAME]]
    expected = torch.tensor(1 + 7 * 2.0**-9).bfloat16().float()
    torch.testing.assert_close(own.grad.float(), expected.expand(64, 24), rtol=0, atol=0)

"""What is joined of parts that are kept anyway is joined again in the backward."""

import torch
from samples_storage import crossing
from torch import nn
from torch._functorch import partitioners
from torch.nn import functional as F

from hot_compile.passes.base.graph import aten
from hot_compile.passes.storage.joins import joined_again
from hot_compile.testing import cosine

WIDTH, ROWS = 64, 96


class Beside(nn.Module):
    """One product behind a layer and its activation, joined, as behind attention and MLP."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.out(torch.cat([self.first(x).tanh(), F.gelu(self.second(x))], -1))


def test_parts_cross_and_not_what_they_make():
    torch.manual_seed(0)
    model, x = nn.Sequential(Beside(), Beside()), torch.randn(ROWS, WIDTH)
    model(x).sin().mean().backward()
    exact = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    kept = [c.bytes_before for c in crossing(lambda x: model(x).sin().mean(), x)]
    assert max(kept) == 4 * ROWS * 3 * WIDTH
    for name, p in model.named_parameters():
        assert cosine(p.grad, exact[name]) > 0.98, name


def test_min_cut_knows_of_it_for_as_long_as_it_lasts():
    listed = partitioners.get_default_op_list
    with joined_again():
        assert aten.cat in partitioners.get_default_op_list().recomputable_ops
    assert partitioners.get_default_op_list is listed
    assert aten.cat not in listed().recomputable_ops


def test_a_torch_without_that_list_goes_on(monkeypatch):
    monkeypatch.delattr(partitioners, "get_default_op_list")
    with joined_again():
        assert not hasattr(partitioners, "get_default_op_list")

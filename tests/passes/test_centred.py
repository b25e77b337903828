"""Rows with much in common: stored less what they have in common where no norm bounds them."""

import pytest
import torch
from samples_storage import crossing
from torch import nn
from torch.nn import functional as F

from hot_compile.testing import cosine


def cosines(model, x):
    """Of each gradient with exact's, and what crosses; layers' products are exact."""
    torch.manual_seed(0)
    y = torch.randint(10, (len(x),))
    F.cross_entropy(model(x), y).backward()
    exact = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    kept = crossing(lambda x: F.cross_entropy(model(x), y), x, exclude="*")
    # a bias before a batch norm has no gradient but noise
    largest = max(g.norm() for g in exact.values())
    known = {n: g for n, g in exact.items() if g.norm() > 1e-4 * largest}
    return {n: cosine(model.get_parameter(n).grad, g) for n, g in known.items()}, kept


def classifier(act, norm):
    torch.manual_seed(0)
    layers = (nn.Linear(64, 128), act, nn.Linear(128, 64), norm, nn.ReLU(), nn.Linear(64, 10))
    return nn.Sequential(*layers)


@pytest.mark.parametrize("mean", [3.0, 10.0, 30.0])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm, lambda n: nn.Identity()])
def test_the_common_part_of_data_that_no_norm_bounds(norm, mean):
    found, kept = cosines(classifier(nn.ReLU(), norm(64)), torch.randn(256, 64) + mean)
    assert min(found.values()) > 0.99
    assert "centred8_mask" in {c.scheme for c in kept}
    assert "groups6" not in {c.scheme for c in kept if c.name.startswith("addmm")}


@pytest.mark.parametrize("act", [nn.GELU(), nn.SiLU(), nn.Hardtanh(), nn.Mish()])
def test_what_bends_near_zero_is_coded_there(act):
    found, kept = cosines(classifier(act, nn.LayerNorm(64)), torch.randn(256, 64) * 10 + 3)
    assert min(found.values()) > 0.99
    assert {"rows8", "rows8_mask", "groups12"} & {c.scheme for c in kept}


@pytest.mark.parametrize("size", [100.0, 1e4, 1e6])
def test_one_large_row_leaves_the_others_their_digits(size):
    torch.manual_seed(0)
    x = torch.randn(256, 64)
    x[7] *= size
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.LayerNorm(64), nn.Linear(64, 10)
    )
    found, _ = cosines(model, x)
    ordinary = [value for name, value in found.items() if not name.startswith("0")]
    assert min(ordinary) > 0.99


def test_behind_a_norm_nothing_is_centred():
    model = nn.Sequential(nn.LayerNorm(64), classifier(nn.GELU(), nn.LayerNorm(64)))
    found, kept = cosines(model, torch.randn(256, 64) + 100)
    assert min(found.values()) > 0.99
    assert not [c for c in kept if "centred" in c.scheme]
    assert "groups6" in {c.scheme for c in kept}

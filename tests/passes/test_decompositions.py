"""What is taken apart is known by its parts, whichever torch does it."""

import pytest
import torch
import torch.nn.functional as F
from samples_storage import crossing_right
from torch import nn

from hot_compile.passes.base.graph import aten
from hot_compile.passes.exact.decompositions import decompositions
from hot_compile.testing import hot_step

FUSED = {
    "addcmul": lambda x, gain, bias: torch.addcmul(bias, gain, x.sigmoid(), value=0.5),
    "addcdiv": lambda x, gain, bias: torch.addcdiv(bias, x, 2 + gain.square()),
    "lerp": lambda x, gain, bias: torch.lerp(x, bias, gain.sigmoid()),
}


class Scaled(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.fused = FUSED[name]
        self.gain, self.bias = (nn.Parameter(torch.rand(96)) for _ in range(2))
        self.wide, self.narrow = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x):
        return self.narrow(self.fused(F.gelu(self.wide(x)), self.gain, self.bias))


@pytest.mark.parametrize("name", FUSED)
def test_what_a_fused_operator_reads_is_stored(name):
    torch.manual_seed(0)
    model, x = nn.Sequential(Scaled(name), Scaled(name)), torch.randn(8, 48, 64)

    def loss(x):
        return model(x).square().mean()

    found = crossing_right(model, loss, x, floor=0.99)
    large = [c for c in found if c.bytes_before >= 4 * 8 * 48 * 96]
    assert large
    assert all(c.scheme != "exact" for c in large), large


def test_whose_rounding_is_asked_for_stays_whole():
    named = {aten.addcmul.default, aten.addcdiv.default, aten.lerp.Tensor}
    assert named <= decompositions({}).keys()
    table = decompositions({"emulate_precision_casts": True})
    assert aten.addcmul.default not in table


def test_the_users_random_numbers_stay_as_asked():
    """Inductor's table depends on its configuration, the one that the graph is compiled by."""
    fast, eager = (decompositions({"fallback_random": asked}) for asked in (False, True))
    assert eager.keys() < fast.keys()
    assert torch.Tag.nondeterministic_seeded in {t for op in fast.keys() - eager for t in op.tags}


@pytest.mark.parametrize("options", [{}, {"emulate_precision_casts": True}])
def test_a_graph_of_them_is_compiled(options):
    model, x = Scaled("addcmul"), torch.randn(15, 64)
    loss, _ = hot_step(lambda x: model(x).square().mean(), x, options=options, lower=True)
    torch.testing.assert_close(loss, model(x).square().mean().detach(), rtol=1e-4, atol=1e-5)

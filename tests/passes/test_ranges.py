"""What elements lie between, against what they are."""

import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hot_compile.passes.base.ranges import ANY, range_of

INF = math.inf
RANGES = {
    "relu and one": (lambda x: x.relu() + 1, (1, INF)),
    "square": (lambda x: x * x, (0, INF)),
    "less a square": (lambda x: -x * x / 2, (-INF, 0)),
    "less half a square": (lambda x: -0.5 * x * (x / 2), (-INF, 0)),
    "a product": (lambda x: x * (x + 1), ANY),
    "even power": (lambda x: -(x**4), (-INF, 0)),
    "odd power": (lambda x: x**3, ANY),
    "distance": (lambda x: (x.abs() - 3).abs() + 0.5, (0.5, INF)),
    "power of e": (lambda x: x.exp(), (0, INF)),
    "one over": (lambda x: 1 / (1 + x.exp()), ANY),
    "a share": (lambda x: 3 * x.sigmoid() - 1, (-1, 2)),
    "two waves": (lambda x: x.sin() * x.cos() - x.tanh(), (-2, 2)),
    "divided": (lambda x: x.erf() / -2, (-0.5, 0.5)),
    "divided by a range": (lambda x: x.sigmoid() / (x.abs() + 4), (0, 0.25)),
    "divided by what may be nothing": (lambda x: x.sigmoid() / x.abs(), ANY),
    "clamped": (lambda x: x.clamp(-1, 3), (-1, 3)),
    "clamped below": (lambda x: x.clamp(min=2), (2, INF)),
    "clamped above": (lambda x: (x - 1).clamp_max(-1e-6), (-INF, -1e-6)),
    "larger of both": (lambda x: torch.maximum(x, x.sigmoid()), (0, INF)),
    "smaller of both": (lambda x: torch.minimum(x, x.sigmoid()), (-INF, 1)),
    "chosen": (lambda x: torch.where(x > 0, x.tanh(), x.abs()), (-1, INF)),
    "logarithm": (lambda x: (1 + x * x).log(), (0, INF)),
    "of what may be less than nothing": (lambda x: (x + 1).clamp(min=1e-9).log1p(), (0, INF)),
    "root": (lambda x: (4 + x.abs()).sqrt(), (2, INF)),
    "angle": (lambda x: x.relu().atan(), (0, math.pi / 2)),
    "hyperbolic": (lambda x: -x.cosh(), (-INF, -1)),
    "another place": (lambda x: x.relu().t().to(torch.float64), (0, INF)),
    "a sum with a factor": (lambda x: torch.add(x.relu(), x.relu(), alpha=-1), ANY),
    "data": (lambda x: x + 1, ANY),
}


@pytest.mark.parametrize("name", RANGES)
def test_elements_lie_in_their_range(name):
    function, (low, high) = RANGES[name]
    x = torch.cat([torch.linspace(-9, 9, 64), torch.randn(64)]).view(8, 16)
    (output,) = make_fx(function)(x).graph.output_node().args
    found = range_of(output)
    assert found == pytest.approx((low, high), abs=1e-8)
    values = function(x)
    assert found[0] - 1e-6 <= float(values.min())
    assert float(values.max()) <= found[1] + 1e-6


def test_a_number_is_its_own_range():
    assert range_of(2) == (2, 2)
    assert range_of(None) == ANY

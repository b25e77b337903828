"""What measured errors and a budget make of a layer and of a tensor: pure functions."""

import pytest

from hot_compile.config import HotConfig, Strategy
from hot_compile.passes.base.schemes import Scheme
from hot_compile.passes.profile import lqs
from hot_compile.passes.profile.lqs import storable, storage_verdict
from hot_compile.passes.profile.profile import LayerProfile, Measure, StorageMeasure


def config(**options):
    return HotConfig.from_options(options)


def layer(gw=0.1, gx4=0.3, gx8=0.02, token=None, tensor=None):
    """A layer of which INT8 and HLA were measured, its g_x with 4 and 8 bits."""
    weight = {"int8": Measure(gw, 1.0), "hla8/batch": Measure(3 * gw, 0.9)}
    inputs = {"int4": Measure(gx4, 1.0), "int8": Measure(gx8, 1.0)}
    return LayerProfile(64, 64, 64, "float32", 2, inputs, weight, token, tensor)


@pytest.mark.parametrize(
    ("measured", "budget", "strategy", "why"),
    [
        (layer(), 0.2, Strategy.INT8, None),
        (layer(gw=0.3), 0.2, Strategy.INT8, "g_w error 0.3 over budget 0.2"),
        (
            layer(gw=0.3, gx8=0.5),
            0.2,
            Strategy.INT8,
            "g_w error 0.3, g_x error 0.5 over budget 0.2",
        ),
        (layer(), 0.2, Strategy.HLA8, "g_w error 0.3 over budget 0.2"),
        (layer(gw=9.0), None, Strategy.INT8, None),
        (None, 0.2, Strategy.INT8, None),
    ],
)
def test_over_budget(measured, budget, strategy, why):
    options = config(error_budget=budget)
    assert lqs.over_budget(measured, options, strategy, 8) == why


def test_hla_waits_until_it_is_measured():
    fast = config(recipe="fast")
    assert lqs.over_budget(None, fast, Strategy.HLA8, 8) == "not measured yet"
    assert lqs.over_budget(None, config(recipe="fast", lqs="off"), Strategy.HLA8, 8) is None


def test_int8_stands_behind_strategies_that_may_suit_no_layer():
    judged = config(strategies="hla8")
    assert lqs.candidates(judged, layer()) == (Strategy.HLA8, Strategy.INT8)
    assert lqs.candidates(judged, None) == (Strategy.HLA8,)
    assert lqs.candidates(config(recipe="paper"), layer()) == (Strategy.HLA8,)
    assert lqs.candidates(config(strategies="exact"), layer()) == (Strategy.EXACT,)


@pytest.mark.parametrize(
    ("measured", "options", "bits"),
    [
        (layer(), {}, 8),
        (layer(gx4=0.1), {}, 4),
        (layer(), {"gx_bits": 4}, 4),
        (layer(), {"error_budget": None}, 4),
        (None, {}, 4),
    ],
)
def test_bits_of_gx_where_four_are_cheapest(measured, options, bits):
    assert lqs.gx_bits(measured, config(**options), 4) == bits


@pytest.mark.parametrize(
    ("token", "tensor", "options", "each"),
    [
        (0.02, 0.05, {}, True),
        (0.03, 0.05, {}, False),
        (None, 0.05, {}, False),
        (0.03, 0.05, {"per_token": True}, True),
        (0.02, 0.05, {"per_channel": True}, False),
    ],
)
def test_the_papers_rule(token, tensor, options, each):
    paper = config(recipe="paper", **options)
    assert lqs.per_token(layer(token=token, tensor=tensor), paper) is each


def test_choice_is_a_function_of_errors_and_budget():
    found = {
        "rows8": StorageMeasure(0.01, 0.001),
        "groups6": StorageMeasure(0.05, 0.04),
        "int4": StorageMeasure(0.1, 0.08),
    }
    schemes = (Scheme.EXACT, Scheme.ROWS8, Scheme.GROUPS6, Scheme.INT4)

    def last(**options):
        return storable(schemes, found, HotConfig.from_options(options))[-1]

    assert last() is Scheme.GROUPS6  # int4 loses too much of what others get
    assert last(error_budget=0.3) is Scheme.INT4
    assert last(error_budget=0.02) is Scheme.ROWS8
    assert last(error_budget=0.001) is Scheme.EXACT
    config = HotConfig()
    text = storage_verdict(Scheme.GROUPS6, found, config)
    assert text == "LQS: error 0.05 (0.04 passed on), no int4: 0.1 (0.08 passed on) over budget"

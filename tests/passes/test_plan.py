"""Planning is a pure function of Sites, config and rates: every rule, with its reason."""

import dataclasses
import json
import re

import pytest
import sympy
import torch
from torch import fx

from hot_compile.config import HotConfig, Strategy
from hot_compile.passes.base.site import Site, SiteNodes
from hot_compile.passes.cost import linear as cost
from hot_compile.passes.cost.devices import RATES, cuda_rates
from hot_compile.passes.layers.strategies import How
from hot_compile.passes.plan import plan

VNNI = RATES["cpu-vnni"]
AMPERE_LIKE = cost.Rates(
    exact={"float32": 1e12}, integer=4e12, int4=8e12, transform=1e12, launch=1e-6
)


def site(name="blocks.0.fc1", lead=(32, 197), gx=True, gw=True, refusal=None, **kwargs):
    node = fx.Graph().placeholder("x")
    nodes = SiteNodes(
        x=node,
        weight=node,
        weight_is_io=False,
        grad_output=node,
        grad_input=node if gx else None,
        grad_weight=node if gw else None,
        grad_weight_is_io=False,
        forward=node,
    )
    rows = 1
    for size in lead:
        rows *= size
    facts = {
        "rows": rows,
        "outputs": 3072,
        "inputs": 768,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "batched": True,
        "head": False,
    }
    return Site(
        name=name,
        lead=lead,
        refusal=refusal,
        nodes=None if refusal else nodes,
        **{**facts, **kwargs},
    )


def decide(one, device_rates=VNNI, **options):
    (decision,) = plan([one], HotConfig.from_options(options), {one.device: device_rates})
    return decision


def test_default_recipe_multiplies_int8():
    decision = decide(site())
    assert (decision.strategy, decision.way) == ("int8", "INT8 products")
    assert decision.gx_bits == 8  # free: this device carries INT4 as INT8
    assert decision.predicted_gain > 2


def test_four_bits_where_the_device_multiplies_them_faster():
    assert decide(site(), AMPERE_LIKE).gx_bits == 4
    assert decide(site(), AMPERE_LIKE, gx_bits=8).gx_bits == 8


def test_a_device_with_int4_tensor_cores_gets_packed_operands():
    faster, carried = (decide(site(), RATES["sm80"], gx_bits=bits) for bits in (None, 8))
    assert (faster.gx_bits, faster.packed) == (4, True)
    assert (carried.gx_bits, carried.packed) == (8, False)
    assert faster.predicted_gain > carried.predicted_gain
    assert not decide(site(), RATES["sm90"], recipe="paper").packed  # Hopper would emulate them
    assert decide(site(), RATES["sm86"], recipe="paper").packed
    assert not decide(site(gx=False), RATES["sm80"], gx_bits=4).packed


def test_fast_groups_rows_across_the_batch():
    decision = decide(site(), recipe="fast", lqs="off")
    assert (decision.strategy, decision.rank, decision.tokens) == ("hla8", 8, 197)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"lead": (8, 197)}, "batch of 8"),
        ({"batched": False}, "not the batch"),
    ],
)
def test_fast_falls_back_to_int8_with_a_reason(facts, why):
    decision = decide(site(**facts), recipe="fast", lqs="off")
    assert decision.strategy == "int8"
    assert why in decision.reason


def test_paper_takes_consecutive_rows_and_tensor_scales_whatever_the_batch():
    decision = decide(site(lead=(2, 197), batched=False), recipe="paper")
    assert (decision.strategy, decision.tokens, decision.gx_bits) == ("hla8", 1, 4)
    assert not decision.per_channel


@pytest.mark.parametrize(
    ("one", "options", "why"),
    [
        (site(refusal="because"), {}, "because"),
        (site(name="head", head=True), {}, "classifier head"),
        (site(name="a.lora_A.default"), {}, "low-rank factor"),
        (site(outputs=8), {}, "low-rank factor or head by shape"),
        (site(), {"exclude": ["*.fc1"]}, "in exclude"),
        (site(), {"include": ["*.fc2"]}, "not in include"),
        (site(), {"recipe": "exact"}, "recipe 'exact'"),
        (site(lead=(0, 197)), {}, "empty batch"),
        (site(lead=(1, 2), outputs=64, inputs=64), {}, "not worth it"),
    ],
)
def test_exact_always_says_why(one, options, why):
    decision = decide(one, **options)
    assert decision.strategy == "exact"
    assert why in decision.reason


def test_a_layer_that_is_too_small_says_from_which_batch_on_it_would_pay():
    small = site(lead=(2, 16), outputs=256, inputs=256)
    reason = decide(small).reason
    rows, batch = map(int, re.findall(r"pay from (\d+) rows on \(a batch of (\d+)\)", reason)[0])
    assert rows <= 16 * batch < rows + 16
    options = HotConfig()
    for count, pays in ((rows, True), (rows - 1, False)):
        other = site(lead=(count, 1), outputs=256, inputs=256)
        decision = decide(other, min_gain=0)
        assert (decision.predicted_gain >= options.min_gain - 5e-4) is pays or not pays
        assert (decide(other).strategy == "int8") is pays


def test_a_layer_that_never_pays_says_so():
    slow = dataclasses.replace(VNNI, integer=1e9)
    assert "no number of rows" in decide(site(), slow).reason


def test_rates_can_be_overridden():
    assert "not worth it" in decide(site(), rates={"integer": 1e9, "float32": 1e12}).reason
    assert decide(site(), AMPERE_LIKE, rates={"int4": 1e12}).gx_bits == 8


def test_no_runtime_leaves_everything_exact():
    decision = decide(site(), "no runtime for cpu: no compiler")
    assert (decision.strategy, decision.reason) == ("exact", "no runtime for cpu: no compiler")


def test_frozen_weight():
    decision = decide(site(gw=False))
    assert (decision.strategy, decision.bytes_before) == ("gx-only", 0)


def test_last_override_wins_even_over_cost_and_head():
    tiny = site(lead=(4, 2), outputs=32, inputs=32, head=True)
    decision = decide(tiny, override={"*": "hla8", "blocks.*": "int8"})
    assert decision.strategy == "int8"
    assert decide(tiny, override={"*": "exact"}).strategy == "exact"


def test_plan_is_json_and_hashable():
    chosen = plan([site(), site(name="b", gw=False)], HotConfig(), {torch.device("cpu"): VNNI})
    data = json.loads(json.dumps(chosen.to_json()))
    assert [d["site"] for d in data["decisions"]] == [d.site for d in chosen]
    assert hash(chosen)
    with pytest.raises(KeyError, match="the plan has"):
        chosen["nothing"]


def test_cost_is_symbolic_in_the_layers_shape():
    expression = cost.seconds(cost.layer_cost(Strategy.INT8, How()), VNNI, "float32")
    assert {cost.L, cost.O, cost.I} <= expression.free_symbols
    small = cost.at(expression, cost.Shape(100, 64, 64, 4))
    large = cost.at(expression, cost.Shape(200, 64, 64, 4))
    assert 0 < small < large


def test_half_length_product_is_cheaper():
    shape = cost.Shape(25216, 768, 3072, 4)
    cheap, full = (
        cost.at(cost.layer_cost(strategy, How(rank=rank)).int_ops, shape)
        for strategy, rank in ((Strategy.HLA8, 8), (Strategy.INT8, 0))
    )
    assert cheap == pytest.approx(0.75 * full)


def test_the_papers_layers_at_batch_1_stay_exact_on_hopper():
    """Seven calls cost more there than both exact products (docs/measured/benchmarks_cuda.md)."""
    layers = [(3136, 64, 576), (49, 512, 4608), (197, 3072, 768), (197, 768, 768), (49, 3072, 768)]
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        for layer in layers:
            shape = cost.Shape(*layer, size)
            how = How(one_read=True)
            price = cost.layer_price(Strategy.INT8, how, RATES["sm90"], dtype, shape)
            assert price.gain() < 1


@pytest.mark.parametrize(
    ("strategy", "measured"),
    [(Strategy.EXACT, 22.8), (Strategy.HLA8, 20.2)],
)
def test_hoppers_rates_agree_with_a_whole_step(strategy, measured):
    """Milliseconds of the kernels of ViT-B's 48 layers, batch 256, bf16, in a step on an H200."""
    layers = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]
    shapes = [cost.Shape(256 * 197, *layer, 2) for layer in layers]
    price = cost.seconds(
        cost.layer_cost(strategy, How(rank=8, one_read=True)), RATES["sm90"], "bfloat16"
    )
    assert 12e3 * sum(cost.at(price, s) for s in shapes) == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize("strategy", [Strategy.INT8, Strategy.HLA8])
@pytest.mark.parametrize("one_read", [True, False])
def test_a_weight_costs_the_same_whichever_way_it_lies(strategy, one_read):
    """All but the launches: GPT-2's ``Conv1D`` has its inputs first."""
    costs = [
        cost.layer_cost(strategy, How(rank=8, one_read=one_read, weight_is_io=io))
        for io in (True, False)
    ]
    for field in ("int_ops", "results"):
        one, other = (sympy.expand(getattr(c, field)) for c in costs)
        assert one == other, field


def test_a_small_layer_on_hopper_costs_what_its_kernels_took():
    """GPT-2's mlp.c_proj at 8 x 1024 tokens, H200, kernels of a step: 168 us, exact 109."""
    shape, how = cost.Shape(8192, 768, 3072, 2), How(one_read=True, weight_is_io=True)
    times = cost.layer_price(Strategy.INT8, how, RATES["sm90"], "bfloat16", shape).times()
    assert [t * 1e6 for t in times] == pytest.approx([109, 168], rel=0.15)


def test_products_of_16_bit_numbers_cost_what_they_draw_where_a_gain_is_weighed():
    """Llama's projections, 8192 rows, H200: 216 us of kernels for exact 202, and a step less. On
    another H200 no less: what it draws pays for nothing."""
    shape, how, rates = cost.Shape(8192, 2048, 2048, 2), How(one_read=True), RATES["sm90"]
    plain = dataclasses.replace(rates, power=0.0)
    for dtype, more in (("bfloat16", 1 + rates.power), ("float32", 1.0)):
        priced, bare = (
            cost.layer_price(Strategy.INT8, how, each, dtype, shape) for each in (rates, plain)
        )
        assert priced.gain() == pytest.approx(more * bare.gain())
        assert priced.times() == bare.times()


MEASURED = dataclasses.replace(
    RATES["sm90"],
    exact={**RATES["sm90"].exact, "bfloat16": 690e12},
    integer=1760e12,
    transform=2.46e12,
)
"""By ``hot-compile tune``, where it found the slowest passes of three H200."""


@pytest.mark.parametrize("device", [RATES["sm90"], MEASURED])
def test_a_bias_pays_for_reading_grad_output_once(device):
    """ViT-B's qkv, batch 256, H200: its bias took 97 us of exact Inductor's 567, ours sums it on
    the way. Left exact, the step took 69.3 ms for 67.3."""
    shape, how = cost.Shape(256 * 197, 2304, 768, 2), How(one_read=True, summed=True)
    exact, ours = cost.layer_price(Strategy.INT8, how, device, "bfloat16", shape).times()
    assert exact * 1e6 == pytest.approx(567, rel=0.1)
    assert exact > 1.05 * ours  # what HotConfig.min_gain asks for
    how = dataclasses.replace(how, summed=False)
    bare, same = cost.layer_price(Strategy.INT8, how, device, "bfloat16", shape).times()
    assert same == ours
    assert (exact - bare) * 1e6 == pytest.approx(97, rel=0.3)


def test_a_gpu_works_while_the_host_launches():
    rates = dataclasses.replace(AMPERE_LIKE, launch=1e-3, start=1e-6)
    price = cost.Cost(flops=2 * cost.L * cost.O * cost.I, calls=2)
    small, large = cost.Shape(8, 8, 8, 4), cost.Shape(2**12, 2**12, 2**12, 4)
    flops = 2 * 2**36 / rates.exact["float32"]

    def seconds(shape, asynchronous):
        device = dataclasses.replace(rates, asynchronous=asynchronous)
        return cost.at(cost.seconds(price, device, "float32"), shape)

    assert seconds(small, True) == pytest.approx(2e-3)
    assert seconds(large, True) == pytest.approx(flops + 2e-6)
    assert seconds(large, False) == pytest.approx(flops + 2e-6 + 2e-3)


@pytest.mark.parametrize(
    ("capability", "entry"),
    [((8, 0), "sm80"), ((8, 6), "sm86"), ((8, 9), "sm86"), ((9, 0), "sm90")],
)
def test_every_gpu_is_priced_as_the_kind_whose_products_it_runs(capability, entry):
    assert cuda_rates(capability, tf32=False) == RATES[entry]


def test_consumer_chips_after_ada_emulate_int4():
    rates = cuda_rates((12, 0), tf32=False)
    assert rates == dataclasses.replace(RATES["sm86"], int4=RATES["sm86"].integer)


@pytest.mark.parametrize("capability", [(7, 5), (10, 0), (11, 0)])
def test_a_gpu_without_products_in_this_runtime_says_so(capability):
    major, minor = capability
    assert f"{major}.{minor}" in cuda_rates(capability, tf32=False)


def test_tf32_changes_what_exact_costs():
    rates = cuda_rates((9, 0), tf32=True)
    assert rates.exact["float32"] == RATES["sm90"].exact["tfloat32"]


def test_a_layer_that_would_raise_the_steps_peak_stays_exact():
    one = site(lead=(8, 4096), outputs=4096, inputs=4096, dtype=torch.bfloat16)
    config, prices = HotConfig(), {one.device: RATES["sm90"]}
    made = decide(one, RATES["sm90"])
    assert made.strategy == "int8"
    least = cost.layer_bytes(made.strategy, made.how(one.nodes), cost.Shape(2**15, 4096, 4096, 2))
    for room, strategy in ((least, "int8"), (least - 2**20, "exact")):
        (decision,) = plan([one], config, prices, room=lambda _, room=room: room).decisions
        assert decision.strategy == strategy, decision.reason
    assert decision.reason == "INT8 products would take 1 MiB above the step's exact peak"
    forced = HotConfig.from_options({"override": {"*": "int8"}})
    (decision,) = plan([one], forced, prices, room=lambda _: 0).decisions
    assert decision.strategy == "int8"


def test_a_layer_takes_most_where_its_gradient_is_quantised():
    """Beside g_y and x in 8 bits both of its forms; g_y is gone when W's come."""
    how = How(dtype=torch.bfloat16, one_read=True)
    made = cost.layer_bytes(Strategy.INT8, how, cost.Shape(8192, 128256, 4096, 2))
    assert made == pytest.approx(8192 * (2 * 128256 + 4096), rel=1e-3)
    wide = cost.layer_bytes(Strategy.INT8, how, cost.Shape(64, 1024, 65536, 2))  # of x, g_x, g_w
    assert wide == pytest.approx(64 * 65536 + 64 * 65536 * 2 + 1024 * 65536 * 2, rel=0.01)

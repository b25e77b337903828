"""Planning of convolutions: every rule, with its reason and its bytes."""

import dataclasses
import re

import pytest
import torch
from torch import fx

from hot_compile.config import HotConfig
from hot_compile.passes.base.site import ConvNodes, Convolution, Site
from hot_compile.passes.cost.conv import NO_CONVOLUTIONS
from hot_compile.passes.cost.devices import RATES
from hot_compile.passes.plan import plan

VNNI = RATES["cpu-vnni"]


def site(kernel=3, stride=1, size=28, channels=(128, 128), batch=8, first=False, **changes):
    node = fx.Graph().placeholder("x")
    nodes = ConvNodes(node, node, node, node, node, node, None, node)
    out = (size - 1) // stride + 1
    conv = Convolution(
        batch=batch,
        small_size=(out, out),
        big_size=(size, size),
        big_channels=channels[0],
        kernel=(kernel, kernel),
        stride=(stride, stride),
        padding=(kernel // 2,) * 2,
        dilation=(1, 1),
        transposed=False,
        rows_last=True,
    )
    return Site(
        name="layer1.0.conv1",
        rows=batch * out * out,
        outputs=channels[1],
        inputs=channels[0] * kernel * kernel,
        dtype=torch.float32,
        device=torch.device("cpu"),
        lead=(batch, out, out),
        batched=True,
        head=False,
        nodes=nodes,
        conv=dataclasses.replace(conv, **changes),
        first=first,
    )


def decide(one, rates=VNNI, **options):
    (decision,) = plan([one], HotConfig.from_options(options), {one.device: rates})
    return decision


def test_x_itself_is_stored_not_its_unfolded_form():
    decision = decide(site())
    x = 8 * 28 * 28 * 128
    assert decision.strategy == "int8"
    assert decision.bytes_before == 4 * x
    assert decision.predicted_gain > 1.5


def test_a_narrow_convolution_is_no_low_rank_factor():
    assert decide(site(channels=(64, 64))).strategy == "int8"


def test_half_the_rows_only_where_that_is_faster():
    decision = decide(site(), recipe="fast", lqs="off")
    assert decision.strategy == "int8"
    assert "no hla8: predicted no faster than int8" in decision.reason
    fast = dataclasses.replace(VNNI, unfold=1e15, transform=1e15, integer=3e11)
    decision = decide(site(size=32), fast, recipe="fast", lqs="off", min_gain=0)
    assert (decision.strategy, decision.tiles, decision.tokens) == ("hla8", True, 1)


def test_tiles_need_no_batch():
    decision = decide(site(batch=2), override={"*": "hla8"})
    assert (decision.strategy, decision.tiles) == ("hla8", True)


def test_paper_keeps_the_unfolded_rows():
    decision = decide(site(), recipe="paper", min_gain=0)
    assert (decision.strategy, decision.tiles, decision.gx_bits) == ("hla8", False, 4)


@pytest.mark.parametrize(
    ("one", "options", "why"),
    [
        (site(first=True), {}, "first convolution"),
        (site(size=4, channels=(8, 8)), {}, "not worth it"),
        (site(), {"exclude": ["layer1.*"]}, "in exclude"),
        (site(), {"recipe": "luq"}, "baselines cover Linear layers only"),
    ],
)
def test_exact_says_why(one, options, why):
    decision = decide(one, **options)
    assert decision.strategy == "exact"
    assert why in decision.reason


def test_a_device_without_rates_for_convolutions_leaves_them_exact():
    decision = decide(site(), dataclasses.replace(VNNI, convolution={}), override={"*": "int8"})
    assert decision.strategy == "exact"


@pytest.mark.parametrize("device", ["sm80", "sm86", "sm90"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cudnn_is_left_alone(device, dtype):
    one = dataclasses.replace(site(batch=128), dtype=dtype)
    decision = decide(one, RATES[device], min_gain=0, override={"*": "int8"})
    assert (decision.strategy, decision.reason) == ("exact", NO_CONVOLUTIONS)


def test_dilation_makes_frames_longer():
    """A window that reaches far beyond a small image multiplies mostly zeros."""
    near = decide(site(size=8, channels=(256, 256)), min_gain=0)
    dilated = site(size=8, channels=(256, 256), dilation=(6, 6), padding=(6, 6))
    assert decide(dilated, min_gain=0).predicted_gain < near.predicted_gain


@pytest.mark.parametrize("one", [{"size": 14, "channels": (64, 64)}, {"size": 28, "kernel": 1}])
def test_a_convolution_that_is_too_small_says_from_which_batch_on_it_would_pay(one):
    slow = dataclasses.replace(VNNI, launch=2e-3)  # which weighs less the more samples there are
    reason = decide(site(batch=1, **one), slow).reason
    (batch,) = map(int, re.findall(r"it would pay from a batch of (\d+) on", reason))
    assert decide(site(batch=batch, **one), slow).strategy == "int8"
    assert decide(site(batch=batch - 1, **one), slow).strategy == "exact"


def test_a_convolution_that_never_pays_says_so():
    slow = dataclasses.replace(VNNI, integer=1e9)
    assert "no batch would change that" in decide(site(), slow).reason

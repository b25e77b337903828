"""The one table of device rates that prices strategies, and what this machine's device is in it."""

from __future__ import annotations

import torch

from .cost import Rates

RATES: dict[str, Rates] = {
    # Two cores of an AVX-512 VNNI server; ratios carry over to more cores. Measured by
    # benchmarks/layers.py, see docs/benchmarks.md.
    "cpu-vnni": Rates(
        exact={"float32": 180e9, "bfloat16": 880e9, "float16": 880e9},
        integer=1700e9,
        transform=6e9,
        launch=8e-6,
    ),
    # Without VNNI the INT8 product is no faster than fp32: nothing pays.
    "cpu": Rates(
        exact={"float32": 100e9, "bfloat16": 100e9, "float16": 100e9},
        integer=100e9,
        transform=3e9,
        launch=8e-6,
    ),
}


def device_key(device: torch.device, vnni: bool) -> str:
    """Row of ``RATES`` for this device."""
    if device.type == "cpu":
        return "cpu-vnni" if vnni else "cpu"
    return "cuda"

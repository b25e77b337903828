"""What each device sustains: the one table that prices strategies."""

from __future__ import annotations

import logging
from functools import cache

import torch

from hot_compile.runtime.providers import status

from .cost import Rates

log = logging.getLogger("hot_compile")

RATES: dict[str, Rates] = {
    # Two cores of an AVX-512 VNNI server; the ratios carry over to more cores. Measured by
    # benchmarks/layers.py, see docs/benchmarks.md.
    "cpu-vnni": Rates(
        exact={"float32": 180e9, "bfloat16": 880e9, "float16": 880e9},
        integer=1700e9,
        int4=1700e9,
        transform=6e9,
        launch=8e-6,
    ),
    # Without VNNI the INT8 product is no faster than fp32: nothing pays.
    "cpu": Rates(
        exact={"float32": 100e9, "bfloat16": 100e9, "float16": 100e9},
        integer=100e9,
        int4=100e9,
        transform=3e9,
        launch=8e-6,
    ),
}


def pricing(device: torch.device) -> Rates | str:
    """Rates of ``device``, or the reason why no layer can be rewritten for it."""
    return _pricing(device.type)


@cache
def _pricing(device_type: str) -> Rates | str:
    provider = status(device_type)
    if not provider.available:
        log.warning("hot: %s; every layer on %s stays exact", provider.reason, device_type)
        return f"no runtime for {device_type}: {provider.reason}"
    return RATES[provider.rates]

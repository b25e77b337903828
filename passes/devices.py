"""What each device sustains: the one table that prices strategies."""

from __future__ import annotations

import logging
from functools import cache

import torch

from hot_compile.errors import BuildError
from hot_compile.passes.cost import Rates
from hot_compile.runtime.build import load
from hot_compile.runtime.providers import status

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
        int32_result=True,
    ),
    # Without VNNI the INT8 product is no faster than fp32: nothing pays.
    "cpu": Rates(
        exact={"float32": 100e9, "bfloat16": 100e9, "float16": 100e9},
        integer=100e9,
        int4=100e9,
        transform=3e9,
        launch=8e-6,
        int32_result=True,
    ),
}


def pricing(device: torch.device) -> Rates | str:
    """Rates of ``device``, or the reason why no layer can be rewritten for it.

    Builds and loads the runtime for the device on first use.
    """
    return _pricing(device.type)


@cache
def _pricing(device_type: str) -> Rates | str:
    provider = status(device_type)
    try:
        if not provider.available:
            raise BuildError(provider.reason)
        load(device_type)
    except BuildError as error:
        log.warning(
            "hot: every layer on %s stays exact, as Inductor does it: %s", device_type, error
        )
        return f"no runtime for {device_type}: {error}"
    if device_type == "cpu":
        return RATES["cpu-vnni" if provider.fast_int8 else "cpu"]
    return f"no rates for {device_type}"

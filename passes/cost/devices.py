"""What each device sustains: by one table of kinds of devices, or as the user had it measured."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch

from hot_compile.errors import BuildError, OptionError
from hot_compile.passes.base.site import Site
from hot_compile.passes.cost import tuned
from hot_compile.passes.cost.linear import Rates
from hot_compile.passes.cost.timing import measure
from hot_compile.runtime.native.build import load
from hot_compile.runtime.native.providers import status

log = logging.getLogger("hot_compile")

_AMX = 1900e9
"""FLOP/s of products in bf16 on two cores that have tiles for them: as many as in INT8."""

RATES: dict[str, Rates] = {
    # Two cores of an AVX-512 VNNI server; the ratios carry over to more cores. Measured by
    # benchmarks/layers.py, see docs/measured/benchmarks.md.
    "cpu-vnni": Rates(
        source="the table's of a CPU with VNNI",
        exact={"float32": 200e9, "bfloat16": 900e9, "float16": 900e9},
        integer=1800e9,
        int4=1800e9,
        transform=40e9,
        launch=8e-6,
        convolution={"float32": 420e9, "bfloat16": 1000e9, "float16": 1000e9},
        unfold=15e9,
        fold=20e9,
        copy=50e9,
        packing=20e9,
        int32_result=True,
    ),
    # Without VNNI the INT8 product is no faster than fp32: nothing pays.
    "cpu": Rates(
        source="the table's of a CPU without VNNI",
        exact={"float32": 100e9, "bfloat16": 100e9, "float16": 100e9},
        integer=100e9,
        int4=100e9,
        transform=3e9,
        launch=8e-6,
        convolution={"float32": 100e9, "bfloat16": 100e9, "float16": 100e9},
        copy=12e9,
        packing=3e9,
        int32_result=True,
    ),
    # NVIDIA H200, fitted to the kernels of whole ViT-B steps, where the clock is what it is in
    # training and caches are warm, and to benchmarks/layers.py: fp32 and TF32, and the paper's
    # layers at batch 1, which the host's calls bound (docs/measured/benchmarks_cuda.md). No rates
    # of convolutions: cuDNN's are faster than integer products with what these need around them.
    "sm90": Rates(
        source="the table's of an NVIDIA H200",
        exact={"float32": 49e12, "tfloat32": 300e12, "bfloat16": 750e12, "float16": 750e12},
        integer=1600e12,
        int4=1600e12,
        transform=3.3e12,
        launch=8e-6,
        copy=4.2e12,
        packing=3.6e12,
        coding=4e12,
        power=0.16,
        host_copy=50e9,  # what 16 lanes of PCIe 5 give pinned memory; below, of PCIe 4
        start=3e-6,
        idle=9e-6,
        asynchronous=True,
        one_read=True,
    ),
    # NVIDIA A100: the datasheet's rates at the share of them that products reach in practice. INT4
    # has tensor cores of its own up to compute capability 8.9 (docs/adr/0008).
    "sm80": Rates(
        source="the table's of an NVIDIA A100, by its datasheet",
        exact={"float32": 17e12, "tfloat32": 110e12, "bfloat16": 220e12, "float16": 220e12},
        integer=400e12,
        int4=800e12,
        transform=1.2e12,
        launch=8e-6,
        copy=1.6e12,
        packing=1.4e12,
        coding=2.3e12,
        host_copy=25e9,
        start=4e-6,
        asynchronous=True,
    ),
    # NVIDIA RTX 3090 and later consumer chips of its kind, likewise.
    "sm86": Rates(
        source="the table's of an NVIDIA RTX 3090, by its datasheet",
        exact={"float32": 25e12, "tfloat32": 30e12, "bfloat16": 60e12, "float16": 60e12},
        integer=200e12,
        int4=400e12,
        transform=0.7e12,
        launch=8e-6,
        copy=0.8e12,
        packing=0.7e12,
        coding=2.1e12,
        host_copy=25e9,
        start=4e-6,
        asynchronous=True,
    ),
}


@dataclasses.dataclass(frozen=True)
class Chip:
    """What the makers say of a GPU, or its driver: that by which two of one kind differ."""

    memory: float
    """Bytes/s at most."""
    clocks: float
    """Multiprocessors times clock, Hz."""

    @classmethod
    def of(cls, device: torch.device) -> Chip | None:
        """None where the driver does not say."""
        found = torch.cuda.get_device_properties(device)
        names = "memory_clock_rate", "memory_bus_width", "multi_processor_count", "clock_rate"
        clock, width, count, core = (getattr(found, name, 0) for name in names)
        # clocks in kHz; two transfers a clock of the memory, a bus's width in bits
        return cls(2e3 * clock * width / 8, 1e3 * core * count) if clock * width * core else None


CHIPS: dict[str, tuple[tuple[int, int], Chip]] = {
    "h200": ((9, 0), Chip(4.9e12, 132 * 1.98e9)),
    "h100": ((9, 0), Chip(3.35e12, 132 * 1.98e9)),
    "a100": ((8, 0), Chip(2.04e12, 108 * 1.41e9)),
    "a10": ((8, 6), Chip(0.6e12, 72 * 1.695e9)),
    "rtx3090": ((8, 6), Chip(0.936e12, 82 * 1.695e9)),
    "l4": ((8, 9), Chip(0.3e12, 58 * 2.04e9)),
    "l40s": ((8, 9), Chip(0.864e12, 142 * 2.52e9)),
    "rtx4090": ((8, 9), Chip(1.01e12, 128 * 2.52e9)),
}
"""Capability and chip of devices that can be asked for by name where they are not."""
_MEASURED = {"sm90": "h200", "sm80": "a100", "sm86": "rtx3090"}
"""Whose rates an entry of ``RATES`` has."""
_SAME_CHIP = 0.03
"""Ratio that clocks differ by within one product."""


def pricing(device: torch.device, prices: str = "measured") -> Rates | str:
    """Rates of ``device``, or the reason why no layer can be rewritten for it.

    Builds and loads the runtime for the device on first use. With ``prices="measured"`` the rates
    are those that ``hot-compile tune`` measured on this machine, if it did; else, or with "table",
    the table's: nothing is measured while a graph is compiled (docs/adr/0028).
    """
    missing = _missing(device.type)
    entry = missing or table_entry(device)
    if isinstance(entry, str):
        return entry
    own = _measured(device) if prices == "measured" else None
    return _in_force(own or entry, device.type == "cuda" and _tf32())


def prices_of(sites: Iterable[Site], prices: str) -> dict[torch.device, Rates | str]:
    """``pricing`` of every device that one of ``sites`` lies on."""
    return {device: pricing(device, prices) for device in {site.device for site in sites}}


@cache
def _missing(device_type: str) -> str | None:
    """Why the runtime cannot run on this kind of device; None once it is loaded."""
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
    return None


def table_entry(device: torch.device) -> Rates | str:
    """The table's rates of devices of this kind, or why the operators are of no use there."""
    if device.type == "cpu":
        return _cpu_rates()
    return _cuda_entry(torch.cuda.get_device_capability(device), Chip.of(device))


@cache
def _cpu_rates() -> Rates:
    """Asked once: looking for a compiler again for every layer would be work for nothing."""
    rates = RATES["cpu-vnni" if status("cpu").fast_int8 else "cpu"]
    if not torch.cpu.get_capabilities().get("amx_bf16"):
        return rates
    exact = {**rates.exact, "bfloat16": _AMX}
    return dataclasses.replace(rates, exact=exact, source=f"{rates.source} and AMX")


def cuda_rates(capability: tuple[int, int], tf32: bool, chip: Chip | None = None) -> Rates | str:
    """Rates of the architecture's entry in the table, for ``chip`` if it is given, fp32 at TF32's
    where that is on."""
    rates = _cuda_entry(capability, chip)
    return rates if isinstance(rates, str) else _in_force(rates, tf32)


def _cuda_entry(capability: tuple[int, int], chip: Chip | None) -> Rates | str:
    major, minor = capability
    if major < 8:
        return f"compute capability {major}.{minor} has no INT8 tensor cores this runtime uses"
    if major in (10, 11):  # their fast products are tcgen05's; Ampere's instructions crawl there
        return f"compute capability {major}.{minor}: no integer products for it in this runtime yet"
    known = {(9, 0): "sm90", (8, 0): "sm80", (8, 6): "sm86"}
    entry = known.get(capability, "sm86")
    rates = _scaled(RATES[entry], chip, CHIPS[_MEASURED[entry]][1])
    nearest = f", the nearest to compute capability {major}.{minor}"
    source = rates.source + nearest * (capability not in known)
    int4 = rates.int4 if major == 8 else rates.integer  # later chips emulate INT4 products
    return dataclasses.replace(rates, int4=int4, source=source)


def _scaled(rates: Rates, chip: Chip | None, measured: Chip) -> Rates:
    """``rates``, found on ``measured``, for another chip of its kind.

    An H100 has an H200's products and 0.68 of its memory's speed. By the latter's rates layers of
    768 to 1024 inputs went to INT8 there that took 0 to 10 % longer so.
    """
    if chip is None:
        return rates
    memory, clocks = chip.memory / measured.memory, chip.clocks / measured.clocks
    if max(abs(memory - 1), abs(clocks - 1)) < _SAME_CHIP:
        return rates
    return dataclasses.replace(
        rates,
        exact={dtype: rate * clocks for dtype, rate in rates.exact.items()},
        integer=rates.integer * clocks,
        int4=rates.int4 * clocks,
        transform=rates.transform * memory,
        copy=rates.copy * memory,
        packing=rates.packing * memory,
        coding=rates.coding * clocks,
        source=f"{rates.source}, times {memory:.2f} for memory and {clocks:.2f} for the rest",
    )


def _in_force(rates: Rates, tf32: bool) -> Rates:
    """``rates`` with fp32 products at TF32's rate where they may use that."""
    if not tf32 or "tfloat32" not in rates.exact:
        return rates
    return dataclasses.replace(rates, exact={**rates.exact, "float32": rates.exact["tfloat32"]})


def _measured(device: torch.device) -> Rates | None:
    """What ``hot-compile tune`` measured here; None: the table's are to be used.

    Processes of a job take what the first of them finds.
    """
    path = tuned.path_of(device)
    return _of_job(device, path) if tuned.in_job() else _kept(device, path)


@cache
def _of_job(device: torch.device, path: Path) -> Rates | None:
    """What all processes of a job take; asked for once by each."""
    return tuned.agreed(path, _kept(device, path))


@cache
def _kept(device: torch.device, path: Path) -> Rates | None:
    """What ``path`` holds for ``device``; one answer a process."""
    return tuned.load(device)


def tune(device: torch.device) -> Rates:
    """Measure ``device`` in a few seconds, keep what was found for every later process, give it.

    Raises:
        BuildError: there are no operators for it, or none that it could use.
        RuntimeError: it could not be measured, for want of memory among others.
        OSError: the file cannot be written.
    """
    entry = _missing(device.type) or table_entry(device)
    if isinstance(entry, str):
        raise BuildError(entry)
    tuned.save(device, measure(device, entry))
    found = tuned.load(device)
    if found is None:
        raise RuntimeError("it gave rates that cannot be; something else keeps it busy")
    return found


def rates_of(device: str, tf32: bool = False) -> Rates:
    """Rates of a device that need not be here.

    Args:
        device: one of ``CHIPS``, ``cpu`` (with VNNI), or a file that ``hot-compile tune``
            made there, ``*.json``.
        tf32: fp32 products may use TF32.

    Raises:
        OptionError: no such device, or no rates in the file.
    """
    if device.endswith(".json"):
        try:
            rates = dataclasses.replace(tuned.read(Path(device)), source=f"the file {device}")
            return _in_force(rates, tf32)
        except (OSError, ValueError) as error:
            wanted = f"a file made by `hot-compile tune` ({error})"
            raise OptionError.value("device", device, wanted) from error
    if device == "cpu":
        return RATES["cpu-vnni"]
    if device not in CHIPS:
        wanted = f"one of {', '.join((*CHIPS, 'cpu'))}, or a file of rates, *.json"
        raise OptionError.value("device", device, wanted)
    capability, chip = CHIPS[device]
    found = cuda_rates(capability, tf32, chip)
    assert isinstance(found, Rates)
    return found


def _tf32() -> bool:
    """fp32 products on CUDA may use TF32."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"

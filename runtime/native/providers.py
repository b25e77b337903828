"""What this machine can run: which provider of the operators, and whether int8 is fast on it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from hot_compile.errors import BuildError
from hot_compile.runtime.native import build, prebuilt
from hot_compile.runtime.native.extensions import hash_tree


@dataclass(frozen=True)
class Provider:
    """Operators for one device type, as far as can be known without building them.

    ``fast_int8``: integer products outrun fp32 ones; otherwise they are exact but slow, and
    ``reason`` says why. ``available`` False: ``reason`` says what is missing. ``origin``: whether
    they came with the package, or why they are built here.
    """

    device_type: str
    available: bool
    reason: str
    isa: str = "none"
    fast_int8: bool = False
    origin: str = ""


def _cpu_isa(flags: Mapping[str, object]) -> str:
    """Mirrors best_kernels() in csrc/cpu/isa/kernels.cpp."""
    parts = ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq")
    return "avx512" if all(flags.get(name) for name in parts) else "scalar"


def _cpu_status() -> Provider:
    flags = torch.cpu.get_capabilities()
    isa, vnni = _cpu_isa(flags), bool(flags.get("avx512_vnni"))
    try:
        origin = _origin("cpu")
    except BuildError as error:
        return Provider("cpu", False, str(error), isa)
    if vnni:
        return Provider("cpu", True, f"{isa} with VNNI", isa, True, origin)
    why = f"{isa} without AVX512-VNNI: integer products are exact but slower than fp32 ones"
    return Provider("cpu", True, why, isa, False, origin)


def _origin(device_type: str) -> str:
    """Where the operators come from. Raises BuildError if they can be neither found nor built."""
    ready = prebuilt.find(device_type)
    if isinstance(ready, Path):
        return f"came with the package: {ready}"
    build.extension_for(device_type)
    build.find_compiler()
    return f"built here on first use: {ready}"


def status(device_type: str) -> Provider:
    """The provider for ``device_type``; never raises and never builds."""
    if device_type == "cpu":
        return _cpu_status()
    try:
        origin = _origin(device_type)
    except BuildError as error:
        return Provider(device_type, False, str(error))
    return Provider(device_type, True, "", device_type, True, origin)


@functools.cache
def runtime_version() -> str:
    """Hash of everything that decides what an operator computes; part of compile cache keys."""
    state = hashlib.sha256()
    hash_tree(Path(__file__).parent.parent, state)
    return state.hexdigest()[:16]

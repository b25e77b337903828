"""What this machine can run: which provider of the operators, and whether int8 is fast on it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from hot_compile.errors import BuildError
from hot_compile.runtime.native import build
from hot_compile.runtime.native.extensions import hash_tree


@dataclass(frozen=True)
class Provider:
    """Operators for one device type, as far as can be known without building them.

    ``fast_int8``: integer products outrun fp32 ones; otherwise they are exact but slow, and
    ``reason`` says why. ``available`` False: ``reason`` says what is missing.
    """

    device_type: str
    available: bool
    reason: str
    isa: str = "none"
    fast_int8: bool = False


def _cpu_isa(flags: Mapping[str, object]) -> str:
    """Mirrors best_kernels() in csrc/cpu/isa/kernels.cpp."""
    parts = ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq")
    return "avx512" if all(flags.get(name) for name in parts) else "scalar"


def _cpu_status() -> Provider:
    flags = torch.cpu.get_capabilities()
    isa, vnni = _cpu_isa(flags), bool(flags.get("avx512_vnni"))
    try:
        _check("cpu")
    except BuildError as error:
        return Provider("cpu", False, str(error), isa)
    if vnni:
        return Provider("cpu", True, f"{isa} with VNNI", isa, True)
    why = f"{isa} without AVX512-VNNI: integer products are exact but slower than fp32 ones"
    return Provider("cpu", True, why, isa)


def _check(device_type: str) -> None:
    """Raises BuildError if the operators cannot be built."""
    build.extension_for(device_type)
    build.find_compiler()


def status(device_type: str) -> Provider:
    """The provider for ``device_type``; never raises and never builds."""
    if device_type == "cpu":
        return _cpu_status()
    try:
        _check(device_type)
    except BuildError as error:
        return Provider(device_type, False, str(error))
    return Provider(device_type, True, "", device_type, True)


@functools.cache
def runtime_version() -> str:
    """Hash of everything that decides what an operator computes; part of compile cache keys."""
    state = hashlib.sha256()
    hash_tree(Path(__file__).parent.parent, state)
    return state.hexdigest()[:16]

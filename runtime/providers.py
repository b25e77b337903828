"""What this machine can run: which provider of the operators, and whether int8 is fast on it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from hot_compile.errors import BuildError
from hot_compile.runtime import build
from hot_compile.runtime.extensions import CSRC, hash_tree


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
    """Mirrors best_kernels() in csrc/cpu/kernels.cpp."""
    if all(flags.get(name) for name in ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq")):
        return "avx512"
    if all(flags.get(name) for name in ("avx2", "fma3")):
        return "avx2"
    return "scalar"


def _cpu_status() -> Provider:
    flags = torch.cpu.get_capabilities()
    isa, vnni = _cpu_isa(flags), bool(flags.get("avx512_vnni"))
    try:
        build.find_compiler()
    except BuildError as error:
        return Provider("cpu", False, str(error), isa)
    if vnni:
        return Provider("cpu", True, f"{isa} with VNNI", isa, fast_int8=True)
    why = f"{isa} without AVX512-VNNI: integer products are exact but slower than fp32 ones"
    return Provider("cpu", True, why, isa)


def status(device_type: str) -> Provider:
    """The provider for ``device_type``; never raises and never builds."""
    if device_type == "cpu":
        return _cpu_status()
    try:
        build.extension_for(device_type)
        build.find_compiler()
    except BuildError as error:
        return Provider(device_type, False, str(error))
    return Provider(device_type, True, "", device_type, fast_int8=True)


@functools.cache
def runtime_version() -> str:
    """Hash of everything that decides what an operator computes; part of compile cache keys."""
    state = hashlib.sha256()
    hash_tree(CSRC, state)
    own = ("ops.py", "reference_conv.py", "extensions.py", "toolkit.py")
    for name in (*own, "head.py", "head_rows.py", "head_triton.py"):
        state.update((Path(__file__).parent / name).read_bytes())
    return state.hexdigest()[:16]

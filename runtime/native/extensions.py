"""What the native libraries consist of: one frozen ``Extension`` per device type."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass, replace
from pathlib import Path

CSRC = Path(__file__).parent.parent / "csrc"
STABLE_ABI = "0x020b000000000000"
"""TORCH_TARGET_VERSION: the oldest torch (2.11) that a library built here loads in."""


@dataclass(frozen=True)
class Source:
    """One translation unit: its path below the extension's root and the flags it alone needs.

    A path may come several times, with other flags.
    """

    path: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Extension:
    """A shared library of operators.

    ``root``: also where its own headers are included from.
    ``inputs``: files and folders below ``root`` whose contents decide whether to rebuild.
    ``compilers``: commands in place of the C++ compiler's by suffix, e.g. ((".cu", ("nvcc",)),).
    """

    name: str
    sources: tuple[Source, ...]
    inputs: tuple[str, ...]
    flags: tuple[str, ...]
    link_flags: tuple[str, ...] = ()
    compilers: tuple[tuple[str, tuple[str, ...]], ...] = ()
    root: Path = CSRC

    def digest(self) -> str:
        """Hash of the contents of every input file and of all flags."""
        state = hashlib.sha256(repr(replace(self, root=Path())).encode())
        for path in self.inputs:
            hash_tree(self.root / path, state)
        return state.hexdigest()


def hash_tree(root: Path, state: hashlib._Hash) -> None:
    """Feeds names and contents of a file, or of all files below a folder, to ``state``."""
    found = (p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    files = sorted(found) if root.is_dir() else [root]
    for file in files:
        state.update(file.relative_to(root.parent).as_posix().encode() + b"\0")
        state.update(file.read_bytes() + b"\0")


# -ffp-contract=off: a fused multiply-add would round differently from the reference.
# -Wno-*uninitialized: gcc 12 misreads its own AVX-512 headers.
_CPU_FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
    f"-DTORCH_TARGET_VERSION={STABLE_ABI}",
)
# whole numbers wrap around in hashes; how vectors are passed to functions matters to no one inline
_LANES = ("-fwrapv", "-Wno-psabi")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_CPU_SOURCES = tuple(
    Source(f"cpu/{path}")
    for path in (
        *("quantize/rows.cpp", "quantize/columns.cpp", "quantize/grad.cpp"),
        *("quantize/pack_int4.cpp", "isa/kernels.cpp"),
        *("gemm/scaled_int_mm.cpp", "gemm/int_product.cpp"),
        *("conv/frames.cpp", "conv/grad_weight.cpp", "conv/grad_input.cpp"),
    )
)


def _variant(isa: str, *flags: str) -> Source:
    """Every kernel compiled for one ISA."""
    return Source("cpu/isa/variant.cpp", (f"-DHOT_ISA={isa}", *_LANES, *flags))


_PORTABLE = _variant("scalar")
_X86_VARIANTS = (_PORTABLE, _variant("avx512", *_AVX512))


def cpu_extension() -> Extension:
    """Operators on CPU tensors, with the ISA variants that this architecture may have."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return Extension(
        name="hot_cpu",
        sources=_CPU_SOURCES + (_X86_VARIANTS if x86 else (_PORTABLE,)),
        inputs=("cpu",),
        flags=_CPU_FLAGS + (("-DHOT_X86",) if x86 else ()),
        link_flags=("-ltorch_cpu", "-lc10"),
    )


def head_extension() -> Extension:
    """A head's loop over chunks, for any device; by torch's own C++, so for this torch alone."""
    return Extension(
        name="hot_head",
        sources=(Source("head/chunks.cpp"),),
        inputs=("head",),
        flags=("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden"),
        link_flags=("-ltorch_cpu", "-lc10", "-ldl"),
    )

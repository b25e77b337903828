"""The CUDA extension: where nvcc and CUTLASS are, and what to compile for which architecture."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import torch

from hot_compile.errors import BuildError
from hot_compile.runtime.extensions import CSRC, STABLE_ABI, Extension, Source

ARCHITECTURES = ("80", "90a")
"""What kernels exist for: Ampere and later (also as PTX), and Hopper's own instructions."""

_FLAGS = (
    "-std=c++20",
    "-O3",
    "-DNDEBUG",  # CUTLASS's assertions serialise the tensor core instructions
    "-DUSE_CUDA",
    f"-DTORCH_TARGET_VERSION={STABLE_ABI}",
    "--expt-relaxed-constexpr",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    "-diag-suppress=20012,2908",  # remarks on CUTLASS's own headers
)
_GENCODE = {
    "80": ("-gencode", "arch=compute_80,code=[sm_80,compute_80]"),
    "90a": ("-gencode", "arch=compute_90a,code=sm_90a"),
}


def find_nvcc() -> str:
    """nvcc of CUDA_HOME or CUDA_PATH, on PATH, or of the PyPI toolkit. Raises BuildError."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    folders = [Path(home) / "bin" for home in homes if home]
    nvidia = importlib.util.find_spec("nvidia")
    for package in nvidia.submodule_search_locations or () if nvidia else ():
        folders += sorted(Path(package).glob("cu*/bin"))
    on_path = shutil.which("nvcc")
    candidates = [str(folder / "nvcc") for folder in folders]
    if on_path:
        candidates.insert(len([home for home in homes if home]), on_path)
    for candidate in candidates:
        if shutil.which(candidate):
            return candidate
    raise BuildError(
        "found no nvcc; looked in CUDA_HOME, CUDA_PATH, on PATH and in nvidia-cuda-nvcc's package. "
        "Install the CUDA toolkit of torch's version "
        f"({torch.version.cuda or 'this torch has no CUDA'}) or set CUDA_HOME. "
        "It is needed once, to build the CUDA operators."
    )


def find_cutlass() -> Path:
    """Folder of CUTLASS's headers: CUTLASS_PATH or nvidia-cutlass's. Raises BuildError."""
    given = os.environ.get("CUTLASS_PATH")
    package = importlib.util.find_spec("cutlass_library")
    roots = [Path(given)] if given else []
    if package and package.origin:
        roots.append(Path(package.origin).parent / "source")
    for root in roots:
        for folder in (root / "include", root):
            if (folder / "cutlass" / "cutlass.h").is_file():
                return folder
    looked = f"CUTLASS_PATH={given!r} and " if given else ""
    raise BuildError(
        f"found no CUTLASS headers; looked in {looked}the nvidia-cutlass package. "
        "Install them (pip install 'nvidia-cutlass>=4.2', or hot-compile[cuda]) "
        "or set CUTLASS_PATH to a CUTLASS 4.2 checkout."
    )


def device_architectures() -> tuple[str, ...]:
    """What the visible devices need; every architecture if there is none."""
    if not torch.cuda.is_available():
        return ARCHITECTURES
    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    oldest = min(found)
    if oldest < (8, 0):
        raise BuildError(
            f"got a CUDA device of compute capability {oldest[0]}.{oldest[1]}; "
            "expected 8.0 or newer. Use backend='inductor' on it."
        )
    needed = {"90a" if capability == (9, 0) else "80" for capability in found}
    return tuple(sorted(needed))


def _sources(archs: tuple[str, ...]) -> tuple[Source, ...]:
    """Every .cu, for the architectures that it has code for."""
    everywhere = tuple(flag for arch in archs for flag in _GENCODE[arch])
    sources = []
    for path in sorted((CSRC / "cuda").glob("*.cu")):
        hopper = path.name.startswith("gemm_sm90")
        if hopper and "90a" not in archs:
            continue
        flags = _GENCODE["90a"] if hopper else everywhere
        sources.append(Source(f"cuda/{path.name}", flags))
    return tuple(sources)


def cuda_extension(archs: tuple[str, ...] | None = None) -> Extension:
    """Operators on CUDA tensors for ``archs``, by default those of the visible devices.

    Raises BuildError if nvcc, the headers or a device's kernels are missing.
    """
    chosen = device_architectures() if archs is None else archs
    unknown = sorted(set(chosen) - set(ARCHITECTURES))
    if unknown or not chosen:
        raise BuildError(
            f"got architectures {list(chosen)}; expected some of {list(ARCHITECTURES)}."
        )
    hopper = ("-DHOT_SM90",) if "90a" in chosen else ()
    return Extension(
        name="hot_cuda",
        sources=_sources(chosen),
        inputs=("cuda",),
        flags=(*_FLAGS, *hopper, f"-I{find_cutlass()}"),
        # cudart comes with libtorch_cuda: the very one that torch runs on
        link_flags=("-ltorch_cuda", "-ltorch_cpu", "-lc10", "-lc10_cuda"),
        compilers=((".cu", (find_nvcc(),)),),
    )

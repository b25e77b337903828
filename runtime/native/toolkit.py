"""The CUDA extension: where nvcc and CUTLASS are, and what to compile for which architecture."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import torch

from hot_compile.errors import BuildError
from hot_compile.runtime.native.extensions import STABLE_ABI, Extension, Source

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
_PLAIN = (
    *("gemm/ops.cu", "gemm/plan.cu", "gemm/combine.cu", "gemm/sm80.cu", "gemm/sm80_int4.cu"),
    *("quantize/ops.cu", "quantize/pack_int4.cu", "one_read/ops.cu"),
    *("storage/ops.cu", "storage/compress_int8.cu", "storage/rescale.cu"),
)
# Slow to compile, so once for each variant, side by side: see csrc/cuda/common/variant.hpp.
_PER_ELEMENT = (
    "quantize/rows.cu",
    "quantize/columns.cu",
    "quantize/grad.cu",
    "one_read/quantize.cu",
)
_ELEMENTS = tuple(
    (f"-DHOT_NAME={name}", f"-DHOT_ELEMENT={element}")
    for name, element in (("bf16", "__nv_bfloat16"), ("fp16", "__half"), ("fp32", "float"))
)


def _sm90(
    name: str, out: str, m: int, n: int, schedule: str, epilogue: str = "ScaleEpilogue"
) -> tuple[str, ...]:
    """Flags of one of Hopper's products: its results and the tile of them that a block computes."""
    defined = {"NAME": f"{name}_{m}x{n}", "OUT": out, "M": m, "N": n}
    defined |= {"SCHEDULE": schedule, "EPILOGUE": epilogue}
    return tuple(f"-DHOT_{key}={value}" for key, value in defined.items())


_SM90 = (
    _sm90("bf16", "cutlass::bfloat16_t", 64, 128, "Pingpong"),
    _sm90("bf16", "cutlass::bfloat16_t", 128, 128, "Pingpong"),
    _sm90("bf16", "cutlass::bfloat16_t", 128, 192, "Cooperative"),
    _sm90("bf16", "cutlass::bfloat16_t", 128, 256, "Cooperative"),
    _sm90("fp16", "cutlass::half_t", 128, 128, "Pingpong"),
    _sm90("fp32", "float", 128, 128, "Pingpong"),
    _sm90("add_fp32", "float", 128, 128, "Pingpong", "AddEpilogue"),
    _sm90("s32", "int32_t", 128, 128, "Pingpong"),
    _sm90("rows_bf16", "cutlass::bfloat16_t", 128, 128, "Pingpong", "RowsEpilogue"),
    _sm90("rows_bf16", "cutlass::bfloat16_t", 128, 192, "Cooperative", "RowsEpilogue"),
    _sm90("columns_bf16", "cutlass::bfloat16_t", 128, 128, "Pingpong", "ColumnsEpilogue"),
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
    """What to compile, for the architectures that each file has code for."""
    everywhere = tuple(flag for arch in archs for flag in _GENCODE[arch])
    sources = [Source(f"cuda/{path}", everywhere) for path in _PLAIN]
    for path in _PER_ELEMENT:
        sources += [Source(f"cuda/{path}", everywhere + flags) for flags in _ELEMENTS]
    if "90a" in archs:
        sources += [Source("cuda/gemm/sm90.cu", _GENCODE["90a"] + flags) for flags in _SM90]
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

"""``hot-compile wheel``: a wheel of this source tree with the native libraries inside.

Its platform tag is read off the libraries: the newest symbol versions of glibc and libstdc++ that
they ask for. To support older systems, build on one.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from hot_compile.errors import BuildError
from hot_compile.progress import progress
from hot_compile.runtime.native import build, prebuilt
from hot_compile.runtime.native.extensions import STABLE_ABI, Extension, cpu_extension
from hot_compile.runtime.native.toolkit import ARCHITECTURES, cuda_extension

MOST_BYTES = 25 * 2**20
"""A wheel larger than this is refused: nobody wants to download it."""

_PACKAGED = ("pyproject.toml", "README.md", "LICENSE", "hot_compile", "passes", "runtime")
_FROM_TORCH = {"libtorch_cpu.so", "libc10.so", "libtorch_cuda.so", "libc10_cuda.so"}
_FROM_SYSTEM = {
    *("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"),
    *("libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"),
}
_LIBSTDCXX = ((17, 19), (24, 22), (27, 24), (31, 28), (34, 29), (35, 30), (39, 33))
"""(x, y): systems of glibc 2.x have GLIBCXX_3.4.y, by auditwheel's policies (manylinux_2_x)."""


def _cuda() -> Extension:
    """All architectures, by a compiler of the CUDA that torch is built with."""
    extension = cuda_extension(ARCHITECTURES)
    nvcc = dict(extension.compilers)[".cu"]
    version = build.compiler_version(nvcc)
    found, wanted = re.findall(r"release (\d+)", version), prebuilt.cuda_major("cuda")
    if found != [wanted]:
        raise BuildError(
            f"got {nvcc[0]} of CUDA {''.join(found) or 'unknown'} and torch of CUDA "
            f"{wanted or 'none'}; expected the same major version. Set CUDA_HOME."
        )
    return extension


_EXTENSIONS: dict[str, Callable[[], Extension]] = {"cpu": cpu_extension, "cuda": _cuda}


def make_wheel(
    source: Path,
    output: Path,
    device_types: Sequence[str] = ("cpu",),
    others: Sequence[Path] = (),
) -> Path:
    """Build the libraries for ``device_types``, then the wheel; returns its path.

    Args:
        source: the source tree, with pyproject.toml. The installed package must be that very tree.
        output: folder for the wheel.
        device_types: "cpu", and "cuda" for all architectures; nvcc's CUDA must be torch's.
        others: wheels of the same sources whose libraries are taken over where this one has none
            of that name: those for another CUDA, made beside another torch.

    Raises:
        BuildError: no source tree, a wheel of other sources, no compiler, a library that links what
            not every system has, a wheel that is too large, or pip or wheel fails.
    """
    _check_source(source)
    with progress(len(device_types) + 2) as begin, tempfile.TemporaryDirectory() as scratch:
        begin("packing what is Python")
        pure = _pure_wheel(source, Path(scratch))
        _tool("wheel", "unpack", str(pure), "--dest", scratch)
        (tree,) = (path for path in Path(scratch).glob("hot_compile-*") if path.is_dir())
        folder = tree / "hot_compile" / "runtime" / prebuilt.FOLDER.name
        folder.mkdir()
        oldest = 0
        for device_type in device_types:
            begin(f"building the operators for {device_type}")
            oldest = max(oldest, _add_library(device_type, folder))
        begin("packing the wheel")
        oldest = max(oldest, *(_take_over(other, folder) for other in others), 0)
        _retag(tree, f"manylinux_2_{oldest}_{platform.machine()}")
        output.mkdir(parents=True, exist_ok=True)
        _tool("wheel", "pack", str(tree), "--dest-dir", str(output))
    found = sorted(output.glob(f"{tree.name}-py3-none-manylinux_2_{oldest}_*.whl"))
    return _small(found[-1])


def _check_source(source: Path) -> None:
    if sys.platform != "linux":
        raise BuildError(f"got platform {sys.platform}; wheels with libraries are for Linux only.")
    own = Path(__file__).resolve().parents[2]
    if not (source / "pyproject.toml").is_file() or own != (source / "runtime").resolve().parent:
        raise BuildError(
            f"got source {str(source)!r}; expected the source tree, with pyproject.toml, that this "
            f"package runs from ({own}). Clone the repository, pip install -e ., and run it there."
        )


def _pure_wheel(source: Path, scratch: Path) -> Path:
    """Of a copy: setuptools leaves a folder in the tree, and would take old files from it."""
    copy = scratch / "source"
    copy.mkdir()
    for name in _PACKAGED:
        if (source / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", prebuilt.FOLDER.name)
            shutil.copytree(source / name, copy / name, ignore=ignored)
        else:
            shutil.copy(source / name, copy / name)
    _tool("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(scratch), str(copy))
    return next(scratch.glob("hot_compile-*.whl"))


def _add_library(device_type: str, folder: Path) -> int:
    """Put the library and its manifest into ``folder``; returns x of the glibc 2.x it needs."""
    if device_type not in _EXTENSIONS:
        raise BuildError(f"got device {device_type!r}; expected some of {sorted(_EXTENSIONS)}.")
    extension = _EXTENSIONS[device_type]()
    built = build.build(extension)
    oldest = oldest_glibc(built)
    major = prebuilt.cuda_major(device_type)
    name = f"{extension.name}-cu{major}.so" if major else f"{extension.name}.so"
    shutil.copy(built, folder / name)
    prebuilt.Manifest(
        library=name,
        device_type=device_type,
        sources=prebuilt.sources_digest(device_type),
        system=prebuilt.this_system(),
        glibc=f"2.{oldest}",
        torch=STABLE_ABI,
        cuda=major,
    ).save(folder)
    return oldest


def _take_over(other: Path, folder: Path) -> int:
    """Copy from a wheel the libraries that ``folder`` lacks; returns x of the glibc they need."""
    inside = f"hot_compile/runtime/{prebuilt.FOLDER.name}/"
    oldest = 0
    try:
        with zipfile.ZipFile(other) as archive:
            for name in archive.namelist():
                if not name.startswith(inside) or not name.endswith(".json"):
                    continue
                manifest = prebuilt.Manifest(**json.loads(archive.read(name)))
                if manifest.sources != prebuilt.sources_digest(manifest.device_type):
                    raise BuildError(f"got {other}, made of other sources. Make it again.")
                if (folder / manifest.library).exists():
                    continue
                (folder / manifest.library).write_bytes(archive.read(inside + manifest.library))
                manifest.save(folder)
                oldest = max(oldest, oldest_glibc(folder / manifest.library))
    except (OSError, zipfile.BadZipFile, KeyError, ValueError, TypeError) as error:
        raise BuildError(f"could not read {other} ({error}); expected a wheel of ours.") from error
    return oldest


def oldest_glibc(library: Path) -> int:
    """x of the oldest glibc 2.x whose systems can load ``library``.

    Raises:
        BuildError: it needs a library that neither torch nor every system has, has a search path of
            its own, or cannot be read.
    """
    try:
        done = subprocess.run(
            ["objdump", "-p", str(library)], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise BuildError(f"could not run objdump ({error}). Install binutils.") from error
    if done.returncode:
        raise BuildError(f"could not read {library}: {done.stderr.strip()}")
    needed = set(re.findall(r"NEEDED\s+(\S+)", done.stdout))
    if unknown := sorted(needed - _FROM_TORCH - _FROM_SYSTEM):
        raise BuildError(
            f"got {library.name}, which needs {', '.join(unknown)}; expected nothing but torch's "
            "libraries and those that every Linux has. Link it statically or not at all."
        )
    if search := re.findall(r"R(?:UN)?PATH\s+(\S+)", done.stdout):
        raise BuildError(f"got {library.name} with the search path {search[0]}; expected none.")
    glibc = max(map(int, re.findall(r"\bGLIBC_2\.(\d+)", done.stdout)), default=17)
    libstdcxx = max(map(int, re.findall(r"\bGLIBCXX_3\.4\.(\d+)", done.stdout)), default=0)
    enough = [x for x, y in _LIBSTDCXX if y >= libstdcxx]
    if not enough:
        raise BuildError(
            f"got {library.name}, which needs GLIBCXX_3.4.{libstdcxx}; known are up to "
            f"{_LIBSTDCXX[-1][1]}. Build it with an older compiler."
        )
    return max(glibc, enough[0])


def _retag(tree: Path, tag: str) -> None:
    """Say in the wheel's metadata that it has code for one platform; Python's version is free."""
    (path,) = tree.glob("*.dist-info/WHEEL")
    text = path.read_text().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
    path.write_text(text.replace("Tag: py3-none-any", f"Tag: py3-none-{tag}"))


def _small(wheel: Path) -> Path:
    if (size := wheel.stat().st_size) > MOST_BYTES:
        raise BuildError(
            f"got a wheel of {size / 2**20:.1f} MiB ({wheel}); expected at most "
            f"{MOST_BYTES / 2**20:.0f}. Leave an architecture out."
        )
    return wheel


def _tool(module: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BuildError(
            f"could not run {module} {arguments[0]}: {(done.stderr or done.stdout).strip()[-2000:]}"
            f"\nInstall what is missing: pip install {module}."
        )

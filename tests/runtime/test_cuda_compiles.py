"""Every CUDA source compiles for every architecture: that needs nvcc and headers, no device."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hot_compile.errors import BuildError
from hot_compile.runtime.native import build, toolkit
from hot_compile.runtime.native.extensions import Extension, Source


def extension(*archs: str) -> Extension:
    try:
        return toolkit.cuda_extension(archs)
    except BuildError as error:
        pytest.skip(str(error))


def compile_source(ext: Extension, source: Source, out: Path) -> str:
    """The compiler's complaint about one source; empty if it compiles.

    What it makes is thrown away, so the last stage (ptxas) may skip its optimising, which takes the
    most time.
    """
    compiler, flags = build.compile_command(ext, source, ("c++",))
    command = [*compiler, *flags, "-Xptxas=-O0", "-c", str(ext.root / source.path), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=out.parent)
    complaint = done.stdout + done.stderr
    failed = done.returncode or "warning" in complaint
    return f"{source}:\n{complaint[-3000:]}" if failed else ""


@pytest.mark.slow
def test_compiles_without_warnings(tmp_path):
    """For all architectures at once: most of the work is done once for them."""
    ext = extension(*toolkit.ARCHITECTURES)
    jobs = [(ext, source, tmp_path / f"{i}.o") for i, source in enumerate(ext.sources)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        complaints = list(pool.map(lambda job: compile_source(*job), jobs))
    assert "".join(complaints) == ""


def test_ampere_has_no_hopper_sources():
    names = [source.path for source in extension("80").sources]
    assert not [name for name in names if "sm90" in name]
    assert "cuda/gemm/sm80.cu" in names


def test_hopper_has_both():
    ext = extension("80", "90a")
    assert "-DHOT_SM90" in ext.flags
    hopper = [source for source in ext.sources if "sm90" in source.path]
    assert hopper
    assert all("arch=compute_80,code=[sm_80,compute_80]" not in source.flags for source in hopper)


def test_every_cuda_source_is_compiled():
    ext = extension("80", "90a")
    there = {path.relative_to(ext.root).as_posix() for path in ext.root.rglob("*.cu")}
    assert {source.path for source in ext.sources} == there
    assert len(set(ext.sources)) == len(ext.sources)


def test_missing_nvcc_is_named(monkeypatch):
    monkeypatch.setattr(toolkit.shutil, "which", lambda *_: None)
    with pytest.raises(BuildError, match="CUDA_HOME"):
        toolkit.find_nvcc()


def test_missing_headers_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path))
    monkeypatch.setattr(toolkit.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(BuildError, match="nvidia-cutlass"):
        toolkit.find_cutlass()


def test_unknown_architecture_is_named():
    with pytest.raises(BuildError, match="expected some of"):
        toolkit.cuda_extension(("75",))

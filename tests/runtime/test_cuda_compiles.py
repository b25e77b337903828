"""Every CUDA source compiles for every architecture: that needs nvcc and headers, no device."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from hot_compile.errors import BuildError
from hot_compile.runtime import toolkit
from hot_compile.runtime.extensions import Extension, Source


def extension(*archs: str) -> Extension:
    try:
        return toolkit.cuda_extension(archs)
    except BuildError as error:
        pytest.skip(str(error))


def compile_source(ext: Extension, source: Source, folder: Path) -> str:
    """The compiler's complaint about one source; empty if it compiles."""
    command = dict(ext.compilers)[".cu"]
    include = f"-I{Path(torch.__file__).parent / 'include'}"
    out = folder / (Path(source.path).stem + ".o")
    done = subprocess.run(
        [
            *command,
            *ext.flags,
            *source.flags,
            include,
            "-c",
            str(ext.root / source.path),
            "-o",
            str(out),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    complaint = done.stdout + done.stderr
    return (
        f"{source.path}:\n{complaint[-3000:]}" if done.returncode or "warning" in complaint else ""
    )


@pytest.mark.slow
@pytest.mark.parametrize("arch", toolkit.ARCHITECTURES)
def test_compiles_without_warnings(arch, tmp_path):
    ext = extension(arch)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        complaints = pool.map(lambda source: compile_source(ext, source, tmp_path), ext.sources)
    assert "".join(complaints) == ""


def test_ampere_has_no_hopper_sources():
    names = [source.path for source in extension("80").sources]
    assert not [name for name in names if "sm90" in name]
    assert "cuda/gemm_sm80.cu" in names


def test_hopper_has_both():
    ext = extension("80", "90a")
    assert "-DHOT_SM90" in ext.flags
    hopper = [source for source in ext.sources if "sm90" in source.path]
    assert hopper
    assert all("arch=compute_80,code=[sm_80,compute_80]" not in source.flags for source in hopper)


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

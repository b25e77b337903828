"""Every CUDA source compiles: that needs nvcc and headers, no device."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Iterable
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


@functools.cache
def has_fast_compile(compiler: tuple[str, ...]) -> bool:
    """Whether nvcc is new enough to be told how much of its optimising it may leave out."""
    told = subprocess.run([*compiler, "--help"], capture_output=True, text=True, check=False)
    return "--Ofast-compile" in told.stdout


def quick(source: Source, compiler: tuple[str, ...]) -> str:
    """The flag by which the device's code is compiled soonest.

    CUTLASS's products are so long where nothing is optimised that ptxas takes minutes for Hopper's,
    and for Ampere's longer than the optimising does.
    """
    name = Path(source.path).stem
    if name.startswith("sm90") or not has_fast_compile(compiler):
        return "-Xptxas=-O0"
    return f"--Ofast-compile={'mid' if name.startswith('sm80') else 'max'}"


def compile_source(ext: Extension, source: Source, out: Path) -> str:
    """The compiler's complaint about one source; empty if it compiles.

    What it makes is thrown away: the device's code need not be fast, and the host's compiler only
    has to complain.
    """
    compiler, flags = build.compile_command(ext, source, ("c++",))
    thrown_away = (quick(source, compiler), "-Xcompiler=-fsyntax-only", "-c")
    command = [*compiler, *flags, *thrown_away, str(ext.root / source.path), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=out.parent)
    complaint = done.stdout + done.stderr
    failed = done.returncode or "warning" in complaint
    return f"{source}:\n{complaint[-3000:]}" if failed else ""


TOGETHER = (
    {"cuda/gemm/sm90.cu"},
    {"cuda/gemm/sm80.cu", "cuda/gemm/sm80_int4.cu"},
    {"cuda/quantize/columns.cu", "cuda/quantize/grad.cu"},
)
"""Sources that are read at once in CI: they have nothing but functions of the same headers."""


def joined(sources: Iterable[Source], folder: Path) -> list[Source]:
    """The same, but one for each of ``TOGETHER``: nvcc's time goes into reading headers."""
    sources, found = list(sources), []
    for paths in TOGETHER:
        taken = [source for source in sources if source.path in paths]
        sources = [source for source in sources if source not in taken]
        architecture = {tuple(f for f in s.flags if not f.startswith("-D")) for s in taken}
        file = folder / ("_".join(sorted(Path(path).stem for path in paths)) + ".cu")
        file.write_text("".join(map(included, taken)))
        found.append(Source(str(file), architecture.pop()))
        assert not architecture
    return found + sources


def included(source: Source) -> str:
    """The text of a file that reads ``source``, compiled with its definitions."""
    given = [flag.removeprefix("-D").split("=") for flag in source.flags if flag.startswith("-D")]
    defined = "".join(f"#define {name} {value}\n" for name, value in given)
    forgotten = "".join(f"#undef {name}\n" for name, _ in given)
    return f'{defined}#include "{source.path}"\n{forgotten}'


def complaints(ext: Extension, sources: Iterable[Source], folder: Path) -> str:
    """What the compiler says of all sources, as many at a time as there are cores."""
    longest_first = sorted(sources, key=lambda source: not Path(source.path).stem.startswith("sm"))
    jobs = [(ext, source, folder / f"{i}.o") for i, source in enumerate(longest_first)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return "".join(pool.map(lambda job: compile_source(*job), jobs))


HOPPERS = ("bf16_64x128", "bf16_128x192", "s32_128x128", "rows_bf16_128x192")
"""Of Hopper's products one of each schedule, one that transforms, one without an epilogue."""


def once(source: Source) -> Source | None:
    """The source as CI compiles it: for one architecture, or for both if Hopper's code is its own.

    None: a variant of Hopper's product that differs from others in its numbers only.
    """
    if "sm90" in source.path:
        return source if source.flags[2].removeprefix("-DHOT_NAME=") in HOPPERS else None
    ampere, hopper = source.flags[:2], source.flags[2:4]
    assert "compute_80" in ampere[1]
    assert "compute_90a" in hopper[1]
    own = "one_read" in source.path  # the only folder with __CUDA_ARCH__ >= 900
    return Source(source.path, ampere + hopper * own + source.flags[4:])


@pytest.mark.slow
def test_every_source_compiles_once(tmp_path):
    """What CI runs: most of nvcc's time goes into CUTLASS's headers, once an architecture."""
    ext = extension(*toolkit.ARCHITECTURES)
    sources = [found for source in ext.sources if (found := once(source))]
    assert {source.path for source in sources} == {source.path for source in ext.sources}
    assert len([source for source in sources if "sm90" in source.path]) == len(HOPPERS)
    assert complaints(ext, joined(sources, tmp_path), tmp_path) == ""


def test_what_is_read_at_once_has_the_same_headers():
    """So none of them hides that another lacks one."""
    root = extension("80", "90a").root
    for paths in TOGETHER:
        texts = [(root / path).read_text() for path in paths]
        assert len({tuple(re.findall("#include.*", text)) for text in texts}) == 1
        assert not re.search(r"\b(struct|class|template|__global__)\b", "".join(texts))


@pytest.mark.slow
def test_compiles_without_warnings(tmp_path):
    """For all architectures at once: most of the work is done once for them."""
    ext = extension(*toolkit.ARCHITECTURES)
    assert complaints(ext, ext.sources, tmp_path) == ""


def test_hoppers_own_code_is_where_ci_compiles_it():
    """``once`` leaves Hopper out elsewhere."""
    root = extension("80", "90a").root
    own = [p for p in root.rglob("*.cu*") if "__CUDA_ARCH__ >= 900" in p.read_text()]
    folders = {path.relative_to(root).parts[1] for path in own}
    assert folders <= {"one_read", "common"}


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

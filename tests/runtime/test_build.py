"""The build: errors a user can act on, one build for any number of processes, then cache hits."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import hot_compile
from hot_compile import progress
from hot_compile.errors import BuildError
from hot_compile.passes import pipeline
from hot_compile.runtime.native import build, extensions, providers
from hot_compile.runtime.native.extensions import Extension, Source


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> Extension:
    """A library that builds in a moment, an empty cache, and a compiler that logs its calls."""
    root = tmp_path / "csrc"
    root.mkdir()
    (root / "tiny.cpp").write_text('extern "C" int tiny() { return 1; }\n')
    compiler = tmp_path / "logging-cxx"
    real = build.find_compiler()
    compiler.write_text(f'#!/bin/sh\necho x >> {tmp_path}/calls\nexec {" ".join(real)} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Extension("tiny", (Source("tiny.cpp"),), ("tiny.cpp",), ("-fPIC",), root=root)


def compiler_calls(tmp_path: Path) -> int:
    """Compiles and links; asking for the version is one more call, made once per compiler."""
    return len((tmp_path / "calls").read_text().splitlines())


def test_second_build_is_a_cache_hit(tiny, tmp_path):
    path = build.build(tiny)
    assert path.exists()
    calls = compiler_calls(tmp_path)
    assert build.build(tiny) == path
    assert compiler_calls(tmp_path) == calls
    assert sorted(p.name for p in path.parent.iterdir()) == ["tiny.so"]


def test_a_build_says_one_line_before_and_one_after(tiny, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")  # narrower than any path
    path = build.build(tiny)
    before, after = capsys.readouterr().err.splitlines()
    assert before.startswith("hot_compile: building tiny with ")
    assert after.endswith(f"-> {path}")
    build.build(tiny)
    assert not capsys.readouterr().err


def test_concurrent_builds_build_once(tiny, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(build.build, [tiny] * 4))
    assert len(set(paths)) == 1
    lines = compiler_calls(tmp_path)
    assert lines <= 2 + 4  # one compile, one link, at most one version query a thread


def test_sources_and_flags_decide_the_cache_key(tiny):
    first = tiny.digest()
    assert replace(tiny, flags=("-fPIC", "-O1")).digest() != first
    (tiny.root / "tiny.cpp").write_text('extern "C" int tiny() { return 2; }\n')
    assert tiny.digest() != first


def test_compile_error_is_shown(tiny):
    (tiny.root / "tiny.cpp").write_text("this is not C++\n")
    with pytest.raises(BuildError, match=r"(?s)could not build tiny.*tiny.cpp:1.*error"):
        build.build(tiny)


def test_no_compiler(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(BuildError, match=r"looked for g\+\+, clang\+\+, c\+\+ on PATH"):
        build.find_compiler()
    provider = providers.status("cpu")
    assert not provider.available
    assert "no C++ compiler" in provider.reason


def test_wrong_cxx(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(BuildError, match=r"got CXX='no-such-compiler -O2'.*unset it"):
        build.find_compiler()


def test_cxx_may_hold_arguments(monkeypatch):
    monkeypatch.setenv("CXX", f"{sys.executable} -V")
    assert build.find_compiler() == (sys.executable, "-V")


def test_unwritable_cache(tiny, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    with pytest.raises(BuildError, match=r"could not write to the build cache.*XDG_CACHE_HOME"):
        build.build(tiny)


def test_broken_library(tiny, monkeypatch):
    path = build.build(tiny)
    path.write_bytes(b"not a library")
    monkeypatch.setattr(build, "extension_for", lambda _: tiny)
    with pytest.raises(BuildError, match=r"could not load .*tiny.so"):
        build.load("tiny-device")


def test_unknown_device():
    with pytest.raises(BuildError, match="got device type 'abacus'; expected one of"):
        build.load("abacus")
    assert not providers.status("abacus").available


def test_load_is_idempotent():
    assert build.load("cpu") == build.load("cpu")


def test_every_source_is_shipped_and_hashed():
    extension = extensions.cpu_extension()
    assert all((extensions.CSRC / s.path).is_file() for s in extension.sources)
    roots = [extensions.CSRC / path for path in extension.inputs]
    for source in extension.sources:
        path = extensions.CSRC / source.path
        assert any(root == path or root in path.parents for root in roots)
    there = {
        path.relative_to(extensions.CSRC).as_posix()
        for path in (extensions.CSRC / "cpu").rglob("*.cpp")
    }
    assert {source.path for source in extension.sources} == there


def copied_sources(tmp_path: Path) -> Path:
    """The package's own sources, to be changed."""
    root = Path(hot_compile.__file__).parent.parent
    for name in ("passes", "runtime"):
        shutil.copytree(root / name, tmp_path / name)
    return tmp_path


def test_a_byte_of_any_source_changes_the_identity(tmp_path):
    """Sources in subfolders too: else an upgrade would meet an old cache."""

    def digest(root: Path) -> str:
        state = hashlib.sha256()
        extensions.hash_tree(root, state)
        return state.hexdigest()

    root = copied_sources(tmp_path) / "runtime"
    (root / "__pycache__").mkdir(exist_ok=True)
    files = [p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert {p.suffix for p in files} >= {".py", ".cpp", ".hpp", ".inl", ".cu", ".cuh"}
    known = {digest(root)}
    for file in files:
        file.write_bytes(file.read_bytes() + b"\n")
        known.add(digest(root))
    assert len(known) == len(files) + 1
    (root / "__pycache__" / "ops.pyc").write_bytes(b"of another process")
    assert digest(root) in known


def test_a_byte_of_any_pass_changes_the_identity(tmp_path, monkeypatch):
    root = copied_sources(tmp_path) / "passes"
    (root / "deeper").mkdir()
    (root / "deeper" / "pass.py").write_text("x = 1\n")
    monkeypatch.setattr(pipeline, "__file__", str(root / "pipeline.py"))
    known = {pipeline.sources_hash.__wrapped__()}
    files = list(root.rglob("*.py"))
    for file in files:
        file.write_bytes(file.read_bytes() + b"\n")
        known.add(pipeline.sources_hash.__wrapped__())
    assert len(known) == len(files) + 1


def test_status_and_version():
    provider = providers.status("cpu")
    assert provider.available
    assert provider.isa in ("scalar", "avx512")
    assert len(providers.runtime_version()) == 16


SATURATION = """
import torch
from hot_compile.runtime import reference
from hot_compile.runtime.native import build
build.load("cpu")
a, b = (torch.full((r, 192), 127, dtype=torch.int8) for r in (33, 40))
a[::2] = -128
args = (a, b, torch.ones(33), torch.ones(40), None, None, torch.float32)
assert torch.equal(torch.ops.hot.scaled_int_mm(*args), reference.scaled_int_mm(*args))
"""


@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE"])
def test_products_are_exact_without_vnni(isa):
    """oneDNN's product without VNNI adds pairs in saturating 16 bits; ours must take over."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa}
    subprocess.run([sys.executable, "-c", SATURATION], env=environment, check=True, timeout=100)


@pytest.mark.parametrize("outer", [False, True])
def test_a_terminal_sees_how_far_a_build_is(tiny, monkeypatch, outer):
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=100)
    monkeypatch.setattr(progress, "_STDERR", terminal)
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    with progress.progress(1) if outer else contextlib.nullcontext(print) as begin:
        begin("around it")  # as ``doctor`` has one
        build.build(tiny)
    assert ("around it" if outer else "building tiny") in shown.getvalue()

"""Libraries that come in a wheel: used where they fit, and the wheel itself."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hot_compile.errors import BuildError
from hot_compile.runtime.native import build, prebuilt, providers, wheel
from hot_compile.runtime.native.extensions import STABLE_ABI

ROOT = Path(__file__).parents[2]


def manifest(**changes) -> prebuilt.Manifest:
    """One that fits here, but for ``changes``."""
    fitting = prebuilt.Manifest(
        library="hot_cpu.so",
        device_type="cpu",
        sources=prebuilt.sources_digest("cpu"),
        system=prebuilt.this_system(),
        glibc="2.17",
        torch=STABLE_ABI,
        cuda="",
    )
    return dataclasses.replace(fitting, **changes)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A package's folder of libraries, with one that is found but is no library."""
    (tmp_path / "hot_cpu.so").write_bytes(b"not a library")
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    return tmp_path


def test_a_library_that_fits_is_found(folder):
    assert prebuilt.find("cpu") == "none came with the package"
    manifest().save(folder)
    assert prebuilt.find("cpu") == folder / "hot_cpu.so"
    assert prebuilt.find("cuda") == "none came with the package"


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("sources", "of yesterday", "sources of yesterday"),
        ("system", "linux mips", "system linux mips"),
        ("glibc", "2.999", "glibc 2.999 or newer"),
        ("torch", "0x0", "stable ABI 0x0"),
        ("cuda", "12", "CUDA 12"),
        ("library", "other.so", "is missing"),
    ],
)
def test_a_library_that_does_not_fit_says_why(folder, field, value, told):
    manifest(**{field: value}).save(folder)
    assert told in prebuilt.find("cpu")
    provider = providers.status("cpu")
    assert provider.available  # there is a compiler
    assert told in provider.origin


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"library": 1}', "\0"])
def test_a_manifest_that_is_none_is_passed_over(folder, text):
    (folder / "hot_cpu.json").write_text(text)
    assert "cannot be read" in prebuilt.find("cpu")
    (folder / "hot_cpu.json").rename(folder / "hot_old.json")
    manifest().save(folder)
    assert prebuilt.find("cpu") == folder / "hot_cpu.so"


def test_no_compiler_is_needed_for_what_came_with_the_package(folder, monkeypatch):
    manifest().save(folder)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    provider = providers.status("cpu")
    assert provider.available
    assert str(folder / "hot_cpu.so") in provider.origin


def test_what_does_not_load_is_built(folder, caplog):
    manifest().save(folder)
    path = build.load.__wrapped__("cpu")
    assert path.parent.parent == build.cache_dir()
    assert "does not load" in caplog.text


def library(tmp_path: Path, *flags: str, name: str = "lib.so") -> Path:
    source = tmp_path / "source.cpp"
    source.write_text("#include <string>\nstd::string f(int x) { return std::to_string(x); }\n")
    command = [*build.find_compiler(), "-shared", "-fPIC", str(source), "-o", str(tmp_path / name)]
    subprocess.run([*command, "-Wl,--no-as-needed", *flags], check=True)
    return tmp_path / name


def test_the_oldest_system_is_read_off_a_library(tmp_path):
    assert 17 <= wheel.oldest_glibc(library(tmp_path)) < 100
    library(tmp_path, name="libown.so")
    with pytest.raises(BuildError, match=r"needs libown\.so"):
        wheel.oldest_glibc(library(tmp_path, f"-L{tmp_path}", "-lown"))
    with pytest.raises(BuildError, match="search path /own"):
        wheel.oldest_glibc(library(tmp_path, "-Wl,-rpath,/own"))
    (tmp_path / "lib.so").write_text("no library")
    with pytest.raises(BuildError, match="could not read"):
        wheel.oldest_glibc(tmp_path / "lib.so")


def test_our_own_library_loads_where_torch_does():
    """Torch's own wheels ask for glibc 2.28."""
    assert wheel.oldest_glibc(build.build(build.extension_for("cpu"))) <= 28


def other_wheel(folder: Path, sources: str) -> Path:
    """A wheel with a library for CUDA 12."""
    made = library(folder, name="hot_cuda-cu12.so")
    names = {"library": made.name, "device_type": "cuda", "cuda": "12", "sources": sources}
    manifest(**names).save(folder)
    path = folder / "other.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("hot_cuda-cu12.so", "hot_cuda-cu12.json"):
            archive.write(folder / name, f"hot_compile/runtime/prebuilt/{name}")
    return path


def test_libraries_of_another_wheel_are_taken_over(tmp_path):
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    other = other_wheel(tmp_path, prebuilt.sources_digest("cuda"))
    assert wheel._take_over(other, folder) >= 17
    assert sorted(p.name for p in folder.iterdir()) == ["hot_cuda-cu12.json", "hot_cuda-cu12.so"]
    assert wheel._take_over(other, folder) == 0  # it is there
    for path, told in (
        (other_wheel(tmp_path, "others"), "other sources"),
        (tmp_path / "source.cpp", "expected a wheel of ours"),
        (tmp_path / "nowhere.whl", "expected a wheel of ours"),
    ):
        with pytest.raises(BuildError, match=told):
            wheel._take_over(path, folder)


def test_a_wheel_is_made_of_the_tree_that_runs(tmp_path):
    with pytest.raises(BuildError, match="expected the source tree"):
        wheel.make_wheel(tmp_path, tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with pytest.raises(BuildError, match="expected the source tree"):
        wheel.make_wheel(tmp_path, tmp_path)


FOLDERS = ("hot_compile", "passes", "runtime", "tests", "docs", "examples", "benchmarks")
SDIST = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"


def test_the_source_distribution_has_every_file(tmp_path):
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", prebuilt.FOLDER.name)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for path in ROOT.iterdir():
        if path.suffix in (".md", ".toml", ".in") or path.name == "LICENSE":
            shutil.copy(path, tmp_path)
    wanted = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    done = subprocess.run(
        [sys.executable, "-c", SDIST], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    path = tmp_path / "dist" / done.stdout.split()[-1]
    with tarfile.open(path) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    assert not wanted - found
    assert path.stat().st_size < 5 * 2**20


TRAIN = """
import pathlib, sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 64))
step = torch.compile(model, backend="hot", options={"min_gain": 0, "keep_head": False})
optimizer, x = torch.optim.SGD(model.parameters(), lr=0.5), torch.randn(64, 64)
losses = []
for _ in range(4):
    loss = (step(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses == sorted(losses, reverse=True), losses
import hot_compile
from hot_compile.runtime.native import build
assert pathlib.Path(hot_compile.__file__).is_relative_to(sys.prefix), hot_compile.__file__
assert build.load("cpu").is_relative_to(sys.prefix), build.load("cpu")
"""


def installed(path: Path, folder: Path) -> Path:
    """The Python of a fresh environment with the wheel and what it declares to need, no more."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", str(path)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (ours,) = distributions(path=[str(site)])
    for other in needed(ours).values():
        link_files_of(other, site)
    return python


def needed(given: Distribution, extras: Iterable[str] = ()) -> dict[str, Distribution]:
    """What it needs, and what that needs, as installed here."""
    found: dict[str, Distribution] = {}
    for text in given.requires or ():
        wanted = Requirement(text)
        if any(
            wanted.marker is None or wanted.marker.evaluate({"extra": e}) for e in ("", *extras)
        ):
            own = distribution(wanted.name)
            found |= {wanted.name: own} | needed(own, wanted.extras)
    return found


def link_files_of(one: Distribution, site: Path) -> None:
    """Put links to the files of a distribution into another folder of packages."""
    for file in one.files or ():
        if ".." not in file.parts and "__pycache__" not in file.parts:
            link = site / file
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                link.symlink_to(one.locate_file(file))


@pytest.mark.slow
def test_from_the_wheel_alone_nothing_is_built(tmp_path):
    path = wheel.make_wheel(ROOT, tmp_path / "dist")
    assert path.stat().st_size < 5 * 2**20
    python = installed(path, tmp_path / "fresh")
    environment = {
        "PATH": "/usr/bin:/bin",  # Inductor's compiler
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "300",
    }

    def run(*command: str) -> str:
        done = subprocess.run(
            [str(python), *command],
            capture_output=True,
            text=True,
            env=environment,
            cwd=tmp_path,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "building" not in done.stderr
        return done.stdout

    assert "came with the package" in run("-m", "hot_compile", "doctor")
    run("-c", TRAIN)
    assert not list(tmp_path.glob("cache/hot_compile/hot_*"))

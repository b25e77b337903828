"""Loads a native library: the package's own, or built on first use, into a per-user cache.

The cache is ``$XDG_CACHE_HOME/hot_compile`` (``~/.cache/hot_compile``); a library's folder is keyed
by its sources, flags, compiler, torch and machine. Builds happen under a file lock and appear by an
atomic rename, so that any number of processes may start at once.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from filelock import FileLock
from rich.console import Console

import hot_compile.runtime.ops  # noqa: F401  (schemas must exist before implementations)
from hot_compile.errors import BuildError
from hot_compile.progress import progress
from hot_compile.runtime.native.extensions import (
    Extension,
    Source,
    cpu_extension,
    head_extension,
)
from hot_compile.runtime.native.toolkit import cuda_extension

TIMED_AS = "hot_compile.build"
"""By this key Dynamo's account of times holds what building took."""
_CXX_NAMES = ("g++", "clang++", "c++")
_DONE = re.compile(r"\[\d+/\d+\]")
"""How a line of ninja's begins that says that another source is compiled."""
# torch's own C++ runtime: an exception thrown by another copy, which a compiler that links it
# statically would put into the library, crashes the process on its way out
_CXX_RUNTIME = ("-l:libstdc++.so.6",) if sys.platform == "linux" else ()
_EXTENSIONS: dict[str, Callable[[], Extension]] = {
    "cpu": cpu_extension,
    "cuda": cuda_extension,
}


def cache_dir() -> Path:
    """Folder of built libraries."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hot_compile"


def find_compiler() -> tuple[str, ...]:
    """Command of the C++ compiler: ``$CXX``, or g++, clang++, c++. Raises BuildError."""
    wanted = os.environ.get("CXX")
    try:
        command = tuple(shlex.split(wanted)) if wanted else ()
    except ValueError as error:  # quotes that nothing closes
        raise BuildError(
            f"got CXX={wanted!r}, which is no command ({error}); expected a compiler and its "
            "flags, quoted as in a shell. Set CXX to one, or unset it."
        ) from error
    if command and shutil.which(command[0]):
        return command
    if command:
        raise BuildError(
            f"got CXX={wanted!r}, which is not on PATH; expected a C++20 compiler. "
            "Set CXX to one (g++ 11 or newer, clang++ 14 or newer), or unset it."
        )
    for name in _CXX_NAMES:
        if shutil.which(name):
            return (name,)
    raise BuildError(
        f"found no C++ compiler; looked for {', '.join(_CXX_NAMES)} on PATH. Install one "
        "(Debian/Ubuntu: apt install g++; conda: conda install cxx-compiler) or set CXX. "
        "It is needed once, to build the CPU operators."
    )


@functools.cache
def compiler_version(command: tuple[str, ...]) -> str:
    """What it says of itself; it may say nothing. Raises BuildError if it cannot be run."""
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(
            f"could not run {shlex.join(command)} ({error}); expected a compiler. Set CXX (of "
            "CUDA: CUDA_HOME) to one that runs here."
        ) from error
    return done.stdout or done.stderr or "of no known version"


def library_path(extension: Extension, compiler: tuple[str, ...]) -> Path:
    """Where the library is, or will be, for this compiler, torch and machine."""
    parts = (
        extension.digest(),
        " ".join(compiler),
        compiler_version(compiler),
        *(compiler_version(command) for _, command in extension.compilers),
        torch.__version__,
        platform.machine(),
        sys.platform,
    )
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return cache_dir() / f"{extension.name}-{key}" / f"{extension.name}.so"


def _ninja() -> str:
    try:
        import ninja
    except ImportError:
        found = shutil.which("ninja")
    else:
        found = shutil.which("ninja", path=ninja.BIN_DIR) or shutil.which("ninja")
    if not found:
        raise BuildError(
            "found no ninja; looked for the Python package `ninja` and on PATH. "
            "Install it: pip install ninja."
        )
    return found


def _quote(words: tuple[str, ...]) -> str:
    return " ".join(shlex.quote(word) for word in words).replace("$", "$$")


def compile_command(
    extension: Extension, source: Source, compiler: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(compiler, flags) of one source, but for its input and output."""
    torch_headers = Path(torch.__file__).parent / "include"
    include = (f"-I{torch_headers}", f"-I{extension.root}")
    chosen = dict(extension.compilers).get(Path(source.path).suffix, compiler)
    return chosen, extension.flags + source.flags + include


def _build_file(extension: Extension, compiler: tuple[str, ...]) -> str:
    """Text of build.ninja: every source to an object, all objects to the library."""
    lines = [
        "rule compile",
        "  command = $cxx $flags -c $in -o $out",
        "rule link",
        f"  command = {_quote(compiler)} -shared $in -o $out $flags",
    ]
    objects = []
    for number, source in enumerate(extension.sources):
        path = extension.root / source.path
        objects.append(f"{number}_{path.stem}.o")
        escaped = str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")
        chosen, flags = compile_command(extension, source, compiler)
        lines += [
            f"build {objects[-1]}: compile {escaped}",
            f"  cxx = {_quote(chosen)}",
            f"  flags = {_quote(flags)}",
        ]
    libraries = Path(torch.__file__).parent / "lib"
    link = (f"-L{libraries}", *extension.link_flags, *_CXX_RUNTIME)
    lines += [f"build {extension.name}.so: link {' '.join(objects)}", f"  flags = {_quote(link)}"]
    return "\n".join(lines) + "\n"


def _run_ninja(extension: Extension, compiler: tuple[str, ...], folder: Path) -> Path:
    (folder / "build.ninja").write_text(_build_file(extension, compiler))
    said = []
    with (
        progress(len(extension.sources) + 1) as begin,
        subprocess.Popen(
            [_ninja()], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as ninja,
    ):
        begin(f"building {extension.name}")
        for line in ninja.stdout or ():
            said.append(line)
            if _DONE.match(line):
                begin(f"building {extension.name}")
    if ninja.returncode != 0:
        tail = "".join(said[-30:]).strip()
        raise BuildError(
            f"could not build {extension.name} with {' '.join(compiler)} "
            f"({compiler_version(compiler).splitlines()[0]}). The compiler said:\n{tail}\n"
            "Expected a C++20 compiler; set CXX to another one to try it."
        )
    return folder / f"{extension.name}.so"


def build(extension: Extension) -> Path:
    """Path of the built library, building it first if the cache lacks it. Raises BuildError."""
    compiler = find_compiler()
    target = library_path(extension, compiler)
    if target.exists():
        return target
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target.parent}.lock"):
            if not target.exists():
                _build_into(extension, compiler, target)
    except OSError as error:
        raise BuildError(
            f"could not write to the build cache {cache_dir()}: {error}. "
            "Set XDG_CACHE_HOME to a folder that can be written."
        ) from error
    return target


def _build_into(extension: Extension, compiler: tuple[str, ...], target: Path) -> None:
    from torch._dynamo.utils import dynamo_timed  # which makes Inductor's cache; doctor may not

    console = Console(stderr=True, highlight=False, markup=False)
    compiling = f"hot_compile: building {extension.name} with {' '.join(compiler)}, once ..."
    console.print(compiling, soft_wrap=True)  # one line, however long a path is
    start = time.perf_counter()
    with (
        dynamo_timed(TIMED_AS),
        tempfile.TemporaryDirectory(dir=cache_dir(), prefix=f"{extension.name}-build-") as folder,
    ):
        library = _run_ninja(extension, compiler, Path(folder))
        target.parent.mkdir(exist_ok=True)
        os.replace(library, target)
    seconds = time.perf_counter() - start
    built = f"hot_compile: built {extension.name} in {seconds:.1f} s -> {target}"
    console.print(built, soft_wrap=True)


def extension_for(device_type: str) -> Extension:
    """The extension that serves tensors of ``device_type``. Raises BuildError for others."""
    if device_type not in _EXTENSIONS:
        raise BuildError(
            f"got device type {device_type!r}; expected one of {sorted(_EXTENSIONS)}. "
            "Move the model to one of these, or use backend='inductor'."
        )
    return _EXTENSIONS[device_type]()


@functools.cache
def load(device_type: str) -> Path:
    """Registers the operators for ``device_type``; returns the library.

    Idempotent. Raises BuildError as ``load_extension`` does.
    """
    return load_extension(extension_for(device_type))


def load_all(device_type: str) -> list[Path]:
    """Everything that a model on such a device may use. Raises BuildError as ``load`` does."""
    heads = [load_extension(head_extension())] if device_type == "cuda" else []
    return [*heads, load(device_type)]


def load_extension(extension: Extension) -> Path:
    """Registers a library's operators; returns the library.

    It is built if need be. Raises BuildError if there is no compiler, it fails, or the library does
    not load.
    """
    path = build(extension)
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise BuildError(
            f"could not load {path}: {error}. Delete that file's folder to build it again."
        ) from error
    return path

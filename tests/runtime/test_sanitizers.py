"""The CPU operators under address and undefined-behaviour sanitizers, over the other sweeps."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hot_compile.runtime import build, extensions

_FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
_SWEEPS = {
    "test_small_sizes.py": "test_integer_products or test_convolutions",
    "test_cpu_matches_reference.py": "not every_byte and not long and not overflow",
    "test_conv.py": "not cuda and not opcheck and not wrong_arguments",
    "test_packed.py": "",
    "test_shared.py": "",
}
"""Files beside this one, and which of their tests: those that a Python definition judges."""


def _preloaded(command: tuple[str, ...]) -> list[str]:
    """Libraries that have to be in the process before any other; empty if one is missing.

    C++'s own, too: else AddressSanitizer cannot find the real __cxa_throw that it stands before.
    """
    found = []
    for name in ("libasan.so", "libstdc++.so"):
        asked = [*command, f"-print-file-name={name}"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        path = Path(done.stdout.strip())
        if not (path.is_absolute() and path.exists()):
            return []
        found.append(str(path.resolve()))
    return found


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory) -> dict[str, str]:
    """Environment in which the CPU library is a sanitized one, built into a cache of its own."""
    compiler = build.find_compiler()
    preloaded = _preloaded(compiler)
    if sys.platform != "linux" or not preloaded:
        pytest.skip(f"{' '.join(compiler)} has no shared libasan here")
    cache = str(tmp_path_factory.mktemp("sanitized"))
    environment = {"CXX": f"{shlex.join(compiler)} {_FLAGS}", "XDG_CACHE_HOME": cache}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        build.build(extensions.cpu_extension())  # here: a compiler under LD_PRELOAD is slow
    return {
        **os.environ,
        **environment,
        "LD_PRELOAD": ":".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own are not ours
    }


@pytest.mark.slow
@pytest.mark.parametrize("file", _SWEEPS)
def test_no_bad_access(sanitized, file):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider"]
    command += ["-k", _SWEEPS[file], str(Path(__file__).parent / file)]
    done = subprocess.run(command, env=sanitized, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.slow
def test_a_bad_access_is_found(sanitized, tmp_path):
    """The sanitizers are really in force: reading past an end stops the process."""
    source = tmp_path / "past.cpp"
    source.write_text('extern "C" int past(const char* p) { return p[8]; }\n')
    library = tmp_path / "past.so"
    subprocess.run(
        [*shlex.split(sanitized["CXX"]), "-shared", "-fPIC", str(source), "-o", str(library)],
        check=True,
    )
    script = (
        "import ctypes, torch\n"
        f"past = ctypes.CDLL({str(library)!r}).past\n"
        "t = torch.zeros(8, dtype=torch.int8)\n"
        "past(ctypes.c_void_p(t.data_ptr()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=sanitized, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr

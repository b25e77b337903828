"""Libraries that came with the package, in a wheel: which one fits this machine, or why none does.

Each lies in ``runtime/prebuilt`` beside a manifest, ``hot_cpu.so`` beside ``hot_cpu.json``. They
are built against LibTorch's stable ABI, so one serves every torch from 2.11 on, and one CUDA
library every minor version of its CUDA.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from hot_compile.runtime.native import toolkit
from hot_compile.runtime.native.extensions import CSRC, STABLE_ABI, hash_tree

FOLDER = Path(__file__).parent.parent / "prebuilt"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a library was built from, and what it needs; all as text."""

    library: str
    """Its file's name, beside the manifest."""
    device_type: str
    sources: str
    """:func:`sources_digest` of what it was built from."""
    system: str
    """``sys.platform`` and ``platform.machine()``."""
    glibc: str
    """The oldest that it loads with, e.g. "2.34"; of torch's own libraries no more is known."""
    torch: str
    """The stable ABI that it was built for."""
    cuda: str
    """Major version of CUDA; empty for a CPU."""

    def save(self, folder: Path) -> None:
        """Write it beside its library."""
        text = json.dumps(dataclasses.asdict(self), indent=1)
        (folder / self.library).with_suffix(".json").write_text(text + "\n")

    def misfit(self) -> str:
        """Why the library is not for this process; empty if it is."""
        checks = {
            "sources": (self.sources, sources_digest(self.device_type)),
            "system": (self.system, this_system()),
            "torch's stable ABI": (self.torch, STABLE_ABI),
            "CUDA": (self.cuda, cuda_major(self.device_type)),
        }
        for what, (built, here) in checks.items():
            if built != here:
                return f"{self.library} was built for {what} {built[:24]}, here is {here[:24]}"
        found, here = platform.libc_ver()
        if found == "glibc" and _version(here) < _version(self.glibc):
            return f"{self.library} was built for glibc {self.glibc} or newer, here is {here}"
        return ""


def find(device_type: str) -> Path | str:
    """The library for tensors of ``device_type`` that came with the package, or why there is none.

    Raises BuildError for a CUDA device too old for any of our kernels.
    """
    reasons = []
    for path in sorted(FOLDER.glob("*.json")):
        try:
            manifest = Manifest(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            reasons.append(f"{path.name} cannot be read ({error})")
            continue
        if manifest.device_type != device_type:
            continue
        library = FOLDER / manifest.library
        reason = manifest.misfit() or ("" if library.is_file() else f"{library} is missing")
        if not reason:
            if device_type == "cuda":
                toolkit.device_architectures()
            return library
        reasons.append(reason)
    return "; ".join(reasons) or "none came with the package"


def sources_digest(device_type: str) -> str:
    """Digest of a library's sources and of the modules that say how they are compiled."""
    state = hashlib.sha256()
    for path in (CSRC / device_type, *(Path(__file__).parent / n for n in _HOW[device_type])):
        hash_tree(path, state)
    return state.hexdigest()[:16]


_HOW = {"cpu": ("extensions.py",), "cuda": ("extensions.py", "toolkit.py")}


def this_system() -> str:
    """Operating system and architecture."""
    return f"{sys.platform} {platform.machine()}"


def cuda_major(device_type: str) -> str:
    """Of the CUDA that this torch is built with, e.g. "13"; empty for a CPU, or without CUDA."""
    version = torch.version.cuda if device_type == "cuda" else None
    return (version or "").split(".")[0]


def _version(text: str) -> tuple[Any, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())

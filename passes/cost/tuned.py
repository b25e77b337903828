"""Rates measured on this machine, kept in files beside the built operators.

A file is named by all that a rate depends on: device, torch, our operators. What does not fit or
cannot be read counts as not there, with a warning.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from hot_compile.passes.base.files import write_whole
from hot_compile.passes.cost.linear import Rates
from hot_compile.runtime.native.build import cache_dir
from hot_compile.runtime.native.providers import runtime_version, status

log = logging.getLogger("hot_compile")

_FORMAT = 4
_DIGITS = 4
"""Significant ones that are kept: more would be noise."""
_ALWAYS = {"float32", "bfloat16", "float16"}
_TABLES = ("exact", "convolution")
_FACTS = ("int32_result", "asynchronous", "one_read")
_MAY_BE_ZERO = ("start", "idle", "host_copy", "coding", "power")
_UNREADABLE = (OSError, ValueError, TypeError, AttributeError, LookupError)
"""What a file that is none of ours, or half of one, may raise."""


def rates_folder() -> Path:
    """Where the files lie."""
    return cache_dir() / "rates"


def kind_of(device: torch.device) -> str:
    """What a rate depends on besides software: a GPU's name; a CPU's, its vectors, our threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = torch.cpu.get_capabilities().get("cpu_name") or platform.processor()
    provider = status("cpu")
    vnni = "-vnni" if provider.fast_int8 else ""
    return f"{name or platform.machine()} {provider.isa}{vnni} {torch.get_num_threads()} threads"


def identity_of(device: torch.device) -> dict[str, Any]:
    """What a file must say of itself to be used for ``device``."""
    return {
        "format": _FORMAT,
        "device": kind_of(device),
        "torch": torch.__version__,
        "operators": runtime_version(),
    }


def path_of(device: torch.device, what: str = "") -> Path:
    """Where the rates of ``device`` are, or will be; or ``what`` else was timed on it."""
    identity = identity_of(device)
    digest = hashlib.sha256(repr(sorted(identity.items())).encode()).hexdigest()[:16]
    name = re.sub(r"[^a-z0-9]+", "-", identity["device"].lower()).strip("-")
    return rates_folder() / f"{name}-{digest}{what}.json"


def save(device: torch.device, rates: Rates) -> Path:
    """Keep ``rates`` for ``device``; in one piece, whoever else reads or writes.

    Raises:
        OSError: the folder cannot be made or written.
    """
    path = path_of(device)
    kept = _rounded(dataclasses.asdict(rates))
    del kept["source"]
    data = {**identity_of(device), "rates": kept}
    write_whole(path, json.dumps(data, indent=1) + "\n")
    return path


def load(device: torch.device) -> Rates | None:
    """What was kept for ``device``; None if nothing was, or if it cannot be used: then it warns."""
    path = path_of(device)
    try:
        data = json.loads(path.read_text())
        for name, wanted in identity_of(device).items():
            if data[name] != wanted:
                raise ValueError(f"its {name} is {data[name]!r}, not {wanted!r}")
        return rates_in(data)
    except FileNotFoundError:
        return None
    except _UNREADABLE as error:
        why = f"{type(error).__name__}: {error}"
    said = "hot: rates in %s are not used (%s); `hot-compile tune` makes new ones"
    log.warning(said, path, why)
    return None


def read(path: Path) -> Rates:
    """Rates of any device from a file made there, for planning.

    Raises:
        OSError: it cannot be read. ValueError: it holds no rates.
    """
    try:
        return rates_in(json.loads(path.read_text()))
    except (TypeError, AttributeError, LookupError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def rates_in(data: Mapping[str, Any]) -> Rates:
    """The rates of a file's content.

    Raises:
        ValueError, TypeError, AttributeError, LookupError: there are none.
    """
    if data["format"] != _FORMAT:
        raise ValueError(f"format {data['format']!r}; this hot-compile reads {_FORMAT}")
    rates = dict(data["rates"])
    missing = _ALWAYS - rates["exact"].keys()
    if missing:
        raise ValueError(f"no rate of products in {', '.join(sorted(missing))}")
    for name, value in rates.items():
        for number in value.values() if name in _TABLES else [value]:
            _check(name, number)
    return Rates(**rates, source="measured by `hot-compile tune`")


def _check(name: str, number: object) -> None:
    """Raises ValueError for what cannot be a rate (or, of ``_FACTS``, a fact)."""
    if name in _FACTS:
        if not isinstance(number, bool):
            raise ValueError(f"{name} is {number!r}, neither true nor false")
        return
    known = isinstance(number, (int, float)) and not isinstance(number, bool)
    if known and math.isfinite(number) and number > 0:  # type: ignore[arg-type,operator]
        return
    if name not in _MAY_BE_ZERO or number != 0:
        raise ValueError(f"{name} is {number!r}, no positive number")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def in_job() -> bool:
    """Several processes train together."""
    up = distributed.is_available() and distributed.is_initialized()
    return up and distributed.get_world_size() > 1


def agreed(path: Path, mine: Rates | None) -> Rates | None:
    """What all processes of a job take for one kind of device: what the first to ask had.

    All of them must come to one plan, though a file may be on one host only, or be written just
    now.
    """
    found = first_said(path.name, None if mine is None else dataclasses.asdict(mine))
    return None if found is None else Rates(**found)


def first_said(name: str, mine: Any) -> Any:
    """What the first of a job's processes had of ``name``; alone: ``mine``. JSON can hold it.

    It is told through the job's store, not by a collective: not every process compiles. None, with
    a warning, where the store does not answer.
    """
    if not in_job():
        return mine
    try:
        store = distributed.distributed_c10d._get_default_store()
        first = store.compare_set(f"hot_compile/rates/{name}", "", json.dumps(mine))
    except (RuntimeError, ValueError, NotImplementedError) as error:
        log.warning(
            "hot: processes cannot agree on what was measured, it counts for nothing: %s", error
        )
        return None
    return json.loads(first)

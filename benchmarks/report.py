"""What every figure needs beside it: where and with what it was measured."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tables import Document, Lines, numbers

import hot_compile


@dataclass
class StepRow:
    """One configuration's figures on one case: a whole step."""

    case: str
    config: str
    best_ms: float = float("inf")
    host_ms: float = float("inf")
    peak_bytes: int = 0
    compile_s: float = 0.0
    loss: float = 0.0


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and hardware behind a measurement."""
    return {
        "torch": torch.__version__,
        "hot_compile": hot_compile.__version__,
        "python": platform.python_version(),
        "device": _device_name(device),
        "cpu_threads": torch.get_num_threads(),
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def document(device: torch.device, arguments: dict[str, Any], rows: list[Any]) -> Document:
    """What one run's file says: environment, arguments, rows (dataclasses or JSON)."""
    figures = [row if isinstance(row, dict) else asdict(row) for row in rows]
    return {"environment": environment(device), "arguments": arguments, "rows": figures}


def write_json(
    path: Path, device: torch.device, arguments: dict[str, Any], rows: list[Any]
) -> None:
    """One file per run."""
    _write(path, document(device, arguments, rows))


def _write(path: Path, said: Document) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(said, indent=1, default=str) + "\n")


def publish(
    table: Callable[[list[Document]], Lines], said: Document, title: str, path: Path | None
) -> None:
    """One of ``tables.TABLES`` in the terminal, and the figures in a file if one is named."""
    show(table([said]), title)
    if path:
        _write(path, said)


def show(lines: Lines, title: str) -> None:
    """A table in the terminal, its columns of numbers to the right."""
    table = Table(title=title)
    for name, right in zip(lines[0], numbers(lines), strict=True):
        table.add_column(name, justify="right" if right else "left")
    for line in lines[1:]:
        table.add_row(*(cell.replace("**", "") for cell in line))
    Console(width=140).print(table)

"""What every figure needs beside it: where and with what it was measured."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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


def write_json(
    path: Path, device: torch.device, arguments: dict[str, Any], rows: list[Any]
) -> None:
    """One file per run: environment, arguments, rows."""
    data = {"environment": environment(device), "arguments": arguments, "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1, default=str) + "\n")

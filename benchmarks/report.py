"""What every figure needs beside it: where and with what it was measured."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch

import hot_compile


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

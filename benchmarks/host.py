"""What a step of many small layers takes the host, by stock Inductor and by hot.

    python benchmarks/host.py --device cpu --depth 4
    python benchmarks/host.py --device cuda --depth 12

Configurations are interleaved, the least of all rounds counts. On a CPU it is the thread's own
time, which other work does not make longer; on a GPU from a step's begin until all was sent off.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from step import compile_for, synchronize
from torch import Tensor, nn

_PARTS = "", ":accept=off", ":memory=off", ":gathered=False"
CONFIGS = ",".join(["exact", *(f"hot:min_gain=0{part}" for part in _PARTS)])
_ROWS, _WIDTH = 64, 64
_WARM = 70
"""Steps before the first that is timed: the last look for long is behind them."""


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] to the same."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


Calls = dict[str, Callable[[], Any]]


def _least(calls: Calls, device: torch.device, rounds: int) -> dict[str, float]:
    """Seconds of each."""
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    found = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            synchronize(device)
            start = clock()
            call()
            found[name] = min(found[name], clock() - start)
    return found


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda",
    depth: Annotated[int, typer.Option(help="blocks of two layers")] = 12,
    configs: Annotated[str, typer.Option(help="as for step.py; the first is stock")] = CONFIGS,
    rounds: Annotated[int, typer.Option()] = 100,
) -> dict[str, float]:
    """Print host times in ms, and of stock's."""
    torch.manual_seed(0)
    where = torch.device(device)
    model = nn.Sequential(*(Block() for _ in range(depth))).to(where)
    x, steps = torch.randn(_ROWS, _WIDTH, device=where), Calls()
    for config in configs.split(","):
        own = copy.deepcopy(model)
        compiled = compile_for(config, own)

        def step(own: nn.Module = own, compiled: Callable[..., Tensor] = compiled) -> None:
            own.zero_grad()
            compiled(x).square().mean().backward()

        for _ in range(_WARM):
            step()
        steps[config] = step
    found = _least(steps, where, rounds)
    stock = found[configs.split(",")[0]]
    for name in steps:
        print(f"{name}: {found[name] * 1e3:.3f} ms, {found[name] / stock:.3f} of stock's")
    return found


if __name__ == "__main__":
    typer.run(main)

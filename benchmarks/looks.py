"""What looks at steps take of a GPU's memory: whether they stay below what steps have taken.

python benchmarks/looks.py --rows vit-b-128,bert,gpt2,whisper,llama6x2048
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Annotated, Any

import torch
import typer
from against_stock import CASES, workload
from step import compiler_settings

import hot_compile
from hot_compile.observing import walk
from hot_compile.observing.eager import Eager

MIB = 2**20


def main(
    rows: Annotated[str, typer.Option(help="of against_stock.py, by commas")] = "vit-b-128",
    steps: Annotated[int, typer.Option()] = 3,
    device: Annotated[str, typer.Option()] = "cuda",
) -> None:
    """One process a row, all at once; a line for each look, and the certificate's."""
    names = rows.split(",")
    if len(names) == 1:
        measure(names[0], steps, torch.device(device))
        return
    same = [sys.executable, __file__, "--steps", str(steps), "--device", device, "--rows"]
    for process in [subprocess.Popen([*same, name]) for name in names]:
        process.wait()


def measure(name: str, steps: int, device: torch.device) -> None:
    """Steps in bf16, each looked at as by default."""
    torch.manual_seed(0)
    work, tries = workload(CASES[name]), list[bool]()
    model, inputs = work.model.to(device), [x.to(device) for x in work.inputs]
    step = torch.compile(model, backend="hot")
    own_look, own_try = Eager.gradients, walk.Walk._tries

    def look(self: Eager, *given: Any) -> Any:
        before = torch.cuda.max_memory_allocated()
        allowed, start = walk.Room([model_device(model)]).left, time.perf_counter()
        try:
            return own_look(self, *given)
        finally:
            torch.cuda.synchronize()
            rose = torch.cuda.max_memory_allocated() - before
            nodes = self._graph.sizes.nodes
            print(
                f"{name}: {allowed / MIB:.0f} MiB allowed of {before / MIB:.0f}, in one piece "
                f"{self._graph.sizes.need(0, len(nodes)) / MIB:.0f}, rose {rose / MIB:.0f}, "
                f"{sum(tries)} of {len(tries)} parts fitted, {time.perf_counter() - start:.2f} s",
                flush=True,
            )
            tries.clear()

    def tried(self: walk.Walk, first: int, last: int, *given: Any) -> bool:
        tries.append(own_try(self, first, last, *given))
        return tries[-1]

    Eager.gradients, walk.Walk._tries = look, tried  # type: ignore[method-assign]
    with compiler_settings("bf16"):
        for _ in range(steps):
            with torch.autocast(device.type, torch.bfloat16):
                loss = work.loss(step, *inputs)
            loss.backward()
            model.zero_grad()
    print(f"{name}: {hot_compile.certificate(step)}", flush=True)


def model_device(model: torch.nn.Module) -> torch.Tensor:
    """A tensor on the model's device."""
    return next(model.parameters())


if __name__ == "__main__":
    typer.run(main)

"""How long a first step takes to compile, by stock and by hot, and where that time goes.

A process a row, its caches empty: Dynamo traces, the graph is cut and lowered, kernels are
compiled; one forward and backward runs. On a machine that others use, too, only time on CPUs
compares; ``TORCHINDUCTOR_COMPILE_THREADS=1`` counts all of it. ``hot`` has no looks at its
gradients (``accept``), ``hot-default`` has them. ``stock+regional`` and ``hot+regional`` compile
each block of a transformer in place.

    python benchmarks/cold_compile.py --device cuda --json-file cold.json
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from against_stock import Case, workload
from models import Size, Workload
from report import document, environment, publish
from tables import cold_compilation
from torch import nn

CASES = {
    "smollm2": Case("smollm2", Size(2, tokens=256)),
    "vit-b": Case("vit_base_patch16_224", Size(8)),
    "gpt2": Case("gpt2", Size(2, tokens=512)),
    "llama": Case("llama12x2048", Size(2, width=512, tokens=512)),
    "resnet50": Case("resnet50", Size(8)),
    "swin-t": Case("swin_tiny_patch4_window7_224", Size(8)),
    "gpt2-tiny": Case("gpt2", Size(1, depth=1, tokens=256)),
}
BACKENDS: dict[str, dict[str, Any]] = {
    "stock": {},
    "hot": {"backend": "hot", "options": {"accept": "off"}},
    "hot-default": {"backend": "hot"},
}
CONFIGS = ",".join(BACKENDS)
MODELS = ",".join(name for name in CASES if "tiny" not in name)
PARTS = {
    "tracing": "bytecode_tracing",
    "joint graph": "aot_trace_joint_graph",
    "joint passes": "_recursive_joint_graph_passes",
    "cut": "Partitioner",
    "min-cut": "min_cut_rematerialization_partition",
    "lowering": "GraphLowering.run",
    "scheduling": "Scheduler.__init__",
    "writing code": "Scheduler.codegen",
    "compiling code": "PyCodeCache.load_by_key_path",
}
"""Parts of a compilation, by torch's names of its phases; ``cut`` has ``min-cut`` in it."""


def _smollm2(size: Size) -> Workload:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(config.vocab_size, (size.batch, size.tokens or 1))
    return Workload(model, (ids,), lambda forward, ids: forward(ids, labels=ids).loss)


def _cpu_seconds() -> float:
    kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, kinds))


def _blocks(model: nn.Module) -> nn.ModuleList:
    """The longest list of modules, which are compiled one by one."""
    return max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)


def child(name: str, config: str, device: str) -> None:
    """Prints one row as JSON; its caches are what the environment names."""
    backend, _, regional = config.partition("+")
    case, options = CASES[name], BACKENDS[backend]
    if options:
        import hot_compile  # noqa: F401  # builds and loads its operators before the clock starts
    small = nn.Sequential(nn.Linear(64, 64), nn.GELU()).to(device)
    torch.compile(small, **options)(torch.randn(256, 64, device=device)).sum().backward()
    work = _smollm2(case.size) if name == "smollm2" else workload(case)
    model = work.model.to(device)
    if regional:
        for block in _blocks(model):
            block.compile(**options)
    step = model if regional else torch.compile(model, **options)
    inputs = [x.to(device) for x in work.inputs]
    phases = torch._dynamo.utils.compilation_time_metrics
    phases.clear()
    start, cpu_start = time.perf_counter(), _cpu_seconds()
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        loss = work.loss(step, *inputs)
    loss.backward()
    wall, cpu = time.perf_counter() - start, _cpu_seconds() - cpu_start
    parts = {part: sum(phases.get(phase, [])) for part, phase in PARTS.items()}
    row = {"model": name, "config": config, "wall_s": wall, "cpu_s": cpu, "parts_s": parts}
    print(json.dumps(row))


def _measured(name: str, config: str, device: str) -> dict[str, Any]:
    """A row, by a process with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        known = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        program = f"import cold_compile; cold_compile.child({name!r}, {config!r}, {device!r})"
        said = subprocess.run(
            [sys.executable, "-c", program], cwd=Path(__file__).parent, env={**os.environ, **known},
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
    row: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
    print(f"{name} {config}: {row['wall_s']:.1f} s, {row['cpu_s']:.1f} s of CPUs", flush=True)
    return row


def _rows(models: str, configs: str, device: str) -> Iterator[dict[str, Any]]:
    for name in models.split(","):
        for config in configs.split(","):
            yield _measured(name, config, device)


def main(
    models: Annotated[str, typer.Option(help=f"of {','.join(CASES)}")] = MODELS,
    configs: Annotated[str, typer.Option(help=f"of {CONFIGS}, each +regional")] = CONFIGS,
    device: str = "cpu",
    json_file: Path | None = None,
) -> None:
    """Compile each model by each configuration, and say how long that took."""
    rows = list(_rows(models, configs, device))
    where = torch.device(device)
    facts = environment(where)
    said = document(where, {"models": models, "configs": configs}, rows)
    title = f"First step, {facts['device']}, torch {facts['torch']}"
    publish(cold_compilation, said, title, json_file)


if __name__ == "__main__":
    typer.run(main)

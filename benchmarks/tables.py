"""The tables of the measured pages, and of the terminal: from what a benchmark writes as JSON.

Each function takes files' contents, one or several, and gives the head and the rows of one table.
Figures that several benchmarks derive from their raw ones (medians, ratios to the first row) are
derived here only.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from fidelity_cells import papers, scores

Document = dict[str, Any]
Raw = dict[str, Any]
Lines = list[tuple[str, ...]]
MIB = 2**20
STOCK, TORCH, CHECKPOINTED = "exact", "torch:", "checkpointed"
"""Configurations of ``budget.py``: stock as it is, with torch's own budget, with checkpoints."""
NAMES = {
    "llama8b-lora": "Llama-8B's dimensions, 4 layers, LoRA, 8192 tokens",
    "sd3": "SD3 medium's transformer, 6 layers, 4 × 128² latents",
    "flux": "Flux's transformer, 2 + 4 layers, 2 × 64² latents",
    "unet": "Stable Diffusion 1.5's UNet, a layer a block, 16 × 64² latents",
    "video": "Wan 2.1's transformer, 4 layers, 2 × 5 frames of 64² latents",
    "sd3-lora": "SD3, LoRA",
    "flux-lora": "Flux, LoRA",
    "unet-lora": "UNet, LoRA",
    "video-lora": "Wan 2.1, LoRA",
    "gpt2": "GPT-2 124M, 8 × 1024, logits returned",
    "gpt2-loss": "the same, loss only",
    "vit-b-256": "ViT-B/16, batch 256, AdamW",
    "vit-b-128": "ViT-B/16, batch 128",
    "llama6x2048": "Llama 6 × 2048, 4 × 2048 tokens",
    "llama12x2048": "Llama 12 × 2048, 8 × 2048 tokens, AdamW",
    "qwen3": "Qwen3-like, 4 × 1024, vocabulary 152k, 4 × 2048",
    "resnet50-256": "ResNet-50, batch 256, AdamW",
    "mixer-b-128": "MLP-Mixer B/16, batch 128",
    "convnext-t-128": "ConvNeXt-T, batch 128",
    "swin-t-128": "Swin-T, batch 128",
    "bert": "BERT, masked words, 32 × 512",
    "efficientnet-b0-128": "EfficientNet-B0, batch 128",
    "whisper": "Whisper tiny, batch 16",
    "convnext-b-48": "ConvNeXt-B, batch 48",
    "swin-b-48": "Swin-B, batch 48",
    "llama-fsdp2": "Llama 6 × 2048, FSDP2 by block, 4 × 2048 tokens",
    "llama-fsdp2-checkpointed": "the same, checkpointed",
    "llama8b-fsdp2": "Llama-8B's dimensions, 4 layers, 2 × 2048, FSDP2",
    "llama8b-fsdp2-checkpointed": "the same, checkpointed",
    "llama-titan": "Llama 6 × 2048, `model.compile` a block, as torchtitan",
    "llama-titan-checkpointed": "torchtitan's way, checkpointed",
    "llama-tp": "Llama 6 × 2048, tensor parallelism of two",
    "llama-fsdp2-tp": "the same mesh's other way: FSDP2 of two, one part",
    "vit-b-ddp": "ViT-B/16, DDP, 96 a GPU",
}


def times(ratio: float) -> str:
    """``1.234`` as ``1.23×``."""
    return f"{ratio:.2f}×"


def duration(ms: float) -> str:
    """Below a millisecond in microseconds."""
    return f"{ms:.1f} ms" if ms >= 1 else f"{ms * 1e3:.0f} µs"


def numbers(lines: Lines) -> list[bool]:
    """Of each column whether it holds numbers: whether its first filled cell begins as one."""
    columns = zip(*lines, strict=True)
    return [bool(re.match(r"\W*\d", next(filter(None, cells), ""))) for _, *cells in columns]


def by_case(documents: Iterable[Document]) -> dict[str, list[Raw]]:
    """Rows by case; of cases that several files have, the last one's."""
    known: dict[str, list[Raw]] = {}
    for document in documents:
        found: dict[str, list[Raw]] = {}
        for row in document["rows"]:
            found.setdefault(row["case"], []).append(row)
        known |= found
    return known


def steps(documents: list[Document]) -> Lines:
    """Whole steps, also several processes': each figure, time and peak against the case's first.

    A case's first configuration that comes again, with other weights and data, is no row: it says
    how far losses differ anyway. Columns of which nothing was measured are left out.
    """
    made: list[Raw] = []
    for case, everything in by_case(documents).items():
        rows = [row for row in everything if not row.get("error")]
        stock = rows[0] if rows else {}
        again = [row for row in rows[1:] if row["config"] == stock["config"]]
        made += [_step(row, stock, again, case) for row in rows if row not in again]
    head = tuple(name for name in (made or [{}])[0] if any(row[name] for row in made))
    return [head, *(tuple(row[name] for name in head) for row in made)]


def _step(row: Raw, stock: Raw, again: list[Raw], case: str) -> dict[str, str]:
    """By column."""
    first, host = row is stock, row.get("host_ms", float("inf"))
    return {
        "model": NAMES.get(case, case) if first else "",
        "": row["config"] if first else f"**{row['config']}**",
        "ms": f"{row['best_ms']:.1f}",
        "speed": "" if first else times(stock["best_ms"] / row["best_ms"]),
        "host ms": f"{host:.1f}" if host < float("inf") else "",
        "launches": str(row.get("launches") or ""),
        "peak MiB": f"{row['peak_bytes'] / MIB:.0f}",
        "of stock's": "" if first else f"{row['peak_bytes'] / stock['peak_bytes']:.2f}",
        "kept MiB": f"{row['kept_bytes'] / MIB:.0f}" if "kept_bytes" in row else "",
        "losses off, %": "" if first else " beside ".join(_off(r, stock) for r in (row, *again)),
        "compile s": f"{row['compile_s']:.0f}" if row.get("compile_s") and not again else "",
    }


def _off(row: Raw, stock: Raw) -> str:
    """The most that a loss of the first steps is off by, of the first one."""
    pairs = zip(row.get("losses", ()), stock.get("losses", ()), strict=True)
    most = max((abs(mine - its) for mine, its in pairs), default=0.0)
    return f"{100 * most / stock['losses'][0]:.2f}" if most else ""


def at_peak(rows: list[Raw], peak: int) -> float | None:
    """What stock takes at this peak with torch's own budget; None below the least it reaches."""
    theirs = [r for r in rows if not r["error"] and r["config"].startswith((TORCH, STOCK))]
    above = min((r for r in theirs if r["peak_bytes"] >= peak), default=None, key=_peak)
    below = max((r for r in theirs if r["peak_bytes"] <= peak), default=None, key=_peak)
    if below is None:
        return None
    if above is None or _peak(above) == _peak(below):
        return below["best_ms"]
    part = (peak - _peak(below)) / (_peak(above) - _peak(below))
    return below["best_ms"] + (above["best_ms"] - below["best_ms"]) * part


def _peak(row: Raw) -> int:
    return row["peak_bytes"]


def budgets(documents: list[Document]) -> Lines:
    """``budget.py``: rows with a budget, beside torch's own at the same peak."""
    made: Lines = [("model", "MiB asked", "peak", "of asked", "ms", "torch's ms at that peak")]
    for case, rows in by_case(documents).items():
        mine = [row for row in rows if not row["error"] and row["best_ms"] < float("inf")]
        if not any(row["asked_bytes"] for row in mine):
            continue
        least = min(row["peak_bytes"] for row in mine if row["config"].startswith(TORCH))
        for row in mine:
            peak, asked = row["peak_bytes"], row["asked_bytes"]
            ms, named = f"{row['best_ms']:.1f}", f"{NAMES.get(case, case)}: stock"
            titles = {STOCK: named, CHECKPOINTED: "every block checkpointed"}
            if row["config"] in titles:
                made.append((titles[row["config"]], "", f"{peak / MIB:.0f}", "", ms, ""))
            if asked:
                theirs = at_peak(mine, peak)
                said = f"its least is {least / MIB:.0f}" if theirs is None else f"{theirs:.1f}"
                sizes = (f"{asked / MIB:.0f}", f"{peak / MIB:.0f}", f"{peak / asked:.2f}")
                made.append(("", *sizes, ms, said))
    return made


def layers(documents: list[Document]) -> Lines:
    """``layers.py``: exact's time and every method's gain a layer, then their means, by run."""
    made: Lines = []
    for run in (run for d in documents for run in (d["layers"] if "title" not in d else [d])):
        methods = [name for name in _medians(run["layers"][0]) if name != "exact"]
        made = made or [("", "exact", *methods)]
        made.append((f"**{run['title']}**", *[""] * (len(methods) + 1)))
        gains = []
        for row in run["layers"]:
            layer, ms = row["layer"], _medians(row)
            gains.append([ms["exact"] / ms[name] for name in methods])
            shape = f"{layer['name']} {row['rows']} × {layer['outputs']} × {layer['inputs']}"
            made.append((shape, duration(ms["exact"]), *map(times, gains[-1])))
        means = map(statistics.geometric_mean, zip(*gains, strict=True))
        made.append(("geomean", "", *(f"**{times(mean)}**" for mean in means)))
    return made


def _medians(timed: Raw) -> dict[str, float]:
    """Milliseconds by method; older files have no rounds."""
    rounds = timed.get("rounds", {}).items()
    return {name: statistics.median(each) for name, each in rounds} or timed["ms"]


def cold_compilation(documents: list[Document]) -> Lines:
    """``cold_compile.py``: seconds of a first step, beside stock's; then its parts."""
    parts = documents[0]["rows"][0]["parts_s"]
    made: Lines = [("", "", "s", "× stock's", "s of CPUs", "× stock's", *parts)]
    for document in documents:
        stock: Raw = {}
        for row in document["rows"]:
            stock = row if row["config"] == "stock" else stock
            figures = []
            for key in ("wall_s", "cpu_s"):
                figures += [f"{row[key]:.0f}", times(row[key] / stock[key]) if stock else ""]
            phases = (f"{seconds:.1f}" for seconds in row["parts_s"].values())
            made.append((row["model"], row["config"], *figures, *phases))
    return made


TABLES: dict[str, Callable[[list[Document]], Lines]] = {
    table.__name__: table for table in (steps, budgets, layers, cold_compilation, papers, scores)
}

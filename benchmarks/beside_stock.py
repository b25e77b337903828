"""The README's chart: peak memory and speed beside stock Inductor, from docs/benchmarks' JSON.

``python benchmarks/beside_stock.py`` writes docs/measured/beside_stock.svg.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tables import NAMES, by_case

DOCS = Path(__file__).parent.parent / "docs"
PICTURE = DOCS / "measured" / "beside_stock.svg"
SHOWN = {
    "h200": ("vit-b-256", "gpt2", "llama6x2048", "qwen3", "bert", "resnet50-256"),
    "h100": ("gpt2-loss", "mixer-b-128", "convnext-t-128", "swin-t-128"),
}
SHORT = {"gpt2-loss": "GPT-2 124M, loss only", "qwen3": "Qwen3-like, 4 × 2048 tokens"}
LEFT, WIDE, HIGH, TOP = 330, 300, 26, 58
"""Pixels: where bars begin, stock's length, a row's height, where rows begin."""
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1d2430; } .soft { fill: #5d6776; }
.stock { fill: #dcdfe4; } .hot { fill: #2a7f62; } .paper { fill: #ffffff; }
@media (prefers-color-scheme: dark) { text { fill: #e6e9ee; } .soft { fill: #9aa5b4; }
.stock { fill: #333b46; } .hot { fill: #55b894; } .paper { fill: #0d1117; } }
"""


def rows() -> list[tuple[str, str, float, float]]:
    """Model, device, peak and speed, both of stock's."""
    found = []
    for device, cases in SHOWN.items():
        path = DOCS / "benchmarks" / f"cuda_against_stock_{device}.json"
        measured = by_case([json.loads(path.read_text())])
        for case in cases:
            stock, ours = (_of(measured[case], config) for config in ("exact", "hot"))
            peak = ours["peak_bytes"] / stock["peak_bytes"]
            speed = stock["best_ms"] / ours["best_ms"]
            found.append((SHORT.get(case) or NAMES[case], device.upper(), peak, speed))
    return found


def _of(measured: list[dict[str, Any]], config: str) -> dict[str, Any]:
    return next(row for row in measured if row["config"] == config)


def picture() -> str:
    """The chart as SVG: light or dark as the reader's browser is."""
    shown = rows()
    height = TOP + HIGH * len(shown) + 12
    speeds = LEFT + WIDE + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 {height}" role="img">',
        "<title>Peak memory and speed of a training step beside stock Inductor</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="820" height="{height}" rx="8"/>',
        f'<text x="{LEFT}" y="24" font-weight="600">peak memory of a step</text>',
        f'<text class="soft" x="{LEFT}" y="42">grey: stock Inductor</text>',
        f'<text x="{speeds}" y="24" font-weight="600">speed</text>',
        f'<text class="soft" x="{speeds}" y="42">stock = 1.00</text>',
    ]
    for number, (name, device, peak, speed) in enumerate(shown):
        y = TOP + HIGH * number
        middle = y + HIGH / 2 + 1
        lines += [
            f'<text x="{LEFT - 12}" y="{middle}" text-anchor="end">{name}'
            f'<tspan class="soft"> {device}</tspan></text>',
            f'<rect class="stock" x="{LEFT}" y="{y}" width="{WIDE}" height="{HIGH - 7}" rx="3"/>',
            f'<rect class="hot" x="{LEFT}" y="{y}" width="{peak * WIDE:.0f}" height="{HIGH - 7}" '
            'rx="3"/>',
            f'<text x="{LEFT + peak * WIDE + 8:.0f}" y="{middle}">{peak:.0%}</text>',
            f'<text x="{speeds}" y="{middle}">{speed:.2f}×</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture())
    print(PICTURE)

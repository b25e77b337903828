"""The table of a page of the zoo, from its results."""

from __future__ import annotations

import re
import statistics
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from pages import markdown
from zoo_measure import Result

PLACE = re.compile(r"(<!-- zoo -->\n).*?(<!-- end -->)", flags=re.DOTALL)
WIDTH = 120
OF_BF16 = 1.25
"""Times that hot's error may be that of bf16 where bf16 itself turns gradients."""


def filled(page: str, results: Sequence[Result]) -> str:
    """``page`` with what is between its marks made anew; what it says of causes stays."""
    rows = sorted((r for r in results if r.seconds and not r.error), key=lambda r: r.name)
    failed = [r for r in results if r.error and r.parameters and not r.stock_error]
    untried = [r for r in results if r.error and r not in failed]
    parts = [textwrap.fill(" ".join(_summary(rows, failed)), WIDTH), _table(rows)]
    for title, some in (
        ("Hot fails where stock does not", failed),
        ("Not trained by eager PyTorch or stock here, or not finished", untried),
    ):
        lines = [(r.name, _said(r.error)) for r in sorted(some, key=lambda r: r.name)]
        parts += [f"## {title}", markdown([("model", "why"), *lines])] if lines else []
    text = "\n\n".join(part.rstrip() for part in parts)
    return PLACE.sub(lambda match: f"{match[1]}{text}\n{match[2]}", page)


def _summary(rows: Sequence[Result], failed: Sequence[Result]) -> list[str]:
    """What was measured, when and by what tree, and what is to be looked at."""
    trees = Counter(r.tree or "unknown" for r in rows).most_common()
    made = rows[0].environment if rows else {}
    devices = Counter(r.environment.get("device") for r in rows).most_common()
    dates = sorted({r.date for r in rows})
    fell = [r for r in rows if "goes on" in r.notes]
    whole = [r for r in fell if "as stock Inductor" in r.notes]
    alone = [r for r in rows if r.stock_error]
    low = [r for r in rows if r.firm and (r.firm_percentile < 0.95 or r.firm_median < 0.99)]
    beyond = [r for r in low if r.hot_off > OF_BF16 * max(r.stock_off, r.floor)]
    both = [r for r in rows if r.hot_kernels_ms and r.stock_kernels_ms]
    said = [
        f"{' to '.join(dates[:1] + dates[1:][-1:])}, torch {made.get('torch')}, "
        f"{' and '.join(map(_counted, devices))}; commits, and their models: "
        f"{', '.join(map(_counted, trees))}.",
        f"{len(rows)} ran, {len(failed)} failed ({_names(failed)}).",
        f"Compiled again without a part of hot or of Inductor: {len(fell)} ({_names(fell)}), "
        f"{len(whole)} of them as stock. Stock fails at {len(alone)} that ran ({_names(alone)}).",
        "Below a fifth percentile of 0.95 or a median of 0.99 of firm gradients' cosines: "
        f"{len(low)} ({_names(low)}); further off than {OF_BF16} times what exact code loses "
        f"there: {_names(beyond)}.",
    ]
    if both:
        peaks, times = ([f(r) for r in both] for f in (_peak_share, _time_share))
        said.append(
            f"Of stock's peak hot takes {_spread(peaks)}, of its kernels' time {_spread(times)} "
            "(least, median, most)."
        )
    return said


COLUMNS: Mapping[str, Callable[[Result], str]] = {
    "model": lambda r: r.name,
    "parameters, M": lambda r: f"{r.parameters / 1e6:.0f}",
    "rewritten": lambda r: f"{r.rewritten} of {r.products}",
    "held": lambda r: f"{r.held / max(1, r.uncompressed):.0%} of {r.uncompressed / 1e6:.1f} MB",
    "exact": lambda r: _left_exact(r),
    "off by": lambda r: f"{r.floor:.1%}, {r.stock_off:.1%}, {r.hot_off:.1%}",
    "cosines": lambda r: f"{r.worst:.3f}, {r.percentile:.3f}, {r.median:.4f}",
    "the worst's norm": lambda r: f"{r.worst_norm:.0e} ({r.worst_name})" * bool(r.worst_name),
    "firm": lambda r: _firm(r),
    "peak, MiB": lambda r: f"{r.hot_peak / 2**20:.0f}" if r.hot_peak else "",
    "of stock's peak": lambda r: f"{_peak_share(r):.2f}" if r.stock_peak else "",
    "kernels, ms": lambda r: f"{r.hot_kernels_ms:.2f}" if r.hot_kernels_ms else "",
    "of stock's time": lambda r: f"{_time_share(r):.2f}" if r.stock_kernels_ms else "",
    "launches": lambda r: f"{r.hot_launches} of {r.stock_launches}" if r.hot_launches else "",
    "compile s, stock, hot": lambda r: f"{r.stock_seconds:.0f}, {r.seconds:.0f}" * r.lowered,
    "warned of": lambda r: _said(r.notes or r.stock_error),
}


def _table(rows: Sequence[Result]) -> str:
    """Without columns in which nothing is told."""
    cells = {name: [cell(r) for r in rows] for name, cell in COLUMNS.items()}
    told = {name: column for name, column in cells.items() if any(column)}
    return markdown([tuple(told), *zip(*told.values(), strict=True)])


def _left_exact(r: Result) -> str:
    """The share that stays exact though it is large, and the commonest reason."""
    share = r.exact / max(1, r.uncompressed)
    return f"{share:.0%} ({r.reason})" if share > 0.02 else ""


def _firm(r: Result) -> str:
    """Cosines of firm gradients, and of how many."""
    if r.firm == r.compared:
        return "all are"
    cosines = f"{r.firm_worst:.3f}, {r.firm_percentile:.3f}, {r.firm_median:.4f}"
    return f"{cosines} ({r.firm} of {r.compared})"


def _counted(pair: tuple[str, int]) -> str:
    return f"{pair[0]} ({pair[1]})"


def _peak_share(r: Result) -> float:
    return r.hot_peak / max(1, r.stock_peak)


def _time_share(r: Result) -> float:
    return r.hot_kernels_ms / r.stock_kernels_ms


def _names(results: Sequence[Result]) -> str:
    return ", ".join(r.name for r in results) or "none"


def _said(text: str) -> str:
    return text.replace("|", "/").replace("<", "").replace(">", "")


def _spread(shares: Sequence[float]) -> str:
    return ", ".join(f"{f(shares):.2f}" for f in (min, statistics.median, max))

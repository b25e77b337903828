"""The pages of the zoo, from its results."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence

import torch
from report import environment
from zoo_compare import Result
from zoo_device import DeviceResult

OF_BF16 = 1.25
"""Times that hot's error may be that of bf16 where bf16 itself turns gradients."""
_INTRODUCTION = """# The zoo

Written by `python benchmarks/zoo.py page`: {count} of the {known} models that it knows, one of each
family. {today}, torch {torch}, CPU, fp32, graphs run uncompiled. Commit, and how many models were
measured with it: {trees}. How: the program's own description.

*held*: bytes kept for the backward, of what they are uncompressed; *exact*: the share that stays as
it is though it is large, and the commonest reason. *cosines* of parameters' gradients with exact
ones: the worst, the fifth percentile, the median. Below a fifth percentile of 0.95 or a median of
0.99: {beyond}; of firm gradients alone, in the {measured} models where that was measured: {still}.
Beside the worst stands its norm, relative to the model's largest gradient.
"""
_CAUSES = """## Gradients that are nearly nothing

Measured of the four models whose worst cosine is bad (2026-11-23, CPU, fp32, graphs run uncompiled;
`benchmarks/zoo.py` says what *firm* is). *noisy* is the cosine of eager PyTorch's own gradient
where its backward works with noise of 1 % instead of hot; *norm* that of the exact gradient
relative to the model's largest. The last two are hot's, with the layers' products exact
(`exclude="*"`) and with storage exact.

| model | gradient | norm | hot | noisy | products exact | `memory="off"` |
|---|---|---|---|---|---|---|
| timm:resnet | layer1.0.bn2.bias | 9e-4 | 0.890 | 0.891 | 1.000 | 0.908 |
| timm:resnet | bn1.bias | 1e-3 | 0.926 | 0.913 | 1.000 | 0.940 |
| timm:fasternet | patch_embed.norm.bias | 2e-5 | 0.152 | 0.100 | 0.984 | 0.342 |
| timm:dpn | features.conv1_1.bn.weight | 1e-4 | 0.075 | 0.194 | 0.130 | 0.997 |
| timm:hgnet | stages.1.blocks.0.aggregation.1.lab.scale | 2e-5 | -1.000 | -1.000 | -1.000 | 1.000 |

Exact fp32 gets them right (cosine with fp64 1.000); an error of 1 % in layers' gradients and large
activations spoils them, hot's like any other. (By the architecture each is a gain or shift in front
of something that takes it out again, so that its gradient's terms cancel.) What spoils them in hot
is the products in resnet and fasternet, storage in dpn and hgnet. Three draws of noise leave
resnet's two 0.74 to 0.89 and 0.78 to 0.91. Of firm gradients the worst, the fifth percentile and
the median are 0.998, 0.9985, 0.9997 in resnet (28 of 30; two are its percentile because it has so
few), 0.999, 0.999, 0.9995 in fasternet (77 of 80), 0.976, 0.997, 0.9984 in dpn (216 of 217) and
0.992, 0.998, 0.9993 in hgnet (151 of 155). The 1 % is what 8 bits err by, the 0.95 the bar for
percentiles; that large activations get noise, too, was added when noise in layers' gradients alone
did not explain dpn and hgnet.
"""


def _firm(r: Result) -> str:
    """Cosines of firm gradients, and of how many; '' if an earlier run did not say."""
    if r.firm is None or r.firm_percentile is None:
        return ""
    if r.firm == r.compared:
        return "all are"
    cosines = f"{r.firm_worst:.3f}, {r.firm_percentile:.3f}, {r.firm_median:.4f}"
    return f"{cosines} ({r.firm} of {r.compared})"


def cpu_page(results: Sequence[Result], known: int) -> str:
    """Of models that ran uncompiled."""
    rows = [r for r in results if not r.error]
    failed = [r for r in results if r.error]
    made = environment(torch.device("cpu"))
    counts = Counter(r.tree or "unknown" for r in rows).most_common()
    trees = ", ".join(f"{tree} ({count})" for tree, count in counts)
    beyond = [r.name for r in rows if r.percentile < 0.95 or r.median < 0.99]
    measured = [r for r in rows if r.firm_percentile is not None]
    still = [r.name for r in measured if r.firm_percentile < 0.95 or r.firm_median < 0.99]
    today = time.strftime("%Y-%m-%d")
    header = (
        "model", "rewritten", "uncompressed, MB", "held", "exact", "cosines", "of firm gradients",
        "loss off by",
    )  # fmt: skip
    lines = [
        _INTRODUCTION.format(
            count=len(rows),
            known=known,
            today=today,
            torch=made["torch"],
            trees=trees,
            beyond=", ".join(beyond) or "none",
            measured=len(measured),
            still=", ".join(still) or "none",
        ),
        "| " + " | ".join(header) + " |",
        "|---" * len(header) + "|",
    ]
    for r in sorted(rows, key=lambda r: r.name):
        whole = max(1, r.uncompressed)
        exact = f"{r.exact / whole:.0%} ({r.reason})" if r.exact > 0.02 * whole else ""
        norm = "" if r.worst_norm is None else f", norm {r.worst_norm:.0e}"
        cosines = f"{r.worst:.3f} ({r.worst_name}{norm}), {r.percentile:.3f}, {r.median:.4f}"
        cells = (
            r.name, f"{r.rewritten} of {r.products}", f"{whole / 1e6:.1f}",
            f"{r.held / whole:.0%}", exact, cosines, _firm(r), f"{r.loss_off:.0e}",
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    if failed:
        lines += ["", "## Not run", "", "| model | why |", "|---|---|"]
        lines += [f"| {r.name} | {r.error} |" for r in sorted(failed, key=lambda r: r.name)]
    lines += ["", _CAUSES.strip()]
    return "\n".join(lines) + "\n"


def device_page(results: Sequence[DeviceResult]) -> str:
    """Of models of true widths, compiled and timed beside stock."""
    rows = [r for r in results if r.seconds > 0 and not r.error]
    alone = [r for r in rows if r.stock_error]
    failed = [r for r in results if r.error and r.stock_seconds]
    untried = [r for r in results if r.error and not r.stock_seconds]
    noted = [r for r in rows if r.notes]
    fell = [r for r in rows if "goes on" in r.notes]
    whole = [r for r in fell if "as stock Inductor" in r.notes]
    low = [r for r in rows if (r.firm_percentile or 1) < 0.95 or (r.firm_median or 1) < 0.99]
    beyond = [r for r in low if r.hot_off > OF_BF16 * max(r.stock_off, r.floor)]
    made = rows[0].environment if rows else {}
    dates = sorted({r.date for r in rows})
    both = [r for r in rows if r.hot_kernels_ms and r.stock_kernels_ms]
    peaks, times = ([f(r) for r in both] for f in (_peak_share, _time_share))
    said = [
        "# The zoo on a GPU",
        "",
        f"Written by `python benchmarks/zoo.py page`: models of true widths and cut depths, bf16, "
        f"by default options, compiled. {', '.join(dates[:1] + dates[1:][-1:])}, torch "
        f"{made.get('torch')}, {made.get('device')}. How: `benchmarks/zoo_device.py`.",
        "",
        f"Of {len(rows) + len(failed)} models that eager PyTorch and stock train, or hot does, "
        f"{len(rows)} ran, {len(failed)} failed ({_names(failed)}). {len(fell)} were compiled "
        f"again without a part of hot or of Inductor ({_names(fell)}), {len(whole)} of them as "
        f"stock. {len(noted)} ran with a warning. Stock fails at {len(alone)} that ran "
        f"({_names(alone)}). Below a fifth percentile of 0.95 or a median of 0.99 of firm "
        f"gradients' cosines are {len(low)}; of these, further off than {OF_BF16} times what bf16 "
        f"loses there by itself: {_names(beyond)}.",
        f"Of stock's peak hot takes {_spread(peaks)}, of its kernels' time {_spread(times)} "
        "(least, median, most). Some fifteen models shared the machine, so how long steps took is "
        "not told: its host was busy compiling others. Kernels' times and launches do not depend "
        "on that.",
        "",
        "*off by*: relative error of all gradients against eager's in fp32: eager's own in bf16, "
        "stock's, hot's. *firm*: worst, fifth percentile, median of cosines of gradients that "
        "noise of 1 % does not spoil.",
        "",
    ]
    head = (
        "model", "parameters, M", "rewritten", "off by", "firm", "peak, MiB", "of stock's",
        "kernels, ms", "of stock's", "launches", "of stock's", "compile s, stock, hot", "warned of",
    )  # fmt: skip
    lines = [_row(r) for r in sorted(rows, key=lambda r: r.name)]
    said += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *lines]
    for title, some in (
        ("Hot fails where stock does not", failed),
        ("Not trained by eager PyTorch or stock here, or not finished", untried),
    ):
        if some:
            said += ["", f"## {title}", "", "| model | why |", "|---|---|"]
            said += [f"| {r.name} | {_said(r.error)} |" for r in sorted(some, key=lambda r: r.name)]
    return "\n".join(said) + "\n"


def _row(r: DeviceResult) -> str:
    off = ", ".join(f"{100 * share:.1f} %" for share in (r.floor, r.stock_off, r.hot_off))
    shares = [""] * 3
    if r.stock_kernels_ms:
        of_launches = r.hot_launches / max(1, r.stock_launches)
        shares = [f"{share:.2f}" for share in (_peak_share(r), _time_share(r), of_launches)]
    cells = (
        r.name, f"{r.parameters / 1e6:.0f}", f"{r.rewritten} of {r.products}", off, _firm(r),
        f"{r.hot_peak / 2**20:.0f}", shares[0], f"{r.hot_kernels_ms:.2f}", shares[1],
        str(r.hot_launches), shares[2], f"{r.stock_seconds:.0f}, {r.seconds:.0f}",
        _said(r.notes or r.stock_error),
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _peak_share(r: DeviceResult) -> float:
    return r.hot_peak / max(1, r.stock_peak)


def _time_share(r: DeviceResult) -> float:
    return r.hot_kernels_ms / r.stock_kernels_ms


def _names(results: Sequence[Result]) -> str:
    return ", ".join(r.name for r in results) or "none"


def _said(text: str) -> str:
    return text.replace("|", "/").replace("<", "").replace(">", "")


def _spread(shares: Sequence[float]) -> str:
    if not shares:
        return "nothing that was measured"
    return ", ".join(f"{f(shares):.2f}" for f in (min, statistics.median, max))

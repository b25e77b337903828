"""Models of every family, a few steps of training each: gradients beside exact ones, and bytes.

    python benchmarks/zoo.py run                      # one of every module of timm, and
                                                  # transformers', diffusers'
    python benchmarks/zoo.py run --only 'swin*,bert'  # some of them
    python benchmarks/zoo.py page                     # docs/measured/zoo.md from the results

Each model trains some steps of SGD by eager PyTorch, so that its gradients are not those of an
initialisation; then one step by "hot", default options but for ``min_gain=0`` (small models would
not pay), is compared with eager's from the same weights. Dropout is off: masks would differ.
Without ``--lower`` graphs pass through every stage and run uncompiled, which takes seconds a model;
with it Inductor compiles them. Results are added to a file line by line: what is there already is
not run again, a process that dies costs one model.

Some gradients are nearly nothing: of a bias in front of a norm, say, whose terms cancel. Any error
that is small beside the terms is large beside such a gradient. So eager's own backward runs once
more with noise of 1 %, which is what 8 bits err by: of the norm of the gradient that every layer
with a matrix of weights gets, and of every value of the large activations that it reads. What this
leaves a cosine below 0.95 of is not *firm*. It knows nothing of hot. Cosines of firm gradients
stand beside those of all, never instead of them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from report import environment
from rich.console import Console
from torch import Tensor, nn
from zoo_models import Built
from zoo_models import every_model as plain_models
from zoo_more import more_models

from hot_compile.backend import hot
from hot_compile.config import HotConfig
from hot_compile.record import Reports, run_uncompiled

RESULTS = Path(__file__).parent.parent / "out" / "zoo.jsonl"
PAGE = Path(__file__).parent.parent / "docs" / "measured" / "zoo.md"
STEPS, RATE = 3, 1e-3
OPTIONS = {"min_gain": 0}
NOISE, FIRM = 0.01, 0.95
"""Relative error put on every layer's gradient and on large activations, and the cosine that a firm
gradient keeps."""
LARGE = HotConfig().memory_min_bytes
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
app = typer.Typer(help=__doc__, add_completion=False)
console = Console()


def every_model() -> dict[str, Callable[[], Built]]:
    """By name: how each is built."""
    return {**plain_models(), **more_models()}


@dataclasses.dataclass
class Result:
    """What was found of one model."""

    name: str
    error: str = ""
    loss: float = 0.0
    loss_off: float = 0.0
    """Of hot's loss from exact's, relative."""
    products: int = 0
    rewritten: int = 0
    uncompressed: int = 0
    held: int = 0
    exact: int = 0
    """Bytes held that are larger than the least worth storing, and stay as they are."""
    reason: str = ""
    """The commonest one for that."""
    worst: float = 1.0
    worst_name: str = ""
    percentile: float = 1.0
    """The fifth, of the parameters' gradient cosines with exact."""
    median: float = 1.0
    worst_norm: float | None = None
    """Of the exact gradient of ``worst_name``, relative to the largest of the model's; None, as in
    what follows: an earlier run, which did not measure it."""
    worst_noisy: float | None = None
    """Cosine of the same gradient with itself by a noisy backward."""
    compared: int | None = None
    """Gradients that the cosines are of."""
    firm: int | None = None
    """Of these, as many as keep a cosine of ``FIRM`` by a noisy backward."""
    firm_worst: float | None = None
    firm_worst_name: str = ""
    firm_percentile: float | None = None
    firm_median: float | None = None
    not_finite: int = 0
    seconds: float = 0.0
    """Of the first step by hot: tracing, passes, and with ``lower`` compiling."""
    lowered: bool = False
    tree: str = ""
    """The commit that was measured."""


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Every parameter's, which are then cleared."""
    loss.backward()
    found = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def noisy_gradients(built: Built) -> dict[str, Tensor]:
    """Every parameter's, by a backward whose every input comes with an error of ``NOISE``."""
    weights = {p.untyped_storage().data_ptr() for p in built.model.parameters()}

    def disturb(gradient: Tensor) -> Tensor:
        noise = torch.randn_like(gradient)
        return gradient + NOISE * gradient.norm() / noise.norm().clamp_min(1e-30) * noise

    def listen(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(disturb)

    def restored(saved: Tensor) -> Tensor:
        own = saved.untyped_storage().data_ptr() in weights
        if own or not saved.is_floating_point() or saved.nbytes < LARGE:
            return saved
        return saved * (1 + NOISE * torch.randn_like(saved))  # keeps zeros and signs, so masks, too

    handles = [m.register_forward_hook(listen) for m in built.model.modules() if _multiplies(m)]
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, restored):
            loss = built.loss(built.model)
        return gradients(loss, built.model)
    finally:
        for handle in handles:
            handle.remove()


def _multiplies(module: nn.Module) -> bool:
    """It has a matrix of weights of its own, and is no table."""
    weight = getattr(module, "weight", None)
    matrix = isinstance(weight, Tensor) and weight.dim() >= 2
    return matrix and not isinstance(module, (nn.Embedding, nn.EmbeddingBag))


def warmed(built: Built) -> None:
    """Some steps away from the initialisation; batch norms' statistics are then kept."""
    optimizer = torch.optim.SGD(built.model.parameters(), lr=RATE, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        built.loss(built.model).backward()
        nn.utils.clip_grad_norm_(built.model.parameters(), 1.0)
        optimizer.step()
    optimizer.zero_grad()


def compared(name: str, built: Built, lower: bool) -> Result:
    """One step by hot beside one by eager PyTorch."""
    model = built.model
    warmed(built)
    torch.manual_seed(1)
    loss = built.loss(model)
    exact = gradients(loss, model)
    torch.manual_seed(1)
    noisy = noisy_gradients(built)
    reports = Reports()
    keywords: dict[str, Any] = {} if lower else {"inner_compile": run_uncompiled}
    backend = functools.partial(hot, options=OPTIONS, recorder=reports, **keywords)
    torch._dynamo.reset()
    torch.manual_seed(1)
    begin = time.perf_counter()
    own = built.loss(torch.compile(model, backend=backend))
    got = gradients(own, model)
    result = Result(name, loss=float(loss), seconds=time.perf_counter() - begin, lowered=lower)
    result.loss_off = abs(float(own) - float(loss)) / max(abs(float(loss)), 1e-12)
    _note_gradients(result, got, exact, noisy)
    _note_graphs(result, reports)
    return result


def _note_gradients(
    result: Result, got: dict[str, Tensor], exact: dict[str, Tensor], noisy: dict[str, Tensor]
) -> None:
    largest = max((float(g.norm()) for g in exact.values()), default=0.0)
    cosines = []
    for name, want in exact.items():
        mine = got.get(name)
        if mine is None or (want.isfinite().all() and not mine.isfinite().all()):
            result.not_finite += 1
        elif want.norm() > 1e-5 * largest:  # less is rounding: a bias in front of a norm, say
            cosines.append((_cosine(mine, want), name))
    if not cosines:
        return
    cosines.sort()
    result.worst, result.worst_name = cosines[0]
    result.percentile, result.median = _summary(cosines)
    kept = {name: _cosine(noisy[name], exact[name]) for _, name in cosines}
    result.worst_norm = float(exact[result.worst_name].norm()) / largest
    result.worst_noisy = kept[result.worst_name]
    firm = [(cosine, name) for cosine, name in cosines if kept[name] >= FIRM]
    result.compared, result.firm = len(cosines), len(firm)
    if firm:
        result.firm_worst, result.firm_worst_name = firm[0]
        result.firm_percentile, result.firm_median = _summary(firm)


def _summary(ascending: list[tuple[float, str]]) -> tuple[float, float]:
    """(the fifth percentile, the median)."""
    return ascending[len(ascending) // 20][0], ascending[len(ascending) // 2][0]


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(a.flatten() @ b.flatten() / (a.norm() * b.norm() + 1e-30))


def _note_graphs(result: Result, reports: Reports) -> None:
    crossing = [c for graph in reports.graphs for c in graph.crossing]
    result.products = sum(len(graph.plan.decisions) for graph in reports.graphs)
    result.rewritten = sum(len(graph.plan.rewritten) for graph in reports.graphs)
    result.uncompressed = sum(c.bytes_before for c in crossing)
    result.held = sum(c.bytes for c in crossing)
    stays = [c for c in crossing if c.scheme == "exact" and not c.packed and c.reason != "small"]
    result.exact = sum(c.bytes for c in stays)
    reasons = sorted({c.reason for c in stays})
    sizes = {r: sum(c.bytes for c in stays if c.reason == r) for r in reasons}
    result.reason = max(sizes, key=lambda r: sizes[r], default="")


def known(path: Path) -> dict[str, Result]:
    """Results of an earlier run, by name."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
    return {row["name"]: Result(**row) for row in rows if "name" in row}


@app.command()
def run(
    only: Annotated[str, typer.Option(help="names or globs, with commas")] = "*",
    lower: Annotated[bool, typer.Option(help="compile by Inductor")] = False,
    out: Annotated[Path, typer.Option(help="results, one a line")] = RESULTS,
    seconds: Annotated[int, typer.Option(help="the most that one model may take")] = 300,
) -> None:
    """Run what has no result yet, each model in a process of its own."""
    out.parent.mkdir(parents=True, exist_ok=True)
    done, tree = known(out), _commit()
    wanted = [n for n in every_model() if any(fnmatchcase(n, g) for g in only.split(","))]
    if not wanted:
        raise typer.BadParameter(f"got --only {only!r}; it matches none of {every_model()}")
    for name in wanted:
        if name in done:
            continue
        command = [sys.executable, __file__, "one", name, "--lower" if lower else "--no-lower"]
        try:
            told = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
            row = told.stdout.splitlines()[-1] if told.returncode == 0 else None
            error = (told.stderr.strip().splitlines() or ["no message"])[-1]
        except subprocess.TimeoutExpired:
            row, error = None, f"took more than {seconds} s"
        result = Result(**json.loads(row)) if row else Result(name, error=error[:200])
        result.tree = tree
        with out.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(result)) + "\n")
        console.print(_line(result), markup=False, highlight=False)


def _commit() -> str:
    """Of the tree that this file lies in, with a plus if something in it is changed."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    told = subprocess.run(git, capture_output=True, text=True)
    return told.stdout.strip()


@app.command(hidden=True)
def one(name: str, lower: bool = False) -> None:
    """One model, in this process; the last line printed is its result."""
    torch.manual_seed(0)
    try:
        result = compared(name, every_model()[name](), lower)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        result = Result(name, error=f"{text[:160]} ({Path(last.filename).name}:{last.lineno})")
    print(json.dumps(dataclasses.asdict(result)))


def _line(r: Result) -> str:
    if r.error:
        return f"{r.name:34s} {r.error}"
    share = r.held / max(1, r.uncompressed)
    return (
        f"{r.name:34s} {r.rewritten:3d}/{r.products:3d}  held {share:4.0%} of "
        f"{r.uncompressed / 1e6:7.1f} MB  cosines {r.worst:.3f} {r.percentile:.3f} {r.median:.4f}"
        f"  {r.seconds:4.0f} s"
    )


def _firm(r: Result) -> str:
    """Cosines of firm gradients, and of how many; '' if an earlier run did not say."""
    if r.firm is None or r.firm_percentile is None:
        return ""
    if r.firm == r.compared:
        return "all are"
    cosines = f"{r.firm_worst:.3f}, {r.firm_percentile:.3f}, {r.firm_median:.4f}"
    return f"{cosines} ({r.firm} of {r.compared})"


@app.command()
def page(
    results: Annotated[Path, typer.Option(help="what run wrote")] = RESULTS,
    out: Annotated[Path, typer.Option(help="the page")] = PAGE,
) -> None:
    """Write the page of docs from the results."""
    rows = [r for r in known(results).values() if not r.error]
    failed = [r for r in known(results).values() if r.error]
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
            known=len(every_model()),
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
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(lines) + "\n")
    console.print(f"{out}: {len(rows)} models, {len(failed)} not run", markup=False)


if __name__ == "__main__":
    app()

"""``hot-compile``: run scripts, plan, build the runtime, say what is missing, read profiles."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.text import Text

from hot_compile import __version__
from hot_compile.errors import BuildError, OptionError, PassDisabledError, ScriptError
from hot_compile.runtime.native import build as building

from . import doctor, profile

TRAINING, LOOKING, MACHINE = "Train", "Look inside", "This machine"
"""Groups of commands."""
app = typer.Typer(no_args_is_help=True)
console = Console()

Script = Annotated[str, typer.Argument(help="a Python file, or with -m a module")]
Arguments = Annotated[list[str] | None, typer.Argument(help="the script's own")]
Recipe = Annotated[str | None, typer.Option(help="base recipe, e.g. fast")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="an option; may be given several times"),
]
Module = Annotated[bool, typer.Option("-m", help="run a module, as python -m does")]
_MODEL = (
    "timm:NAME, or MODULE:FUNCTION (also of a file in this folder), a function of the batch that"
    " returns (model, inputs)"
)
_DEVICES = (
    "h200, h100, a100, a10, rtx3090, l4, l40s, rtx4090, cpu, or a file that hot-compile tune made"
)
_AS_THE_SCRIPT = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""What comes behind the script is the script's."""


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"hot-compile {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="and exit")
    ] = False,
) -> None:
    """Run scripts with backend "hot", look at what it does, say what this machine has."""


def _devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@app.command(
    context_settings=_AS_THE_SCRIPT,
    rich_help_panel=TRAINING,
    epilog="Example: hot-compile run --recipe fast train.py --epochs 3",
)
def run(
    script: Script,
    arguments: Arguments = None,
    recipe: Recipe = None,
    settings: Settings = None,
    module: Module = False,
    report: Annotated[
        Path | None, typer.Option(help="file for a page (HTML) of all that was done")
    ] = None,
) -> None:
    """Run a script, with backend "hot" where it asks torch.compile for its default or for "hot"."""
    from hot_compile import launch  # with Inductor, which other commands need not wait for

    try:
        options = launch.parse_settings(settings or (), recipe)
        code = launch.run(script, arguments or (), options, module, report)
    except (OptionError, PassDisabledError, ScriptError) as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(code)


@app.command(
    context_settings=_AS_THE_SCRIPT,
    rich_help_panel=LOOKING,
    epilog="Example: hot-compile report --output page.html train.py --epochs 1",
)
def report(
    script: Script,
    arguments: Arguments = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="the page")] = Path("report.html"),
    recipe: Recipe = None,
    settings: Settings = None,
    module: Module = False,
) -> None:
    """Run a script as ``run`` does, to its end, and write one page (HTML) of all that was done."""
    run(script, arguments, recipe, settings, module, output)


@app.command(
    context_settings=_AS_THE_SCRIPT,
    rich_help_panel=LOOKING,
    epilog="Example: hot-compile certify --steps 32 train.py --batch 64",
)
def certify(
    script: Script,
    arguments: Arguments = None,
    steps: Annotated[int, typer.Option(min=1, help="of the optimizer, looked at and timed")] = 16,
    budget: Annotated[float, typer.Option(help="relative error a gradient may have")] = 0.25,
    file: Annotated[Path | None, typer.Option("--json", help="file for all figures")] = None,
    recipe: Recipe = None,
    settings: Settings = None,
    module: Module = False,
) -> None:
    """Run some steps of a script by "hot" and by stock Inductor, and say whether hot is worth it.

    Gradients are compared with exact ones; step time and peak are measured, nothing is predicted.
    """
    from hot_compile import certify as certifying  # with Inductor, as above
    from hot_compile import launch

    try:
        options = launch.parse_settings(settings or (), recipe)
        given = script, arguments or (), options, module, steps, budget
        code, found = certifying.certify(*given)
    except (OptionError, PassDisabledError, ScriptError) as error:
        raise typer.BadParameter(str(error)) from None
    console.print(certifying.table(found), *certifying.parts_tables(found))
    print(f"{found}\n\n{certifying.verdict(found)}")
    if found.left_out:
        print(f"From the next run on {found.left_out}. hot-compile profile forget forgets it.")
    if file is not None:
        found.save_json(file)
    raise typer.Exit(code)


@app.command(
    rich_help_panel=LOOKING,
    epilog="Example: hot-compile plan --model timm:vit_base_patch16_224 --batch 256 --device h200",
)
def plan(
    model: Annotated[str, typer.Option(help=_MODEL)],
    batch: Annotated[int, typer.Option(min=1, help="samples in a step")],
    device: Annotated[str, typer.Option(help=_DEVICES)],
    dtype: Annotated[str, typer.Option(help="fp32, tf32, or by autocast bf16, fp16")] = "fp32",
    recipe: Annotated[str, typer.Option(help="as for torch.compile's option")] = "hot",
    optimizer: Annotated[str, typer.Option(help="adamw, momentum or sgd")] = "adamw",
    memory: Annotated[
        str | None, typer.Option(help="e.g. 24GiB: which batch is the largest that fits?")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="e.g. 16GiB: keep the step's peak below, as peak_budget")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="write the page of it, too")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """Predict what would be done to a model, and what a step would hold. Nothing runs."""
    sys.path.insert(0, str(Path.cwd()))  # as Python does for a script or `python -m`
    from .plans import show  # Inductor: seconds that no other command should wait for

    show(model, batch, device, dtype, recipe, optimizer, memory, budget, html, as_json)


app.add_typer(profile.app, name="profile", rich_help_panel=LOOKING)


@app.command(rich_help_panel=MACHINE, epilog="Example: hot-compile tune --show")
def tune(
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:1; by default every device found")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="only show what was measured")] = False,
    reset: Annotated[bool, typer.Option("--reset", help="forget what was measured")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="with --show: print JSON instead of a table")
    ] = False,
) -> None:
    """Measure in seconds what this machine's devices sustain, for the planner; show and keep it.

    Nothing else measures: without this command graphs are planned by a built-in table. Run it while
    nothing else runs. Graphs are planned anew by what was found.
    """
    from . import rates  # with the cost model, which other commands need not wait for

    if show and reset:
        raise typer.BadParameter("got both --show and --reset; expected one of them, or neither.")
    if as_json and not show:
        raise typer.BadParameter("got --json without --show; expected both: measure, then show.")
    found = rates.devices(device)
    if as_json:
        rates.show_json(found)
        return
    action = rates.show if show else rates.reset if reset else rates.measure
    for one in found:
        action(one)


@app.command(rich_help_panel=MACHINE, epilog="Example: hot-compile build --device cuda")
def build(
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; by default every device found")
    ] = None,
) -> None:
    """Build the operators now rather than at the first torch.compile."""
    for device_type in [device] if device else _devices():
        try:
            paths = building.load_all(device_type)
        except BuildError as error:
            console.print(Text(f"{device_type}: {error}", style="red"))
            raise typer.Exit(1) from None
        for path in paths:
            console.print(Text(f"{device_type}: {path}"))


app.command(rich_help_panel=MACHINE, epilog="Example: hot-compile doctor")(doctor.doctor)

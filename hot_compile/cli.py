"""``hot-compile``: run scripts, plan, build the runtime, say what is missing, read profiles."""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.text import Text

from . import __version__, plan_cli, profile_cli, tune_cli
from .doctor import inductors_cache, tried, unwritable
from .errors import BuildError, OptionError, PassDisabledError, ScriptError
from .progress import progress
from .runtime.native import build as building
from .runtime.native.providers import Provider, status
from .tables import PlainTable

TRAINING, LOOKING, MACHINE = "Train", "Look inside", "This machine"
"""Groups of commands."""
app = typer.Typer(no_args_is_help=True)
console = Console()
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]

Script = Annotated[str, typer.Argument(help="a Python file, or with -m a module")]
Arguments = Annotated[list[str] | None, typer.Argument(help="the script's own")]
Recipe = Annotated[str | None, typer.Option(help="base recipe, e.g. fast")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="an option; may be given several times"),
]
Module = Annotated[bool, typer.Option("-m", help="run a module, as python -m does")]
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
    from . import launch  # with Inductor, which other commands need not wait for

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
    from . import certify as certifying  # with Inductor, as above
    from . import launch

    try:
        options = launch.parse_settings(settings or (), recipe)
        given = script, arguments or (), options, module, steps, budget
        code, found = certifying.certify(*given)
    except (OptionError, PassDisabledError, ScriptError) as error:
        raise typer.BadParameter(str(error)) from None
    console.print(certifying.table(found))
    print(f"{found}\n\n{certifying.verdict(found)}")
    if file is not None:
        found.save_json(file)
    raise typer.Exit(code)


app.command(rich_help_panel=LOOKING, epilog=plan_cli.EXAMPLE)(plan_cli.plan)
app.add_typer(profile_cli.app, name="profile", rich_help_panel=LOOKING)
app.command(rich_help_panel=MACHINE, epilog="Example: hot-compile tune --show")(tune_cli.tune)


@app.command(rich_help_panel=MACHINE, epilog="Example: hot-compile build --device cuda")
def build(
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; by default every device found")
    ] = None,
) -> None:
    """Build the operators now rather than at the first torch.compile."""
    for device_type in [device] if device else _devices():
        try:
            path = building.load(device_type)
        except BuildError as error:
            console.print(Text(f"{device_type}: {error}", style="red"))
            raise typer.Exit(1) from None
        console.print(Text(f"{device_type}: {path}"))


@app.command(rich_help_panel=MACHINE, epilog="Example: hot-compile wheel --device cpu")
def wheel(
    output: Annotated[Path, typer.Option(help="folder for it")] = Path("dist"),
    device: Annotated[
        list[str] | None, typer.Option(help="cpu, cuda; may be given twice; by default cpu")
    ] = None,
    libraries_of: Annotated[
        list[Path] | None, typer.Option(help="another wheel, to take over e.g. CUDA 12's library")
    ] = None,
) -> None:
    """Make a wheel of this source tree with the operators inside. See docs/wheels.md."""
    from .runtime.native.wheel import make_wheel  # wanted here only

    try:
        path = make_wheel(Path.cwd(), output, device or ["cpu"], libraries_of or ())
    except BuildError as error:
        console.print(Text(str(error), style="red"))
        raise typer.Exit(1) from None
    console.print(Text(f"{path}: {path.stat().st_size / 2**20:.1f} MiB"))


@app.command(rich_help_panel=MACHINE, epilog="Example: hot-compile doctor")
def doctor(as_json: AsJson = False) -> None:
    """Say what is found, run a small training step on it. Exit code 1 if no device is ready."""
    rows = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "compiler": _compiler(),
        "operators' cache": _folder(building.cache_dir(), "XDG_CACHE_HOME"),
        "Inductor's cache": _folder(inductors_cache(), "TORCHINDUCTOR_CACHE_DIR"),
    }
    kinds, ready = ("cpu", "cuda"), []
    with progress(len(kinds)) as begin:
        for kind in kinds:
            begin(f"running a training step on {kind}")
            rows[kind], works = _device(status(kind))
            ready += [kind] * works
    end = f"Ready: {', '.join(ready)}." if ready else "Nothing is ready: every layer stays exact."
    if not torch.cuda.is_available():
        end += " There is no GPU that torch finds."
    if as_json:
        print(json.dumps({"version": __version__, **rows, "ready": ready}, indent=1))
    else:
        table = PlainTable(f"hot-compile {__version__}", "what", "found")
        for row in rows.items():
            table.add(*row)
        console.print(table, Text(end, style="green" if ready else "red"))
    if not ready:
        raise typer.Exit(1)


def _folder(folder: Path, variable: str) -> str:
    problem = unwritable(folder)
    told = f"cannot be written ({problem}); set {variable} to a folder that can"
    return f"{folder}: {told}" if problem else str(folder)


def _device(provider: Provider) -> tuple[str, bool]:
    """What is said of a device, and whether a training step ran there."""
    facts = "; ".join(part for part in (provider.reason, provider.origin) if part)
    if not provider.available:
        if provider.device_type == "cuda" and not torch.cuda.is_available():
            return f"not needed, torch finds no GPU; to build for one: {facts}", False
        return f"missing: {facts}", False
    if provider.device_type == "cuda" and not torch.cuda.is_available():
        return f"not ready, torch finds no GPU; {facts}", False
    start = time.perf_counter()
    if problem := tried(provider.device_type):
        return f"not ready, a training step failed: {problem}; {facts}", False
    seconds = time.perf_counter() - start
    return f"ready, a training step ran in {seconds:.0f} s, compiling included; {facts}", True


def _compiler() -> str:
    try:
        return " ".join(building.find_compiler())
    except BuildError as error:
        return str(error)


if __name__ == "__main__":
    app()

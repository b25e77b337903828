"""``hot-compile``: run scripts, plan, build the runtime, say what is missing, read profiles."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import __version__, plan_cli, profile_cli, tune_cli
from .errors import BuildError, OptionError, PassDisabledError, ScriptError
from .runtime.native import build as building
from .runtime.native.providers import Provider, status

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
app.add_typer(profile_cli.app, name="profile")
app.command()(plan_cli.plan)
app.command()(tune_cli.tune)
console = Console()

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


def _devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@app.command(context_settings=_AS_THE_SCRIPT)
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
    """Run a script whose torch.compile gets backend "hot" where it asks for its default."""
    from . import launch  # with Inductor, which other commands need not wait for

    try:
        options = launch.parse_settings(settings or (), recipe)
        code = launch.run(script, arguments or (), options, module, report)
    except (OptionError, PassDisabledError, ScriptError) as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(code)


@app.command(context_settings=_AS_THE_SCRIPT)
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


@app.command()
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


@app.command()
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


@app.command()
def doctor() -> None:
    """Say what is found and missing. Exit code 1 if no device can run HOT."""
    table = Table(title=f"hot-compile {__version__}", title_justify="left")
    table.add_column("what")
    table.add_column("found")
    table.add_row("torch", torch.__version__)
    table.add_row("python", platform.python_version())
    table.add_row("compiler", _compiler())
    table.add_row("build cache", Text(str(building.cache_dir())))
    providers = [status(device_type) for device_type in ("cpu", "cuda")]
    for provider in providers:
        said = "; ".join(part for part in (provider.reason, provider.origin) if part)
        table.add_row(provider.device_type, Text.assemble(_verdict(provider), f" {said}"))
    console.print(table)
    if not any(provider.available for provider in providers):
        raise typer.Exit(1)


def _verdict(provider: Provider) -> tuple[str, str]:
    """A word and its colour. What only a GPU needs is not missing where there is none."""
    if provider.available:
        return "ready", "green"
    if provider.device_type == "cuda" and not torch.cuda.is_available():
        return "not needed, torch finds no GPU; to build for one:", "dim"
    return "missing", "red"


def _compiler() -> Text:
    try:
        return Text(" ".join(building.find_compiler()))
    except BuildError as error:
        return Text(str(error), style="red")


if __name__ == "__main__":
    app()

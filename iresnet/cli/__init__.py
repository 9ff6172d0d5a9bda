"""The command `iresnet`. One file per subcommand; mistakes get one sentence and exit code 2, failed checks 1."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..version import __version__
from .certify import certify
from .data import data
from .demo import demo
from .evaluate import evaluate
from .export import export
from .interpolate import interpolate
from .invert import invert
from .presets import presets
from .report import report
from .sample import sample
from .score import score
from .train import train

app = typer.Typer(
    name="iresnet",
    help="Invertible residual networks with a guarantee.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (train, evaluate, sample, invert, interpolate, certify, score, report, export, presets, demo):
    app.command()(command)
app.add_typer(data, name="data")


def _version(value: bool) -> None:
    if value:
        typer.echo(f"iresnet {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Invertible residual networks with a guarantee."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command. A mistake prints its sentence alone; `--debug` anywhere shows the traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [w for w in words if w != "--debug"]
    try:
        app(args=words, prog_name="iresnet")
    except (ValueError, OSError) as error:
        if debug:
            raise
        typer.echo(f"iresnet: {error}", err=True)
        raise SystemExit(2) from None
    except RuntimeError as error:
        if debug:
            raise
        typer.echo(f"iresnet: {error}", err=True)
        raise SystemExit(1) from None

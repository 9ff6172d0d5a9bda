"""The command `iresnet`, one file per subcommand. A wrong argument exits with code 2, a failed check with code 1."""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
from itertools import pairwise
from pathlib import Path
from shlex import join
from typing import Annotated, Any

import torch
import typer
from typer.core import TyperGroup

from .. import early
from ..config import ABBREVIATIONS, setting_names
from ..data import names
from ..presets import Experiment, is_preset
from ..spelling import printable
from ..version import __version__
from .audit import audit
from .bench import bench
from .certify import certify
from .data import data
from .demo import demo
from .evaluate import evaluate
from .export import export
from .interpolate import interpolate
from .invert import invert
from .options import with_common_options
from .presets import presets
from .ranks import one_voice, reports
from .report import report
from .reproduce import reproduce
from .sample import sample
from .score import score
from .stdout import plain_warnings, steady
from .train import train

#: The names of all settings of an experiment, without their sections.
SETTINGS = frozenset(setting_names(Experiment))

#: The message if memory runs out.
OUT_OF_MEMORY = (
    "not enough memory. Lower training.batch (train), --rows (evaluate, report) or -n (sample, invert), "
    "or choose another --device."
)

#: The message for a bug in this program.
BUG = "internal error ({}: {}). Please report it, with the output of --debug."


class Commands(TyperGroup):
    """The subcommands; frequent mistakes are answered with what to type."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        command, *words = args
        if command not in self.commands and (is_preset(command) or command in names()):
            raise ValueError(f"a command comes first; got {command!r}. Use: iresnet train {command}")
        if command in self.commands:
            options = {option for parameter in self.commands[command].params for option in parameter.opts}
            _refuse_setting(words, options)
            _refuse_file(command, words, options)
        return super().resolve_command(ctx, args)


def _refuse_setting(words: Sequence[str], options: Container[str]) -> None:
    """Refuse an unknown option with the name of a setting."""
    for word, following in pairwise([*words, "VALUE"]):
        name, _, value = word.removeprefix("--").replace("-", "_").partition("=")
        if "--set" in options and word.startswith("--") and word.partition("=")[0] not in options:
            for setting in (name, ABBREVIATIONS.get(name, "")):
                if setting in SETTINGS:
                    raise ValueError(f"{word} is a setting. Use: --set {setting}={value or following}")


def _refuse_file(command: str, words: Sequence[str], options: Container[str]) -> None:
    """Refuse a file after the run, of a command that takes it as an option."""
    positional = len(words) > 1 and not any(word.startswith("-") for word in (words[0], *words[-2:]))
    if positional and "--data" in options and command != "train" and Path(words[-1]).is_file():
        raise ValueError(f"the file is an option. Use: {join(['iresnet', command, *words[:-1], '--data', words[-1]])}")


app = typer.Typer(
    name="iresnet",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    train,
    evaluate,
    sample,
    invert,
    interpolate,
    certify,
    audit,
    score,
    report,
    export,
    presets,
    reproduce,
    bench,
    demo,
):
    app.command()(with_common_options(command))
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
    """Invertible residual networks with computed bounds.

    `iresnet train` writes a run folder, which the other commands read. Start with: iresnet demo

    `--debug`, anywhere, shows the traceback of an error.
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command. An error prints one sentence; with `--debug`, its traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [w for w in words if w != "--debug"]
    early.restore()
    with one_voice(), steady(), plain_warnings():
        try:
            app(args=words, prog_name="iresnet")
        except Exception as error:
            if debug:
                raise
            if reports(error):
                typer.echo(f"iresnet: {_sentence(error)}", err=True)
            raise SystemExit(2 if isinstance(error, ValueError | OSError) else 1) from None


def _sentence(error: Exception) -> str:
    if _is_memory(error):
        return OUT_OF_MEMORY
    expected = isinstance(error, ValueError | OSError | RuntimeError)
    return printable(str(error)) if expected else BUG.format(type(error).__name__, error)


def _is_memory(error: Exception) -> bool:
    """Whether memory ran out, on any device; torch has no exception class for that on the CPU."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)

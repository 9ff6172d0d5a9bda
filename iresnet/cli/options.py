"""The options of commands: those that several take, and those that every one gets (--json, --quiet and --threads)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from .completion import complete_data, complete_run
from .console import Mode, use_mode

RunFolder = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="A run folder, e.g. runs/demo, or a model that comes with the library.",
        autocompletion=complete_run,
    ),
]
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="Use other data than the run's: a file, a folder, or a dataset.",
        autocompletion=complete_data,
    ),
]
DataFolder = Annotated[
    Path | None, typer.Option("--data-dir", help="The dataset directory.", show_default="as in training")
]
Split = Annotated[str, typer.Option(help="The split of the run's data: test, validation or train.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, or auto: a GPU if there is one.")]

Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object; all else goes to stderr.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print results and errors only: no progress, no notes.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads.", show_default="one for small inputs", min=1)]


def with_common_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the common options; what it prints and computes follows them."""
    added: dict[str, tuple[Any, Any]] = {"threads": (Threads, None), "json": (Json, False), "quiet": (Quiet, False)}

    @wraps(command)
    def run(**options: Any) -> None:
        with use_mode(Mode(**{name: options.pop(name) for name in added})):
            command(**options)

    keyword, hints = inspect.Parameter.KEYWORD_ONLY, get_type_hints(command, include_extras=True)
    own = [p.replace(kind=keyword, annotation=hints[p.name]) for p in inspect.signature(command).parameters.values()]
    more = [inspect.Parameter(n, keyword, default=value, annotation=kind) for n, (kind, value) in added.items()]
    run.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *more)}
    return run


def check_tolerance(tolerance: float | None) -> None:
    """Refuse a tolerance that is not positive and finite."""
    if tolerance is not None and not 0 < tolerance < math.inf:
        raise ValueError(f"--tolerance must be positive and finite; got {tolerance}.")

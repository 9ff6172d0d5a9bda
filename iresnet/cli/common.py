"""The options that every command has, added to it in one place: --json, --quiet and --threads."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from .console import Mode, use_mode

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

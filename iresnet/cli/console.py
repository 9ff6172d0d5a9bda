"""Shared by the commands: what is printed where, the spinner, threads, Ctrl-C."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..results import nonfinite_to_none
from ..run.progress import following
from ..spelling import printable
from ..train import train
from ..train.threads import SMALL

#: A second signal within so many seconds counts as the same: `timeout` signals a command and then its process group.
SAME_SIGNAL = 1.0


class Screen(Console):
    """A console that prints control characters as text: class or column names of a file cannot control the terminal."""

    def say(self, *lines: object) -> None:
        """Print sentences as they are, without colours or line breaks."""
        for line in lines:
            self.print(str(line), highlight=False, soft_wrap=True)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text, lines=True), **options)


@dataclass(frozen=True)
class Mode:
    """The common options of the command that runs."""

    json: bool = False
    quiet: bool = False
    threads: int | None = None


PLAIN = Mode()
_MODE: ContextVar[Mode] = ContextVar("mode", default=PLAIN)


@contextmanager
def use_mode(mode: Mode) -> Iterator[None]:
    """Let what is printed and computed follow these options."""
    token = _MODE.set(mode)
    try:
        yield
    finally:
        _MODE.reset(token)


def console() -> Screen:
    """Return the console for progress and notes; no markup, since a folder may be called [a] or :b:.

    With --json it is the standard error; with --quiet it prints nothing.
    """
    return Screen(markup=False, emoji=False, stderr=_MODE.get().json, quiet=_MODE.get().quiet)


def results_console() -> Screen:
    """Return the console for results as sentences and tables; with --json they are notes."""
    return console() if _MODE.get().json else Screen(markup=False, emoji=False)


def show(*lines: str | Table) -> None:
    """Print a part of the result."""
    screen = results_console()
    for line in lines:
        if isinstance(line, str):
            screen.say(line)
        else:
            screen.print(line)


def result(content: Mapping[str, Any], *lines: str | Table) -> None:
    """Print the result of a command: the lines or, with --json, the content as one JSON object."""
    if not _MODE.get().json:
        show(*lines)
        return
    typer.echo(json.dumps(nonfinite_to_none(content), allow_nan=False, default=str))


def wants_json() -> bool:
    """Whether the result is printed as JSON."""
    return _MODE.get().json


def on_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout.isatty()


def table(*columns: str, title: str | None = None) -> Table:
    """Return an empty table: the first column holds names, the others numbers."""
    made = Table(box=box.SIMPLE_HEAD, title=title)
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i == 0 else "right")
    return made


def use_threads(dimension: int) -> None:
    """Set the number of threads: --threads, else one for small inputs and torch's default for large ones."""
    requested = _MODE.get().threads
    if requested is not None or dimension <= SMALL:
        torch.set_num_threads(requested or 1)


def waiting(to: Console, what: str) -> AbstractContextManager[object]:
    """Show a text on a terminal, with a bar and the time left where a loop reports how far it is; nothing in a file."""
    return following(to, what) if to.is_terminal else nullcontext()


@contextmanager
def ctrl_c(then: Callable[[], str] = lambda: "") -> Iterator[Callable[[], bool]]:
    """Make Ctrl-C or SIGTERM stop a training after the current step; a second one, or one outside training, at once.

    Yields a function that says whether a stop was requested; `then` returns the message after stopping at once. Two
    signals within a second count as one. After the first the handlers stay installed: the command is about to end, and
    the second signal may be on its way.
    """
    signals: list[float] = []

    def handler(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if signals and now - signals[-1] < SAME_SIGNAL:
            return
        at_once = bool(signals) or not _in_training(frame)
        signals.append(now)
        if at_once:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(signals)
    except KeyboardInterrupt:
        console().say(f"Stopped. {then()}".strip())
        raise typer.Exit(130) from None
    finally:
        if not signals:
            for number, earlier in before.items():
                signal.signal(number, earlier or signal.SIG_DFL)


def _in_training(frame: FrameType | None) -> bool:
    """Whether the interrupted code was called by the training loop, which checks for a stop after every step."""
    while frame is not None and frame.f_code is not train.__code__:
        frame = frame.f_back
    return frame is not None

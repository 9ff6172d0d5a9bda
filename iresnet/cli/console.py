"""Shared by the commands: the console, the progress bar, the spinner, the device, Ctrl-C."""

from __future__ import annotations

import re
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor

from ..spelling import printable
from ..train import Report, train

#: The bar shows metrics averaged over this many recent steps, and is redrawn at this interval, in seconds.
RECENT, REDRAW = 50, 0.2

#: Metrics that are logged but not shown in the bar, which has no room: bits/dim and error say the same.
LOGGED_ONLY = ("loss", "cross-entropy")

#: Up to this dimension one thread is fastest: more would wait for each other.
SMALL = 256

#: A second signal within so many seconds counts as the same: `timeout` signals a command and then its process group.
SAME_SIGNAL = 1.0

Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, or auto: a GPU if there is one.")]


class Screen(Console):
    """A console that prints control characters as text: class or column names of a file cannot control the terminal."""

    def say(self, *lines: object) -> None:
        """Print sentences as they are, without colours or line breaks."""
        for line in lines:
            self.print(str(line), highlight=False, soft_wrap=True)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text, lines=True), **options)


def console() -> Screen:
    """Return the console for tables and sentences; no markup, since a folder may be called [a] or :b:."""
    return Screen(markup=False, emoji=False)


def table(*columns: str, title: str | None = None) -> Table:
    """Return an empty table: the first column holds names, the others numbers."""
    made = Table(box=box.SIMPLE_HEAD, title=title)
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i == 0 else "right")
    return made


def choose_device(name: str) -> str:
    """Return the name of an available device; `auto` prefers a GPU."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(
            f"device must be cpu, cuda, cuda:N or auto, since proofs need float64; got {name!r}. Use cpu, or auto."
        )
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError):
        raise ValueError(f"device {name!r} is not available here. Use cpu, or auto.") from None
    return name


def use_threads(dimension: int, requested: int | None = None) -> None:
    """Set the number of threads: as requested, else one for small inputs and torch's default for large ones."""
    if requested is not None or dimension <= SMALL:
        torch.set_num_threads(requested or 1)


def waiting(to: Console, what: str) -> AbstractContextManager[object]:
    """Show a spinner with a text on a terminal; show nothing if the output goes to a file."""
    return to.status(Text(what)) if to.is_terminal else nullcontext()


@contextmanager
def progress(to: Console) -> Iterator[Progress]:
    """Show a progress bar with speed, metrics and the time left."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=10),
        TaskProgressColumn(),
        TextColumn("{task.fields[metrics]}", markup=False),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
    )
    bars = Progress(*columns, console=to)  # started by the first step: an error before it leaves no bar
    try:
        yield bars
    finally:
        if bars.live.is_started:
            bars.stop()


def reporter(bars: Progress, name: str) -> Report:
    """Return a callback that moves a bar. Metrics are means over recent steps, read a few times a second."""
    tasks: list[TaskID] = []
    recent: deque[Mapping[str, Tensor]] = deque(maxlen=RECENT)
    steps_done: deque[tuple[float, int]] = deque(maxlen=RECENT)
    drawn = [0.0]

    def report(step: int, steps: int, metrics: Mapping[str, Tensor]) -> None:
        if not tasks:
            bars.start()
            tasks.append(bars.add_task(name, total=steps, metrics=""))
        recent.append(metrics)
        now = time.perf_counter()
        steps_done.append((now, step))
        if now - drawn[0] < REDRAW and step < steps:
            return
        drawn[0] = now
        (then, first), count = steps_done[0], len(recent)
        speed = f"{(step - first) / (now - then):.1f}/s" if now > then and step > first else ""
        means = {k: sum(float(f[k]) for f in recent) / count for k in metrics if k not in LOGGED_ONLY}
        words = [_metric(name, mean) for name, mean in means.items()]
        bars.update(tasks[0], completed=step, total=steps, metrics="  ".join([speed, *words]))

    return report


def _metric(name: str, value: float) -> str:
    """Format a metric with its unit: one digit for percentages.

    >>> _metric("error %", 3.04), _metric("certified %", 51.734), _metric("loss", 1.0)
    ('3.0 % wrong', '51.7 % certified', '1.000 loss')
    """
    if name.endswith(" %"):
        return f"{value:.1f} % {'wrong' if name == 'error %' else name[:-2]}"
    return f"{value:.3f} {name}"


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

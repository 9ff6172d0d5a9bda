"""What the commands share: the console, the progress bar, the spinner, the device, Ctrl-C."""

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

#: Figures of so many recent steps are averaged in the bar, and it is drawn anew so often, in seconds.
RECENT, REDRAW = 50, 0.2

#: Figures that the log has and the bar has no room for: bits and errors say the same.
LOGGED_ONLY = ("loss", "cross-entropy")

#: Up to this dimension one thread is fastest: more would only wait for each other.
SMALL = 256

#: A second signal within so many seconds is the same wish: `timeout` signals a command and then its whole group.
SAME_WISH = 1.0

Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, or auto: CUDA where there is one.")]


class Screen(Console):
    """A console on which the names that a file gives its classes or columns can do nothing but be read."""

    def say(self, *lines: object) -> None:
        """Print sentences as they are, however long: nothing is coloured, and no line broken."""
        for line in lines:
            self.print(str(line), highlight=False, soft_wrap=True)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text, lines=True), **options)


def console() -> Screen:
    """Where tables and sentences go, as they are: a folder may be called [a] or :b:."""
    return Screen(markup=False, emoji=False)


def table(*columns: str, title: str | None = None) -> Table:
    """A table in the house's style: the first column names, the others are figures."""
    made = Table(box=box.SIMPLE_HEAD, title=title)
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i == 0 else "right")
    return made


def choose_device(name: str) -> str:
    """The device of this name, if it is there."""
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


def use_threads(dimension: int, wanted: int | None = None) -> None:
    """As many threads as wanted, else one for small rows and torch's own choice for large ones."""
    if wanted is not None or dimension <= SMALL:
        torch.set_num_threads(wanted or 1)


def waiting(to: Console, what: str) -> AbstractContextManager[object]:
    """A spinner beside what is being done, on a terminal; nothing where the output goes to a file."""
    return to.status(Text(what)) if to.is_terminal else nullcontext()


@contextmanager
def progress(to: Console) -> Iterator[Progress]:
    """A bar with what a waiting person wants to know: speed, figures and the time left."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=10),
        TaskProgressColumn(),
        TextColumn("{task.fields[metrics]}", markup=False),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
    )
    bars = Progress(*columns, console=to)  # shown from the first step on: a mistake found before it leaves no bar
    try:
        yield bars
    finally:
        if bars.live.is_started:
            bars.stop()


def reporter(bars: Progress, name: str) -> Report:
    """A report that moves a bar. Figures are means over recent steps, read a few times a second."""
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
        words = [_figure(name, mean) for name, mean in means.items()]
        bars.update(tasks[0], completed=step, total=steps, metrics="  ".join([speed, *words]))

    return report


def _figure(name: str, value: float) -> str:
    """A figure with its unit: one digit for percentages.

    >>> _figure("error %", 3.04), _figure("certified %", 51.734), _figure("loss", 1.0)
    ('3.0 % wrong', '51.7 % certified', '1.000 loss')
    """
    if name.endswith(" %"):
        return f"{value:.1f} % {'wrong' if name == 'error %' else name[:-2]}"
    return f"{value:.3f} {name}"


@contextmanager
def ctrl_c(then: Callable[[], str] = lambda: "") -> Iterator[Callable[[], bool]]:
    """Ctrl-C or SIGTERM asks a training to stop after the step in hand; again, or beside a training, it ends at once.

    What is yielded says whether that was asked, and `then` what to do after an end at once. A pair within a second is
    one wish. Once there was one, the handlers stay: the command is about to end, and the second may be on its way.
    """
    asked: list[float] = []

    def handler(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if asked and now - asked[-1] < SAME_WISH:
            return
        at_once = bool(asked) or not _in_training(frame)
        asked.append(now)
        if at_once:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    except KeyboardInterrupt:
        console().say(f"Stopped. {then()}".strip())
        raise typer.Exit(130) from None
    finally:
        if not asked:
            for number, earlier in before.items():
                signal.signal(number, earlier or signal.SIG_DFL)


def _in_training(frame: FrameType | None) -> bool:
    """Whether a training loop was interrupted, however deep within: it asks after its step, and nothing else does."""
    while frame is not None and frame.f_code is not train.__code__:
        frame = frame.f_back
    return frame is not None

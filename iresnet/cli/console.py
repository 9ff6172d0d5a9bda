"""What the commands share: the console, the progress bar, the device, Ctrl-C."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from ..training import Report

#: Figures of so many recent steps are averaged in the bar, and it is drawn anew so often, in seconds.
RECENT, REDRAW = 50, 0.2

#: Up to this dimension one thread is fastest: more would only wait for each other.
SMALL = 256

Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, or auto: a GPU where there is one.")]


def console() -> Console:
    """Where tables and sentences go."""
    return Console()


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
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError):
        raise ValueError(f"device {name!r} is not available here. Use cpu, or auto.") from None
    return name


def use_threads(dimension: int, wanted: int | None = None) -> None:
    """As many threads as wanted, else one for small rows and torch's own choice for large ones."""
    if wanted is not None or dimension <= SMALL:
        torch.set_num_threads(wanted or 1)


@contextmanager
def progress(to: Console) -> Iterator[Progress]:
    """A bar with what a waiting person wants to know: speed, figures and the time left."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=10),
        TaskProgressColumn(),
        TextColumn("{task.fields[figures]}"),
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

    def report(step: int, steps: int, figures: Mapping[str, Tensor]) -> None:
        if not tasks:
            bars.start()
            tasks.append(bars.add_task(name, total=steps, figures=""))
        recent.append(figures)
        now = time.perf_counter()
        steps_done.append((now, step))
        if now - drawn[0] < REDRAW and step < steps:
            return
        drawn[0] = now
        (then, first), count = steps_done[0], len(recent)
        speed = f"{(step - first) / (now - then):.1f}/s" if now > then and step > first else ""
        means = {k: sum(float(f[k]) for f in recent) / count for k in figures if k != "cross-entropy"}
        words = [f"{v:.1f} % wrong" if k == "error %" else f"{v:.3f} {k}" for k, v in means.items()]
        bars.update(tasks[0], completed=step, total=steps, figures="  ".join([speed, *words]))

    return report


@contextmanager
def ctrl_c() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks to stop after the step in hand; a second one stops at once."""
    asked: list[bool] = []

    def handler(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(True)

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)

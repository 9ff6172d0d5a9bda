"""The progress bars: of a training, and of any computation that reports how far it is."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text
from torch import Tensor

from ..progress import Listener, listening
from ..train import Report

#: The bar shows metrics averaged over this many recent steps, and is redrawn at this interval, in seconds.
RECENT, REDRAW = 50, 0.2

#: The time over which the speed of a task is averaged, in seconds: as long as it may take.
PERIOD = 1e5

#: A computation that takes longer than this, in seconds, gets a bar of its own during a training.
MOMENT = 1.0

LEFT = TextColumn("left")

#: Metrics that are logged but not shown in the bar, which has no room: bits/dim and error say the same.
LOGGED_ONLY = ("loss", "cross-entropy")


@contextmanager
def progress(to: Console) -> Iterator[Progress]:
    """Show progress bars: of trainings, with speed and metrics, and of what else takes long, such as validation."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=10),
        TaskProgressColumn(),
        TextColumn("{task.fields[metrics]}", markup=False),
        TimeRemainingColumn(compact=True),
        LEFT,
    )
    bars = Progress(*columns, console=to)  # started by the first step, or what comes before it
    try:
        with listening(_evaluating(bars)) if to.is_terminal else nullcontext():
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


@contextmanager
def following(to: Console, what: str) -> Iterator[None]:
    """Show a spinner and a text, and a bar with the time left while a loop reports how far it is."""
    known = map(_Known, (BarColumn(bar_width=10), TaskProgressColumn(), TimeRemainingColumn(compact=True), LEFT))
    text = TextColumn("{task.description}", markup=False)
    bars = Progress(SpinnerColumn(), text, *known, console=to, transient=True, speed_estimate_period=PERIOD)
    task = bars.add_task(what, total=1.0)

    def show(fraction: float, phase: str) -> None:
        description = f"{what.removesuffix(' …')}: {phase} …" if phase else what
        if fraction == 0:
            bars.reset(task, description=description)
        else:
            _advance(bars, task, fraction)
            if phase:
                bars.update(task, description=description)

    with bars, listening(show):
        yield


def _evaluating(bars: Progress) -> Listener:
    """Return a listener that shows a bar of its own while a computation takes longer than a moment.

    What has a name and comes before the first step is shown at once.
    """
    task, begin = bars.add_task("evaluating", total=1.0, metrics="", visible=False), [0.0]

    def show(fraction: float, phase: str) -> None:
        if fraction == 0:
            begin[0] = time.perf_counter()
            before_training = bool(phase) and len(bars.tasks) == 1
            bars.reset(task, visible=before_training, description=phase or "evaluating")
            if before_training:
                bars.start()
        else:
            shown = fraction < 1 and time.perf_counter() - begin[0] > MOMENT
            _advance(bars, task, fraction, visible=shown)
            if shown:
                bars.start()

    return show


def _advance(bars: Progress, task: TaskID, fraction: float, *, visible: bool = True) -> None:
    """Move a bar, never back, as a second loop within the same part of an outer one would."""
    done = max(fraction, next(t.completed for t in bars.tasks if t.id == task))
    bars.update(task, completed=done, visible=visible)


class _Known(ProgressColumn):
    """A column that is empty unless part of a task is known to be done."""

    def __init__(self, column: ProgressColumn) -> None:
        super().__init__()
        self.column = column

    def render(self, task: Task) -> RenderableType:
        return self.column.render(task) if 0 < task.completed < 1 else Text()


def _metric(name: str, value: float) -> str:
    """Format a metric with its unit: one digit for percentages.

    >>> _metric("error %", 3.04), _metric("certified %", 51.734), _metric("loss", 1.0)
    ('3.0 % wrong', '51.7 % certified', '1.000 loss')
    """
    if name.endswith(" %"):
        return f"{value:.1f} % {'wrong' if name == 'error %' else name[:-2]}"
    return f"{value:.3f} {name}"

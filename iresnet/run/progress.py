"""The progress bar of a training, and what is shown before it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.text import Text
from torch import Tensor

from ..train import Report

#: The bar shows metrics averaged over this many recent steps, and is redrawn at this interval, in seconds.
RECENT, REDRAW = 50, 0.2

#: Metrics that are logged but not shown in the bar, which has no room: bits/dim and error say the same.
LOGGED_ONLY = ("loss", "cross-entropy")


class TrainingProgress(Progress):
    """Progress bars and, before the first of them, a spinner that says what is being done."""

    status: Status | None = None

    def announce(self, text: str) -> None:
        """Show a text with a spinner until the bar starts; nothing if the output goes to a file."""
        if not self.console.is_terminal or self.live.is_started:
            return
        if self.status is None:
            self.status = self.console.status(Text(text))
            self.status.start()
        self.status.update(Text(text))

    def start(self) -> None:
        self.end_status()
        super().start()

    def end_status(self) -> None:
        """Remove the spinner."""
        if self.status is not None:
            self.status.stop()
            self.status = None


@contextmanager
def progress(to: Console) -> Iterator[TrainingProgress]:
    """Show a progress bar with speed, metrics and the time left."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=10),
        TaskProgressColumn(),
        TextColumn("{task.fields[metrics]}", markup=False),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
    )
    bars = TrainingProgress(*columns, console=to)  # started by the first step: an error before it leaves no bar
    try:
        yield bars
    finally:
        bars.end_status()
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

"""The log as a TensorBoard event file, if TensorBoard is installed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .logger import Logger


class TensorBoard(Logger):
    """Writes a TensorBoard event file, opened at the first row, if TensorBoard is installed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.step = folder, 0
        self.make = _summary_writer()
        self.writer: Any = None
        self.previous_hook, self.other_threads = threading.excepthook, set[threading.Thread]()
        self.threads: set[threading.Thread] | None = None  # TensorBoard's own; unknown while the file is being opened

    def begin(self, settings: Mapping[str, Any], step: int, folder: Path | None) -> None:
        self.step = step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.make is None:
            return
        self.writer = self._open(self.make) if self.writer is None else self.writer
        for name, value in metrics.items():
            self.writer.add_scalar(plain_name(name), value, step)

    def end(self, result: object) -> None:
        writer, self.writer, self.make = self.writer, None, None
        try:
            if writer is not None:
                writer.close()
        finally:
            self._restore_hook()

    def _open(self, make: Callable[..., Any]) -> Any:
        """Open the writer. Exceptions in its thread are not printed as tracebacks: its next call raises them."""
        self.previous_hook, self.other_threads, self.threads = threading.excepthook, set(threading.enumerate()), None
        threading.excepthook = self._hook
        try:
            return make(str(self.folder), purge_step=self.step + 1 if self.step else None)
        finally:
            self.threads = set(threading.enumerate()) - self.other_threads

    def _hook(self, failure: Any) -> None:
        own = failure.thread not in self.other_threads if self.threads is None else failure.thread in self.threads
        if not own:
            self.previous_hook(failure)

    def _restore_hook(self) -> None:
        for thread in self.threads or ():  # a thread may be about to raise
            thread.join(1.0)
        if threading.excepthook == self._hook:
            threading.excepthook = self.previous_hook

    def __str__(self) -> str:
        return f"TensorBoard's file in {self.folder}"


def plain_name(metric: str) -> str:
    """Return the name of a metric without spaces and percent signs, which trackers refuse.

    >>> plain_name("validation error %")
    'validation_error_percent'
    """
    return metric.replace(" %", "_percent").replace(" ", "_")


def _summary_writer() -> Callable[..., Any] | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except Exception:  # not installed, or incompatible with another package; it is optional
        return None
    return SummaryWriter

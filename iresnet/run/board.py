"""The log as a TensorBoard event file. If it cannot be written, training continues without it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


class TensorBoardLog:
    """Writes a TensorBoard event file, opened at the first row, if TensorBoard is installed."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step
        self.make = _summary_writer()
        self.writer: Any = None
        self.previous_hook, self.other_threads = threading.excepthook, set[threading.Thread]()
        self.threads: set[threading.Thread] | None = None  # TensorBoard's own; unknown while the file is being opened

    def write(self, row: Mapping[str, float | None]) -> None:
        """Add the metrics of a row that are not None.

        After the first failure (a full disk, a moved folder) nothing more is written.
        """
        if self.make is None:
            return
        try:
            self.writer = self._open(self.make) if self.writer is None else self.writer
            step = int(row["step"] or 0)
            for name, value in row.items():
                if name != "step" and value is not None:
                    self.writer.add_scalar(name.replace(" %", "_percent").replace(" ", "_"), value, step)
        except Exception as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the file."""
        try:
            if self.writer is not None:
                self.writer.close()
                self._restore_hook()
        except Exception as error:
            self._give_up(error)

    def _open(self, make: Callable[..., Any]) -> Any:
        """Open the writer. Exceptions in its thread are not printed as tracebacks: `_give_up` warns about them."""
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

    def _give_up(self, error: Exception) -> None:
        self.make, writer = None, self.writer
        with suppress(Exception):
            if writer is not None:
                writer.close()
        self._restore_hook()
        why = getattr(error, "strerror", None) or error
        warnings.warn(
            f"TensorBoard's file in {self.folder} cannot be written: {why}. Training continues without it; log.csv "
            "has the same metrics.",
            stacklevel=2,
        )

    def _restore_hook(self) -> None:
        self.writer = None
        for thread in self.threads or ():  # a thread may be about to raise
            thread.join(1.0)
        if threading.excepthook == self._hook:
            threading.excepthook = self.previous_hook


def _summary_writer() -> Callable[..., Any] | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except Exception:  # not installed, or incompatible with another package; it is optional
        return None
    return SummaryWriter

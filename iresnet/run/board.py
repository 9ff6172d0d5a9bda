"""TensorBoard's copy of the log: where it cannot be written, training goes on without it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


class TensorBoardLog:
    """TensorBoard's file, from the first row on, where TensorBoard is installed."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step
        self.make = _summary_writer()
        self.writer: Any = None
        self.told, self.others = threading.excepthook, set[threading.Thread]()
        self.threads: set[threading.Thread] | None = None  # its own; not known while it is opened

    def write(self, row: Mapping[str, float]) -> None:
        """Add the figures of a row; the first failure (a full disk, a folder that was moved) is the last one."""
        if self.make is None:
            return
        try:
            self.writer = self._open(self.make) if self.writer is None else self.writer
            for name, value in row.items():
                if name != "step":
                    self.writer.add_scalar(name.replace(" %", "_percent").replace(" ", "_"), value, int(row["step"]))
        except Exception as error:
            self._give_up(error)

    def close(self) -> None:
        """End the file."""
        try:
            if self.writer is not None:
                self.writer.close()
                self._end()
        except Exception as error:
            self._give_up(error)

    def _open(self, make: Callable[..., Any]) -> Any:
        """The writer; what its thread meets is not printed as a traceback, since it is said here."""
        self.told, self.others, self.threads = threading.excepthook, set(threading.enumerate()), None
        threading.excepthook = self._tell
        try:
            return make(str(self.folder), purge_step=self.step + 1 if self.step else None)
        finally:
            self.threads = set(threading.enumerate()) - self.others

    def _tell(self, failure: Any) -> None:
        own = failure.thread not in self.others if self.threads is None else failure.thread in self.threads
        if not own:
            self.told(failure)

    def _give_up(self, error: Exception) -> None:
        self.make, writer = None, self.writer
        with suppress(Exception):
            if writer is not None:
                writer.close()
        self._end()
        why = getattr(error, "strerror", None) or error
        warnings.warn(
            f"TensorBoard's file in {self.folder} cannot be written: {why}. Training goes on without it; log.csv has "
            "the same figures.",
            stacklevel=2,
        )

    def _end(self) -> None:
        self.writer = None
        for thread in self.threads or ():  # which may be about to tell what it met
            thread.join(1.0)
        if threading.excepthook == self._tell:
            threading.excepthook = self.told


def _summary_writer() -> Callable[..., Any] | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except Exception:  # not installed, or at odds with another package: it is not needed
        return None
    return SummaryWriter

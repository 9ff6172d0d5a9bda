"""TensorBoard's copy of the log: where it cannot be written, training goes on without it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


class Board:
    """TensorBoard's file, from the first row on, where TensorBoard is installed."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step
        self.make = _summary_writer()
        self.writer: Any = None
        self.told, self.threads = threading.excepthook, set[threading.Thread]()

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
        earlier = set(threading.enumerate())
        writer = make(str(self.folder), purge_step=self.step + 1 if self.step else None)
        self.told, self.threads = threading.excepthook, set(threading.enumerate()) - earlier
        threading.excepthook = self._tell
        return writer

    def _tell(self, failure: Any) -> None:
        if failure.thread not in self.threads:
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
        if threading.excepthook == self._tell:
            threading.excepthook = self.told


def _summary_writer() -> Callable[..., Any] | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except Exception:  # not installed, or at odds with another package: it is not needed
        return None
    return SummaryWriter

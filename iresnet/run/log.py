"""The log of a run: a CSV that any program reads, and TensorBoard where it is installed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from .. import atomic
from . import reading
from .board import TensorBoardLog


class Log:
    """log.csv, one row after another, and TensorBoard beside it where that is installed.

    Nothing is written before the first row: a checkpoint that is refused leaves the log as it is.
    """

    def __init__(self, folder: Path, step: int, validation: list[str]) -> None:
        self.path, self.step, self.validation = folder / "log.csv", step, validation
        self.kept = self._kept()
        self.columns: list[str] = self.kept[0].split(",") if self.kept else []
        self.file: TextIO | None = None
        self.board = TensorBoardLog(folder / "tensorboard", step)

    def _kept(self) -> list[str]:
        """The header and the rows up to the step: what was logged after the checkpoint is done again."""
        if not self.step or not self.path.is_file():
            return []
        remedy = "Remove it, and resume."
        lines = reading.read_text(self.path, remedy).splitlines()
        cells = lines[0].count(",") if lines else 0
        whole = [row for row in lines[1:] if row.count(",") == cells]  # a torn last line has fewer
        steps = [reading.parse_step(row.partition(",")[0], self.path, remedy) for row in whole]
        return lines[:1] + [row for row, step in zip(whole, steps, strict=True) if step <= self.step]

    def _open(self) -> TextIO:
        atomic.write(self.path, "".join(f"{line}\n" for line in self.kept))
        return self.path.open("a", newline="", encoding="utf-8")

    def write(self, row: Mapping[str, float]) -> None:
        """Add a row; the first decides which columns there are."""
        lines = []
        if not self.columns:
            self.columns = [*(k for k in row if k not in self.validation), *self.validation]
            lines.append(",".join(self.columns))
        lines.append(",".join("" if row.get(c) is None else f"{row[c]:.7g}" for c in self.columns))
        self.file = self._open() if self.file is None else self.file
        try:
            self.file.write("".join(f"{line}\n" for line in lines))
            self.file.flush()
        except OSError as error:
            raise OSError(
                f"cannot write {self.path}: {error.strerror}. Make room, then go on with --resume."
            ) from error
        self.board.write(row)

    def close(self) -> None:
        """End both files."""
        with suppress(OSError):  # what could not be written was said
            if self.file is not None:
                self.file.close()
        self.board.close()

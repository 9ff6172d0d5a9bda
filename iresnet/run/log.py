"""The log of a run: a CSV file."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from .. import atomic
from . import reading


class Log:
    """Appends rows to log.csv.

    Nothing is written before the first row, so a checkpoint that cannot be resumed leaves the log unchanged.
    """

    def __init__(self, folder: Path, step: int, validation: list[str]) -> None:
        self.path, self.step, self.validation = folder / "log.csv", step, validation
        self.kept = self._kept()
        self.columns: list[str] = self.kept[0].split(",") if self.kept else []
        self.file: TextIO | None = None

    def _kept(self) -> list[str]:
        """Return the header, in today's column names, and the rows up to the resumed step; later steps are repeated."""
        if not self.step or not self.path.is_file():
            return []
        remedy = "Remove it, and resume."
        lines = reading.read_text(self.path, remedy).splitlines()
        cells = lines[0].count(",") if lines else 0
        complete = [row for row in lines[1:] if row.count(",") == cells]  # a truncated last line has fewer
        steps = [reading.parse_step(row.partition(",")[0], self.path, remedy) for row in complete]
        header = [",".join(reading.column_names(line.split(","))) for line in lines[:1]]
        return header + [row for row, step in zip(complete, steps, strict=True) if step <= self.step]

    def _open(self) -> TextIO:
        atomic.write(self.path, "".join(f"{line}\n" for line in self.kept))
        return self.path.open("a", newline="", encoding="utf-8")

    def write(self, row: Mapping[str, float | None]) -> None:
        """Append a row; the first row determines the columns. A metric that is None has an empty cell."""
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
                f"cannot write {self.path}: {error.strerror}. Free disk space, then continue with --resume."
            ) from error

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # the failed write has been reported
            if self.file is not None:
                self.file.close()

"""The log of a run: a CSV that any program reads, and TensorBoard where it is installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import atomic


class Log:
    """log.csv, one row after another, and TensorBoard beside it where that is installed."""

    def __init__(self, folder: Path, step: int, validation: list[str]) -> None:
        self.path, self.validation = folder / "log.csv", validation
        kept = self._kept(step)
        self.columns: list[str] = kept[0].split(",") if kept else []
        atomic.write(self.path, "".join(f"{line}\n" for line in kept))
        self.file = self.path.open("a", newline="", encoding="utf-8")
        self.board = _tensorboard(folder / "tensorboard", step)

    def _kept(self, step: int) -> list[str]:
        """The header and the rows up to a step: what was logged after the checkpoint is done again."""
        lines = self.path.read_text(encoding="utf-8").splitlines() if step and self.path.is_file() else []
        cells = lines[0].count(",") if lines else 0  # a torn last line has fewer
        return lines[:1] + [row for row in lines[1:] if row.count(",") == cells and float(row.split(",")[0]) <= step]

    def write(self, row: Mapping[str, float]) -> None:
        if not self.columns:
            self.columns = [*(k for k in row if k not in self.validation), *self.validation]
            self.file.write(",".join(self.columns) + "\n")
        try:
            self.file.write(",".join("" if row.get(c) is None else f"{row[c]:.7g}" for c in self.columns) + "\n")
            self.file.flush()
        except OSError as error:
            raise OSError(
                f"cannot write {self.path}: {error.strerror}. Make room, then go on with --resume."
            ) from error
        for name, value in row.items():
            if self.board is not None and name != "step":
                self.board.add_scalar(name.replace(" %", "_percent").replace(" ", "_"), value, int(row["step"]))

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()


def _tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except Exception:  # not installed, or at odds with another package: it is not needed
        return None
    return SummaryWriter(str(folder), purge_step=step + 1 if step else None)

"""Tables that are larger than memory: training rows are read from disk in blocks, and shuffled by blocks.

An NPY file is divided into blocks of rows; the blocks of a Parquet file are its row groups. An epoch visits the blocks
in an order drawn from (seed, epoch). Some of them at a time, a window, are read and their rows shuffled together, by an
order drawn from (seed, epoch, window). So batch t is a function of (seed, t), as for a table in memory, and no more
than two windows are in memory. `large_table` makes the splits of such a table.
"""

from __future__ import annotations

import hashlib
import importlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import arrays, choice, conversion, npy, table
from .choice import ColumnChooser
from .dataset import Batch, Dataset
from .sampling import seeded_generator
from .schema import Schema

#: Rows in a block of an NPY file; numbers in a window of blocks that are shuffled together.
BLOCK, WINDOW = 2**13, 2**22


class TableFile:
    """A table on disk that is read in blocks: block k holds the rows starts[k], ..., starts[k + 1] - 1."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getstate__(self) -> dict[str, Path]:
        return {"path": self.path}

    @cached_property
    def _array(self) -> npy.ArrayFile | None:
        return npy.ArrayFile(self.path) if self.path.suffix.lower() == ".npy" else None

    @cached_property
    def _parquet(self) -> Any:
        return importlib.import_module("pyarrow.parquet").ParquetFile(self.path)

    @cached_property
    def starts(self) -> list[int]:
        """The first row of every block, and the number of rows."""
        if self._array is not None:
            return [*range(0, len(self._array), BLOCK), len(self._array)]
        held = self._parquet.metadata
        sizes = [held.row_group(k).num_rows for k in range(held.num_row_groups)]
        return [0, *np.cumsum(sizes).tolist()]

    @property
    def numbers(self) -> int:
        """The number of cells of the table."""
        width = self._array.shape[1] if self._array is not None else self._parquet.metadata.num_columns
        return self.starts[-1] * int(width)

    def positions(self, k: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions in block k of those of the rows, which are sorted, that are in it."""
        first, last = self.starts[k : k + 2]
        begin, end = np.searchsorted(rows, [first, last])
        return rows[begin:end] - first

    def read(self, k: int, choose: ColumnChooser) -> table.Table:
        """Read the chosen columns of a block."""
        first, last = self.starts[k : k + 2]
        if self._array is not None:
            found = arrays.Arrays(self._array.read(first, last), None)
            return arrays.array_table(self.path, found, choose, first)
        frame = self._parquet.read_row_group(k).to_pandas()
        columns = {str(name): arrays.column_values(frame[name]) for name in frame.columns}
        return arrays.column_table(self.path, columns, choose, first)


def open_large(path: Path, limit: float) -> TableFile | None:
    """Return a table that takes more than `limit` bytes in float32, to be read in blocks; None for any other file."""
    suffix = path.suffix.lower()
    if suffix == ".npy" and not npy.is_archive(path):
        array = npy.ArrayFile(path)
        if len(array.shape) != 2 or array.dtype.kind not in "biuf":
            return None
    elif suffix != ".parquet":
        return None
    file = TableFile(path)
    try:
        return file if 4 * file.numbers > limit else None
    except Exception:  # no pyarrow, or a damaged file: reading it at once says what is wrong
        return None


@dataclass(eq=False)
class TableBlocks:
    """The training rows of a table on disk; `counts` says how many there are in each block.

    They are all rows but those held out and, with `skip_missing`, those with missing cells.
    """

    file: TableFile
    schema: Schema
    held_out: NDArray[np.int64]
    counts: tuple[int, ...]
    skip_missing: bool = False
    _windows: dict[tuple[int, int, int], Batch] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_windows": {}}

    @property
    def rows(self) -> int:
        """The number of training rows."""
        return sum(self.counts)

    def fingerprint(self) -> str:
        """Hash the number of rows of every block, and which rows are held out."""
        return hashlib.sha256(repr(self.counts).encode() + self.held_out.tobytes()).hexdigest()

    def read(self, k: int) -> Dataset:
        """Read the training rows of a block."""
        choose = choice.choose_schema_columns(self.schema, skip_missing=self.skip_missing)
        keep = np.ones(self.file.starts[k + 1] - self.file.starts[k], dtype=bool)
        keep[self.file.positions(k, self.held_out)] = False
        found = self.file.read(k, choose).take(np.flatnonzero(keep))
        return conversion.dataset_for_schema(found, self.schema, skip_missing=self.skip_missing)

    def batch(self, seed: int, epoch: int, start: int, stop: int) -> Batch:
        """Return the rows start, ..., stop - 1 of an epoch."""
        ends, groups = self._plan(seed, epoch)
        parts: list[Batch] = []
        for w in range(int(np.searchsorted(ends, start, side="right")), len(ends)):
            before = ends[w - 1] if w else 0
            if before >= stop:
                break
            x, y = self._window(seed, epoch, w, groups[w])
            rows = slice(max(0, start - before), stop - before)
            parts.append((x[rows], None if y is None else y[rows]))
        labels = [y for _, y in parts if y is not None]
        return torch.cat([x for x, _ in parts]), torch.cat(labels) if labels else None

    def _plan(self, seed: int, epoch: int) -> tuple[list[int], list[list[int]]]:
        """Return where each window of an epoch ends, counted in rows, and its blocks."""
        ends: list[int] = []
        groups: list[list[int]] = []
        least = WINDOW // self.schema.dimension
        total = 0
        group: list[int] = []
        filled = [k for k, count in enumerate(self.counts) if count]
        for i in torch.randperm(len(filled), generator=seeded_generator(seed, "blocks", epoch)).tolist():
            group.append(filled[i])
            total += self.counts[filled[i]]
            if total - (ends[-1] if ends else 0) >= least:
                ends, groups, group = [*ends, total], [*groups, group], []
        return ([*ends, total], [*groups, group]) if group else (ends, groups)

    def _window(self, seed: int, epoch: int, w: int, group: list[int]) -> Batch:
        """Return the shuffled rows of a window; the last two are kept, since a batch may need both."""
        key = (seed, epoch, w)
        if key not in self._windows:
            while len(self._windows) > 1:
                del self._windows[next(iter(self._windows))]
            parts = [self.read(k) for k in group]
            x = torch.cat([part.x for part in parts])
            order = torch.randperm(len(x), generator=seeded_generator(seed, "window", epoch, w))
            y = None if parts[0].y is None else torch.cat([_labels(part) for part in parts])[order]
            self._windows[key] = (x[order], y)
        return self._windows[key]


def _labels(part: Dataset) -> Tensor:
    assert part.y is not None
    return part.y

"""Samples of a source that are read in chunks, so that memory does not grow with their number.

A table in a text file, a Parquet file or an NPY file, and images in an NPY file, are read a chunk at a time: so many
lines or rows of the file. Other sources (folders, NPZ files, built-in datasets) are read at once and then divided.
Chunk k holds the same rows whether or not those before it are used, so work can be resumed at any chunk, and shared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from . import arrays, builtin, choice, conversion, delimited, missing, source, table
from .dataset import Dataset
from .lines import Lines
from .npy import ArrayFile, is_archive
from .schema import Schema


class Chunk(NamedTuple):
    """Some samples of a source: all but those left out, or None if that is all; `rows` is the number of both.

    `fraction` says how much of the source has been read, up to the end of this chunk; None if that is not known.
    """

    data: Dataset | None
    rows: int
    fraction: float | None


@dataclass(frozen=True)
class ChunkedSource:
    """Samples for a model of a schema, `size` at a time; the options are those of `source.read`."""

    source: str
    schema: Schema
    size: int
    folder: str = "data"
    image_size: int = 0
    labels: bool = False
    id: str = ""
    skip_missing: bool = False

    def __iter__(self) -> Iterator[Chunk]:
        return self.starting_at(0)

    def starting_at(self, first: int) -> Iterator[Chunk]:
        """Iterate over the chunks first, first + 1, ...; those before are read, if need be, and dropped."""
        if not self._is_chunked_table:
            yield from self._datasets(first)
            return
        tables, row = self._tables(), 0
        for k, (read, fraction) in enumerate(tables):
            if k >= first:
                yield Chunk(self._dataset(read, row, (other for other, _ in tables)), len(read.x), fraction)
            row += len(read.x)
        if not row:
            raise ValueError(f"{self.path} has no rows. Give at least one.")

    @cached_property
    def rows(self) -> int | None:
        """The number of rows, if the source says it without being read; None for a text file."""
        if self._array is not None:
            return len(self._array)
        if self._is_parquet:
            return arrays.parquet_rows(self.path)
        return None if self._is_chunked_table else len(self._all)

    def count(self) -> int:
        """Return the number of chunks; of a text file, the lines are counted, which may make it too large by some."""
        rows = self.rows
        if rows is None:
            with Lines(self.path) as lines:
                lines.forget()
                rows = sum(1 for _ in lines)
        return -(-rows // self.size)

    @cached_property
    def path(self) -> Path:
        """The file."""
        return Path(self.source) if self.source == source.STDIN else source.existing_path(self.source)

    @property
    def is_file(self) -> bool:
        """Whether the source is a file, which can be read again."""
        return self.source not in builtin.names() and self.path.is_file()

    def digest(self) -> str:
        """Hash the samples of a source that is read at once, and their names."""
        return hashlib.sha256(repr((self._all.fingerprint(), self._all.names)).encode()).hexdigest()[:16]

    @property
    def _is_parquet(self) -> bool:
        return self.source not in builtin.names() and self.path.suffix.lower() in source.PARQUET

    @cached_property
    def _array(self) -> ArrayFile | None:
        """The array of an NPY file that holds a table or images of this schema; None: others say what is wrong."""
        if not self.is_file or self.path.suffix.lower() != ".npy" or is_archive(self.path):
            return None
        array = ArrayFile(self.path)
        rank, kind = len(array.shape), array.dtype.kind
        fits = (rank == 2 and kind in "biuf") if not self.schema.is_image else (rank in (3, 4) and array.dtype == "u1")
        return array if fits and all(array.shape) else None

    @property
    def _is_chunked_table(self) -> bool:
        if self.schema.is_image or self.source in builtin.names():
            return False
        name = self.path.name.lower()
        return (
            self.source == source.STDIN
            or self._is_parquet
            or (self.is_file and (self._array is not None or name.endswith((*source.TEXT, *source.COMPRESSED))))
        )

    @property
    def _choose(self) -> choice.ColumnChooser:
        return choice.choose_schema_columns(self.schema, labels=self.labels, id=self.id, skip_missing=self.skip_missing)

    def _tables(self) -> Iterator[tuple[table.Table, float | None]]:
        """Iterate over the tables of the chunks."""
        if self._array is not None:
            for start in range(0, len(self._array), self.size):
                x = self._array.read(start, start + self.size)
                read = arrays.array_table(self.path, arrays.Arrays(x, None), self._choose, start)
                yield read, (start + len(x)) / len(self._array)
        elif self._is_parquet:
            rows = 0
            for read in arrays.read_parquet_chunks(self.path, self._choose, self.size):
                rows += len(read.x)
                yield read, rows / max(1, self.rows or 1)
        else:
            known = {*self.schema.names, self.schema.label, self.schema.id} - {""}
            yield from delimited.read_chunks(self.path, self._choose, known, self.size)

    def _dataset(self, read: table.Table, first: int, below: Iterator[table.Table]) -> Dataset | None:
        if not len(read.x) or (self.skip_missing and not len(missing.whole_rows(read))):
            return None
        data = conversion.dataset_for_schema(read, self.schema, skip_missing=self.skip_missing, below=below)
        return replace(data, rows=tuple(first + i for i in data.rows or range(len(data))))

    def _datasets(self, first: int) -> Iterator[Chunk]:
        """Iterate over the chunks of images, and of what is read at once."""
        total = self.rows or 0
        for start in range(first * self.size, total, self.size):
            rows = range(start, min(start + self.size, total))
            if self._array is None:
                data = self._all.take(rows)
            else:
                read = arrays.checked_arrays(self.path, self._array.read(rows.start, rows.stop), None)
                data = arrays.array_images(self.path, read, self.schema)
            yield Chunk(data if data.rows else replace(data, rows=tuple(rows)), len(rows), rows.stop / total)

    @cached_property
    def _all(self) -> Dataset:
        """The samples of a source that cannot be read in chunks."""
        return source.read(
            self.source, self.schema, folder=self.folder, size=self.image_size, labels=self.labels, id=self.id,
            skip_missing=self.skip_missing,
        )  # fmt: skip

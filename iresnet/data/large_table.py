"""The splits of a table that is larger than memory, from one pass over its rows.

What a model has to know before it trains (kinds of columns, categories, classes, means and standard deviations) comes
from a sample: rows drawn at random, with the rows that have the smallest or largest value of a column so far, or a
category or class that is new. Validation and test rows are drawn at random too, up to a number, and held in memory. The
training rows are all others, read in blocks.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..spelling import quoted
from . import choice, conversion, missing, split, table
from .blocks import TableBlocks, TableFile
from .choice import TableOptions
from .dataset import Dataset, Splits
from .sampling import seeded_generator
from .schema import Schema

#: The most rows that are held out for validation, and for the test; the rows of the sample.
HELD_OUT, SAMPLE = 100_000, 100_000

#: Names of categories or classes that are looked for in all rows; a column with more has too many.
NAMES = 10_000


def load_blocks(
    file: TableFile, options: TableOptions, schema: Schema | None, *, validation: float, test: float, seed: int
) -> Splits:
    """Load the splits of a large table: held-out rows in memory, the training rows as a sample and as blocks.

    The kinds of columns are those of the `schema` of an earlier run, if it is given; else training rows are checked.
    """
    rows = file.starts[-1]
    tested = _draw(rows, _held_out("test", test, rows), seeded_generator(0, "test")) if test else np.empty(0, np.int64)
    validated = _draw(rows, _held_out("validation", validation, rows), seeded_generator(seed, "validation"), tested)
    held_out = np.sort(np.concatenate([tested, validated]))
    sampled = _draw(rows, min(SAMPLE, rows - len(held_out)), seeded_generator(seed, "sample"), held_out)
    found = _collect(file, options, held_out, sampled)
    dataset = conversion.training_dataset(
        found.table, options, schema, lambda _, left: np.flatnonzero(np.isin(found.rows[left], tested))
    )
    places = found.rows[list(dataset.rows)] if dataset.rows else found.rows
    train, valid, held = (
        _part(dataset, mask)
        for mask in (~np.isin(places, held_out), np.isin(places, validated), np.isin(places, tested))
    )
    if train is None or valid is None:
        raise ValueError("too few rows without missing cells are left. Drop the columns with missing cells.")
    conversion.refuse_constant_columns(train)
    blocks = TableBlocks(file, dataset.schema, held_out, found.counts, options.skip_missing)
    if schema is None:
        _check_kinds(blocks)
    return Splits(replace(train, blocks=blocks), valid, held)


def _held_out(name: str, value: float, rows: int) -> int:
    return min(split.held_out_count(name, value, rows), HELD_OUT)


def _part(dataset: Dataset, mask: NDArray[np.bool_]) -> Dataset | None:
    return dataset.take(np.flatnonzero(mask).tolist()) if mask.any() else None


def _draw(rows: int, n: int, generator: torch.Generator, without: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Draw n different rows, sorted, at random and without those given; memory does not grow with the table."""
    drawn = np.empty(0, np.int64)
    excluded = np.empty(0, np.int64) if without is None else without
    if rows < 4 * (n + len(excluded)):
        order = torch.randperm(rows, generator=generator).numpy()
        return np.sort(order[~np.isin(order, excluded)][:n])
    while len(drawn) < n:
        more = torch.randint(rows, (n - len(drawn),), generator=generator).numpy()
        drawn = np.unique(np.concatenate([drawn, more[~np.isin(more, excluded)]]))
    return drawn


class _Collected(NamedTuple):
    """Rows of a file as a table, their numbers in the file, and how many training rows every block has."""

    table: table.Table
    rows: NDArray[np.int64]
    counts: tuple[int, ...]


def _collect(
    file: TableFile, options: TableOptions, held_out: NDArray[np.int64], sampled: NDArray[np.int64]
) -> _Collected:
    """Read all rows once; keep those that are held out, sampled, or the first of their kind."""
    choose, news = choice.choose_training_columns(options), _News()
    wanted, tables, rows, counts = np.union1d(held_out, sampled), [], [], []
    for k in range(len(file.starts) - 1):
        found, first = file.read(k, choose), file.starts[k]
        if not options.skip_missing:
            missing.check_finite(found, (file.read(j, choose) for j in range(k + 1, len(file.starts) - 1)))
        choose = choice.with_words(choose, tuple(found.words)) if k == 0 else choose
        chosen = np.union1d(file.positions(k, wanted), news.find(found))
        tables.append(replace(found.take(chosen), place=str))  # the place of a part refers to the whole block
        rows.append(first + chosen)
        whole = missing.whole_rows(found) if options.skip_missing else np.arange(len(found.x))
        counts.append(len(np.setdiff1d(whole, file.positions(k, held_out), assume_unique=True)))
    return _Collected(_join(tables, np.concatenate(rows)), np.concatenate(rows), tuple(counts))


class _News:
    """Finds the rows with a value that is the smallest or largest of its column so far, or with a new name."""

    def __init__(self) -> None:
        self.low, self.high, self.names = np.empty(0), np.empty(0), dict[str, set[str]]()

    def find(self, found: table.Table) -> NDArray[np.int64]:
        """Return the positions of such rows."""
        if not len(found.x):
            return np.empty(0, np.int64)
        with np.errstate(invalid="ignore"):
            least, most = np.where(np.isnan(found.x), np.inf, found.x), np.where(np.isnan(found.x), -np.inf, found.x)
        if not self.low.size:
            self.low, self.high = np.full(found.x.shape[1], np.inf), np.full(found.x.shape[1], -np.inf)
        lower, higher = least.min(axis=0) < self.low, most.max(axis=0) > self.high
        positions = [least.argmin(axis=0)[lower], most.argmax(axis=0)[higher]]
        self.low, self.high = np.minimum(self.low, least.min(axis=0)), np.maximum(self.high, most.max(axis=0))
        for column, cells in {**found.words, **({} if found.labels is None else {"": found.labels})}.items():
            seen = self.names.setdefault(column, set())
            firsts = {name: i for i, name in reversed([*enumerate(cells)]) if name not in seen}
            if len(seen) < NAMES:
                positions.append(np.array([*firsts.values()], dtype=np.int64))
                seen.update(firsts)
        return np.unique(np.concatenate(positions)).astype(np.int64)


def _join(tables: Sequence[table.Table], rows: NDArray[np.int64]) -> table.Table:
    """Return the tables of consecutive blocks as one."""
    first = tables[0]

    def joined(cells: Iterable[list[str] | None]) -> list[str]:
        return [cell for part in cells for cell in part or ()]

    return replace(
        first,
        x=np.concatenate([t.x for t in tables]),
        labels=None if first.labels is None else joined(t.labels for t in tables),
        place=lambda i: f"row {rows[i]}",
        words={name: joined(t.words[name] for t in tables) for name in first.words},
        ids=None,
    )


def _check_kinds(blocks: TableBlocks) -> None:
    """Refuse a row with a value that its column cannot have, judging by the kinds that the sample shows."""
    schema = blocks.schema
    for k, count in enumerate(blocks.counts):
        if not count:
            continue
        x = blocks.read(k).x
        allowed = schema.allowed(x)
        if not bool(allowed.all()):
            row, i = (int(n) for n in (~allowed).nonzero()[0])
            name, first = schema.names[i], blocks.file.starts[k]
            raise ValueError(
                f"{blocks.file.path}: column {quoted(name)} is {schema.column_kinds[i]} in a sample of the rows; got "
                f"{float(x[row, i]):g} in the block from row {first} on. Declare its kind, e.g. --kind "
                f"{shlex.quote(name)}=real, or correct the row."
            )

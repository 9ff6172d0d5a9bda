"""Tables: rows of real numbers with a name for each column and, optionally, a column of labels.

Numbers are parsed as float64 and stored as float32, the type that models compute in; a column whose differences would
be lost in float32 is refused. Also refused are missing and infinite numbers and, in training data, constant columns,
since no density exists for them. `delimited` reads text files; `arrays` reads NumPy and Parquet files.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ..spelling import hint, quoted
from .dataset import Dataset, Schema, prefix_errors
from .labels import MISSING, class_name, class_names, encode_labels


class ColumnChoice(NamedTuple):
    """The positions in a file of the columns of numbers and of the label column (None: no labels).

    `suggest_label` is true where the user named no label column but could: errors then say how.
    """

    columns: list[int]
    label: int | None
    suggest_label: bool = False


#: Chooses columns, given (file, column names, whether the file has a header with these names).
ColumnChooser: TypeAlias = Callable[[Path, Sequence[str], bool], ColumnChoice]


@dataclass(frozen=True)
class Table:
    """The content of a file: numbers (N, D) in float64, labels ("" where missing), and where in the file row i is."""

    path: Path
    columns: tuple[str, ...]
    x: NDArray[np.float64]
    label: str
    labels: list[str] | None
    place: Callable[[int], str]


def check_names(path: Path, names: list[str]) -> list[str]:
    """Return the column names of a file if they are unique and none is empty."""
    seen: set[str] = set()
    for i, name in enumerate(names):
        if not name:
            raise ValueError(f"{path}: column {i + 1} has no name. Name it, or remove it if it only numbers the rows.")
        if name in seen:
            raise ValueError(f"{path}: two columns are called {quoted(name)}. Give every column a unique name.")
        seen.add(name)
    return names


def choose_all_columns(label: str) -> ColumnChooser:
    """Choose every column as data, except the label column."""

    def choose(path: Path, names: Sequence[str], named: bool) -> ColumnChoice:
        if label and label not in names:
            raise ValueError(f"{path} has no column {quoted(label)} for the labels. {hint(label, names)}")
        columns = [i for i, name in enumerate(names) if name != label]
        if not columns:
            raise ValueError(f"{path} has no column of numbers beside the labels {quoted(label)}. Give at least one.")
        return ColumnChoice(columns, names.index(label) if label else None, suggest_label=not label)

    return choose


def choose_schema_columns(schema: Schema, *, labels: bool = True) -> ColumnChooser:
    """Choose the columns of a schema, by name; in a file without a header, by position. Labels may be absent."""

    def choose(path: Path, names: Sequence[str], named: bool) -> ColumnChoice:
        wanted = schema.names
        if not named and len(names) == len(wanted):
            return ColumnChoice(list(range(len(names))), None)
        position = {name: i for i, name in enumerate(names)}
        missing = next((column for column in wanted if column not in position), None)
        if missing is not None and not named:
            raise ValueError(f"{path} has {len(names)} columns and no header; the model takes {schema}, in this order.")
        if missing is not None:
            others = set(names).difference(wanted)
            remedy = hint(missing, [name for name in names if name in others] or names)
            raise ValueError(f"{path} has no column {quoted(missing)}, which the model needs. {remedy}")
        label = position.get(schema.label) if labels else None
        return ColumnChoice([position[column] for column in wanted], label)

    return choose


def parse_number(cell: str) -> float:
    """Parse a number, which may be infinite or NaN; raise a `ValueError` for any other text.

    Python's float also accepts 1_000 and the digits of every script, which other programs read differently or refuse.

    >>> parse_number(" -1.5e3 ")
    -1500.0
    """
    if not cell.isascii() or "_" in cell:
        raise ValueError(f"{quoted(cell)} is not a number.")
    return float(cell)


def is_number(cell: str) -> bool:
    """Whether a text is a number, which may be infinite or NaN.

    >>> [is_number(cell) for cell in ("1e3", "inf", "1_000", "\u0663", "")]
    [True, True, False, False, False]
    """
    try:
        parse_number(cell)
    except ValueError:
        return False
    return True


def label_hint(column: str, cells: Iterable[object]) -> str:
    """Return advice to name a label column, if nearly all cells of this column are text; else nothing."""
    filled = [cell for cell in cells if class_name(cell) != MISSING]
    text = sum(isinstance(cell, str) and not is_number(cell) for cell in filled)
    if text < 2 or text < 0.9 * len(filled):
        return ""
    return f" If it holds the classes, name it: --label {shlex.quote(column)}."


def refuse_cell(path: Path, cell: object, place: str, column: str, remedy: str) -> NoReturn:
    """Raise the error for a cell that is not a number."""
    what = "a number is missing" if isinstance(cell, str) and not cell.strip() else f"{quoted(cell)} is not a number"
    raise ValueError(
        f"{path}: {what} in {place}, column {quoted(column)}. Correct it, or remove the row or the column.{remedy}"
    ) from None


def training_dataset(table: Table) -> Dataset:
    """Convert a table to a dataset to train on, with a schema of its own."""
    classes = class_names(table.labels or ())
    known = sum(label != MISSING for label in table.labels or ())
    if len(classes) > 10 and 2 * len(classes) > known:
        raise ValueError(
            f"{table.path} has {len(classes)} different labels in {known} rows of column {quoted(table.label)}; "
            "labels must be classes. Choose another label column."
        )
    if table.labels is not None and not classes:
        raise ValueError(f"{table.path} has no label in column {quoted(table.label)}. Add some, or set label = ''.")
    with prefix_errors(table.path):
        schema = Schema((len(table.columns),), columns=table.columns, label=table.label, classes=classes)
    dataset = dataset_for_schema(table, schema)
    _check_precision(table, dataset)
    return dataset


def dataset_for_schema(table: Table, schema: Schema) -> Dataset:
    """Convert a table, whose columns were chosen for this schema, to a dataset."""
    with np.errstate(over="ignore"):  # numbers that overflow become infinite, which is refused below
        x = table.x.astype(np.float32)
    finite = np.isfinite(x)
    if not finite.all():
        row, column = (int(i) for i in np.argwhere(~finite)[0])
        raise ValueError(
            f"{table.path}: numbers must be finite and fit float32; got {table.x[row, column]} in {table.place(row)}, "
            f"column {quoted(table.columns[column])}. Fill it in, or remove the row."
        )
    if not len(x):
        raise ValueError(f"{table.path} has no rows. Give at least one.")
    y = encode_labels(table.labels, schema.classes, lambda i: f"{table.path}, {table.place(i)}")
    return Dataset(torch.from_numpy(x), y, schema)


def refuse_constant_columns(train: Dataset) -> None:
    """Refuse to train on a constant column: a density has no upper bound there."""
    constant = (train.x == train.x[0]).all(dim=0).nonzero()
    if len(constant):
        i = int(constant[0])
        name = train.schema.names[i]
        raise ValueError(
            f"column {quoted(name)} is {float(train.x[0, i]):g} in all {len(train)} training rows, so its density has "
            "no upper bound. Remove the column."
        )


def _check_precision(table: Table, dataset: Dataset) -> None:
    """Refuse columns whose differences float32, with its 24 bits, would lose, such as seconds since 1970."""
    lost = np.abs(table.x - dataset.x.numpy()).max(axis=0)
    spread = np.where(np.ptp(table.x, axis=0) > 0, table.x.std(axis=0), np.inf)  # a constant has nothing to lose
    for i in np.flatnonzero(lost > 1e-3 * spread):
        raise ValueError(
            f"{table.path}: column {quoted(table.columns[i])} holds numbers like {table.x[0, i]:.17g}, whose "
            "differences do not fit float32. Subtract an offset from the column."
        )

"""Datasets in .npy, .npz and Parquet files.

An NPY file is one array; an NPZ file holds `x` and optionally the labels `y`, or one array. An array of shape (N, D) is
a table, whose columns are called x0, x1, ...; uint8 arrays of shape (N, H, W) or (N, C, H, W) are images. Nothing is
unpickled. Parquet needs pandas and pyarrow. Errors name the row, counted from 0.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..spelling import MOST, listed, prefix_errors
from . import npy
from .choice import ColumnChoice, ColumnChooser, text_columns
from .dataset import Dataset
from .labels import class_name, class_names, encode_labels
from .numerals import parse_number
from .schema import Schema
from .table import Table, check_names, holds_words, refuse_cell, text_hint


class Arrays(NamedTuple):
    """The samples of a file, and its labels or None."""

    x: NDArray[Any]
    y: NDArray[Any] | None


def read_arrays(path: Path, *, labels: bool = True, schema: Schema | None = None) -> Arrays:
    """Read an NPY or NPZ file; with `labels=False`, y is not read. A model's schema makes error messages specific."""
    names: list[str] = []

    def choose(found: list[str]) -> list[str]:
        names.extend(found)
        if "x" in names:
            return ["x", "y"] if labels and "y" in names else ["x"]
        return names if len(names) == 1 else []

    arrays = npy.load_arrays(path, choose)
    if not arrays:
        raise ValueError(f"{path} must hold 'x' and optionally 'y', or one array; got {listed(names, MOST) or 'none'}.")
    x, y = next(iter(arrays.values())), arrays.get("y") if "x" in names else None
    if schema is not None and x.shape == (schema.shape[1:] if schema.shape[0] == 1 else schema.shape):
        _refuse_single_image(path, x, schema)
    return checked_arrays(path, x, y, 256 if schema is None else schema.levels or 256)


def _refuse_single_image(path: Path, x: NDArray[Any], schema: Schema) -> None:
    if schema.is_image:
        raise ValueError(
            f"the model takes {schema}; {path} holds one image, {x.dtype} {x.shape}. "
            f"Save x[None], of shape {(1, *x.shape)}, as uint8."
        )


def checked_arrays(path: Path, x: NDArray[Any], y: NDArray[Any] | None, levels: int = 256) -> Arrays:
    """Return the samples and labels of a file; refuse arrays that are neither a table nor images."""
    if not x.size:
        raise ValueError(f"{path} holds no numbers; got {x.dtype} {x.shape}. Give at least one sample.")
    images = x.ndim in (3, 4) and x.dtype == np.uint8
    if not images and (x.ndim != 2 or x.dtype.kind not in "biuf"):
        remedy = _uint8_remedy(x, levels) if x.ndim in (3, 4) and x.dtype.kind in "biuf" else ""
        raise ValueError(
            f"{path} must hold numbers (N, D), or images as uint8 (N, C, H, W); got {x.dtype} {x.shape}.{remedy}"
        )
    if y is not None and y.shape != x.shape[:1]:
        raise ValueError(f"{path} must hold one label per sample; got y of shape {y.shape} for {len(x)} samples.")
    if x.ndim == 4 and x.shape[1] not in (1, 3):
        raise ValueError(f"{path} must hold images with 1 or 3 channels, (N, C, H, W); got {x.shape}. Transpose them.")
    return Arrays(x[:, None] if x.ndim == 3 else x, y)


def _uint8_remedy(x: NDArray[Any], levels: int) -> str:
    """How to convert an array to uint8: values in [0, 1] are brightness; others, such as samples, are noisy levels."""
    if x.dtype.kind in "bf" and x.min() >= 0 and x.max() <= 1:
        return f' Save ({levels - 1} * x).round().astype("uint8").'
    return f' Save np.floor(x).clip(0, {levels - 1}).astype("uint8").'


def array_table(path: Path, arrays: Arrays, choose: ColumnChooser, first: int = 0) -> Table:
    """Select the chosen columns of x, with the labels y where the file has them; `first` is the row of x[0]."""
    names = [f"x{i}" for i in range(arrays.x.shape[1])]
    choice = choose(path, names, False)
    labels, label = arrays.y, "y"
    if labels is None and choice.label is not None:
        labels, label = arrays.x[:, choice.label], names[choice.label]
    with np.errstate(over="ignore"):  # numbers beyond float64 become infinite, which is refused later
        x = arrays.x[:, choice.columns].astype(np.float64)
    return Table(
        path,
        tuple(names[i] for i in choice.columns),
        x,
        "" if labels is None else label,
        None if labels is None else _words(labels),
        lambda i: f"row {first + i}",
        {names[i]: _words(arrays.x[:, i]) for i in choice.words},
        None if choice.id is None else _words(arrays.x[:, choice.id]),
    )


def array_images(path: Path, arrays: Arrays, schema: Schema | None) -> Dataset:
    """Convert arrays to images with 256 levels, or of a model's schema."""
    labels = None if arrays.y is None else [class_name(cell) for cell in arrays.y.tolist()]
    c, h, w = arrays.x.shape[1:]
    with prefix_errors(path):
        schema = Schema((c, h, w), 256, classes=class_names(labels or ())) if schema is None else schema
    y = encode_labels(labels, schema.classes, lambda i: f"{path}, row {i}")
    with prefix_errors(path):
        return Dataset(torch.from_numpy(np.ascontiguousarray(arrays.x)), y, schema)


def read_parquet(path: Path, choose: ColumnChooser) -> Table:
    """Read the chosen columns of a Parquet file."""
    pandas = _parquet_module(path, "pandas")
    _check_size(path)
    with _explaining_parquet(path):
        frame = pandas.read_parquet(path)
    values = map(column_values, (frame[name] for name in frame.columns))
    return column_table(path, dict(zip(_names(path, frame), values, strict=True)), choose)


def read_parquet_chunks(path: Path, choose: ColumnChooser, size: int) -> Iterator[Table]:
    """Read a Parquet file as `read_parquet` does, but `size` rows at a time; no more than a row group is in memory."""
    _parquet_module(path, "pandas")
    _check_size(path)
    with _explaining_parquet(path):
        parquet = importlib.import_module("pyarrow.parquet")
        file = parquet.ParquetFile(path)
        empty = file.schema_arrow.empty_table().to_pandas()
    names, first = _names(path, empty), 0
    choice = choose(path, names, True)
    used = [names[i] for i in sorted({*choice.columns, *text_columns(choice)})]
    batches = file.iter_batches(size, columns=used)
    while True:
        with _explaining_parquet(path):
            batch = next(batches, None)
        if batch is None:
            return
        frame = batch.to_pandas()
        columns = {name: column_values(frame[name]) if name in used else np.empty(len(frame)) for name in names}
        yield column_table(path, columns, choose, first)
        first += len(frame)


def parquet_rows(path: Path) -> int:
    """Return the number of rows that a Parquet file says it has."""
    with _explaining_parquet(path):
        return int(importlib.import_module("pyarrow.parquet").read_metadata(path).num_rows)


def _parquet_module(path: Path, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(f"{path}: Parquet files need pandas. Run `pip install pandas pyarrow`.") from None


@contextmanager
def _explaining_parquet(path: Path) -> Iterator[None]:
    try:
        yield
    except ImportError:
        raise ValueError(f"{path}: pandas needs pyarrow to read Parquet. Run `pip install pyarrow`.") from None
    except Exception as error:  # the engines raise errors of their own
        raise ValueError(f"{path} cannot be read as Parquet ({type(error).__name__}). Save it again.") from None


def _names(path: Path, frame: Any) -> list[str]:
    return check_names(path, [str(name) for name in frame.columns])


def column_table(path: Path, columns: Mapping[str, NDArray[Any]], choose: ColumnChooser, first: int = 0) -> Table:
    """Select the chosen columns, which are arrays of numbers or objects; `first` is the number of the first row."""
    names, values = list(columns), list(columns.values())
    choice = choose(path, names, True)
    words = choice.words | {
        i for i in choice.undeclared if values[i].dtype == object and holds_words(values[i].tolist())
    }

    def place(i: int) -> str:
        return f"row {first + i}"

    chosen = [
        np.zeros(len(values[i])) if i in words else _numbers(path, names[i], values[i], place, choice)
        for i in choice.columns
    ]
    label = "" if choice.label is None else names[choice.label]
    labels = None if choice.label is None else _words(values[choice.label])
    ids = None if choice.id is None else _row_names(values[choice.id])
    text = {names[i]: _words(values[i]) for i in words}
    return Table(
        path, tuple(names[i] for i in choice.columns), np.stack(chosen, axis=1), label, labels, place, text, ids
    )


def _check_size(path: Path) -> None:
    """Refuse a file that unpacks to far more than its size, as `npy` does; pandas refuses what pyarrow cannot read."""
    try:
        held = importlib.import_module("pyarrow.parquet").read_metadata(path)
    except Exception:
        return
    size, needed = path.stat().st_size, 8 * held.num_rows * held.num_columns
    if npy.is_overpacked(needed, size):
        raise ValueError(
            f"{path} holds {held.num_rows:,} rows of {held.num_columns:,} columns in {size:,} bytes; above "
            f"{npy.FREE:,} bytes it may unpack to {npy.RATIO} times its size. Save it without compression."
        )


def column_values(series: Any) -> NDArray[Any]:
    """A column as an array: numbers as they are, others as objects, so that dates stay dates and missing cells None."""
    values: NDArray[Any] = series.to_numpy()
    if values.dtype.kind not in "biuf":
        values = series.astype(object).where(series.notna(), None).to_numpy()
    return values


def as_pandas(rows: Any) -> Any:
    """Convert what may hold words to a data frame of pandas, if it is installed; other rows stay as they are.

    These are data frames of polars, tables of pyarrow, and arrays with text, such as a `ColumnTransformer` makes.
    """
    if find_spec("pandas") is None:
        return rows
    pandas: Any = importlib.import_module("pandas")
    if isinstance(rows, np.ndarray):
        text = rows.ndim == 2 and rows.dtype.kind in "OU" and any(isinstance(cell, str) for cell in rows.flat)
        return pandas.DataFrame(rows).infer_objects() if text else rows
    if hasattr(rows, "column_names"):  # pyarrow
        return rows.to_pandas()
    if not is_polars(rows):
        return rows
    kinds = zip(rows.columns, map(str, rows.dtypes), strict=True)
    categories = dict.fromkeys((name for name, kind in kinds if kind.startswith(("Categorical", "Enum"))), "category")
    return pandas.DataFrame({name: rows[name].to_numpy() for name in rows.columns}).astype(categories)


def is_polars(rows: Any) -> bool:
    """Whether rows are a data frame of polars, which is not imported for it."""
    return type(rows).__name__ == "DataFrame" and type(rows).__module__.partition(".")[0] == "polars"


def _words(column: NDArray[Any]) -> list[str]:
    return [class_name(cell) for cell in column.tolist()]


def _row_names(column: NDArray[Any]) -> list[str]:
    """The cells of a column that names rows: text stays as it is, as in a text file; 007 is not 7."""
    return [cell.strip() if isinstance(cell, str) else class_name(cell) for cell in column.tolist()]


def _numbers(
    path: Path, name: str, column: NDArray[Any], place: Callable[[int], str], choice: ColumnChoice
) -> NDArray[np.float64]:
    if column.dtype.kind in "biuf":
        return column.astype(np.float64)
    numbers = np.empty(len(column))
    for row, cell in enumerate(column.tolist()):
        try:
            numbers[row] = np.nan if cell is None else parse_number(cell) if isinstance(cell, str) else float(cell)
        except (TypeError, ValueError, OverflowError):
            labelled = choice.label is not None
            remedy = text_hint(name, column.tolist(), labelled=labelled) if choice.training else ""
            refuse_cell(path, cell, place(row), name, remedy)
    return numbers

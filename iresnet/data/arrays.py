"""Arrays: .npy, .npz and Parquet.

An NPY file is one array; an NPZ file holds `x` and perhaps the labels `y`, or one array. Shape (N, D) is a table, whose
columns are called x0, x1, ...; bytes of shape (N, H, W) or (N, C, H, W) are images. Nothing is unpickled. Parquet
needs pandas. Errors name the row, counted from 0.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .dataset import Dataset, Schema
from .labels import class_name, class_names, encode
from .table import Choose, Table, label_hint


class Arrays(NamedTuple):
    """The rows of a file, and its labels where it has some."""

    x: NDArray[Any]
    y: NDArray[Any] | None


def open_arrays(path: Path, *, labels: bool = True, schema: Schema | None = None) -> Arrays:
    """What an NPY or NPZ file holds; without labels, y is not looked at. A model's schema makes messages exact."""
    with path.open("rb") as file:
        try:
            content: Any = np.load(file, allow_pickle=False)
            content = {"x": content} if isinstance(content, np.ndarray) else content
            names = list(content)
            x = content["x" if "x" in names else names[0]] if "x" in names or len(names) == 1 else None
            y = content["y"] if labels and "y" in names and "x" in names else None
        except Exception as error:  # zipfile, zlib and numpy raise what they like at a damaged file
            why = (str(error) or type(error).__name__).splitlines()[0]
            raise ValueError(f"{path} cannot be read as an array ({why}). Save it anew.") from None
    if x is None:
        raise ValueError(f"{path} must hold 'x' and perhaps 'y', or one array; got {', '.join(names) or 'none'}.")
    if schema is not None and x.shape == (schema.shape[1:] if schema.shape[0] == 1 else schema.shape):
        _refuse_one(path, x, schema)
    return _checked(path, x, y, 256 if schema is None else schema.levels or 256)


def _refuse_one(path: Path, x: NDArray[Any], schema: Schema) -> None:
    if schema.is_image:
        raise ValueError(
            f"the model takes {schema}; {path} holds one image, {x.dtype} {x.shape}. "
            f"Give x[None], of shape {(1, *x.shape)}, as bytes."
        )


def _checked(path: Path, x: NDArray[Any], y: NDArray[Any] | None, levels: int) -> Arrays:
    images = x.ndim in (3, 4) and x.dtype == np.uint8
    if not images and (x.ndim != 2 or x.dtype.kind not in "biuf"):
        remedy = _as_bytes(x, levels) if x.ndim in (3, 4) and x.dtype.kind in "biuf" and x.size else ""
        raise ValueError(
            f"{path} must hold numbers (N, D), or images as bytes (N, C, H, W); got {x.dtype} {x.shape}.{remedy}"
        )
    if y is not None and y.shape != x.shape[:1]:
        raise ValueError(f"{path} must hold one label a row; got y of shape {y.shape} for {len(x)} rows.")
    if x.ndim == 4 and x.shape[1] not in (1, 3):
        raise ValueError(f"{path} must hold images of 1 or 3 channels, (N, C, H, W); got {x.shape}. Transpose them.")
    return Arrays(x[:, None] if x.ndim == 3 else x, y)


def _as_bytes(x: NDArray[Any], levels: int) -> str:
    """How numbers become bytes: those in [0, 1] are parts of the brightest; others, as samples, levels and noise."""
    if x.dtype.kind in "bf" and x.min() >= 0 and x.max() <= 1:
        return f' Save ({levels - 1} * x).round().astype("uint8").'
    return f' Save np.floor(x).clip(0, {levels - 1}).astype("uint8").'


def table(path: Path, arrays: Arrays, choose: Choose) -> Table:
    """The chosen columns of x, with the labels y where there are some."""
    names = [f"x{i}" for i in range(arrays.x.shape[1])]
    chosen = _table(path, names, [*arrays.x.T], choose, named=False)
    if arrays.y is None:
        return chosen
    return replace(chosen, label="y", labels=[class_name(cell) for cell in arrays.y.tolist()])


def images(path: Path, arrays: Arrays, schema: Schema | None) -> Dataset:
    """Images of 256 levels, or of what a model's schema says."""
    labels = None if arrays.y is None else [class_name(cell) for cell in arrays.y.tolist()]
    c, h, w = arrays.x.shape[1:]
    schema = Schema((c, h, w), 256, classes=class_names(labels or ())) if schema is None else schema
    labelled = labels is not None and schema.classes
    y = encode(labels or [], schema.classes, lambda i: f"{path}, row {i}") if labelled else None
    try:
        return Dataset(torch.from_numpy(np.ascontiguousarray(arrays.x)), y, schema)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parquet(path: Path, choose: Choose) -> Table:
    """The chosen columns of a Parquet file."""
    try:
        pandas = importlib.import_module("pandas")
    except ImportError:
        raise ValueError(f"{path}: Parquet files need pandas. Run `pip install pandas pyarrow`.") from None
    try:
        frame = pandas.read_parquet(path)
    except ImportError:
        raise ValueError(f"{path}: pandas needs pyarrow to read Parquet. Run `pip install pyarrow`.") from None
    except Exception as error:  # the engines raise errors of their own
        raise ValueError(f"{path} cannot be read as Parquet ({type(error).__name__}). Save it anew.") from None
    columns = [_plain(frame[name]) for name in frame.columns]
    return _table(path, [str(name) for name in frame.columns], columns, choose, named=True)


def _plain(series: Any) -> NDArray[Any]:
    """Numbers as they are; other cells as Python objects, so that a date is no number and what is missing is None."""
    values: NDArray[Any] = series.to_numpy()
    if values.dtype.kind not in "biuf":
        values = series.astype(object).where(series.notna(), None).to_numpy()
    return values


def _table(path: Path, names: list[str], columns: list[NDArray[Any]], choose: Choose, *, named: bool) -> Table:
    choice = choose(path, names, named)
    chosen = [_numbers(path, names[i], columns[i], unlabelled=choice.open) for i in choice.columns]
    label = "" if choice.label is None else names[choice.label]
    labels = None if choice.label is None else [class_name(cell) for cell in columns[choice.label].tolist()]
    return Table(
        path, tuple(names[i] for i in choice.columns), np.stack(chosen, axis=1), label, labels, lambda i: f"row {i}"
    )


def _numbers(path: Path, name: str, column: NDArray[Any], *, unlabelled: bool) -> NDArray[np.float64]:
    if column.dtype.kind in "biuf":
        return column.astype(np.float64)
    numbers = np.empty(len(column))
    for row, cell in enumerate(column.tolist()):
        try:
            numbers[row] = np.nan if cell is None else float(cell)
        except (TypeError, ValueError):
            remedy = label_hint(name, column.tolist()) if unlabelled else ""
            raise ValueError(
                f"{path}: {cell!r:.40} is not a number in row {row}, column {name!r}. Correct it, or remove the column."
                f"{remedy}"
            ) from None
    return numbers

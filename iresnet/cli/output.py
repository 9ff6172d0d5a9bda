"""Input and output of the commands: data of a run; samples in the units of the data, as arrays, tables and plots."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor

from .. import atomic
from ..data import Dataset, Schema, delimited, npy, read
from ..data.chunked import Chunk, ChunkedSource
from ..device import choose_device
from ..evaluate.chunks import CHUNK, memory_factor
from ..evaluate.contributions import ROWS
from ..plots import plot_columns, plot_image_grid, plot_points
from ..progress import between
from ..run import Run
from ..spelling import printable
from ..train.distributed import local_rank, world_size
from .console import on_terminal, use_threads

#: The largest number of samples or lines that can be requested.
MOST = 10_000_000

#: The largest number of samples, and of numbers, in a chunk that is read and written at a time.
LARGEST, NUMBERS = 50_000, 200_000

#: Suffixes that are removed from `--out`: each command adds its own.
SUFFIXES = (".npz", ".csv", ".png")


def open_run(folder: Path, device: str, data_dir: Path | None = None) -> tuple[Run, str]:
    """Open a run, with another dataset directory if given, and set the threads; return it and the device.

    Under torchrun, each process of a machine has a GPU of its own.
    """
    run = Run.open(folder).with_data_folder(data_dir)
    use_threads(run.schema.dimension)
    chosen = choose_device(device)
    return run, f"cuda:{local_rank()}" if chosen == "cuda" and world_size() > 1 else chosen


def read_data(run: Run, source: str | None, split: str = "test", *, labels: bool = False, **options: Any) -> Dataset:
    """Return the data of a source in the form that the run's model takes, or one split of the run's own data.

    `options` are those of `data.read` for a table.
    """
    if source is not None:
        settings = run.experiment.data
        return read(source, run.schema, folder=settings.folder, size=settings.size, labels=labels, **options)
    splits, known = run.splits(), ("test", "validation", "train")
    if split not in known:
        raise ValueError(f"--split must be one of {', '.join(known)}; got {split!r}.")
    return splits.test if split == "test" else splits.parts[split]


def chunked_data(run: Run, source: str, device: str, **options: Any) -> ChunkedSource:
    """Return the data of a source in the form that the run's model takes, to be read in chunks."""
    settings, size = run.experiment.data, chunk_rows(run.schema.dimension, torch.device(device))
    return ChunkedSource(source, run.schema, size, settings.folder, settings.size, **options)


def each_chunk(source: ChunkedSource, first: int = 0, end: int | None = None, rows: int = 0) -> Iterator[Chunk]:
    """Iterate over the chunks first, ..., end - 1 of a source, each a part of the work; `rows` are done already."""
    begin: float | None = None if first else 0.0
    for chunk in islice(source.starting_at(first), None if end is None else end - first):
        rows, done = rows + chunk.rows, chunk.fraction or 0.0
        with between(done * first / (first + 1) if begin is None else begin, done, f"{rows:,} rows"):
            yield chunk
        begin = done


def chunk_rows(dimension: int, device: torch.device) -> int:
    """Return the number of samples that are read and written at a time: fewer if they are large.

    It is a multiple of the numbers that models evaluate at a time, so results are those of all samples at once.

    >>> [chunk_rows(dimension, torch.device("cpu")) for dimension in (4, 64, 784)]
    [50000, 3000, 1000]
    """
    step = math.lcm(CHUNK * memory_factor(device), ROWS)
    return max(step, min(LARGEST, NUMBERS // dimension) // step * step)


def with_suffix(path: Path, suffix: str) -> Path:
    """Return the path with a suffix; other dots in the name stay, and a suffix is not doubled.

    >>> with_suffix(Path("t0.5"), ".npz").name, with_suffix(Path("t.npz"), ".png").name
    ('t0.5.npz', 't.png')
    """
    if path.name in ("", ".."):
        raise ValueError(f"--out must be a file path without suffix; got {str(path)!r}. Use e.g. {path / 'samples'}.")
    stem = path.stem if path.suffix in SUFFIXES else path.name
    return path.with_name(stem + suffix)


def save_samples(path: Path, rows: Tensor, schema: Schema) -> Path:
    """Save samples in the units of the data: a table as CSV with column names, images as NPZ with the array `x`."""
    if schema.is_image:
        return npy.save_npz(with_suffix(path, ".npz"), x=rows.detach().cpu().numpy())
    return atomic.write(with_suffix(path, ".csv"), format_rows(rows, schema))


def try_to_save(run: Run, write: Callable[[], Path]) -> tuple[Path | None, str]:
    """Write a file of a result that is printed in any case; return its path, or None and the reason."""
    try:
        return write(), ""
    except OSError as error:
        cause = error.__cause__
        reason = cause.strerror if isinstance(cause, OSError) else str(error).rstrip(".")
        remedy = "Free disk space, or copy the run to a folder that can be written."
        return None, f"the result is not saved, since {run.output} cannot be written: {reason}. {remedy}"


def print_csv(text: str) -> None:
    """Print a table, or a part of one; on a terminal without control characters."""
    typer.echo(printable(text, lines=True) if on_terminal() else text, nl=False)


def format_rows(rows: Tensor, schema: Schema) -> str:
    """Format rows of a table as CSV."""
    return delimited.format_csv(schema.names, cells(rows, schema))


def cells(rows: Tensor, schema: Schema) -> list[tuple[Any, ...]]:
    """Return the rows of a table with values that its columns may have, and the names of categories."""
    columns: list[list[Any]] = schema.restore(rows.detach().cpu().double()).T.tolist()
    for i, kind in enumerate(schema.kinds):
        if kind.name == "category":
            columns[i] = ["" if math.isnan(code) else kind.categories[int(code)] for code in columns[i]]
    return list(zip(*columns, strict=True))


def plot_samples(path: Path, rows: Tensor, data: Tensor, schema: Schema) -> Path:
    """Plot samples to PATH.png: a grid of images, or points or columns beside the data."""
    path, rows, data = with_suffix(path, ".png"), rows.cpu(), data.cpu()
    if schema.is_image:
        return plot_image_grid(rows, path, levels=schema.levels or 256)
    if schema.dimension == 2:
        return plot_points(data, rows, path)
    return plot_columns(data, rows, schema.names, path)

"""What the commands read and write: rows of a run, arrays in the units of the data, tables of numbers, pictures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from torch import Tensor

from .. import atomic
from ..data import Dataset, Schema, delimited, npy, read
from ..plots import plot_columns, plot_image_grid, plot_points
from ..run import Run
from .console import choose_device, use_threads

RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run folder, e.g. runs/demo, or a model that comes with the library.")
]
DataOption = Annotated[
    str | None, typer.Option("--data", help="Rows to take instead of the run's own: a file, a folder, or a set's name.")
]
DataFolder = Annotated[
    Path | None, typer.Option("--data-dir", help="Where downloaded sets lie.", show_default="as in training")
]
Split = Annotated[str, typer.Option(help="Which of the run's own rows: test, validation or train.")]

#: How many samples, or lines between rows, can be asked for.
MOST = 10_000_000

#: What `--out` need not end in: each command adds its own.
ENDINGS = (".npz", ".csv", ".png")


def open_run(folder: Path, device: str, data_dir: Path | None = None) -> tuple[Run, str]:
    """The run in a folder, downloaded sets looked for in `data_dir`, and the device of this name; sets the threads."""
    run = Run.open(folder).with_data_folder(data_dir)
    use_threads(run.schema.dimension)
    return run, choose_device(device)


def rows_of(run: Run, source: str | None, split: str = "test", *, labels: bool = False) -> Dataset:
    """The rows of a source, read as the run's model needs them, or one part of the run's own data."""
    if source is not None:
        settings = run.experiment.data
        return read(source, run.schema, folder=settings.folder, size=settings.size, labels=labels)
    splits = run.splits()
    parts = {"test": splits.test, "validation": splits.validation, "train": splits.train}
    if split not in parts:
        raise ValueError(f"split must be one of {', '.join(parts)}; got {split!r}.")
    return parts[split]


def check_tolerance(tolerance: float | None) -> None:
    """Refuse a tolerance that is no length."""
    if tolerance is not None and not 0 < tolerance < math.inf:
        raise ValueError(f"tolerance must be positive and finite; got {tolerance}.")


def with_ending(path: Path, ending: str) -> Path:
    """The path with an ending; dots in its name stay, and an ending that is there already is not doubled.

    >>> with_ending(Path("t0.5"), ".npz").name, with_ending(Path("t.npz"), ".png").name
    ('t0.5.npz', 't.png')
    """
    if path.name in ("", ".."):
        raise ValueError(f"--out must name a file, without its ending; got {str(path)!r}. Use e.g. {path / 'made'}.")
    stem = path.stem if path.suffix in ENDINGS else path.name
    return path.with_name(stem + ending)


def save_rows(path: Path, rows: Tensor, schema: Schema) -> Path:
    """Rows in their own units: a CSV with the column names for a table, an NPZ with the array `x` for images."""
    values = rows.detach().cpu().numpy()
    if schema.is_image:
        return npy.save_npz(with_ending(path, ".npz"), x=values)
    return atomic.write(with_ending(path, ".csv"), delimited.format_csv(schema.names, values.tolist()))


def draw_rows(path: Path, rows: Tensor, data: Tensor, schema: Schema) -> Path:
    """A picture of samples, PATH.png: a grid of images, or points and columns beside the data."""
    path, rows, data = with_ending(path, ".png"), rows.cpu(), data.cpu()
    if schema.is_image:
        return plot_image_grid(rows, path, levels=schema.levels or 256)
    if schema.dimension == 2:
        return plot_points(data, rows, path)
    return plot_columns(data, rows, schema.names, path)

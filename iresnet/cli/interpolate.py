"""`iresnet interpolate`: straight lines between codes, decoded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from torch import Tensor

from ..data import Dataset
from ..data.dataset import check_seed
from ..evaluate import interpolate as between
from ..fixed_point import ConvergenceError
from ..plots import plot_interpolations
from ..run import Run
from .console import Device, console, waiting
from .output import MOST, DataFolder, DataOption, RunFolder, Split, draw_rows, open_run, rows_of, save_rows, with_ending


def interpolate(
    run: RunFolder,
    data: DataOption = None,
    split: Split = "test",
    pairs: Annotated[int, typer.Option(help="How many pairs of rows.", min=1, max=MOST)] = 6,
    steps: Annotated[int, typer.Option(help="Steps from one row to the other, both counted.", min=2, max=MOST)] = 9,
    seed: Annotated[int, typer.Option(help="Seed that picks the pairs.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Path without ending.", show_default="RUN/interpolation")] = None,
    data_dir: DataFolder = None,
    device: Device = "auto",
) -> None:
    """Walk in a straight line from the code of one row to that of another, and decode every step.

    Example: iresnet interpolate runs/demo --pairs 8 --steps 11
    """
    check_seed(seed)
    (opened, chosen), screen = open_run(run, device, data_dir), console()
    rows = rows_of(opened, data, split).to(chosen)
    with waiting(screen, f"Solving {pairs * steps:,} codes …"):
        x = _lines(opened, rows, chosen, pairs=pairs, steps=steps, seed=seed)
    path = opened.output / "interpolation" if out is None else out
    flat = x.flatten(0, 1)
    saved = save_rows(path, x if opened.schema.is_image else flat, opened.schema)
    if opened.schema.is_image:
        picture = plot_interpolations(x.cpu(), with_ending(path, ".png"), levels=opened.schema.levels or 256)
    else:
        picture = draw_rows(path, flat, rows.x, opened.schema)
    screen.say(f"{len(x)} pairs in {saved}, drawn in {picture}")


def _lines(run: Run, rows: Dataset, device: str, **options: Any) -> Tensor:
    try:
        return between(run.model(device=device), rows, **options)
    except ConvergenceError as error:
        if error.lipschitz is not None and error.lipschitz < 1:
            raise
        raise RuntimeError(
            "a line between codes is decoded by a proven inverse, and not every block is proven to be a contraction. "
            f"See: iresnet certify {run.folder}. What the iteration does to the codes of rows: iresnet invert "
            f"{run.folder}"
        ) from None

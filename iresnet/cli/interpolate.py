"""`iresnet interpolate`: straight lines between codes, decoded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from ..evaluation import interpolate as between
from ..figures import interpolation_picture
from ..run import Run
from .console import Device, choose_device, console, use_threads
from .output import DataOption, RunFolder, Split, draw_rows, rows_of, save_rows


def interpolate(
    run: RunFolder,
    data: DataOption = None,
    split: Split = "test",
    pairs: Annotated[int, typer.Option(help="How many pairs of rows.", min=1)] = 6,
    steps: Annotated[int, typer.Option(help="Steps from one row to the other, both counted.", min=2)] = 9,
    seed: Annotated[int, typer.Option(help="Seed that picks the pairs.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Path without ending. [default: RUN/interpolation]")] = None,
    device: Device = "auto",
) -> None:
    """Walk in a straight line from the code of one row to that of another, and decode every step.

    Example: iresnet interpolate runs/demo --pairs 8 --steps 11
    """
    opened = Run.open(run)
    use_threads(math.prod(opened.schema.shape))
    chosen = choose_device(device)
    rows = rows_of(opened, data, split).to(chosen)
    x = between(opened.model(device=chosen), rows, pairs=pairs, steps=steps, seed=seed)
    path = run / "interpolation" if out is None else out
    flat = x.flatten(0, 1)
    saved = save_rows(path, x if opened.schema.is_image else flat, opened.schema)
    if opened.schema.is_image:
        picture = interpolation_picture(x.cpu(), path.with_suffix(".png"), levels=opened.schema.levels or 256)
    else:
        picture = draw_rows(path.with_suffix(".png"), flat.cpu(), rows.x.cpu(), opened.schema)
    console().print(f"{len(x)} pairs in {saved}, drawn in {picture}", highlight=False, soft_wrap=True)

"""`iresnet interpolate`: decode straight lines between the codes of two samples."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer
from torch import Tensor

from ..data import Dataset
from ..data.sampling import check_seed
from ..evaluate import interpolate as between
from ..fixed_point import ConvergenceError
from ..plots import plot_interpolations
from ..run import Run
from ..spelling import counted
from .console import console, result, waiting
from .options import DataFolder, DataOption, Device, RunFolder, Split
from .output import MOST, open_run, plot_samples, read_data, save_samples, with_suffix


def interpolate(
    run: RunFolder,
    data: DataOption = None,
    split: Split = "test",
    pairs: Annotated[int, typer.Option(help="How many pairs of samples.", min=1, max=MOST)] = 6,
    steps: Annotated[int, typer.Option(help="Points on each line, including both ends.", min=2, max=MOST)] = 9,
    seed: Annotated[int, typer.Option(help="Seed for the choice of pairs.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Output path, without suffix.", show_default="RUN/interpolation")
    ] = None,
    data_dir: DataFolder = None,
    device: Device = "auto",
) -> None:
    """Interpolate linearly between the codes of two samples, and decode every point of the line.

    Example: iresnet interpolate runs/demo --pairs 8 --steps 11
    """
    check_seed(seed)
    (opened, chosen), screen = open_run(run, device, data_dir), console()
    rows = read_data(opened, data, split).to(chosen)
    with waiting(screen, f"Decoding {pairs * steps:,} codes …"):
        x = _interpolate(opened, rows, chosen, pairs=pairs, steps=steps, seed=seed)
    path = opened.output / "interpolation" if out is None else out
    flat = x.flatten(0, 1)
    saved = save_samples(path, x if opened.schema.is_image else flat, opened.schema)
    if opened.schema.is_image:
        picture = plot_interpolations(x.cpu(), with_suffix(path, ".png"), levels=opened.schema.levels or 256)
    else:
        picture = plot_samples(path, flat, rows.x, opened.schema)
    content = {"pairs": len(x), "steps": steps, "file": saved, "plot": picture}
    result(content, f"{counted(len(x), 'pair')} in {saved}, plotted in {picture}")


def _interpolate(run: Run, rows: Dataset, device: str, **options: Any) -> Tensor:
    try:
        return between(run.model(device=device), rows, **options)
    except ConvergenceError as error:
        if error.lipschitz is not None and error.lipschitz < 1:
            raise
        folder = quote(str(run.folder))
        raise RuntimeError(
            "interpolation needs a proven inverse, and not every block is proven to be a contraction. See: iresnet "
            f"certify {folder}. For the inverse without a proof: iresnet invert {folder}"
        ) from None

"""`iresnet export`: write a trained model as files that run without this library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from ..export import export as write_files
from ..run import Run
from ..train.objective import bin_centres
from .console import console
from .output import RunFolder


def export(
    run: RunFolder,
    out: Annotated[Path | None, typer.Option(help="The output folder.", show_default="RUN/export")] = None,
) -> None:
    """Export plain weights, a torch.export program and, if its exporter is installed, ONNX.

    Example: iresnet export runs/demo --out deploy
    """
    opened = Run.open(run)
    schema = opened.schema
    kind = torch.float32 if schema.levels is None else torch.uint8
    example = bin_centres(torch.zeros(2, *schema.shape, dtype=kind), schema.levels)
    example = schema.restore(example + 1) if schema.kinds else example  # 0 is not positive
    folder = opened.output / "export" if out is None else out
    written = write_files(opened.model(), example, folder, about={"schema": schema.to_dict()})
    for name, path in written.items():
        console().say(f"{name:<10}{path}")

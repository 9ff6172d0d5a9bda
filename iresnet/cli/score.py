"""`iresnet score`: how likely, and how strange, every row of a file is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from .. import atomic
from ..evaluation import anomaly, has_density, has_head, log_likelihood, logits
from ..run import Run
from .console import Device, choose_device, console, use_threads
from .output import RunFolder, csv_text, rows_of


def score(
    run: RunFolder,
    file: Annotated[str, typer.Argument(metavar="FILE", help="A table, a folder of images, or a set's name.")],
    out: Annotated[Path | None, typer.Option(help="The CSV to write. [default: print it]")] = None,
    draws: Annotated[int, typer.Option(help="Draws of noise a likelihood is averaged over.", min=2)] = 16,
    device: Device = "auto",
) -> None:
    """Score every row, in the units of the file, as CSV.

    log_likelihood: ln p of the row in nats, with its standard error and the bound of its bias; anomaly: the share of
    held-out rows that are more likely (1: none is less likely); for a model with a head also the class and its
    probability.

    Example: iresnet score runs/demo new.csv --out scores.csv
    """
    opened = Run.open(run)
    use_threads(math.prod(opened.schema.shape))
    chosen = choose_device(device)
    rows, model = rows_of(opened, file).to(chosen), opened.model(device=chosen)
    columns: dict[str, list[Any]] = {"row": list(range(len(rows)))}
    if has_density(model):
        e = log_likelihood(model, rows, draws=draws)
        columns["log_likelihood"] = e.value.tolist()
        columns["standard_error"] = e.standard_error.tolist()
        columns["bias_bound"] = e.bias_bound.tolist()
        if rows.schema.levels is not None:
            columns["bits_per_dim"] = e.bits_per_dim().value.tolist()
        columns["anomaly"] = anomaly(e.value.cpu(), opened.reference()).tolist()
    if has_head(model):
        best = torch.softmax(logits(model, rows).double(), dim=1).max(dim=1)
        columns["class"] = [opened.schema.classes[i] for i in best.indices.tolist()]
        columns["probability"] = best.values.tolist()
    text = csv_text(list(columns), list(zip(*columns.values(), strict=True)))
    if out is None:
        typer.echo(text, nl=False)
        return
    atomic.write(out, text)
    console().print(f"{len(rows)} rows scored in {out}", highlight=False, soft_wrap=True)

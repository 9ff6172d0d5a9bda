"""`iresnet score`: how likely, and how strange, every row of a file is."""

from __future__ import annotations

import sys
from pathlib import Path
from shlex import join
from typing import Annotated, Any

import torch
import typer
from torch import nn

from .. import atomic
from ..data import Dataset, delimited
from ..evaluate import anomaly, atypicality, has_density, has_head, log_likelihood, logits
from ..run import Run
from ..run.missing import is_run
from ..run.weights import resolve_folder
from ..spelling import counted, printable
from .console import Device, console, waiting
from .output import DataFolder, RunFolder, open_run, rows_of


def score(
    run: RunFolder,
    file: Annotated[str, typer.Argument(metavar="FILE", help="A table, a folder of images, or a set's name.")],
    out: Annotated[Path | None, typer.Option(help="The CSV to write.", show_default="print it")] = None,
    draws: Annotated[int, typer.Option(help="Draws of noise a likelihood is averaged over.", min=2, max=100_000)] = 8,
    data_dir: DataFolder = None,
    device: Device = "auto",
) -> None:
    """Score every row, in the units of the file, as CSV.

    log_likelihood is ln p of the row in nats, with its standard error and the bound of its bias.

    anomaly is the share of validation rows that are more likely (1: all of them).

    atypicality is the share of validation rows whose log-likelihood is closer to the mean of all of them (1: all of
    them are): it also notices rows that are too likely, such as blank images.

    A model with a head adds the class and its probability.

    A class or file that begins like a formula (=, +, -, @) gets an apostrophe before it; iresnet reads it without.

    Example: iresnet score runs/mine new.csv --out scores.csv
    """
    if is_run(Path(file)) and not is_run(resolve_folder(run)):
        raise ValueError(f"the run folder comes first. Use: {join(['iresnet', 'score', file, str(run)])}")
    (opened, chosen), screen = open_run(run, device, data_dir), console()
    rows, model = rows_of(opened, file).to(chosen), opened.model(device=chosen)
    with waiting(screen, f"Scoring {len(rows):,} rows …"):
        columns = _columns(opened, model, rows, draws)
    text = delimited.format_csv(list(columns), list(zip(*columns.values(), strict=True)))
    if out is None:
        typer.echo(printable(text, lines=True) if on_terminal() else text, nl=False)
        return
    atomic.write(out, text)
    screen.say(f"{counted(len(rows), 'row')} scored in {out}")


def on_terminal() -> bool:
    """Whether somebody is looking at what is printed."""
    return sys.stdout.isatty()


def _columns(run: Run, model: nn.Module, rows: Dataset, draws: int) -> dict[str, list[Any]]:
    """The table, column by column: what the rows are called, and all that the model says of them."""
    columns: dict[str, list[Any]] = {"row": list(range(len(rows)))}
    if rows.names:
        columns["file"] = list(rows.names)
    if has_density(model):
        e = log_likelihood(model, rows, draws=draws)
        columns["log_likelihood"] = e.value.tolist()
        columns["standard_error"] = e.standard_error.tolist()
        columns["bias_bound"] = e.bias_bound.tolist()
        if rows.schema.levels is not None:
            columns["bits_per_dim"] = e.bits_per_dim().value.tolist()
        columns["anomaly"] = anomaly(e.value.cpu(), run.reference()).tolist()
        columns["atypicality"] = atypicality(e.value.cpu(), run.reference()).tolist()
    if has_head(model):
        best = torch.softmax(logits(model, rows).double(), dim=1).max(dim=1)
        columns["class"] = [run.schema.classes[i] for i in best.indices.tolist()]
        columns["probability"] = best.values.tolist()
    return columns

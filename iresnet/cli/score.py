"""`iresnet score`: log-likelihood, anomaly scores and class of every row of a file, as CSV."""

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
from .output import DataFolder, RunFolder, open_run, read_data


def score(
    run: RunFolder,
    file: Annotated[str, typer.Argument(metavar="FILE", help="A table, a folder of images, or a dataset.")],
    out: Annotated[Path | None, typer.Option(help="The CSV file to write.", show_default="print it")] = None,
    draws: Annotated[int, typer.Option(help="Noise draws per sample for the likelihood.", min=2, max=100_000)] = 8,
    data_dir: DataFolder = None,
    device: Device = "auto",
) -> None:
    """Score every row of a file or image of a folder, and write a CSV file.

    log_likelihood is ln p(x) in nats and in the units of the file, with its standard error and a bound on its bias.

    anomaly is the fraction of validation data that is more likely (1: all of it).

    atypicality is the fraction of validation data whose log-likelihood is closer to the mean (1: all of it). It also
    detects inputs that are too likely, such as blank images.

    A model with a classifier adds the class and its probability.

    A class or file name that begins like a formula (=, +, -, @) gets a leading apostrophe, which iresnet ignores when
    reading.

    Example: iresnet score runs/mine new.csv --out scores.csv
    """
    if is_run(Path(file)) and not is_run(resolve_folder(run)):
        raise ValueError(f"the run folder comes first. Use: {join(['iresnet', 'score', file, str(run)])}")
    (opened, chosen), screen = open_run(run, device, data_dir), console()
    rows, model = read_data(opened, file).to(chosen), opened.model(device=chosen)
    with waiting(screen, f"Scoring {len(rows):,} samples …"):
        columns = _columns(opened, model, rows, draws)
    text = delimited.format_csv(list(columns), list(zip(*columns.values(), strict=True)))
    if out is None:
        typer.echo(printable(text, lines=True) if on_terminal() else text, nl=False)
        return
    atomic.write(out, text)
    screen.say(f"{counted(len(rows), 'sample')} scored in {out}")


def on_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout.isatty()


def _columns(run: Run, model: nn.Module, rows: Dataset, draws: int) -> dict[str, list[Any]]:
    """Return the table, column by column: the names of the samples and all scores of the model."""
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

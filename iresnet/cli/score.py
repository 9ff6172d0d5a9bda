"""`iresnet score`: log-likelihood, anomaly scores and class of every row of a file, as CSV."""

from __future__ import annotations

from pathlib import Path
from shlex import join
from typing import Annotated, Any

import torch
import typer
from torch import nn

from .. import atomic
from ..data import Dataset, delimited
from ..evaluate import (
    DRAWS,
    Tolerance,
    anomaly,
    atypicality,
    column_gains,
    default_tolerance,
    has_density,
    has_head,
    log_likelihood,
    logits,
)
from ..run import Run
from ..run.missing import is_run
from ..run.weights import resolve_folder
from ..spelling import counted
from .completion import complete_data
from .console import Device, console, result, waiting
from .output import DataFolder, RunFolder, open_run, print_table, read_data

#: The names of columns that are written; an id column with such a name gets another.
SCORES = ("row", "log_likelihood", "standard_error", "bias_bound", "anomaly", "atypicality", "class", "probability")


def score(
    run: RunFolder,
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="A table, a folder of images, or a dataset.", autocompletion=complete_data),
    ],
    out: Annotated[
        Path | None, typer.Option(help="The CSV file to write; - prints it.", show_default="print it")
    ] = None,
    id_: Annotated[
        str | None,
        typer.Option("--id", help="The column of a table that names its rows.", show_default="as in training"),
    ] = None,
    missing: Annotated[
        str, typer.Option(metavar="refuse|drop", help="What to do with rows of a table with missing cells.")
    ] = "refuse",
    explain: Annotated[
        int, typer.Option(help="Write this many columns of a table that make a row unlikely.", min=0, max=1000)
    ] = 0,
    draws: Annotated[
        int | None,
        typer.Option(
            help="Noise draws per sample for the likelihood.", min=2, max=100_000, show_default="8, or by --tolerance"
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Largest standard error of a log-likelihood, in nats, where at most 16 draws reach it.",
            show_default="beyond 64 dimensions, 2.5 % of the spread of validation data",
        ),
    ] = None,
    data_dir: DataFolder = None,
    device: Device = "auto",
) -> None:
    """Score every row of a file or image of a folder, and write a CSV file.

    log_likelihood is ln p(x) in nats and in the units of the file, with its standard error and a bound on its bias.
    Every sample gets as many draws of noise as --tolerance needs, whatever the other samples are.

    anomaly is the fraction of validation data that is more likely, interpolated and continued beyond them: it ranks
    samples as log_likelihood does, and stays below 1.

    atypicality is the same for the distance of the log-likelihood from its mean. It also detects inputs that are too
    likely, such as blank images.

    --explain 3 adds, for each row of a table, the three columns in which an ordinary value would raise its
    log-likelihood most, and by how many nats.

    A value that a column cannot have, such as an unknown category, has the log-likelihood -inf and the anomaly 1.

    A model with a classifier adds the class and its probability.

    A class or file name that begins like a formula (=, +, -, @) gets a leading apostrophe, which iresnet ignores when
    reading.

    Example: iresnet score runs/mine new.csv --out scores.csv

    Example: zcat new.csv.gz | iresnet score runs/mine - --id name --explain 3
    """
    if missing not in ("refuse", "drop"):
        raise ValueError(f"--missing must be refuse or drop; got {missing!r}.")
    if draws is not None and tolerance is not None:
        raise ValueError(
            f"--draws and --tolerance exclude each other; got {draws} and {tolerance:g}. Give one of them."
        )
    if is_run(Path(file)) and not is_run(resolve_folder(run)):
        raise ValueError(f"the run folder comes first. Use: {join(['iresnet', 'score', file, str(run)])}")
    (opened, chosen), screen = open_run(run, device, data_dir), console()
    rows = read_data(opened, file, id=id_ or "", skip_missing=missing == "drop").to(chosen)
    model = opened.model(device=chosen)
    with waiting(screen, f"Scoring {len(rows):,} samples …"):
        name = "file" if rows.schema.is_image else id_ or rows.schema.id
        columns = _columns(opened, model, rows, draws, name, tolerance)
        columns |= _explanations(model, rows, explain) if explain else {}
    names, lines = list(columns), list(zip(*columns.values(), strict=True))
    if out is None or str(out) == "-":
        print_table(names, lines)
        return
    atomic.write(out, delimited.format_csv(names, lines))
    if (impossible := len(rows) - int(rows.schema.inside(rows.x).sum())) and "log_likelihood" in columns:
        screen.say(
            f"{impossible:,} of {len(rows):,} samples hold a value that its column cannot have; --explain 1 names it."
        )
    result({"samples": len(rows), "file": out}, f"{counted(len(rows), 'sample')} scored in {out}")


def _columns(
    run: Run, model: nn.Module, rows: Dataset, draws: int | None, name: str = "file", tolerance: float | None = None
) -> dict[str, list[Any]]:
    """Return the table, column by column: the names of the samples, in a column `name`, and all scores of the model."""
    columns: dict[str, list[Any]] = {"row": list(rows.rows or range(len(rows)))}
    if rows.names:
        columns[name if name not in SCORES else f"id: {name}"] = list(rows.names)
    if has_density(model):
        wanted: float | Tolerance | None = tolerance
        if draws is None and tolerance is None:
            wanted = default_tolerance(model, rows, run.reference())
        e = log_likelihood(model, rows, draws=draws or DRAWS, tolerance=wanted)
        columns["log_likelihood"] = e.value.tolist()
        columns["standard_error"] = e.standard_error.tolist()
        columns["bias_bound"] = e.bias_bound.tolist()
        if rows.schema.levels is not None:
            columns["bits_per_dim"] = e.bits_per_dim().value.tolist()
        for of in (anomaly, atypicality):  # with all digits of float64, so that samples rank as by ln p
            columns[of.__name__] = [f"{a:.15g}" for a in of(e.value.cpu(), run.reference()).tolist()]
    if has_head(model):
        best = torch.softmax(logits(model, rows).double(), dim=1).max(dim=1)
        columns["class"] = [run.schema.classes[i] for i in best.indices.tolist()]
        columns["probability"] = best.values.tolist()
    return columns


def _explanations(model: nn.Module, rows: Dataset, count: int) -> dict[str, list[Any]]:
    """Return the columns with the largest gains, and these, for every row; empty where no change is a gain."""
    gains = column_gains(model, rows)
    best = gains.topk(min(count, gains.shape[1]), dim=1)
    columns: dict[str, list[Any]] = {}
    for k, (places, values) in enumerate(zip(best.indices.T.tolist(), best.values.T.tolist(), strict=True), 1):
        columns[f"column_{k}"] = [rows.schema.names[i] if g > 0 else "" for i, g in zip(places, values, strict=True)]
        columns[f"gain_{k}"] = [g if g > 0 else "" for g in values]
    return columns

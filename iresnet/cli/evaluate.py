"""`iresnet evaluate`: error, likelihood and inverse of a trained model, each with its error bar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from torch import nn

from .. import atomic
from ..data import Dataset, some
from ..evaluation import Density, Error, Inverse
from ..evaluation import evaluate as judge
from ..residual import EXACT_UP_TO
from ..run import Run
from .console import Device, choose_device, console, use_threads, waiting
from .output import DataOption, RunFolder, Split, rows_of

#: Rows that are judged where a likelihood is an estimate, which takes long.
MANY = 1000

Rows = Annotated[
    int | None,
    typer.Option(
        help="How many rows, drawn at random.", min=1, show_default=f"all up to {EXACT_UP_TO} dimensions, else {MANY:,}"
    ),
]


def evaluate(
    run: RunFolder,
    data: DataOption = None,
    split: Split = "test",
    rows: Rows = None,
    draws: Annotated[int, typer.Option(help="Draws of noise a likelihood is averaged over.", min=2)] = 8,
    device: Device = "auto",
) -> None:
    """Error, likelihood and inverse on rows that were not trained on.

    The test part's figures are kept in RUN/evaluation.json.

    Example: iresnet evaluate runs/demo --split validation
    """
    opened, screen = Run.open(run), console()
    use_threads(opened.schema.dimension)
    chosen = choose_device(device)
    available = rows_of(opened, data, split, labels=True)
    content = judged(opened.model(device=chosen), available, rows, screen, split=data or split, draws=draws)
    screen.print(f"{'rows':<9}{content['rows']:,} of {content['of']:,}", highlight=False)
    for name, cls in (("error", Error), ("density", Density), ("inverse", Inverse)):
        if name in content:
            screen.print(f"{name:<9}{cls(**content[name])}", highlight=False, soft_wrap=True)
    if data is None and split == "test":
        screen.print(f"Figures in {keep(opened, content)}", highlight=False, soft_wrap=True)


def judged(model: nn.Module, data: Dataset, rows: int | None, screen: Console, **options: Any) -> dict[str, Any]:
    """The figures of so many rows, judged where the model is; "of" says how many there were."""
    if rows is None:
        rows = len(data) if data.schema.dimension <= EXACT_UP_TO else MANY
    chosen = some(data, rows).to(next(model.parameters()).device)
    with waiting(screen, f"Judging {len(chosen):,} of {len(data):,} rows …"):
        return judge(model, chosen, **options) | {"of": len(data)}


def keep(run: Run, content: dict[str, Any]) -> Path:
    """Write the figures of the test part, beside what else was known of it."""
    known = run.read_json("evaluation.json")
    return atomic.write(run.folder / "evaluation.json", json.dumps({**known, **content}, indent=1) + "\n")

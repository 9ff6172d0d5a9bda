"""`iresnet evaluate`: error, likelihood and inverse of a trained model, each with its error bar."""

from __future__ import annotations

import json
import math
from typing import Annotated

import typer

from .. import atomic
from ..evaluation import Density, Error, Inverse
from ..evaluation import evaluate as judge
from ..run import Run
from .console import Device, choose_device, console, use_threads
from .output import DataOption, RunFolder, Split, rows_of


def evaluate(
    run: RunFolder,
    data: DataOption = None,
    split: Split = "test",
    draws: Annotated[int, typer.Option(help="Draws of noise a likelihood is averaged over.", min=2)] = 16,
    device: Device = "auto",
) -> None:
    """Error, likelihood and inverse on rows that were not trained on.

    The test part's figures are kept in RUN/evaluation.json.

    Example: iresnet evaluate runs/demo --split validation
    """
    opened = Run.open(run)
    use_threads(math.prod(opened.schema.shape))
    chosen = choose_device(device)
    rows = rows_of(opened, data, split).to(chosen)
    content = judge(opened.model(device=chosen), rows, split=data or split, draws=draws)
    screen = console()
    for name, cls in (("error", Error), ("density", Density), ("inverse", Inverse)):
        if name in content:
            screen.print(f"{name:<9}{cls(**content[name])}", highlight=False, soft_wrap=True)
    if data is None and split == "test":
        kept = opened.read_json("evaluation.json")
        path = atomic.write(run / "evaluation.json", json.dumps({**kept, **content}, indent=1) + "\n")
        screen.print(f"Figures in {path}", highlight=False, soft_wrap=True)

"""`iresnet report`: one HTML page about a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from .. import atomic
from ..evaluation import evaluate
from ..report import write
from ..report.gather import gather
from ..run import Run
from .console import console, use_threads
from .output import RunFolder


def report(
    run: RunFolder,
    out: Annotated[Path | None, typer.Option(help="The file to write. [default: RUN/report.html]")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the samples and of the rows shown.")] = 0,
) -> None:
    """Write a page about a run: figures, curves, samples, reconstructions, certificate. It needs no network.

    Example: iresnet report runs/demo --out demo.html
    """
    opened = Run.open(run)
    use_threads(math.prod(opened.schema.shape))
    if not opened.read_json("evaluation.json"):
        content = evaluate(opened.model(), opened.splits().test)
        atomic.write(run / "evaluation.json", json.dumps(content, indent=1) + "\n")
    path = write(gather(opened, seed=seed), run / "report.html" if out is None else out)
    console().print(f"Report in {path}", highlight=False, soft_wrap=True)

"""`iresnet report`: one HTML page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..data.dataset import check_seed
from ..report import write
from ..report.gather import gather
from .console import Device, console, waiting
from .evaluate import Rows, evaluated, keep, say_stale
from .output import DataFolder, RunFolder, open_run


def report(
    run: RunFolder,
    out: Annotated[Path | None, typer.Option(help="The file to write.", show_default="RUN/report.html")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the samples and of the rows shown.")] = 0,
    rows: Rows = None,
    data_dir: DataFolder = None,
    device: Device = "auto",
) -> None:
    """Write a page about a run: figures, curves, samples, reconstructions, certificate. It can be read offline.

    The test part is evaluated first, where that has not been done or `--rows` is given.

    Example: iresnet report runs/demo --out demo.html
    """
    check_seed(seed)
    (opened, chosen), screen = open_run(run, device, data_dir), console()
    for name in ("certificate.json", "environment.json"):
        opened.read_json(name)  # what is damaged, or speaks of other weights, is refused before anything is judged
    opened.log()
    if rows is not None or not opened.read_current_json("evaluation.json"):
        say_stale(opened, screen)
        sha256 = opened.sha256()
        content = evaluated(opened.model(device=chosen), opened.splits().test, rows, screen)
        keep(opened, content, sha256)
        screen.print(f"Judged {content['rows']:,} of {content['of']:,} test rows.", highlight=False)
    with waiting(screen, "Drawing samples and solving codes …"):
        path = write(gather(opened, device=chosen, seed=seed), opened.output / "report.html" if out is None else out)
    screen.say(f"Report in {path}")

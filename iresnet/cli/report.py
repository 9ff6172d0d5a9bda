"""`iresnet report`: write one HTML page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..data.sampling import check_seed
from ..report import write
from ..report.gather import gather
from .console import console, result, waiting
from .metrics import Rows, evaluate_some, fitting_splits, save_metrics, warn_stale
from .options import DataFolder, DataOption, Device, RunFolder
from .output import open_run, read_data, try_to_save


def report(
    run: RunFolder,
    out: Annotated[Path | None, typer.Option(help="The file to write.", show_default="RUN/report.html")] = None,
    seed: Annotated[int, typer.Option(help="Seed for the samples and for the choice of test data shown.")] = 0,
    rows: Rows = None,
    data: DataOption = None,
    data_dir: DataFolder = None,
    device: Device = "auto",
) -> None:
    """Write one HTML page about a run: metrics, curves, samples, reconstructions and certificate.

    The page needs no other file. The test split is evaluated first, unless that was done before; `--rows` repeats it.
    With `--data`, other data take its place in the page.

    Example: iresnet report runs/demo --out demo.html

    Example: iresnet report runs/mine --data new.csv
    """
    check_seed(seed)
    (opened, chosen), screen = open_run(run, device, data_dir), console()
    for name in ("certificate.json", "environment.json"):
        opened.read_json(name)  # refuse files that are damaged, or of other weights, before evaluating
    opened.log()
    other = None if data is None else read_data(opened, data, labels=True)
    evaluation: dict[str, Any] | None = None
    if other is not None:
        model = opened.model(device=chosen)
        fitting = fitting_splits(opened, model, screen)
        evaluation = evaluate_some(model, other, rows, screen, split=data, fitting=fitting)
    elif rows is not None or not opened.read_current_json("evaluation.json"):
        warn_stale(opened, screen)
        sha256, model = opened.sha256(), opened.model(device=chosen)
        fitting = fitting_splits(opened, model, screen)
        content = evaluate_some(model, opened.splits().test, rows, screen, fitting=fitting)
        _, unsaved = try_to_save(opened, lambda: save_metrics(opened, content, sha256))
        if unsaved:
            evaluation = content
            screen.say(f"The metrics are in the page alone: {unsaved}")
        screen.say(f"Evaluated {content['rows']:,} of {content['of']:,} test samples.")
    with waiting(screen, "Drawing samples and solving codes …"):
        material = gather(opened, device=chosen, seed=seed, data=other, evaluation=evaluation)
        path = write(material, opened.output / "report.html" if out is None else out)
    result({"run": run, "file": path}, f"Report in {path}")

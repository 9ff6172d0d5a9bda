"""Originals, and what 100 steps of Algorithm 1 make of their codes: Figures 3 (CIFAR-10) and 7 (MNIST).

The iteration is shown as it is. Where it diverges, the picture is clipped to the range of pixels, and grey where
numbers overflowed; that says nothing about whether an inverse exists.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import atomic
from ..figures import ImageRow, rows_picture
from ..run import Run
from .cells import DIGITS, Cell
from .iteration import Unwinder
from .job import Job, Work
from .judging import IMAGES, STEPS, iterated, verdict
from .record import Arrays, Entry, alike, arrays
from .result import Measured, Outcome, Plan, datasets_of, fill, picture_path

#: Images in the picture.
SHOWN = 10

COLUMNS = {
    "data": "dataset",
    "model": "model",
    "iteration": "iteration",
    "median error": "median error",
    "largest error": "largest error",
    "paper": "paper",
}


def make(work: Work, plan: Plan, paper: Mapping[str, str], usual: str) -> Outcome:
    """Rebuild images by every model of the plan, and draw them below each other."""

    def measure(work: Work, run: Run, cell: Cell) -> Measured:
        row, details, sentence = rebuilt(work, run, cell, _arrays_path(work.job, plan.name, cell.dataset))
        return {**row, "paper": paper.get(cell.model) if cell.dataset == usual else None}, details, sentence

    results, files = fill(work, plan, measure, seeds=work.job.seeds[:1]), []
    for dataset in datasets_of(plan, work.job):
        path = picture_path(work.job, plan.name, dataset, usual)
        entries = alike(results.runs, work.job, dataset)
        files.append(draw(entries, _read(_arrays_path(work.job, plan.name, dataset)), path, work.job))
    return Outcome(results, COLUMNS, (work.job.out / f"{plan.name}.json", *files))


def rebuilt(work: Work, run: Run, cell: Cell, path: Path) -> Measured:
    """Algorithm 1 on test images: its error, and the first of them, which are kept for the picture."""
    images, limits = work.images(run, IMAGES), torch.finfo(torch.float32)
    found, result, errors = iterated(Unwinder(work.model(run)), images, STEPS)
    kept = result.x[:SHOWN].clamp(limits.min, limits.max).float().cpu().numpy()
    _keep(path, _mark(work.job), images.x[:SHOWN].cpu().numpy(), cell.model, kept)
    row = {
        "iteration": verdict(found).removeprefix("the iteration "),
        "iterations": STEPS,
        "images": found["images"],
        "median error": found["median_error"],
        "largest error": found["largest_error"],
        "code residual": found["code_residual"],
        "norm of an image": found["size"],
    }
    details = {"errors": errors.tolist(), "iteration": found}
    return row, details, f"{verdict(found)}; median error {found['median_error']:.1e}"


def draw(entries: list[Entry], kept: Arrays, path: Path, job: Job) -> Path:
    """The picture of what was kept: originals first, then the models in the paper's order."""
    levels = 17 if entries[0]["dataset"] == DIGITS else 256
    rows = [ImageRow("original", "", torch.from_numpy(kept["originals"]))]
    for e in sorted(entries, key=lambda e: _row_order(e["model"])):
        if e["model"] not in kept:
            continue
        rows.append(ImageRow(_name(e["model"]), "\n".join(_remark(e, entries)), torch.from_numpy(kept[e["model"]])))
    note = (
        f"Codes solved back by {STEPS} steps of x ← z − g(x) in every block, float64. l2 error: median over "
        f"{entries[0]['row']['images']} test images, in grey levels (an image has norm "
        f"{entries[0]['row']['norm of an image']:,.0f})."
    )
    return rows_picture(rows, path, levels=levels, note=note)


def _remark(e: Entry, beside: list[Entry]) -> list[str]:
    """What the iteration did, its error, and for how long the net was trained, where that differs from the others."""
    median, epochs = e["row"]["median error"], e.get("epochs")
    size = "overflows" if median is None else f"l2 error {median:.1e}"
    trained = [f"trained for {epochs} epochs"] if any(b.get("epochs") != epochs for b in beside) else []
    return [e["row"]["iteration"], size, *trained]


def _row_order(model: str) -> int:
    return 0 if model.startswith("c=") else 1 + (model != "vanilla")


def _name(model: str) -> str:
    return f"i-ResNet, {model}" if model.startswith("c=") else {"vanilla": "vanilla ResNet"}.get(model, model)


def _arrays_path(job: Job, name: str, dataset: str) -> Path:
    return job.out / f"{name}-{dataset}.npz"


def _mark(job: Job) -> str:
    return " ".join((job.budget, job.recipe, str(job.seeds[0]), *job.changes))


def _keep(path: Path, mark: str, originals: NDArray[Any], model: str, images: NDArray[Any]) -> None:
    """Put one model's images beside those of the others, unless those are of another job."""
    before = _read(path) if path.is_file() else {}
    if str(before.get("mark")) != mark or not np.array_equal(before["originals"], originals):
        before = {}
    buffer = io.BytesIO()
    kept: dict[str, Any] = {**before, "mark": np.array(mark), "originals": originals, model: images}
    np.savez_compressed(buffer, **kept)
    atomic.write(path, buffer.getvalue())


def _read(path: Path) -> Arrays:
    return arrays(path, "mark", "originals")

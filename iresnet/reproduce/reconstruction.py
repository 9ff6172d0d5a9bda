"""Figures 3 (CIFAR-10), 7 (MNIST) and 8: test images reconstructed from their codes by Algorithm 1, in float64.

Figures 3 and 7 show originals and their reconstructions after 100 steps. Where the iteration diverges, values are
clipped to the range of pixels, and grey where numbers overflowed; this does not show that there is no inverse.

Figure 8 shows the error against the number of steps for each c: ||x - x_n||_2 in grey levels, averaged over the images,
after n steps in every block. By Theorem 1 the error of one block shrinks at least by Lip(g) per step. For a chain of
blocks, each of which starts with the error of the one before, this is no bound; the slope of the largest proven Lip(g)
is drawn for comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..data import npy
from ..data.units import bin_centres
from ..plots import DecayLine, ImageRow, plot_image_rows, plot_reconstruction_error
from ..run import Run
from .cells import BATCHNORM, DIGITS, VANILLA, Cell, cells_on, number_labels, parse_number
from .evaluation import IMAGES, STEPS, certificate_summary, describe_iteration, run_iteration
from .iteration import Algorithm1
from .job import Job, Work
from .record import Arrays, Entry, Row, load_arrays, rows_per_run
from .result import Measurement, Plan, budget_costs, columns, plot_each_dataset, trained_result

#: Images in the plot.
SHOWN = 10

#: Figure 8: test images, and numbers of iterations.
FEW, ITERATIONS = 64, (*range(1, 21), 25, 30, 40, 50, 70, 100)

#: Below this error, relative to an image, rounding in float64 dominates and no more iterations are tried.
FLOOR = 1e-13

#: l2 errors for which the iterations are counted. Below one half every pixel rounds to its own value.
GOALS = {"to 0.5": 0.5, "to 1e-3": 1e-3, "to 1e-6": 1e-6}

#: The paper's ratio of the iterations at c to those at c + 0.2.
RATIO = "about 0.5"

COLUMNS = columns("dataset", "model", "iteration", "median error", "largest error", "paper")
COLUMNS8 = columns(
    *("dataset", "model", "largest Lip(g)", ("iterations\nto 0.5", "iterations to 0.5")),
    *(("to\n1e-3", "iterations to 1e-3"), ("to\n1e-6", "iterations to 1e-6"), "paper"),
    *(("part of those\nat c + 0.2", "of those at c + 0.2"), ("\npaper", "paper, of those at c + 0.2")),
)


# ---------------------------------------------------------------------------------------------- figures 3 and 7


def measure_reconstruction(work: Work, run: Run, cell: Cell, *, name: str) -> Measurement:
    """Run Algorithm 1 on test images; measure its error, and save the first images for the plot."""
    images, limits = work.images(run, IMAGES), torch.finfo(torch.float32)
    metrics, result, errors = run_iteration(Algorithm1(work.model(run)), images, STEPS)
    images_kept = result.x[:SHOWN].clamp(limits.min, limits.max).float().cpu().numpy()
    path = work.job.out / f"{name}-{cell.dataset}.npz"
    _save_images(path, _job_mark(work.job), images.x[:SHOWN].cpu().numpy(), cell.label, images_kept)
    row = {
        "iteration": describe_iteration(metrics).removeprefix("the iteration "),
        "iterations": STEPS,
        "images": metrics["images"],
        "median error": metrics["median_error"],
        "largest error": metrics["largest_error"],
        "code residual": metrics["code_residual"],
        "norm of an image": metrics["size"],
        "paper": cell.paper,
    }
    details = {"errors": errors.tolist(), "iteration": metrics}
    return row, details, f"{describe_iteration(metrics)}; median error {metrics['median_error']:.1e}"


def plot_saved_images(entries: list[Entry], path: Path, *, name: str) -> Path:
    """Plot the saved images: originals first, then the models in the paper's order."""
    dataset = entries[0]["dataset"]
    levels = 17 if dataset == DIGITS else 256
    images = _load_images(path.with_name(f"{name}-{dataset}.npz"))
    rows = [ImageRow("original", "", torch.from_numpy(images["originals"]))]
    for e in sorted(entries, key=lambda e: _rank(e["model"])):
        if e["model"] in images:
            remark = "\n".join(_remark(e, entries))
            rows.append(ImageRow(_model_name(e["model"]), remark, torch.from_numpy(images[e["model"]])))
    note = (
        f"Codes inverted by {STEPS} steps of x ← z − g(x) in every block, float64. l2 error: median over "
        f"{entries[0]['row']['images']} test images, in grey levels (an image has norm "
        f"{entries[0]['row']['norm of an image']:,.0f})."
    )
    return plot_image_rows(rows, path, levels=levels, note=note)


def _remark(e: Entry, others: list[Entry]) -> list[str]:
    """Describe the iteration and its error, and the training epochs where networks differ in them."""
    median, epochs = e["row"]["median error"], e.get("epochs")
    size = "l2 error overflows" if median is None else f"l2 error {median:.1e}"
    trained = [f"trained for {epochs} epochs"] if any(b.get("epochs") != epochs for b in others) else []
    return [e["row"]["iteration"], size, *trained]


def _rank(model: str) -> int:
    return 0 if parse_number(model) else 1 + (model != VANILLA)


def _model_name(model: str) -> str:
    return f"i-ResNet, {model}" if parse_number(model) else f"{model} ResNet"


def _job_mark(job: Job) -> str:
    return " ".join((job.budget, job.recipe, str(job.seeds[0]), *job.overrides))


def _save_images(path: Path, mark: str, originals: NDArray[Any], model: str, images: NDArray[Any]) -> None:
    """Add one model's images to the file; those of another job are dropped."""
    before = _load_images(path) if path.is_file() else {}
    if str(before.get("mark")) != mark or not np.array_equal(before["originals"], originals):
        before = {}
    npy.save_npz(path, **{**before, "mark": np.array(mark), "originals": originals, model: images})


def _load_images(path: Path) -> Arrays:
    return load_arrays(path, "mark", "originals")


# ---------------------------------------------------------------------------------------------- figure 8


def measure_decay(work: Work, run: Run, cell: Cell) -> Measurement:
    """Measure the error after every number of iterations, on test images."""
    images = work.images(run, FEW)
    x = bin_centres(images.x, images.schema.levels).double()
    tried, errors = error_by_iterations(Algorithm1(work.model(run)), x)
    reached = {f"iterations {name}": _first_below(tried, errors, goal) for name, goal in GOALS.items()}
    row = {"largest Lip(g)": certificate_summary(run)["largest"], **reached, "paper": cell.paper, "images": len(x)}
    details = {"iterations": tried, "mean_error": errors}
    return row, details, f"error below a half grey level after {reached['iterations to 0.5']} iterations"


def error_by_iterations(algorithm: Algorithm1, x: torch.Tensor) -> tuple[list[int], list[float]]:
    """Return numbers of iterations and the mean error of each, until rounding dominates."""
    z = algorithm.encode(x)
    size = float(x.flatten(1).norm(dim=1).mean())
    tried = []
    errors = []
    for n in ITERATIONS:
        tried.append(n)
        errors.append(float(algorithm.decode(z, n).errors(x).mean()))
        if errors[-1] < FLOOR * size:
            break
    return tried, errors


def _first_below(tried: list[int], errors: list[float], goal: float) -> int | None:
    return next((n for n, e in zip(tried, errors, strict=True) if e <= goal), None)


def rows_with_ratio(runs: Sequence[Entry]) -> list[Row]:
    """Return a row for every network, with the ratio of its iterations to those at c + 0.2."""
    rows = rows_per_run(runs)
    for row in rows:
        _, c = parse_number(row["model"]) or ("", 0.0)
        (wanted,) = number_labels("c", c + 0.2)
        larger = [r for r in rows if r["model"] == wanted and _row_key(r) == _row_key(row)]
        a, b = row["iterations to 1e-6"], larger[0]["iterations to 1e-6"] if larger else None
        row["of those at c + 0.2"] = a / b if a and b else None
        row["paper, of those at c + 0.2"] = RATIO if a and b and row["paper"] else None
    return rows


def _row_key(row: Row) -> tuple[object, ...]:
    return tuple(row.get(k) for k in ("dataset", "budget", "recipe", "settings", "seed"))


def _plot_decay(entries: Sequence[Entry], path: Path) -> Path:
    lines = [
        DecayLine(e["model"], e["details"]["iterations"], e["details"]["mean_error"], e["row"]["largest Lip(g)"])
        for e in entries
    ]
    return plot_reconstruction_error(lines, path, images=entries[0]["row"]["images"])


COEFFICIENTS = number_labels("c", 0.9, 0.8, 0.7, 0.6, 0.5)
FIGURE3 = trained_result(
    Plan(
        "figure3",
        cells=cells_on("cifar10", {"c=0.9": "exact", VANILLA: "fails", BATCHNORM: "fails"}),
        smoke=cells_on(DIGITS, ("c=0.9", VANILLA, BATCHNORM)),
        other_datasets=cells_on("cifar100", ("c=0.9", VANILLA, BATCHNORM)),
    ),
    partial(measure_reconstruction, name="figure3"),
    COLUMNS,
    about="CIFAR-10 images and their reconstructions after 100 iterations: i-ResNet c=0.9, vanilla, BatchNorm",
    says="exact for c=0.9; the iteration fails for unconstrained networks, with and without BatchNorm",
    costs=budget_costs("3 networks of table2: seconds", "3 networks of table2, and seconds on a GPU"),
    plots=plot_each_dataset("figure3", "cifar10", partial(plot_saved_images, name="figure3")),
)
FIGURE7 = trained_result(
    Plan(
        "figure7",
        cells=cells_on("mnist", {"c=0.9": "exact", VANILLA: "close to exact"}),
        smoke=cells_on(DIGITS, ("c=0.9", VANILLA)),
    ),
    partial(measure_reconstruction, name="figure7"),
    COLUMNS,
    about="MNIST images and their reconstructions after 100 iterations: i-ResNet c=0.9 and vanilla",
    says="close to exact for both, even without the constraint",
    costs=budget_costs("2 networks of table2: seconds", "2 networks of table2, and seconds on a GPU"),
    plots=plot_each_dataset("figure7", "mnist", partial(plot_saved_images, name="figure7")),
)
FIGURE8 = trained_result(
    Plan(
        "figure8",
        cells=cells_on("cifar10", COEFFICIENTS, "5 to 20"),
        smoke=cells_on(DIGITS, number_labels("c", 0.9, 0.5)),
        other_datasets=(*cells_on("mnist", COEFFICIENTS), *cells_on("cifar100", COEFFICIENTS)),
    ),
    measure_decay,
    COLUMNS8,
    about="reconstruction error against the number of fixed-point iterations, for each c",
    says="5 to 20 iterations suffice; about half as many for each 0.2 less in c",
    costs=budget_costs("2 networks of table2: seconds", "5 networks of table2, and a minute on a GPU"),
    notes=("iterations until the mean l2 error over the images, in grey levels, is below that",),
    rows=rows_with_ratio,
    plots=plot_each_dataset("figure8", "cifar10", _plot_decay),
)

"""Figures 3 (CIFAR-10), 7 (MNIST) and 8: what Algorithm 1 makes of the codes of test images, in float64.

Figures 3 and 7 have originals, and what 100 steps make of their codes. The iteration is shown as it is. Where it
diverges, the picture is clipped to the range of pixels, and grey where numbers overflowed; that says nothing about
whether an inverse exists.

Figure 8 has the error against the number of steps, for each c: ||x - x_n||_2 in grey levels, averaged over the images,
after n steps in every block. By Theorem 1 the error of one block shrinks at least by Lip(g) a step. For a chain of
blocks, each of which begins with what the one before left, that is no bound; the slope of the largest proven Lip(g) is
drawn beside, for comparison.
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
from ..plots import DecayLine, ImageRow, plot_image_rows, plot_reconstruction_error
from ..run import Run
from ..train.objective import bin_centres
from .cells import BATCHNORM, DIGITS, VANILLA, Cell, constrained, numbered, on
from .evaluation import IMAGES, STEPS, iterated, proven, verdict
from .iteration import Unwinder
from .job import Job, Work
from .record import Arrays, Entry, Row, arrays, one_by_one
from .result import Measured, Plan, costs, each, of_cells

#: Images in the picture.
SHOWN = 10

#: Of Figure 8: test images, and numbers of iterations that are tried.
FEW, ITERATIONS = 64, (*range(1, 21), 25, 30, 40, 50, 70, 100)

#: Below this error, relative to an image, float64 has nothing left to gain: more iterations are not tried.
FLOOR = 1e-13

#: l2 errors by which the iterations are counted. Below a half every pixel rounds to its own value.
GOALS = {"to 0.5": 0.5, "to 1e-3": 1e-3, "to 1e-6": 1e-6}

#: What the paper finds of the iterations at c beside those at c + 0.2.
RATIO = "about 0.5"

COLUMNS = {
    "data": "dataset",
    "model": "model",
    "iteration": "iteration",
    "median error": "median error",
    "largest error": "largest error",
    "paper": "paper",
}
COLUMNS8 = {
    "data": "dataset",
    "model": "model",
    "Lip(g) ≤": "largest Lip(g)",
    "iterations\nto 0.5": "iterations to 0.5",
    "to\n1e-3": "iterations to 1e-3",
    "to\n1e-6": "iterations to 1e-6",
    "paper": "paper",
    "part of those\nat c + 0.2": "of those at c + 0.2",
    "\npaper": "paper, of those at c + 0.2",
}


# ---------------------------------------------------------------------------------------------- figures 3 and 7


def rebuilt(work: Work, run: Run, cell: Cell, *, name: str) -> Measured:
    """Algorithm 1 on test images: its error, and the first of them, which are kept for the picture."""
    images, limits = work.images(run, IMAGES), torch.finfo(torch.float32)
    found, result, errors = iterated(Unwinder(work.model(run)), images, STEPS)
    kept = result.x[:SHOWN].clamp(limits.min, limits.max).float().cpu().numpy()
    path = work.job.out / f"{name}-{cell.dataset}.npz"
    _keep(path, _mark(work.job), images.x[:SHOWN].cpu().numpy(), cell.label, kept)
    row = {
        "iteration": verdict(found).removeprefix("the iteration "),
        "iterations": STEPS,
        "images": found["images"],
        "median error": found["median_error"],
        "largest error": found["largest_error"],
        "code residual": found["code_residual"],
        "norm of an image": found["size"],
        "paper": cell.paper,
    }
    details = {"errors": errors.tolist(), "iteration": found}
    return row, details, f"{verdict(found)}; median error {found['median_error']:.1e}"


def draw(entries: list[Entry], path: Path, *, name: str) -> Path:
    """The picture of what was kept: originals first, then the models in the paper's order."""
    dataset = entries[0]["dataset"]
    levels, kept = 17 if dataset == DIGITS else 256, _read(path.with_name(f"{name}-{dataset}.npz"))
    rows = [ImageRow("original", "", torch.from_numpy(kept["originals"]))]
    for e in sorted(entries, key=lambda e: _place(e["model"])):
        if e["model"] not in kept:
            continue
        rows.append(ImageRow(_name(e["model"]), "\n".join(_remark(e, entries)), torch.from_numpy(kept[e["model"]])))
    note = (
        f"Codes solved back by {STEPS} steps of x ← z − g(x) in every block, float64. l2 error: median over "
        f"{entries[0]['row']['images']} test images, in grey levels (an image has norm "
        f"{entries[0]['row']['norm of an image']:,.0f})."
    )
    return plot_image_rows(rows, path, levels=levels, note=note)


def _remark(e: Entry, beside: list[Entry]) -> list[str]:
    """What the iteration did, its error, and for how long the net was trained, where that differs from the others."""
    median, epochs = e["row"]["median error"], e.get("epochs")
    size = "overflows" if median is None else f"l2 error {median:.1e}"
    trained = [f"trained for {epochs} epochs"] if any(b.get("epochs") != epochs for b in beside) else []
    return [e["row"]["iteration"], size, *trained]


def _place(model: str) -> int:
    return 0 if numbered(model) else 1 + (model != VANILLA)


def _name(model: str) -> str:
    return f"i-ResNet, {model}" if numbered(model) else {VANILLA: "vanilla ResNet"}.get(model, model)


def _mark(job: Job) -> str:
    return " ".join((job.budget, job.recipe, str(job.seeds[0]), *job.changes))


def _keep(path: Path, mark: str, originals: NDArray[Any], model: str, images: NDArray[Any]) -> None:
    """Put one model's images beside those of the others, unless those are of another job."""
    before = _read(path) if path.is_file() else {}
    if str(before.get("mark")) != mark or not np.array_equal(before["originals"], originals):
        before = {}
    npy.save_npz(path, **{**before, "mark": np.array(mark), "originals": originals, model: images})


def _read(path: Path) -> Arrays:
    return arrays(path, "mark", "originals")


# ---------------------------------------------------------------------------------------------- figure 8


def measure(work: Work, run: Run, cell: Cell) -> Measured:
    """The error after every number of iterations, on test images."""
    images = work.images(run, FEW)
    x = bin_centres(images.x, images.schema.levels).double()
    tried, errors = decay(Unwinder(work.model(run)), x)
    reached = {f"iterations {name}": _first(tried, errors, goal) for name, goal in GOALS.items()}
    row = {"largest Lip(g)": proven(run)["largest"], **reached, "paper": cell.paper, "images": len(x)}
    details = {"iterations": tried, "mean_error": errors}
    return row, details, f"error below a half grey level after {reached['iterations to 0.5']} iterations"


def decay(unwinder: Unwinder, x: torch.Tensor) -> tuple[list[int], list[float]]:
    """(numbers of iterations, mean error of each), up to where float64 has nothing left to gain."""
    z, size, tried, errors = unwinder.encode(x), float(x.flatten(1).norm(dim=1).mean()), [], []
    for n in ITERATIONS:
        tried.append(n)
        errors.append(float(unwinder.decode(z, n).errors(x).mean()))
        if errors[-1] < FLOOR * size:
            break
    return tried, errors


def _first(tried: list[int], errors: list[float], goal: float) -> int | None:
    return next((n for n, e in zip(tried, errors, strict=True) if e <= goal), None)


def compared(runs: Sequence[Entry]) -> list[Row]:
    """A row for every net, its iterations beside those of the net with c + 0.2, where there is one."""
    rows = one_by_one(runs)
    for row in rows:
        _, c = numbered(row["model"]) or ("", 0.0)
        wanted = constrained(c + 0.2)[0]
        beside = [r for r in rows if r["model"] == wanted and _head(r) == _head(row)]
        a, b = row["iterations to 1e-6"], beside[0]["iterations to 1e-6"] if beside else None
        row["of those at c + 0.2"] = a / b if a and b else None
        row["paper, of those at c + 0.2"] = RATIO if a and b and row["paper"] else None
    return rows


def _head(row: Row) -> tuple[object, ...]:
    return tuple(row.get(k) for k in ("dataset", "budget", "recipe", "settings", "seed"))


def _decays(entries: Sequence[Entry], path: Path) -> Path:
    lines = [
        DecayLine(e["model"], e["details"]["iterations"], e["details"]["mean_error"], e["row"]["largest Lip(g)"])
        for e in entries
    ]
    return plot_reconstruction_error(lines, path, images=entries[0]["row"]["images"])


ALL = constrained(0.9, 0.8, 0.7, 0.6, 0.5)
FIGURE3 = of_cells(
    Plan(
        "figure3",
        cells=on("cifar10", {"c=0.9": "exact", VANILLA: "fails", BATCHNORM: "fails"}),
        smoke=on(DIGITS, ("c=0.9", VANILLA)),
        others=on("cifar100", ("c=0.9", VANILLA, BATCHNORM)),
    ),
    partial(rebuilt, name="figure3"),
    COLUMNS,
    about="CIFAR-10 images and their reconstructions after 100 iterations: i-ResNet c=0.9, vanilla, BatchNorm",
    says="exact for c=0.9; the iteration fails for the nets without constraint, with and without BatchNorm",
    costs=costs("2 cells of table2: seconds", "3 cells of table2, and seconds on a GPU"),
    pictures=each("figure3", "cifar10", partial(draw, name="figure3")),
)
FIGURE7 = of_cells(
    Plan(
        "figure7",
        cells=on("mnist", {"c=0.9": "exact", VANILLA: "close to exact"}),
        smoke=on(DIGITS, ("c=0.9", VANILLA)),
    ),
    partial(rebuilt, name="figure7"),
    COLUMNS,
    about="MNIST images and their reconstructions after 100 iterations: i-ResNet c=0.9 and vanilla",
    says="close to exact for both, even without the constraint",
    costs=costs("2 cells of table2: seconds", "2 cells of table2, and seconds on a GPU"),
    pictures=each("figure7", "mnist", partial(draw, name="figure7")),
)
FIGURE8 = of_cells(
    Plan(
        "figure8",
        cells=on("cifar10", ALL, "5 to 20"),
        smoke=on(DIGITS, constrained(0.9, 0.5)),
        others=(*on("mnist", ALL), *on("cifar100", ALL)),
    ),
    measure,
    COLUMNS8,
    about="reconstruction error against the number of fixed-point iterations, for each c",
    says="5 to 20 iterations suffice; about half as many for each 0.2 less in c",
    costs=costs("2 cells of table2: seconds", "5 cells of table2, and a minute on a GPU"),
    notes=("iterations until the mean l2 error over the images, in grey levels, is below that",),
    rows=compared,
    pictures=each("figure8", "cifar10", _decays),
)

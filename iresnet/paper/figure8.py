"""Figure 8: reconstruction error against the number of fixed-point iterations, for each c.

n steps of Algorithm 1 in every block, in float64, on codes of test images; the error is ||x - x_n||_2 in grey levels,
averaged over the images. By Theorem 1 the error of one block shrinks at least by Lip(g) a step. For a chain of blocks,
each of which begins with what the one before left, that is no bound; the slope of the largest proven Lip(g) is drawn
beside, for comparison.
"""

from __future__ import annotations

import torch

from ..figures import DecayLine, decay_picture
from ..objective import centred
from ..run import Run
from .cells import Cell, coefficient_of, constrained
from .iteration import Unwinder
from .job import Work
from .judging import proven
from .record import Entry, Row, alike, one_by_one
from .result import Measured, Outcome, Plan, Result, datasets_of, fill, picture_path

PAPER = {"iterations": "5 to 20", "ratio": "about 0.5"}
COEFFICIENTS = constrained(0.9, 0.8, 0.7, 0.6, 0.5)
PLAN = Plan("figure8", models={"cifar10": COEFFICIENTS}, smoke=constrained(0.9, 0.5), others=("mnist", "cifar100"))

#: Numbers of iterations that are tried, and test images.
ITERATIONS, IMAGES = (*range(1, 21), 25, 30, 40, 50, 70, 100), 64

#: Below this error, relative to an image, float64 has nothing left to gain: more iterations are not tried.
FLOOR = 1e-13

#: l2 errors by which the iterations are counted. Below a half every pixel rounds to its own value.
GOALS = {"to 0.5": 0.5, "to 1e-3": 1e-3, "to 1e-6": 1e-6}

COLUMNS = {
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


def measure(work: Work, run: Run, cell: Cell) -> Measured:
    """The error after every number of iterations, on test images."""
    images = work.images(run, IMAGES)
    x = centred(images.x, images.schema.levels).double()
    tried, errors = decay(Unwinder(work.model(run)), x)
    reached = {f"iterations {name}": _first(tried, errors, goal) for name, goal in GOALS.items()}
    said = PAPER["iterations"] if cell.dataset == "cifar10" else None
    row = {"largest Lip(g)": proven(run)["largest"], **reached, "paper": said, "images": len(x)}
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


def compared(runs: list[Entry]) -> list[Row]:
    """A row for every net, its iterations beside those of the net with c + 0.2, where there is one."""
    rows = one_by_one(runs)
    for row in rows:
        wanted = constrained((coefficient_of(row["model"]) or 0.0) + 0.2)[0]
        beside = [r for r in rows if r["model"] == wanted and _head(r) == _head(row)]
        a, b = row["iterations to 1e-6"], beside[0]["iterations to 1e-6"] if beside else None
        row["of those at c + 0.2"] = a / b if a and b else None
        row["paper, of those at c + 0.2"] = PAPER["ratio"] if a and b and row["paper"] else None
    return rows


def _head(row: Row) -> tuple[object, ...]:
    return tuple(row.get(k) for k in ("dataset", "budget", "recipe", "settings", "seed"))


def run(work: Work) -> Outcome:
    """Measure every net, and draw the errors against the iterations."""
    results, files = fill(work, PLAN, measure, seeds=work.job.seeds[:1], rows=lambda runs: compared(list(runs))), []
    for dataset in datasets_of(PLAN, work.job):
        path = picture_path(work.job, "figure8", dataset, "cifar10")
        entries = alike(results.runs, work.job, dataset)
        files.append(decay_picture([_line(e) for e in entries], path, images=entries[0]["row"]["images"]))
    note = "iterations until the mean l2 error over the images, in grey levels, is below that"
    return Outcome(results, COLUMNS, (work.job.out / "figure8.json", *files), (note,))


def _line(e: Entry) -> DecayLine:
    details = e["details"]
    return DecayLine(e["model"], details["iterations"], details["mean_error"], e["row"]["largest Lip(g)"])


RESULT = Result(
    name="figure8",
    about="reconstruction error against the number of fixed-point iterations, for each c",
    says="5 to 20 iterations suffice; about half as many for each 0.2 less in c",
    costs={
        "smoke": "2 cells of table2: seconds",
        "short": "5 cells of table2, and a minute on a GPU",
        "paper": "5 cells of table2, and a minute on a GPU",
    },
    run=run,
    check=PLAN.check,
)

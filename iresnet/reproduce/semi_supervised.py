"""Semi-supervised learning: the test error from few labels, with and without the likelihood of all images.

The paper names it as an application (Sec. 6) and trains no such network. Here a hybrid (`train.Joint`) has a few
labels, as many of every class, drawn by the seed; all training images count for its likelihood. Next to it is the same
network trained without the likelihood, hence on the labelled images alone: with the same labels, batches of labelled
images, augmentation and number of steps. Training uses no label but these: the last weights are released, not those
with the lowest validation loss. The presets were chosen with 100 labels, on held-out training images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..run import Run
from .cells import DIGITS, FEW_LABELS, Cell
from .evaluation import error_on_test_images, run_facts
from .job import Work
from .record import Entry, Row, rows_per_cell
from .result import Measurement, Plan, budget_costs, columns, trained_result
from .table4 import evaluate_likelihood, likelihood_columns

NAME = "semi-supervised"
DIGITS_CELLS, MNIST = (tuple(c for c in FEW_LABELS if c.dataset == dataset) for dataset in (DIGITS, "mnist"))
PLAN = Plan(NAME, MNIST, tuple(c for c in DIGITS_CELLS if not c.label.endswith("1000")), DIGITS_CELLS)

#: What is shown of the network that is trained without the likelihood, and how these columns begin.
ALONE, SHOWN = "labels alone, ", ("error %", "low", "high", "spread", "seeds")
COLUMNS = columns(
    *("dataset", "labels", "error %", "low", "high"),
    *(("alone\n%", ALONE + "error %"), ("alone\nlow", ALONE + "low"), ("alone\nhigh", ALONE + "high")),
    *("bits/dim", "blocks proven"),
)


def measure_few_labels(work: Work, run: Run, cell: Cell) -> Measurement:
    """Return the row of one network; bits per dimension only of one that is trained for them."""
    error, settings = error_on_test_images(work, run, cell), run.experiment
    row: Row = {
        "labels": int(settings.data.labelled),
        "density": settings.objective.density,
        "weight": settings.objective.weight,
        "error %": error["value"],
        "low": error["low"],
        "high": error["high"],
        "images": error["rows"],
        **run_facts(run, "steps", "training s", "blocks proven", "largest Lip(g)"),
        "parameters": run.read_json("environment.json").get("parameters"),
    }
    details = {"error": error}
    if settings.objective.density:
        details["protocol"] = likelihood = evaluate_likelihood(work, run)
        row |= likelihood_columns(likelihood)
    return row, details, f"error {row['error %']:.2f} % with {row['labels']} labels"


def paired_rows(runs: Sequence[Entry]) -> list[Row]:
    """Return a row for every number of labels: the hybrid's, with the error of the network trained on labels alone."""
    pairs: dict[tuple[Any, ...], dict[bool, Row]] = {}
    for row in rows_per_cell(runs):
        key = *(str(row.get(k)) for k in ("dataset", "budget", "recipe", "settings")), row["labels"]
        pairs.setdefault(key, {})[row["density"] > 0] = row
    return [_pair(pair.get(True), pair.get(False)) for _, pair in sorted(pairs.items())]


def _pair(hybrid: Row | None, alone: Row | None) -> Row:
    either = hybrid or alone or {}
    head: Row = {k: either[k] for k in ("dataset", "budget", "recipe", "settings", "labels") if k in either}
    members = [i for r in (hybrid, alone) if r for i in r.get("runs", [r["run"]])]
    beside = {ALONE + k: alone[k] if alone else None for k in SHOWN}
    return {**head, **(hybrid or {"error %": None}), **beside, "run": members[0], "runs": members}


RESULT = trained_result(
    PLAN,
    measure_few_labels,
    COLUMNS,
    about="test error from 10, 100 and 1,000 labels: a hybrid that also sees the other images, and labels alone",
    says="semi-supervised learning is an application (Sec. 6), not tried there",
    costs=budget_costs(
        "4 networks on 8x8 digits: seconds on one core",
        "6 networks as their presets say, and minutes on a GPU to evaluate all test images; "
        "with --dataset digits some minutes per network on one core",
    ),
    notes=(
        "alone: the same network, labels, augmentation and steps, without the likelihood",
        "low, high: 95 % interval over test images (Wilson), for one seed; the seed also draws the labels",
    ),
    rows=paired_rows,
    all_seeds=True,
)

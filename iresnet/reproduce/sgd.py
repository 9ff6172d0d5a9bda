"""`sgd`: which classifiers of Table 3 can be trained by SGD with momentum at a learning rate of 0.1 (Sec. 5.2).

The paper trains i-ResNets that way, while every Glow that it tried needed Adam or Adamax and much smaller learning
rates to avoid divergence. Here the two i-ResNets of Table 3 and its two Glows are trained by exactly the same settings:
with `--recipe paper` those of App. C.2, with ours a warm-up and clipped gradients as well. A training that diverges is
a result: the row says at which step the loss, the gradient or the weights were no longer finite, and the run folder
keeps it. A training that finishes may still have learned nothing, which its error says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..run import Run
from .cells import DIGITS, Cell, cells_on
from .evaluation import error_on_test_images, run_facts
from .experiments import EPOCHS
from .job import Work, find_divergence
from .record import Entry, Row, rows_per_run
from .result import Measurement, Plan, budget_costs, columns, trained_result

PAPER = {
    **dict.fromkeys(("c=0.9", "i-ResNet Glow-style"), "trains"),
    **dict.fromkeys(("affine Glow SGD", "additive Glow SGD"), "diverges"),
}
COLUMNS = columns("model", "outcome", "paper", "error %", "first loss", "last loss", "epochs", "steps")


def measure_training(work: Work, run: Run, cell: Cell) -> Measurement:
    """Return the row of one training: whether it finished, its first and last losses, and its error if it did."""
    diverged = find_divergence(run)
    error = {} if diverged else error_on_test_images(work, run, cell)
    losses = [v for row in run.log() if (v := row.get("cross-entropy")) is not None and math.isfinite(v)]
    row = {
        "outcome": f"diverged at step {diverged['step']}" if diverged else "finished",
        "error %": error.get("value"),
        "low": error.get("low"),
        "high": error.get("high"),
        "first loss": losses[0] if losses else None,
        "last loss": losses[-1] if losses else None,
        "paper": cell.paper,
        **run_facts(run, "epochs", "steps", "batch", "cutout", "smoothing", "optimiser", "rate", "training s"),
        "parameters": run.read_json("environment.json").get("parameters"),
    }
    sentence = row["outcome"] if diverged else f"finished, error {row['error %']:.2f} %"
    return row, {"diverged": diverged}, sentence


def sort_rows(runs: Sequence[Entry]) -> list[Row]:
    """Return a row for every training: residual networks first, the seeds of a network together."""
    order = list(PAPER)
    return sorted(rows_per_run(runs), key=lambda r: (r["dataset"], r["budget"], order.index(r["model"]), r["seed"]))


RESULT = trained_result(
    Plan("sgd", cells=cells_on("cifar10", PAPER), smoke=cells_on(DIGITS, tuple(PAPER))),
    measure_training,
    COLUMNS,
    about="i-ResNets and Glows as classifiers, all trained by SGD with momentum at a learning rate of 0.1",
    says="i-ResNets train; every Glow needs Adam or Adamax and much smaller learning rates (Sec. 5.2, in the text)",
    costs=budget_costs(
        "4 networks on 8x8 digits: seconds on one core",
        f"4 networks of {EPOCHS['short']['cifar10']} epochs, two of them of table3: minutes to an hour each on a GPU",
        f"4 networks of {EPOCHS['paper']['cifar10']} epochs, two of them of table3: up to hours each on a GPU",
    ),
    notes=("losses: mean cross-entropy of the first and of the last logged training steps",),
    rows=sort_rows,
    all_seeds=True,
    get_run=Work.attempt,
)

"""Table 2: classification error of i-ResNets for c = .9 to .5 beside a ResNet-164 and the same net without constraint.

The error is that of the released weights (every layer within its proven bound) in float32, at the last epoch. Beside it
stand the change that tightening made, what is proven of the blocks, and how well codes give their images back.
"""

from __future__ import annotations

from typing import Any

from ..run import Run
from .cells import DATASETS, EPOCHS, RESNET, VANILLA, Cell, constrained, is_flow, weight_of
from .job import Work
from .judging import STEPS, judged, proven, verdict
from .record import over_seeds
from .result import Measured, Outcome, Plan, Result, fill

MODELS = (RESNET, VANILLA, *constrained(0.9, 0.8, 0.7, 0.6, 0.5))

#: Error in percent, as printed. The paper has no ResNet-164 on MNIST.
PAPER: dict[str, dict[str, float | None]] = {
    "mnist": dict(zip(MODELS, (None, 0.38, 0.40, 0.42, 0.40, 0.42, 0.86), strict=True)),
    "cifar10": dict(zip(MODELS, (5.50, 6.69, 6.78, 6.86, 6.93, 7.72, 8.71), strict=True)),
    "cifar100": dict(zip(MODELS, (24.30, 23.97, 24.58, 24.99, 25.99, 27.30, 29.45), strict=True)),
}


class Table(Plan):
    """The cells of the table; any other classifier may stand beside them, without a value of the paper's."""

    def takes(self, model: str) -> bool:
        return not is_flow(model) and weight_of(model) is None


PLAN = Table(
    "table2",
    models={d: tuple(m for m in MODELS if d != "mnist" or m != RESNET) for d in DATASETS},
    smoke=(RESNET, VANILLA, *constrained(0.9, 0.5)),
)

#: The largest l2 error of the images that Algorithm 1 gives back: the same method for every network with an inverse.
ITERATED = f"error after {STEPS} steps"

COLUMNS = {
    "data": "dataset",
    "model": "model",
    "error\n%": "error %",
    "paper\n%": "paper",
    "tight-\nening": "change by tightening",
    "ep-\nochs": "epochs",
    "blocks\nproven": "blocks proven",
    "Lip(g)\n≤": "largest Lip(g)",
    "rebuilt\nto": ITERATED,
}


def measure(work: Work, run: Run, cell: Cell) -> Measured:
    """The row of one trained cell."""
    found, certificate = judged(work, run, cell), proven(run)
    error, t, training = found["error"], found["tightening"], run.experiment.training
    row: dict[str, Any] = {
        "error %": error["value"],
        "paper": PAPER.get(cell.dataset, {}).get(cell.model),
        "low": error["low"],
        "high": error["high"],
        "change by tightening": error["value"] - t["before"]["value"],
        "validation error %": t["validation"]["value"],
        "validation change by tightening": t["validation"]["value"] - t["validation_before"]["value"],
        "epochs": training.epochs or None,
        "steps": training.steps,
        "batch": training.batch,
        "cutout": run.experiment.data.cutout,
        "smoothing": run.experiment.objective.label_smoothing,
        "parameters": found["parameters"],
        "training s": run.read_json("environment.json").get("seconds"),
        "blocks proven": f"{certificate['proven']} of {certificate['blocks']}" if certificate["blocks"] else None,
        "largest Lip(g)": certificate["largest"],
        **_inverse(found),
    }
    return row, {"evaluation": found}, _sentence(row)


def _inverse(found: dict[str, Any]) -> dict[str, Any]:
    """What Algorithm 1 gives back; and the numbers of a solve to its tolerance, where every block is proven."""
    i = found.get("iteration")
    rebuilt = {ITERATED: i["largest_error"] if i else None}
    if "inverse" in found:
        i = found["inverse"]
        return rebuilt | {
            "inverse": f"{i['proven']} of {i['rows']} proven, {i['precision']}",
            "largest block bound": i["largest_block_bound"],
            "code residual": i["code_residual"],
            "measured error": i["measured_error"],
            "composed bound": i["composed_bound"],
        }
    return rebuilt | {
        "inverse": verdict(i) if i else "none: it has strides",
        "largest block bound": None,
        "code residual": i["code_residual"] if i else None,
        "measured error": None,
        "composed bound": None,
    }


def _sentence(row: dict[str, Any]) -> str:
    beside = "" if row["paper"] is None else f" (paper {row['paper']:.2f})"
    blocks = "" if row["blocks proven"] is None else f"; {row['blocks proven']} blocks proven"
    inverse = row["inverse"] if row["inverse"].startswith("the") else f"inverse: {row['inverse']}"
    return f"error {row['error %']:.2f} %{beside}{blocks}; {inverse}"


def run(work: Work) -> Outcome:
    """Make the cells that are asked for, and the table of all that the file has."""
    results = fill(work, PLAN, measure, seeds=work.job.seeds, rows=over_seeds)
    notes = (
        "tightening: what it changed of the error, in percentage points",
        f"rebuilt to: the largest l2 error over some test images, in grey levels, after {STEPS} steps of Algorithm 1 "
        "in every block, float64; in the file also the measured error of a solve that is proven, where there is one",
    )
    return Outcome(results, COLUMNS, (work.job.out / "table2.json",), notes)


SHORT = EPOCHS["short"]
RESULT = Result(
    name="table2",
    about="classification error of i-ResNets, c = .9 to .5, beside ResNet-164 and the net without its constraint",
    says="CIFAR-10: 5.50 ResNet-164, 6.69 vanilla, 6.78 c=0.9 to 8.71 c=0.5; MNIST .38 to .86; CIFAR-100 24 to 29 %",
    costs={
        "smoke": "4 cells of 8x8 digits: seconds on one core",
        "short": f"20 cells of {SHORT['cifar10']} epochs (MNIST: {SHORT['mnist']}): minutes a cell on a GPU",
        "paper": f"20 cells of {EPOCHS['paper']['cifar10']} epochs, the paper's recipe: a GPU and patience",
    },
    run=run,
    check=PLAN.check,
)

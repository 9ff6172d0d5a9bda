"""A linear probe of a flow's codes: which classes has it found, without having seen a label?

The paper names unsupervised learning for downstream tasks as an application (Sec. 6). Here logistic regression is
trained on the codes of a flow of Table 4, on the pixels, and for reference on the codes of a classifier, which has seen
all labels (`evaluate.probe`). All have the same training images, and the column "trained for" says what the network has
learned.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from .. import evaluate
from ..run import Run
from .cells import CLASSIFIER, DIGITS, FLOWS, PROBED_CLASSIFIERS, Cell
from .evaluation import run_facts
from .job import Work
from .record import cached, rows_per_run
from .result import Measurement, Plan, budget_costs, columns, trained_result

#: The most training and test images.
IMAGES = 10_000


def _cells(dataset: str, *labels: str) -> tuple[Cell, ...]:
    return tuple(c for c in (*FLOWS, *PROBED_CLASSIFIERS) if c.dataset == dataset and c.label in labels)


MNIST = _cells("mnist", "flow", "flow-released", "flow-small", "flow-noise", CLASSIFIER)
SMALL = _cells(DIGITS, "flow", CLASSIFIER)
PLAN = Plan("probe", MNIST, SMALL, other_datasets=SMALL)
COLUMNS = columns(
    *("dataset", "model", "trained for", ("codes\n%", "codes, error %"), ("codes\n95 %", "codes, 95 % interval")),
    ("pixels\n%", "inputs, error %"),
)


def measure_probe(work: Work, run: Run, cell: Cell) -> Measurement:
    """Return the row of one network."""
    splits, device = work.splits(run), work.job.device
    sizes = [min(IMAGES, len(part)) for part in (splits.train, splits.test)]

    def compute() -> dict[str, Any]:
        work.say(f"{cell}: logistic regression on the codes of {sizes[0]:,} images")
        return asdict(evaluate.probe(work.model(run), splits.train.to(device), splits.test.to(device), rows=IMAGES))

    def valid(known: dict[str, Any]) -> bool:
        return [known.get("rows"), known.get("codes", {}).get("rows")] == sizes

    found = cached(run, "probe", compute, valid)
    transform = work.model(run).transform
    row: dict[str, Any] = {
        "trained for": run.experiment.objective.kind,
        "numbers in a code": math.prod(transform.output_shape(run.schema.shape)),
    }
    for what in ("codes", "inputs"):
        row |= {f"{what}, error %": found[what]["value"], f"{what}, 95 % interval": _interval(found[what])}
    row |= {"training rows": sizes[0], "test rows": sizes[1], **run_facts(run, "steps", "training s", "blocks proven")}
    errors = f"codes {found['codes']['value']:.2f} %, pixels {found['inputs']['value']:.2f} %"
    return row, {"probe": found}, f"error of logistic regression: {errors}"


def _interval(error: dict[str, Any]) -> str:
    return f"{error['low']:.2f} to {error['high']:.2f}"


RESULT = trained_result(
    PLAN,
    measure_probe,
    COLUMNS,
    about="a linear probe: error of logistic regression on the codes of flows, on pixels, and on a classifier's codes",
    says="unsupervised learning for downstream tasks is an application (Sec. 6), not tried there",
    costs=budget_costs(
        "a flow and a classifier on 8x8 digits: seconds on one core",
        "3 flows of table4 and a classifier of 10 epochs, and a minute each on a GPU for the probe; "
        "with --dataset digits some minutes on one core",
        "3 flows of table4 and a classifier of 200 epochs, and a minute each on a GPU for the probe",
    ),
    notes=(
        "trained for density: without labels; the penalty of the probe is chosen on a fifth of its training images",
    ),
    rows=rows_per_run,
)

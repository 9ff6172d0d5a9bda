"""Table 4: bits per dimension of flows on MNIST and CIFAR-10, beside what others published.

Ours are those of the released weights on all test images, to the protocol of App. C.3 (`evaluation.protocol`): terms
from the proven bounds for a bias below 1e-4 bits per dimension, draws fixed by a pilot for a standard error of the mean
below 1e-4. They are per pixel and channel of the images as they are (28x28x1 for MNIST), dequantised by uniform noise.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from ..evaluation import Likelihood, protocol
from ..evaluation.protocol import LIMIT
from ..results import finite
from ..run import Run
from .cells import DIGITS, Cell
from .job import Job, Work
from .judging import proven
from .record import Entry, merge, one_by_one
from .result import Measured, Outcome, Result, datasets_of, fill
from .series import Flows, keep

#: Bits per dimension as printed, for MNIST and CIFAR-10; then what came after the paper.
PAPER: dict[str, dict[str, float]] = {
    "NICE": {"mnist": 4.36, "cifar10": 4.48},
    "MADE": {"mnist": 2.04, "cifar10": 5.67},
    "MAF": {"mnist": 1.89, "cifar10": 4.31},
    "Real NVP": {"mnist": 1.06, "cifar10": 3.49},
    "Glow": {"mnist": 1.05, "cifar10": 3.35},
    "FFJORD": {"mnist": 0.99, "cifar10": 3.40},
    "i-ResNet": {"mnist": 1.06, "cifar10": 3.45},
}
LATER: dict[str, dict[str, float]] = {
    "Residual Flow": {"mnist": 0.97, "cifar10": 3.28},
    "i-DenseNet": {"cifar10": 3.25},
}
REMARKS = {("NICE", "cifar10"): "ZCA-whitened: not directly comparable"}

PLAN = Flows("table4", models={"mnist": ("flow",), "cifar10": ("flow",)}, smoke=("flow",))

#: The standard error of the mean that is asked for: seconds must be enough for the budget smoke.
ERROR = {"smoke": 1e-2, "short": LIMIT, "paper": LIMIT}

COLUMNS = {
    "data": "dataset",
    "model": "model",
    "bits/\ndim": "bits/dim",
    "paper": "paper",
    "bias\nat most": "bias bound",
    "esti-\nmator ±": "estimator error",
    "images\n±": "error over images",
    "terms": "terms",
    "draws": "draws",
}


def measure(work: Work, run: Run, cell: Cell) -> Measured:
    """The row of one trained flow."""
    found = judged(work, run)
    training = run.experiment.training
    row = {
        "bits/dim": found["value"],
        "paper": PAPER["i-ResNet"].get(cell.dataset),
        "bias bound": found["bias_bound"],
        "estimator error": found["estimator_error"],
        "error over images": found["standard_error"],
        "error of one image": found["row_error"],
        "method": found["method"],
        "terms": found["terms"] or None,
        "draws": found["draws"],
        "images": found["rows"],
        "evaluation s": found.get("seconds"),
        "epochs": training.epochs or None,
        "steps": training.steps,
        "parameters": sum(p.numel() for p in work.model(run).parameters()),
        "training s": run.read_json("environment.json").get("seconds"),
        "largest Lip(g)": proven(run)["largest"],
        "seed": run.experiment.seed,
    }
    return row, {"protocol": found}, str(_likelihood(found))


def judged(work: Work, run: Run) -> dict[str, Any]:
    """The protocol's figures of all test images: kept in the run folder, or made now and kept."""
    test, error = work.splits(run).test, ERROR[work.job.budget]
    kept = run.read_json("evaluation.json").get("protocol", {})
    if kept.get("rows") == len(test) and kept.get("limit", 1.0) <= error:
        return dict(kept)
    begun = time.perf_counter()
    found = asdict(protocol(work.model(run), test.to(work.job.device), error=error))
    made: dict[str, Any] = finite({**found, "limit": error, "seconds": round(time.perf_counter() - begun, 3)})
    keep(run, "protocol", made)
    return made


def _likelihood(found: dict[str, Any]) -> Likelihood:
    return Likelihood(**{k: v for k, v in found.items() if k not in ("limit", "seconds")})


def published(dataset: str) -> list[Entry]:
    """What others published for a data set, as entries of the file: no runs of ours."""
    return [
        {
            "dataset": dataset,
            "model": model,
            "budget": "published",
            "recipe": "-",
            "settings": [],
            "seed": 0,
            "row": {"bits/dim": None, "paper": values[dataset], "remark": REMARKS.get((model, dataset))},
            "details": {"source": source},
        }
        for source, models in (("Table 4 of the paper", PAPER), ("published after the paper", LATER))
        for model, values in models.items()
        if dataset in values
    ]


def _beside(job: Job) -> list[Entry]:
    return [e for dataset in datasets_of(PLAN, job) if dataset != DIGITS for e in published(dataset)]


def run(work: Work) -> Outcome:
    """Make the flows that are asked for, and the table of all that the file has."""
    if others := _beside(work.job):
        merge("table4", others, work.job.out, one_by_one)
    results = fill(work, PLAN, measure, seeds=work.job.seeds)
    notes = (
        "bits per dimension; paper: as published, for flows of ours that of the i-ResNet; NICE on CIFAR-10 has ZCA",
        "terms: of the block that needs most; draws: of noise and probes, for every image",
    )
    return Outcome(results, COLUMNS, (work.job.out / "table4.json",), notes)


RESULT = Result(
    name="table4",
    about="bits per dimension of flows on MNIST and CIFAR-10, beside those published",
    says="i-ResNet 1.06 on MNIST and 3.45 on CIFAR-10; Glow 1.05 and 3.35, FFJORD .99 and 3.40",
    costs={
        "smoke": "a flow on 8x8 digits: seconds on one core",
        "short": "2 flows trained as their presets say, and minutes to judge all test images on a GPU",
        "paper": "2 flows of 200 epochs, the paper's recipe: a GPU and patience",
    },
    run=run,
    check=PLAN.check,
)

"""One network for both tasks: error and bits per dimension together, at three weights.

The paper trains one architecture for either task, and names hybrids as an application (Sec. 6) without trying one.
Here one network is trained for both, by bits per dimension + w * cross-entropy (`objective.Joint`): w = 0.1 is closer
to a flow, w = 10 to a classifier. With D numbers in an image that is w times the cross-entropy and lambda (-ln p(x)),
lambda = 1 / (w D ln 2), as others weigh it.

Error and bits are those of the released weights on all test images, the bits as in Table 4. A pure classifier (Table 2,
c = 0.9) and a pure flow (Table 4) stand beside them where OUT/table2.json and OUT/table4.json have them, the best of
several; they are other networks than the hybrid.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .. import evaluation
from ..figures import Compromise, tradeoff_picture
from ..results import finite, read
from ..run import Run
from .cells import FLOW_NAMES, Cell, weight_of, weighted
from .job import Job, Work
from .judging import proven
from .record import Entry, alike, merge, one_by_one
from .result import Measured, Outcome, Plan, Result, datasets_of, fill, picture_path
from .series import keep
from .table4 import judged

WEIGHTS = weighted(0.1, 1, 10)

#: What stands beside the hybrids: the file that has it, the models there, and the figures that are shown of the one
#: with the lowest first figure.
BESIDE = (
    ("table2", ("c=0.9",), ("error %", "low", "high")),
    ("table4", FLOW_NAMES, ("bits/dim", "bias bound", "estimator error", "error over images", "terms", "draws")),
)


class Hybrids(Plan):
    """Cells that are hybrids, with any weight."""

    def takes(self, model: str) -> bool:
        return weight_of(model) is not None


PLAN = Hybrids("hybrid", models={"mnist": WEIGHTS, "cifar10": WEIGHTS}, smoke=WEIGHTS)

COLUMNS = {
    "data": "dataset",
    "model": "model",
    "error\n%": "error %",
    "bits/\ndim": "bits/dim",
    "bias\nat most": "bias bound",
    "esti-\nmator ±": "estimator error",
    "images\n±": "error over images",
    "blocks\nproven": "blocks proven",
    "Lip(g)\n≤": "largest Lip(g)",
}


def measure(work: Work, run: Run, cell: Cell) -> Measured:
    """The row of one trained hybrid."""
    error, likelihood, certificate = _error(work, run), judged(work, run), proven(run)
    training = run.experiment.training
    row = {
        "weight": cell.weight,
        "error %": error["value"],
        "low": error["low"],
        "high": error["high"],
        "bits/dim": likelihood["value"],
        "bias bound": likelihood["bias_bound"],
        "estimator error": likelihood["estimator_error"],
        "error over images": likelihood["standard_error"],
        "terms": likelihood["terms"] or None,
        "draws": likelihood["draws"],
        "images": likelihood["rows"],
        "epochs": training.epochs or None,
        "steps": training.steps,
        "parameters": run.read_json("environment.json").get("parameters"),
        "training s": run.read_json("environment.json").get("seconds"),
        "blocks proven": f"{certificate['proven']} of {certificate['blocks']}",
        "largest Lip(g)": certificate["largest"],
    }
    sentence = f"error {row['error %']:.2f} % and {row['bits/dim']:.3f} bits/dim from one network"
    return row, {"error": error, "protocol": likelihood}, sentence


def _error(work: Work, run: Run) -> dict[str, Any]:
    """The error on all test images: kept in the run folder, or made now and kept."""
    test = work.splits(run).test
    kept = run.read_json("evaluation.json").get("error", {})
    if kept.get("rows") == len(test):
        return dict(kept)
    made: dict[str, Any] = finite(asdict(evaluation.error(work.model(run), test.to(work.job.device))))
    keep(run, "error", made)
    return made


def beside(job: Job, dataset: str) -> list[Entry]:
    """The pure classifier and the pure flow of this data set and budget, where they have been made."""
    found = []
    for name, models, figures in BESIDE:
        path = job.out / f"{name}.json"
        runs = read(path).runs if path.is_file() else []
        wanted = [
            {**e, "row": {k: e["row"].get(k) for k in figures}, "details": {"file": path.name}}
            for e in runs
            if (e.get("dataset"), e.get("budget")) == (dataset, job.budget) and e.get("model") in models
        ]
        found += sorted(wanted, key=lambda e: float(e["row"][figures[0]]))[:1]
    return found


def run(work: Work) -> Outcome:
    """Make the hybrids that are asked for, and a picture for every data set."""
    results, files = fill(work, PLAN, measure, seeds=work.job.seeds), []
    for dataset in datasets_of(PLAN, work.job):
        pure = beside(work.job, dataset)
        results = merge("hybrid", pure, work.job.out, one_by_one) if pure else results
        hybrids = [e for e in alike(results.runs, work.job, dataset) if weight_of(e["model"]) is not None]
        files.append(_picture(work.job, dataset, hybrids, pure))
    notes = (
        "model: w, the weight of the cross-entropy beside the bits; the others are networks for one task each",
        "errors of the bits as in table4",
    )
    return Outcome(results, COLUMNS, (work.job.out / "hybrid.json", *files), notes)


def _picture(job: Job, dataset: str, hybrids: list[Entry], pure: list[Entry]) -> Any:
    lines = {k: e["row"][k] for e in pure for k in ("error %", "bits/dim") if k in e["row"]}
    return tradeoff_picture(
        [_point(e) for e in hybrids],
        picture_path(job, "hybrid", dataset, "cifar10"),
        images=hybrids[0]["row"]["images"],
        classifier=("pure classifier", lines["error %"]) if "error %" in lines else None,
        flow=("pure flow", lines["bits/dim"]) if "bits/dim" in lines else None,
    )


def _point(e: Entry) -> Compromise:
    row = e["row"]
    return Compromise(
        e["model"], row["error %"], row["low"], row["high"], row["bits/dim"], row["error over images"] or 0.0
    )


RESULT = Result(
    name="hybrid",
    about="one network for both tasks: error and bits per dimension together, at three weights",
    says="hybrids are an application (Sec. 6), not tried there; one architecture for either task, trained apart",
    costs={
        "smoke": "3 hybrids on 8x8 digits: seconds on one core",
        "short": "3 hybrids a data set as their presets say, and minutes to judge all test images on a GPU",
        "paper": "3 hybrids a data set of 200 epochs, by the paper's recipe for flows: a GPU and patience",
    },
    run=run,
    check=PLAN.check,
)

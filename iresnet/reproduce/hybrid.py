"""One network for both tasks: error and bits per dimension together, at three weights.

The paper trains one architecture for either task, and names hybrids as an application (Sec. 6) without trying one.
Here one network is trained for both, by bits per dimension + w * cross-entropy (`train.Joint`): w = 0.1 is closer
to a flow, w = 10 to a classifier. With D numbers in an image that is w times the cross-entropy and lambda (-ln p(x)),
lambda = 1 / (w D ln 2), as others weigh it.

Error and bits are those of the released weights on all test images, the bits as in Table 4. A pure classifier (Table 2,
c = 0.9) and a pure flow (Table 4) stand beside them where OUT/table2.json and OUT/table4.json have them, the best of
several; they are other networks than the hybrid.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import evaluate
from ..plots import HybridPoint, plot_tradeoff
from ..results import read
from ..run import Run
from .cells import DIGITS, OURS, Cell, constrained, on
from .evaluation import facts
from .job import Job, Work
from .record import Entry, kept
from .result import Groups, Measured, Plan, by_dataset, costs, of_cells, picture_path
from .table4 import bits, evaluated

WEIGHTS = constrained(0.1, 1, 10, letter="w")

#: What stands beside the hybrids: the file that has it, the models there, and the figures that are shown of the one
#: with the lowest first figure.
BESIDE = (
    ("table2", ("c=0.9",), ("error %", "low", "high")),
    ("table4", OURS, ("bits/dim", "bias bound", "estimator error", "error over images", "terms", "draws")),
)


PLAN = Plan("hybrid", (*on("mnist", WEIGHTS), *on("cifar10", WEIGHTS)), smoke=on(DIGITS, WEIGHTS), letter="w")
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
    test = work.splits(run).test

    def made() -> dict[str, Any]:
        return asdict(evaluate.error(work.model(run), test.to(work.job.device)))

    error = kept(run, "error", made, lambda found: found.get("rows") == len(test))
    likelihood = evaluated(work, run)
    row = {
        "weight": run.experiment.objective.weight,
        "error %": error["value"],
        "low": error["low"],
        "high": error["high"],
        **bits(likelihood),
        **facts(run, "epochs", "steps", "training s", "blocks proven", "largest Lip(g)"),
        "parameters": run.read_json("environment.json").get("parameters"),
    }
    sentence = f"error {row['error %']:.2f} % and {row['bits/dim']:.3f} bits/dim from one network"
    return row, {"error": error, "protocol": likelihood}, sentence


def beside(job: Job, dataset: str) -> list[Entry]:
    """The pure classifier and the pure flow of this data set and budget, where they have been made."""
    found = []
    for name, models, metrics in BESIDE:
        path = job.out / f"{name}.json"
        runs = read(path).runs if path.is_file() else []
        wanted = [
            {**e, "row": {k: e["row"].get(k) for k in metrics}, "details": {"file": path.name}}
            for e in runs
            if (e.get("dataset"), e.get("budget")) == (dataset, job.budget) and e.get("model") in models
        ]
        found += sorted(wanted, key=lambda e: float(e["row"][metrics[0]]))[:1]
    return found


def _picture(work: Work, groups: Groups) -> list[Path]:
    """For every data set, its hybrids and two lines for the pure networks."""
    files = []
    for dataset, entries in groups.items():
        hybrids = [e for e in entries if e["row"].get("weight") is not None]
        lines = {k: e["row"][k] for e in beside(work.job, dataset) for k in ("error %", "bits/dim") if k in e["row"]}
        picture = plot_tradeoff(
            [_point(e) for e in hybrids],
            picture_path(work.job, "hybrid", dataset, "cifar10"),
            images=hybrids[0]["row"]["images"],
            classifier=("pure classifier", lines["error %"]) if "error %" in lines else None,
            flow=("pure flow", lines["bits/dim"]) if "bits/dim" in lines else None,
        )
        files.append(picture)
    return files


def _point(e: Entry) -> HybridPoint:
    row = e["row"]
    return HybridPoint(
        e["model"], row["error %"], row["low"], row["high"], row["bits/dim"], row["error over images"] or 0.0
    )


RESULT = of_cells(
    PLAN,
    measure,
    COLUMNS,
    about="one network for both tasks: error and bits per dimension together, at three weights",
    says="hybrids are an application (Sec. 6), not tried there; one architecture for either task, trained apart",
    costs=costs(
        "3 hybrids on 8x8 digits: seconds on one core",
        "3 hybrids a data set as their presets say, and minutes to judge all test images on a GPU",
        "3 hybrids a data set of 200 epochs, by the paper's recipe for flows: a GPU and patience",
    ),
    notes=(
        "model: w, the weight of the cross-entropy beside the bits; the others are networks for one task each",
        "errors of the bits as in table4",
    ),
    several=True,
    published=lambda job: [e for dataset in by_dataset(PLAN.chosen(job)) for e in beside(job, dataset)],
    pictures=_picture,
)

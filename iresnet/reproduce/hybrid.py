"""Hybrid models: one network for classification and likelihood, at three weights of the cross-entropy.

The paper trains one architecture for either task, and mentions hybrids as an application (Sec. 6) without training one.
Here one network is trained for both, by bits per dimension + w * cross-entropy (`train.Joint`): w = 0.1 is closer to a
flow, w = 10 to a classifier. For images with D values this is, up to a factor, cross-entropy + lambda (-ln p(x)) with
lambda = 1 / (w D ln 2), as other papers write it.

Error and bits are those of the final weights on all test images, the bits as in Table 4. A pure classifier (Table 2,
c = 0.9) and a pure flow (Table 4, the best) are added where OUT/table2.json and OUT/table4.json have them; they are
other networks than the hybrid.
"""

from __future__ import annotations

from pathlib import Path

from ..plots import HybridPoint, plot_tradeoff
from ..results import read
from ..run import Run
from .cells import DIGITS, FLOW_LABELS, Cell, cells_on, number_labels
from .evaluation import evaluate_error, run_facts
from .job import Job, Work
from .record import Entry
from .result import Groups, Measurement, Plan, budget_costs, cells_by_dataset, columns, plot_path, trained_result
from .table4 import evaluate_likelihood, likelihood_columns

WEIGHTS = number_labels("w", 0.1, 1, 10)

#: Pure networks that are added: their file, their models, and the metrics shown of the best one by the first metric.
PURE = (
    ("table2", ("c=0.9",), ("error %", "low", "high")),
    ("table4", FLOW_LABELS, ("bits/dim", "bias bound", "estimator error", "error over images", "terms", "draws")),
)

MNIST, CIFAR10, SMOKE = (cells_on(dataset, WEIGHTS) for dataset in ("mnist", "cifar10", DIGITS))
PLAN = Plan("hybrid", (*MNIST, *CIFAR10), SMOKE, letter="w")
COLUMNS = columns(
    *("dataset", "model", "error %", "bits/dim", "bias bound", "estimator error", "error over images"),
    *("blocks proven", "largest Lip(g)"),
)


def measure_hybrid(work: Work, run: Run, cell: Cell) -> Measurement:
    """Return the row of one hybrid."""
    error, likelihood = evaluate_error(work, run), evaluate_likelihood(work, run)
    row = {
        "weight": run.experiment.objective.weight,
        "error %": error["value"],
        "low": error["low"],
        "high": error["high"],
        **likelihood_columns(likelihood),
        **run_facts(run, "epochs", "steps", "training s", "blocks proven", "largest Lip(g)"),
        "parameters": run.read_json("environment.json").get("parameters"),
    }
    sentence = f"error {row['error %']:.2f} % and {row['bits/dim']:.3f} bits/dim from one network"
    return row, {"error": error, "protocol": likelihood}, sentence


def pure_entries(job: Job, dataset: str) -> list[Entry]:
    """Return the pure classifier and the pure flow of this dataset and budget, where they exist."""
    found = []
    for name, models, metrics in PURE:
        path = job.out / f"{name}.json"
        runs = read(path).runs if path.is_file() else []
        wanted = [
            {**e, "row": {k: e["row"].get(k) for k in metrics}, "details": {"file": path.name}}
            for e in runs
            if (e.get("dataset"), e.get("budget")) == (dataset, job.budget) and e.get("model") in models
        ]
        found += sorted(wanted, key=lambda e: float(e["row"][metrics[0]]))[:1]
    return found


def _plots(work: Work, groups: Groups) -> list[Path]:
    """Plot the hybrids of every dataset, with two lines for the pure networks."""
    files = []
    for dataset, entries in groups.items():
        hybrids = [e for e in entries if e["row"].get("weight") is not None]
        pure = {k: v for e in pure_entries(work.job, dataset) for k, v in e["row"].items()}
        path = plot_tradeoff(
            [_point(e) for e in hybrids],
            plot_path(work.job, "hybrid", dataset, "cifar10"),
            images=hybrids[0]["row"]["images"],
            classifier=("pure classifier", pure["error %"]) if "error %" in pure else None,
            flow=("pure flow", pure["bits/dim"]) if "bits/dim" in pure else None,
        )
        files.append(path)
    return files


def _point(e: Entry) -> HybridPoint:
    numbers = (e["row"][k] or 0.0 for k in ("error %", "low", "high", "bits/dim", "error over images"))
    return HybridPoint(e["model"], *numbers)


RESULT = trained_result(
    PLAN,
    measure_hybrid,
    COLUMNS,
    about="hybrid models: error and bits per dimension of one network, at three weights of the cross-entropy",
    says="hybrids are an application (Sec. 6), not trained there; one architecture for either task, trained apart",
    costs=budget_costs(
        "3 hybrids on 8x8 digits: seconds on one core",
        "3 hybrids per dataset as their presets say, and minutes on a GPU to evaluate all test images",
        "3 hybrids per dataset of 200 epochs, by the paper's recipe for flows: a long time on a GPU",
    ),
    notes=(
        "model: w, the weight of the cross-entropy; the others are networks for one task each",
        "errors of the bits as in table4",
    ),
    all_seeds=True,
    published=lambda job: [e for dataset in cells_by_dataset(PLAN.choose(job)) for e in pure_entries(job, dataset)],
    plots=_plots,
)

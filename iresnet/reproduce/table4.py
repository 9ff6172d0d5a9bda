"""Table 4: bits per dimension of flows on MNIST and CIFAR-10, with published values.

Ours are those of the final weights on all test images, by the protocol of App. C.3 (`evaluate.protocol`): terms from
the proven bounds for a bias below 1e-4 bits per dimension, draws fixed by a pilot for a standard error of the mean
below 1e-4. They are per pixel and channel of the original images (28x28x1 for MNIST), dequantised by uniform noise, or
by noise that a flow has learned, which makes the bound on ln P tighter (`dequantisation`). A row says whose network it
is, with its activation, estimator and noise; the paper's value stands beside a row only if network and recipe are the
paper's.

Other flows are trained where they are requested (`--cells flow,Glow,MAF`), on 8x8 digits too: with the same images,
augmentation, steps and batch size. Their log-determinants are exact, so only the noise of dequantisation is drawn;
FFJORD's is an integral, up to the error of its solver (`_measure_solver`).
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from .. import config, presets
from ..data import Dataset, subsample
from ..data.units import nats_per_unit
from ..evaluate import Likelihood, as_flow, protocol
from ..evaluate.protocol import LIMIT
from ..logdet import Estimator, Exact, PowerSeries, RussianRoulette
from ..model import Model
from ..models import training_estimator
from ..presets import Experiment
from ..run import TRUNCATION, Run
from ..transforms import Imported, made
from ..transforms.dequantisation import dequantise_for
from ..tree import parameter_count
from .cells import ALL_DATASETS, DIGITS, FLOW_LABELS, FLOWS, OTHER_FLOW_LABELS, OTHER_FLOWS, Cell, find_cell
from .evaluation import run_facts
from .job import Job, Work
from .record import Entry, Row, cached, rows_per_cell
from .result import Groups, Measurement, Plan, budget_costs, cells_by_dataset, columns, flow_plan, trained_result

#: Bits per dimension as printed, for MNIST and CIFAR-10; then values published after the paper.
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
#: The networks that are the paper's, as its appendix or its released script describes them; all others are ours.
APPENDIX, SCRIPT = "paper's appendix", "paper's script"
PAPERS_NETWORKS = {
    ("mnist", "flow"): APPENDIX,
    ("mnist", "flow-released"): SCRIPT,
    ("cifar10", "flow"): SCRIPT,
    ("cifar10", "flow-appendix"): APPENDIX,
}
#: Settings that belong to the budget, not to the paper's network or recipe.
BUDGET_SETTINGS = {"training.epochs", "training.validate_every", "training.save_every", "data.validation"}
REMARKS = {("NICE", "cifar10"): "ZCA-whitened: not directly comparable"}

#: The network families of the package zuko.
IMPORTED = ("made", "maf", "ffjord")


class FlowPlan(Plan):
    """Our flows; other flows where they are requested."""

    def choose(self, job: Job) -> list[Cell]:
        own = self.own_cells(job)
        for label in (m for m in job.models if m in (*FLOW_LABELS, *OTHER_FLOW_LABELS)):
            if not any(find_cell(dataset, label) for dataset in own):
                there = FLOWS if label in FLOW_LABELS else [cell for cell in OTHER_FLOWS if cell.label == label]
                flows = ", ".join(map(str, there))
                raise ValueError(f"there is no {label} on {next(iter(own))}. Flows: {flows}.")
        return super().choose(job)

    def check(self, job: Job) -> None:
        super().check(job)
        if any(presets.find(cell.preset).network.family in IMPORTED for cell in self.choose(job)):
            made(1)  # raises an error without zuko, before anything is trained


def _plan() -> Plan:
    ours = flow_plan("table4", "mnist", "cifar10", paper=PAPER["i-ResNet"], others=(DIGITS,))
    return FlowPlan(ours.name, ours.cells, ours.smoke, ours.other_datasets, (*ours.other_models, *OTHER_FLOWS))


PLAN = _plan()

#: The target standard error of the mean; the smoke budget must take seconds only. On the 360 test images of the digits
#: the error over images is a hundred times the paper's limit, and a tenth of that is enough.
ERROR, ERROR_ON_DIGITS = {"smoke": 1e-2, "short": LIMIT, "paper": LIMIT}, 1e-3

#: The images on which a solver is measured, and the tolerance of the reference solution.
SOLVED, FINE = 100, 1e-8

#: The remark for a row whose certified number of terms would be impractical.
ROULETTE = "unbiased, by Russian roulette after the given terms: by its bound a block would need more than 200"
#: The remark for a row whose noise is not uniform, as it is for all published values.
LEARNED = "the noise of dequantisation is learned, and its density is part of the bits"
COLUMNS = columns(
    *("dataset", "model", "bits/dim", "paper", "bias bound", "estimator error", "error over images", "terms", "draws"),
)


def measure_flow(work: Work, run: Run, cell: Cell) -> Measurement:
    """Return the row of one flow."""
    metrics = evaluate_likelihood(work, run)
    solver = metrics.get("solver") or {}
    row = {
        **likelihood_columns(metrics),
        "paper": cell.paper if is_papers_own(work.job, cell) else None,
        **network_columns(run, cell),
        "bias bound": None if solver else metrics["bias_bound"],
        "error of one image": metrics["row_error"],
        "method": solver.get("method") or metrics["method"],
        "overestimate in training": _overestimate(run),
        "solver error": solver.get("error"),
        "evaluation s": metrics.get("seconds"),
        **run_facts(run, "epochs", "steps", "batch", "rate", "decay", "training s", "largest Lip(g)"),
        "parameters": parameter_count(work.model(run)),
        "remark": solver.get("remark"),
    }
    cost = f"{row['parameters']:,} parameters, {row['steps']:,} steps in {row['training s']} s"
    return row, {"protocol": metrics}, f"{_describe_errors(metrics, solver)}; {cost}"


def _overestimate(run: Run) -> float | None:
    """Return by how much, at least, training's series overestimated the likelihood of validation images at the end."""
    return next((row[TRUNCATION] for row in reversed(run.log()) if row.get(TRUNCATION) is not None), None)


def is_papers_own(job: Job, cell: Cell) -> bool:
    """Whether a flow has the paper's network and recipe, so that its value may stand beside the paper's."""
    changed = {config.setting_path(Experiment, assignment) for assignment in job.overrides} - BUDGET_SETTINGS
    return (cell.dataset, cell.label) in PAPERS_NETWORKS and job.recipe == "paper" and not changed


def network_columns(run: Run, cell: Cell) -> Row:
    """Return whose network it is, its activation, the estimator it is trained with, and its dequantisation noise."""
    n, usual = run.experiment.network, cell.experiment.network
    trained_alike = ("estimator", "terms", "probe", "norm", "norm_iterations")  # which are the recipe's
    same = n == replace(usual, **{name: getattr(n, name) for name in trained_alike})
    whose = PAPERS_NETWORKS.get((cell.dataset, cell.label), "ours") if same else "ours"
    return {
        "network": whose if n.family == "iresnet" else None,
        "activation": n.activation if n.family == "iresnet" else None,
        "estimator": _describe_estimator(training_estimator(n, run.schema)),
        "noise": "learned" if n.dequantiser else "uniform",
    }


def _describe_estimator(estimator: Estimator | None) -> str | None:
    match estimator:
        case PowerSeries():
            return f"series, {estimator.terms} terms, {estimator.probe}"
        case RussianRoulette():
            return f"roulette after {estimator.terms} terms, {estimator.probe}"
        case Exact():
            return "exact"
    return None


def likelihood_columns(metrics: dict[str, Any]) -> Row:
    """Return the metrics of the protocol by column."""
    names = ("value", "bias_bound", "estimator_error", "standard_error", "draws", "rows")
    keys = ("bits/dim", "bias bound", "estimator error", "error over images", "draws", "images")
    return {key: metrics[name] for key, name in zip(keys, names, strict=True)} | {"terms": metrics["terms"] or None}


def evaluate_likelihood(work: Work, run: Run) -> dict[str, Any]:
    """Return the metrics of the protocol on all test images: stored in the run folder, or computed now."""
    test, error = work.splits(run).test, _target_error(work.job, run)

    def is_exact(known: dict[str, Any]) -> bool:
        return known.get("rows") == len(test) and known.get("limit", 1.0) <= error

    def compute() -> dict[str, Any]:
        begun = time.perf_counter()
        metrics = run.read_json("evaluation.json").get("protocol") or {}
        if not is_exact(metrics):
            metrics = asdict(protocol(work.model(run), test.to(work.job.device), error=error))
            metrics |= {"limit": error, "seconds": round(time.perf_counter() - begun, 3)}
        return {**metrics, "solver": _measure_solver(work.model(run), subsample(test, SOLVED).to(work.job.device))}

    return cached(run, "protocol", compute, lambda known: is_exact(known) and "solver" in known)


def _target_error(job: Job, run: Run) -> float:
    digits = run.experiment.data.source == DIGITS and job.budget != "smoke"
    return ERROR_ON_DIGITS if digits else ERROR[job.budget]


def _describe_errors(metrics: dict[str, Any], solver: dict[str, Any]) -> str:
    """Describe all errors in a sentence; the error of a solver is measured, not proven."""
    text = str(Likelihood(**{k: v for k, v in metrics.items() if k not in ("limit", "seconds", "solver")}))
    value, _, rest = text.partition("; bias ")
    return f"{value}; {solver['remark']}; {rest.partition('; ')[2]}" if solver else text


@torch.no_grad()
def _measure_solver(model: Model, images: Dataset) -> dict[str, Any] | None:
    """Describe the solver of a log-determinant that is an integral, and measure its error; None for other flows.

    The error is the largest over images against the same integral in float64 with finer tolerances, in bits per
    dimension: measured, not proven. It is None where the trace is estimated, since the two would draw other probes.
    """
    flow = as_flow(model)
    if not (parts := list(_integrated_parts(flow))):
        return None
    lazy: Any = parts[0].lazy
    method = "one probe" if parts[0].random else "whole trace"
    scale = lazy().trace_scale  # zuko integrates the trace scaled down, which relaxes its tolerance
    remark = f"{method}, Dormand-Prince to {lazy.rtol:g}, ln det to {lazy.rtol / scale:g}"
    if parts[0].random:
        return {"method": method, "error": None, "remark": remark}
    generator = torch.Generator(images.x.device).manual_seed(0)
    x, _ = dequantise_for(flow, images.x, images.schema.levels, generator)
    finer = copy.deepcopy(flow).double()
    for part in _integrated_parts(finer):
        part.lazy.atol = part.lazy.rtol = FINE  # type: ignore[assignment]
    error = float((flow.log_prob(x) - finer.log_prob(x.double())).abs().max()) / nats_per_unit(
        x.shape[1:], images.schema.levels
    )
    return {
        "method": method,
        "error": error,
        "remark": f"{remark}: off by up to {error:.1e} bits/dim, {len(x)} images",
    }


def _integrated_parts(flow: nn.Module) -> Iterator[Imported]:
    return (m for m in flow.modules() if isinstance(m, Imported) and m.adaptive)


def published_entries(dataset: str) -> list[Entry]:
    """Return published values for a dataset as entries of the file."""
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


def sort_rows(runs: Sequence[Entry]) -> list[Row]:
    """Return a row for every flow, with mean and spread over its seeds; published ones first of every dataset."""
    models = list(dict.fromkeys((*PAPER, *LATER, *OTHER_FLOW_LABELS, *FLOW_LABELS)))

    def place(row: Row) -> tuple[Any, ...]:
        dataset, model, budget = (row[k] for k in ("dataset", "model", "budget"))
        rank = models.index(model) if model in models else len(models)
        return ALL_DATASETS.index(dataset), budget != "published", budget, row["recipe"], rank

    return sorted(rows_per_cell(runs, metric="bits/dim"), key=place)


def compare_flows(rows: Sequence[Row]) -> list[str]:
    """Compare our flow with other flows trained with the same settings.

    A difference within twice its error, from seeds and noise, is a tie.
    """
    said = []
    for ours in (r for r in rows if r["model"] == "flow"):
        words: dict[str, list[str]] = {}
        alike = [r for r in rows if all(r.get(k) == ours.get(k) for k in ("dataset", "budget", "recipe", "settings"))]
        for other in (r for r in alike if r["model"] in OTHER_FLOW_LABELS):
            pair = [v for r in (ours, other) for v in (r["spread"] or 0.0, r["estimator error"])]
            difference = other["bits/dim"] - ours["bits/dim"]
            verdict = "fewer bits than" if difference > 0 else "more bits than"
            apart = abs(difference) > 2 * math.hypot(*pair)
            words.setdefault(verdict if apart else "as many, within noise, as", []).append(other["model"])
        if words:
            what = "; ".join(f"{verdict} {', '.join(models)}" for verdict, models in words.items())
            said.append(f"{ours['dataset']}, budget {ours['budget']}: the flow has {what}")
    return said


def _describe_image_error(rows: Sequence[Row]) -> list[str]:
    """Say how accurate the likelihood of one image is."""
    errors = [r["error of one image"] for r in rows if r.get("error of one image") is not None]
    return [f"estimator ±: of the mean; that of one image is {max(errors):.2g} at most"] if errors else []


def remarks(rows: Sequence[Row], groups: Groups) -> list[str]:
    """Return the notes on these rows."""
    return [
        *_describe_image_error(rows),
        "terms: of the block that needs most; draws: of noise and probes, per image",
        *(f"{r['dataset']} {r['model']}: {LEARNED}" for r in rows if r.get("noise") == "learned"),
        *(f"{r['dataset']} {r['model']}: {ROULETTE}" for r in rows if r.get("method") == "roulette"),
        *compare_flows(rows),
    ]


RESULT = trained_result(
    PLAN,
    measure_flow,
    COLUMNS,
    about="bits per dimension of flows on MNIST and CIFAR-10, with published values",
    says="i-ResNet 1.06 on MNIST and 3.45 on CIFAR-10; Glow 1.05 and 3.35, FFJORD .99 and 3.40",
    costs=budget_costs(
        "a flow on 8x8 digits: seconds on one core",
        "2 flows trained as their presets say, and minutes on a GPU to evaluate all test images; "
        "with --dataset digits some minutes per flow on one core",
        "2 flows of 200 epochs, the paper's recipe: a long time on a GPU",
    ),
    notes=(
        "bits per dimension; paper: as published, beside a flow of ours only if it has the paper's network and recipe; "
        "NICE on CIFAR-10 has ZCA",
    ),
    remarks=remarks,
    rows=sort_rows,
    all_seeds=True,
    published=lambda job: [e for dataset in cells_by_dataset(PLAN.choose(job)) for e in published_entries(dataset)],
)

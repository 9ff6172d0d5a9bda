"""Table 4: bits per dimension of flows on MNIST and CIFAR-10, beside what others published.

Ours are those of the released weights on all test images, to the protocol of App. C.3 (`evaluate.protocol`): terms
from the proven bounds for a bias below 1e-4 bits per dimension, draws fixed by a pilot for a standard error of the mean
below 1e-4. They are per pixel and channel of the images as they are (28x28x1 for MNIST), dequantised by uniform noise,
or by noise that a flow has learned, which makes the bound on ln P tighter (`dequantisation`); the row says which.

The flows of others can be trained beside ours where they are asked for (`--cells flow,Glow,MAF`), on 8x8 digits too:
the same rows, augmentation, steps and batch for all. Their log-determinants are exact, so that only the noise of
dequantisation is drawn; but FFJORD's is an integral, within what its solver tolerates (`_solver`).
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

from .. import presets
from ..data import Dataset, subsample
from ..evaluate import Likelihood, protocol
from ..evaluate.likelihood import as_flow
from ..evaluate.protocol import LIMIT
from ..run import Run
from ..train.objective import nats_per_unit
from ..transforms import Imported, made
from ..transforms.dequantisation import dequantise_for
from .cells import DIGITS, FLOWS, OTHER_FLOWS, OTHERS, OURS, SETS, Cell, find
from .evaluation import facts
from .job import Job, Work
from .record import Entry, Row, kept, over_seeds
from .result import Groups, Measured, Plan, by_dataset, costs, of_cells, of_flows

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

#: The families of networks that come from zuko.
IMPORTED = ("made", "maf", "ffjord")


class Densities(Plan):
    """Flows of ours; those of others where they are asked for."""

    def chosen(self, job: Job) -> list[Cell]:
        own = self.own(job)
        for label in (m for m in job.models if m in (*OURS, *OTHERS)):
            if not any(find(dataset, label) for dataset in own):
                there = FLOWS if label in OURS else [cell for cell in OTHER_FLOWS if cell.label == label]
                flows = ", ".join(map(str, there))
                raise ValueError(f"there is no {label} on {next(iter(own))}. Flows: {flows}.")
        return super().chosen(job)

    def check(self, job: Job) -> None:
        super().check(job)
        if any(presets.find(cell.preset).network.family in IMPORTED for cell in self.chosen(job)):
            made(1)  # without zuko a sentence, before anything is trained


def _plan() -> Plan:
    ours = of_flows("table4", "mnist", "cifar10", paper=PAPER["i-ResNet"], others=(DIGITS,))
    others = tuple(replace(cell, paper=PAPER.get(cell.label, {}).get(cell.dataset)) for cell in OTHER_FLOWS)
    return Densities(ours.name, ours.cells, ours.smoke, ours.others, (*ours.beside, *others))


PLAN = _plan()

#: The standard error of the mean that is asked for: seconds must be enough for the budget smoke. On the 360 test images
#: of the digits the error over images is a hundred times the paper's limit, and a tenth of that is enough.
ERROR, ERROR_ON_DIGITS = {"smoke": 1e-2, "short": LIMIT, "paper": LIMIT}, 1e-3

#: What a solver is judged by: images, and tolerances that are fine enough to be taken for the truth.
SOLVED, FINE = 100, 1e-8

#: What is said of a row whose certified number of terms would be absurd.
ROULETTE = "by the roulette, without bias, after the terms for certain: a block would take more than 200 by its bound"
#: What is said of a row whose noise is not uniform, as that of all published ones is.
LEARNED = "the noise of dequantisation is learned, and its own density paid for"
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
    found = evaluated(work, run)
    solver = found.get("solver") or {}
    row = {
        **bits(found),
        "paper": cell.paper,
        "bias bound": None if solver else found["bias_bound"],
        "error of one image": found["row_error"],
        "method": solver.get("method") or found["method"],
        "solver error": solver.get("error"),
        "noise": "learned" if run.experiment.network.dequantiser else "uniform",
        "evaluation s": found.get("seconds"),
        **facts(run, "epochs", "steps", "batch", "rate", "decay", "training s", "largest Lip(g)"),
        "parameters": sum(p.numel() for p in work.model(run).parameters()),
        "remark": solver.get("remark"),
    }
    cost = f"{row['parameters']:,} parameters, {row['steps']:,} steps in {row['training s']} s"
    return row, {"protocol": found}, f"{_likelihood(found, solver)}; {cost}"


def bits(found: dict[str, Any]) -> Row:
    """The protocol's figures, as a row has them."""
    names = ("value", "bias_bound", "estimator_error", "standard_error", "draws", "rows")
    keys = ("bits/dim", "bias bound", "estimator error", "error over images", "draws", "images")
    return {key: found[name] for key, name in zip(keys, names, strict=True)} | {"terms": found["terms"] or None}


def evaluated(work: Work, run: Run) -> dict[str, Any]:
    """The protocol's figures of all test images: kept in the run folder, or made now and kept."""
    test, error = work.splits(run).test, _limit(work.job, run)

    def is_exact(found: dict[str, Any]) -> bool:
        return found.get("rows") == len(test) and found.get("limit", 1.0) <= error

    def made() -> dict[str, Any]:
        begun, found = time.perf_counter(), run.read_json("evaluation.json").get("protocol") or {}
        if not is_exact(found):
            found = asdict(protocol(work.model(run), test.to(work.job.device), error=error))
            found |= {"limit": error, "seconds": round(time.perf_counter() - begun, 3)}
        return {**found, "solver": _solver(work.model(run), subsample(test, SOLVED).to(work.job.device))}

    return kept(run, "protocol", made, lambda found: is_exact(found) and "solver" in found)


def _limit(job: Job, run: Run) -> float:
    digits = run.experiment.data.source == DIGITS and job.budget != "smoke"
    return ERROR_ON_DIGITS if digits else ERROR[job.budget]


def _likelihood(found: dict[str, Any], solver: dict[str, Any]) -> str:
    """All errors in a sentence; nothing is proven of a solver's."""
    text = str(Likelihood(**{k: v for k, v in found.items() if k not in ("limit", "seconds", "solver")}))
    value, _, rest = text.partition("; bias ")
    return f"{value}; {solver['remark']}; {rest.partition('; ')[2]}" if solver else text


@torch.no_grad()
def _solver(model: nn.Module, images: Dataset) -> dict[str, Any] | None:
    """Of a log-determinant that is an integral: what is integrated, how, and what the solver costs; else None.

    The error is the largest over images against the same integral in float64 with finer tolerances, in bits per
    dimension: measured, not proven. Where the trace is an estimate there is none, as the two would draw other probes.
    """
    flow = as_flow(model)
    if not (parts := list(_solved(flow))):
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
    for part in _solved(finer):
        part.lazy.atol = part.lazy.rtol = FINE  # type: ignore[assignment]
    error = float((flow.log_prob(x) - finer.log_prob(x.double())).abs().max()) / nats_per_unit(x, images.schema.levels)
    return {
        "method": method,
        "error": error,
        "remark": f"{remark}: off by up to {error:.1e} bits/dim, {len(x)} images",
    }


def _solved(flow: nn.Module) -> Iterator[Imported]:
    return (m for m in flow.modules() if isinstance(m, Imported) and m.adaptive)


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


def in_order(runs: Sequence[Entry]) -> list[Row]:
    """A row for every flow, with mean and spread over its seeds; of a data set first those published."""
    models = {m: i for i, m in enumerate((*PAPER, *LATER, *(m for m in OTHERS if m not in PAPER), *OURS))}

    def place(row: Row) -> tuple[Any, ...]:
        budget, last = row["budget"], len(models)
        return SETS.index(row["dataset"]), budget != "published", budget, row["recipe"], models.get(row["model"], last)

    return sorted(over_seeds(runs, of="bits/dim"), key=place)


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Where our flow does better than those that were trained beside it with the same settings, and where worse.

    Two cannot be told apart where they differ by less than twice what seeds and noise do.
    """
    said = []
    for ours in (r for r in rows if r["model"] == "flow"):
        words: dict[str, list[str]] = {}
        alike = [r for r in rows if all(r.get(k) == ours.get(k) for k in ("dataset", "budget", "recipe", "settings"))]
        for other in (r for r in alike if r["model"] in OTHERS):
            pair = [v for r in (ours, other) for v in (r["spread"] or 0.0, r["estimator error"])]
            difference = other["bits/dim"] - ours["bits/dim"]
            verdict = "fewer bits than" if difference > 0 else "more bits than"
            apart = abs(difference) > 2 * math.hypot(*pair)
            words.setdefault(verdict if apart else "as many, within noise, as", []).append(other["model"])
        if words:
            what = "; ".join(f"{verdict} {', '.join(models)}" for verdict, models in words.items())
            said.append(f"{ours['dataset']}, budget {ours['budget']}: the flow has {what}")
    return said


def _of_one_image(rows: Sequence[Row]) -> list[str]:
    """What a likelihood of one image is off by, where the mean over all hardly is."""
    errors = [r["error of one image"] for r in rows if r.get("error of one image") is not None]
    return [f"estimator ±: of the mean; that of one image is {max(errors):.2g} at most"] if errors else []


def remarks(rows: Sequence[Row], groups: Groups) -> list[str]:
    """What is to be said of the rows."""
    return [
        *_of_one_image(rows),
        "terms: of the block that needs most; draws: of noise and probes, for every image",
        *(f"{r['dataset']} {r['model']}: {LEARNED}" for r in rows if r.get("noise") == "learned"),
        *(f"{r['dataset']} {r['model']}: {ROULETTE}" for r in rows if r.get("method") == "roulette"),
        *verdicts(rows),
    ]


RESULT = of_cells(
    PLAN,
    measure,
    COLUMNS,
    about="bits per dimension of flows on MNIST and CIFAR-10, beside those published",
    says="i-ResNet 1.06 on MNIST and 3.45 on CIFAR-10; Glow 1.05 and 3.35, FFJORD .99 and 3.40",
    costs=costs(
        "a flow on 8x8 digits: seconds on one core",
        "2 flows trained as their presets say, and minutes to judge all test images on a GPU; "
        "with --dataset digits some minutes a flow on one core",
        "2 flows of 200 epochs, the paper's recipe: a GPU and patience",
    ),
    notes=(
        "bits per dimension; paper: as published, for flows of ours that of the i-ResNet; NICE on CIFAR-10 has ZCA",
    ),
    remarks=remarks,
    rows=in_order,
    several=True,
    published=lambda job: [e for dataset in by_dataset(PLAN.chosen(job)) for e in published(dataset)],
)

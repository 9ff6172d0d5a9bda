"""Out-of-distribution images: how well a flow detects them, by likelihood and by typicality.

Not in the paper. A density in many dimensions tends to give simple images a higher likelihood than its own data
(Nalisnick et al., 2019): the area under the ROC curve (AUROC) is below 1/2. Here that is measured for the flows of
Table 4, and compared with typicality from the same likelihoods (`evaluate.typicality`), of one image and of ten.

data        a subsample of the test images; the entropy is the mean of -ln p over as many held-out images
others      the same images corrupted; patterns, their mean image, noise; images of other datasets, converted
likelihood  of all images with the same noise and probes, its bias proven below 1e-4 bits per dimension; the standard
            error of one image's likelihood is a column
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..data import Dataset, canonical, subsample
from ..data.download import is_present
from ..data.ood_images import convert_images, handwriting, photographs
from ..data.units import nats_per_unit
from ..evaluate import Detection, below_chance, corrupted_datasets, detection_from_likelihoods, log_likelihood
from ..flow import LogProb
from ..plots import Ridge, plot_ridges
from ..run import Run
from ..spelling import round_up
from .cells import DIGITS, Cell
from .job import Job, Stopped, Work
from .record import Entry, Row, cached, rows_per_run
from .result import Groups, Measurement, budget_costs, columns, flow_plan, trained_result

#: Images of each kind, and draws of noise and probes per image.
IMAGES, DRAWS = 500, 4

#: Other datasets by the flow's own, used where they have been downloaded.
OTHER_DATASETS = {"mnist": ("fashion-mnist",), "cifar10": ("mnist", "cifar100")}

#: Quantiles of the likelihoods that are stored, and images of each kind in the plot.
QUANTILES, SHOWN = 41, 3

#: Areas under the ROC curve, by their keys in the file.
AREAS = ("by likelihood", "by typicality", "by typicality of ten")

PLAN = flow_plan("outliers", "mnist", "cifar10", paper={}, others=(DIGITS,))
COLUMNS = columns(
    *("dataset", "model", ("images", "kind"), "bits/dim", ("found by\nlikelihood", "by likelihood")),
    *(("by typi-\ncality", "by typicality"), ("that\nof ten", "by typicality of ten")),
)

#: The name of the data among the kinds.
OWN = "the data"


def measure_outliers(work: Work, run: Run, cell: Cell) -> Measurement:
    """Measure how well every kind of images is detected, and plot it."""
    images = work.images(run, IMAGES).to("cpu")
    others = other_images(work, run, cell, images)
    wanted = {"images": len(images), "draws": DRAWS, "names": list(others)}

    def compute() -> dict[str, Any]:
        work.say(f"{run.folder.name}: likelihoods of {len(images):,} images of each of {len(others)} kinds")
        return {**wanted, **evaluate_kinds(work, run, images, others)}

    metrics = cached(run, "outliers", compute, lambda known: {k: known.get(k) for k in wanted} == wanted)
    _plot(work.job, cell, metrics, {OWN: images, **others})
    row = {k: metrics[k] for k in ("draws", "entropy bits/dim", "bias bound", "seconds")}
    missed = [k["kind"] for k in sort_kinds(metrics["kinds"])[1:] if below_chance(k["by likelihood"], k["images"])]
    return row, metrics, f"of {len(others)} kinds more likely than the data: {', '.join(missed) or 'none'}"


def other_images(work: Work, run: Run, cell: Cell, images: Dataset) -> dict[str, Dataset]:
    """Return out-of-distribution images by name: made from the data, and of other datasets, if downloaded."""
    made = {**corrupted_datasets(images), "photographs": photographs(len(images), run.schema)}
    if cell.dataset != DIGITS:
        made["8x8 digits"] = handwriting(len(images), run.schema)
    folder = work.job.data_dir or run.experiment.data.folder
    for name in OTHER_DATASETS.get(cell.dataset, ()):
        if is_present(name, folder):
            test = subsample(canonical.read_canonical(name, folder, "test"), len(images))
            made[name] = convert_images(test.x, test.schema.levels or 256, run.schema)
        else:
            work.say(f"{name} is not in the folder {folder} and is left out. Run `iresnet data download {name}`.")
    return made


def evaluate_kinds(work: Work, run: Run, images: Dataset, others: dict[str, Dataset]) -> dict[str, Any]:
    """Return areas and quantiles of every kind; all likelihoods have the same noise and probes."""
    begun = time.perf_counter()
    model = work.model(run)
    scale = nats_per_unit(images.x.shape[1:], run.schema.levels)

    def likelihood(rows: Dataset, name: str) -> LogProb:
        if work.stop():
            raise Stopped(f"the likelihood of {name} was not begun")
        return log_likelihood(model, rows.to(work.job.device), draws=DRAWS)

    normal = likelihood(images, OWN)
    reference = likelihood(subsample(work.splits(run).validation, len(images)), "held-out images").value
    kinds = [_kind(detection_from_likelihoods(OWN, normal, normal, reference, scale), normal, scale)]
    for name, rows in others.items():
        unusual = likelihood(rows, name)
        kinds.append(_kind(detection_from_likelihoods(name, normal, unusual, reference, scale), unusual, scale))
    kinds[0] |= dict.fromkeys(AREAS)  # the data are not compared with themselves
    return {
        "entropy bits/dim": -float(reference.mean()) / scale,
        "bias bound": float(normal.bias_bound.max()) / scale,
        "seconds": round(time.perf_counter() - begun, 3),
        "kinds": kinds,
    }


def _kind(found: Detection, likelihood: LogProb, scale: float) -> dict[str, Any]:
    areas = (round(a, 4) for a in (found.likelihood, found.typicality, found.batches))
    bits = -likelihood.value.double().cpu() / scale
    levels = torch.linspace(0, 1, QUANTILES, dtype=torch.float64)
    return {
        "kind": found.name,
        "images": found.rows,
        "bits/dim": found.value,
        "data bits/dim": found.data,
        "error of one image": found.error,
        **dict(zip(AREAS, areas, strict=True)),
        "quantiles": [round(q, 4) for q in bits.quantile(levels).tolist()],
    }


def sort_kinds(kinds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort kinds: the data, then the others by bits per dimension, infinite ones last."""
    return [kinds[0], *sorted(kinds[1:], key=lambda k: math.inf if k["bits/dim"] is None else k["bits/dim"])]


def rows_per_kind(runs: Sequence[Entry]) -> list[Row]:
    """Return a row for the data of every flow, and one for every other kind of images."""
    return [
        {**row, **{k: v for k, v in kind.items() if k != "quantiles"}}
        for row in rows_per_run(runs)
        for kind in sort_kinds(runs[row["run"]]["details"]["kinds"])
    ]


def remarks(rows: Sequence[Row], groups: Groups) -> list[str]:
    """Say how accurate the likelihood of one image is."""
    largest, bias = (max(r[name] or 0.0 for r in rows) for name in ("error of one image", "bias bound"))
    bound = f"bias at most {round_up(bias, '.2g')}" if bias else "no bias"
    return [f"one image: at most ± {largest:.2g} bits/dim with {DRAWS} draws of noise and probes; {bound}"]


def _path(job: Job, cell: Cell) -> Path:
    return job.out / f"outliers-{cell.dataset if cell.label == 'flow' else f'{cell.dataset}-{cell.label}'}.png"


def _plot(job: Job, cell: Cell, metrics: dict[str, Any], images: dict[str, Dataset]) -> None:
    def ridge(kind: dict[str, Any]) -> Ridge:
        name, x = kind["kind"], subsample(images[kind["kind"]], SHOWN).x
        areas = None if name == OWN else tuple(kind[k] for k in AREAS)
        return Ridge(cell.dataset if name == OWN else name, kind["quantiles"], kind["bits/dim"], areas, x)

    own, *others = map(ridge, sort_kinds(metrics["kinds"]))
    levels = images[OWN].schema.levels or 256
    plot_ridges(own, others, _path(job, cell), levels=levels, images=metrics["images"])


RESULT = trained_result(
    PLAN,
    measure_outliers,
    COLUMNS,
    about="out-of-distribution images, detected by likelihood and by typicality",
    says="not in the paper; flows give simple images high likelihood (Nalisnick et al., 2019)",
    costs=budget_costs(
        "a flow on 8x8 digits: seconds",
        "2 flows of table4, and a few minutes on a GPU; with --dataset digits minutes on one core",
        "2 flows of table4, and a few minutes on a GPU",
    ),
    notes=("found by: area under the ROC curve; 1 perfect, 0.5 chance, below: more likely than the data",),
    remarks=remarks,
    rows=rows_per_kind,
    plots=lambda work, groups: [_path(work.job, cell) for cell in PLAN.choose(work.job)],
)

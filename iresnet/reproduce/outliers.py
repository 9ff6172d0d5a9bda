"""Images that do not belong: how well a flow tells them from its data, by likelihood and by typicality.

Not in the paper. A density in many dimensions tends to give simple images a higher likelihood than those it learned
(Nalisnick et al., 2019), so that the likelihood takes them for the most ordinary of all: an area under the ROC curve
below 1/2. Here that is shown for the flows of Table 4, beside what typicality makes of the same likelihoods
(`evaluate.typicality`), of one image and of ten at once.

data        so many test images; the entropy is the mean of -ln p over as many that were held out of training
strange     the same images corrupted; patterns, their mean, noise; real ones of other sets, in the form of these
likelihood  of all images with the same noise and probes, its bias proven below 1e-4 bits per dimension; what noise and
            probes make of one image stands beside it
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
from ..evaluate import Detection, below_chance, corrupted_datasets, detection_from_likelihoods, log_likelihood
from ..evaluate.likelihood import ROW_BIAS
from ..flow import LogProb
from ..plots import Ridge, plot_ridges
from ..run import Run
from ..train.objective import nats_per_unit
from .cells import DIGITS, Cell
from .job import Job, Stopped, Work
from .record import Entry, Row, kept, one_by_one
from .result import Groups, Measured, costs, of_cells, of_flows

#: Images of each kind, and draws of noise and probes for each of them.
IMAGES, DRAWS = 500, 4

#: Sets that stand beside a flow's own where they have been downloaded.
BESIDE = {"mnist": ("fashion-mnist",), "cifar10": ("mnist", "cifar100")}

#: How finely likelihoods are kept, and how many images of a kind the picture shows.
QUANTILES, SHOWN = 41, 3

#: Areas under the ROC curve, as the file has them.
AREAS = ("by likelihood", "by typicality", "by typicality of ten")

PLAN = of_flows("outliers", "mnist", "cifar10", paper={}, others=(DIGITS,))
COLUMNS = {
    "data": "dataset",
    "model": "model",
    "images": "kind",
    "bits/\ndim": "bits/dim",
    "found by\nlikelihood": "by likelihood",
    "by typi-\ncality": "by typicality",
    "that\nof ten": "by typicality of ten",
}

#: What the data themselves are called among the kinds.
OWN = "the data"


def measure(work: Work, run: Run, cell: Cell) -> Measured:
    """The figures of every kind of images, and a picture."""
    images = work.images(run, IMAGES).to("cpu")
    others = kinds(work, run, cell, images)
    asked = {"images": len(images), "draws": DRAWS, "names": list(others)}

    def made() -> dict[str, Any]:
        work.say(f"{run.folder.name}: likelihoods of {len(images):,} images of each of {len(others)} kinds")
        return {**asked, **evaluated(work, run, images, others)}

    found = kept(run, "outliers", made, lambda there: {k: there.get(k) for k in asked} == asked)
    _draw(work.job, cell, found, {OWN: images, **others})
    row = {k: found[k] for k in ("draws", "entropy bits/dim", "bias bound", "seconds")}
    missed = [k["kind"] for k in in_order(found["kinds"])[1:] if below_chance(k["by likelihood"], k["images"])]
    return row, found, f"of {len(others)} kinds more likely than the data: {', '.join(missed) or 'none'}"


def kinds(work: Work, run: Run, cell: Cell, images: Dataset) -> dict[str, Dataset]:
    """Images that do not belong, by name: made of the data, and real ones; what is not there is said."""
    made = {**corrupted_datasets(images), "photographs": photographs(len(images), run.schema)}
    if cell.dataset != DIGITS:
        made["8x8 digits"] = handwriting(len(images), run.schema)
    folder = work.job.folder or run.experiment.data.folder
    for name in BESIDE.get(cell.dataset, ()):
        if is_present(name, folder):
            test = subsample(canonical.read_canonical(name, folder, "test"), len(images))
            made[name] = convert_images(test.x, test.schema.levels or 256, run.schema)
        else:
            work.say(f"{name} is not in the folder {folder} and is left out; `iresnet data download {name}` fetches it")
    return made


def evaluated(work: Work, run: Run, images: Dataset, others: dict[str, Dataset]) -> dict[str, Any]:
    """Areas and quantiles of every kind. All likelihoods have the same noise and probes, the entropy's too."""
    begun, model, scale = time.perf_counter(), work.model(run), nats_per_unit(images.x, run.schema.levels)

    def likelihood(rows: Dataset, name: str) -> LogProb:
        if work.stop():
            raise Stopped(f"the likelihoods of {name} were not begun")
        return log_likelihood(model, rows.to(work.job.device), draws=DRAWS)

    normal = likelihood(images, OWN)
    reference = likelihood(subsample(work.splits(run).validation, len(images)), "held-out images").value
    told = [_kind(detection_from_likelihoods(OWN, normal, normal, reference, scale), normal, scale)]
    for name, rows in others.items():
        strangers = likelihood(rows, name)
        told.append(_kind(detection_from_likelihoods(name, normal, strangers, reference, scale), strangers, scale))
    told[0] |= dict.fromkeys(AREAS)  # nothing is told from itself
    return {
        "entropy bits/dim": -float(reference.mean()) / scale,
        "bias bound": float(normal.bias_bound.max()) / scale,
        "seconds": round(time.perf_counter() - begun, 3),
        "kinds": told,
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


def in_order(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The data, then the others by their bits per dimension; those whose likelihood is no number are last."""
    return [found[0], *sorted(found[1:], key=lambda k: math.inf if k["bits/dim"] is None else k["bits/dim"])]


def rows_of(runs: Sequence[Entry]) -> list[Row]:
    """A row for the data of every flow, and one for every kind of other images."""
    return [
        {**row, **{k: v for k, v in kind.items() if k != "quantiles"}}
        for row in one_by_one(runs)
        for kind in in_order(runs[row["run"]]["details"]["kinds"])
    ]


def remarks(rows: Sequence[Row], groups: Groups) -> list[str]:
    """What noise and probes make of one image."""
    largest = max(r["error of one image"] or 0.0 for r in rows)
    return [
        f"one image: ± {largest:.2g} bits/dim at most by {DRAWS} draws of noise and probes; bias below {ROW_BIAS:g}"
    ]


def _path(job: Job, cell: Cell) -> Path:
    return job.out / f"outliers-{cell.dataset if cell.label == 'flow' else f'{cell.dataset}-{cell.label}'}.png"


def _draw(job: Job, cell: Cell, found: dict[str, Any], images: dict[str, Dataset]) -> None:
    def ridge(kind: dict[str, Any]) -> Ridge:
        name, x = kind["kind"], subsample(images[kind["kind"]], SHOWN).x
        areas = None if name == OWN else tuple(kind[k] for k in AREAS)
        return Ridge(cell.dataset if name == OWN else name, kind["quantiles"], kind["bits/dim"], areas, x)

    own, *others = map(ridge, in_order(found["kinds"]))
    levels = images[OWN].schema.levels or 256
    plot_ridges(own, others, _path(job, cell), levels=levels, images=found["images"])


RESULT = of_cells(
    PLAN,
    measure,
    COLUMNS,
    about="images that do not belong, told from the data by likelihood and by typicality",
    says="nothing of it; that flows find simple images likely is known (Nalisnick et al., 2019)",
    costs=costs(
        "a flow on 8x8 digits: seconds",
        "2 flows of table4, and a few minutes on a GPU; with --dataset digits minutes on one core",
        "2 flows of table4, and a few minutes on a GPU",
    ),
    notes=("found: areas under the ROC curve; 1 all, 0.5 chance, below: taken for more ordinary than the data",),
    remarks=remarks,
    rows=rows_of,
    pictures=lambda work, groups: [_path(work.job, cell) for cell in PLAN.chosen(work.job)],
)

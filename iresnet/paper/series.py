"""Figures 4 and 9 in common: the power series of a trained flow against exact determinants, on test images.

The paper compares with brute force on 1000 test examples and does not say of which set; here it is MNIST, whose 784
dimensions allow dense Jacobians. Where the paper averages draws, bias and variance are computed from the Jacobians, so
that neither has noise of its own. They are kept in the run folder, as both figures show them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..evaluation import Truncation, truncation
from ..figures import SeriesLine
from ..logdet import terms_needed
from ..results import finite
from ..run import Run
from .cells import FLOW_NAMES, Cell
from .job import Work
from .record import Entry, alike
from .result import Measured, Outcome, Plan, datasets_of, fill, picture_path

#: Test images by budget, the paper's last, and the numbers of terms that are tried. A Jacobian of MNIST takes a second
#: of a core, and biases differ little from image to image: their spread is given.
IMAGES, TERMS = {"smoke": 200, "short": 100, "paper": 1000}, 20


@dataclass(frozen=True)
class Flows(Plan):
    """Cells that are flows of ours; any of them may be asked for."""

    def takes(self, model: str) -> bool:
        return model in FLOW_NAMES


def measured(work: Work, run: Run) -> Truncation:
    """What series are off by on test images: kept in the run folder, or made now."""
    images = work.images(run, IMAGES[work.job.budget])
    kept = run.read_json("evaluation.json").get("truncation")
    if kept is None or (kept["rows"], len(kept["terms"])) != (len(images), TERMS):
        work.say(f"{run.folder.name}: dense Jacobians of {len(images):,} test images")
        kept = finite(asdict(truncation(work.model(run), images, terms=TERMS)))
        keep(run, "truncation", kept)
    content: dict[str, Any] = {k: tuple(v) if isinstance(v, list | tuple) else v for k, v in kept.items()}
    return Truncation(**content)


def keep(run: Run, name: str, content: Any) -> None:
    """Put figures beside those that RUN/evaluation.json has."""
    run.write_json("evaluation.json", {**run.read_json("evaluation.json"), name: content}, run.sha256())


def terms_proven(run: Run, limit: float) -> int | None:
    """How many terms Theorem 3 asks for in the worst block, for a bias below so many bits per dimension in all."""
    blocks = run.read_json("certificate.json").get("blocks", [])
    if not blocks or any(b["lipschitz"] is None or not b["lipschitz"] < 1 for b in blocks):
        return None
    share = limit * run.schema.dimension * math.log(2) / len(blocks)
    return max(terms_needed(b["lipschitz"], math.prod(b["input_shape"]), share) for b in blocks)


def line(e: Entry) -> SeriesLine:
    """What a picture shows of one flow."""
    d = e["details"]
    return SeriesLine(f"{e['dataset']} {e['model']}", d["terms"], d["bias"], d["deviation"], d["bound"])


def drawn(
    work: Work,
    plan: Flows,
    measure: Callable[[Work, Run, Cell], Measured],
    picture: Callable[..., Path],
    columns: Mapping[str, str],
    note: str,
) -> Outcome:
    """Measure the flows of a plan, and draw those of every data set."""
    results, files = fill(work, plan, measure, seeds=work.job.seeds[:1]), []
    for dataset in datasets_of(plan, work.job):
        entries = alike(results.runs, work.job, dataset)
        path = picture_path(work.job, plan.name, dataset, "mnist")
        files.append(picture([line(e) for e in entries], path, images=entries[0]["row"]["images"]))
    return Outcome(results, columns, (work.job.out / f"{plan.name}.json", *files), (note,))

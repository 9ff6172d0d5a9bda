"""Evaluates a trained classifier. The test images are read once, for the final weights, and the metrics are stored.

RUN/reproduction.json holds the test error of the final weights (every layer within its bound) in float32, that of the
weights before tightening on the same images, and the metrics of the inverse. Where the file exists, no image is read
again. `iresnet evaluate`, which may use a subsample, stores its metrics in a file of its own.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from .. import evaluate
from ..certificate import residual_blocks
from ..data import Dataset
from ..data.units import bin_centres
from ..evaluate import error_from_counts
from ..model import Model
from ..results import nonfinite_to_none
from ..run import Run
from ..spelling import outcomes
from ..tree import parameter_count
from .cells import Cell
from .iteration import Algorithm1, Reconstruction
from .job import Work
from .record import Row, cached, damaged_file

#: The file of the metrics in a run folder.
FILE = "reproduction.json"

#: Test images whose codes are inverted, and the steps of Algorithm 1, as in the paper.
IMAGES, STEPS = 128, 100

#: The metrics of a proven inverse, for the worst image, in grey levels.
BOUNDS = ("largest_block_bound", "code_residual", "measured_error", "composed_bound")


def evaluate_cell(work: Work, run: Run, cell: Cell) -> dict[str, Any]:
    """Return the metrics of a cell: those stored in its run folder, else computed now and stored."""
    if known := run.read_json(FILE):
        if not _is_valid(known):
            raise damaged_file(run.folder / FILE)
        return known
    work.say(f"{cell}: reading the test images")
    content: dict[str, Any] = nonfinite_to_none(_evaluate(work, run))
    run.write_json(FILE, content, run.sha256())
    return content


def _is_valid(known: dict[str, Any]) -> bool:
    """Whether all metrics that a result shows are numbers, or None where they may be infinite."""
    try:
        t, iteration, inverse = known["tightening"], known.get("iteration", {}), known.get("inverse", {})
        numbers = [known["parameters"], *(known["error"][k] for k in ("value", "low", "high"))]
        numbers += [t[k]["value"] for k in ("before", "validation", "validation_before")]
        numbers += [iteration[k] for k in ("images", "converged", "diverged") if iteration]
        nullable = [iteration[k] for k in ("code_residual", "largest_error") if iteration]
        nullable += [inverse[k] for k in ("proven", "rows", *BOUNDS) if inverse]
    except (KeyError, TypeError, AttributeError):
        return False
    return all(_is_number(v) for v in (*numbers, *(p for p in nullable if p is not None)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _evaluate(work: Work, run: Run) -> dict[str, Any]:
    device, splits = work.job.device, work.splits(run)
    final = work.model(run)
    before = run.model("best", device)  # the same network before tightening
    test, validation = splits.test.to(device), splits.validation.to(device)
    y = evaluate.require_labels(test)
    classes = [evaluate.logits(m, test).argmax(1) for m in (before, final)]
    wrong_before, wrong = (error_from_counts(int((c != y).sum()), len(test)) for c in classes)
    tightening = {
        "layers": len(run.tightened_layers()),
        "predictions_changed": int((classes[0] != classes[1]).sum()),
        "rows": len(test),
        "before": asdict(wrong_before),
        "validation": asdict(evaluate.error(final, validation)),
        "validation_before": asdict(evaluate.error(before, validation)),
    }
    metrics = {"split": "test", "rows": len(test), "of": len(test), "error": asdict(wrong), "tightening": tightening}
    metrics["parameters"] = parameter_count(final)
    return metrics | _evaluate_inverse(run, final, work.images(run, IMAGES))


def _evaluate_inverse(run: Run, model: Model, images: Dataset) -> dict[str, Any]:
    """Invert codes by the paper's iteration, converging or not; and with a proof, where every block is proven."""
    if not any(True for _ in residual_blocks(model, run.schema.shape)):
        return {}
    metrics: dict[str, Any] = {"iteration": run_iteration(Algorithm1(model), images, STEPS)[0]}
    if certificate_summary(run)["passed"]:
        metrics["inverse"] = asdict(evaluate.inverse(model, images))
    return metrics


def error_on_test_images(work: Work, run: Run, cell: Cell) -> dict[str, Any]:
    """Return the error on all test images and its interval: that in RUN/evaluation.json, else computed and stored."""
    test = work.splits(run).test

    def compute() -> dict[str, Any]:
        work.say(f"{cell}: reading the test images")
        return asdict(evaluate.error(work.model(run), test.to(work.job.device)))

    return cached(run, "error", compute, lambda known: known.get("rows") == len(test))


def run_iteration(algorithm: Algorithm1, images: Dataset, steps: int) -> tuple[dict[str, Any], Reconstruction, Tensor]:
    """Encode images and invert their codes by Algorithm 1; return metrics, the result, and the error of every image."""
    x = bin_centres(images.x, images.schema.levels).double()
    z = algorithm.encode(x)
    result = algorithm.decode(z, steps)
    errors = result.errors(x)
    residual = (algorithm.encode(torch.nan_to_num(result.x)) - z).flatten(1).norm(dim=1)
    residual = torch.where(errors.isfinite(), residual, torch.inf)
    metrics = {
        "steps": steps,
        "images": len(x),
        "converged": int(result.converged.sum()),
        "diverged": int(result.diverged.sum()),
        "median_error": float(errors.median()),
        "largest_error": float(errors.max()),
        "code_residual": float(residual.max()),
        "size": float(x.flatten(1).norm(dim=1).mean()),
    }
    return metrics, result, errors


def certificate_summary(run: Run) -> dict[str, Any]:
    """Summarise the certificate of a run: whether it passed, the number of blocks, the largest Lip(g)."""
    certificate = run.read_json("certificate.json")
    blocks = certificate.get("blocks", [])
    bounds = [b["lipschitz"] for b in blocks]
    return {
        "passed": bool(certificate.get("passed")),
        "blocks": len(blocks),
        "proven": sum(b["verdict"] == "proven" for b in blocks),
        "largest": max(bounds) if bounds and None not in bounds else None,
    }


def run_facts(run: Run, *columns: str) -> Row:
    """Return how a run was trained and what is proven of it, for these columns."""
    e = run.experiment
    made = run.read_json("environment.json")
    certificate = certificate_summary(run)
    known = {
        "epochs": e.training.epochs or None,
        "steps": e.training.steps,
        "batch": e.training.batch,
        "optimiser": e.training.optimiser,
        "rate": e.training.learning_rate,
        "decay": e.training.weight_decay,
        "held out": e.data.validation,
        "cutout": e.data.cutout,
        "smoothing": e.objective.label_smoothing,
        "training s": made.get("seconds"),
        "blocks proven": f"{certificate['proven']} of {certificate['blocks']}" if certificate["blocks"] else None,
        "largest Lip(g)": certificate["largest"],
    }
    return {column: known[column] for column in columns}


def describe_iteration(metrics: dict[str, Any]) -> str:
    """Say whether the iteration converged or diverged."""
    converged, images = metrics["converged"], metrics["images"]
    if metrics["diverged"]:
        return f"the iteration {outcomes(metrics['diverged'], converged, images)}"
    return "the iteration converges" + ("" if converged == images else f" for {converged} of {images}")

"""Evaluates a trained cell. The test images are read once, for the final weights, and the metrics are kept.

RUN/reproduction.json holds them: the test error of the final weights (every layer within its bound) in float32, that of
the weights before tightening on the same images, and the metrics of the inverse. Where the file exists, nothing is read
again; `iresnet evaluate`, which may look at a subsample only, keeps its metrics in a file of its own.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from .. import evaluate
from ..certificate import residual_blocks
from ..data import Dataset
from ..evaluate import error_from_counts
from ..results import nonfinite_to_none
from ..run import Run
from ..train.objective import bin_centres
from .cells import Cell
from .iteration import Rebuilt, Unwinder
from .job import Work
from .record import Row, damaged

#: Where the figures are kept in a run folder.
FILE = "reproduction.json"

#: Test images whose codes are solved back, and the steps of Algorithm 1, as in the paper.
IMAGES, STEPS = 128, 100

#: What a proven inverse is judged by, in grey levels, of the worst image.
BOUNDS = ("largest_block_bound", "code_residual", "measured_error", "composed_bound")


def evaluated(work: Work, run: Run, cell: Cell) -> dict[str, Any]:
    """The figures of a cell: those kept in its run folder, or else made now and kept."""
    if known := run.read_json(FILE):
        if not _is_whole(known):
            raise damaged(run.folder / FILE)
        return known
    work.say(f"{cell}: reading the test images")
    content: dict[str, Any] = nonfinite_to_none(_evaluate(work, run))
    run.write_json(FILE, content, run.sha256())
    return content


def _is_whole(known: dict[str, Any]) -> bool:
    """Whether all figures that a result shows are there, and are numbers or, where one is infinite, None."""
    try:
        t, iteration, inverse = known["tightening"], known.get("iteration", {}), known.get("inverse", {})
        numbers = [known["parameters"], *(known["error"][k] for k in ("value", "low", "high"))]
        numbers += [t[k]["value"] for k in ("before", "validation", "validation_before")]
        numbers += [iteration[k] for k in ("images", "converged", "diverged") if iteration]
        perhaps = [iteration[k] for k in ("code_residual", "largest_error") if iteration]
        perhaps += [inverse[k] for k in ("proven", "rows", *BOUNDS) if inverse]
    except (KeyError, TypeError, AttributeError):
        return False
    return all(_is_number(v) for v in (*numbers, *(p for p in perhaps if p is not None)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _evaluate(work: Work, run: Run) -> dict[str, Any]:
    device, splits = work.job.device, work.splits(run)
    released = work.model(run)
    before = run.model("best", device)  # the same network, with the weights that tightening began with
    test, validation = splits.test.to(device), splits.validation.to(device)
    y, classes = evaluate.require_labels(test), [evaluate.logits(m, test).argmax(1) for m in (before, released)]
    wrong_before, wrong = (error_from_counts(int((c != y).sum()), len(test)) for c in classes)
    tightening = {
        "layers": len(run.tightened_layers()),
        "predictions_changed": int((classes[0] != classes[1]).sum()),
        "rows": len(test),
        "before": asdict(wrong_before),
        "validation": asdict(evaluate.error(released, validation)),
        "validation_before": asdict(evaluate.error(before, validation)),
    }
    found = {"split": "test", "rows": len(test), "of": len(test), "error": asdict(wrong)}
    return found | {"tightening": tightening, "parameters": sum(p.numel() for p in released.parameters())} | _inverted(
        run, released, work.images(run, IMAGES)
    )  # fmt: skip


def _inverted(run: Run, model: nn.Module, images: Dataset) -> dict[str, Any]:
    """Codes solved back by the paper's own iteration, as it goes; and proven, where every block is proven."""
    if not any(True for _ in residual_blocks(model, run.schema.shape)):
        return {}
    found: dict[str, Any] = {"iteration": iterated(Unwinder(model), images, STEPS)[0]}
    return found | {"inverse": asdict(evaluate.inverse(model, images))} if proven(run)["passed"] else found


def iterated(unwinder: Unwinder, images: Dataset, steps: int) -> tuple[dict[str, Any], Rebuilt, Tensor]:
    """What so many steps of Algorithm 1 make of the codes of images: figures, the result, and every image's error."""
    x = bin_centres(images.x, images.schema.levels).double()
    z = unwinder.encode(x)
    rebuilt = unwinder.decode(z, steps)
    errors = rebuilt.errors(x)
    residual = (unwinder.encode(torch.nan_to_num(rebuilt.x)) - z).flatten(1).norm(dim=1)
    residual = torch.where(errors.isfinite(), residual, torch.inf)
    found = {
        "steps": steps,
        "images": len(x),
        "converged": int(rebuilt.converged.sum()),
        "diverged": int(rebuilt.diverged.sum()),
        "median_error": float(errors.median()),
        "largest_error": float(errors.max()),
        "code_residual": float(residual.max()),
        "size": float(x.flatten(1).norm(dim=1).mean()),
    }
    return found, rebuilt, errors


def proven(run: Run) -> dict[str, Any]:
    """What the certificate of a run says: whether it passed, how many blocks, the largest Lip(g)."""
    certificate = run.read_json("certificate.json")
    blocks = certificate.get("blocks", [])
    bounds = [b["lipschitz"] for b in blocks]
    return {
        "passed": bool(certificate.get("passed")),
        "blocks": len(blocks),
        "proven": sum(b["verdict"] == "proven" for b in blocks),
        "largest": max(bounds) if bounds and None not in bounds else None,
    }


def facts(run: Run, *names: str) -> Row:
    """How a run was trained and what is proven of it, for the columns of these names."""
    e, made, certificate = run.experiment, run.read_json("environment.json"), proven(run)
    known = {
        "epochs": e.training.epochs or None,
        "steps": e.training.steps,
        "batch": e.training.batch,
        "optimiser": e.training.optimiser,
        "rate": e.training.learning_rate,
        "decay": e.training.weight_decay,
        "cutout": e.data.cutout,
        "smoothing": e.objective.label_smoothing,
        "training s": made.get("seconds"),
        "blocks proven": f"{certificate['proven']} of {certificate['blocks']}" if certificate["blocks"] else None,
        "largest Lip(g)": certificate["largest"],
    }
    return {name: known[name] for name in names}


def verdict(found: dict[str, Any]) -> str:
    """What the iteration did, as it is."""
    if found["converged"] == found["images"]:
        return "the iteration converges"
    if not found["diverged"]:
        return f"the iteration converges for {found['converged']} of {found['images']}"
    if found["diverged"] == found["images"]:
        return "the iteration diverges"
    return f"the iteration diverges for {found['diverged']} of {found['images']}"

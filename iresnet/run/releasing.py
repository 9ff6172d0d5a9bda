"""From the best weights to a released model: tightened to its bounds, certified, with what later commands need."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from .. import evaluate
from ..certificate import Certificate, certify, tighten_
from ..data import Dataset, Schema, subsample
from ..device import device_of
from ..migration import FORMER_FILES
from ..model import Model
from ..models import INVERSES
from ..presets import Experiment
from ..train import checkpoint
from ..train.checkpoint import Checkpoint
from ..version import __version__
from .callback import VALIDATION_SAMPLES
from .folder import Run
from .made_with import made_with


def release(run: Run, validation: Dataset, device: str = "cpu") -> tuple[Certificate | None, list[str]]:
    """Turn the best weights into the run's model: tightened, certified, with likelihoods of validation samples."""
    model, validation = run.model("best", device), validation.to(device)
    tightened = tighten_(model, run.schema.shape)
    certificate = certify_model(run.experiment, run.schema, model)
    publish(run, model, certificate, validation, {"tightened": tightened})
    return certificate, tightened


def certify_model(experiment: Experiment, schema: Schema, model: Model) -> Certificate | None:
    """Certify the model of an experiment; None for one of another family, which has no residual blocks to certify."""
    return None if experiment.network.family in INVERSES else certify(model, schema.shape)


def publish(
    run: Run, model: Model, certificate: Certificate | None, validation: Dataset, state: Mapping[str, Any]
) -> None:
    """Write a model and its certificate into the run folder, with the likelihoods of validation samples."""
    write_model(run, model, certificate, reference_likelihoods(model, validation), state)


def reference_likelihoods(model: Model, validation: Dataset) -> Tensor | None:
    """Return the log-likelihoods of validation samples, the reference for anomaly scores; None without a density."""
    if not evaluate.has_density(model):
        return None
    return evaluate.log_likelihood(model, subsample(validation.to(device_of(model)), VALIDATION_SAMPLES)).value


def write_model(
    run: Run, model: Model, certificate: Certificate | None, reference: Tensor | None, state: Mapping[str, Any]
) -> None:
    """Write a model and its certificate into the run folder, and remove the files that describe the previous model.

    The new model is written first. If the process is killed, nothing is lost, and files that describe other weights are
    recognised by their digest.
    """
    tensors: dict[str, dict[str, Tensor]] = {"weights": dict(model.state_dict())}
    if reference is not None:
        tensors["reference"] = {"log_likelihood": reference}
    run.add_missing_digests()
    content = Checkpoint(tensors, {**state, "made_with": made_with(run.experiment, run.schema)})
    path = checkpoint.save(content, run.folder / "model.safetensors", version=__version__)
    if certificate is not None:
        write_certificate(run, certificate, checkpoint.sha256(path))
    for name in ("evaluation.json", "reproduction.json", *FORMER_FILES.values(), "report.html"):
        (run.folder / name).unlink(missing_ok=True)


def write_certificate(run: Run, certificate: Certificate, sha256: str) -> Path:
    """Write the certificate of the model with this digest."""
    return run.write_json("certificate.json", json.loads(certificate.to_json()), sha256)

"""`iresnet certify`: prove that every block of a trained model is a contraction, or scale its layers until it is."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from .. import lock
from ..certificate import Certificate, tighten_
from ..certificate import certify as prove
from ..device import choose_device
from ..models import INVERSES
from ..run import Run, publish, write_certificate
from ..spelling import counted
from .console import result, use_threads
from .options import Device, RunFolder
from .output import try_to_save

#: The remedy if no layer can be tightened.
UNCONSTRAINED = (
    " None of its layers is constrained, so none can be tightened. For a proof, train with network.constrained=true "
    "and without BatchNorm."
)


def certify(
    run: RunFolder,
    tighten: Annotated[
        bool,
        typer.Option(
            "--tighten", help="Scale down layers that exceed their coefficient, and save the result as the model."
        ),
    ] = False,
    weights: Annotated[
        str, typer.Option(help="model: the final weights; best: the weights before tightening.")
    ] = "model",
    device: Device = "auto",
) -> None:
    """Prove Lip(g) < 1 for every block, layer by layer. Exit code 1 if a block fails.

    The certificate of the final weights is saved in RUN/certificate.json. Exit code 2 if it cannot be; it is still
    printed.

    Example: iresnet certify runs/demo --weights best --tighten
    """
    opened = Run.open(run).require_writable() if tighten else Run.open(run)
    use_threads(opened.schema.dimension)
    if opened.experiment.network.family in INVERSES:
        raise ValueError(f"nothing to certify: {INVERSES[opened.experiment.network.family]}")
    with lock.lock_folder(opened.folder) if tighten else nullcontext():
        certificate, message, unsaved = _certify(opened, run, weights, choose_device(device), tighten)
    content = {**json.loads(certificate.to_json()), "run": run, "weights": weights, "message": message}
    result(content, str(certificate), *filter(None, [message]))
    if not certificate.passed:
        which = " --weights best" if weights == "best" else ""
        hint = "" if tighten else f" Try: iresnet certify {quote(str(run))}{which} --tighten"
        remedy = hint if _has_coefficient(certificate) else UNCONSTRAINED
        raise RuntimeError(f"the certificate does not pass.{remedy}{unsaved and f' Also, {unsaved}'}")
    if unsaved:
        raise OSError(unsaved)


def _certify(run: Run, name: Path, weights: str, device: str, tighten: bool) -> tuple[Certificate, str, str]:
    """Certify the weights, tightened first if requested.

    Return the certificate, a message about saved files, and why the certificate was not saved, if it should have been.
    """
    sha256, model = run.sha256() if weights == "model" else "", run.model(weights, device)
    changed = tighten_(model, run.schema.shape) if tighten else []
    certificate = prove(model, run.schema.shape)
    if tighten and (changed or weights == "best"):
        tightened = [*run.tightened_layers(), *changed] if weights == "model" else changed
        stale = any((run.folder / file).exists() for file in ("evaluation.json", "report.html"))
        publish(run, model, certificate, run.splits().validation, {"tightened": tightened})
        again = f" Evaluate it again: iresnet evaluate {quote(str(name))}" if stale else ""
        return certificate, f"{counted(len(changed), 'layer')} tightened and saved as the model in {name}.{again}", ""
    unsaved = ""
    if weights == "model":
        _, unsaved = try_to_save(run, lambda: write_certificate(run, certificate, sha256))
    return certificate, _unchanged(certificate, name) if tighten else "", unsaved


def _has_coefficient(certificate: Certificate) -> bool:
    """Whether some layer has a coefficient, which tightening could scale it down to."""
    return any(part.coefficient is not None for part in certificate.layers)


def _unchanged(certificate: Certificate, run: Path) -> str:
    why = "exceeds its coefficient" if _has_coefficient(certificate) else "has a coefficient"
    return f"No layer {why}; the model in {run} is unchanged."

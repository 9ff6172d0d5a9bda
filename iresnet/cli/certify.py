"""`iresnet certify`: what is proven of a trained model, and making it provable."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from .. import lock
from ..certificate import Certificate, tighten_
from ..certificate import certify as prove
from ..models import INVERSES
from ..run import Run, publish, write_certificate
from .console import Device, choose_device, console, use_threads
from .output import RunFolder

#: What the remedy is where there is nothing to tighten.
FREE = (
    " No layer of it is constrained, so there is nothing to tighten. For a proof, train with network.constrained=true "
    "and without BatchNorm."
)


def certify(
    run: RunFolder,
    tighten: Annotated[
        bool, typer.Option("--tighten", help="Scale down what exceeds its coefficient, and keep that.")
    ] = False,
    weights: Annotated[str, typer.Option(help="model: as released; best: as trained.")] = "model",
    device: Device = "auto",
) -> None:
    """Prove Lip(g) < 1 for every block, layer by layer. Exit code 1 if a block fails.

    Example: iresnet certify runs/demo --weights best --tighten
    """
    opened, screen = Run.open(run).require_writable() if tighten else Run.open(run), console()
    use_threads(opened.schema.dimension)
    if opened.experiment.network.family in INVERSES:
        raise ValueError(f"nothing to certify: {INVERSES[opened.experiment.network.family]}")
    with lock.lock_folder(opened.folder) if tighten else nullcontext():
        certificate, words = _certified(opened, run, weights, choose_device(device), tighten)
    screen.say(str(certificate))
    if words:
        screen.say(words)
    if not certificate.passed:
        which = " --weights best" if weights == "best" else ""
        hint = "" if tighten else f" Try: iresnet certify {run}{which} --tighten"
        raise RuntimeError(f"the certificate does not pass.{hint if _constrained(certificate) else FREE}")


def _certified(run: Run, name: Path, weights: str, device: str, tighten: bool) -> tuple[Certificate, str]:
    """What is proven of the weights, tightened if asked for, with what was kept of it; and what to say of that."""
    sha256, model = run.sha256() if weights == "model" else "", run.model(weights, device)
    changed = tighten_(model, run.schema.shape) if tighten else []
    certificate = prove(model, run.schema.shape)
    if tighten and (changed or weights == "best"):
        tightened = [*run.tightened_layers(), *changed] if weights == "model" else changed
        stale = any((run.folder / file).exists() for file in ("evaluation.json", "report.html"))
        publish(run, model, certificate, run.splits().validation, {"tightened": tightened})
        again = f" Evaluate it again: iresnet evaluate {name}" if stale else ""
        return certificate, f"{len(changed)} layers tightened; the model in {name} is now this one.{again}"
    if weights == "model":
        write_certificate(run, certificate, sha256)
    return certificate, _unchanged(certificate, name) if tighten else ""


def _constrained(certificate: Certificate) -> bool:
    """Whether a layer has a coefficient that it can be brought back to."""
    return any(part.coefficient is not None for part in certificate.layers)


def _unchanged(certificate: Certificate, run: Path) -> str:
    why = "exceeds its coefficient" if _constrained(certificate) else "has a coefficient to keep"
    return f"No layer {why}; the model in {run} stays."

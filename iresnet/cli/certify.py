"""`iresnet certify`: what is proven of a trained model, and making it provable."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..architectures import INVERSES
from ..certificate import Certificate, tighten_
from ..certificate import certify as prove
from ..run import Run, publish
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
    opened, screen = Run.open(run).own() if tighten else Run.open(run), console()
    use_threads(opened.schema.dimension)
    if opened.experiment.network.family in INVERSES:
        raise ValueError(f"nothing to certify: {INVERSES[opened.experiment.network.family]}")
    model = opened.model(weights, choose_device(device))
    changed = tighten_(model, opened.schema.shape) if tighten else []
    certificate = prove(model, opened.schema.shape)
    screen.print(str(certificate), highlight=False, soft_wrap=True)
    if tighten and (changed or weights == "best"):
        tightened = [*opened.tightened(), *changed] if weights == "model" else changed
        stale = any((opened.folder / name).exists() for name in ("evaluation.json", "report.html"))
        publish(opened, model, certificate, opened.splits().validation, {"tightened": tightened})
        words = f"{len(changed)} layers tightened; the model in {run} is now this one."
        again = f" Evaluate it again: iresnet evaluate {run}" if stale else ""
        screen.print(words + again, highlight=False, soft_wrap=True)
    elif weights == "model":
        certificate.to_json(opened.output / "certificate.json")
        if tighten:
            screen.print(_unchanged(certificate, run), highlight=False, soft_wrap=True)
    if not certificate.passed:
        which = " --weights best" if weights == "best" else ""
        hint = "" if tighten else f" Try: iresnet certify {run}{which} --tighten"
        raise RuntimeError(f"the certificate does not pass.{hint if _constrained(certificate) else FREE}")


def _constrained(certificate: Certificate) -> bool:
    """Whether a layer has a coefficient that it can be brought back to."""
    return any(part.coefficient is not None for part in certificate.layers)


def _unchanged(certificate: Certificate, run: Path) -> str:
    why = "exceeds its coefficient" if _constrained(certificate) else "has a coefficient to keep"
    return f"No layer {why}; the model in {run} stays."

"""`iresnet certify`: what is proven of a trained model, and making it provable."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from .. import atomic
from ..certificate import certify as prove
from ..certificate import tighten_
from ..run import Run, publish
from .console import console, use_threads
from .output import RunFolder


def certify(
    run: RunFolder,
    tighten: Annotated[
        bool, typer.Option("--tighten", help="Scale down what exceeds its coefficient, and keep that.")
    ] = False,
    weights: Annotated[str, typer.Option(help="model: as released; best: as trained.")] = "model",
) -> None:
    """Prove Lip(g) < 1 for every block, layer by layer. Exit code 1 if a block fails.

    Example: iresnet certify runs/demo --weights best --tighten
    """
    opened, screen = Run.open(run), console()
    use_threads(math.prod(opened.schema.shape))
    model = opened.model(weights)
    changed = tighten_(model, opened.schema.shape) if tighten else []
    certificate = prove(model, opened.schema.shape)
    screen.print(str(certificate), highlight=False, soft_wrap=True)
    if tighten:
        tightened = [*opened.tightened(), *changed] if weights == "model" else changed
        publish(opened, model, certificate, opened.splits().validation, {"tightened": tightened})
        screen.print(
            f"{len(changed)} layers tightened; the model in {run} is now this one.", highlight=False, soft_wrap=True
        )
    elif weights == "model":
        atomic.write(run / "certificate.json", certificate.to_json() + "\n")
    if not certificate.passed:
        hint = "" if tighten else f" Try: iresnet certify {run} --tighten"
        raise RuntimeError(f"the certificate does not pass.{hint}")

"""`iresnet audit`: every guarantee of a trained model derived again from its files, by other algorithms."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from ..audit import Subject
from ..audit import audit as derive
from ..run import Run
from .console import console, use_threads, waiting
from .output import RunFolder


def audit(
    run: RunFolder,
    seed: Annotated[
        int, typer.Option(help="Decides rows, probes and which blocks come first.", min=0, max=2**63 - 1)
    ] = 0,
    seconds: Annotated[float, typer.Option(help="Time for checks of many blocks: more time, more blocks.")] = 8.0,
) -> None:
    """Check every guarantee of a model by another algorithm than made it. Exit code 1 if a check fails.

    Nothing is written, and no data are needed.

    Example: iresnet audit runs/demo

    Example: iresnet audit mnist-flow-noise --seconds 60
    """
    if not 0 < seconds < float("inf"):
        raise ValueError(f"--seconds must be positive; got {seconds}. Use 8, or more for more blocks.")
    subject, screen, start = Subject(Run.open(run), seed=seed, seconds=seconds), console(), time.perf_counter()
    use_threads(subject.schema.dimension, 1)  # small batches: more threads would only wait for each other
    findings = []
    with waiting(screen, "Checking …"):
        for finding in derive(subject):
            findings.append(finding)
            screen.say(str(finding))
    failed = [f.name for f in findings if f.holds is False]
    made = sum(f.holds is not None for f in findings)
    took = f"{time.perf_counter() - start:.0f} s"
    if failed:
        raise RuntimeError(f"{len(failed)} of {made} checks fail after {took}: {', '.join(failed)}.")
    screen.print(f"PASSED: {made} checks hold, {len(findings) - made} do not apply; {took}.", highlight=False)

"""`iresnet audit`: check every guarantee of a trained model from its files, by independent algorithms."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated

import typer

from ..audit import Subject
from ..audit import audit as run_checks
from ..run import Run
from .console import console, result, show, use_threads, waiting
from .options import RunFolder


def audit(
    run: RunFolder,
    seed: Annotated[
        int, typer.Option(help="Seed for the samples, the probes and the order of the blocks.", min=0, max=2**63 - 1)
    ] = 0,
    seconds: Annotated[
        float, typer.Option(help="Time limit of each check that goes block by block; more time checks more blocks.")
    ] = 8.0,
) -> None:
    """Check every guarantee of a model by an independent algorithm. Exit code 1 if a check fails.

    It writes nothing and needs no data.

    Example: iresnet audit runs/demo

    Example: iresnet audit mnist-flow-noise --seconds 60
    """
    if not 0 < seconds < float("inf"):
        raise ValueError(f"--seconds must be positive; got {seconds}. Use 8, or more to check more blocks.")
    subject, screen, start = Subject(Run.open(run), seed=seed, seconds=seconds), console(), time.perf_counter()
    use_threads(0)  # small batches: more threads would only wait for each other
    findings = []
    with waiting(screen, "Checking …"):
        for finding in run_checks(subject):
            findings.append(finding)
            show(str(finding))
    failed = [f.name for f in findings if f.holds is False]
    done, seconds_taken = sum(f.holds is not None for f in findings), time.perf_counter() - start
    passed = f"PASSED: {done} checks passed, {len(findings) - done} do not apply; {seconds_taken:.0f} s."
    content = {"passed": not failed, "checks": [asdict(f) for f in findings], "seconds": seconds_taken}
    result(content, *([] if failed else [passed]))
    if failed:
        raise RuntimeError(f"{len(failed)} of {done} checks failed after {seconds_taken:.0f} s: {', '.join(failed)}.")

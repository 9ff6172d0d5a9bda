"""Every guarantee of a model derived again from its files, by another algorithm than the one that made it.

A check takes the library's public answer as the claim. To test it, it takes the modules' own forward pass, which is
what the claim is about, and nothing else of the library. Random checks fail by chance less than once in a million.
In reading order: `subject` (what is audited), `files`, `norms`, `extended` (g in extended precision) and `inverse`,
`logdet`, `samples`, `radius`. docs/guide/audit.md says what every check compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from safetensors import SafetensorError

from ..spectral import NoBoundKnown
from . import files, inverse, logdet, norms, radius, samples
from .subject import Finding, Skipped, Subject, Verdict

__all__ = ["CHECKS", "Finding", "Subject", "audit"]

CHECKS: dict[str, Callable[[Subject], Verdict]] = {
    "weights": files.weights, "digest": files.digest, "certificate": files.certificate,
    "norms": norms.norms, "contraction": norms.contraction, "whole map": norms.whole_map,
    "inverse": inverse.inverse, "round trip": inverse.round_trip,
    "log-determinant": logdet.log_determinant, "error bars": logdet.error_bars, "noise": logdet.noise,
    "likelihood": logdet.likelihood, "samples": samples.samples, "radius": radius.radius,
    "evaluation": files.evaluation,
}  # fmt: skip


def audit(subject: Subject) -> Iterator[Finding]:
    """The findings of every check, one after the other."""
    try:
        _ = subject.model
    except (SafetensorError, OSError, RuntimeError, ValueError):
        subject.run.model()  # has a sentence for it
        raise
    for name, check in CHECKS.items():
        yield _finding(name, check, subject)


def _finding(name: str, check: Callable[[Subject], Verdict], subject: Subject) -> Finding:
    try:
        return Finding(name, *check(subject))
    except (Skipped, NoBoundKnown) as reason:
        return Finding(name, None, f"skipped: {reason}".rstrip("."))
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise
        kind = "" if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__} "
        return Finding(name, False, f"the check could not be made: {kind}{str(error).partition(chr(10))[0]}")

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
from .files import certificate, digest, evaluation, weights
from .inverse import inverse, round_trip
from .logdet import error_bars, likelihood, log_determinant, noise
from .norms import contraction, norms, whole_map
from .radius import radius
from .samples import samples
from .subject import Finding, Skipped, Subject, Verdict

__all__ = ["CHECKS", "Finding", "Subject", "audit"]

CHECKS: dict[str, Callable[[Subject], Verdict]] = {
    "weights": weights, "digest": digest, "certificate": certificate, "norms": norms, "contraction": contraction,
    "whole map": whole_map, "inverse": inverse, "round trip": round_trip, "log-determinant": log_determinant,
    "error bars": error_bars, "noise": noise, "likelihood": likelihood, "samples": samples, "radius": radius,
    "evaluation": evaluation,
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

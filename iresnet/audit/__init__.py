"""Audit a trained model: test every claim about it, from its files, with an independent algorithm.

A check takes the library's public answer as the claim. To test it, it uses only the forward pass of the modules, which
the claim is about, and nothing else of the library. Random checks fail by chance less than once in a million times.
In reading order: `subject` (the model under audit), `files`, `norms`, `extended` (g in extended precision) and
`inverse`, `logdet`, `samples`, `radius`. docs/guide/audit.md lists what every check compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from safetensors import SafetensorError

from ..progress import part
from ..spectral import NoBoundKnown
from . import files, inverse, logdet, norms, radius, samples
from .subject import Finding, Skipped, Subject, Verdict

__all__ = ["CHECKS", "Finding", "Subject", "audit"]

CHECKS: dict[str, Callable[[Subject], Verdict]] = {
    "weights": files.check_weights, "digest": files.check_digest, "certificate": files.check_certificate,
    "norms": norms.check_norms, "contraction": norms.check_contraction, "whole map": norms.check_whole_map,
    "inverse": inverse.check_inverse, "round trip": inverse.check_round_trip,
    "log-determinant": logdet.check_log_determinant, "error bars": logdet.check_error_bars, "noise": logdet.check_noise,
    "likelihood": logdet.check_likelihood, "samples": samples.check_samples, "radius": radius.check_radius,
    "evaluation": files.check_evaluation,
}  # fmt: skip

#: Checks that call parts of the model on samples of their own, without a context.
WITHOUT_CONTEXT = (
    "contraction", "whole map", "inverse", "round trip", "log-determinant", "error bars", "likelihood", "samples",
)  # fmt: skip


def audit(subject: Subject) -> Iterator[Finding]:
    """Run every check and yield its result."""
    try:
        _ = subject.model
    except (SafetensorError, OSError, RuntimeError, ValueError):
        subject.run.model()  # raises an error that says what is wrong
        raise
    for i, (name, check) in enumerate(CHECKS.items()):
        with part(i, len(CHECKS)):
            finding = _finding(name, check, subject)
        yield finding


def _finding(name: str, check: Callable[[Subject], Verdict], subject: Subject) -> Finding:
    try:
        if name in WITHOUT_CONTEXT and subject.takes_context:
            raise Skipped("a conditional density needs a context, which this check does not have")
        return Finding(name, *check(subject))
    except (Skipped, NoBoundKnown) as reason:
        return Finding(name, None, f"skipped: {reason}".rstrip("."))
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise
        kind = "" if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__} "
        return Finding(name, False, f"the check failed to run: {kind}{str(error).partition(chr(10))[0]}")

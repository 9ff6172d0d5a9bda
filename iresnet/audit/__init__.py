"""Every guarantee of a model derived again from its files, by another algorithm than the one that made it.

weights          the file's tensors are those of the model, constrained layers included
digest           the files that name the weights they belong to name these
certificate      certificate.json against bounds that are computed again
norms            dense singular values, or Lanczos, from below: none may exceed a layer's bound
contraction      pairs of points that climb ||g(a) - g(b)|| / ||a - b||: none may exceed a block's constant
whole map        the same for F, between 1 / Lip(F^-1) and Lip(F)
inverse          every block's solve against a solve in extended precision
round trip       the whole inverse against the rows that were encoded
log-determinant  the series against the determinant of the dense Jacobian, on small slices
error bars       how often value +- 1.96 standard errors covers that determinant
noise            ln q of learned noise against its dense Jacobian
likelihood       log p of the whole model against the dense Jacobian, up to 64 dimensions
samples          samples against the integrated density, up to 4 dimensions
radius           projected gradient steps within the certified radius: none may change the class
evaluation       evaluation.json against the likelihoods in the model's file

A check takes the library's public answer for the claim, and nothing of the library's for the check but the modules'
own forward pass, which is what the claims are about. Random checks fail by chance less than once in a million.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

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
    "weights": weights,
    "digest": digest,
    "certificate": certificate,
    "norms": norms,
    "contraction": contraction,
    "whole map": whole_map,
    "inverse": inverse,
    "round trip": round_trip,
    "log-determinant": log_determinant,
    "error bars": error_bars,
    "noise": noise,
    "likelihood": likelihood,
    "samples": samples,
    "radius": radius,
    "evaluation": evaluation,
}


def audit(subject: Subject) -> Iterator[Finding]:
    """The findings of every check, one after the other."""
    for name, check in CHECKS.items():
        yield _finding(name, check, subject)


def _finding(name: str, check: Callable[[Subject], Verdict], subject: Subject) -> Finding:
    try:
        holds, words = check(subject)
    except (Skipped, NoBoundKnown) as reason:
        return Finding(name, None, f"skipped: {reason}".rstrip("."))
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise
        return Finding(name, False, f"the check could not be made: {str(error).partition(chr(10))[0]}")
    return Finding(name, holds, words)

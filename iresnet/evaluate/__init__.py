"""What a finished model does on data it was not trained on: error, likelihood, inverse, scores, with error bars.

error          the share of rows it gets wrong, with the 95 % interval of Wilson
likelihood     of integers, E ln p(x + u) over uniform u (App. C.3), a lower bound of ln P(x): a mean over draws of u
               (and of probes, beyond 64 dimensions), with its standard error; of real numbers, ln p(x) itself
inverse        codes solved back to inputs in float64, the three end-to-end numbers beside each other
robustness     how far a row may be moved before its class can change, proven, beside what an attack does
protocol       the likelihood of a test set as the paper has it: bias proven and noise driven below 1e-4 bits/dim
truncation     what a power series with so many terms is off by, against exact determinants
typicality     whether a row is as likely as rows of the data are, beside how likely it is
probe          the error of logistic regression on codes, beside that on the inputs
score          the likelihood of a row in its own units, and the share of held-out rows that are more likely than it
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import nn

from ..data import Dataset, subsample
from ..train.objective import MISSING
from .classes import Error, confusion, error, error_of, has_head, labels, logits
from .likelihood import (
    Density,
    Draws,
    anomaly,
    as_flow,
    corrupted,
    density,
    detection,
    draw,
    has_density,
    log_likelihood,
)
from .probe import Probe, probe
from .protocol import Likelihood, protocol
from .robustness import Robust, certified_radius, robustness, withstands
from .solving import Inverse, has_inverse, interpolate, inverse, inverse_of, reconstruct
from .truncation import Truncation, truncation
from .typicality import Detection, atypicality, below_chance, outside, strange, told_apart, typicality

__all__ = [
    "Density",
    "Detection",
    "Draws",
    "Error",
    "Inverse",
    "Likelihood",
    "Probe",
    "Robust",
    "Truncation",
    "anomaly",
    "as_flow",
    "atypicality",
    "below_chance",
    "certified_radius",
    "confusion",
    "corrupted",
    "density",
    "detection",
    "draw",
    "error",
    "error_of",
    "evaluate",
    "has_density",
    "has_head",
    "has_inverse",
    "interpolate",
    "inverse",
    "inverse_of",
    "labels",
    "log_likelihood",
    "logits",
    "outside",
    "probe",
    "protocol",
    "reconstruct",
    "robustness",
    "strange",
    "told_apart",
    "truncation",
    "typicality",
    "withstands",
]


def evaluate(
    model: nn.Module, data: Dataset, *, split: str = "test", draws: int = 8, rows: int = 500
) -> dict[str, Any]:
    """Everything this model can be judged by, as plain values; the inverse on `rows` of the rows."""
    content: dict[str, Any] = {"split": split, "rows": len(data)}
    if has_head(model) and data.y is not None and bool((data.y != MISSING).any()):
        content |= {"error": asdict(error(model, data)), "confusion": confusion(model, data)}
    if has_density(model):
        content["density"] = asdict(density(model, data, draws=draws))
    if has_inverse(model):
        content["inverse"] = asdict(inverse(model, subsample(data, rows)))
    return content

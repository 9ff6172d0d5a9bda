"""Evaluate a trained model on unseen data: error, likelihood, inverse, robustness and anomaly scores, with error bars.

error          classification error, with its 95 % interval (Wilson)
density        mean negative log-likelihood, with its errors. For integers, E ln p(x + u) over uniform u (App. C.3), a
               lower bound of ln P(x), is a mean over draws of u (and of probes, beyond 64 dimensions)
baselines      the same for one Gaussian and a mixture of Gaussians, and by how much the model is better
inverse        codes inverted in float64: proven bounds, code residual and measured error
robustness     certified accuracy at a radius, next to the accuracy under an attack
protocol       the likelihood of a test set by the paper's protocol: bias and standard error below 1e-4 bits/dim
truncation     bias and standard deviation of a power series by its number of terms, against exact determinants
probe          the error of logistic regression on codes, next to that on the inputs
anomaly        the fraction of held-out samples that are more likely than a sample
typicality     the distance of a sample's -ln p from the entropy, next to how likely it is
column_gains   how much more likely a row of a table would be with an ordinary value in one column
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import Tensor

from ..data import Dataset, Splits, subsample
from ..data.labels import MISSING
from ..model import Model
from ..progress import phase
from .attack import survives_attack
from .baselines import Baseline, baselines, why_no_baselines
from .classes import Error, confusion, error, error_from_counts, logits, require_labels
from .contributions import column_gains
from .density import Density, check_mean, density, summarise_density
from .draws import DRAWS, log_prob_draws, shared_log_prob_draws
from .likelihood import Tolerance, log_likelihood, score_tolerance
from .probe import Probe, probe
from .protocol import Likelihood, protocol
from .radius import certified_radius
from .robustness import Robustness, robustness
from .roles import as_classifier, as_flow, has_density, has_head, has_inverse
from .solving import Inverse, interpolate, inverse, reconstruct, summarise_inverse
from .streaming import evaluate_chunks
from .truncation import Truncation, truncation
from .typicality import (
    Detection,
    anomaly,
    atypicality,
    auroc,
    below_chance,
    corrupted_datasets,
    corruption_detection,
    detection_from_likelihoods,
    ood_detection,
    typicality,
)

__all__ = [
    "DRAWS",
    "Baseline",
    "Density",
    "Detection",
    "Error",
    "Inverse",
    "Likelihood",
    "Probe",
    "Robustness",
    "Tolerance",
    "Truncation",
    "anomaly",
    "as_classifier",
    "as_flow",
    "atypicality",
    "auroc",
    "baselines",
    "below_chance",
    "certified_radius",
    "column_gains",
    "confusion",
    "corrupted_datasets",
    "corruption_detection",
    "density",
    "detection_from_likelihoods",
    "error",
    "error_from_counts",
    "evaluate",
    "evaluate_chunks",
    "has_density",
    "has_head",
    "has_inverse",
    "interpolate",
    "inverse",
    "log_likelihood",
    "log_prob_draws",
    "logits",
    "ood_detection",
    "probe",
    "protocol",
    "reconstruct",
    "require_labels",
    "robustness",
    "score_tolerance",
    "shared_log_prob_draws",
    "summarise_inverse",
    "survives_attack",
    "truncation",
    "typicality",
    "why_no_baselines",
]


def evaluate(
    model: Model,
    data: Dataset,
    *,
    split: str = "test",
    draws: int = 8,
    rows: int = 500,
    fitting: Splits | None = None,
    values: Tensor | None = None,
) -> dict[str, Any]:
    """Compute every metric that applies to this model, as plain values; the inverse on at most `rows` samples.

    `fitting` are the splits whose training rows the baselines of a density of rows are fitted to; None: no baselines.
    `values` are the log-likelihoods, if `log_prob_draws` has computed them already with so many draws.
    """
    content: dict[str, Any] = {"split": split, "rows": len(data)}
    if has_head(model) and data.y is not None and bool((data.y != MISSING).any()):
        with phase("error"):
            content |= {"error": asdict(error(model, data)), "confusion": confusion(model, data)}
    if has_density(model):
        check_mean(data)
        with phase("likelihood"):
            found = log_prob_draws(model, data, draws) if values is None else values
        content["density"] = asdict(summarise_density(found, model, data))
        if fitting is not None and not why_no_baselines(data.schema):
            with phase("baselines"):
                made = baselines(model, data, fitting.train, fitting.validation, values=found)
            content["baselines"] = [asdict(baseline) for baseline in made]
    if has_inverse(model):
        with phase("inverse"):
            content["inverse"] = asdict(inverse(model, subsample(data, rows)))
    return content

"""Estimators of ln det(I + J), J the Jacobian of a residual branch: exact, truncated, or unbiased.

    ln det(I + J) = tr ln(I + J) = sum_k (-1)^(k+1) tr(J^k) / k,     tr(A) = E[v' A v]        (Eq. 4, 5, Algorithm 2)

`PowerSeries` stops after n terms, with an error of at most `truncation_bound` (Theorem 3). `RussianRoulette` stops at a
random term and reweights the terms, so that its mean is exact. Value and gradient are computed in one pass: the
gradient of ln det is tr((I + J)^-1 dJ) = E[s' dJ v] with the Neumann sum s = sum_k (-1)^k (J')^k v, so only ONE
vector-Jacobian product, that of s, needs a graph, and memory does not grow with the number of terms. The gradient
equals that of the value in expectation, not for a single probe. Differentiating it again raises an error.

Weights of the roulette, with P_k = P(N >= k): value (-1)^(k+1) / (k P_k) for k = 1..N; gradient (-1)^k / P_(k+1) for
k = 0..N-1. With continuation probability q, the variance is guaranteed to be finite only if q > L^2. A training step
draws one N for the whole batch (`StoppedRoulette`): the number of terms is then known before the step starts, so the
step can be compiled or captured in a CUDA graph.

Reading order: `bounds` (how many terms), `jacobian` (J as a linear map), `probes` (random vectors), `sums` (value and
gradient from products with J'), `determinant` (exact; elimination for many small matrices), `estimators`, `roulette`
(the unbiased ones).
"""

from .bounds import terms_needed, truncation_bound
from .determinant import exact_logdet, exact_logdet_and_inverse, safe_inverse_and_logdet
from .estimators import (
    EVAL_PROBES,
    EVAL_SEED,
    EVAL_TOLERANCE,
    EXACT_UP_TO,
    AdaptiveSeries,
    CertifiedSeries,
    DrawnSeries,
    Estimator,
    Exact,
    FixedSeries,
    PowerSeries,
    SeriesDraw,
    check_estimator,
)
from .jacobian import Jacobian, VectorJacobianProduct
from .probes import Probe, draw_probe_noise, draw_probes, noise_to_probes
from .roulette import AdaptiveRoulette, RussianRoulette, StoppedRoulette
from .sums import (
    adaptive_series,
    attach_gradient,
    power_series,
    refuse_second_derivative,
    roulette_weights,
    series_weights,
)

__all__ = [
    "CertifiedSeries",
    "DrawnSeries",
    "EVAL_PROBES",
    "EVAL_SEED",
    "EVAL_TOLERANCE",
    "EXACT_UP_TO",
    "Estimator",
    "Exact",
    "FixedSeries",
    "Jacobian",
    "PowerSeries",
    "Probe",
    "VectorJacobianProduct",
    "RussianRoulette",
    "AdaptiveRoulette",
    "AdaptiveSeries",
    "SeriesDraw",
    "StoppedRoulette",
    "attach_gradient",
    "check_estimator",
    "draw_probes",
    "draw_probe_noise",
    "exact_logdet",
    "exact_logdet_and_inverse",
    "refuse_second_derivative",
    "roulette_weights",
    "safe_inverse_and_logdet",
    "power_series",
    "series_weights",
    "adaptive_series",
    "noise_to_probes",
    "terms_needed",
    "truncation_bound",
]

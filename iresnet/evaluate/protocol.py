"""The likelihood of a test set by the paper's protocol (App. C.3), with bias and standard error below given limits.

bias        every block gets as many terms as Theorem 3 requires, so that truncation costs at most `bias` in total
noise       a pilot run on a subsample determines the number of draws (of probes, and of noise for integers) for which
            the standard error of the MEAN over samples stays below `error`; the estimate uses fresh draws, since
            stopping when the error looks small would bias it
roulette    if a block would need more than 200 terms, all blocks use an unbiased estimate instead, with q > L^2

The mean over n samples and K draws has the error sqrt(v / (n K)), with v the variance of one draw, averaged over
samples. Because n divides it, few draws per sample suffice; the error of one sample is reported separately.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..certificate import residual_blocks
from ..data import Dataset, subsample
from ..data.units import nats_per_bit_per_dim, nats_per_unit, unit_name
from ..flow import Flow
from ..logdet import EXACT_UP_TO, CertifiedSeries, Estimator, Exact, RussianRoulette, terms_needed
from ..model import Model
from ..progress import phase
from ..spelling import round_up
from ..transform import check_eval
from ..transforms import Imported
from ..transforms.dequantisation import has_noise
from .density import check_mean
from .draws import log_prob_by_generator
from .roles import as_flow

#: The paper's limit for the bias, and for the standard error of the mean, in bits per dimension.
LIMIT = 1e-4

#: The most terms of a series, above which the roulette is used; the terms of the roulette that are never skipped.
MAX_TERMS, CERTAIN_TERMS = 200, 20

#: Methods whose log-determinant an ODE solver integrates, without proof, and what is integrated.
SOLVED = {"trace": "the exact trace", "probe": "a trace estimate with one probe"}

#: Samples and draws of the pilot run, and the most draws of the estimate.
PILOT_SAMPLES, PILOT_DRAWS, MAX_DRAWS = 200, 8, 1000


@dataclass(frozen=True)
class Likelihood:
    """Mean of -log p over samples, in `unit`, and its errors, in the same unit.

    `bias_bound` is proven (or asserted, if `proven` is false), and zero for exact determinants and the roulette. It is
    infinite if a part of the model is not known, a roulette relies on a constant that is asserted, or a value is not
    finite.
    `estimator_error` is the standard error due to probes and noise, `standard_error` that due to the choice of samples:
    the bootstrap's, which for a mean has a closed form. `row_error` is the root mean square error of the estimate for
    one sample. `reached` says whether the estimator's error is below its limit.
    """

    value: float
    unit: str
    rows: int
    method: str
    terms: int
    draws: int
    bias_bound: float
    estimator_error: float
    standard_error: float
    row_error: float
    proven: bool
    reached: bool

    def __str__(self) -> str:
        remark = "" if self.reached else ", ABOVE the limit"
        return (
            f"{self.value:.4f} {self.unit}; {self._bias()}; estimator ± {self.estimator_error:.1e} "
            f"({self._draws()}{remark}); over {self.rows:,} samples ± {self.standard_error:.4f}; "
            f"one sample ± {self.row_error:.4f}"
        )

    def _bias(self) -> str:
        if math.isinf(self.bias_bound) and self.method not in SOLVED:
            return "no bound of the bias known (a part of the model is not known, or its constant is asserted)"
        if self.method == "exact":
            return f"bias 0 (exact determinants{'' if self.proven else '; not every block is proven'})"
        if self.method in SOLVED:
            return f"bias 0 except the solver's ({SOLVED[self.method]})"
        if self.method == "roulette":
            return f"bias 0, roulette ({self.terms} terms, then a random number more)"
        how = "" if self.proven else ", as asserted"
        return f"bias at most {round_up(self.bias_bound, '.1e')}{how} (at most {self.terms} terms per block)"

    def _draws(self) -> str:
        return "1 draw" if self.draws == 1 else f"{self.draws:,} draws per sample"


@dataclass(frozen=True)
class _Method:
    """How log-determinants are computed, and the bound of the bias in nats, known before any draw."""

    method: str
    estimator: Estimator
    terms: int = 0
    bias_bound: float = 0.0
    proven: bool = True


@torch.no_grad()
def protocol(
    model: Model,
    data: Dataset,
    *,
    bias: float = LIMIT,
    error: float = LIMIT,
    seed: int = 0,
    max_draws: int = MAX_DRAWS,
    exact_up_to: int = EXACT_UP_TO,
) -> Likelihood:
    """Compute the mean negative log-likelihood with a bias and a standard error below limits, in bits per dimension.

    Up to `exact_up_to` dimensions determinants are exact. At most `max_draws` draws are used; `reached` says whether
    the standard error is below its limit.
    """
    check_limits(bias, error, max_draws)
    check_mean(data)
    check_eval(model, "a likelihood")
    flow, d = as_flow(model), data.schema.dimension
    bit = nats_per_bit_per_dim(data.x.shape[1:])
    scale = nats_per_unit(data.x.shape[1:], data.schema.levels)
    method = _Method(_closed_form(flow), Exact()) if d <= exact_up_to else _method(flow, data.schema.shape, bias * bit)
    generator = torch.Generator(data.x.device).manual_seed(seed)

    random = method.method not in ("exact", "trace") or has_noise(flow, data.schema.levels)
    count = 1
    if random:
        with phase("number of draws"):
            few, draws = subsample(data, PILOT_SAMPLES), [generator] * PILOT_DRAWS
            pilot = log_prob_by_generator(flow, few, method.estimator, draws)
        count = _draws_needed(pilot, len(data), error * bit)
    values = log_prob_by_generator(flow, data, method.estimator, [generator] * min(count, max_draws))
    known, proven = flow.proof_status(data.schema.shape)
    finite = bool(values.isfinite().all())
    bounded = finite and known and (proven or method.method != "roulette")
    row_error = float(values.var(0).mean().div(len(values)).sqrt()) if random else 0.0
    return Likelihood(
        value=float(-values.mean()) / scale,
        unit=unit_name(data.schema.levels),
        rows=len(data),
        method=method.method,
        terms=method.terms,
        draws=len(values),
        bias_bound=method.bias_bound / scale if bounded else math.inf,
        estimator_error=row_error / math.sqrt(len(data)) / scale,
        standard_error=float(values.mean(0).std()) / math.sqrt(len(data)) / scale,
        row_error=row_error / scale,
        proven=method.proven and proven,
        reached=finite and row_error <= error * bit * math.sqrt(len(data)),
    )


def check_limits(bias: float, error: float, max_draws: int = MAX_DRAWS) -> None:
    """Refuse limits that are not positive, and too few draws."""
    for name, value in (("bias", bias), ("error", error)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive, in bits per dimension; got {value}. The paper uses 1e-4.")
    if max_draws < 2:
        raise ValueError(f"max_draws must be at least 2, to estimate the error of the draws; got {max_draws}.")


def _method(flow: Flow, shape: tuple[int, ...], bias: float) -> _Method:
    """Choose a series with terms from the proven bounds, `bias` nats shared evenly by the blocks; or the roulette."""
    blocks = [(block.bound(at), math.prod(at or shape)) for _, block, at in residual_blocks(flow, shape)]
    if not blocks:
        return _Method(_closed_form(flow), Exact())
    if worst := [b.value for b, _ in blocks if not b.value < 1]:
        raise ValueError(
            f"a likelihood needs contractions; got Lip(g) <= {max(worst):.4g}. See certify(model); tighten_(model) "
            "fixes it."
        )
    share, proven = bias / len(blocks), all(b.proven for b, _ in blocks)
    terms = [terms_needed(b.value, d, share) for b, d in blocks]
    if max(terms) > MAX_TERMS:
        return _Method("roulette", RussianRoulette(CERTAIN_TERMS), CERTAIN_TERMS, 0.0, proven)
    # Not Theorem 3's bound for these terms: a sample stops once its remainder is below the share, which is more.
    return _Method("series", CertifiedSeries(share), max(terms), bias, proven)


def _closed_form(flow: Flow) -> str:
    """The name of the method without a series: exact determinants, or those that an ODE solver integrates."""
    integrated = [m for m in flow.modules() if isinstance(m, Imported) and m.adaptive]
    if not integrated:
        return "exact"
    return "probe" if any(m.random for m in integrated) else "trace"


def _draws_needed(pilot: Tensor, samples: int, error: float) -> int:
    """The draws for which sqrt(v / (samples draws)) <= `error`, with v two standard errors above its estimate."""
    v = pilot.var(0)
    high = float(v.mean()) + (2 * float(v.std()) / math.sqrt(len(v)) if len(v) > 1 else 0.0)
    return max(2, math.ceil(high / (samples * error * error)))

"""The log-likelihood of every sample, in the units of the data, with its errors reported separately.

Integers x are dequantised: E ln p(x + u) over uniform u in [0, 1) (App. C.3) is a lower bound of ln P(x). It is the
mean over `draws` of u and of the probes of log-determinants. A tolerance determines how many draws a sample needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data import Dataset, Schema
from ..data.dataset import check_dataset
from ..flow import LogProb
from ..model import Model
from ..train.threads import suitable_threads
from ..transforms.columns import ColumnTransform
from .draws import DRAWS, Likelihoods, has_errors, is_estimated, log_prob_draws
from .roles import as_flow

#: The fewest and the most draws of a sample if a tolerance is given.
FEWEST, MOST = 4, 16

#: The standard error of a score, as a share of the standard deviation of the reference: ranks hardly change.
SHARE = 0.025


@dataclass(frozen=True)
class Tolerance:
    """How large the standard error of ln p may be, in nats: `error`, or more where ln p is far from `centre`.

    `share` is that of the distance from `centre`: a sample that is a thousand nats away is not confused with others.
    """

    error: float
    share: float = 0.0
    centre: float = 0.0

    def __post_init__(self) -> None:
        if not self.error > 0:
            raise ValueError(f"tolerance must be positive, in nats; got {self.error}.")

    def at(self, values: Tensor) -> Tensor:
        """Return the largest standard error for these log-likelihoods."""
        shares = self.share * (values - self.centre).abs()  # NaN for -inf without a share
        return shares.nan_to_num(nan=0.0, posinf=math.inf).clamp_min(self.error)


def log_likelihood(
    model: Model, data: Dataset, *, draws: int = DRAWS, tolerance: float | Tolerance | None = None, seed: int = 0
) -> LogProb:
    """Compute ln p of every sample in nats, with its errors; the value of one sample does not depend on the others.

    With a `tolerance`, in nats, every sample gets as many draws as a standard error below it needs, from 4 to 16. The
    bias bound is that of the log-determinants: if the noise is skewed, as it may be for few discrete columns, that
    choice moves the value by a fraction of the standard error, and a fixed number of `draws` does not.
    """
    check_dataset(data)
    with suitable_threads(0):  # first: what it proves is used by all threads
        bias, proven = bound_bias(model, data.schema)
    if tolerance is None or not has_errors(model, data.schema):
        values = log_prob_draws(model, data, draws, seed=seed, shared=True)
        value, count, spread = values.mean(0), torch.full_like(values[0], len(values)), _spread(values)
    else:
        wanted = tolerance if isinstance(tolerance, Tolerance) else Tolerance(tolerance)
        value, count, spread = _to_tolerance(model, data, wanted, seed)
    known = value.isfinite()  # of numbers that overflowed nothing is known
    if any(isinstance(m, ColumnTransform) for m in as_flow(model).modules()):
        known = known | ~data.schema.inside(data.x)  # where the density is zero
    biases, passes = torch.full_like(value, bias).where(known, math.inf), int(count.max()) if len(count) else 0
    return LogProb(value, biases, spread / count.sqrt(), math.prod(data.schema.shape), passes, proven)


def _to_tolerance(model: Model, data: Dataset, tolerance: Tolerance, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (mean, number, standard deviation) of the draws of every sample, by a two-stage rule (Stein, 1945).

    The first draws alone determine the standard deviation s, and s the number of draws n. For normal draws, n then says
    nothing of their mean, and the error of the mean over s / sqrt(n) has Student's distribution. An s of all draws
    would be too small: a sample stops early because its first draws happen to agree. For skewed draws s is related to
    the mean of the first draws, and the total is off by a fraction of its standard error.
    """
    roulette = 4 * tolerance.error  # the noise that it adds is far smaller, if blocks are far from their bounds
    first = log_prob_draws(model, data, FEWEST, seed=seed, shared=True, tolerance=roulette)
    total, spread = first.sum(0), _spread(first)
    count = (spread / tolerance.at(first.mean(0))).square().ceil().clamp(FEWEST, MOST)
    for k in range(FEWEST, MOST):
        rows = (count > k).nonzero()[:, 0]
        if len(rows):
            more = Likelihoods(model, data.schema, data.x.device, [seed + k], shared=True, tolerance=roulette)
            total[rows] += more(data.take(rows))[0]
    return total / count, count, spread


def _spread(values: Tensor) -> Tensor:
    """The standard deviation over draws; 0 for one draw, and where all are -inf."""
    return torch.zeros_like(values[0]) if len(values) == 1 else values.std(0).nan_to_num(0.0)


def bound_bias(model: Model, schema: Schema) -> tuple[float, bool]:
    """Return a bound on the bias of a likelihood, and whether it is proven.

    The bias is 0 for exact and for unbiased log-determinants. It is infinite, unknown, where a part of the model is not
    known, or a roulette relies on a constant that is asserted.
    """
    known, proven = as_flow(model).proof_status(schema.shape)
    return (0.0 if known and (proven or not is_estimated(model, schema)) else math.inf), proven


def score_tolerance(model: Model, schema: Schema, reference: Tensor) -> Tolerance | None:
    """Return the standard error that scores need: `SHARE` of the spread of reference log-likelihoods, or of the
    distance from their mean if that is larger.

    None, for a fixed number of draws, if determinants are exact: draws are then cheap, and an exported model has them.
    """
    spread, centre = float(reference.double().std(correction=0)), float(reference.double().mean())
    return Tolerance(SHARE * spread, SHARE, centre) if is_estimated(model, schema) and spread > 0 else None

"""The likelihood of a test set to the paper's protocol (App. C.3): bias proven below a limit, noise driven below one.

bias        every block gets as many terms as Theorem 3 asks for, so that truncation costs at most `bias` in all
noise       a pilot on some rows fixes how many draws are made (probes, and noise for integers), so that the standard
            error of the MEAN over the rows stays below `error`; the estimate is made of fresh ones, since stopping when
            the error looks small would bias it
roulette    where a block would take more than 200 terms, all get an unbiased estimate instead, with q > L^2

The mean of n rows and K draws has the error sqrt(v / (n K)), v the variance of one draw, averaged over rows: n rows
share the work, so that few draws a row suffice, and what is known of one row is reported apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..certificate import residual_blocks
from ..data import Dataset, subsample
from ..flow import Flow
from ..logdet import EXACT_UP_TO, CertifiedSeries, Estimator, Exact, RussianRoulette, terms_needed, truncation_bound
from ..train.objective import nats_per_unit, unit_name
from ..transforms import Imported
from .likelihood import as_flow, check_eval, drawn

#: What truncation may cost and what the standard error of the mean may be, in bits per dimension: the paper's.
LIMIT = 1e-4

#: More terms than this are absurd; then the roulette, after so many terms for certain.
MOST_TERMS, CERTAIN_TERMS = 200, 20

#: Log-determinants that a solver integrates, of which nothing is proven, by what is integrated.
SOLVED = {"trace": "the whole trace", "probe": "a trace of one probe"}

#: Rows and draws of the pilot, and the most draws that are made.
PILOT_ROWS, PILOT_DRAWS, MOST_DRAWS = 200, 8, 1000


@dataclass(frozen=True)
class Likelihood:
    """-log p averaged over rows, in `unit`, and all that is known of its error, in the same unit.

    `bias_bound` is proven (or asserted, where `proven` is false), and zero for exact determinants and the roulette.
    `estimator_error` is the standard error by probes and noise, `standard_error` that by the choice of rows: what the
    bootstrap gives, which for a mean has a closed form. `row_error` is the estimator's error of one row, root mean
    square.
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
        remark = "" if self.reached else ", MORE than asked for"
        return (
            f"{self.value:.4f} {self.unit}; {self._bias()}; estimator ± {self.estimator_error:.1e} "
            f"({self._draws()}{remark}); over {self.rows:,} rows ± {self.standard_error:.4f}; "
            f"one row ± {self.row_error:.4f}"
        )

    def _bias(self) -> str:
        if self.method == "exact":
            return f"bias 0 (exact determinants{'' if self.proven else '; not every block is proven'})"
        if self.method in SOLVED:
            return f"bias 0 but for the solver's ({SOLVED[self.method]})"
        if self.method == "roulette":
            return f"bias 0, roulette ({self.terms} terms and more at random)"
        how = "" if self.proven else ", as asserted"
        return f"bias at most {self.bias_bound:.1e}{how} ({self.terms} terms a block at most)"

    def _draws(self) -> str:
        return "1 draw" if self.draws == 1 else f"{self.draws:,} draws a row"


@dataclass(frozen=True)
class _Way:
    """How log-determinants are made, and what is known of it before anything is drawn, in nats."""

    method: str
    estimator: Estimator
    terms: int = 0
    bias_bound: float = 0.0
    proven: bool = True


@torch.no_grad()
def protocol(
    model: nn.Module,
    data: Dataset,
    *,
    bias: float = LIMIT,
    error: float = LIMIT,
    seed: int = 0,
    most: int = MOST_DRAWS,
    exact_up_to: int = EXACT_UP_TO,
) -> Likelihood:
    """The mean negative log-likelihood with a bias and a standard error below limits, in bits per dimension.

    Up to `exact_up_to` dimensions determinants are exact. At most `most` draws are made; `reached` says whether the
    standard error is below its limit.
    """
    _check(data, bias, error, most)
    check_eval(model)
    flow, d = as_flow(model), data.schema.dimension
    nat, scale = d * math.log(2), nats_per_unit(data.x, data.schema.levels)  # one bit per dimension, the unit; in nats
    way = _Way(_plain(flow), Exact()) if d <= exact_up_to else _way(flow, data.schema.shape, bias * nat)
    generator = torch.Generator(data.x.device).manual_seed(seed)

    random = way.method not in ("exact", "trace") or data.schema.levels is not None
    count = 1
    if random:
        pilot = drawn(flow, subsample(data, PILOT_ROWS), way.estimator, [generator] * PILOT_DRAWS)
        count = _draws_needed(pilot, len(data), error * nat)
    values = drawn(flow, data, way.estimator, [generator] * min(count, most))
    row_error = float(values.var(0).mean().div(len(values)).sqrt()) if random else 0.0
    return Likelihood(
        value=float(-values.mean()) / scale,
        unit=unit_name(data.schema.levels),
        rows=len(data),
        method=way.method,
        terms=way.terms,
        draws=len(values),
        bias_bound=way.bias_bound / scale,
        estimator_error=row_error / math.sqrt(len(data)) / scale,
        standard_error=float(values.mean(0).std()) / math.sqrt(len(data)) / scale,
        row_error=row_error / scale,
        proven=way.proven and flow.proof_status(data.schema.shape)[1],
        reached=row_error <= error * nat * math.sqrt(len(data)),
    )


def _check(data: Dataset, bias: float, error: float, most: int) -> None:
    for name, value in (("bias", bias), ("error", error)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive, in bits per dimension; got {value}. The paper has 1e-4.")
    if most < 2:
        raise ValueError(f"most must be at least 2, to know the draws' error; got {most}.")
    if len(data) < 2:
        raise ValueError(f"a mean needs at least two rows, to know its error; got {len(data)}. Ask for scores.")


def _way(flow: Flow, shape: tuple[int, ...], bias: float) -> _Way:
    """A series with terms from the proven bounds, `bias` nats shared evenly among the blocks; or the roulette."""
    blocks = [(block.bound(at), math.prod(at or shape)) for _, block, at in residual_blocks(flow, shape)]
    if not blocks:
        return _Way(_plain(flow), Exact())
    if worst := [b.value for b, _ in blocks if not b.value < 1]:
        raise ValueError(
            f"a likelihood needs contractions; got Lip(g) <= {max(worst):.4g}. See certify(model); tighten_(model) "
            "repairs it."
        )
    share, proven = bias / len(blocks), all(b.proven for b, _ in blocks)
    terms = [terms_needed(b.value, d, share) for b, d in blocks]
    if max(terms) > MOST_TERMS:
        return _Way("roulette", RussianRoulette(CERTAIN_TERMS), CERTAIN_TERMS, 0.0, proven)
    total = sum(truncation_bound(b.value, d, n) for (b, d), n in zip(blocks, terms, strict=True))
    return _Way("series", CertifiedSeries(share), max(terms), total, proven)


def _plain(flow: Flow) -> str:
    """The method where no series is needed: determinants in closed form, or those that a solver integrates."""
    solved = [m for m in flow.modules() if isinstance(m, Imported) and m.adaptive]
    return ("probe" if any(m.random for m in solved) else "trace") if solved else "exact"


def _draws_needed(pilot: Tensor, rows: int, error: float) -> int:
    """How many draws make sqrt(v / (rows draws)) at most `error`; v is taken two of its standard errors high."""
    v = pilot.var(0)
    high = float(v.mean()) + (2 * float(v.std()) / math.sqrt(len(v)) if len(v) > 1 else 0.0)
    return max(2, math.ceil(high / (rows * error * error)))

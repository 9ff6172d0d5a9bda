"""Unbiased estimators of ln det(I + J): a series that stops at a random term, the others reweighted.

With P_k = P(N >= k), the weight of term k = 1..N is (-1)^(k+1) / (k P_k), so that its mean is that of the whole series.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..allowed import positive
from .estimators import DrawnSeries, Estimator, FixedSeries, SeriesDraw, check_contraction, check_series
from .jacobian import Jacobian
from .probes import Probe, draw_probes
from .sums import adaptive_series, roulette_weights, survival_weights


@dataclass(frozen=True)
class RussianRoulette(DrawnSeries):
    """An unbiased estimator: always `terms` terms, then each further term with probability q, drawn per sample.

    `continuation` is q; the default follows from the Lipschitz bound, q = L^2 + (1 - L^2) / 4.
    """

    terms: int = 4
    continuation: float | None = None
    probes: int = 1
    probe: Probe = "rademacher"
    needs_lipschitz: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_series(self.terms, self.probes, self.probe)
        if self.continuation is not None and not 0 < self.continuation < 1:
            raise ValueError(f"continuation must lie in (0, 1); got {self.continuation}.")

    def probability(self, lipschitz: float | None) -> float:
        """Return q for a Lipschitz bound L; raise ValueError if the variance could be infinite."""
        if lipschitz is None or not lipschitz < 1:
            raise ValueError(
                f"RussianRoulette needs a Lipschitz bound below 1 for its continuation probability; got {lipschitz}. "
                "Constrain g, tighten the model, or assert ResidualBlock(g, lipschitz=...)."
            )
        square = lipschitz * lipschitz
        if self.continuation is None:
            return square + (1 - square) / 4
        if self.continuation <= square:
            raise ValueError(
                f"continuation must exceed L^2 = {square:.4f}, or the variance has no bound; got {self.continuation}. "
                "Leave it out to use the default."
            )
        return self.continuation

    def draw(self, x: Tensor, lipschitz: float | None, generator: torch.Generator | None) -> SeriesDraw:
        weights = roulette_weights(self.terms, self.probability(lipschitz), x, generator)
        return SeriesDraw(draw_probes(x, self.probe, generator), *weights)

    def stopped(self, lipschitz: float, u: float) -> StoppedRoulette:
        """Return the series for one draw u, uniform in (0, 1], given ||J|| <= `lipschitz` everywhere.

        >>> RussianRoulette(terms=2, continuation=0.5).stopped(0.6, u=0.2).count
        4
        """
        if not 0 < u <= 1:
            raise ValueError(f"u must lie in (0, 1]; got {u}. Draw it as 1 - torch.rand(()).")
        q = self.probability(lipschitz)
        count = self.terms + math.floor(math.log(u) / math.log(q))
        return StoppedRoulette(count, self.terms, q, self.probes, self.probe)


@dataclass(frozen=True)
class StoppedRoulette(FixedSeries):
    """A roulette after its draw: `count` terms, shared by all samples and all blocks of a training step.

    `terms` and `continuation` are the settings it was drawn with. Its mean over the draws is exact, as for the
    roulette, and a step computes the number of terms drawn once, not the largest number drawn by any sample. The price
    is variance: the variance of the count no longer averages out over the batch and the blocks.
    """

    count: int
    terms: int
    continuation: float
    probes: int = 1
    probe: Probe = "rademacher"
    shared: bool = False

    def weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k = torch.arange(1, self.count + 1, dtype=torch.float64, device=x.device)[:, None]
        return survival_weights(k, self.terms, self.continuation, x.dtype)


@dataclass(frozen=True)
class AdaptiveRoulette(Estimator):
    """An unbiased estimator with few terms: a `CertifiedSeries` whose tolerance is multiplied by a uniform number.

    Where the remainder is at most `u * tolerance`, for u uniform in (0, 1], a sample stops. Every term is divided by
    the probability of reaching it, which is known from the bound of the remainder (`adaptive_series`); so reweighted,
    no term exceeds `tolerance`, and their number is at most logarithmic in 1 / u. The variance is finite for every
    L < 1. With `shared`, all samples use the same probes and the same u. With gradients it is a `RussianRoulette`.
    """

    tolerance: float = 1.0
    shared: bool = False
    needs_lipschitz: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive.check("tolerance", self.tolerance)

    def estimate(
        self, jacobian: Jacobian, x: Tensor, lipschitz: float | None, generator: torch.Generator | None
    ) -> Tensor:
        bound = check_contraction(lipschitz, self)
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return RussianRoulette()(jacobian, x, lipschitz=lipschitz, generator=generator)
        u = 1 - torch.rand(1 if self.shared else len(x), dtype=torch.float64, device=x.device, generator=generator)
        v = draw_probes(x, "rademacher", generator, shared=self.shared)
        trace = None if jacobian.trace is None else jacobian.trace()
        most = self._most_terms(bound, math.prod(x.shape[1:]), float(u.min()))
        return adaptive_series(jacobian, v, most, bound, self.tolerance, trace, u.expand(len(x)))

    def _most_terms(self, lipschitz: float, dimension: int, u: float) -> int:
        """The n from which d L^(n+1) / (1 - L), which the bound of no remainder exceeds, is at most u * tolerance."""
        small = min(1.0, (1 - lipschitz) * self.tolerance * u / dimension)
        return max(1, math.ceil(math.log(small) / math.log(lipschitz))) if lipschitz > 0 else 1

"""Estimators of ln det(I + J): exact, a series of fixed length, a series with a proven remainder, and unbiased."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from ..compiler import can_read_values, is_transforming
from ..spelling import at_least, quoted
from .bounds import terms_needed
from .determinant import safe_inverse_and_logdet
from .jacobian import Jacobian
from .probes import Probe, draw_probe_noise, draw_probes, noise_to_probes
from .sums import adaptive_series, power_series, roulette_weights, series_weights, survival_weights

Lipschitz: TypeAlias = float | None
Generator: TypeAlias = torch.Generator | None

#: Up to this dimension the log-determinant is exact by default.
EXACT_UP_TO = 64

#: Defaults in eval beyond that dimension: truncation error per block in nats, probes per block, and their seed.
EVAL_TOLERANCE = 1e-3
EVAL_PROBES = 4
EVAL_SEED = 0


class Estimator(ABC):
    """Estimates ln det(I + J) from the Jacobian of g at x: one number per sample, with its gradient."""

    #: Whether the estimator needs a bound on ||J||, which takes time to compute.
    needs_lipschitz: ClassVar[bool] = False

    def __call__(
        self,
        jacobian: Jacobian,
        x: Tensor,
        *,
        lipschitz: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Estimate ln det(I + J), shape (batch,). `lipschitz` is a bound on ||J||, if known."""
        return self.estimate(jacobian, x, lipschitz, generator)

    @abstractmethod
    def estimate(self, jacobian: Jacobian, x: Tensor, lipschitz: Lipschitz, generator: Generator) -> Tensor:
        """Implement `__call__`."""


def check_estimator(estimator: object) -> None:
    """Refuse what is not an `Estimator`, such as the name of one or its class."""
    if not isinstance(estimator, Estimator):
        raise ValueError(
            f"estimator must be an Estimator, such as Exact() or PowerSeries(terms=10); got {quoted(estimator)}."
        )


@dataclass(frozen=True)
class Exact(Estimator):
    """The exact determinant of the dense Jacobian: d vector-Jacobian products and an LU factorisation."""

    def estimate(self, jacobian: Jacobian, x: Tensor, lipschitz: Lipschitz, generator: Generator) -> Tensor:
        j = jacobian.matrix(x)
        return exact_logdet(j.to(torch.promote_types(j.dtype, torch.float32)))  # under autocast, it may be half


def exact_logdet(j: Tensor) -> Tensor:
    """Compute ln det(I + J) of matrices, (batch, d, d); raise ValueError unless all determinants are positive."""
    if j.shape[-1] == 2:  # factorising thousands of 2 x 2 matrices is slower than the closed form
        det = (1 + j[:, 0, 0]) * (1 + j[:, 1, 1]) - j[:, 0, 1] * j[:, 1, 0]
        _check_positive(det)
        return det.log()
    eye = torch.eye(j.shape[-1], dtype=j.dtype, device=j.device)
    sign, logdet = _slogdet(eye + j)
    _check_positive(torch.where(logdet.isnan(), logdet, sign))  # the sign of NaN, of rows that overflowed, is 0
    return logdet


def exact_logdet_and_inverse(j: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ln det(I + J), as `exact_logdet` does, and (I + J)^-1 of matrices, (batch, d, d), without a graph."""
    a = j + torch.eye(j.shape[-1], dtype=j.dtype, device=j.device)
    found = safe_inverse_and_logdet(a)
    if found is None:
        return exact_logdet(j), torch.linalg.inv(a)
    inverse, logdet = found
    return logdet, inverse


def _slogdet(a: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the sign and ln |det| of matrices.

    Inside `torch.func` this uses an LU factorisation: vmap of a forward derivative of slogdet is wrong there
    (torch 2.7 to 2.13).
    """
    if not is_transforming():
        return cast("tuple[Tensor, Tensor]", torch.linalg.slogdet(a))
    factors, pivots = torch.linalg.lu_factor(a)
    diagonal = factors.diagonal(dim1=-2, dim2=-1)
    swapped = (pivots != torch.arange(1, a.shape[-1] + 1, device=a.device)).sum(-1)
    return diagonal.sign().prod(-1) * (1 - 2 * (swapped % 2)), diagonal.abs().log().sum(-1)


def _check_positive(det: Tensor) -> None:
    """Raise unless det > 0, which Lemma 6 guarantees for a contractive g; ln |det| would hide a violation."""
    if can_read_values(det) and bool((det <= 0).any()):
        raise ValueError(
            f"det(I + J) must be positive; got {float(det.detach().min()):.3g}. g is not a contraction here: constrain "
            "its layers. If they are constrained, power iteration lags behind large steps: lower the learning rate, "
            'or use norm=GramIteration() (network.norm = "gram-iteration" in settings).'
        )


class SeriesDraw(NamedTuple):
    """The random numbers of one estimate: probes v like x, and (value, gradient) weights of the terms.

    Weights are (terms, 1), or (terms, batch) and zero for the samples that do not have a term.
    """

    v: Tensor
    value: Tensor
    gradient: Tensor


class DrawnSeries(Estimator):
    """A power series whose weights are known, once drawn, before any product is computed: the mean over `probes`."""

    probes: int

    @abstractmethod
    def draw(self, x: Tensor, lipschitz: Lipschitz, generator: Generator) -> SeriesDraw:
        """Draw the probes and weights of one of the `probes` estimates."""

    def estimate(self, jacobian: Jacobian, x: Tensor, lipschitz: Lipschitz, generator: Generator) -> Tensor:
        return _mean_over_probes(self.probes, lambda: power_series(jacobian, *self.draw(x, lipschitz, generator)))


class FixedSeries(DrawnSeries):
    """A series whose number of terms and weights do not depend on x, so that a training step can be compiled."""

    probe: Probe
    shared: bool

    @abstractmethod
    def weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (value, gradient) weights of the terms, each (terms, 1), in the dtype of x."""

    def noise(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw the noise of one probe per sample: Gaussian numbers, or bits (see `noise_to_probes`)."""
        return draw_probe_noise(x, self.probe, generator, shared=self.shared)

    def draw(self, x: Tensor, lipschitz: Lipschitz, generator: Generator) -> SeriesDraw:
        return SeriesDraw(draw_probes(x, self.probe, generator, shared=self.shared), *self.weights(x))


@dataclass(frozen=True)
class PowerSeries(FixedSeries):
    """The first `terms` terms of the series, with traces estimated by `probes` random vectors per sample (Algorithm 2).

    With `shared`, all samples use the same vectors: the value of a sample then does not depend on the rest of the
    batch, but the errors within a batch no longer average out.
    """

    terms: int = 10
    probes: int = 1
    probe: Probe = "rademacher"
    shared: bool = False

    def __post_init__(self) -> None:
        _check_settings(self.terms, self.probes, self.probe)

    def weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return series_weights(self.terms, x)


@dataclass(frozen=True)
class AdaptiveSeries(Estimator):
    """A power series with a truncation error of at most `tolerance` nats per block, if ||J|| <= `lipschitz` < 1.

    It has at most as many terms as Theorem 3 demands. Without gradients most samples need fewer, since ||J^n v|| is
    known along the way (`adaptive_series`), and the first term is exact where tr J has a closed form.
    """

    lipschitz: float
    tolerance: float = 1e-3
    probes: int = 1
    probe: Probe = "rademacher"
    shared: bool = False

    def estimate(self, jacobian: Jacobian, x: Tensor, lipschitz: Lipschitz, generator: Generator) -> Tensor:
        terms, bound = terms_needed(self.lipschitz, math.prod(x.shape[1:]), self.tolerance), self.lipschitz
        full = PowerSeries(terms, self.probes, self.probe, self.shared)
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return full(jacobian, x, generator=generator)
        trace = None if jacobian.trace is None else jacobian.trace()

        def one_probe() -> Tensor:
            v = noise_to_probes(full.noise(x, generator), x.dtype)
            return adaptive_series(jacobian, v, terms, bound, self.tolerance, trace)

        return _mean_over_probes(self.probes, one_probe)


@dataclass(frozen=True)
class CertifiedSeries(Estimator):
    """An `AdaptiveSeries` with the proven Lipschitz bound of each block."""

    tolerance: float = 1e-3
    probes: int = 1
    probe: Probe = "rademacher"
    shared: bool = False
    needs_lipschitz: ClassVar[bool] = True

    def estimate(self, jacobian: Jacobian, x: Tensor, lipschitz: Lipschitz, generator: Generator) -> Tensor:
        bound = _check_contraction(lipschitz, self)
        adaptive = AdaptiveSeries(bound, self.tolerance, self.probes, self.probe, self.shared)
        return adaptive(jacobian, x, generator=generator)


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
        if not self.tolerance > 0:
            raise ValueError(f"tolerance must be positive; got {self.tolerance}.")

    def estimate(self, jacobian: Jacobian, x: Tensor, lipschitz: Lipschitz, generator: Generator) -> Tensor:
        bound = _check_contraction(lipschitz, self)
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
        _check_settings(self.terms, self.probes, self.probe)
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

    def draw(self, x: Tensor, lipschitz: Lipschitz, generator: Generator) -> SeriesDraw:
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


def _check_settings(terms: int, probes: int, probe: str) -> None:
    at_least(1, terms=terms, probes=probes)
    if probe not in ("rademacher", "gaussian"):
        raise ValueError(f"probe must be 'rademacher' or 'gaussian'; got {probe!r}.")


def _check_contraction(lipschitz: float | None, estimator: Estimator) -> float:
    if lipschitz is None or not lipschitz < 1:
        raise ValueError(
            f"{type(estimator).__name__} needs a proven contraction; got Lip(g) <= {lipschitz}. See certify(model); "
            "tighten_(model) repairs it. Or pass estimator=PowerSeries(terms=...)."
        )
    return lipschitz


def _mean_over_probes(probes: int, one_probe: Callable[[], Tensor]) -> Tensor:
    total = one_probe()
    for _ in range(probes - 1):
        total = total + one_probe()
    return total / probes

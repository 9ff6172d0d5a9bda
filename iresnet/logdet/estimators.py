"""Estimators of ln det(I + J): exact, a series of fixed length, and a series with a proven remainder."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..spelling import at_least, quoted
from .bounds import terms_needed
from .determinant import exact_logdet
from .jacobian import Jacobian
from .probes import Probe, draw_probe_noise, draw_probes, noise_to_probes
from .sums import adaptive_series, power_series, series_weights

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
    def estimate(
        self, jacobian: Jacobian, x: Tensor, lipschitz: float | None, generator: torch.Generator | None
    ) -> Tensor:
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

    def estimate(
        self, jacobian: Jacobian, x: Tensor, lipschitz: float | None, generator: torch.Generator | None
    ) -> Tensor:
        j = jacobian.matrix(x)
        return exact_logdet(j.to(torch.promote_types(j.dtype, torch.float32)))  # under autocast, it may be half


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
    def draw(self, x: Tensor, lipschitz: float | None, generator: torch.Generator | None) -> SeriesDraw:
        """Draw the probes and weights of one of the `probes` estimates."""

    def estimate(
        self, jacobian: Jacobian, x: Tensor, lipschitz: float | None, generator: torch.Generator | None
    ) -> Tensor:
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

    def draw(self, x: Tensor, lipschitz: float | None, generator: torch.Generator | None) -> SeriesDraw:
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
        check_series(self.terms, self.probes, self.probe)

    def weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return series_weights(self.terms, x)


@dataclass(frozen=True)
class AdaptiveSeries(Estimator):
    """A power series with a truncation error of at most `tolerance` nats per block, if ||J|| <= `lipschitz` < 1.

    It has at most as many terms as Theorem 3 demands. Without gradients most samples need fewer, since ||J^n v|| is
    known along the way (`adaptive_series`), and the first term is exact where tr J has a closed form. Long Gaussian
    probes may then need more terms: where short ones stop early, the remainders do not average out.
    """

    lipschitz: float
    tolerance: float = 1e-3
    probes: int = 1
    probe: Probe = "rademacher"
    shared: bool = False

    def estimate(
        self, jacobian: Jacobian, x: Tensor, lipschitz: float | None, generator: torch.Generator | None
    ) -> Tensor:
        terms, bound = terms_needed(self.lipschitz, math.prod(x.shape[1:]), self.tolerance), self.lipschitz
        full = PowerSeries(terms, self.probes, self.probe, self.shared)
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return full(jacobian, x, generator=generator)
        trace = None if jacobian.trace is None else jacobian.trace()

        def one_probe() -> Tensor:
            v, most = noise_to_probes(full.noise(x, generator), x.dtype), terms
            if self.probe == "gaussian":
                longest = math.ceil(float(v.flatten(1).square().sum(1).max()))
                most = max(terms, terms_needed(bound, longest, self.tolerance))
            return adaptive_series(jacobian, v, most, bound, self.tolerance, trace)

        return _mean_over_probes(self.probes, one_probe)


@dataclass(frozen=True)
class CertifiedSeries(Estimator):
    """An `AdaptiveSeries` with the proven Lipschitz bound of each block."""

    tolerance: float = 1e-3
    probes: int = 1
    probe: Probe = "rademacher"
    shared: bool = False
    needs_lipschitz: ClassVar[bool] = True

    def estimate(
        self, jacobian: Jacobian, x: Tensor, lipschitz: float | None, generator: torch.Generator | None
    ) -> Tensor:
        bound = check_contraction(lipschitz, self)
        adaptive = AdaptiveSeries(bound, self.tolerance, self.probes, self.probe, self.shared)
        return adaptive(jacobian, x, generator=generator)


def check_series(terms: int, probes: int, probe: str) -> None:
    """Refuse settings of a series that are not possible."""
    at_least(1, terms=terms, probes=probes)
    if probe not in ("rademacher", "gaussian"):
        raise ValueError(f"probe must be 'rademacher' or 'gaussian'; got {probe!r}.")


def check_contraction(lipschitz: float | None, estimator: Estimator) -> float:
    """Return the bound on ||J|| that this estimator needs; refuse one that is not below 1."""
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

"""Ways to ln det(I + J): exactly, by a series of fixed length or with a proven rest, and without bias."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias, cast

import torch
from torch import Tensor

from ..compiler import can_read_values, is_transforming
from ..spelling import at_least
from .bounds import terms_needed
from .jacobian import Jacobian
from .probes import Probe, draw_probe_noise, draw_probes, noise_to_probes
from .sums import adaptive_series, power_series, roulette_weights, series_weights, survival_weights

Lipschitz: TypeAlias = float | None
Generator: TypeAlias = torch.Generator | None

#: Up to this dimension the log-determinant is exact unless an estimator is named.
EXACT_UP_TO = 64

#: In eval, beyond that dimension: truncation error per block in nats, probes per block, and their seed.
EVAL_TOLERANCE, EVAL_PROBES, EVAL_SEED = 1e-3, 4, 0


class Estimator:
    """A way to ln det(I + J). Called with the Jacobian of g at x; returns one number per sample, with its gradient."""

    #: Whether the estimator needs a bound on ||J||: computing one is not free.
    needs_lipschitz: ClassVar[bool] = False

    def __call__(
        self,
        jacobian: Jacobian,
        x: Tensor,
        *,
        lipschitz: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """ln det(I + J), shape (batch,). `lipschitz` is a bound on ||J||, where it is known."""
        return self.estimate(jacobian, x, lipschitz, generator)

    def estimate(self, jacobian: Jacobian, x: Tensor, lipschitz: Lipschitz, generator: Generator) -> Tensor:
        """What a call gives: the same arguments, all of them there."""
        raise NotImplementedError


@dataclass(frozen=True)
class Exact(Estimator):
    """The determinant of the dense Jacobian: d vector-Jacobian products and a factorisation. For any d that fits."""

    def estimate(self, jacobian: Jacobian, x: Tensor, lipschitz: Lipschitz, generator: Generator) -> Tensor:
        j = jacobian.matrix(x)
        j = j.to(torch.promote_types(j.dtype, torch.float32))  # under autocast products come in half precision
        if j.shape[-1] == 2:  # factorising thousands of 2 x 2 matrices costs more than all the rest
            det = (1 + j[:, 0, 0]) * (1 + j[:, 1, 1]) - j[:, 0, 1] * j[:, 1, 0]
            _check_positive(det)
            return det.log()
        eye = torch.eye(j.shape[-1], dtype=j.dtype, device=j.device)
        sign, logdet = _slogdet(eye + j)
        _check_positive(sign)
        return logdet


def _slogdet(a: Tensor) -> tuple[Tensor, Tensor]:
    """The sign and ln |det| of matrices.

    Inside of `torch.func` by their factors: there vmap of a forward derivative of slogdet is wrong (torch 2.7 to 2.13).
    """
    if not is_transforming():
        return cast("tuple[Tensor, Tensor]", torch.linalg.slogdet(a))
    factors, pivots = torch.linalg.lu_factor(a)
    diagonal = factors.diagonal(dim1=-2, dim2=-1)
    swapped = (pivots != torch.arange(1, a.shape[-1] + 1, device=a.device)).sum(-1)
    return diagonal.sign().prod(-1) * (1 - 2 * (swapped % 2)), diagonal.abs().log().sum(-1)


def _check_positive(det: Tensor) -> None:
    """Lemma 6: a residual layer with a contractive g has a positive determinant. |det| would hide that it is not."""
    if can_read_values(det) and bool((det <= 0).any()):
        raise ValueError(
            f"det(I + J) must be positive; got {float(det.detach().min()):.3g}. g is not a contraction here: constrain "
            "its layers; if they are, power iteration lags behind fast steps: lower the learning rate or use "
            "norm=GramIteration()."
        )


class FixedSeries(Estimator, ABC):
    """A series whose number of terms and whose weights are known before x is: what a compiled step can take."""

    probes: int
    probe: Probe
    shared: bool

    @abstractmethod
    def weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(value, gradient) weights of the terms, each (terms, 1), in the precision of x."""

    def noise(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """What one probe of every sample is made of: Gaussian numbers, or bits (`noise_to_probes`)."""
        return draw_probe_noise(x[:1] if self.shared else x, self.probe, generator).expand_as(x)

    def estimate(self, jacobian: Jacobian, x: Tensor, lipschitz: Lipschitz, generator: Generator) -> Tensor:
        value, gradient = self.weights(x)
        like = x[:1] if self.shared else x

        def once() -> Tensor:
            return power_series(jacobian, draw_probes(like, self.probe, generator).expand_as(x), value, gradient)

        return _mean_over_probes(self.probes, once)


@dataclass(frozen=True)
class PowerSeries(FixedSeries):
    """The first `terms` terms of the series, traces estimated with `probes` random vectors a sample (Algorithm 2).

    With `shared`, all samples get the same vectors: a sample's number then does not depend on the rest of its batch,
    but the errors of a batch no longer average out.
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
    """A power series of which every probe leaves out at most `tolerance` nats a block, if ||J|| <= `lipschitz` < 1.

    It has at most Theorem 3's terms. Without a graph most samples need fewer, since ||J^n v|| is known on the way
    (`adaptive_series`), and the first is exact where tr J is known.
    """

    lipschitz: float
    tolerance: float = 1e-3
    probes: int = 1
    probe: Probe = "rademacher"
    shared: bool = False

    def estimate(self, jacobian: Jacobian, x: Tensor, lipschitz: Lipschitz, generator: Generator) -> Tensor:
        terms, bound = terms_needed(self.lipschitz, math.prod(x.shape[1:]), self.tolerance), self.lipschitz
        whole = PowerSeries(terms, self.probes, self.probe, self.shared)
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return whole(jacobian, x, generator=generator)
        trace = None if jacobian.trace is None else jacobian.trace()

        def once() -> Tensor:
            v = noise_to_probes(whole.noise(x, generator), x.dtype)
            return adaptive_series(jacobian, v, terms, bound, self.tolerance, trace)

        return _mean_over_probes(self.probes, once)


@dataclass(frozen=True)
class CertifiedSeries(Estimator):
    """A `AdaptiveSeries` for the bound that is proven of each block."""

    tolerance: float = 1e-3
    probes: int = 1
    probe: Probe = "rademacher"
    shared: bool = False
    needs_lipschitz: ClassVar[bool] = True

    def estimate(self, jacobian: Jacobian, x: Tensor, lipschitz: Lipschitz, generator: Generator) -> Tensor:
        if lipschitz is None or not lipschitz < 1:
            raise ValueError(
                f"the number of terms follows from a proven contraction; got Lip(g) <= {lipschitz}. See "
                "certify(model); tighten_(model) repairs it, or name PowerSeries(terms=...)."
            )
        settled = AdaptiveSeries(lipschitz, self.tolerance, self.probes, self.probe, self.shared)
        return settled(jacobian, x, generator=generator)


@dataclass(frozen=True)
class RussianRoulette(Estimator):
    """Unbiased: `terms` terms always, then one more with probability q again and again, drawn per sample.

    `continuation` is q; by default it is taken from the Lipschitz bound, L^2 + (1 - L^2) / 4.
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
        """q for a bound L: refused where the variance could be infinite."""
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
                "Leave it out to have it chosen."
            )
        return self.continuation

    def estimate(self, jacobian: Jacobian, x: Tensor, lipschitz: Lipschitz, generator: Generator) -> Tensor:
        q = self.probability(lipschitz)

        def once() -> Tensor:
            value, gradient = roulette_weights(self.terms, q, x, generator)
            return power_series(jacobian, draw_probes(x, self.probe, generator), value, gradient)

        return _mean_over_probes(self.probes, once)

    def stopped(self, lipschitz: float, u: float) -> StoppedRoulette:
        """The outcome for a number u, uniform in (0, 1], where every J has a norm of at most `lipschitz`.

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
    """A roulette that is over: `count` terms, drawn once for all samples and all blocks of a training step.

    `terms` and `continuation` are those it was drawn with. Its mean over the draws is exact, like that of the roulette,
    and a step takes as many terms as were drawn once, where a batch that draws for every sample takes the most of all.
    The price is variance: that of the count no longer averages out over the batch and the blocks.
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


def _mean_over_probes(probes: int, once: Callable[[], Tensor]) -> Tensor:
    total = once()
    for _ in range(probes - 1):
        total = total + once()
    return total / probes

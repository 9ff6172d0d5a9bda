"""ln det(I + J) of a residual block: exactly, as a truncated power series, or unbiased by Russian roulette.

    ln det(I + J) = tr ln(I + J) = sum_k (-1)^(k+1) tr(J^k) / k,     tr(A) = E[v' A v]        (Eq. 4, 5, Algorithm 2)

`PowerSeries` stops after n terms, with an error of at most `truncation_bound` (Theorem 3); `RussianRoulette` stops at
random and reweights, so that the mean is exact. Value and gradient come in one pass: the gradient of ln det is
tr((I + J)^-1 dJ) = E[s' dJ v] with the Neumann sum s = sum_k (-1)^k (J')^k v, so that only ONE vector-Jacobian
product, that of s, needs a graph. Memory does not grow with the number of terms. The gradient equals that of the value
in expectation, not probe by probe, and cannot be differentiated again: that raises.

Weights of the roulette, P_k = P(N >= k): value (-1)^(k+1) / (k P_k), k = 1..N; gradient (-1)^k / P_(k+1), k = 0..N-1.
With continuation probability q the variance is finite for certain only if q > L^2.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, cast

import torch
from torch import Tensor

Pull: TypeAlias = Callable[[Tensor], Tensor]
Probe: TypeAlias = Literal["rademacher", "gaussian"]

#: Elements of the basis batch that `Jacobian.matrix` handles at once.
_CHUNK = 1 << 22


class Jacobian:
    """The Jacobian of g at a batch x, known by v -> J' v. `broadcasts` says that v may have one more leading axis."""

    def __init__(self, pull: Pull, *, broadcasts: bool = False) -> None:
        self.pull, self.broadcasts = pull, broadcasts

    def __call__(self, v: Tensor) -> Tensor:
        return self.pull(v)

    def matrix(self, x: Tensor) -> Tensor:
        """The dense Jacobians, (batch, d, d)."""
        batch, d = len(x), math.prod(x.shape[1:])
        basis = torch.eye(d, dtype=x.dtype, device=x.device).reshape(d, 1, *x.shape[1:]).expand(d, *x.shape)
        if self.broadcasts:
            rows = self.pull(basis)
        else:
            chunk = max(1, _CHUNK // (batch * d))
            rows = torch.func.vmap(self.pull, chunk_size=chunk)(basis)
        return rows.reshape(d, batch, d).transpose(0, 1)


class Estimator(ABC):
    """A way to ln det(I + J). Called with the Jacobian of g at x; returns one number per sample, with its gradient."""

    #: Whether the estimator needs a bound on ||J||: computing one is not free.
    needs_lipschitz: ClassVar[bool] = False

    @abstractmethod
    def __call__(
        self,
        jacobian: Jacobian,
        x: Tensor,
        *,
        lipschitz: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """ln det(I + J), shape (batch,). `lipschitz` is a bound on ||J||, where it is known."""


@dataclass(frozen=True)
class Exact(Estimator):
    """The determinant of the dense Jacobian: d vector-Jacobian products and a factorisation. For any d that fits."""

    def __call__(
        self,
        jacobian: Jacobian,
        x: Tensor,
        *,
        lipschitz: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        j = jacobian.matrix(x)
        j = j.to(torch.promote_types(j.dtype, torch.float32))  # under autocast products come in half precision
        if j.shape[-1] == 2:  # factorising thousands of 2 x 2 matrices costs more than all the rest
            det = (1 + j[:, 0, 0]) * (1 + j[:, 1, 1]) - j[:, 0, 1] * j[:, 1, 0]
            _check_positive(det)
            return det.log()
        eye = torch.eye(j.shape[-1], dtype=j.dtype, device=j.device)
        sign, logdet = torch.linalg.slogdet(eye + j)
        _check_positive(sign)
        return cast(Tensor, logdet)


def _check_positive(det: Tensor) -> None:
    """Lemma 6: a residual layer with a contractive g has a positive determinant. |det| would hide that it is not."""
    if torch.compiler.is_compiling() or (det.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    if bool((det <= 0).any()):
        raise ValueError(
            f"det(I + J) must be positive; got {float(det.detach().min()):.3g}. g is not a contraction here: constrain "
            "its layers; if they are, power iteration lags behind fast steps: lower the learning rate or use "
            "norm=GramIteration()."
        )


@dataclass(frozen=True)
class PowerSeries(Estimator):
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

    def __call__(
        self,
        jacobian: Jacobian,
        x: Tensor,
        *,
        lipschitz: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        value, gradient = series_weights(self.terms, x)
        like = x[:1] if self.shared else x

        def once() -> Tensor:
            return series(jacobian, draw(like, self.probe, generator).expand_as(x), value, gradient)

        return _mean_over_probes(self.probes, once)


@dataclass(frozen=True)
class CertifiedSeries(Estimator):
    """A power series with as many terms as Theorem 3 asks for: truncation costs at most `tolerance` nats a block."""

    tolerance: float = 1e-3
    probes: int = 1
    probe: Probe = "rademacher"
    shared: bool = False
    needs_lipschitz: ClassVar[bool] = True

    def __call__(
        self,
        jacobian: Jacobian,
        x: Tensor,
        *,
        lipschitz: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        if lipschitz is None or not lipschitz < 1:
            raise ValueError(
                f"the number of terms follows from a proven contraction; got Lip(g) <= {lipschitz}. See "
                "certify(model); tighten_(model) repairs it, or name PowerSeries(terms=...)."
            )
        terms = terms_needed(lipschitz, math.prod(x.shape[1:]), self.tolerance)
        return PowerSeries(terms, self.probes, self.probe, self.shared)(jacobian, x, generator=generator)


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

    def __call__(
        self,
        jacobian: Jacobian,
        x: Tensor,
        *,
        lipschitz: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        q = self.probability(lipschitz)

        def once() -> Tensor:
            value, gradient = roulette_weights(self.terms, q, x, generator)
            return series(jacobian, draw(x, self.probe, generator), value, gradient)

        return _mean_over_probes(self.probes, once)


def _check_settings(terms: int, probes: int, probe: str) -> None:
    if terms < 1:
        raise ValueError(f"terms must be at least 1; got {terms}.")
    if probes < 1:
        raise ValueError(f"probes must be at least 1; got {probes}.")
    if probe not in ("rademacher", "gaussian"):
        raise ValueError(f"probe must be 'rademacher' or 'gaussian'; got {probe!r}.")


def _mean_over_probes(probes: int, once: Callable[[], Tensor]) -> Tensor:
    total = once()
    for _ in range(probes - 1):
        total = total + once()
    return total / probes


def draw(x: Tensor, probe: Probe, generator: torch.Generator | None) -> Tensor:
    """Random vectors like x with mean 0 and covariance I."""
    if probe == "gaussian":
        return torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)
    bits = torch.randint(0, 2, x.shape, device=x.device, generator=generator)
    return bits.to(x.dtype) * 2 - 1


def series_weights(terms: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """(value, gradient) weights of the truncated series, each (terms, 1)."""
    k = torch.arange(1, terms + 1, dtype=x.dtype, device=x.device)
    sign = 1 - 2 * ((k - 1) % 2)
    return (sign / k)[:, None], sign[:, None]


def roulette_weights(terms: int, q: float, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """(value, gradient) weights of the roulette, each (N, batch) with N the largest number of terms drawn.

    A sample draws N = terms + floor(ln U / ln q), so that P(N >= k) = q^(k - terms) beyond `terms`: a power, never a
    difference of distribution functions, which would lose all digits.
    """
    u = torch.rand(len(x), dtype=torch.float64, device=x.device, generator=generator)
    extra = torch.floor(u.clamp_min(1e-300).log() / math.log(q))
    n = int(extra.max()) + terms
    k = torch.arange(1, n + 1, dtype=torch.float64, device=x.device)[:, None]
    survival = q ** (k - terms).clamp_min(0)  # P(N >= k)
    alive = (k <= extra + terms).double()
    sign = 1 - 2 * ((k - 1) % 2)
    return (sign / k / survival * alive).to(x.dtype), (sign / survival * alive).to(x.dtype)


def series(jacobian: Jacobian, v: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
    """sum_k value_k v' J^k v, with the gradient of E[s' J v], s = sum_k gradient_k (J')^(k-1) v."""
    lead = (-1, *(1,) * (v.dim() - 1))
    with torch.no_grad():
        total = torch.zeros(len(v), dtype=v.dtype, device=v.device)
        s, w = gradient[0].reshape(lead) * v, v
        for k in range(len(value)):
            w = jacobian(w)
            total = total + value[k] * (w * v).flatten(1).sum(1)
            if k + 1 < len(value):
                s = s + gradient[k + 1].reshape(lead) * w
    if not torch.is_grad_enabled():
        return total
    surrogate = (jacobian(s) * v).flatten(1).sum(1)
    return attach_gradient(total, surrogate)


def attach_gradient(value: Tensor, surrogate: Tensor) -> Tensor:
    """The first tensor's value with the second one's gradient; differentiating twice raises."""
    if torch.compiler.is_compiling():
        return value + (surrogate - surrogate.detach())
    return cast(Tensor, _Attach.apply(value, surrogate))  # type: ignore[no-untyped-call]


def refuse_second_derivative() -> None:
    """Called within a backward pass: raise if a graph of it is being recorded, for its gradient would be wrong."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "trying to differentiate twice: the gradient of an estimated log-determinant or of an inverse has none "
            "itself. Use Exact() and first-order methods, or leave create_graph=True out."
        )


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, value: Tensor, surrogate: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[None, Tensor]:
        refuse_second_derivative()
        return None, grad


def truncation_bound(lipschitz: float, dimension: int, terms: int) -> float:
    """Theorem 3: |ln det - first n terms| <= -d (ln(1 - L) + sum_{k<=n} L^k / k), in nats.

    Summed as its tail d sum_{k>n} L^k / k, whose remainder is bounded by a geometric series: no digits cancel.

    >>> truncation_bound(0.5, 1, 1) < 0.1932
    True
    """
    _check_lipschitz(lipschitz)
    if dimension < 1 or terms < 0:
        raise ValueError(f"dimension must be at least 1 and terms at least 0; got {dimension} and {terms}.")
    if lipschitz == 0:
        return 0.0
    total, k, power = 0.0, terms + 1, lipschitz ** (terms + 1)
    for _ in range(100_000):
        total += power / k
        k, power = k + 1, power * lipschitz
        if power <= total * (1 - lipschitz) * 1e-12:
            break
    return dimension * (total + power / (k * (1 - lipschitz)))


def terms_needed(lipschitz: float, dimension: int, tolerance: float) -> int:
    """The smallest number of terms whose truncation error is at most `tolerance` nats, by Theorem 3."""
    _check_lipschitz(lipschitz)
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive; got {tolerance}.")
    low, high = 0, 1
    while truncation_bound(lipschitz, dimension, high) > tolerance:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if truncation_bound(lipschitz, dimension, middle) > tolerance else (low, middle)
    return high


def _check_lipschitz(lipschitz: float) -> None:
    if not 0 <= lipschitz < 1:
        raise ValueError(f"lipschitz must lie in [0, 1); got {lipschitz}. The series converges only for a contraction.")

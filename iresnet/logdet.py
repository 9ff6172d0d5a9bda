"""ln det(I + J) of a residual block: exactly, as a truncated power series, or unbiased by Russian roulette.

    ln det(I + J) = tr ln(I + J) = sum_k (-1)^(k+1) tr(J^k) / k,     tr(A) = E[v' A v]        (Eq. 4, 5, Algorithm 2)

`PowerSeries` stops after n terms, with an error of at most `truncation_bound` (Theorem 3); `RussianRoulette` stops at
random and reweights, so that the mean is exact. Value and gradient come in one pass: the gradient of ln det is
tr((I + J)^-1 dJ) = E[s' dJ v] with the Neumann sum s = sum_k (-1)^k (J')^k v, so that only ONE vector-Jacobian
product, that of s, needs a graph. Memory does not grow with the number of terms. The gradient equals that of the value
in expectation, not probe by probe, and cannot be differentiated again: that raises.

Weights of the roulette, P_k = P(N >= k): value (-1)^(k+1) / (k P_k), k = 1..N; gradient (-1)^k / P_(k+1), k = 0..N-1.
With continuation probability q the variance is finite for certain only if q > L^2. A training step draws one N for all
(`StoppedRoulette`): its number of terms is then known before it starts, and it can be compiled and recorded.
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

#: How often a series that stops by itself is asked whether it may, in terms: on a GPU asking means waiting.
LOOK_EVERY = 4

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


class FixedSeries(Estimator):
    """A series whose number of terms and whose weights are known before x is: what a compiled step can take."""

    probes: int
    probe: Probe
    shared: bool

    @abstractmethod
    def weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(value, gradient) weights of the terms, each (terms, 1), in the precision of x."""

    def noise(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """What one probe of every sample is made of: Gaussian numbers, or bits (`signs`)."""
        return draw_noise(x[:1] if self.shared else x, self.probe, generator).expand_as(x)

    def __call__(
        self,
        jacobian: Jacobian,
        x: Tensor,
        *,
        lipschitz: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        value, gradient = self.weights(x)
        like = x[:1] if self.shared else x

        def once() -> Tensor:
            return series(jacobian, draw(like, self.probe, generator).expand_as(x), value, gradient)

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
class CertifiedSeries(Estimator):
    """A power series of which every probe leaves out at most `tolerance` nats a block, with at most Theorem 3's terms.

    Without a graph most samples need fewer, since ||J^n v|| is known on the way (`settled_series`).
    """

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
        terms, bound = terms_needed(lipschitz, math.prod(x.shape[1:]), self.tolerance), lipschitz
        whole = PowerSeries(terms, self.probes, self.probe, self.shared)
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return whole(jacobian, x, generator=generator)

        def once() -> Tensor:
            v = signs(whole.noise(x, generator), x.dtype)
            return settled_series(jacobian, v, terms, bound, self.tolerance)

        return _mean_over_probes(self.probes, once)


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
        return _reweighted(k, self.terms, self.continuation, x.dtype)


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
    return signs(draw_noise(x, probe, generator), x.dtype)


def draw_noise(x: Tensor, probe: Probe, generator: torch.Generator | None) -> Tensor:
    """What `draw` draws: Gaussian numbers, or a bit for every sign."""
    if probe == "gaussian":
        return torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)
    return torch.randint(0, 2, x.shape, dtype=torch.int8, device=x.device, generator=generator)


def signs(noise: Tensor, dtype: torch.dtype) -> Tensor:
    """Noise as probes: bits as signs, other numbers as they are."""
    return noise if noise.is_floating_point() else noise.to(dtype) * 2 - 1


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
    value, gradient = _reweighted(k, terms, q, x.dtype)
    alive = (k <= extra + terms).to(x.dtype)
    return value * alive, gradient * alive


def _reweighted(k: Tensor, terms: int, q: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The weights of terms k that are reached, one over P(N >= k) each."""
    survival = q ** (k - terms).clamp_min(0)
    sign = 1 - 2 * ((k - 1) % 2)
    return (sign / k / survival).to(dtype), (sign / survival).to(dtype)


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


def settled_series(jacobian: Jacobian, v: Tensor, most: int, lipschitz: float, tolerance: float) -> Tensor:
    """sum_k (-1)^(k+1) v' J^k v / k, for each sample until the rest is at most `tolerance`; at most `most` terms.

    After n terms the rest is at most ||v|| ||(J')^n v|| sum_k>n L^(k-n) / k. A sample's number of terms is its own,
    so that its value has nothing to do with the samples beside it.
    """
    total, w, going = v.new_zeros(len(v)), v, torch.ones(len(v), dtype=torch.bool, device=v.device)
    factor = v.flatten(1).norm(dim=1) * (lipschitz / (1 - lipschitz))
    for k in range(1, most + 1):
        w = jacobian(w)
        term = (w * v).flatten(1).sum(1) * ((1 - 2 * ((k - 1) % 2)) / k)
        total = total + torch.where(going, term, 0.0)
        going = going & ~(factor * w.flatten(1).norm(dim=1) / (k + 1) <= tolerance)
        if k % LOOK_EVERY == 0 and not bool(going.any()):
            break
    return total


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

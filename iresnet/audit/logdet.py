"""Check log-determinants against dense Jacobians, of small inputs or of crops of images."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..base import DiagonalNormal, FullMixture
from ..evaluate import as_flow, has_density
from ..flow import Flow
from ..logdet import EXACT_UP_TO, CertifiedSeries
from ..transforms.dequantisation import learned_noise
from .subject import Block, Skipped, Subject, Verdict

#: Copies of a sample with independent probes, probes of each, the allowed bias, and the rounding of float32.
COPIES, PROBES, BIAS, ROUNDING = 100, 4, 1e-3, 1e-5

#: A mean of many draws is off by more than this many standard errors less than once in a million times.
SIGMAS = 6.0

#: The most dimensions of a dense Jacobian.
LARGEST = 1024

#: The number of intervals of 1.96 standard errors; their allowed miss rate (16 passes miss 7 %); the test's level.
INTERVALS, MISSED, LEVEL = 128, 0.1, 1e-6


def dense_jacobian(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Compute the Jacobians of f at a batch, (batch, d, d): each sample d times, and the identity pulled back."""
    d = x[0].numel()
    tall = x.repeat_interleave(d, 0).requires_grad_()
    with torch.enable_grad():
        y = f(tall)
        rows = torch.eye(d, dtype=x.dtype).repeat(len(x), 1).reshape(y.shape)
        return torch.autograd.grad(y, tall, rows)[0].reshape(len(x), d, d)


def check_log_determinant(s: Subject) -> Verdict:
    """ln det(I + J) of a block by the series with a proven remainder, against the determinant."""
    _require_density(s)
    done, worst, largest = list[int](), 0.0, 0.0
    series = CertifiedSeries(BIAS, probes=PROBES)
    for block in s.contractions(0.1):
        x = _crop(block, s.block_inputs[block.name][:1])
        exact = _exact_logdet(block, x)
        with torch.no_grad():
            probes = s.generator(f"probes {block.name}")
            _, drawn = block.own.forward_and_logdet(_copies(x, COPIES), estimator=series, generator=probes)
        error, allowed = abs(float(drawn.double().mean()) - exact), _allowed(drawn, exact)
        done, worst, largest = [*done, x.numel()], max(worst, error / allowed), max(largest, error)
    words = f"{len(done)} of {len(s.blocks)} blocks, crops of up to {max(done)} dimensions: the series is"
    return worst <= 1, f"{words} at most {largest:.1e} nats off, {worst:.2f} of its error bars"


def _allowed(drawn: Tensor, exact: float) -> float:
    return BIAS + SIGMAS * float(drawn.double().std()) / math.sqrt(len(drawn)) + ROUNDING * (1 + abs(exact))


def _exact_logdet(block: Block, x: Tensor) -> float:
    j = dense_jacobian(block.plain.g, x)
    sign, value = torch.linalg.slogdet(torch.eye(j.shape[-1], dtype=j.dtype) + j)
    if not bool((sign > 0).all()):
        raise ValueError(f"det(I + J) of {block.name} is not positive.")
    return float(value)


def _copies(x: Tensor, count: int) -> Tensor:
    return x.float().expand(count, *x.shape[1:]).contiguous()


def _crop(block: Block, x: Tensor) -> Tensor:
    """A crop of little more than 64 numbers if g accepts images of any size; else the whole input."""
    fixed = any(isinstance(m, nn.Linear | nn.Flatten | nn.Unflatten) for m in block.plain.g.modules())
    if x.dim() == 4 and not fixed and x[0].numel() > EXACT_UP_TO:
        rows = max(2, math.isqrt(EXACT_UP_TO // x.shape[1]))
        x = x[:, :, :rows, : EXACT_UP_TO // (rows * x.shape[1]) + 1]
    if x[0].numel() > LARGEST:
        raise Skipped(f"a block of {x[0].numel()} dimensions has no crop small enough for a dense Jacobian")
    return x.float().double()


def check_error_bars(s: Subject) -> Verdict:
    """How often value +- 1.96 standard errors covers the mean of all passes, and how far that is from log p.

    The model is one block with a normal base; a sample is repeated, so every copy estimates the same number.
    """
    _require_density(s)
    if s.schema.dimension <= EXACT_UP_TO:
        raise Skipped(f"likelihoods are exact up to {EXACT_UP_TO} dimensions")
    block = next(s.contractions(1.0))
    x = _crop(block, s.block_inputs[block.name][:1])
    shape = tuple(x.shape[1:])
    flow = Flow(block.own, DiagonalNormal(shape), event_shape=shape).eval()
    with torch.no_grad():
        z = x + block.plain.g(x)
        exact = _exact_logdet(block, x) - 0.5 * float(z.square().sum() + z.numel() * math.log(2 * math.pi))
        pilot = flow.log_prob(_copies(x, 16), estimator=CertifiedSeries(BIAS), generator=s.generator("pilot"))
        tolerance = max(BIAS, 1.5 * float(pilot.std()))
        found = flow.log_prob_with_error(_copies(x, INTERVALS), tolerance=tolerance, generator=s.generator("passes"))
    middle, rounding = float(found.value.mean()), ROUNDING * (1 + abs(exact))
    missed = int(((found.value - middle).abs() > 1.96 * found.standard_error + 0.1 * rounding).sum())
    off = abs(middle - exact) - SIGMAS * float(found.value.std()) / math.sqrt(INTERVALS) - rounding
    words = f"{INTERVALS - missed} of {INTERVALS} intervals of {found.passes} passes cover the mean, which is"
    holds = _binomial_tail(missed, INTERVALS, MISSED) > LEVEL and off <= float(found.bias_bound.max())
    return holds, f"{words} {abs(middle - exact):.1e} nats off (bias at most {float(found.bias_bound.max()):.1e})"


def _binomial_tail(k: int, n: int, p: float) -> float:
    """P(at least k of n) for independent events of probability p."""
    return math.fsum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))


def check_noise(s: Subject) -> Verdict:
    """ln q(u | x) of learned noise against ln N(e) - ln |det du/de| on a crop of a sample."""
    learned = learned_noise(s.plain)
    if learned is None:
        raise Skipped("the model has no learned noise")
    side = [min(8, n - n % 2) for n in s.schema.shape[1:]]
    x = s.samples[:1, :, : side[0], : side[1]].floor()
    e = torch.randn(x.shape, generator=s.generator("learned noise"), dtype=torch.float64)
    with torch.no_grad():
        u, log_q = learned(x, e)
    j = dense_jacobian(lambda v: learned(x.expand(len(v), *x.shape[1:]), v)[0], e)
    exact = -0.5 * float(e.square().sum() + e.numel() * math.log(2 * math.pi)) - float(torch.linalg.slogdet(j)[1])
    error, inside = abs(float(log_q) - exact), bool(((u > 0) & (u < 1)).all())
    return inside and error <= 1e-8 * (1 + abs(exact)), f"ln q on {tuple(x.shape[1:])} is {error:.1e} nats off"


def check_likelihood(s: Subject) -> Verdict:
    """log p of samples against ln p_base(F(x)) + ln |det dF/dx|, from a dense Jacobian."""
    flow = _require_density(s)
    if s.schema.dimension > EXACT_UP_TO:
        raise Skipped(f"{s.schema.dimension} dimensions are too many for a dense Jacobian of the whole map")
    found = flow.log_prob_with_error(s.samples)
    exact = dense_log_prob(flow, s.samples)
    allowed = found.bias_bound + SIGMAS * found.standard_error + 1e-8 * (1 + exact.abs())
    worst = float(((found.value - exact).abs() / allowed).max())
    return worst <= 1, f"{len(exact)} samples at most {float((found.value - exact).abs().max()):.1e} nats off"


def dense_log_prob(flow: Flow, x: Tensor) -> Tensor:
    """Compute log p(x) from the map alone: a dense Jacobian, and the normals of the base in closed form."""
    with torch.no_grad():
        z = flow.transform(x)
    base: Any = flow.base
    weight = getattr(base, "weight_logits", torch.zeros(1, dtype=x.dtype)).log_softmax(0)
    mean = base.mean.reshape(len(weight), -1)
    normals = log_normal(z.flatten(1)[:, None], mean, _covariances(base))
    logdet = torch.linalg.slogdet(dense_jacobian(flow.transform, x))[1]
    return cast(Tensor, (normals + weight).logsumexp(-1) + logdet)


def log_normal(z: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
    """Compute ln N(z; mean, covariance) from a solve and a determinant, without a factorisation of the covariance."""
    off = (z - mean).unsqueeze(-1)
    square: Tensor = (off * torch.linalg.solve(covariance, off)).sum((-2, -1))
    return -0.5 * (square + torch.logdet(covariance) + z.shape[-1] * math.log(2 * math.pi))


def _covariances(base: Any) -> Tensor:
    """The covariances of the normals of a base, shape (components, d, d)."""
    if isinstance(base, FullMixture):
        p = base.precision_factors
        return cast(Tensor, torch.linalg.inv(p.mT @ p))
    return torch.diag_embed(base.log_scale.reshape(getattr(base, "components", 1), -1).mul(2).exp())


def _require_density(s: Subject) -> Flow:
    """The flow of the plain float64 model; raise `Skipped` if there is none in closed form."""
    if not has_density(s.plain):
        raise Skipped("the model has no density")
    if s.run.experiment.network.family in ("made", "maf", "ffjord"):
        raise Skipped(f"nothing is claimed about a density by {s.run.experiment.network.family}")
    return as_flow(s.plain)

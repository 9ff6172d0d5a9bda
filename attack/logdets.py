"""Attacks on log-determinants: truncation bounds, exact values, roulettes and likelihoods with errors.

The reference is slogdet(I + J), where J is a dense Jacobian in long double or a random matrix.
"""

from __future__ import annotations

import math
import random
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

import iresnet
from iresnet import (
    ActNorm,
    Chain,
    DiagonalNormal,
    Exact,
    Flow,
    PowerSeries,
    ResidualBlock,
    RussianRoulette,
    terms_needed,
    truncation_bound,
)

from . import Violation, kind, networks
from .mutations import network
from .networks import log_uniform, one_line
from .reference import Composed, Residual, long, maps
from .tricks import Hidden, factor


@kind("truncations", cases=20_000)
def truncations(r: random.Random) -> str:
    """Truncated series of ln det(I + J) of random matrices against slogdet and the bound of Theorem 3."""
    d, terms = r.randint(1, 12), r.choice([0, 1, 2, 5, 10, 40])
    rng = np.random.default_rng(r.getrandbits(60))
    constant = r.choice([r.uniform(0.01, 0.9), r.uniform(0.9, 0.999), log_uniform(r, -12, -1)])
    j = _matrix(rng, d, r.randrange(5)) * constant
    power_of_j, total = np.eye(d), 0.0
    for k in range(1, terms + 1):
        power_of_j = power_of_j @ j
        total += (-1) ** (k + 1) * np.trace(power_of_j) / k
    sign, exact = np.linalg.slogdet(np.eye(d) + j)
    bound = truncation_bound(constant, d, terms)
    if sign <= 0 or not abs(exact - total) <= bound * (1 + 1e-9) + 1e-13 * d / (1 - constant):
        raise Violation(
            f"|ln det - {terms} terms| = {abs(exact - total):.6g} > {bound:.6g}, L = {constant:.6g}, d = {d}"
        )
    tolerance = log_uniform(r, -8, 0)
    needed = terms_needed(constant, d, tolerance)
    if truncation_bound(constant, d, needed) > tolerance:
        raise Violation(f"terms_needed({constant:.6g}, {d}, {tolerance:.3g}) = {needed} leaves more than the tolerance")
    return "bounded"


def _matrix(rng: Any, d: int, kind: int) -> Any:
    """A matrix of norm at most one, including those for which Theorem 3 is sharp."""
    q, _ = np.linalg.qr(rng.normal(size=(d, d)))
    match kind:
        case 0:
            return -np.eye(d)
        case 1:
            return q
        case 2:
            return q @ np.diag(rng.uniform(-1, 1, d)) @ q.T
        case 3:
            u, v = rng.normal(size=(2, d))
            return np.outer(u, v) / np.linalg.norm(u) / np.linalg.norm(v)
        case _:
            a = rng.normal(size=(d, d))
            return a / max(np.linalg.norm(a, 2), 1e-300)


@kind("determinants", cases=3_000)
def determinants(r: random.Random) -> str:
    """Exact log-determinants of blocks, their proven range and their series against the Jacobian in long double."""
    dtype = r.choice([torch.float32, torch.float64])
    shape = networks.vector_shape(r) if r.random() < 0.8 else networks.image_shape(r)
    g = network(r, shape, dtype)
    block = ResidualBlock(g).eval()
    x = networks.inputs(r, 2, shape, dtype, largest=1)
    truth = Residual(Composed(maps(g, shape)[0]))
    exact = np.linalg.slogdet(truth.jacobian(long(x)))[1]
    with torch.no_grad():
        _, logdet = block.forward_and_logdet(x, estimator=Exact())
        slack = (1e-9 if dtype == torch.float64 else 2e-3) * (1 + math.prod(shape))
        if any(isinstance(m, nn.CELU) for m in g.modules()):
            slack += 1e-6 * math.prod(shape)  # torch's gradient of CELU rounds 1 / alpha to float32
        if not np.allclose(logdet.double().numpy(), exact, rtol=0, atol=slack) and not _at_kink(g):
            raise Violation(f"exact ln det {logdet.tolist()} is {exact.tolist()} of {one_line(block)}")
        low, high = cast("tuple[float, float]", block.stretch(shape).logdet)
        if not (low - 1e-9 <= exact.min() and exact.max() <= high + 1e-9):
            raise Violation(f"ln det in [{low:.5g}, {high:.5g}], is {exact.tolist()} of {one_line(block)}")
        if r.random() < 0.2 and not _at_kink(g):
            _check_series(r, block, x[:1], float(exact[0]))
    return "exact"


def _at_kink(g: nn.Module) -> bool:
    """Whether derivatives jump, so that two precisions may see different ones."""
    return any(isinstance(m, nn.ReLU | nn.LeakyReLU | nn.Hardtanh | nn.Softplus | iresnet.MaxMin) for m in g.modules())


def _check_series(r: random.Random, block: ResidualBlock, x: Tensor, exact: float) -> None:
    """Check that the mean of many draws is within six standard errors, plus the truncation bound, of `exact`."""
    many = x.expand(512, *x.shape[1:])
    generator = torch.Generator().manual_seed(r.getrandbits(60))
    bound = block.bound(tuple(x.shape[1:])).value
    terms = r.choice([1, 3, 8])
    estimator: Any = RussianRoulette(terms) if r.random() < 0.5 else PowerSeries(terms)
    drawn = block.forward_and_logdet(many, estimator=estimator, generator=generator)[1].double()
    allowed = 6 * float(drawn.std()) / math.sqrt(len(drawn)) + 1e-3
    if isinstance(estimator, PowerSeries):
        allowed += truncation_bound(bound, math.prod(x.shape[1:]), terms)
    if abs(float(drawn.mean()) - exact) > allowed:
        raise Violation(
            f"{estimator}: mean {float(drawn.mean()):.5g} is {exact:.5g} +- {allowed:.2g} of {one_line(block)}"
        )


@kind("likelihoods", cases=250)
def likelihoods(r: random.Random) -> str:
    """Log-likelihoods with errors beyond 64 dimensions against exact ones; an asserted block proves nothing."""
    d = r.randint(65, 72)
    transforms, shape = list[Any](), (d,)
    for _ in range(r.randint(1, 2)):
        g = nn.Sequential(nn.Linear(d, 8), networks.activation(r), nn.Linear(8, d)).double()
        networks.scale_(g, shape, r.uniform(0.02, 0.1))  # so that a few passes suffice
        transforms += [ResidualBlock(g), ActNorm(d).double()]
    asserted = r.random() < 0.2
    if asserted:
        transforms[0] = ResidualBlock(Hidden(cast(Any, transforms[0]).g, 0.1 * factor(r)), lipschitz=0.9)
    flow = Flow(Chain(*transforms), DiagonalNormal(shape).double(), event_shape=shape).eval()
    x = torch.randn(2, d, generator=networks.generator(r), dtype=torch.float64)
    generator = torch.Generator().manual_seed(r.getrandbits(60))
    found = flow.log_prob_with_error(x, tolerance=2.0, generator=generator)
    if asserted:
        if bool(getattr(found, "proven", True)):
            raise Violation("log_prob_with_error of an asserted block is proven beyond 64 dimensions")
        return "not proven"
    exact = _exact(flow, x)
    off = (found.value - exact).abs()
    most = found.bias_bound + 6 * found.standard_error + 1e-9 * (1 + exact.abs())
    if bool((off > most).any()):
        raise Violation(f"log p off by {off.tolist()}, claimed {most.tolist()}, in {d} dimensions")
    return "proven"


def _exact(flow: Flow, x: Tensor) -> Tensor:
    total, state = np.zeros(len(x)), long(x)
    for t in cast(Chain, flow.transform):
        if isinstance(t, ResidualBlock):
            step = Residual(Composed(maps(t.g, tuple(x.shape[1:]))[0]))
            total += np.linalg.slogdet(step.jacobian(state))[1]
            state = step.value(state)
    z = torch.from_numpy(state.astype(np.float64))
    return flow.base.log_prob(z).detach() + torch.from_numpy(total)

"""Attacks on chains: composed bounds and stretch of blocks and closed forms with extreme parameters."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from iresnet import ActNorm, Chain, Flatten, InvertibleConv1x1, Logit, ResidualBlock, Squeeze, Standardise, Transform
from iresnet.transforms.mixing import PrincipalAxes, Reverse

from . import Violation, kind, networks
from .inverses import check_error_bound, finite_, solver
from .networks import Shape, log_uniform
from .reference import LONG, UNIT, Affine, Composed, Long, Map, Residual, invert, lengths, long, maps


class LogitMap(Map):
    """The logit of alpha + (1 - 2 alpha) x / levels, in long double."""

    def __init__(self, logit: Logit) -> None:
        self.alpha, self.levels = LONG(logit.alpha), LONG(logit.levels)

    def _unit(self, x: Long) -> tuple[Long, Long]:
        slope = (1 - 2 * self.alpha) / self.levels
        return self.alpha + slope * x, self.alpha + slope * (self.levels - x)

    def value(self, x: Long) -> Long:
        s, rest = self._unit(x)
        return np.log(s) - np.log(rest)

    def jacobian(self, x: Long) -> Any:
        s, rest = self._unit(x)
        d = ((1 - 2 * self.alpha) / self.levels / (s * rest)).astype(np.float64)
        return d[:, :, None] * np.eye(d.shape[1])

    def rounding(self, x: Long) -> float:
        s, rest = self._unit(x)
        return float(8 * UNIT * (lengths(self.value(x)).max() + lengths(1 / s).max() + lengths(1 / rest).max()))


def reference_map(t: Transform, shape: Shape) -> Map:
    """A transform in long double."""
    n = math.prod(shape)
    if isinstance(t, ResidualBlock):
        return Residual(Composed(maps(t.g, shape)[0]))
    if isinstance(t, Logit):
        return LogitMap(t)
    positions = math.prod(shape[1:])
    if isinstance(t, ActNorm):
        scale = np.exp(t.log_scale.detach().double().numpy().astype(LONG)).repeat(positions)
        return Affine(np.diag(scale), scale * t.shift.detach().double().numpy().astype(LONG).repeat(positions))
    if isinstance(t, Standardise):
        std = t.std.double().numpy().astype(LONG).repeat(positions)
        return Affine(np.diag(1 / std), -t.mean.double().numpy().astype(LONG).repeat(positions) / std)
    if isinstance(t, InvertibleConv1x1):
        factors = t.factors.detach().double().numpy().astype(LONG)
        upper = np.triu(factors, 1) + np.diag(t.sign.double().numpy().astype(LONG) * np.exp(np.diag(factors)))
        matrix = ((np.tril(factors, -1) + np.eye(len(factors))) @ upper)[t.permutation.numpy()]
        return Affine(np.kron(matrix, np.eye(positions)))
    order = cast(Tensor, t(torch.arange(n, dtype=torch.float64).reshape(1, *shape))).flatten().long().numpy()
    return Affine(np.eye(n)[order])


def transform(r: random.Random, shape: Shape, dtype: torch.dtype, *, first: bool) -> Transform | None:
    """A random transform for this shape, or None; a Logit only at the front."""
    channels = shape[0]
    choice = r.random()
    if choice < 0.45:
        g, _, _ = networks.branch(r, shape, lipschitz=r.uniform(0.05, 0.9), dtype=dtype)
        finite_(g)
        try:
            return ResidualBlock(g)
        except ValueError:
            return None
    if choice < 0.6:
        norm = ActNorm(channels).to(dtype)
        with torch.no_grad():
            norm.shift.copy_(log_uniform(r, -2, 4) * torch.randn(channels, generator=networks.generator(r)))
            norm.log_scale.copy_(r.choice([0.5, 3.0, 10.0]) * torch.randn(channels, generator=networks.generator(r)))
        return norm
    if choice < 0.7:
        mean = log_uniform(r, -2, 6) * torch.randn(channels, generator=networks.generator(r), dtype=torch.float64)
        std = 10 ** (r.choice([1, 6]) * torch.randn(channels, generator=networks.generator(r), dtype=torch.float64))
        return Standardise(mean.to(dtype), std.clamp(1e-6, 1e6).to(dtype))
    if choice < 0.8:
        made = (InvertibleConv1x1 if r.random() < 0.5 else PrincipalAxes)(channels).to(dtype)
        with torch.no_grad():
            more = r.choice([0.1, 1.0, 4.0]) * torch.randn(made.factors.shape, generator=networks.generator(r))
            made.factors.add_(more.to(dtype))
        return made
    if choice < 0.85:
        return Reverse()
    if choice < 0.9 and len(shape) == 3 and shape[1] % 2 == shape[2] % 2 == 0:
        return Squeeze()
    if choice < 0.95 and len(shape) > 1:
        return Flatten(shape)
    return Logit(r.choice([1, 256, 17]), r.choice([0.05, 1e-6, 0.4])) if first else None


def draw(r: random.Random) -> tuple[Chain, Shape, torch.dtype]:
    """A chain of a few transforms, sometimes nested."""
    dtype = r.choices([torch.float32, torch.float64], [1, 1])[0]
    shape = networks.vector_shape(r) if r.random() < 0.6 else (r.choice([1, 2]), *r.choice([(2, 2), (4, 2), (4,)]))
    found, at = list[Transform](), shape
    for _ in range(r.randint(1, 5)):
        t = transform(r, at, dtype, first=not found)
        if t is not None:
            found.append(t)
            at = t.output_shape(at)
    found = found or [Reverse()]
    if len(found) > 2 and r.random() < 0.3:
        found = [found[0], Chain(*found[1:])]
    return Chain(*found).eval(), shape, dtype


def flatten(chain: Transform) -> list[Transform]:
    """The transforms of a chain, including nested ones."""
    return [u for t in chain for u in flatten(t)] if isinstance(chain, Chain) else [chain]


def draw_inputs(r: random.Random, chain: Chain, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Inputs of a chain; inside the valid interval if it begins with a Logit."""
    x = networks.inputs(r, r.randint(1, 3), shape, dtype)
    first = flatten(chain)[:1]
    return torch.sigmoid(x) * first[0].levels if first and isinstance(first[0], Logit) else x


@dataclass
class Problem:
    """A chain to invert: its steps in long double, their inputs and outputs from x on, and the code of x."""

    chain: Chain
    shape: Shape
    dtype: torch.dtype
    steps: list[Map]
    states: list[Long]
    z: Tensor

    def roots(self) -> tuple[Long, float] | None:
        """The inverse of z in long double, and its error; None if Newton's method does not converge."""
        return invert_all(self.steps, self.states, long(self.z))


def draw_problem(r: random.Random) -> Problem | None:
    """A random chain and a code; None if the code overflows."""
    chain, shape, dtype = draw(r)
    steps, at = list[Map](), shape
    for t in flatten(chain):
        steps.append(reference_map(t, at))
        at = t.output_shape(at)
    x = draw_inputs(r, chain, shape, dtype)
    states = [long(x)]
    with np.errstate(all="ignore"):
        for step in steps:
            states.append(step.value(states[-1]))
    z = torch.from_numpy(states[-1].astype(np.float64)).to(dtype).reshape(len(x), *at)
    return Problem(chain, shape, dtype, steps, states, z) if bool(z.isfinite().all()) else None


@kind("chains", cases=4_000)
def chains(r: random.Random) -> str:
    """Composed error bounds of chains against their inverses in long double, stretch against exact Jacobians."""
    problem = draw_problem(r)
    if problem is None:
        return "overflow"
    check_stretch(problem)
    chain, tolerance = problem.chain, None if r.random() < 0.7 else log_uniform(r, -9, -1)
    s = chain.solve(problem.z, tolerance=tolerance, solver=solver(r))
    if not s.proven:
        raise Violation(f"a chain of supported parts is not proven: {names(chain)}")
    roots = problem.roots()
    if roots is None:
        return "undecided"
    check_error_bound(s, roots, lambda: f"{problem.dtype} {names(chain)}")
    return "proven" if bool(s.converged.all()) else "bounded"


def names(chain: Chain) -> str:
    """The class names of the transforms in a chain."""
    return " ".join(type(t).__name__ for t in flatten(chain))


def invert_all(steps: list[Map], states: list[Long], z: Long) -> tuple[Long, float] | None:
    """Invert z through all steps by Newton's method, starting at the given states; return the result and its error."""
    error = 0.0
    for step, state in zip(reversed(steps), reversed(states[:-1]), strict=True):
        with np.errstate(all="ignore"):
            found = invert(step, z, state)
        if found is None or not np.isfinite(found[1]):
            return None
        z, own = found
        error = own + error * max(
            1 / max(float(np.linalg.svd(j, compute_uv=False)[-1]), 1e-300) for j in step.jacobian(z)
        )
    return z, 2 * error


def check_stretch(problem: Problem) -> None:
    """Compare Lip(F), Lip(F^-1) and the range of ln det with the Jacobian at the states."""
    chain, steps, states = problem.chain, problem.steps, problem.states
    stretch = chain.stretch(problem.shape)
    if not stretch.proven:
        raise Violation(f"the stretch of supported parts is not proven: {names(chain)}")
    j: Any = np.eye(states[0].shape[1])
    logdet, slack = np.zeros(len(states[0])), 1e-9
    for step, state in zip(steps, states[:-1], strict=True):
        jacobian = step.jacobian(state)
        j = jacobian @ j
        logdet += np.linalg.slogdet(jacobian)[1]
        slack += 1e-9 * float(np.abs(logdet).max()) + 1e-13 * float(np.linalg.cond(jacobian).max())
    if not np.isfinite(j).all():
        return
    values = np.linalg.svd(j, compute_uv=False)
    # The smallest singular value has a rounding error proportional to the largest.
    least = values[:, -1] + 1e-13 * len(steps) * values[:, 0]
    if not stretch.forward * (1 + 1e-9) >= values.max():
        raise Violation(f"Lip(F) <= {stretch.forward:.6g} < {values.max():.6g} of {names(chain)}")
    if not stretch.inverse * (1 + 1e-9) >= (1 / least).max():
        raise Violation(f"Lip(F^-1) <= {stretch.inverse:.6g} < {(1 / least).max():.6g} of {names(chain)}")
    low, high = cast("tuple[float, float]", stretch.logdet)
    if not (low - slack <= logdet.min() and logdet.max() <= high + slack):
        raise Violation(
            f"ln det in [{low:.6g}, {high:.6g}], got {logdet.min():.6g} to {logdet.max():.6g}: {names(chain)}"
        )

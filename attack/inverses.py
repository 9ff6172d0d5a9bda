"""Attacks on inverses: no proven error bound may be smaller than the distance to the root in long double."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from iresnet import Anderson, Banach, Newton, ResidualBlock, constrain_
from iresnet.fixed_point import Solver

from . import Violation, kind, networks
from .networks import log_uniform, one_line
from .reference import Composed, Long, Map, Residual, invert, lengths, long, maps

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass
class Problem:
    """A block, its function in long double, and points near the roots of its codes."""

    block: ResidualBlock
    truth: list[Map]  # one map for all samples, or one per sample if they have contexts
    points: Tensor
    context: Tensor | None = None

    def codes(self) -> Tensor:
        """The codes of the points, rounded to the precision of the block."""
        rows = [f.value(long(x[None])) for f, x in zip(self.each(), self.points, strict=True)]
        return (
            torch.from_numpy(np.concatenate(rows).astype(np.float64)).to(self.points.dtype).reshape(self.points.shape)
        )

    def each(self) -> list[Map]:
        """The map of every sample."""
        return self.truth if len(self.truth) > 1 else self.truth * len(self.points)

    def roots(self, z: Tensor) -> tuple[Long, float] | None:
        """The roots of the codes near the points, and the error of these roots."""
        if len(self.truth) == 1:
            return invert(self.truth[0], long(z), long(self.points))
        found = [invert(f, long(c[None]), long(x[None])) for f, c, x in zip(self.truth, z, self.points, strict=True)]
        known = [each for each in found if each is not None]
        if len(known) < len(found):
            return None
        return np.concatenate([x for x, _ in known]), max(error for _, error in known)


@kind("inverses", cases=12_000)
def inverses(r: random.Random) -> str:
    """Proven errors of a block's inverse against Newton's method in long double."""
    problem = draw(r)
    if problem is None:
        return "refused"
    z = problem.codes()
    if not bool(z.isfinite().all()):
        return "overflow"
    tolerance = None if r.random() < 0.5 else log_uniform(r, -12, 0)
    s = problem.block.solve(z, problem.context, tolerance=tolerance, solver=solver(r))
    return check(problem, z, s, tolerance)


def check(problem: Problem, z: Tensor, s: Any, tolerance: float | None) -> str:
    """Compare the claims of a solution with the roots; return the outcome."""
    if not s.proven:
        raise Violation(f"a block of supported parts is not proven: {problem.block}")
    if tolerance is not None and bool((s.converged & (s.error_bound > tolerance)).any()):
        raise Violation(
            f"converged with bound {float(s.error_bound[s.converged].max()):.3g} > tolerance {tolerance:.3g}"
        )
    roots = problem.roots(z)
    if roots is None:
        return "undecided"
    check_error_bound(s, roots, lambda: f"{z.dtype} {one_line(problem.block.g)}")
    return "proven" if bool(s.converged.all()) else "bounded"


def check_error_bound(s: Any, roots: tuple[Long, float], what: Any) -> None:
    """Raise `Violation` if a solution is farther from the root than its bound."""
    root, slack = roots
    error, bound = lengths(long(s.x) - root), s.error_bound.detach().numpy()
    bad = ~(bound * (1 + 1e-9) + slack >= error)
    if bad.any():
        worst = int(np.argmax(np.where(bad, error / np.maximum(bound, 1e-300), 0)))
        raise Violation(f"error {error[worst]:.4g} > proven bound {bound[worst]:.4g} (slack {slack:.1g}) of {what()}")


def solver(r: random.Random) -> Solver | None:
    """A solver, or None for the default."""
    limit = r.choice([None, None, None, 1, 3, 50])
    match r.randrange(5):
        case 0:
            return Banach(limit)
        case 1:
            return Anderson(r.randint(1, 8), limit)
        case 2:
            return Newton(limit)
        case _:
            return None


def draw(r: random.Random) -> Problem | None:
    """A block of supported parts with points to recover; None if the library rejects the block."""
    dtype = r.choices(DTYPES, [60, 30, 5, 5])[0]
    choice = r.random()
    if choice < 0.05:
        return softplus_threshold(r)
    if choice < 0.15:
        return conditional(r, dtype)
    g, shape, _ = networks.branch(r, dtype=torch.float64)
    if isinstance(g, nn.Sequential) and r.random() < 0.5:
        networks.cancel_(g, shape)
    if r.random() < 0.04:
        constrain_(g.float(), coefficient=r.uniform(0.3, 0.95))
    finite_(g.to(dtype))
    try:
        block = ResidualBlock(g).eval()
    except ValueError:
        return None
    x = networks.inputs(r, r.randint(1, 5), shape, dtype)
    return Problem(block, [Residual(Composed(maps(g, shape)[0]))], x)


def conditional(r: random.Random, dtype: torch.dtype) -> Problem | None:
    """A conditional block, with contexts."""
    g, shape, size = networks.conditional_network(r, dtype)
    x = networks.inputs(r, r.randint(1, 3), shape, dtype, largest=2)
    context = (torch.randint(-8, 9, (len(x), size), generator=networks.generator(r)) / 4).to(dtype)
    truth: list[Map] = [Residual(Composed(maps(g, shape, c[None])[0])) for c in context]
    return Problem(ResidualBlock(g).eval(), truth, x, context)


def softplus_threshold(r: random.Random) -> Problem | None:
    """Points near the threshold where PyTorch's softplus jumps to a linear function."""
    threshold = r.choice([20.0, 39.9, 40.0, 50.0])
    beta, d = r.choice([1.0, 2.0, 0.5]), r.randint(1, 3)
    g: Any = nn.Sequential(nn.Linear(d, d), nn.Softplus(beta, threshold), nn.Linear(d, d)).double()
    with torch.no_grad():
        for layer in (g[0], g[2]):
            layer.weight.copy_(r.choice([-1, 1]) * r.choice([0.5, 0.75, 0.9375]) * torch.eye(d))
            layer.bias.zero_()
    x = torch.full((3, d), threshold / beta, dtype=torch.float64)
    x = x * (1 + torch.tensor([[0.0], [1e-10], [-1e-10]]) * log_uniform(r, -3, 2)) / float(g[0].weight.detach()[0, 0])
    try:
        return Problem(ResidualBlock(g).eval(), [Residual(Composed(maps(g, (d,))[0]))], x)
    except ValueError:
        return None


@torch.no_grad()
def finite_(g: nn.Module) -> None:
    """Bring overflowed parameters back into range."""
    for p in g.parameters():
        p.copy_(torch.nan_to_num(p).clamp(-1e4, 1e4) if p.dtype == torch.float16 else torch.nan_to_num(p))

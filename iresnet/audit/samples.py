"""Samples against the density, in few dimensions: the share in every cell against its integral."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..evaluate import as_flow, has_density
from .logdet import log_density
from .subject import Skipped, Subject, Verdict

#: Dimensions at the most; cells; samples that place cells and integration points, that are counted; points.
LARGEST, CELLS, PLACED, COUNTED, POINTS = 4, 12, 300, 4000, 8000

#: Degrees of freedom of the points around samples: tails heavier than a flow's.
FREEDOM = 3.0

#: Of the test of all cells together; and how many standard errors the integral over everything may be off.
LEVEL, SIGMAS = 1e-6, 6.0


def samples(s: Subject) -> Verdict:
    """Shares of samples in Voronoi cells against integrals of p over them, and of p over everything against 1."""
    if not has_density(s.model) or s.schema.levels is not None:
        raise Skipped("the model has no density of real numbers")
    if s.schema.dimension > LARGEST:
        raise Skipped(f"{s.schema.dimension} dimensions; an integral is taken in up to {LARGEST}")
    generator = s.generator("samples")
    drawn = as_flow(s.model).sample((PLACED + COUNTED,), generator=generator).double()
    placed, counted = drawn[:PLACED], drawn[PLACED:]
    points, log_q = _points(placed, generator)
    w = (log_density(as_flow(s.plain), points) - log_q).exp()
    scale, inside = placed.std(0), torch.eye(CELLS, dtype=torch.float64)
    of_points, of_samples = (
        inside[torch.cdist(x / scale, placed[:CELLS] / scale).argmin(1)] for x in (points, counted)
    )
    mass, share = w[:, None] * of_points, of_samples.mean(0)
    expected = mass.mean(0)
    spread = (mass.var(0) / POINTS + (expected * (1 - expected)).clamp_min(1 / COUNTED) / COUNTED).sqrt()
    total, error = float(w.mean()), float(w.std()) / math.sqrt(POINTS)
    chance = _tail(float(((share - expected) / spread).square().sum()))
    words = f"{COUNTED} samples in {CELLS} cells: p-value {chance:.1g} (limit {LEVEL:.0e}); the integral of p is"
    return chance > LEVEL and abs(total - 1) <= SIGMAS * error, f"{words} {total:.3f} +- {error:.3f}"


def _tail(x: float) -> float:
    """P(chi-square of CELLS degrees of freedom > x), for an even number of them."""
    return math.exp(-x / 2) * math.fsum((x / 2) ** i / math.factorial(i) for i in range(CELLS // 2))


def _points(placed: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points from Student's t around samples, some narrow and some wide, and the logarithm of their density."""
    n, d = placed.shape
    root = torch.linalg.cholesky(placed.T.cov().reshape(d, d) + torch.diag(1e-9 * placed.var(0)))
    widths = torch.tensor([0.25, 1.0], dtype=placed.dtype)
    e = torch.randn(POINTS, d, generator=generator, dtype=placed.dtype)
    chi = torch.randn(POINTS, int(FREEDOM), generator=generator, dtype=placed.dtype).square().sum(1)
    centre, width = (torch.randint(k, (POINTS,), generator=generator) for k in (n, 2))
    x = placed[centre] + widths[width, None] * (e * (FREEDOM / chi).sqrt()[:, None]) @ root.T
    away = torch.linalg.solve_triangular(root, (x[:, None] - placed).reshape(-1, d).T, upper=False).square().sum(0)
    constant = math.lgamma((FREEDOM + d) / 2) - math.lgamma(FREEDOM / 2) - d / 2 * math.log(FREEDOM * math.pi)
    constant -= float(root.diagonal().log().sum()) + math.log(2 * n)
    terms = [
        -(FREEDOM + d) / 2 * torch.log1p(away.reshape(POINTS, n) / (FREEDOM * h * h)) - d * math.log(h)
        for h in widths.tolist()
    ]
    return x, constant + torch.cat(terms, dim=1).logsumexp(1)

"""Check samples against the density, in few dimensions: the fraction in every cell against the integral of p."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..evaluate import as_flow, has_density
from .logdet import dense_log_prob
from .subject import Skipped, Subject, Verdict

#: The most dimensions; cells; samples that place cells and integration points; samples that are counted; points.
LARGEST, CELLS, PLACING, COUNTED, POINTS = 4, 12, 300, 4000, 8000

#: Degrees of freedom of the integration points around samples: their tails are heavier than a flow's.
DEGREES = 3.0

#: The level of the test over all cells; the allowed error of the total integral, in standard errors.
LEVEL, SIGMAS = 1e-6, 6.0


def check_samples(s: Subject) -> Verdict:
    """Fractions of samples in Voronoi cells against integrals of p over them, and the total integral of p against 1."""
    if not has_density(s.model) or s.schema.levels is not None:
        raise Skipped("the model has no density of real numbers")
    if s.schema.dimension > LARGEST:
        raise Skipped(f"{s.schema.dimension} dimensions; an integral is computed in up to {LARGEST}")
    generator = s.generator("samples")
    drawn = as_flow(s.model).sample((PLACING + COUNTED,), generator=generator).double()
    placed, counted = drawn[:PLACING], drawn[PLACING:]
    points, log_q = _importance_points(placed, generator)
    inside = torch.ones(POINTS, dtype=torch.bool) if s.columns is None else s.columns.inside(points)
    w = torch.zeros_like(log_q)
    w[inside] = (dense_log_prob(as_flow(s.plain), points[inside]) - log_q[inside]).exp()
    scale, cells = placed.std(0), torch.eye(CELLS, dtype=torch.float64)
    of_points, of_samples = (cells[torch.cdist(x / scale, placed[:CELLS] / scale).argmin(1)] for x in (points, counted))
    mass, share = w[:, None] * of_points, of_samples.mean(0)
    expected = mass.mean(0)
    spread = (mass.var(0) / POINTS + (expected * (1 - expected)).clamp_min(1 / COUNTED) / COUNTED).sqrt()
    total, error = float(w.mean()), float(w.std()) / math.sqrt(POINTS)
    chance = _chi_square_tail(float(((share - expected) / spread).square().sum()))
    words = f"{COUNTED} samples in {CELLS} cells: p-value {chance:.1g} (limit {LEVEL:.0e}); the integral of p is"
    return chance > LEVEL and abs(total - 1) <= SIGMAS * error, f"{words} {total:.3f} +- {error:.3f}"


def _chi_square_tail(x: float) -> float:
    """P(chi-square with CELLS degrees of freedom > x), for an even number of them."""
    return math.exp(-x / 2) * math.fsum((x / 2) ** i / math.factorial(i) for i in range(CELLS // 2))


def _importance_points(placed: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw points from narrow and wide Student's t distributions around samples; return them and their log density."""
    n, d = placed.shape
    root = torch.linalg.cholesky(placed.T.cov().reshape(d, d) + torch.diag(1e-9 * placed.var(0)))
    widths = torch.tensor([0.25, 1.0], dtype=placed.dtype)
    e = torch.randn(POINTS, d, generator=generator, dtype=placed.dtype)
    chi = torch.randn(POINTS, int(DEGREES), generator=generator, dtype=placed.dtype).square().sum(1)
    centre, width = (torch.randint(k, (POINTS,), generator=generator) for k in (n, 2))
    x = placed[centre] + widths[width, None] * (e * (DEGREES / chi).sqrt()[:, None]) @ root.T
    away = torch.linalg.solve_triangular(root, (x[:, None] - placed).reshape(-1, d).T, upper=False).square().sum(0)
    constant = math.lgamma((DEGREES + d) / 2) - math.lgamma(DEGREES / 2) - d / 2 * math.log(DEGREES * math.pi)
    constant -= float(root.diagonal().log().sum()) + math.log(2 * n)
    terms = [
        -(DEGREES + d) / 2 * torch.log1p(away.reshape(POINTS, n) / (DEGREES * h * h)) - d * math.log(h)
        for h in widths.tolist()
    ]
    return x, constant + torch.cat(terms, dim=1).logsumexp(1)

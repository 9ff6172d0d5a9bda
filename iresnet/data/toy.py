"""Two-dimensional toy densities (Figure 2 and App. C.3 of the paper), with the entropy that no model can beat.

No density q codes samples of p in fewer nats than the entropy of p, since -E_p ln q(x) = H(p) + KL(p, q): a
trained flow is evaluated by how close its negative log-likelihood comes to H(p). Most densities here are curves
blurred by Gaussian noise,

    x = c_k(u) + noise * e,    k uniform among the pieces, u uniform on [0, 1], e ~ N(0, I),

so p(x) is an integral over u, computed by Gauss-Legendre quadrature, and H(p) one over the plane, computed by the
trapezoidal rule; both converge faster than any power of the step. Sizes are those common in the literature on flows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeAlias

import torch
from torch import Tensor

from ..spelling import at_least, hint

Curve: TypeAlias = Callable[[Tensor, Tensor], Tensor]

REACH = 3.2  # every curve lies within this radius
CHUNK = 1024  # points whose distances to all nodes are held at a time


@dataclass(frozen=True)
class ToyDensity:
    """How to sample n points, the exact log-density of points (n, 2), and the square and step to integrate it."""

    sample: Callable[[int, torch.Generator | None], Tensor]
    log_density: Callable[[Tensor], Tensor]
    half_width: float
    step: float


def names() -> list[str]:
    """Return the names of the toy densities."""
    return list(DENSITIES)


def sample(name: str, n: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw independent points, float32 of shape (n, 2), on the generator's device.

    >>> sample("moons", 3, torch.Generator().manual_seed(0)).shape
    torch.Size([3, 2])
    """
    at_least(1, n=n)
    return _density(name).sample(n, generator)


def log_density(name: str, x: Tensor) -> Tensor:
    """Compute ln p(x) in nats for points (n, 2), in float64."""
    if x.dim() != 2 or x.shape[1] != 2:
        raise ValueError(f"x must have shape (n, 2); got {tuple(x.shape)}.")
    points = torch.split(x.detach().double(), CHUNK)
    return torch.cat([_density(name).log_density(chunk) for chunk in points])


@cache
def entropy(name: str) -> float:
    """Compute H(p) = -E ln p in nats, to six decimals: the lower bound of every expected negative log-likelihood.

    >>> round(entropy("checkerboard"), 3)  # ln 32
    3.466
    """
    density = _density(name)
    axis = torch.arange(-density.half_width, density.half_width, density.step, dtype=torch.float64)
    p = log_density(name, torch.cartesian_prod(axis, axis)).exp()
    return float(-torch.special.xlogy(p, p).sum() * density.step**2)


def moons(u: Tensor, piece: Tensor) -> Tensor:
    """Two interleaving half circles of radius 2, uniform along the arcs, centred together on the origin; noise 0.2."""
    t = math.pi * u
    upper = torch.stack([2 * t.cos() - 1, 2 * t.sin() - 0.5], dim=1)
    return torch.where(piece[:, None] == 0, upper, -upper)


def circles(u: Tensor, piece: Tensor, radius: float = 1.5) -> Tensor:
    """Concentric circles with radii 1, 2, ... times `radius` and equal mass: two with noise 0.24.

    "rings" has four, with radii 0.75, 1.5, 2.25 and 3, and noise 0.15.
    """
    return radius * (piece[:, None] + 1) * _direction(2 * math.pi * u)


def eight_gaussians(u: Tensor, piece: Tensor) -> Tensor:
    """Eight equal Gaussians evenly spaced on the circle of radius 2 sqrt(2), standard deviation sqrt(2) / 4 = 0.35."""
    return math.sqrt(8) * _direction(math.pi / 4 * piece)


def spirals(u: Tensor, piece: Tensor) -> Tensor:
    """Two spiral arms of one and a half turns, each the other turned by half a turn, out to radius pi; noise 0.1.

    The angle is 3 pi sqrt(u), which spreads the mass about evenly along the arms.
    """
    t = 3 * math.pi * u.sqrt()
    return (1 - 2 * piece[:, None]) * t[:, None] / 3 * _direction(math.pi - t)


def swiss_roll(u: Tensor, piece: Tensor) -> Tensor:
    """One spiral from radius 0.3 pi to 0.9 pi in one and a half turns, uniform in the angle; noise 0.2."""
    t = 1.5 * math.pi * (1 + 2 * u)
    return t[:, None] / 5 * _direction(t)


def pinwheel(n: int, generator: torch.Generator | None) -> Tensor:
    """Five Gaussian arms at distance 2, deviation 0.6 along and 0.2 across, bent by a rotation that grows outwards.

    The rotation is by exp(r / 2) / 4 at radius r. Elsewhere it depends on the first coordinate; a rotation by the
    radius looks the same and preserves area, so the density is known.
    """
    arm = _choice(5, n, generator)
    e = _normal(n, generator)
    x = torch.stack([2 + 0.6 * e[:, 0], 0.2 * e[:, 1]], dim=1)
    return _rotate(x, 2 * math.pi / 5 * arm + _rotation(x))


def checkerboard(n: int, generator: torch.Generator | None) -> Tensor:
    """Uniform on every other square, of side 2, of the board [-4, 4]^2: eight squares, area 32, so entropy ln 32."""
    column = _choice(4, n, generator)
    row = 2 * _choice(2, n, generator) + column % 2
    corner = 2 * torch.stack([column, row], dim=1) - 4
    return corner + 2 * _uniform((n, 2), generator)


def _checkerboard_log_density(x: Tensor) -> Tensor:
    inside = ((x >= -4) & (x < 4)).all(dim=1) & ((x / 2).floor().sum(dim=1) % 2 == 0)
    return torch.full_like(x[:, 0], -math.log(32)).masked_fill(~inside, -math.inf)


def _pinwheel_log_density(x: Tensor) -> Tensor:
    arms = []
    for arm in range(5):
        y = _rotate(x, -2 * math.pi / 5 * arm - _rotation(x))
        arms.append(-0.5 * (((y[:, 0] - 2) / 0.6) ** 2 + (y[:, 1] / 0.2) ** 2))
    return torch.stack(arms).logsumexp(dim=0) - math.log(5 * 2 * math.pi * 0.6 * 0.2)


def _rotation(x: Tensor) -> Tensor:
    return (x[:, 0].hypot(x[:, 1]) / 2).exp() / 4


def _rotate(x: Tensor, angle: Tensor) -> Tensor:
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([cos * x[:, 0] - sin * x[:, 1], sin * x[:, 0] + cos * x[:, 1]], dim=1)


def _direction(angle: Tensor) -> Tensor:
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def _blurred(curve: Curve, pieces: int, noise: float, nodes: int) -> ToyDensity:
    """The density of points on the pieces of a curve with Gaussian noise: a mixture of Gaussians with centres on it.

    It is exact up to rounding if neighbouring nodes are closer together than the noise is wide.
    """

    def draw(n: int, generator: torch.Generator | None) -> Tensor:
        piece = _choice(pieces, n, generator)
        return curve(_uniform((n,), generator), piece) + noise * _normal(n, generator)

    def log_p(x: Tensor) -> Tensor:
        c, log_weights = (t.to(x.device) for t in _quadrature(curve, pieces, nodes))
        # |x - c|^2 = |x|^2 - 2 x'c + |c|^2, so that all distances are one matrix product.
        exponents = (x @ c.T - c.square().sum(dim=1) / 2) / noise**2 + log_weights
        # Terms below e^-50 of the largest do not matter, and exp is slow where it underflows.
        exponents = torch.maximum(exponents, exponents.amax(dim=1, keepdim=True) - 50)
        return exponents.logsumexp(dim=1) - x.square().sum(dim=1) / (2 * noise**2) - math.log(2 * math.pi * noise**2)

    return ToyDensity(draw, log_p, half_width=REACH + 8 * noise, step=noise / 2)


@cache
def _quadrature(curve: Curve, pieces: int, nodes: int) -> tuple[Tensor, Tensor]:
    """Points on the curve and the logarithms of their weights."""
    # Gauss-Legendre on [-1, 1] by Golub and Welsch: the eigenvalues of the Jacobi matrix of the Legendre polynomials.
    k = torch.arange(1, nodes, dtype=torch.float64)
    b = k / (4 * k.square() - 1).sqrt()
    roots, vectors = torch.linalg.eigh(torch.diag(b, 1) + torch.diag(b, -1))
    # In s with u = s^2, du = 2 s ds, because the spirals are smooth in sqrt(u), not in u.
    s = (roots + 1) / 2
    log_weights = torch.log(2 * s * vectors[0].square() / pieces)
    piece = torch.arange(pieces, dtype=torch.float64).repeat_interleave(nodes)
    return curve(s.square().repeat(pieces), piece), log_weights.repeat(pieces)


def _choice(count: int, n: int, generator: torch.Generator | None) -> Tensor:
    return torch.randint(count, (n,), generator=generator, device=_device(generator)).to(torch.float32)


def _uniform(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return torch.rand(shape, dtype=torch.float32, generator=generator, device=_device(generator))


def _normal(n: int, generator: torch.Generator | None) -> Tensor:
    return torch.randn(n, 2, dtype=torch.float32, generator=generator, device=_device(generator))


def _device(generator: torch.Generator | None) -> torch.device:
    return torch.device("cpu") if generator is None else generator.device


def _density(name: str) -> ToyDensity:
    if name not in DENSITIES:
        raise ValueError(f"name must be a toy density; got {name!r}. {hint(name, DENSITIES)}")
    return DENSITIES[name]


DENSITIES = {
    "moons": _blurred(moons, pieces=2, noise=0.2, nodes=128),
    "circles": _blurred(circles, pieces=2, noise=0.24, nodes=256),
    "rings": _blurred(partial(circles, radius=0.75), pieces=4, noise=0.15, nodes=320),
    "eight_gaussians": _blurred(eight_gaussians, pieces=8, noise=math.sqrt(2) / 4, nodes=1),
    "pinwheel": ToyDensity(pinwheel, _pinwheel_log_density, half_width=8.0, step=0.04),
    "spirals": _blurred(spirals, pieces=2, noise=0.1, nodes=512),
    "swiss_roll": _blurred(swiss_roll, pieces=1, noise=0.2, nodes=256),
    "checkerboard": ToyDensity(checkerboard, _checkerboard_log_density, half_width=4.0, step=1 / 16),
}

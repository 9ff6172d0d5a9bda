"""ColumnSpline: a monotone spline per column of a table, fixed before training, that makes each column nearly normal.

Between knots (x_k, z_k) with slopes d_k it is the rational-quadratic spline of Gregory and Delbourgo (1982), which
Durkan et al. (2019) use in flows. With s = (z_{k+1} - z_k) / (x_{k+1} - x_k) and t = (x - x_k) / (x_{k+1} - x_k),

    z = z_k + (z_{k+1} - z_k) (s t^2 + d_k t (1 - t)) / q,          q = s + (d_k + d_{k+1} - 2 s) t (1 - t),
    dz/dx = s^2 (d_{k+1} t^2 + 2 s t (1 - t) + d_k (1 - t)^2) / q^2,

and outside of the knots it is linear. All slopes are positive, so that it has an inverse, the root of a quadratic.
Since q lies between s / 2 and max(s, (d_k + d_{k+1} + 2 s) / 4), slopes are bounded on both sides (`stretch`).
"""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..batch import Shape, check_finite
from ..float64 import UNIT, Rounding
from ..spelling import at_least
from ..transform import UNKNOWN, BufferRule, Stretch
from .closed_form import ClosedForm, check_channels, increases, is_positive

#: The largest secant of a fitted spline, and the smallest is its reciprocal: values that occur often, such as zeros,
#: would get an unbounded density.
STEEPEST = 50.0

#: The rows beyond the outermost knots, on each side.
TAIL_ROWS = 8


class Segment(NamedTuple):
    """The piece of the spline that a value lies in: where it starts in x and z, its secant s, and its end slopes."""

    x: Tensor
    z: Tensor
    width: Tensor
    s: Tensor
    d0: Tensor
    d1: Tensor


class ColumnSpline(ClosedForm):
    """z = h_j(x_j) with a monotone spline of `bins` pieces per column; the identity until `set_` gives it knots.

    >>> spline = ColumnSpline(2, bins=4)
    >>> torch.allclose(spline(torch.tensor([[0.5, -7.0]])), torch.tensor([[0.5, -7.0]]))
    True
    """

    knots: Tensor
    codes: Tensor
    slopes: Tensor

    buffer_rules: ClassVar[tuple[BufferRule, ...]] = (
        ("knots", "increase", increases),
        ("codes", "increase", increases),
        ("slopes", "be positive", is_positive),
    )

    def __init__(self, columns: int, bins: int) -> None:
        super().__init__()
        at_least(1, "Give the number of columns and of pieces.", columns=columns, bins=bins)
        self.columns = columns
        line = torch.linspace(-1, 1, bins + 1).expand(columns, -1)
        for name, value in (("knots", line), ("codes", line), ("slopes", torch.ones_like(line))):
            self.register_buffer(name, value.clone())

    @property
    def bins(self) -> int:
        """The number of pieces."""
        return self.knots.shape[1] - 1

    @torch.no_grad()
    def set_(self, knots: Tensor, codes: Tensor, slopes: Tensor) -> ColumnSpline:
        """Set the knots, shape (columns, bins + 1), and return self. They must increase, and slopes be positive."""
        if not all(bool((t > 0).all()) for t in (knots.diff(dim=1), codes.diff(dim=1), slopes)):
            raise ValueError("knots and codes must increase and slopes must be positive; got others.")
        for mine, given in ((self.knots, knots), (self.codes, codes), (self.slopes, slopes)):
            mine.copy_(given)
        return self

    def value(self, x: Tensor) -> Tensor:
        check_channels(x, "x", "ColumnSpline", self.columns)
        at = self._segment(self.knots, x)
        t, u, q = self._unit(at, x)
        inner = at.z + at.s * at.width * (at.s * t.square() + at.d0 * t * u) / q
        low, high = self._outside(x)
        return torch.where(low < 0, at.z + at.d0 * low, torch.where(high > 0, inner + at.d1 * high, inner))

    def logdet(self, x: Tensor) -> Tensor:
        at = self._segment(self.knots, x)
        t, u, q = self._unit(at, x)
        slope = (at.s / q).square() * (at.d1 * t.square() + 2 * at.s * t * u + at.d0 * u.square())
        return slope.log().sum(dim=1)

    def undo(self, z: Tensor) -> Tensor:
        check_channels(z, "z", "ColumnSpline", self.columns)
        at = self._segment(self.codes, z)
        height = at.s * at.width
        y = torch.minimum((z - at.z).clamp_min(0), height)
        bend = at.d0 + at.d1 - 2 * at.s
        a, b, c = height * (at.s - at.d0) + y * bend, height * at.d0 - y * bend, -at.s * y
        root = (b.square() - 4 * a * c).clamp_min(0).sqrt()
        x = at.x + at.width * (-2 * c / (b + root))
        low, high = (z - at.z).clamp_max(0), (z - at.z - height).clamp_min(0)
        return torch.where(low < 0, at.x + low / at.d0, torch.where(high > 0, at.x + at.width + high / at.d1, x))

    def stretch(self, input_shape: Shape | None = None) -> Stretch:
        """Bound the slopes by those of the knots and secants, and ln det by the sums of their logarithms."""
        if self.why_unknown():
            return UNKNOWN
        low, high = self._slope_bounds()
        logdet = (float(low.log().sum()), float(high.log().sum()))
        return Stretch(float(high.max()), 1 / float(low.min()), logdet)

    def why_unknown(self) -> str:
        flat = "" if is_positive(self._slope_bounds()[0]) else "ColumnSpline has a slope too close to zero for a bound."
        return super().why_unknown() or flat

    def rounding(self, input_shape: Shape) -> Rounding:
        """Bound the rounding of fewer than 40 operations, the widest of which move t by a unit of rounding each."""
        steepest = float(self._slope_bounds()[1].max())
        lost, size = 256 * UNIT * steepest, float(self.knots.double().abs().max())
        absolute = math.sqrt(math.prod(input_shape)) * (
            lost * size + 256 * UNIT * float(self.codes.double().abs().max())
        )
        return Rounding.of(lost, absolute, math.prod(input_shape), result=4 * UNIT)

    def extra_repr(self) -> str:
        return f"{self.columns}, bins={self.bins}"

    def _slope_bounds(self) -> tuple[Tensor, Tensor]:
        """The smallest and the largest slope of every column, bounded from below and from above."""
        knots, codes, slopes = (t.double() for t in (self.knots, self.codes, self.slopes))
        s, d0, d1 = codes.diff(dim=1) / knots.diff(dim=1), slopes[:, :-1], slopes[:, 1:]
        ends = torch.stack([s, d0, d1])
        most = torch.maximum(s, (d0 + d1 + 2 * s) / 4)
        low = (s / most).square() * ends.amin(dim=0)
        return torch.minimum(low, slopes.amin(1, True)).amin(1), (4 * ends.amax(dim=0)).amax(1)

    def _segment(self, edges: Tensor, values: Tensor) -> Segment:
        """The segment of every value, found among the knots or their codes; the outer ones for values outside."""
        # Not by torch.searchsorted, which ONNX lacks.
        index = (values.detach().unsqueeze(-1) >= edges[:, 1:-1].to(values.dtype)).sum(-1)

        def at(table: Tensor, offset: int = 0) -> Tensor:
            return table.to(values.dtype).T.gather(0, index + offset)

        x, z = at(self.knots), at(self.codes)
        width = at(self.knots, 1) - x
        return Segment(x, z, width, (at(self.codes, 1) - z) / width, at(self.slopes), at(self.slopes, 1))

    def _unit(self, at: Segment, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return t in [0, 1], 1 - t and q."""
        t = ((x - at.x) / at.width).clamp(0, 1)
        u = 1 - t
        return t, u, at.s + (at.d0 + at.d1 - 2 * at.s) * t * u

    def _outside(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return how far x lies below the first knot (negative) and above the last one (positive)."""
        knots = self.knots.to(x.dtype)
        return (x - knots[:, 0]).clamp_max(0), (x - knots[:, -1]).clamp_min(0)


def fit_columns(x: Tensor, bins: int, held_out: Tensor) -> ColumnSpline:
    """Fit splines to standardised columns: of 4, 8, ... pieces up to `bins`, as many as suit held-out rows best.

    A column for which no spline is better than the identity keeps its values.
    """
    check_finite(x, "x")
    columns = [_fit_column(a, bins, b) for a, b in zip(x.double().T, held_out.double().T, strict=True)]
    return ColumnSpline(x.shape[1], bins).set_(*(torch.stack(part) for part in zip(*columns, strict=True)))


Knots = tuple[Tensor, Tensor, Tensor]


def _fit_column(x: Tensor, bins: int, held_out: Tensor) -> Knots:
    identity = ColumnSpline(1, bins).double()
    candidates, pieces = [(identity.knots[0], identity.codes[0], identity.slopes[0])], 4
    while pieces <= bins and len(x) >= 4 * TAIL_ROWS:
        candidates.append(_quantiles(x, pieces, bins))
        pieces *= 2
    return max(candidates, key=lambda knots: _log_likelihood(knots, held_out))


def _quantiles(x: Tensor, pieces: int, bins: int) -> Knots:
    """Knots at quantiles of x, with the codes of a standard normal; unused ones continue the last line."""
    edge = float(torch.special.ndtri(torch.tensor(1 - TAIL_ROWS / len(x), dtype=torch.float64)))
    wanted = torch.linspace(-edge, edge, pieces + 1, dtype=torch.float64)
    knots, codes = _spaced(torch.quantile(x, torch.special.ndtr(wanted)), wanted)
    secants = codes.diff() / knots.diff()
    inner = (secants[1:] * secants[:-1]).sqrt()
    ends = [secants[i] * (secants[i] / secants[j]).sqrt().clamp(0.5, 2) for i, j in ((0, 1), (-1, -2))]
    slopes = torch.cat([ends[0][None], inner, ends[1][None]])
    more = torch.arange(1, bins + 2 - len(knots), dtype=torch.float64)
    step = knots[-1] - knots[-2]
    return (
        torch.cat([knots, knots[-1] + step * more]),
        torch.cat([codes, codes[-1] + slopes[-1] * step * more]),
        torch.cat([slopes, slopes[-1].expand(len(more))]),
    )


def _spaced(knots: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Drop knots until all secants are within a factor of `STEEPEST` of 1; the identity if only two are left."""
    kept = [0]
    for k in range(1, len(knots)):
        secant = float((codes[k] - codes[kept[-1]]) / (knots[k] - knots[kept[-1]]).clamp_min(1e-300))
        if 1 / STEEPEST <= secant <= STEEPEST:
            kept.append(k)
    if len(kept) < 3:
        line = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
        return line, line
    return knots[kept], codes[kept]


def _log_likelihood(knots: Knots, x: Tensor) -> float:
    """The mean log-likelihood of a column, if its codes were normal."""
    spline = ColumnSpline(1, len(knots[0]) - 1).double().set_(*(t[None] for t in knots))
    z, logdet = spline.forward_and_logdet(x[:, None])
    return float((logdet - 0.5 * z[:, 0].square()).mean())

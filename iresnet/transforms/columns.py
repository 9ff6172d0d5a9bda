"""Preprocessing of tables whose columns have bounds: each column to the real line, then to mean 0 and variance 1.

With a = x - lower and b = upper - x, the distances to the ends of the column's interval,

    y = L(a) - L(b),    z = (y - mean) / std,    dz/dx = (L'(a) + L'(b)) / std,

where an end that the interval lacks is left out, and y = x if it lacks both. L is the logarithm, up to `reach`:

    L(a) = ln a    for a <= reach,    ln reach + a / reach - 1    beyond,        L'(a) = 1 / min(a, reach).

So one end gives a logarithm and two ends a logit, and the inverse maps every code into the interval. A logarithm alone
would have an inverse without a Lipschitz constant, and samples that overflow; `reach` lies far beyond the data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..batch import Shape, check_batch, check_finite
from ..compiler import can_read_values
from ..float64 import ELEMENTARY, OUTWARD, UNIT, Rounding
from ..proof import sample_norms
from ..transform import UNKNOWN, BufferRule, Stretch
from .closed_form import ClosedForm, is_positive

#: The logarithm becomes linear this many times further from the end than any value of the data.
REACH = 10.0


class ColumnTransform(ClosedForm):
    """Maps each column of (batch, D) from its open interval to the real line and standardises it.

    `lower` and `upper` are the ends of the intervals, None where a column has none. `margin` is how close to an end the
    data come: Lip(F) and ln det are bounded on the data only, and not at all where it is 0. `step` is the distance of
    the values of a discrete column, None for others: `dequantise_for` adds noise of that width. `fit` estimates the
    rest.

    >>> t = ColumnTransform(lower=[None, 0.0, 0.0], upper=[None, None, 1.0], margin=[0.0, 0.0, 0.0])
    >>> t(torch.tensor([[3.0, 1.0, 0.5]])).tolist()
    [[3.0, 0.0, 0.0]]
    """

    mean: Tensor
    std: Tensor
    reach: Tensor
    lower: Tensor
    upper: Tensor
    has_lower: Tensor
    has_upper: Tensor
    discrete_step: Tensor

    bound_is_limited: ClassVar[bool] = True
    buffer_rules: ClassVar[tuple[BufferRule, ...]] = (
        ("std", "be positive", is_positive),
        ("reach", "be positive", is_positive),
    )

    def __init__(
        self,
        lower: Sequence[float | None],
        upper: Sequence[float | None],
        margin: Sequence[float],
        step: Sequence[float | None] | None = None,
    ) -> None:
        super().__init__()
        step = [None] * len(lower) if step is None else step
        if not len(lower) == len(upper) == len(margin) == len(step) or not lower:
            raise ValueError(
                "lower, upper, margin and step must have one entry per column; got "
                f"{len(lower)}, {len(upper)}, {len(margin)} and {len(step)}."
            )
        if not all(a is None or b is None or a < b for a, b in zip(lower, upper, strict=True)):
            raise ValueError(f"lower must be below upper in every column; got {list(lower)} and {list(upper)}.")
        self.margin, self.has_steps = tuple(margin), any(step)
        for name, ends in (("lower", lower), ("upper", upper), ("discrete_step", step)):
            self.register_buffer(name, torch.tensor([end or 0.0 for end in ends]), persistent=False)
        for name, ends in (("has_lower", lower), ("has_upper", upper)):
            self.register_buffer(name, torch.tensor([end is not None for end in ends]), persistent=False)
        for name, value in (("mean", 0.0), ("std", 1.0)):
            self.register_buffer(name, torch.full((len(lower),), value))
        self.register_buffer("reach", REACH * torch.where(self._both, self.upper - self.lower, 1.0))

    @torch.no_grad()
    def fit(self, x: Tensor) -> ColumnTransform:
        """Estimate mean, std and reach from data, with the noise of discrete columns, in place."""
        x = x.double()
        check_finite(x, "x")
        a, b = self._distances(x)
        farthest = torch.where(self.has_lower, a, b).amax(0)
        self.reach.copy_(torch.where(self.has_lower ^ self.has_upper, REACH * farthest, self.reach))
        y = self._to_line(self._checked(x))
        std = y.std(dim=0, correction=0)
        constant = (std <= torch.finfo(torch.float32).eps * y.abs().amax(0)).nonzero().flatten().tolist()
        if constant:
            raise ValueError(
                "every column must vary, because a density on a constant one is unbounded; got constant columns "
                f"{constant}. Drop them."
            )
        self.mean.copy_(y.mean(0))
        self.std.copy_(std)
        return self

    def value(self, x: Tensor) -> Tensor:
        return self._standardised(self._checked(x))

    def reference(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        # As in `Logit`: an inverse that was rounded to the end of an interval has no bound, but is not refused.
        self._check_columns(x, "x")
        return self._standardised(x.double())

    def logdet(self, x: Tensor) -> Tensor:
        return (self._log_slope(x) - self.std.log()).sum(dim=1).to(x.dtype)

    def undo(self, z: Tensor) -> Tensor:
        self._check_columns(z, "z")
        return self._from_line(z * self.std + self.mean).to(z.dtype)

    def inside(self, x: Tensor) -> Tensor:
        """Whether each sample lies in the intervals of its columns."""
        return (torch.minimum(*self._distances(x)) > 0).all(dim=1)

    def has_bound_at(self, x: Tensor) -> Tensor:
        """Whether each sample comes no closer to an end than the data may, where `stretch` bounds the slopes."""
        margin = torch.tensor(self.margin, dtype=x.dtype, device=x.device)
        a, b = self._distances(x)
        return (((a >= margin) | ~self.has_lower) & ((b >= margin) | ~self.has_upper)).all(dim=1)

    def clamp(self, x: Tensor) -> Tensor:
        """Move samples into the part of the intervals that the data may fill."""
        margin = torch.tensor(self.margin, dtype=x.dtype, device=x.device).clamp_min(torch.finfo(x.dtype).tiny)
        low = torch.where(self.has_lower, self.lower.to(x.dtype) + margin, -math.inf)
        high = torch.where(self.has_upper, self.upper.to(x.dtype) - margin, math.inf)
        return x.clamp(low, high)

    def inverse_error_bound(self, x: Tensor, z: Tensor, context: Tensor | None = None) -> Tensor:
        """Compare x with the inverse formula in float64, whose own error is known, as `Logit` does."""
        z, x = z.double(), x.double()
        scaled, mean = z * self.std.double(), self.mean.double()
        exact, y = self.undo(z), scaled + mean
        ends = torch.maximum(self.lower.double().abs(), self.upper.double().abs())
        # An error in y changes x by at most the largest slope dx/dy there, and the logarithm of the slope by at most
        # itself. Every operation has an error relative to its result.
        off = 4 * UNIT * (scaled.abs() + mean.abs()) + 2 * ELEMENTARY * (1 + self.reach.double().log().abs())
        steeper = torch.where(self.has_lower | self.has_upper, off.exp(), 1.0)
        lost = self._inverse_slope(y) * steeper * off * OUTWARD + 4 * ELEMENTARY * (exact.abs() + ends)
        return sample_norms((exact - x).abs() + lost) * OUTWARD

    def stretch(self, input_shape: Shape | None = None) -> Stretch:
        """Bound Lip(F) and ln det on the data, no closer to an end than `margin`, and Lip(F^-1) on the whole line."""
        if self.why_unknown():
            return UNKNOWN
        std, reach = self.std.double().tolist(), self.reach.double().tolist()
        width = (self.upper.double() - self.lower.double()).tolist()
        both = self._both.tolist()
        one = (self.has_lower ^ self.has_upper).tolist()
        slopes = list[tuple[float, float]]()  # the least and the largest dy/dx of every column
        for i, m in enumerate(self.margin):
            if both[i]:
                steepest = width[i] / (m * (width[i] - m)) if m else math.inf
                slopes.append((4 / width[i], steepest))
            else:
                slopes.append((1 / reach[i], 1 / m if m else math.inf) if one[i] else (1.0, 1.0))
        low, high = (sum(math.log(s[end] / std[i]) for i, s in enumerate(slopes)) for end in (0, 1))
        forward = max(s[1] / std[i] for i, s in enumerate(slopes))
        return Stretch(forward, max(std[i] / s[0] for i, s in enumerate(slopes)), (low, high))

    def why_unknown(self) -> str:
        """Return also whether an interval is empty, or a logarithm linear inside of one with two ends."""
        width = self.upper.double() - self.lower.double()
        if bool((~self._both | ((width > 0) & (self.reach.double() >= width))).all()):
            return super().why_unknown()
        return (
            "reach of ColumnTransform must be at least upper - lower, and that positive. Restore it from a checkpoint."
        )

    def rounding(self, input_shape: Shape) -> Rounding:
        """Bound the rounding of two logarithms, relative to their size, a difference and the standardisation."""
        sizes = (self.mean, self.reach.log(), (self.upper - self.lower).abs().clamp_min(1).log())
        largest = ((2 + sum(size.double().abs() for size in sizes)) / self.std.double().abs()).norm()
        return Rounding.of(0.0, 32 * UNIT * float(largest), math.prod(input_shape), result=32 * UNIT)

    def extra_repr(self) -> str:
        return f"{len(self.mean)}"

    @property
    def _both(self) -> Tensor:
        return self.has_lower & self.has_upper

    def _distances(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The distances to the lower and the upper end; 1 where there is no such end."""
        a = torch.where(self.has_lower, x - self.lower, 1.0)
        return a, torch.where(self.has_upper, self.upper - x, 1.0)

    def _to_line(self, x: Tensor) -> Tensor:
        a, b = (self._log(d) for d in self._distances(x))
        y = torch.where(self.has_lower, a, 0.0) - torch.where(self.has_upper, b, 0.0)
        return torch.where(self.has_lower | self.has_upper, y, x)

    def _standardised(self, x: Tensor) -> Tensor:
        return ((self._to_line(x) - self.mean) / self.std).to(x.dtype)

    def _log(self, a: Tensor) -> Tensor:
        reach = self.reach.to(a.dtype)
        return torch.minimum(a, reach).log() + (a / reach).clamp_min(1) - 1

    def _log_slope(self, x: Tensor) -> Tensor:
        """ln dy/dx: with both ends 1/a + 1/b = (upper - lower) / (a b), with one 1 / min(a, reach), without ends 1."""
        a, b = (torch.minimum(d, self.reach.to(d.dtype)).log() for d in self._distances(x))
        width = torch.where(self._both, self.upper - self.lower, 1.0)
        return width.log() - torch.where(self.has_lower, a, 0.0) - torch.where(self.has_upper, b, 0.0)

    def _from_line(self, y: Tensor) -> Tensor:
        lower, upper, reach = (t.to(y.dtype) for t in (self.lower, self.upper, self.reach))
        width = upper - lower
        one = torch.where(self.has_lower, lower + _exp(y, reach), upper - _exp(-y, reach))
        # From the nearer end, so that no digits are lost there.
        inner = torch.where(y < 0, lower + width * y.sigmoid(), upper - width * (-y).sigmoid())
        return torch.where(self._both, inner, torch.where(self.has_lower | self.has_upper, one, y))

    def _inverse_slope(self, y: Tensor) -> Tensor:
        """dx/dy."""
        reach = self.reach.to(y.dtype)
        one = torch.minimum(torch.where(self.has_lower, y, -y), reach.log()).exp()
        both = (self.upper - self.lower).to(y.dtype) * y.sigmoid() * (-y).sigmoid()
        slope = torch.where(self._both, both, one)
        return torch.where(self.has_lower | self.has_upper, slope, 1.0)

    def _check_columns(self, x: Tensor, name: str) -> None:
        check_batch(x, name, (len(self.mean),))

    def _checked(self, x: Tensor) -> Tensor:
        self._check_columns(x, "x")
        # As in `Logit`: reading a value would break a graph, and make every training step on a GPU wait.
        if not can_read_values(x) or (x.is_cuda and self.training) or bool(self.inside(x).all()):
            return x
        outside = torch.minimum(*self._distances(x)) <= 0
        row, column = (int(i) for i in outside.nonzero()[0])
        low = f"{float(self.lower[column]):g}" if self.has_lower[column] else "-inf"
        high = f"{float(self.upper[column]):g}" if self.has_upper[column] else "inf"
        raise ValueError(
            f"column {column} must lie in ({low}, {high}); got {float(x[row, column].detach()):g} in sample {row}. "
            "The density is 0 there."
        )


def _exp(y: Tensor, reach: Tensor) -> Tensor:
    """Invert `_log`: e^y up to `reach`, then linear."""
    end = reach.log()
    return torch.minimum(y, end).exp() + reach * (y - end).clamp_min(0)

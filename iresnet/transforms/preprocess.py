"""Preprocessing as part of the model, so that likelihoods are in the units of the data.

Images hold integers 0 .. levels - 1. `dequantise` adds noise u in [0, 1), uniform by default (see `dequantisation`):
E ln p(x + u) over uniform u is a lower bound of ln P(x), which makes bits per dimension comparable (the evaluation of
Table 4, App. C.3). `Logit` then maps the interval to the real line,

    s = alpha + (1 - 2 alpha) x / levels,
    z = ln s - ln(1 - s),    ln dz/dx = ln((1 - 2 alpha) / levels) - ln s - ln(1 - s),

and `Standardise` is z = (x - mean) / std per column or channel. Both include their log-determinant in the likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..batch import Shape, check_batch, check_finite, dimension
from ..compiler import can_read_values
from ..float64 import ELEMENTARY, OUTWARD, UNIT, Rounding
from ..shard import draw_rows
from ..transform import UNKNOWN, BufferRule, Stretch
from .closed_form import ClosedForm, is_positive

#: The largest number of levels that are dequantised; data with more are treated as continuous.
MAX_LEVELS = 2**16


def dequantise(
    x: Tensor, levels: int = 256, generator: torch.Generator | None = None, *, noise: Tensor | None = None
) -> Tensor:
    """Return x + u in [x, x + 1) for integers x in 0 .. levels - 1 and uniform noise u in [0, 1).

    `noise` replaces the u that is drawn otherwise.

    >>> dequantise(torch.tensor([[0, 255]], dtype=torch.uint8)).floor().tolist()
    [[0.0, 255.0]]
    """
    x = _checked_integers(x, levels)
    if noise is None:
        device = x.device if generator is None else generator.device
        noise = draw_rows(lambda s: torch.rand(s, dtype=x.dtype, device=device, generator=generator), x.shape)
    # 255 + 0.99999997 rounds to 256: stay below, so that rounding down recovers the integer.
    return torch.minimum(x + noise.to(x.device), torch.nextafter(x + 1, x))


class Logit(ClosedForm):
    """Maps [0, levels] to the real line: the logit of alpha + (1 - 2 alpha) x / levels.

    Use `levels=1` for data in [0, 1]. `inverse` takes any z. The x of a code beyond those of the data lies at most
    alpha levels / (1 - 2 alpha) outside [0, levels], where the map and its log-determinant are still exact. `forward`
    accepts such x and refuses others.

    >>> Logit(levels=256)(torch.tensor([[128.0]])).item()
    0.0
    """

    bound_is_limited: ClassVar[bool] = True

    def __init__(self, levels: float = 256, alpha: float = 0.05) -> None:
        super().__init__()
        if not (0 < levels < math.inf):
            raise ValueError(f"levels must be positive and finite; got {levels}. Use 256 for bytes, 1 for [0, 1].")
        if not 0 < alpha < 0.5:
            raise ValueError(f"alpha must lie in (0, 0.5); got {alpha}. 0.05 is usual; at 0 the logit is infinite.")
        self.levels = levels
        self.alpha = alpha

    def value(self, x: Tensor) -> Tensor:
        s, rest = self._checked(x)
        return s.log() - rest.log()

    def logdet(self, x: Tensor) -> Tensor:
        s, rest = self._unit(x)
        return (math.log(self._slope) - s.log() - rest.log()).flatten(1).sum(dim=1)

    def undo(self, z: Tensor) -> Tensor:
        check_batch(z, "z")
        return (z.sigmoid() - self.alpha) / self._slope

    def reference(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        # An inverse that float32 rounded to the end of the interval has an infinite error, but is not refused.
        s, rest = self._unit(x.double())
        return s.clamp_min(0).log() - rest.clamp_min(0).log()

    def inverse_error_bound(self, x: Tensor, z: Tensor, context: Tensor | None = None) -> Tensor:
        """Compare x with the inverse formula in float64, whose own error is known.

        A residual would need the logarithm of a number that rounds to zero long before the error of x matters.
        """
        off = torch.linalg.vector_norm((x.double() - self.undo(z.double())).flatten(1), dim=1)
        error = Rounding.of(0.0, self.inverse_error(tuple(x.shape[1:])), dimension(x))
        return error.residual_bound(off, torch.zeros_like(off), torch.zeros_like(off))

    def inverse_error(self, input_shape: Shape) -> float:
        """Bound the error of `inverse` in float64: that of a sigmoid, a difference and a quotient."""
        return 4 * ELEMENTARY / self._slope * math.sqrt(math.prod(input_shape)) * OUTWARD

    def stretch(self, input_shape: Shape | None = None) -> Stretch:
        """Bound Lip(F) and ln det on [0, levels], and Lip(F^-1) on the whole line. ln det needs the shape."""
        if self.why_unknown():
            return UNKNOWN
        steepest = self._slope / (self.alpha * (1 - self.alpha))
        logdet = (-math.inf, math.inf)
        if input_shape is not None:
            elements = math.prod(input_shape)
            logdet = (elements * math.log(4 * self._slope), elements * math.log(steepest))
        return Stretch(steepest, 1 / (4 * self._slope), logdet)

    def has_bound_at(self, x: Tensor) -> Tensor:
        """Whether each sample lies in [0, levels]."""
        return ((x >= 0) & (x <= self.levels)).flatten(1).all(dim=1)

    def why_unknown(self) -> str:
        """Return whether somebody has set levels or alpha to what the constructor refuses."""
        valid = 0 < self.levels < math.inf and 0 < self.alpha < 0.5
        return "" if valid else f"Logit must have 0 < levels and 0 < alpha < 0.5; got {self.extra_repr()}."

    def extra_repr(self) -> str:
        return f"levels={self.levels}, alpha={self.alpha}"

    @property
    def _slope(self) -> float:
        return (1 - 2 * self.alpha) / self.levels

    def _unit(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # 1 - s is computed from levels - x, so that no digits are lost where s is close to 1.
        return self.alpha + self._slope * x, self.alpha + self._slope * (self.levels - x)

    def _checked(self, x: Tensor) -> tuple[Tensor, Tensor]:
        check_batch(x)
        s, rest = self._unit(x)
        # Reading a value would break a compiled graph, fail in a CUDA graph capture, and make every training step on a
        # GPU wait. The values are checked in the eager step before those, on a CPU, and in eval mode.
        if not can_read_values(x) or (x.is_cuda and self.training):
            return s, rest
        if not bool((torch.minimum(s, rest) > 0).all()):
            low, high = float(x.detach().min()), float(x.detach().max())
            raise ValueError(
                f"x must lie in [0, {self.levels}] for Logit(levels={self.levels}); got values from {low:g} to "
                f"{high:g}. Set levels to that of the data, or rescale them."
            )
        return s, rest


class Standardise(ClosedForm):
    """z = (x - mean) / std per column of (batch, D) or per channel of (batch, C, ...), in the dtype of x.

    `Standardise.fit(x)` estimates both from data and refuses a constant column, because a density on it is unbounded.
    For a classifier, set std to 1 for that column by hand.

    >>> Standardise(mean=[1.0], std=[2.0])(torch.tensor([[5.0]])).item()
    2.0
    """

    mean: Tensor
    std: Tensor

    buffer_rules: ClassVar[tuple[BufferRule, ...]] = (("std", "be positive", is_positive),)

    def __init__(self, mean: Tensor | Sequence[float], std: Tensor | Sequence[float]) -> None:
        super().__init__()
        mean, std = _column(mean), _column(std)
        if mean.dim() != 1 or mean.shape != std.shape or not len(mean):
            raise ValueError(
                "mean and std must be vectors of the same length, one number per column or channel; "
                f"got shapes {tuple(mean.shape)} and {tuple(std.shape)}."
            )
        if not bool(mean.isfinite().all() and std.isfinite().all() and (std > 0).all()):
            raise ValueError(
                f"mean must be finite and std positive; got mean {mean.tolist()}, std {std.tolist()}. "
                "Use std 1 for a constant column, or drop it."
            )
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    @classmethod
    def fit(cls, x: Tensor) -> Standardise:
        """Estimate mean and std from data: per column of (batch, D), or per channel of (batch, C, ...)."""
        check_batch(x)
        check_finite(x, "x")
        columns = x.detach().double().transpose(0, 1).flatten(1)
        std = columns.std(dim=1, correction=0)
        constant = (std <= torch.finfo(x.dtype).eps * columns.abs().amax(dim=1)).nonzero().flatten().tolist()
        if constant:
            raise ValueError(
                "every column must vary, because a density on a constant one is unbounded; got constant columns "
                f"{constant}. Drop them, dequantise integer data first, or, for a classifier, use "
                "Standardise(mean, std) with std 1 there."
            )
        return cls(columns.mean(dim=1).to(x.dtype), std.to(x.dtype))

    def value(self, x: Tensor) -> Tensor:
        mean, std = self._columns(x, "x")
        return ((x - mean) / std).to(x.dtype)

    def logdet(self, x: Tensor) -> Tensor:
        positions = dimension(x) // len(self.std)
        return (-positions * self.std.double().log().sum()).to(x.dtype).expand(len(x))

    def undo(self, z: Tensor) -> Tensor:
        mean, std = self._columns(z, "z")
        return (z * std + mean).to(z.dtype)

    def stretch(self, input_shape: Shape | None = None) -> Stretch:
        """Return exact bounds; without a shape ln det, which grows with the number of positions, has no bound."""
        if self.why_unknown():
            return UNKNOWN
        std = self.std.double()
        logdet = (-math.inf, math.inf)
        if input_shape is not None:
            logdet = (-math.prod(input_shape[1:]) * float(std.log().sum()),) * 2
        return Stretch(1 / float(std.min()), float(std.max()), logdet)

    def rounding(self, input_shape: Shape) -> Rounding:
        """Bound the rounding of a difference and a quotient, each relative to the result."""
        return Rounding.of(0.0, 0.0, math.prod(input_shape), result=4 * UNIT)

    def extra_repr(self) -> str:
        return f"{len(self.mean)}"

    def _columns(self, x: Tensor, name: str) -> tuple[Tensor, Tensor]:
        check_batch(x, name)
        if x.shape[1] != len(self.mean):
            raise ValueError(
                f"{name} must have shape (batch, {len(self.mean)}, ...) for this Standardise; got {tuple(x.shape)}. "
                "Fit it on data of the same shape."
            )
        shape = (len(self.mean),) + (1,) * (x.dim() - 2)
        return self.mean.view(shape), self.std.view(shape)


def _column(values: Tensor | Sequence[float]) -> Tensor:
    tensor = torch.as_tensor(values).detach().clone()
    return tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())


def _checked_integers(x: Tensor, levels: int) -> Tensor:
    """Convert integers in 0 .. levels - 1 to floats; refuse other values."""
    if not 2 <= levels <= MAX_LEVELS:
        raise ValueError(
            f"levels must lie in 2 .. {MAX_LEVELS}; got {levels}. Use 256 for bytes; treat finer data as continuous, "
            "without dequantisation."
        )
    if x.numel() == 0:
        raise ValueError(f"x must hold at least one element; got an empty tensor of shape {tuple(x.shape)}.")
    if x.dtype == torch.uint8 and levels >= 256:  # every byte is valid; reading values would make a GPU wait
        return x.to(torch.float32)
    x = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    if not can_read_values(x):  # in a CUDA graph: the eager steps before it have checked the values
        return x
    if not bool((x.frac() == 0).all()):
        raise ValueError(
            f"x must hold integers; got {float(x[x.frac() != 0][0]):g}. Undo a scaling such as x / {levels - 1}, or "
            "leave dequantisation out for continuous data."
        )
    low, high = float(x.min()), float(x.max())
    if low < 0 or high >= levels:
        raise ValueError(f"x must lie in 0 .. {levels - 1}; got {low:g} to {high:g}. Set levels to that of the data.")
    return x

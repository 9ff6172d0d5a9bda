"""The rounding error of g in float64: a bound ||fl(g(x)) - g(x)|| <= relative ||x|| + absolute, for every x.

Two bounds are propagated from layer to layer, both linear in ||x||: on the size of the exact intermediate state h, and
on the error e of the computed one. With L the Lipschitz bound of a layer, u = 2^-53 and gamma_n = n u / (1 - n u),

    size         ||h|| <= m ||x|| + k          m the product of L so far, k = ||h(0)|| from one evaluation at zero
    layer        e <- L e + gamma_(n+1) (|| |W| || (||h|| + e) + ||b||)        sums of n products, in any order
    activation   e <- L e + c (||h|| + e) + c' sqrt(elements)                  see `lipschitz.activations`

so large intermediate values that cancel in a small g(x) are accounted for. The norm of |W| is at most
sqrt(largest column sum x largest row sum).

The bound covers sums of products in any order, with or without fused multiply-add, and elementary functions with an
error of at most four units in the last place (those of torch, on CPUs and GPUs). It does not cover algorithms that
combine inputs before multiplying (Fourier, Winograd, Strassen), nor emulated float64: for float64 the libraries under
torch use neither by default.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..batch import Shape
from ..float64 import ELEMENTARY, OUTWARD, UNIT, Rounding, gamma
from ..lipschitz.conditioned import add_per_channel
from ..proof import nan_to_infinity, product
from ..spectral import Geometry, absolute_norm
from .program import Program, Step, apply_step


@dataclass(frozen=True)
class LinearBound:
    """A bound linear in ||x||: slope ||x|| + fixed, which may have an entry per sample (of a batch of contexts)."""

    slope: float = 0.0
    fixed: float | Tensor = 0.0

    def __add__(self, other: LinearBound) -> LinearBound:
        return LinearBound(self.slope + other.slope, self.fixed + other.fixed)

    def __rmul__(self, factor: float) -> LinearBound:
        return LinearBound(0.0, 0.0) if factor == 0 else LinearBound(product(factor, self.slope), factor * self.fixed)

    def concatenated(self, other: LinearBound) -> LinearBound:
        """Bound the concatenation of two vectors."""
        return LinearBound(math.hypot(self.slope, other.slope), _hypot(self.fixed, other.fixed))


def _hypot(a: float | Tensor, b: float | Tensor) -> float | Tensor:
    if isinstance(a, float) and isinstance(b, float):
        return math.hypot(a, b)
    return torch.hypot(*(torch.as_tensor(t, dtype=torch.float64) for t in (a, b)))


@dataclass(frozen=True)
class TrackedState:
    """An intermediate state: its value at x = 0, the bound on its size, and the bound on its rounding error."""

    zero: Tensor
    size: LinearBound
    error: LinearBound

    def then(self, zero: Tensor, lipschitz: float, added: LinearBound) -> TrackedState:
        """Propagate through a layer with this value at x = 0, this Lipschitz bound and this rounding error."""
        numbers = zero[0].numel()
        error = OUTWARD * (lipschitz * self.error + added + LinearBound(0.0, math.sqrt(numbers) * 2.0**-1000))
        return TrackedState(zero, LinearBound(product(lipschitz, self.size.slope), _norms(zero) + error.fixed), error)


def rounding_bound(
    program: Program, values: Sequence[Tensor], constants: Sequence[float], input_shape: Shape, samples: int = 1
) -> Rounding:
    """Bound the rounding error of a residual x + g(x) - z, for a g in float64 with these tensors and constants.

    `samples` is the batch size of the context among the tensors, if there is one; the bound then has an entry for each.

    >>> from torch import nn
    >>> from .constant import lipschitz_bound
    >>> from .program import parse
    >>> g = nn.Sequential(nn.Linear(2, 2, bias=False)).double()
    >>> parsed = parse(g)
    >>> found = rounding_bound(parsed.program, parsed.tensors(), lipschitz_bound(g).constants, (2,))
    >>> 0 < found.relative < 1e-14, 0 <= found.absolute < 1e-14
    (True, True)
    """
    error = state_errors(program, values, constants, input_shape, samples)[-1]
    slope, fixed = error.slope, error.fixed
    slope = math.inf if math.isnan(slope) else slope  # 0 x inf
    fixed = nan_to_infinity(fixed) if isinstance(fixed, Tensor) else math.inf if math.isnan(fixed) else fixed
    return Rounding.of(slope, fixed, math.prod(input_shape))


@torch.no_grad()
def state_errors(
    program: Program, values: Sequence[Tensor], constants: Sequence[float], input_shape: Shape, samples: int = 1
) -> list[LinearBound]:
    """Bound the error of every intermediate state of g, from x to the output."""
    device = values[0].device if values else None
    states = [
        TrackedState(
            torch.zeros(samples, *input_shape, dtype=torch.float64, device=device), LinearBound(1.0), LinearBound()
        )
    ]
    for (step, into, own), constant in zip(program.with_tensors(values), constants, strict=True):
        states.append(_propagate(step, [states[n] for n in into], own, constant))
    return [state.error for state in states]


def _propagate(step: Step, before: list[TrackedState], own: list[Tensor], lipschitz: float) -> TrackedState:
    """Propagate the states before a step through it."""
    zero = apply_step(step, [state.zero for state in before], own)
    state = before[0]
    if step.kind == "join":
        return _concatenate(before[0], before[1], own[0], zero)
    if step.kind == "shift":
        spread = _norms(add_per_channel(torch.zeros_like(state.zero), own[0].double()))
        return state.then(zero, 1.0, UNIT * (_computed_size(state) + LinearBound(0.0, spread)))
    if step.activation is not None:
        of_input, of_one = step.activation.rounding(*step.settings)
        added = of_input * _computed_size(state) + LinearBound(0.0, of_one * math.sqrt(zero[0].numel()))
        return state.then(zero, lipschitz, added)
    return state.then(zero, lipschitz, _product_error(step, state, own, zero))


def _product_error(step: Step, state: TrackedState, own: list[Tensor], zero: Tensor) -> LinearBound:
    """Bound the rounding error that W h + b, or W' h, adds."""
    weight, geometry = own[0], step.geometry or Geometry()
    if step.kind == "descent":
        count = weight.shape[0] // geometry.groups * weight[0, 0].numel()
        return gamma(count) * (absolute_norm(weight, geometry.groups) * _computed_size(state))
    added = gamma(weight[0].numel()) * (_absolute_norm(weight, geometry, state.zero, zero) * _computed_size(state))
    if len(own) == 2:
        per_channel = math.sqrt(zero[0].numel() / len(own[1]))
        added += gamma(weight[0].numel()) * LinearBound(0.0, per_channel * _norms(own[1][None]))
    return added


def _concatenate(h: TrackedState, f: TrackedState, weights: Tensor, zero: Tensor) -> TrackedState:
    """Propagate through (cos(t) h, sin(t) f(h)): both factors and both products are rounded."""
    a, b = (abs(float(weight)) * OUTWARD for weight in weights)
    rounded = 2 * ELEMENTARY * (a * _computed_size(h)).concatenated(b * _computed_size(f))
    both = TrackedState(h.zero, (a * h.size).concatenated(b * f.size), (a * h.error).concatenated(b * f.error))
    return both.then(zero, 1.0, rounded)


def _computed_size(state: TrackedState) -> LinearBound:
    """Bound the size of the computed state."""
    return state.size + state.error


def _absolute_norm(weight: Tensor, geometry: Geometry, x: Tensor, y: Tensor) -> float:
    """Bound the norm of |W|. Under circular padding, repeated outputs count an input as often."""
    repeats = 1
    if geometry.circular:
        sizes = zip(x.shape[2:], y.shape[2:], geometry.stride, strict=True)
        repeats = math.prod(math.ceil(((m - 1) * s + 1) / n) for n, m, s in sizes)
    return absolute_norm(weight, geometry.groups, repeats)


def _norms(x: Tensor) -> float | Tensor:
    """Return the norm of every sample, a number for one, rounded up; squares of numbers below 2^-511 underflow."""
    norms = OUTWARD * torch.linalg.vector_norm(x.flatten(1), dim=1) + math.sqrt(x[0].numel()) * 2.0**-511
    return float(norms) if len(norms) == 1 else norms

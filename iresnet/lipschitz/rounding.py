"""What rounding in float64 can do to g(x): ||fl(g(x)) - g(x)|| <= relative ||x|| + absolute, for every x.

Two bounds are carried from layer to layer, both linear in ||x||: the size of the exact state h, and the error e of the
computed one. With L the Lipschitz bound of a layer, u = 2^-53 and gamma_n = n u / (1 - n u),

    size         ||h|| <= m ||x|| + k          m the product of the L so far, k = ||h(0)|| from one evaluation at zero
    layer        e <- L e + gamma_(n+1) (|| |W| || (||h|| + e) + ||b||)        n products in a sum, in any order
    activation   e <- L e + c (||h|| + e) + c' sqrt(elements)                  see `_ACTIVATIONS`

so that large numbers that cancel on the way to a small g(x) are counted. The norm of |W| is at most
sqrt(largest column sum x largest row sum).

It covers sums of products in any order and with fused multiplications, and elementary functions that are right to four
units in the last place (those of torch are, on CPUs and GPUs). It does not cover algorithms that combine inputs before
they multiply them (Fourier, Winograd, Strassen), nor float64 emulated by other numbers: for float64 the libraries under
torch use neither, unless they are told to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..float64 import ELEMENTARY, OUTWARD, UNIT, Rounding, gamma
from ..spectral import Geometry, NoBoundKnown, absolute_norm
from .activations import LEAST_THRESHOLD, LipSwish, MaxMin, Sine
from .bound import Bound, Conditioned, Shape, leaves
from .dense import Concatenated
from .potential import Potential


@dataclass(frozen=True)
class Size:
    """A bound that is linear in ||x||: slope ||x|| + fixed."""

    slope: float = 0.0
    fixed: float = 0.0

    def __add__(self, other: Size) -> Size:
        return Size(self.slope + other.slope, self.fixed + other.fixed)

    def __rmul__(self, factor: float) -> Size:
        return Size(*(0.0 if factor == 0 else factor * part for part in (self.slope, self.fixed)))

    def beside(self, other: Size) -> Size:
        """Of two vectors side by side."""
        return Size(math.hypot(self.slope, other.slope), math.hypot(self.fixed, other.fixed))


@dataclass(frozen=True)
class State:
    """The input of a layer: its value where x = 0, its size, and the error of its computation."""

    zero: Tensor
    size: Size
    error: Size

    def then(self, zero: Tensor, lipschitz: float, added: Size) -> State:
        """The output of a layer with this value where x = 0, Lipschitz bound, and rounding on top."""
        numbers = zero[0].numel()
        error = OUTWARD * (lipschitz * self.error + added + Size(0.0, math.sqrt(numbers) * 2.0**-1000))
        return State(zero, Size(lipschitz * self.size.slope, _norm(zero) + error.fixed), error)


def rounding(g: nn.Module, bound: Bound, input_shape: Shape, shift: Tensor | None = None) -> Rounding:
    """What rounding can hide of a residual x + g(x) - z, for a g in float64 without parametrizations.

    `bound` is that of g for this shape. `shift` is what `Conditioned` adds, the embeddings of a batch of contexts, one
    row for each. Raises `NoBoundKnown` where a part of g has no bound.

    >>> from .bound import bound
    >>> g = nn.Sequential(nn.Linear(2, 2, bias=False)).double()
    >>> found = rounding(g, bound(g), (2,))
    >>> 0 < found.relative < 1e-14, 0 <= found.absolute < 1e-14
    (True, True)
    """
    error = errors(g, bound, input_shape, shift)[-1]
    slope, fixed = (math.inf if math.isnan(part) else part for part in (error.slope, error.fixed))  # 0 x inf
    return Rounding.of(slope, fixed, math.prod(input_shape))


@torch.no_grad()
def errors(g: nn.Module, bound: Bound, input_shape: Shape, shift: Tensor | None = None) -> list[Size]:
    """The error of every state in g, its output last."""
    rows, like = 1 if shift is None else len(shift), next(g.parameters(), torch.zeros(()))
    zero = torch.zeros(rows, *input_shape, dtype=torch.float64, device=like.device)
    states = [State(zero, Size(1.0), Size())]
    constants = (part.bound for part in bound.parts)
    if type(g) is not Conditioned:
        _walk(g, states, constants)
    else:
        if shift is None:
            raise NoBoundKnown("this network is conditional; pass context=... (here its embedding, shift).")
        _walk(g.first, states, constants)
        states.append(_shifted(states[-1], shift.double()))
        _walk(g.rest, states, constants)
    return [state.error for state in states]


def _walk(g: nn.Module, states: list[State], constants: Iterator[float]) -> None:
    """Append the states after each layer of g."""
    if any(isinstance(m, Conditioned) for m in g.modules()):
        raise NoBoundKnown("a Conditioned within another network has no context. Let it be the whole of g.")
    for _, leaf in leaves(g):
        if type(leaf) is Concatenated:
            _concatenated(leaf, states, constants)
        elif type(leaf) is Potential:
            _potential(leaf, states, constants)
        elif type(leaf) in _ACTIVATIONS:
            states.append(_activation(leaf, states[-1], next(constants, math.inf)))
        else:
            states.append(_layer(leaf, states[-1], next(constants, math.inf)))


def _layer(layer: nn.Module, state: State, lipschitz: float) -> State:
    """W h + b."""
    geometry, weight, bias = Geometry.of(layer), cast(Tensor, layer.weight), cast("Tensor | None", layer.bias)
    zero = layer(state.zero)
    added = gamma(weight[0].numel()) * (_absolute_norm(weight, geometry, state.zero, zero) * _computed(state))
    if bias is not None:
        per_channel = math.sqrt(zero[0].numel() / len(bias))
        added += gamma(weight[0].numel()) * Size(0.0, per_channel * _norm(bias[None]))
    return state.then(zero, lipschitz, added)


def _activation(layer: nn.Module, state: State, lipschitz: float) -> State:
    zero = layer(state.zero.clone())  # which may work in place
    of_input, of_one = _ACTIVATIONS[type(layer)](layer)
    added = of_input * _computed(state) + Size(0.0, of_one * math.sqrt(zero[0].numel()))
    return state.then(zero, lipschitz, added)


def _potential(leaf: Potential, states: list[State], constants: Iterator[float]) -> None:
    """-W' s(W h + b)."""
    before, lipschitz = states[-1], next(constants, math.inf)
    states.append(_layer(leaf.layer, before, lipschitz))
    states.append(_activation(leaf.activation, states[-1], next(constants, math.inf)))
    weight, geometry = leaf.layer.weight, Geometry.of(leaf.layer)
    count = weight.shape[0] // geometry.groups * weight[0, 0].numel()
    added = gamma(count) * (absolute_norm(weight, geometry.groups) * _computed(states[-1]))
    states.append(states[-1].then(leaf(before.zero), lipschitz, added))


def _concatenated(leaf: Concatenated, states: list[State], constants: Iterator[float]) -> None:
    """(cos(t) h, sin(t) f(h)): both factors and both products are rounded."""
    kept = states[-1]
    _walk(leaf.f, states, constants)
    made, (a, b) = states[-1], (abs(f(float(leaf.angle))) * OUTWARD for f in (math.cos, math.sin))
    rounded = 2 * ELEMENTARY * (a * _computed(kept)).beside(b * _computed(made))
    both = State(kept.zero, (a * kept.size).beside(b * made.size), (a * kept.error).beside(b * made.error))
    states.append(both.then(leaf(kept.zero), 1.0, rounded))


def _shifted(state: State, shift: Tensor) -> State:
    """h + embed(c), an embedding per channel spread over the positions."""
    shift = shift.reshape(*shift.shape, *(1,) * (state.zero.dim() - shift.dim()))
    spread = _norm(shift.expand_as(state.zero))
    return state.then(state.zero + shift, 1.0, UNIT * (_computed(state) + Size(0.0, spread)))


def _computed(state: State) -> Size:
    """The size of the computed state."""
    return state.size + state.error


def _absolute_norm(weight: Tensor, geometry: Geometry, x: Tensor, y: Tensor) -> float:
    """The norm of |W|. Under circular padding outputs may be repeated, and an input counts as often."""
    repeats = 1
    if geometry.circular:
        sizes = zip(x.shape[2:], y.shape[2:], geometry.stride, strict=True)
        repeats = math.prod(math.ceil(((m - 1) * s + 1) / n) for n, m, s in sizes)
    return absolute_norm(weight, geometry.groups, repeats)


def _norm(x: Tensor) -> float:
    """The largest norm of a row; squares that underflow are those of numbers below 2^-511."""
    largest = float(torch.linalg.vector_norm(x.flatten(1), dim=1).max())
    return OUTWARD * largest + math.sqrt(x[0].numel()) * 2.0**-511


# ---------------------------------------------------------------------------------------------- activations

#: (c, c') with |fl(phi(t)) - phi(t)| <= c |t| + c' for each activation, from the formula that torch evaluates:
#:
#:   ELU, CELU    alpha (exp(t) - 1), or by expm1: two factors of size one at most, and the argument of exp, t / alpha
#:   softplus     ln(1 + exp(beta t)) / beta: an argument is wrong by u |beta t|, exp by a factor, which is a summand of
#:                its logarithm; and what the threshold leaves out
#:   sine         sin(f t) / f: an argument is wrong by u |f t|
#:   LipSwish     t sigmoid(beta t) / 1.1: factors of t, as |s sigmoid'(s)| < 1/4 for the error of s = beta t
#:   GELU, SiLU   t times a number of size one, likewise
#:   the others   factors of a result that is no larger than t, or than one
_ACTIVATIONS: dict[type[nn.Module], Callable[[Any], tuple[float, float]]] = {
    nn.ELU: lambda a: (0.0, 2 * ELEMENTARY * abs(float(a.alpha))),
    nn.CELU: lambda a: (0.0, 2 * ELEMENTARY * abs(float(a.alpha))),
    nn.LeakyReLU: lambda a: (2 * UNIT * abs(float(a.negative_slope)), 0.0),
    nn.Softplus: lambda a: _softplus(a),
    nn.Tanh: lambda _: (ELEMENTARY, 0.0),
    nn.Softsign: lambda _: (ELEMENTARY, 0.0),
    nn.LogSigmoid: lambda _: (ELEMENTARY, 2 * ELEMENTARY),
    nn.Sigmoid: lambda _: (0.0, 2 * ELEMENTARY),
    Sine: lambda _: (2 * ELEMENTARY, 0.0),
    LipSwish: lambda _: (2 * ELEMENTARY, 0.0),
    nn.SiLU: lambda _: (2 * ELEMENTARY, 0.0),
    nn.GELU: lambda _: (2 * ELEMENTARY, 0.0),
    **dict.fromkeys(
        (nn.ReLU, nn.ReLU6, nn.Hardtanh, MaxMin, nn.Identity, nn.Flatten, nn.Unflatten), lambda _: (0.0, 0.0)
    ),
}  # fmt: skip


def _softplus(activation: nn.Softplus) -> tuple[float, float]:
    if not activation.threshold >= LEAST_THRESHOLD or activation.beta == 0:
        raise NoBoundKnown(f"{activation} jumps at its threshold. Use nn.Softplus(threshold={LEAST_THRESHOLD:g}).")
    return 2 * ELEMENTARY, 4 * ELEMENTARY / abs(float(activation.beta))

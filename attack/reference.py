"""Reference computations, independent of the library: dense matrices, evaluation in long double, Newton's method.

`maps` turns a network of known parts into a list of maps of vectors (batch, n), each with its value, Jacobian and a
bound on the rounding error of long double. `invert` finds the root of x + g(x) = z by Newton's method, to 18 digits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn

from iresnet.lipschitz import Concatenated, Conditioned, LipSwish, MaxMin, Potential, Sine

Long: TypeAlias = Any  # an array of long double
Shape: TypeAlias = tuple[int, ...]

LONG = np.longdouble
UNIT = float(np.finfo(LONG).eps)
SMALLEST = np.finfo(LONG).tiny


def long(x: Tensor) -> Long:
    """A batch as an array (batch, n) of long double, without rounding."""
    return x.detach().double().flatten(1).numpy().astype(LONG)


def lengths(x: Long) -> Any:
    """The l2 norm of every row, in float64, without overflow."""
    x = np.abs(np.asarray(x, dtype=LONG))
    scale = np.maximum(x.max(axis=1), SMALLEST)
    return (np.sqrt(((x / scale[:, None]) ** 2).sum(axis=1)) * scale).astype(np.float64)


def dense(layer: nn.Module, shape: Shape, weight: Tensor | None = None) -> Any:
    """The matrix (outputs, inputs) of a layer without its bias: PyTorch's output for every unit vector."""
    n = math.prod(shape)
    basis = torch.eye(n, dtype=torch.float64).reshape(n, *shape)
    w = (cast(Tensor, layer.weight) if weight is None else weight).detach().double()
    with torch.no_grad():
        if isinstance(layer, nn.Linear):
            columns = nn.functional.linear(basis, w)
        else:
            kinds: dict[int, Any] = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
            columns = kinds[w.dim()]._conv_forward(layer, basis, w, None)
    return columns.flatten(1).T.numpy()


def spectral_norm(matrix: Any) -> float:
    """The largest singular value, without intermediate underflow or overflow."""
    largest = float(np.abs(matrix).max(initial=0.0))
    if largest == 0 or not math.isfinite(largest):
        return largest
    return float(np.linalg.norm(matrix / largest, 2)) * largest


class Map(ABC):
    """A function of vectors (batch, n), with its Jacobian and a bound on its rounding error."""

    @abstractmethod
    def value(self, x: Long) -> Long:
        """The value for each vector."""

    @abstractmethod
    def jacobian(self, x: Long) -> Any:
        """The Jacobians in float64, (batch, outputs, inputs)."""

    @abstractmethod
    def rounding(self, x: Long) -> float:
        """An l2 bound on the rounding error of `value`."""


class Affine(Map):
    """x -> A x + b."""

    def __init__(self, matrix: Any, offset: Any = None) -> None:
        self.matrix = np.asarray(matrix, dtype=LONG)
        self.offset = np.zeros(len(self.matrix), dtype=LONG) if offset is None else np.asarray(offset, dtype=LONG)

    def value(self, x: Long) -> Long:
        return x @ self.matrix.T + self.offset

    def jacobian(self, x: Long) -> Any:
        return np.broadcast_to(self.matrix.astype(np.float64), (len(x), *self.matrix.shape))

    def rounding(self, x: Long) -> float:
        size = np.abs(x) @ np.abs(self.matrix).T + np.abs(self.offset)
        return (self.matrix.shape[1] + 2) * UNIT * float(lengths(size).max())


class Elementwise(Map):
    """An activation, with its derivative."""

    def __init__(self, function: Callable[[Long], Long], slope: Callable[[Long], Long]) -> None:
        self.function, self.slope = function, slope

    def value(self, x: Long) -> Long:
        return self.function(x)

    def jacobian(self, x: Long) -> Any:
        d = np.asarray(self.slope(x), dtype=np.float64)
        return d[:, :, None] * np.eye(d.shape[1])

    def rounding(self, x: Long) -> float:
        return 16 * UNIT * float(lengths(x).max() + lengths(self.function(x)).max())


class MaxMinMap(Map):
    """MaxMin: pairs of channels, the larger first."""

    def __init__(self, shape: Shape) -> None:
        index = np.arange(math.prod(shape)).reshape(shape)
        self.first, self.second = index[0::2].ravel(), index[1::2].ravel()

    def value(self, x: Long) -> Long:
        y = x.copy()
        y[:, self.first] = np.maximum(x[:, self.first], x[:, self.second])
        y[:, self.second] = np.minimum(x[:, self.first], x[:, self.second])
        return y

    def jacobian(self, x: Long) -> Any:
        j = np.zeros((len(x), x.shape[1], x.shape[1]))
        swap = x[:, self.first] < x[:, self.second]
        rows = np.arange(len(x))[:, None]
        j[rows, self.first, np.where(swap, self.second, self.first)] = 1
        j[rows, self.second, np.where(swap, self.first, self.second)] = 1
        return j

    def rounding(self, x: Long) -> float:
        return 0.0


class Composed(Map):
    """A composition of maps."""

    def __init__(self, steps: list[Map]) -> None:
        self.steps = steps

    def value(self, x: Long) -> Long:
        for step in self.steps:
            x = step.value(x)
        return x

    def jacobian(self, x: Long) -> Any:
        j: Any = np.broadcast_to(np.eye(x.shape[1]), (len(x), x.shape[1], x.shape[1]))
        for step in self.steps:
            j = step.jacobian(x) @ j
            x = step.value(x)
        return j

    def rounding(self, x: Long) -> float:
        error = 0.0
        for step in self.steps:
            stretch = max((spectral_norm(j) for j in step.jacobian(x)), default=0.0) if error else 0.0
            error = 1.2 * max(stretch, 1.0) * error + step.rounding(x)
            x = step.value(x)
        return error


class ConcatenatedMap(Map):
    """x -> (a x, b f(x)) of a Concatenated layer."""

    def __init__(self, a: Any, b: Any, f: Map) -> None:
        self.a, self.b, self.f = a, b, f

    def value(self, x: Long) -> Long:
        return np.concatenate([self.a * x, self.b * self.f.value(x)], axis=1)

    def jacobian(self, x: Long) -> Any:
        own = np.broadcast_to(float(self.a) * np.eye(x.shape[1]), (len(x), x.shape[1], x.shape[1]))
        return np.concatenate([own, float(self.b) * self.f.jacobian(x)], axis=1)

    def rounding(self, x: Long) -> float:
        return self.f.rounding(x) + 8 * UNIT * float(lengths(self.value(x)).max())


class Residual(Map):
    """x -> x + g(x)."""

    def __init__(self, g: Map) -> None:
        self.g = g

    def value(self, x: Long) -> Long:
        return x + self.g.value(x)

    def jacobian(self, x: Long) -> Any:
        return np.eye(x.shape[1]) + self.g.jacobian(x)

    def rounding(self, x: Long) -> float:
        return self.g.rounding(x) + 4 * UNIT * float(lengths(x).max() + lengths(self.g.value(x)).max())


def invert(f: Map, z: Long, start: Long, steps: int = 30) -> tuple[Long, float] | None:
    """Solve f(x) = z by Newton's method from `start`; return x and its error, or None if it does not converge."""
    x, before = start, math.inf
    for _ in range(steps):
        residual = f.value(x) - z
        jacobian = f.jacobian(x)
        if not (np.isfinite(residual.astype(np.float64)).all() and np.isfinite(jacobian).all()):
            return None
        scale = np.maximum(np.abs(residual).max(axis=1, keepdims=True), SMALLEST)
        try:
            move = np.linalg.solve(jacobian, (residual / scale).astype(np.float64)[:, :, None])[:, :, 0] * scale
        except np.linalg.LinAlgError:
            return None
        x = x - move
        moved = float(lengths(move).max())
        floor = 4 * UNIT * float(lengths(x).max())
        if moved <= floor or (moved <= 1e4 * floor and moved >= 0.5 * before):
            return x, _error(f, x, jacobian, moved)
        before = moved
    return None


def _error(f: Map, x: Long, jacobian: Any, moved: float) -> float:
    least = min(float(np.linalg.svd(j, compute_uv=False)[-1]) for j in jacobian)
    return 2 * moved + (f.rounding(x) / least if least > 0 else math.inf)


# ------------------------------------------------------------------------------------------------- reading a network


def maps(module: nn.Module, shape: Shape, context: Tensor | None = None) -> tuple[list[Map], Shape]:
    """The maps of a network of known parts with its stored weights, and its output shape."""
    if isinstance(module, nn.Sequential):
        found = list[Map]()
        for child in module:
            more, shape = maps(child, shape, context)
            found += more
        return found, shape
    if isinstance(module, Conditioned):
        first, middle = maps(module.first, shape)
        with torch.no_grad():
            shift = cast(Tensor, module.embed(context)).double()
        rest, shape = maps(module.rest, middle)
        spread = shift.reshape(1, *shift.shape[1:], *(1,) * (len(middle) + 1 - shift.dim())).expand(1, *middle)
        return [*first, Affine(np.eye(math.prod(middle)), long(spread)[0]), *rest], shape
    if isinstance(module, Concatenated):
        inner, made = maps(module.f, shape)
        angle = LONG(float(module.angle.detach()))
        return [ConcatenatedMap(np.cos(angle), np.sin(angle), Composed(inner))], (shape[0] + made[0], *shape[1:])
    if isinstance(module, Potential):
        matrix, offset, hidden = affine(module.layer, shape)
        (act,), _ = maps(module.activation, hidden)
        return [Affine(matrix, offset), act, Affine(-matrix.T)], shape
    if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        matrix, offset, shape = affine(module, shape)
        return [Affine(matrix, offset)], shape
    if isinstance(module, nn.Flatten | nn.Unflatten):
        return [], tuple(module(torch.empty(1, *shape)).shape[1:])
    if isinstance(module, nn.Identity):
        return [], shape
    return [activation(module, shape)], shape


def affine(layer: nn.Module, shape: Shape) -> tuple[Any, Any, Shape]:
    """The matrix, the offset and the output shape of a linear layer."""
    matrix, bias = dense(layer, shape), cast("Tensor | None", layer.bias)
    if isinstance(layer, nn.Linear):
        after: Shape = (*shape[:-1], layer.out_features)
        spread = None if bias is None else bias.detach().double().expand(after)
    else:
        channels = len(cast(Tensor, layer.weight))
        positions = len(matrix) // channels
        after = (channels, *_sizes(layer, shape))
        spread = None if bias is None else bias.detach().double()[:, None].expand(channels, positions)
    return matrix, None if spread is None else spread.flatten().numpy(), after


def _sizes(layer: nn.Module, shape: Shape) -> Shape:
    kinds: dict[int, Any] = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
    w = cast(Tensor, layer.weight).detach().double()
    return tuple(kinds[w.dim()]._conv_forward(layer, torch.zeros(1, *shape, dtype=torch.float64), w, None).shape[2:])


def activation(module: nn.Module, shape: Shape) -> Map:
    """An activation in long double: the textbook's function, where PyTorch's has a threshold its jump included."""
    match module:
        case MaxMin():
            return MaxMinMap(shape)
        case LipSwish():
            beta = _softplus(LONG(float(module.raw_beta.detach())))
            return Elementwise(lambda x: x * _sigmoid(beta * x) / LONG(1.1), lambda x: _swish_slope(x, beta))
        case Sine():
            f = LONG(module.frequency)
            return Elementwise(lambda x: np.sin(f * x) / f, lambda x: np.cos(f * x))
        case nn.ELU():
            a = LONG(module.alpha)
            return Elementwise(
                lambda x: np.where(x > 0, x, a * np.expm1(np.minimum(x, 0))),
                lambda x: np.where(x > 0, 1, a * np.exp(np.minimum(x, 0))),
            )
        case nn.CELU():
            a = LONG(module.alpha)
            return Elementwise(
                lambda x: np.maximum(x, 0) + np.minimum(0, a * np.expm1(np.minimum(x / a, 0))),
                lambda x: np.where(x > 0, 1, np.exp(np.minimum(x / a, 0))),
            )
        case nn.LeakyReLU():
            s = LONG(module.negative_slope)
            return Elementwise(lambda x: np.where(x > 0, x, s * x), lambda x: np.where(x > 0, LONG(1), s))
        case nn.Hardtanh():
            low, high = LONG(module.min_val), LONG(module.max_val)
            return Elementwise(lambda x: np.clip(x, low, high), lambda x: ((x > low) & (x < high)).astype(LONG))
        case nn.ReLU():
            return Elementwise(lambda x: np.maximum(x, 0), lambda x: (x > 0).astype(LONG))
        case nn.Tanh():
            return Elementwise(np.tanh, lambda x: 1 - np.tanh(x) ** 2)
        case nn.Softsign():
            return Elementwise(lambda x: x / (1 + np.abs(x)), lambda x: (1 + np.abs(x)) ** -2)
        case nn.Sigmoid():
            return Elementwise(_sigmoid, lambda x: _sigmoid(x) * _sigmoid(-x))
        case nn.LogSigmoid():
            return Elementwise(lambda x: -_softplus(-x), lambda x: _sigmoid(-x))
        case nn.Softplus():
            b, t = LONG(module.beta), LONG(module.threshold)
            return Elementwise(
                lambda x: np.where(b * x > t, x, _softplus(b * x) / b),
                lambda x: np.where(b * x > t, 1, _sigmoid(b * x)),
            )
        case nn.SiLU():
            return Elementwise(lambda x: x * _sigmoid(x), lambda x: LONG(1.1) * _swish_slope(x, LONG(1)))
        case _:
            raise TypeError(f"there is no reference for {module}")


def _sigmoid(x: Long) -> Long:
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def _softplus(x: Long) -> Long:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _swish_slope(x: Long, beta: Long) -> Long:
    s = _sigmoid(beta * x)
    return (s + beta * x * s * _sigmoid(-beta * x)) / LONG(1.1)

"""Evaluate g in extended precision (80-bit floats where numpy has them), layer by layer in numpy."""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor, nn

from ..lipschitz import Concatenated, LipSwish, MaxMin, Potential, Sine
from .subject import Skipped

Array: TypeAlias = np.ndarray[Any, np.dtype[np.longdouble]]


def to_extended(x: Any) -> Array:
    """Convert a tensor to an array in extended precision."""
    return np.asarray(cast(Tensor, x).detach().double().numpy()).astype(np.longdouble)


def evaluate_extended(g: nn.Module, x: Array) -> Array:
    """Compute g(x) for the layers that branches are made of; raise `Skipped` for any other layer."""
    match g:
        case nn.Sequential():
            for layer in g:
                x = evaluate_extended(layer, x)
        case Concatenated():
            angle = to_extended(g.angle)
            x = np.concatenate([np.cos(angle) * x, np.sin(angle) * evaluate_extended(g.f, x)], axis=1)
        case Potential():
            x = -_transposed(g.layer, evaluate_extended(g.activation, evaluate_extended(g.layer, x)))
        case nn.Linear():
            x = x @ to_extended(g.weight).T + (0 if g.bias is None else to_extended(g.bias))
        case nn.Conv2d():
            x = _correlate(x, to_extended(g.weight), _zero_padding(g))
            x = x if g.bias is None else x + to_extended(g.bias)[:, None, None]
        case nn.Flatten():
            x = x.reshape(len(x), -1)
        case nn.Unflatten():
            x = x.reshape(len(x), *g.unflattened_size)
        case _:
            x = _activation(g, x)
    return x


def _activation(g: nn.Module, x: Array) -> Array:
    match g:
        case nn.ReLU():
            return np.maximum(x, 0)
        case nn.ELU():
            return np.where(x > 0, x, g.alpha * np.expm1(np.minimum(x, 0)))
        case nn.Tanh():
            return np.tanh(x)
        case Sine():
            return cast(Array, np.sin(g.frequency * x) / g.frequency)
        case LipSwish():
            beta = np.log1p(np.exp(to_extended(g.raw_beta)))
            return cast(Array, x / (1 + np.exp(-beta * x)) / 1.1)
        case MaxMin():
            a, b = x[:, 0::2], x[:, 1::2]
            return np.stack([np.maximum(a, b), np.minimum(a, b)], axis=2).reshape(x.shape)
        case _:
            raise Skipped(f"{type(g).__name__} has no implementation in extended precision")


def _transposed(layer: nn.Module, y: Array) -> Array:
    """W' y: the transpose of a convolution is one with a flipped kernel and swapped channels."""
    weight = to_extended(layer.weight)
    if isinstance(layer, nn.Linear):
        return y @ weight
    padding = [k - 1 - p for k, p in zip(weight.shape[2:], _zero_padding(layer), strict=True)]
    return _correlate(y, weight.transpose(1, 0, 2, 3)[:, :, ::-1, ::-1], padding)


def _correlate(x: Array, weight: Array, padding: list[int]) -> Array:
    x = np.pad(x, [(0, 0), (0, 0), *((p, p) for p in padding)])
    windows = sliding_window_view(x, weight.shape[2:], axis=(2, 3))
    return np.moveaxis(np.tensordot(windows, weight, axes=([1, 4, 5], [1, 2, 3])), 3, 1)


def _zero_padding(layer: nn.Module) -> list[int]:
    """The zero padding of a convolution without stride, dilation and groups; raise `Skipped` for others."""
    if not isinstance(layer, nn.Conv2d) or layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        raise Skipped(f"{layer} has no implementation in extended precision")
    if {*layer.stride, *layer.dilation, layer.groups} != {1}:
        raise Skipped(f"{layer} has no implementation in extended precision")
    return [int(p) for p in layer.padding]

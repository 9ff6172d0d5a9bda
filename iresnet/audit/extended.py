"""g in extended precision (80-bit floats where numpy has them), written out layer by layer in numpy."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor, nn

from ..lipschitz import Concatenated, LipSwish, MaxMin, Potential, Sine
from .subject import Skipped

Array: TypeAlias = np.ndarray[Any, np.dtype[np.longdouble]]


def extended(x: Tensor | float) -> Array:
    """A tensor as an array of extended precision."""
    return np.asarray(x.detach().double().numpy() if isinstance(x, Tensor) else x).astype(np.longdouble)


def evaluate(g: nn.Module, x: Array) -> Array:
    """g(x) for the layers that branches are made of; others are skipped by name."""
    match g:
        case nn.Sequential():
            for layer in g:
                x = evaluate(layer, x)
            return x
        case Concatenated():
            angle = extended(g.angle)
            return np.concatenate([np.cos(angle) * x, np.sin(angle) * evaluate(g.f, x)], axis=1)
        case Potential():
            return -_transposed(g.layer, evaluate(g.activation, _linear(g.layer, x)))
        case nn.Linear() | nn.Conv2d():
            return _linear(g, x)
        case nn.Flatten():
            return x.reshape(len(x), -1)
        case nn.Unflatten():
            return x.reshape(len(x), *g.unflattened_size)
        case _:
            return _activation(g, x)


def _activation(g: nn.Module, x: Array) -> Array:
    match g:
        case nn.Identity():
            return x
        case nn.ReLU():
            return np.maximum(x, 0)
        case nn.ELU():
            return np.where(x > 0, x, g.alpha * np.expm1(np.minimum(x, 0)))
        case nn.Tanh():
            return np.tanh(x)
        case Sine():
            return np.sin(g.frequency * x) / g.frequency
        case LipSwish():
            beta = np.log1p(np.exp(extended(g.raw_beta)))
            return x / (1 + np.exp(-beta * x)) / extended(1.1)
        case MaxMin():
            a, b = x[:, 0::2], x[:, 1::2]
            return np.stack([np.maximum(a, b), np.minimum(a, b)], axis=2).reshape(x.shape)
        case _:
            raise Skipped(f"{type(g).__name__} is not written out in extended precision")


def _linear(layer: nn.Module, x: Array) -> Array:
    weight, bias = extended(layer.weight), None if layer.bias is None else extended(layer.bias)  # type: ignore[arg-type]
    if isinstance(layer, nn.Linear):
        y = x @ weight.T
    else:
        y = _correlate(x, weight, _padding(layer))
        bias = None if bias is None else bias[:, None, None]
    return y if bias is None else y + bias


def _transposed(layer: nn.Module, y: Array) -> Array:
    """W' y: a convolution's transpose is the one with the kernel turned and the channels exchanged."""
    weight = extended(layer.weight)  # type: ignore[arg-type]
    if isinstance(layer, nn.Linear):
        return y @ weight
    around = [k - 1 - p for k, p in zip(weight.shape[2:], _padding(layer), strict=True)]
    return _correlate(y, weight.transpose(1, 0, 2, 3)[:, :, ::-1, ::-1], around)


def _correlate(x: Array, weight: Array, padding: list[int]) -> Array:
    x = np.pad(x, [(0, 0), (0, 0), *((p, p) for p in padding)])
    windows = sliding_window_view(x, weight.shape[2:], axis=(2, 3))  # type: ignore[call-overload]
    return np.moveaxis(np.tensordot(windows, weight, axes=([1, 4, 5], [1, 2, 3])), 3, 1)


def _padding(layer: nn.Module) -> list[int]:
    """The zeros on each side of a convolution that leaves out and repeats nothing."""
    plain = isinstance(layer, nn.Conv2d) and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    if not isinstance(layer, nn.Conv2d) or not plain or {*layer.stride, *layer.dilation, layer.groups} != {1}:
        raise Skipped(f"{layer} is not written out in extended precision")
    return [int(p) for p in layer.padding]

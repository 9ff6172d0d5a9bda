"""The Jacobian of g at x as a map v -> J' v: the only thing that series and solvers need of it.

A chain of linear layers, convolutions and elementwise activations is multiplied out, J' = W_1' D_1 W_2' D_2 ...: one
ordinary graph, which is faster to differentiate than a vector-Jacobian product. Any other g goes through
`torch.func.vjp`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..logdet import Jacobian, Pull
from ..spectral import Geometry, NoBoundKnown
from .activations import has_slope, slope
from .bound import Conditioned, leaves
from .constraint import _prepare, cap_of


def linearise(g: nn.Module, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Jacobian]:
    """g(x) and its Jacobian at x, differentiable in x and in the parameters where gradients are on."""
    if _is_explicit(g, x):
        transposes: list[Pull] = []
        y = _through(g, x, context, transposes)

        def pull(v: Tensor) -> Tensor:
            for transpose in reversed(transposes):
                v = transpose(v)
            return v

        return y, Jacobian(pull, broadcasts=x.dim() == 2)
    y, vjp = cast(Any, torch.func.vjp(lambda t: g(t) if context is None else g(t, context), x))
    return y, Jacobian(lambda v: cast(Tensor, vjp(v)[0]))


def _is_explicit(g: nn.Module, x: Tensor) -> bool:
    try:
        return all(_knows(layer, x) for _, layer in leaves(g))
    except NoBoundKnown:
        return False


def _knows(layer: nn.Module, x: Tensor) -> bool:
    if isinstance(layer, nn.Linear):
        return type(layer).forward is nn.Linear.forward and x.dim() == 2
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        # Asymmetric and circular padding have a transpose too, but not in one call: they take the general way.
        return layer.padding_mode == "zeros" and not isinstance(layer.padding, str) and x.dim() == layer.weight.dim()
    return has_slope(layer)


def _through(module: nn.Module, x: Tensor, context: Tensor | None, transposes: list[Pull]) -> Tensor:
    """Forward through g, noting the transpose of every step."""
    if isinstance(module, nn.Sequential):
        for child in module:
            x = _through(child, x, context, transposes)
        return x
    if isinstance(module, Conditioned):
        h = _through(module.first, x, context, transposes)
        return _through(module.rest, module.shifted(h, context), context, transposes)
    if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        if cap_of(module) is not None:
            _prepare(module, (x,))
        weight = module.weight  # constrained once, used by the forward pass and by every transpose
        if isinstance(module, nn.Linear):
            transposes.append(lambda v: v @ weight)
            return functional.linear(x, weight, module.bias)
        return _convolve(module, weight, x, transposes)
    y = module(x)
    d = slope(module, x, y)
    transposes.append(lambda v: v * d)
    return cast(Tensor, y)


def _convolve(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, weight: Tensor, x: Tensor, transposes: list[Pull]) -> Tensor:
    geometry = Geometry.of(layer)
    stride, padding, dilation = geometry.stride, geometry.before, geometry.dilation
    none = (0,) * geometry.axes
    y = torch.convolution(x, weight, layer.bias, stride, padding, dilation, False, none, geometry.groups)
    # What a stride leaves over at the end must be said to the transpose, or its output would be short.
    rest = tuple(
        n + 2 * p - d * (k - 1) - 1 - s * (m - 1)
        for n, p, d, k, s, m in zip(x.shape[2:], padding, dilation, weight.shape[2:], stride, y.shape[2:], strict=True)
    )
    transposes.append(
        lambda v: torch.convolution(v, weight, None, stride, padding, dilation, True, rest, geometry.groups)
    )
    return y

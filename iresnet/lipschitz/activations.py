"""Activations for contractive networks, each with its Lipschitz constant on record and, where elementwise, its slope.

A residual branch g stays a contraction only if its activations do not expand (Sec. 2.1). For densities the slope must
be continuous as well (Sec. 3.2): ELU, softplus, tanh, LipSwish and sine qualify; ReLU and MaxMin do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..trust import NoBoundKnown, known_type, unwrap

#: max over x of d/dx (x sigmoid(x)), rounded up: the same for x sigmoid(beta x) and every beta.
SWISH_SLOPE = 1.09984

#: Torch's softplus is the identity from its threshold t on, a jump by ln(1 + exp(-t)) / beta. From this t on it is no
#: jump: both are the same number of float64, and a part in 10^19 apart.
LEAST_THRESHOLD = 40.0


def beta_of(raw: Tensor) -> Tensor:
    """The beta of a LipSwish: a softplus without torch's jump, so that it is the same number in every arithmetic."""
    return functional.softplus(raw, threshold=LEAST_THRESHOLD)


class LipSwish(nn.Module):
    """x sigmoid(beta x) / 1.1 with a learned beta > 0: Swish, divided so that its slope stays below one."""

    def __init__(self, beta: float = 1.0) -> None:
        super().__init__()
        if not beta > 0:
            raise ValueError(f"beta must be positive; got {beta}.")
        self.raw_beta = nn.Parameter(torch.tensor(beta + math.log(-math.expm1(-beta))))  # softplus of it is beta

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(beta_of(self.raw_beta) * x) / 1.1


class Sine(nn.Module):
    """sin(frequency x) / frequency: slope cos(frequency x), at most one."""

    def __init__(self, frequency: float = 1.0) -> None:
        super().__init__()
        if not frequency > 0:
            raise ValueError(f"frequency must be positive; got {frequency}.")
        self.frequency = float(frequency)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.frequency * x) / self.frequency

    def extra_repr(self) -> str:
        return f"frequency={self.frequency:g}"


class MaxMin(nn.Module):
    """Sorts neighbouring channels in pairs: norm-preserving, the sorting activation of Sec. 7's outlook."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] % 2:
            raise ValueError(f"MaxMin sorts channels in pairs; got {x.shape[1]} channels. Use an even number.")
        a, b = x[:, 0::2], x[:, 1::2]
        return torch.stack((torch.maximum(a, b), torch.minimum(a, b)), dim=2).flatten(1, 2)


def _of_celu(activation: nn.CELU) -> float | None:
    return 1.0 if activation.alpha > 0 else None  # exp(x / alpha) for x < 0: without bound for alpha < 0


def _of_softplus(activation: nn.Softplus) -> float | None:
    return 1.0 if activation.threshold >= LEAST_THRESHOLD and activation.beta != 0 else None


def _of_reshape(layer: nn.Flatten | nn.Unflatten) -> float | None:
    axis = layer.start_dim if isinstance(layer, nn.Flatten) else layer.dim
    # The first axis counts samples, which must stay apart; an axis counted from the end may turn out to be that.
    return 1.0 if isinstance(axis, int) and axis >= 1 else None


#: Activations that act on every number by itself and never fall, whatever their settings are.
MONOTONE = frozenset(
    {nn.CELU, nn.Softplus, nn.Hardtanh, nn.ReLU6, nn.ReLU, nn.Tanh, nn.Softsign, nn.LogSigmoid, nn.Sigmoid, nn.Identity}
)

#: The largest slope of every known activation, from its settings as they are now; None where there is no bound.
CONSTANTS: dict[type, Callable[[Any], float | None]] = {
    nn.ELU: lambda a: max(1.0, abs(float(a.alpha))),  # alpha exp(x) for x < 0
    nn.CELU: _of_celu,
    nn.LeakyReLU: lambda a: max(1.0, abs(float(a.negative_slope))),
    nn.Softplus: _of_softplus,
    **dict.fromkeys((nn.Hardtanh, nn.ReLU6, nn.ReLU, nn.Tanh, nn.Softsign, nn.LogSigmoid), lambda a: 1.0),
    **dict.fromkeys((nn.Identity, Sine, MaxMin), lambda a: 1.0),
    nn.Sigmoid: lambda a: 0.25,
    LipSwish: lambda a: SWISH_SLOPE / 1.1,
    nn.SiLU: lambda a: SWISH_SLOPE,
    nn.GELU: lambda a: 1.13,
    **dict.fromkeys((nn.Flatten, nn.Unflatten), _of_reshape),
}


def activation_type(activation: nn.Module) -> type | None:
    """The class of a known activation; None for any other module, one that a user has changed included."""
    try:
        kind = known_type(unwrap(activation))
    except NoBoundKnown:
        return None
    return kind if kind in CONSTANTS else None


def lipschitz_constant(activation: nn.Module) -> float | None:
    """The largest slope of a known activation; None for any other module, one that a user has changed included."""
    kind = activation_type(activation)
    return None if kind is None else CONSTANTS[kind](unwrap(activation))


def check_contractive(activation: nn.Module) -> nn.Module:
    """The activation itself if its slope never exceeds one; else a ValueError that says so."""
    constant = lipschitz_constant(activation)
    if constant is None:
        raise ValueError(f"no Lipschitz constant is on record for {type(activation).__name__}: {unknown(activation)}")
    if constant > 1:
        advice = " LipSwish is its contractive form." if isinstance(activation, nn.SiLU) else " Use ELU or LipSwish."
        raise ValueError(f"an activation must have a slope of at most 1; {activation} reaches {constant:.4g}.{advice}")
    return activation


def unknown(activation: nn.Module) -> str:
    """Why an activation has no constant on record, and what to use."""
    if type(activation) is nn.Softplus:
        return (
            f"torch's softplus jumps to the identity at its threshold; got {activation}. "
            f"Use nn.Softplus(threshold={LEAST_THRESHOLD:g}), which has no jump in float64."
        )
    return "its slope is not on record. Use ELU, Softplus(threshold=40), Tanh, ReLU, LipSwish, Sine or MaxMin."


def is_monotone(activation: nn.Module) -> bool:
    """Whether a known activation acts on every number by itself and never falls: its slopes lie in [0, constant]."""
    if lipschitz_constant(activation) is None:
        return False
    kind, activation = activation_type(activation), unwrap(activation)
    if kind is nn.ELU:
        return float(cast(nn.ELU, activation).alpha) >= 0
    if kind is nn.LeakyReLU:
        return float(cast(nn.LeakyReLU, activation).negative_slope) >= 0
    return kind in MONOTONE

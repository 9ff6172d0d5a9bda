"""Activations for contractive networks, each with its Lipschitz constant on record and, where elementwise, its slope.

A residual branch g stays a contraction only if its activations do not expand (Sec. 2.1). For densities the slope must
be continuous as well (Sec. 3.2): ELU, softplus, tanh, LipSwish and sine qualify; ReLU and MaxMin do not.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

#: max over x of d/dx (x sigmoid(x)), rounded up: the same for x sigmoid(beta x) and every beta.
SWISH_SLOPE = 1.09984

#: Torch's softplus is the identity from its threshold t on, a jump by ln(1 + exp(-t)) / beta. From this t on it is no
#: jump: both are the same number of float64, and a part in 10^19 apart.
LEAST_THRESHOLD = 40.0


class LipSwish(nn.Module):
    """x sigmoid(beta x) / 1.1 with a learned beta > 0: Swish, divided so that its slope stays below one."""

    def __init__(self, beta: float = 1.0) -> None:
        super().__init__()
        if not beta > 0:
            raise ValueError(f"beta must be positive; got {beta}.")
        self.raw_beta = nn.Parameter(torch.tensor(beta + math.log(-math.expm1(-beta))))  # softplus of it is beta

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(functional.softplus(self.raw_beta) * x) / 1.1


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


def lipschitz_constant(activation: nn.Module) -> float | None:
    """The largest slope of a known activation; None for any other module, a user's subclass of one included."""
    if type(activation).__module__.partition(".")[0] not in ("torch", "iresnet"):
        return None
    match activation:
        case nn.ELU():
            return max(1.0, abs(float(activation.alpha)))  # alpha exp(x) for x < 0
        case nn.CELU():
            return 1.0 if activation.alpha > 0 else None  # exp(x / alpha) for x < 0: without bound for alpha < 0
        case nn.LeakyReLU():
            return max(1.0, abs(float(activation.negative_slope)))
        case nn.Softplus():
            return 1.0 if activation.threshold >= LEAST_THRESHOLD and activation.beta != 0 else None
        case nn.Hardtanh():
            return 1.0
        case nn.ReLU() | nn.Tanh() | nn.Softsign() | nn.LogSigmoid() | nn.Identity() | Sine() | MaxMin():
            return 1.0
        case nn.Sigmoid():
            return 0.25
        case LipSwish():
            return SWISH_SLOPE / 1.1
        case nn.SiLU():
            return SWISH_SLOPE
        case nn.GELU():
            return 1.13
        case nn.Flatten() | nn.Unflatten():
            return 1.0
        case _:
            return None


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
    match activation:
        case nn.ELU():
            return float(activation.alpha) >= 0
        case nn.LeakyReLU():
            return float(activation.negative_slope) >= 0
        case nn.CELU() | nn.Softplus() | nn.Hardtanh() | nn.ReLU() | nn.Tanh() | nn.Softsign() | nn.LogSigmoid():
            return True
        case _:
            return isinstance(activation, nn.Sigmoid | nn.Identity)

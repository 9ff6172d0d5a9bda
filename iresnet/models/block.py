"""Builds a residual block from settings: its g, the norms of g's layers, and how small g is at the start."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from ..batch import Shape
from ..lipschitz import ACTIVATIONS, GramIteration, NormRule, PowerIteration, constrain_
from ..lipschitz.activations import MIN_SOFTPLUS_THRESHOLD
from ..residual import ResidualBlock
from .branches import Activation, alternate, convolutions, dense, linears, potential
from .network import Network
from .unconstrained import UnconstrainedBlock


def block(network: Network, shape: Shape, scale: int) -> ResidualBlock:
    """Build a block of a scale for states of this shape."""
    g = _branch(network, shape, scale)
    if network.constrained:
        size, norm = tuple(shape[1:]) or None, norm_rule(network)
        constrain_(g, lipschitz=network.lipschitz, norm=norm, initial_norm=network.initial_norm, input_size=size)
    if network.last_scale < 1:
        _shrink_(g, network.last_scale)
    return ResidualBlock(g) if network.constrained else UnconstrainedBlock(g)


def norm_rule(network: Network) -> NormRule | None:
    """Return the rule by which the norms of layers are computed in training; None: that of each layer's shape."""
    if network.norm == "auto":
        return None
    rule = GramIteration if network.norm == "gram-iteration" else PowerIteration
    return rule(network.norm_iterations) if network.norm_iterations else rule()


@torch.no_grad()
def _shrink_(g: nn.Module, factor: float) -> None:
    """Multiply the parameters of the last layer, and so g(x), by a factor; norms change by the same factor."""
    *_, last = (m for m in g.modules() if isinstance(m, nn.Linear | nn.Conv2d))
    for p in last.parameters():
        p.mul_(factor)


def _branch(network: Network, shape: Shape, scale: int) -> nn.Module:
    activation = _activation(network)
    width, batchnorm = network.width or shape[0], nn.BatchNorm1d if len(shape) == 1 else nn.BatchNorm2d
    if network.branch == "potential":
        return potential(shape, width, activation(), _kernel(network, scale) if len(shape) > 1 else 0)

    if network.branch == "dense":
        return dense(shape, width, activation, network.kernels if len(shape) > 1 else (1,) * (network.depth + 1))

    def between(channels: int) -> list[nn.Module]:
        return [*([batchnorm(channels)] if network.normalisation == "batchnorm" else []), activation()]

    layers = (
        linears(shape[0], (width,) * network.depth)
        if len(shape) == 1
        else convolutions(shape[0], width, network.kernels)
    )
    return alternate(layers, between, preactivation=network.preactivation)


def _activation(network: Network) -> Activation:
    """Return the class of the activation with its settings; a softplus without torch's jump at its threshold."""
    known = {"frequency": network.frequency, "threshold": MIN_SOFTPLUS_THRESHOLD}
    record = ACTIVATIONS[network.activation]
    return partial(record.kind, **{name: value for name, value in known.items() if name in record.settings})


def _kernel(network: Network, scale: int) -> int:
    """Return the kernel size of a potential at a scale: its own, or the common one."""
    if len(network.kernels) not in (1, len(network.blocks)):
        raise ValueError(
            "kernels must have one entry for a potential, which has one layer, or one for each of "
            f"{len(network.blocks)} scales; got {list(network.kernels)}. Use kernels = [3]."
        )
    return network.kernels[scale if len(network.kernels) > 1 else 0]

"""Heads of classifiers: from a code to logits.

linear       the codes of all scales concatenated (with `pool` averaged over positions), then linear layers with ELU
lipschitz    the same with constrained layers: logits change by less than the code does
batchnorm    the same with BatchNorm and ELU first (App. C.2)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..batch import Shape
from ..lipschitz import constrain_
from ..shard import draw_rows, is_shared
from .network import Network

#: The Lipschitz constant of a head whose readout is "lipschitz".
LIPSCHITZ = 0.999


def head(network: Network, shapes: Sequence[Shape], classes: int) -> nn.Module:
    """Build the head of these settings for codes that consist of parts of these shapes, one per scale."""
    if network.readout == "batchnorm":
        return NormalisedReadout(shapes, classes, network)
    return Readout(shapes, classes, network)


class Readout(nn.Module):
    """A head of linear layers with ELU on the concatenated codes of all scales, with `pool` averaged over positions."""

    def __init__(self, shapes: Sequence[Shape], classes: int, network: Network) -> None:
        super().__init__()
        self.shapes, self.pool = [tuple(s) for s in shapes], network.pool
        self.layers = _layers(self.shapes, classes, network)
        if network.readout == "lipschitz":
            constrain_(self.layers, lipschitz=LIPSCHITZ)

    def forward(self, z: Tensor) -> Tensor:
        return cast(Tensor, self.layers(_join(_split_code(z, self.shapes), self.pool) if self.pool else z.flatten(1)))


class NormalisedReadout(nn.Module):
    """The paper's head: BatchNorm and ELU on the code of every scale, then like `Readout`."""

    def __init__(self, shapes: Sequence[Shape], classes: int, network: Network) -> None:
        super().__init__()
        self.shapes, self.pool = [tuple(s) for s in shapes], network.pool
        self.norms = nn.ModuleList(nn.Sequential(nn.BatchNorm1d(s[0]), nn.ELU()) for s in self.shapes)
        self.layers = _layers(self.shapes, classes, network)

    def forward(self, z: Tensor) -> Tensor:
        parts = [norm(part) for norm, part in zip(self.norms, _split_code(z, self.shapes), strict=True)]
        return cast(Tensor, self.layers(_join(parts, self.pool)))


class Dropout(nn.Dropout):
    """Dropout whose mask does not depend on the number of processes that share a batch."""

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and is_shared()):
            return super().forward(x)
        return x * draw_rows(lambda shape: F.dropout(x.new_ones(shape), self.p), x.shape)


def _layers(shapes: Sequence[Shape], classes: int, network: Network) -> nn.Sequential:
    widths = [sum(s[0] if network.pool else math.prod(s) for s in shapes), *network.head, classes]
    layers: list[nn.Module] = [nn.Linear(widths[0], widths[1])]
    for a, b in pairwise(widths[1:]):
        dropout = [Dropout(network.dropout)] if network.readout != "lipschitz" else []
        layers += [nn.ELU(), *dropout, nn.Linear(a, b)]
    return nn.Sequential(*layers)


def _split_code(z: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Split a code into the parts of the scales, each (batch, channels, positions)."""
    parts = torch.split(z.flatten(1), [math.prod(s) for s in shapes], dim=1)
    return [part.reshape(len(part), shape[0], -1) for part, shape in zip(parts, shapes, strict=True)]


def _join(parts: Sequence[Tensor], pool: bool) -> Tensor:
    return torch.cat([part.mean(dim=2) if pool else part.flatten(1) for part in parts], dim=1)

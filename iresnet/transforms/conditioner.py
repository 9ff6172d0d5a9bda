"""Conditioners: the networks that say how a coupling moves its part. They are free, since none of them is inverted.

mlp                     linear layers, for rows of numbers                                          NICE
convolutions            3x3, 1x1, 3x3 with an ActNorm before every activation                       Glow
ResidualConvolutions    residual blocks, a 1x1 convolution of each added up for the output          Real NVP
bottleneck              BatchNorm, ReLU, 3x3, three times, a quarter of the channels inside         i-RevNet

The last layer of the first three starts at zero, so that every coupling starts as the identity (Glow).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from ..spelling import at_least
from .elementary import ActNorm

#: i-RevNet's inner convolutions have the channels of the output divided by this.
BOTTLENECK = 4


def mlp(
    inputs: int, outputs: int, hidden: Sequence[int] = (64, 64, 64), activation: Callable[[], nn.Module] = nn.ReLU
) -> nn.Sequential:
    """Linear layers of these hidden widths with activations between them; the last starts at zero.

    >>> sum(p.numel() for p in mlp(1, 2).parameters())
    8578
    """
    at_least(1, inputs=inputs, outputs=outputs, **{f"hidden[{i}]": h for i, h in enumerate(hidden)})
    layers: list[nn.Module] = []
    for a, b in pairwise((inputs, *hidden, outputs)):
        layers += [nn.Linear(a, b), activation()]
    return zeroed(nn.Sequential(*layers[:-1]))


def convolutions(
    inputs: int,
    outputs: int,
    width: int = 512,
    kernels: Sequence[int] = (3, 1, 3),
    activation: Callable[[], nn.Module] = nn.ReLU,
    *,
    batchnorm: bool = False,
) -> nn.Sequential:
    """Convolutions of these kernels that keep the size of an image, each but the last with an ActNorm and activation.

    With `batchnorm` the first sees its input normalised, so that what is moved does not grow with what stays.
    (Glow's also see a channel that marks the border of the image, and its last layer has a learned factor e^{3 l}, with
    l = 0 at first; here they have neither.)
    """
    at_least(1, inputs=inputs, outputs=outputs, width=width)
    if not kernels or any(k < 1 or k % 2 == 0 for k in kernels):
        raise ValueError(f"kernels must be odd, so that the size is kept; got {tuple(kernels)}.")
    layers: list[nn.Module] = [nn.BatchNorm2d(inputs)] if batchnorm else []
    widths = (inputs, *[width] * (len(kernels) - 1), outputs)
    for (a, b), k in zip(pairwise(widths[:-1]), kernels, strict=False):
        layers += [NormalisedConv2d(a, b, k), activation()]
    last = nn.Conv2d(widths[-2], outputs, kernels[-1], padding=kernels[-1] // 2)
    return zeroed(nn.Sequential(*layers, last))


class NormalisedConv2d(nn.Module):
    """A convolution and the ActNorm after it, computed as one: (W x + shift) e^l = (e^l W) x + e^l shift."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
        self.norm = ActNorm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        if self.norm.waits:
            return cast(Tensor, self.norm(self.conv(x)))
        scale = self.norm.log_scale.exp()
        weight = self.conv.weight * scale[:, None, None, None]
        return F.conv2d(x, weight, self.norm.shift * scale, padding=self.conv.padding)


class ResidualConvolutions(nn.Module):
    """A convolution, so many residual blocks of two, and a 1x1 convolution of all their outputs that starts at zero.

    The states before, between and after the blocks are added up, each through a 1x1 convolution of its own. (Real NVP
    has weight normalisation and BatchNorm where an ActNorm is here, and sees relu(x) and relu(-x) beside the mask.)
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        width: int = 64,
        blocks: int = 8,
        activation: Callable[[], nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        at_least(1, inputs=inputs, outputs=outputs, width=width, blocks=blocks)
        self.first = nn.Conv2d(inputs, width, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(*_normalised(width, 3, activation), *_normalised(width, 3, activation)) for _ in range(blocks)
        )
        self.skips = nn.ModuleList(nn.Conv2d(width, width, 1, bias=False) for _ in range(blocks + 1))
        self.last = zeroed(nn.Sequential(ActNorm(width), activation(), nn.Conv2d(width, outputs, 1)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        total = self.skips[0](y)
        for block, skip in zip(self.blocks, self.skips[1:], strict=True):
            y = y + block(y)
            total = total + skip(y)
        return cast(Tensor, self.last(total))


def _normalised(width: int, kernel: int, activation: Callable[[], nn.Module]) -> list[nn.Module]:
    return [ActNorm(width), activation(), nn.Conv2d(width, width, kernel, padding=kernel // 2, bias=False)]


def bottleneck(
    inputs: int,
    outputs: int,
    activation: Callable[[], nn.Module] = nn.ReLU,
    *,
    stride: int = 1,
    first: bool = False,
) -> nn.Sequential:
    """i-RevNet's branch: BatchNorm, activation and 3x3, three times; the `first` of a net begins with a convolution.

    With `stride` 2 it takes an image that was squeezed, of four times the `inputs`, and looks at it as it was before.
    """
    at_least(1, inputs=inputs, outputs=outputs)
    if stride not in (1, 2):
        raise ValueError(f"stride must be 1 or 2; got {stride}.")
    inner = max(1, outputs // BOTTLENECK)
    start: list[nn.Module] = [] if stride == 1 else [nn.PixelShuffle(2)]
    return nn.Sequential(
        *start,
        *([] if first else [nn.BatchNorm2d(inputs), activation()]),
        nn.Conv2d(inputs, inner, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(inner),
        activation(),
        nn.Conv2d(inner, inner, 3, padding=1, bias=False),
        nn.BatchNorm2d(inner),
        activation(),
        nn.Conv2d(inner, outputs, 3, padding=1, bias=False),
    )


def zeroed(network: nn.Sequential) -> nn.Sequential:
    """The same network, the last layer of which is zero now."""
    for p in network[-1].parameters():
        nn.init.zeros_(p)
    return network

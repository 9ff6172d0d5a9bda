"""Conditioners: the networks inside couplings. They may be any network, since a coupling never inverts them.

mlp                     linear layers, for vectors                                                  NICE
convolutions            3x3, 1x1, 3x3 with an ActNorm before every activation                       Glow
ResidualConvolutions    residual blocks, whose outputs are added up through 1x1 convolutions        Real NVP
bottleneck              BatchNorm, ReLU, 3x3, three times, a quarter of the channels inside         i-RevNet

The last layer of the first three is initialised to zero, so that every coupling starts as the identity (Glow).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from ..spelling import at_least
from .elementary import ActNorm

#: The number of output channels of an i-RevNet bottleneck divided by that of its inner convolutions.
BOTTLENECK = 4


def mlp(
    inputs: int, outputs: int, hidden: Sequence[int] = (64, 64, 64), activation: Callable[[], nn.Module] = nn.ReLU
) -> nn.Sequential:
    """Build linear layers of these hidden widths with activations between them; the last one is zero.

    >>> sum(p.numel() for p in mlp(1, 2).parameters())
    8578
    """
    check_widths(hidden)
    at_least(1, inputs=inputs, outputs=outputs, **{f"hidden[{i}]": h for i, h in enumerate(hidden)})
    layers: list[nn.Module] = []
    for a, b in pairwise((inputs, *hidden, outputs)):
        layers += [nn.Linear(a, b), activation()]
    return zero_last_layer_(nn.Sequential(*layers[:-1]))


def convnet(
    inputs: int,
    outputs: int,
    width: int = 512,
    kernels: Sequence[int] = (3, 1, 3),
    activation: Callable[[], nn.Module] = nn.ReLU,
    *,
    batchnorm: bool = False,
) -> nn.Sequential:
    """Build convolutions that keep the size of an image, each but the last followed by an ActNorm and an activation.

    With `batchnorm` a BatchNorm comes first, so that the output does not grow with the input. (Glow's convolutions also
    get a channel that marks the border of the image, and its last layer has a learned factor e^{3 l}, initially 1; here
    they have neither.)
    """
    at_least(1, inputs=inputs, outputs=outputs, width=width)
    check_kernels(kernels)
    layers: list[nn.Module] = [nn.BatchNorm2d(inputs)] if batchnorm else []
    widths = (inputs, *[width] * (len(kernels) - 1), outputs)
    for (a, b), k in zip(pairwise(widths[:-1]), kernels, strict=False):
        layers += [NormalisedConv2d(a, b, k), activation()]
    last = nn.Conv2d(widths[-2], outputs, kernels[-1], padding=kernels[-1] // 2)
    return zero_last_layer_(nn.Sequential(*layers, last))


class NormalisedConv2d(nn.Module):
    """A convolution followed by an ActNorm, computed as one convolution: (W x + shift) e^l = (e^l W) x + e^l shift."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
        self.norm = ActNorm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        if self.norm.awaits_data:
            return cast(Tensor, self.norm(self.conv(x)))
        scale = self.norm.log_scale.exp()
        weight = self.conv.weight * scale[:, None, None, None]
        return F.conv2d(x, weight, self.norm.shift * scale, padding=self.conv.padding)


class ResidualConvolutions(nn.Module):
    """A convolution, `blocks` residual blocks of two convolutions each, and a 1x1 convolution initialised to zero.

    The last convolution gets the sum of the states before, between and after the blocks, each through its own 1x1
    convolution. (Real NVP has weight normalisation and BatchNorm in place of ActNorm, and gets relu(x), relu(-x) and
    the mask as inputs.)
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
        self.last = zero_last_layer_(nn.Sequential(ActNorm(width), activation(), nn.Conv2d(width, outputs, 1)))

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
    """Build i-RevNet's branch: BatchNorm, activation and a 3x3 convolution, three times.

    The `first` branch of a network begins with a convolution. With `stride` 2 it takes a squeezed image, which has
    4 x `inputs` channels, and undoes the squeeze before its strided convolution.
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


def check_widths(hidden: Sequence[int]) -> None:
    """Refuse a single number in place of the widths of all hidden layers."""
    if isinstance(hidden, int):
        raise ValueError(f"hidden must list the widths of the hidden layers; got {hidden}. Use hidden=({hidden},).")


def check_kernels(kernels: Sequence[int]) -> None:
    """Refuse kernel sizes with which padded convolutions do not keep the size of an image."""
    if not kernels or any(k < 1 or k % 2 == 0 for k in kernels):
        raise ValueError(f"kernels must be odd, to keep the size of the image; got {tuple(kernels)}.")


def zero_last_layer_(network: nn.Sequential) -> nn.Sequential:
    """Set the parameters of the last layer to zero, in place, and return the network."""
    for p in network[-1].parameters():
        nn.init.zeros_(p)
    return network

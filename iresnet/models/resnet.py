"""Ordinary ResNets, with strides and BatchNorm, without an inverse: the pre-activation ResNet-164 of Table 2.

He et al., Identity mappings in deep residual networks (2016): x + conv1x1(conv3x3(conv1x1(x))), BatchNorm and ReLU
before every convolution, three stages of 18 blocks, 4 x 16, 4 x 32 and 4 x 64 channels. In the plain version (He et
al., Deep residual learning for image recognition, 2016) BatchNorm and ReLU come after each convolution, the last ReLU
after the sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, cast

from torch import Tensor, nn

#: The number of output channels of a bottleneck divided by that of its inner convolutions.
EXPANSION = 4

#: The default number of channels of the first stage.
RESNET_WIDTH = 16


def _bottleneck_convolutions(channels: int, width: int, stride: int) -> list[nn.Module]:
    """Build 1x1, 3x3 and 1x1 convolutions with BatchNorm and ReLU between them."""
    return [
        nn.Conv2d(channels, width, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, EXPANSION * width, 1, bias=False),
    ]


class PreActBottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions, each after BatchNorm and ReLU; if the shape changes, the skip is 1x1 too."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = EXPANSION * width
        self.start = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU())
        self.branch = nn.Sequential(*_bottleneck_convolutions(channels, width, stride))
        self.skip = nn.Conv2d(channels, out, 1, stride=stride, bias=False) if channels != out or stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.start(x)
        return cast(Tensor, self.branch(y) + (x if self.skip is None else self.skip(y)))


class PlainBottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions, each followed by BatchNorm; ReLU after each but the last, and after the sum."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = EXPANSION * width
        self.branch = nn.Sequential(*_bottleneck_convolutions(channels, width, stride), nn.BatchNorm2d(out))
        self.skip: nn.Module = nn.Identity()
        if channels != out or stride > 1:
            self.skip = nn.Sequential(nn.Conv2d(channels, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, (self.branch(x) + self.skip(x)).relu())


class _ResNet(nn.Module, ABC):
    """Computes logits from images: a convolution, stages of bottlenecks, the mean over pixels and a linear layer.

    `blocks` has one entry per stage; every stage after the first halves the image and doubles the width.
    """

    bottleneck: ClassVar[type[nn.Module]]

    def __init__(self, channels: int, classes: int, blocks: Sequence[int] = (18, 18, 18), width: int = 16) -> None:
        super().__init__()
        if not blocks or min(blocks) < 1 or min(channels, classes, width) < 1:
            raise ValueError(
                "channels, classes, width and every entry of blocks must be at least 1; "
                f"got {channels}, {classes}, {width} and {list(blocks)}."
            )
        self.first = self._stem(nn.Conv2d(channels, width, 3, padding=1, bias=False))
        stages, entering = [], width
        for stage, count in enumerate(blocks):
            inner = width * 2**stage
            for block in range(count):
                stages.append(self.bottleneck(entering, inner, stride=2 if stage and not block else 1))
                entering = EXPANSION * inner
        self.blocks = nn.Sequential(*stages)
        self.last = nn.Sequential(
            *self._before_pooling(entering), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(entering, classes)
        )
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    @abstractmethod
    def _stem(self, convolution: nn.Conv2d) -> nn.Module:
        """Build the first layers: this convolution and what comes between it and the blocks."""

    @abstractmethod
    def _before_pooling(self, channels: int) -> list[nn.Module]:
        """Build the layers between the blocks and the pooling."""

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.last(self.blocks(self.first(x))))


class PreActResNet(_ResNet):
    """Computes logits from images (batch, channels, height, width) by pre-activation bottlenecks.

    BatchNorm and ReLU come before the pooling as well. `blocks` has one entry per stage; every stage after the first
    halves the image and doubles the width.

    >>> import torch
    >>> PreActResNet(3, 10, blocks=(1, 1), width=4)(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 10])
    """

    bottleneck: ClassVar[type[nn.Module]] = PreActBottleneck

    def _stem(self, convolution: nn.Conv2d) -> nn.Module:
        return convolution

    def _before_pooling(self, channels: int) -> list[nn.Module]:
        return [nn.BatchNorm2d(channels), nn.ReLU()]


class PlainResNet(_ResNet):
    """The same with plain bottlenecks: BatchNorm and ReLU after the first convolution, not before the pooling."""

    bottleneck: ClassVar[type[nn.Module]] = PlainBottleneck

    def _stem(self, convolution: nn.Conv2d) -> nn.Module:
        return nn.Sequential(convolution, nn.BatchNorm2d(convolution.out_channels), nn.ReLU())

    def _before_pooling(self, channels: int) -> list[nn.Module]:
        return []


#: Ordinary ResNets by family.
RESNETS: dict[str, type[PreActResNet | PlainResNet]] = {"resnet": PreActResNet, "resnet-plain": PlainResNet}

"""Glow and its predecessors, as lists of transforms for samples of a given shape: vectors or images.

glow             ActNorm, invertible 1x1 convolution, affine coupling       Kingma and Dhariwal (2018), Table 1
additive_glow    ActNorm, channels reversed, additive coupling              the same, Sec. 5.1
real_nvp         affine couplings that alternate between the two parts      Dinh, Sohl-Dickstein and Bengio (2017)
nice             alternating additive couplings: ln det = 0                 Dinh, Krueger and Bengio (2014)
i_revnet         the same with convolutional bottlenecks                    Jacobsen, Smeulders and Oyallon (2018)

Real NVP has a BatchNorm of the transformed part after every coupling; here an ActNorm comes before it instead. NICE
ends with a learned scale per coordinate; here the base has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import nn

from ..base import DiagonalNormal
from ..batch import Shape
from ..chain import Chain
from ..flow import Flow
from ..spelling import at_least
from ..transform import Transform
from ..transforms.conditioner import bottleneck, mlp
from ..transforms.coupling import MAX_LOG_SCALE, AdditiveCoupling, AffineCoupling, Coupling
from ..transforms.elementary import ActNorm
from ..transforms.mixing import InvertibleConv1x1, Reverse
from ..transforms.split import Alternate, Halves, Split

#: (inputs, outputs) -> a conditioner.
Conditioner: TypeAlias = Callable[[int, int], nn.Module]


def coupling(
    kind: type[AffineCoupling] | type[AdditiveCoupling],
    shape: Shape,
    conditioner: Conditioner,
    split: Split,
    **settings: float,
) -> Coupling:
    """Build a coupling for samples of this shape, with a conditioner of the sizes that the split needs."""
    split.check(shape)
    kept, transformed = split.sizes(shape[0])
    return kind(conditioner(kept, kind.outputs * transformed), split, **settings)


def glow(
    shape: Shape,
    steps: int,
    conditioner: Conditioner,
    split: Split | None = None,
    *,
    max_log_scale: float = MAX_LOG_SCALE,
) -> list[Transform]:
    """Build steps of Glow for samples of this shape: three transforms each, all with this split (default `Halves()`).

    `max_log_scale` is passed to every `AffineCoupling`.

    >>> len(Chain(*glow((2,), 3, mlp)))
    9
    """
    at_least(1, steps=steps)
    channels, transforms = shape[0], list[Transform]()
    for _ in range(steps):
        affine = coupling(AffineCoupling, shape, conditioner, split or Halves(), max_log_scale=max_log_scale)
        transforms += [ActNorm(channels), InvertibleConv1x1(channels), affine]
    return transforms


def additive_glow(shape: Shape, steps: int, conditioner: Conditioner, split: Split | None = None) -> list[Transform]:
    """Build steps of Glow with additive couplings and reversed channels: three transforms each."""
    at_least(1, steps=steps)
    channels, transforms = shape[0], list[Transform]()
    for _ in range(steps):
        additive = coupling(AdditiveCoupling, shape, conditioner, split or Halves())
        transforms += [ActNorm(channels), Reverse(), additive]
    return transforms


def real_nvp(
    shape: Shape,
    steps: int,
    conditioner: Conditioner,
    split: type[Split] = Halves,
    *,
    max_log_scale: float = MAX_LOG_SCALE,
) -> list[Transform]:
    """Build affine couplings, each transforming what the one before kept: channels, or pixels of a `Checkerboard`."""
    at_least(1, steps=steps)
    channels, transforms = shape[0], list[Transform]()
    for i in range(steps):
        part = split(swapped=i % 2 == 1)
        affine = coupling(AffineCoupling, shape, conditioner, part, max_log_scale=max_log_scale)
        transforms += [ActNorm(channels), affine]
    return transforms


def nice(shape: Shape, steps: int, conditioner: Conditioner) -> list[Transform]:
    """Build additive couplings of every other coordinate, which preserve volume."""
    at_least(1, steps=steps)
    splits = [Alternate(swapped=i % 2 == 1) for i in range(steps)]
    return [coupling(AdditiveCoupling, shape, conditioner, split) for split in splits]


def i_revnet(
    shape: Shape,
    blocks: int,
    activation: Callable[[], nn.Module] = nn.ReLU,
    *,
    first: bool = False,
    squeezed: bool = False,
    before: int = 0,
) -> list[Transform]:
    """Build blocks (x1, x2) -> (x2, x1 + F(x2)) of i-RevNet, which preserve volume.

    The halves alternate instead of being swapped, which is the same up to their order; `before` is the number of
    earlier blocks, from which the next half follows. `first`: the first F of the network begins with a convolution.
    `squeezed`: a squeeze comes just before, and the first F undoes it for itself.
    """
    at_least(1, blocks=blocks)
    if shape[0] % (8 if squeezed else 2):
        size = f"{shape[0]} after squeezing" if squeezed else shape[0]
        raise ValueError(f"an i-RevNet needs an even number of channels; got {size}. Pad by one more.")
    half, transforms = shape[0] // 2, list[Transform]()
    for i in range(blocks):
        strided = squeezed and i == 0
        entering, stride = (half // 4, 2) if strided else (half, 1)
        branch = bottleneck(entering, half, activation, stride=stride, first=first and i == 0)
        transforms.append(AdditiveCoupling(branch, Halves(swapped=(before + i) % 2 == 0)))
    return transforms


def mlp_glow(
    dimension: int,
    steps: int = 100,
    hidden: Sequence[int] = (64, 64, 64),
    *,
    activation: Callable[[], nn.Module] = nn.ReLU,
    family: Callable[[Shape, int, Conditioner], list[Transform]] = glow,
    learned_base: bool = False,
) -> Flow:
    """Build a flow on R^dimension: Glow for vectors, with an ActNorm last; or another `family` of this module.

    With 100 steps (100 couplings and 100 invertible linear maps) it is the Glow of Figure 2.

    >>> sum(p.numel() for p in mlp_glow(2).parameters())
    858604
    """

    def conditioner(inputs: int, outputs: int) -> nn.Module:
        return mlp(inputs, outputs, hidden, activation)

    if dimension < 2:
        raise ValueError(f"dimension must be at least 2 for a coupling; got {dimension}.")
    last = [] if family is nice else [ActNorm(dimension)]
    transform = Chain(*family((dimension,), steps, conditioner), *last)
    return Flow(transform, DiagonalNormal(dimension, learned=learned_base), event_shape=(dimension,))

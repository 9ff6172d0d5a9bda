"""Glow and what it grew out of, as lists of transforms for samples of a shape: rows of numbers or images.

glow             ActNorm, invertible 1x1 convolution, affine coupling       Kingma and Dhariwal (2018), Table 1
additive_glow    ActNorm, channels reversed, additive coupling              the same, Sec. 5.1
real_nvp         affine couplings that take turns at what they move         Dinh, Sohl-Dickstein and Bengio (2017)
nice             additive couplings that take turns: ln det = 0             Dinh, Krueger and Bengio (2014)
i_revnet         the same with bottlenecks of convolutions                  Jacobsen, Smeulders and Oyallon (2018)

Real NVP has a BatchNorm of what was moved after every coupling where an ActNorm is here before it. NICE ends with a
learned scale for every coordinate: here that is the base's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import nn

from ..base import DiagonalNormal
from ..chain import Chain
from ..flow import Flow
from ..transform import Shape, Transform
from ..transforms.conditioner import bottleneck, mlp
from ..transforms.coupling import LARGEST, AdditiveCoupling, AffineCoupling, Coupling
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
    """A coupling for samples of this shape, whose conditioner has the sizes that the split asks for."""
    split.check(shape)
    kept, moved = split.sizes(shape[0])
    return kind(conditioner(kept, kind.outputs * moved), split, **settings)


def glow(
    shape: Shape, steps: int, conditioner: Conditioner, split: Split | None = None, *, largest: float = LARGEST
) -> list[Transform]:
    """Steps of Glow on samples of this shape: three transforms each, all with this split (by default `Halves()`).

    `largest` is that of every `AffineCoupling`.

    >>> len(Chain(*glow((2,), 3, mlp)))
    9
    """
    _check(steps)
    channels, made = shape[0], list[Transform]()
    for _ in range(steps):
        affine = coupling(AffineCoupling, shape, conditioner, split or Halves(), largest=largest)
        made += [ActNorm(channels), InvertibleConv1x1(channels), affine]
    return made


def additive_glow(shape: Shape, steps: int, conditioner: Conditioner, split: Split | None = None) -> list[Transform]:
    """Steps of Glow with additive couplings and reversed channels: three transforms each."""
    _check(steps)
    channels, made = shape[0], list[Transform]()
    for _ in range(steps):
        additive = coupling(AdditiveCoupling, shape, conditioner, split or Halves())
        made += [ActNorm(channels), Reverse(), additive]
    return made


def real_nvp(shape: Shape, steps: int, conditioner: Conditioner, split: type[Split] = Halves) -> list[Transform]:
    """So many affine couplings, each moving what the one before kept: channels, or pixels of a `Checkerboard`."""
    _check(steps)
    channels, made = shape[0], list[Transform]()
    for i in range(steps):
        made += [ActNorm(channels), coupling(AffineCoupling, shape, conditioner, split(swapped=i % 2 == 1))]
    return made


def nice(shape: Shape, steps: int, conditioner: Conditioner) -> list[Transform]:
    """So many additive couplings of every other coordinate; they preserve volume."""
    _check(steps)
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
    """So many blocks (x1, x2) -> (x2, x1 + F(x2)) of i-RevNet; they preserve volume.

    The halves take turns instead of changing places, which is the same up to their order; `before` blocks came earlier,
    so that it is known whose turn it is. `first`: the first F of the network begins with a convolution. `squeezed`: the
    image was squeezed just before, and the first F looks at it as it was.
    """
    _check(blocks)
    if shape[0] % (8 if squeezed else 2):
        size = f"{shape[0]} after squeezing" if squeezed else shape[0]
        raise ValueError(f"an i-RevNet has an even number of channels, two halves; got {size}. Pad by one more.")
    half, made = shape[0] // 2, list[Transform]()
    for i in range(blocks):
        strided = squeezed and i == 0
        entering, stride = (half // 4, 2) if strided else (half, 1)
        branch = bottleneck(entering, half, activation, stride=stride, first=first and i == 0)
        made.append(AdditiveCoupling(branch, Halves(swapped=(before + i) % 2 == 0)))
    return made


def mlp_glow(
    dimension: int,
    steps: int = 100,
    hidden: Sequence[int] = (64, 64, 64),
    *,
    activation: Callable[[], nn.Module] = nn.ReLU,
    family: Callable[[Shape, int, Conditioner], list[Transform]] = glow,
    learned_base: bool = False,
) -> Flow:
    """A density on R^dimension: Glow for rows of numbers, with an ActNorm last; or another `family` of this module.

    With 100 steps, a hundred couplings and as many invertible linear maps, it is the Glow of Figure 2.

    >>> sum(p.numel() for p in mlp_glow(2).parameters())
    858604
    """

    def conditioner(inputs: int, outputs: int) -> nn.Module:
        return mlp(inputs, outputs, hidden, activation)

    if dimension < 2:
        raise ValueError(f"a coupling needs two coordinates, one that stays and one that is moved; got {dimension}.")
    last = [] if family is nice else [ActNorm(dimension)]
    transform = Chain(*family((dimension,), steps, conditioner), *last)
    return Flow(transform, DiagonalNormal(dimension, learned=learned_base), event_shape=(dimension,))


def _check(steps: int) -> None:
    if steps < 1:
        raise ValueError(f"there must be at least one step; got {steps}.")

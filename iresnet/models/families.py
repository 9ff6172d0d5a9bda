"""Other flows as settings: the data, bases and heads of an i-ResNet, but other steps between them.

glow, glow-additive    images: every scale squeezes, takes `blocks` steps and lets half of the channels leave, the half
                       that was moved last
realnvp                images: `blocks` couplings of a checkerboard, squeeze, as many of channels, half leaves; the last
                       scale has one more of a checkerboard and nothing after it; conditioners twice as wide after
                       every squeeze
nice                   all numbers in a row, `blocks` couplings
irevnet                images: `blocks` couplings a scale, squeezed before each scale but the first; a classifier, whose
                       conditioners have the channels of their scale
made, maf, ffjord      all numbers in a row, one transform (made) or `blocks` of them, from zuko

A row of numbers (a table, points in the plane) has one scale in every family. Conditioners are `width` wide, with
`kernels` (glow), `depth` residual blocks (realnvp) or `depth` hidden layers (rows). The loss of a classifier does not
care how large its codes are, and couplings that answer a larger input with a larger output make each other grow: with
`normalisation` batchnorm the conditioners of glow see their input through a BatchNorm, and the factors of all couplings
of a scale together are no larger than that of one may be otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields

from torch import nn

from ..chain import Chain
from ..data import Schema
from ..lipschitz import ACTIVATIONS
from ..multiscale import Multiscale
from ..transform import Shape, Transform
from ..transforms import Checkerboard, Halves, ffjord, made, maf
from ..transforms.conditioner import ResidualConvolutions, convolutions, mlp
from ..transforms.coupling import LARGEST
from ..transforms.elementary import ActNorm, Flatten, InjectivePad, Squeeze
from .glow import Conditioner, additive_glow, glow, i_revnet, nice, real_nvp
from .network import Network

#: Those that conditioners may have.
KNOWN = {name: ACTIVATIONS[name].kind for name in ("relu", "elu")}

#: Families whose images are one row of numbers; and those with scales.
FLAT = ("nice", "made", "maf", "ffjord")
SCALED = ("glow", "glow-additive", "realnvp", "irevnet")

#: What a network of a family is called, and where it is described.
_GLOW = "Kingma and Dhariwal, Glow: Generative Flow with Invertible 1x1 Convolutions, NeurIPS 2018"
ORIGINS = {
    "glow": ("Glow network", _GLOW),
    "glow-additive": ("additive Glow network", _GLOW),
    "realnvp": ("Real NVP network", "Dinh, Sohl-Dickstein and Bengio, Density Estimation Using Real NVP, ICLR 2017"),
    "nice": ("NICE network", "Dinh, Krueger and Bengio, NICE: Non-linear Independent Components Estimation, 2014"),
    "irevnet": ("i-RevNet", "Jacobsen, Smeulders and Oyallon, i-RevNet: Deep Invertible Networks, ICLR 2018"),
    "made": ("MADE network", "Germain, Gregor, Murray and Larochelle, MADE, ICML 2015"),
    "maf": ("MAF network", "Papamakarios, Pavlakou and Murray, Masked Autoregressive Flow, NeurIPS 2017"),
    "ffjord": ("FFJORD network", "Grathwohl, Chen, Bettencourt, Sutskever and Duvenaud, FFJORD, ICLR 2019"),
}

#: Settings that only residual blocks have.
OTHERS = (
    "branch", "constrained", "lipschitz", "frequency", "preactivation", "last_scale", "mixing", "principal", "tail",
    "estimator", "terms",
)  # fmt: skip

#: Settings that some families use, and which of them each does on images; of rows all use those of ROWS.
SHAPES = ("width", "depth", "kernels", "squeeze_first", "factor_out", "normalisation")
ROWS = ("width", "depth")
USED = {
    "glow": ("width", "kernels", "squeeze_first", "factor_out", "normalisation"),
    "glow-additive": ("width", "kernels", "squeeze_first", "factor_out", "normalisation"),
    "realnvp": ("width", "depth", "factor_out"),
    "irevnet": (),
    **dict.fromkeys(FLAT, ROWS),
}


def is_other(network: Network) -> bool:
    """Whether this module makes the network."""
    return network.family in (*FLAT, *SCALED)


def check(network: Network, schema: Schema, purpose: str) -> None:
    """Refuse settings that the family does not use, and aims that it does not have."""
    _check_unused(network, OTHERS, "has no residual blocks, so it")
    used = USED[network.family] if schema.is_image else ROWS
    kind = "images" if schema.is_image else "tables"
    _check_unused(network, [name for name in SHAPES if name not in used], f"on {kind}")
    if network.normalisation == "none":
        raise ValueError(f"the family {network.family} has its own normalisation; got 'none'. Leave it out.")
    if network.activation not in KNOWN:
        raise ValueError(
            f"activation must be {' or '.join(KNOWN)} for the family {network.family}; got {network.activation!r}."
        )
    if network.family == "irevnet" and not (schema.is_image and purpose == "classification"):
        what = purpose if schema.is_image else "a table"
        raise ValueError(f'the family irevnet classifies images; got {what}. Use family = "nice" to preserve volume.')
    if len(network.blocks) > 1 and not (schema.is_image and network.family in SCALED):
        raise ValueError(
            f"blocks has one entry for {'this family' if schema.is_image else 'a table'}, which has one scale; "
            f"got {list(network.blocks)}."
        )


def _check_unused(network: Network, names: Sequence[str], why: str) -> None:
    defaults = {f.name: f.default for f in fields(Network)}
    for name in names:
        # A width of 0 says what a network without the setting has: that of the scale.
        if (got := getattr(network, name)) not in (defaults[name], *([0] if name == "width" else [])):
            shown = list(got) if isinstance(got, tuple) else got
            raise ValueError(f"the family {network.family} {why} does not use {name}; got {shown!r}. Leave it out.")


def transform(network: Network, schema: Schema, first: Transform, normalised: bool) -> Transform:
    """The map of such a network: preprocessing `first`, and an ActNorm last if it is to be `normalised`."""
    pad = [InjectivePad(network.padding)] if network.padding else []
    shape = (schema.shape[0] + network.padding, *schema.shape[1:])
    if len(shape) == 1 or network.family in FLAT:
        flat = [Flatten(shape)] if len(shape) > 1 else []
        return Chain(first, *pad, *flat, *_rows(network, math.prod(shape), normalised))
    stages, shape = _stages(network, shape)
    stages[0] = [first, *pad, *stages[0]]
    if normalised and network.family != "irevnet":
        stages[-1].append(ActNorm(shape[0]))
    if network.factor_out and len(stages) > 1:
        return Multiscale([Chain(*stage) for stage in stages], schema.shape)
    return Chain(*(t for stage in stages for t in stage))


def _rows(network: Network, dimension: int, normalised: bool) -> list[Transform]:
    hidden, activation = (network.width or dimension,) * network.depth, KNOWN[network.activation]
    if dimension < 2 and network.family not in ("made", "ffjord"):
        raise ValueError(
            f"the family {network.family} needs two numbers in a row; got {dimension}. "
            'Use family = "iresnet", "made" or "ffjord".'
        )

    def conditioner(inputs: int, outputs: int) -> nn.Module:
        return mlp(inputs, outputs, hidden, activation)

    shape, blocks = (dimension,), network.blocks[0]
    steps: dict[str, Callable[[], list[Transform]]] = {
        "glow": lambda: glow(shape, blocks, conditioner),
        "glow-additive": lambda: additive_glow(shape, blocks, conditioner),
        "realnvp": lambda: real_nvp(shape, blocks, conditioner),
        "nice": lambda: nice(shape, blocks, conditioner),
        "made": lambda: made(dimension, blocks, hidden, activation),
        "maf": lambda: maf(dimension, blocks, hidden, activation),
        "ffjord": lambda: ffjord(dimension, blocks, hidden, activation),
    }
    # Glow and Real NVP begin with an ActNorm of their own, and one would change NICE's volumes.
    first = [ActNorm(dimension)] if network.family in ("made", "maf", "ffjord") else []
    last = [ActNorm(dimension)] if normalised and network.family not in FLAT else []
    return [*first, *steps[network.family](), *last]


def _stages(network: Network, shape: Shape) -> tuple[list[list[Transform]], Shape]:
    """The transforms of every scale, and the shape that leaves the last."""
    stages, count = list[list[Transform]](), len(network.blocks)
    for scale, blocks in enumerate(network.blocks):
        if network.family == "realnvp":
            stage, shape = _real_nvp(network, shape, scale)
        elif network.family == "irevnet":
            stage, shape = _i_revnet(network, shape, scale)
        else:
            stage, shape = _glow(network, shape, blocks, squeezed=scale > 0 or network.squeeze_first)
        stages.append(stage)
        if network.factor_out and scale < count - 1:
            shape = (shape[0] // 2, *shape[1:])  # Multiscale refuses an odd number
    return stages, shape


def _glow(network: Network, shape: Shape, blocks: int, *, squeezed: bool) -> tuple[list[Transform], Shape]:
    stage: list[Transform] = []
    if squeezed:
        squeeze, shape = _squeezed(shape)
        stage.append(squeeze)
    # The first half leaves (`Multiscale`), so that is the half to move: the last step has made it fit the base.
    conditioner, split = _convolutions(network, shape), Halves(swapped=True)
    if network.family == "glow-additive":
        return [*stage, *additive_glow(shape, blocks, conditioner, split)], shape
    largest = LARGEST / blocks if network.normalisation == "batchnorm" else LARGEST
    return [*stage, *glow(shape, blocks, conditioner, split, largest=largest)], shape


def _real_nvp(network: Network, shape: Shape, scale: int) -> tuple[list[Transform], Shape]:
    blocks, last = network.blocks[scale], scale == len(network.blocks) - 1
    stage = real_nvp(shape, blocks + last, _residual(network, shape, scale), Checkerboard)
    if last:
        return stage, shape
    squeeze, shape = _squeezed(shape)
    return [*stage, squeeze, *real_nvp(shape, blocks, _residual(network, shape, scale + 1))], shape


def _i_revnet(network: Network, shape: Shape, scale: int) -> tuple[list[Transform], Shape]:
    blocks, before, activation = network.blocks[scale], sum(network.blocks[:scale]), KNOWN[network.activation]
    if scale == 0:
        return i_revnet(shape, blocks, activation, first=True), shape
    squeeze, shape = _squeezed(shape)
    return [squeeze, *i_revnet(shape, blocks, activation, squeezed=True, before=before)], shape


def _squeezed(shape: Shape) -> tuple[Squeeze, Shape]:
    squeeze = Squeeze()
    if any(n % 2 for n in shape[1:]):
        raise ValueError(
            f"an entry of blocks would halve an image of {shape[1]} x {shape[2]}, which cannot be halved. "
            "Give blocks fewer entries."
        )
    return squeeze, squeeze.output_shape(shape)


def _convolutions(network: Network, shape: Shape) -> Conditioner:
    width, activation = network.width or shape[0], KNOWN[network.activation]
    return lambda inputs, outputs: convolutions(
        inputs, outputs, width, network.kernels, activation, batchnorm=network.normalisation == "batchnorm"
    )


def _residual(network: Network, shape: Shape, squeezes: int) -> Conditioner:
    width, activation = network.width * 2**squeezes or shape[0], KNOWN[network.activation]
    return lambda inputs, outputs: ResidualConvolutions(inputs, outputs, width, network.depth, activation)

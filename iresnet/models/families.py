"""Other flows from settings: the preprocessing, bases and heads of an i-ResNet with other transforms between them.

glow, glow-additive    images: each scale is a squeeze and `blocks` steps; then the half of the channels that was
                       transformed last goes to the code
realnvp                images: each scale is `blocks` checkerboard couplings, a squeeze and `blocks` channel couplings;
                       then half goes to the code. The last scale has `blocks` + 1 checkerboard couplings and nothing
                       else. Conditioners are twice as wide after every squeeze
nice                   flattened samples: `blocks` couplings
irevnet                images: `blocks` couplings per scale, with a squeeze before each scale but the first; a
                       classifier, whose conditioners have as many channels as their scale
made, maf, ffjord      flattened samples: one transform (made) or `blocks` of them, from zuko

For vectors (a table, points in the plane) every family has one scale. Conditioners are `width` wide, with `kernels`
(glow), `depth` residual blocks (realnvp) or `depth` hidden layers (vectors). The loss of a classifier does not limit
the size of its codes, and couplings whose output grows with their input make each other grow. So with `normalisation`
"batchnorm" the conditioners of glow begin with BatchNorm, and the scale factors of all couplings of a scale together
have the bound that a single one has otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields

from torch import nn

from ..batch import Shape
from ..chain import Chain
from ..data import Schema
from ..lipschitz import ACTIVATIONS
from ..multiscale import Multiscale
from ..transform import Transform
from ..transforms import Checkerboard, Halves, ffjord, made, maf
from ..transforms.conditioner import ResidualConvolutions, convnet, mlp
from ..transforms.elementary import ActNorm, Flatten, InjectivePad, Squeeze
from .glow import Conditioner, additive_glow, glow, i_revnet, nice, real_nvp
from .network import Network

#: The activations that conditioners may have.
CONDITIONER_ACTIVATIONS = {name: ACTIVATIONS[name].kind for name in ("relu", "elu")}

#: Families that flatten images, and families with several scales of images.
FLAT = ("nice", "made", "maf", "ffjord")
SCALED = ("glow", "glow-additive", "realnvp", "irevnet")

#: The name of a network of each family, and its paper.
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

#: Settings of residual blocks only.
RESIDUAL_ONLY = (
    "branch", "constrained", "lipschitz", "frequency", "preactivation", "last_scale", "mixing", "principal", "tail",
    "estimator", "terms",
)  # fmt: skip

#: Settings that some of the families use; those that all use for vectors, and those that each uses for images.
SHARED = ("width", "depth", "kernels", "squeeze_first", "factor_out", "normalisation")
VECTOR_SETTINGS = ("width", "depth")
IMAGE_SETTINGS = {
    "glow": ("width", "kernels", "squeeze_first", "factor_out", "normalisation"),
    "glow-additive": ("width", "kernels", "squeeze_first", "factor_out", "normalisation"),
    "realnvp": ("width", "depth", "factor_out"),
    "irevnet": (),
    **dict.fromkeys(FLAT, VECTOR_SETTINGS),
}


def is_other_flow(network: Network) -> bool:
    """Whether the network is one of the flows of this module."""
    return network.family in (*FLAT, *SCALED)


def check_family(network: Network, schema: Schema, purpose: str) -> None:
    """Refuse settings that the family does not use, and objectives that it does not support."""
    _check_unused(network, RESIDUAL_ONLY, "has no residual blocks, so it")
    used = IMAGE_SETTINGS[network.family] if schema.is_image else VECTOR_SETTINGS
    kind = "images" if schema.is_image else "tables"
    _check_unused(network, [name for name in SHARED if name not in used], f"on {kind}")
    if network.normalisation == "none":
        raise ValueError(f"the family {network.family} has its own normalisation; got 'none'. Leave it out.")
    if network.activation not in CONDITIONER_ACTIVATIONS:
        raise ValueError(
            f"activation must be {' or '.join(CONDITIONER_ACTIVATIONS)} for the family {network.family}; "
            f"got {network.activation!r}."
        )
    if network.family == "irevnet" and not (schema.is_image and purpose == "classification"):
        what = purpose if schema.is_image else "a table"
        raise ValueError(f'the family irevnet classifies images; got {what}. Use family = "nice" to preserve volume.')
    if len(network.blocks) > 1 and not (schema.is_image and network.family in SCALED):
        raise ValueError(
            f"blocks must have one entry for {'this family' if schema.is_image else 'a table'}, which has one scale; "
            f"got {list(network.blocks)}."
        )


def _check_unused(network: Network, names: Sequence[str], why: str) -> None:
    defaults = {f.name: f.default for f in fields(Network)}
    for name in names:
        # A width of 0 is what a network without this setting has: that of the scale.
        if (got := getattr(network, name)) not in (defaults[name], *([0] if name == "width" else [])):
            shown = list(got) if isinstance(got, tuple) else got
            raise ValueError(f"the family {network.family} {why} does not use {name}; got {shown!r}. Leave it out.")


def build_transform(network: Network, schema: Schema, first: Transform, normalised: bool) -> Transform:
    """Build the transform of such a network: `first` the preprocessing, and if `normalised` an ActNorm last."""
    pad = [InjectivePad(network.padding)] if network.padding else []
    shape = (schema.shape[0] + network.padding, *schema.shape[1:])
    if len(shape) == 1 or network.family in FLAT:
        flat = [Flatten(shape)] if len(shape) > 1 else []
        return Chain(first, *pad, *flat, *_vector_steps(network, math.prod(shape), normalised))
    stages, shape = _image_stages(network, shape)
    stages[0] = [first, *pad, *stages[0]]
    if normalised and network.family != "irevnet":
        stages[-1].append(ActNorm(shape[0]))
    if network.factor_out and len(stages) > 1:
        return Multiscale([Chain(*stage) for stage in stages], schema.shape)
    return Chain(*(t for stage in stages for t in stage))


def _vector_steps(network: Network, dimension: int, normalised: bool) -> list[Transform]:
    hidden, activation = (network.width or dimension,) * network.depth, CONDITIONER_ACTIVATIONS[network.activation]
    if dimension < 2 and network.family not in ("made", "ffjord"):
        raise ValueError(
            f"the family {network.family} needs data of at least two dimensions; got {dimension}. "
            'Use family = "iresnet", "made" or "ffjord".'
        )

    def conditioner(inputs: int, outputs: int) -> nn.Module:
        return mlp(inputs, outputs, hidden, activation)

    shape, blocks = (dimension,), network.blocks[0]
    steps: dict[str, Callable[[], list[Transform]]] = {
        "glow": lambda: glow(shape, blocks, conditioner, max_log_scale=network.max_log_scale),
        "glow-additive": lambda: additive_glow(shape, blocks, conditioner),
        "realnvp": lambda: real_nvp(shape, blocks, conditioner, max_log_scale=network.max_log_scale),
        "nice": lambda: nice(shape, blocks, conditioner),
        "made": lambda: made(dimension, blocks, hidden, activation),
        "maf": lambda: maf(dimension, blocks, hidden, activation),
        "ffjord": lambda: ffjord(dimension, blocks, hidden, activation),
    }
    # Glow and Real NVP begin with their own ActNorm, and an ActNorm would not preserve the volume in NICE.
    first = [ActNorm(dimension)] if network.family in ("made", "maf", "ffjord") else []
    last = [ActNorm(dimension)] if normalised and network.family not in FLAT else []
    return [*first, *steps[network.family](), *last]


def _image_stages(network: Network, shape: Shape) -> tuple[list[list[Transform]], Shape]:
    """Build the transforms of every scale; return them and the output shape of the last."""
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
        squeeze, shape = _squeeze(shape)
        stage.append(squeeze)
    # The first half goes to the code (`Multiscale`), so that half is transformed: the last step fits it to the base.
    conditioner, split = _convolutions(network, shape), Halves(swapped=True)
    if network.family == "glow-additive":
        return [*stage, *additive_glow(shape, blocks, conditioner, split)], shape
    largest = network.max_log_scale / (blocks if network.normalisation == "batchnorm" else 1)
    return [*stage, *glow(shape, blocks, conditioner, split, max_log_scale=largest)], shape


def _real_nvp(network: Network, shape: Shape, scale: int) -> tuple[list[Transform], Shape]:
    blocks, last = network.blocks[scale], scale == len(network.blocks) - 1
    largest = network.max_log_scale
    stage = real_nvp(shape, blocks + last, _residual(network, shape, scale), Checkerboard, max_log_scale=largest)
    if last:
        return stage, shape
    squeeze, shape = _squeeze(shape)
    conditioner = _residual(network, shape, scale + 1)
    return [*stage, squeeze, *real_nvp(shape, blocks, conditioner, max_log_scale=largest)], shape


def _i_revnet(network: Network, shape: Shape, scale: int) -> tuple[list[Transform], Shape]:
    blocks, before = network.blocks[scale], sum(network.blocks[:scale])
    activation = CONDITIONER_ACTIVATIONS[network.activation]
    if scale == 0:
        return i_revnet(shape, blocks, activation, first=True), shape
    squeeze, shape = _squeeze(shape)
    return [squeeze, *i_revnet(shape, blocks, activation, squeezed=True, before=before)], shape


def _squeeze(shape: Shape) -> tuple[Squeeze, Shape]:
    squeeze = Squeeze()
    return squeeze, squeeze.output_shape(shape)


def _convolutions(network: Network, shape: Shape) -> Conditioner:
    width, activation = network.width or shape[0], CONDITIONER_ACTIVATIONS[network.activation]
    return lambda inputs, outputs: convnet(
        inputs, outputs, width, network.kernels, activation, batchnorm=network.normalisation == "batchnorm"
    )


def _residual(network: Network, shape: Shape, squeezes: int) -> Conditioner:
    width, activation = network.width * 2**squeezes or shape[0], CONDITIONER_ACTIVATIONS[network.activation]
    return lambda inputs, outputs: ResidualConvolutions(inputs, outputs, width, network.depth, activation)

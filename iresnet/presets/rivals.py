"""What the paper compares with, under the same loop, data and reports (Tables 1, 3, 4 and 5, Figure 2).

toy-glow                      100 couplings, conditioners 1-64-64-64-2, 100 invertible maps        Figure 2
*-glow                        CIFAR-10: 12 @ 16, 24 @ 8, 48 @ 4, 32 steps each, 512 wide           Glow's default
*-additive                    the same with additive couplings and reversed channels               Glow's other one
*-realnvp                     3 couplings of a checkerboard, squeeze, 3 of channels, half leaves;  Real NVP
                              4 of a checkerboard; CIFAR-10: 8 residual blocks, 64 channels, 128
                              once squeezed
*-nice                        4 couplings; MNIST: 5 hidden layers of 1000; CIFAR-10: 4 of 2000     NICE
*-made, *-maf                 1 and 5 transforms; MNIST: 2 hidden layers of 1024                   here
*-ffjord                      1 flow, 3 hidden layers (FFJORD's own: convolutions on scales)       here
cifar10-*-classifier          the layouts of cifar10-glow and -additive, without a density         Table 3
cifar10-iresnet-glow-style    the same scales and widths, 96 residual blocks                       Table 3
cifar10-irevnet               32 @ 32, 128 @ 16, 512 @ 8, 18 blocks each, 29 channels of padding   i-RevNet's script

Where these differ from their papers: bases are learned diagonal normals (Glow learns to predict what leaves early from
what stays, NICE takes a logistic one), and training is by Adam whose rate ends at zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from ..architectures import Network
from ..data import DataSettings
from ..objective import Aim
from ..training import Training
from .classifiers import CIFAR as CLASSIFIED
from .classifiers import RECIPE as CLASSIFYING
from .experiment import Experiment
from .flows import CIFAR, MNIST
from .flows import RECIPE as FLOWING

#: What couplings stand: Adam at a small rate.
RECIPE = replace(FLOWING, learning_rate=1e-3, warmup=1000)
GLOW_CLASSIFYING = replace(
    CLASSIFYING, optimiser="adam", learning_rate=2e-4, weight_decay=0.05, head_decay=0.05, clip=1.0
)
DIGITS_RECIPE = Training(
    steps=1800, batch=128, learning_rate=1e-2, warmup=100, average=0.999, validate_every=100, weight_decay=0.5
)
#: The rate of three that did best on held-out digits, where it is another (docs/recipes.md).
DIGITS_RATES = {"nice": 2e-2, "made": 2e-2, "additive": 5e-3}
TABLE_RECIPE = Training(
    steps=1000, batch=256, learning_rate=1e-3, warmup=100, average=0.99, validate_every=20, weight_decay=0.5
)

DIGITS = DataSettings(source="digits", shift=1, shifted=0.1, border="blank")
TABLE = DataSettings(source="table.csv")

#: Glow's: every scale squeezes and lets half of its channels leave; 3x3, 1x1, 3x3 in a coupling.
GLOW = Network(
    family="glow", blocks=(32, 32, 32), width=512, activation="relu", preprocessing="centre", factor_out=True
)
REAL_NVP = replace(GLOW, family="realnvp", blocks=(3, 3), width=64, depth=8)
#: Rows of numbers; on images, all pixels in a row.
FLAT = replace(GLOW, factor_out=False)
NICE = replace(FLAT, family="nice", blocks=(4,), width=1000, depth=5)
MADE = replace(FLAT, family="made", blocks=(1,), width=1024, depth=2)
MAF = replace(MADE, family="maf", blocks=(5,))
FFJORD = replace(FLAT, family="ffjord", blocks=(1,), width=1024, depth=3, activation="elu")


def _flow(name: str, about: str, data: DataSettings, network: Network, training: Training) -> Experiment:
    return Experiment(name, about, 0, data, network, Aim(kind="density"), training)


def _named(
    prefix: str,
    about: str,
    data: DataSettings,
    networks: dict[str, Network],
    training: Training,
    rates: Mapping[str, float] = MappingProxyType({}),
) -> list[Experiment]:
    """One density for each of these networks, some with a rate of their own."""
    words = {
        "glow": "Glow, affine couplings and 1x1 convolutions",
        "additive": "Glow with additive couplings and reversed channels",
        "realnvp": "Real NVP, affine couplings of checkerboards and channels",
        "nice": "NICE, additive couplings: it preserves volume",
        "made": "MADE, one autoregressive transform, of zuko's",
        "maf": "MAF, five autoregressive transforms, of zuko's",
        "ffjord": "FFJORD, the flow of a differential equation, of zuko's",
    }
    recipes = {kind: replace(training, learning_rate=rates.get(kind, training.learning_rate)) for kind in networks}
    return [
        _flow(f"{prefix}-{kind}", f"{about}: {words[kind]}", data, n, recipes[kind]) for kind, n in networks.items()
    ]


def _additive(network: Network) -> Network:
    return replace(network, family="glow-additive")


def _classifier(name: str, about: str, network: Network, training: Training) -> Experiment:
    network = replace(network, preprocessing="standardise", readout="batchnorm", pool=True)
    return Experiment(name, about, 0, CLASSIFIED, network, Aim(kind="classification"), training)


def _digits(network: Network, **changes: object) -> Network:
    return replace(network, preprocessing="logit", alpha=0.002, **changes)  # type: ignore[arg-type]


def _mnist(network: Network, **changes: object) -> Network:
    """With the pixels of `mnist-flow`. Only centred, a pixel that is blank in the first batch would vary by the noise
    alone; a row's ActNorm would scale it by 900, and the first image that has ink there would be impossible."""
    return replace(network, preprocessing="logit", alpha=1e-4, **changes)  # type: ignore[arg-type]


_DIGITS_GLOW = _digits(GLOW, blocks=(8, 8), width=64)
_MNIST_GLOW = _mnist(GLOW, blocks=(16, 16), width=128)
_ROWS = replace(FLAT, preprocessing="standardise", width=64)

RIVALS = (
    _flow(
        "toy-glow",
        "points in the plane: Glow with 100 couplings and 100 invertible linear maps (Figure 2)",
        DataSettings(source="checkerboard"),
        replace(_ROWS, blocks=(100,), depth=3, learned_base=False),
        Training(steps=1500, batch=256, learning_rate=1e-3, warmup=100),
    ),
    *_named(
        "digits",
        "8x8 digits",
        DIGITS,
        {
            "glow": _DIGITS_GLOW,
            "additive": _additive(_DIGITS_GLOW),
            "realnvp": _digits(REAL_NVP, width=16, depth=2),
            "nice": _digits(NICE, width=128, depth=2),
            "made": _digits(MADE, width=256),
            "maf": _digits(MAF, width=256),
            "ffjord": _digits(FFJORD, width=128),
        },
        DIGITS_RECIPE,
        DIGITS_RATES,
    ),
    *_named(
        "mnist",
        "28x28 digits",
        MNIST,
        {
            "glow": _MNIST_GLOW,
            "additive": _additive(_MNIST_GLOW),
            "realnvp": _mnist(REAL_NVP, width=16, depth=4),
            "nice": _mnist(NICE),
            "made": _mnist(MADE),
            "maf": _mnist(MAF),
            "ffjord": _mnist(FFJORD),
        },
        replace(RECIPE, epochs=40),
    ),
    *_named(
        "cifar10",
        "32x32 colour photographs",
        CIFAR,
        {
            "glow": GLOW,
            "additive": _additive(GLOW),
            "realnvp": REAL_NVP,
            "nice": replace(NICE, width=2000, depth=4),
        },
        RECIPE,
    ),
    *_named(
        "table",
        "a table of numbers (give --data FILE)",
        TABLE,
        {
            "glow": replace(_ROWS, blocks=(8,), depth=2),
            "maf": replace(_ROWS, family="maf", blocks=(5,), depth=2),
            "ffjord": replace(_ROWS, family="ffjord", blocks=(1,), depth=2, activation="elu"),
        },
        TABLE_RECIPE,
    ),
    _classifier(
        "cifar10-glow-classifier",
        "32x32 colour photographs: Glow as a classifier (Table 3)",
        replace(GLOW, normalisation="batchnorm"),
        replace(GLOW_CLASSIFYING, learning_rate=1e-4),
    ),
    _classifier(
        "cifar10-additive-classifier",
        "32x32 colour photographs: Glow with additive couplings and reversed channels as a classifier (Table 3)",
        _additive(replace(GLOW, normalisation="batchnorm")),
        GLOW_CLASSIFYING,
    ),
    _classifier(
        "cifar10-iresnet-glow-style",
        "32x32 colour photographs: residual blocks in the layout of Glow as a classifier (Table 3)",
        Network(blocks=(32, 32, 32), width=512, lipschitz=0.729, preactivation=True, factor_out=True),
        CLASSIFYING,
    ),
    _classifier(
        "cifar10-irevnet",
        "32x32 colour photographs: i-RevNet, additive couplings of bottlenecks: it preserves volume",
        Network(family="irevnet", blocks=(18, 18, 18), width=0, activation="relu", padding=29),
        CLASSIFYING,
    ),
)

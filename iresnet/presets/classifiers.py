"""The paper's classifiers (Table 2, App. C.2), what they are compared with, and three with certified classes.

The paper's c is the coefficient of every layer, so that Lip(g) <= c^3 for three of them: `with_coefficient`.
"""

from __future__ import annotations

from dataclasses import replace

from ..architectures import Network
from ..data import DataSettings
from ..data.source import schema_of
from ..objective import Aim
from ..training import Training
from .experiment import Experiment

#: The smallest coefficient of a layer: of three such layers, float32 still sees g beside x.
SMALLEST = 0.01

# ---------------------------------------------------------------------------------------------- recipes

#: SGD with Nesterov's momentum, decay on all weights, the last weights released. With cutout and smoothed labels it
#: was chosen on held-out images of CIFAR-10.
RECIPE = Training(
    epochs=135,
    batch=128,
    optimiser="sgd",
    learning_rate=0.1,
    schedule="cosine",
    warmup=400,
    clip=10.0,
    weight_decay=5e-4,
    head_decay=5e-4,
    average=0.0,
    select="last",
    validate_every=2000,
    save_every=2000,
)
MNIST_RECIPE = replace(RECIPE, epochs=20, warmup=500, validate_every=1000, save_every=1000)
#: The plain logits that validation looks at are not what is trained for: the last weights it is.
CERTIFIED_RECIPE = Training(
    epochs=20, batch=128, learning_rate=5e-3, schedule="cosine", warmup=200, average=0.99, select="last"
)

#: Smoothing of the labels, beside cutout.
SMOOTHING = 0.1

CIFAR = DataSettings(source="cifar10", validation=5000, shift=4, flip=True, cutout=8)
MNIST = DataSettings(source="mnist", validation=5000, shift=2, border="blank")
DIGITS = DataSettings(source="digits", shift=1, shifted=0.1, border="blank")

# ---------------------------------------------------------------------------------------------- networks

#: 16 channels at full size, 64 at half, 256 at a quarter; g: 3x3, 1x1, 3x3 of the scale's own width; c = 0.9.
NETWORK = Network(
    blocks=(18, 18, 18),
    squeeze_first=False,
    width=0,
    lipschitz=0.729,
    preactivation=True,
    preprocessing="standardise",
    padding=13,
    readout="batchnorm",
    pool=True,
)
VANILLA = replace(NETWORK, constrained=False)
RESNET = Network(family="resnet", blocks=(18, 18, 18), width=16, preprocessing="standardise")
MNIST_NETWORK = replace(NETWORK, blocks=(7, 7, 7), padding=15)
#: Blocks of which none stretches, and a head whose constant is known: Lip of the whole is that of the scaling.
CERTIFIED = Network(
    blocks=(12,),
    branch="potential",
    width=256,
    kernels=(0,),
    lipschitz=0.9,
    activation="relu",
    normalisation="none",
    preprocessing="standardise",
    readout="lipschitz",
)


def _classifier(name: str, about: str, data: DataSettings, network: Network, training: Training) -> Experiment:
    smoothing = SMOOTHING if data.cutout else 0.0
    return Experiment(name, about, 0, data, network, Aim("classification", label_smoothing=smoothing), training)


def _certified(
    name: str, about: str, data: DataSettings, network: Network, training: Training, radius: float
) -> Experiment:
    """Trained for classes that hold within a radius, in grey levels."""
    return replace(
        _classifier(name, about, data, network, training), objective=Aim(kind="classification", radius=radius)
    )


CLASSIFIERS = (
    _classifier(
        "iresnet164", "the paper's CIFAR-10 classifier: 54 blocks, every layer below 0.9", CIFAR, NETWORK, RECIPE
    ),
    _classifier(
        "iresnet118",
        "the same with 39 blocks (the paper's appendix)",
        CIFAR,
        replace(NETWORK, blocks=(13, 13, 13)),
        RECIPE,
    ),
    _classifier(
        "iresnet64", "the same with 21 blocks (the released script)", CIFAR, replace(NETWORK, blocks=(7, 7, 7)), RECIPE
    ),
    _classifier("vanilla164", "iresnet164 without its constraint: nothing is proven of it", CIFAR, VANILLA, RECIPE),
    _classifier(
        "batchnorm164",
        "vanilla164 with BatchNorm before every activation instead of ActNorm before every block",
        CIFAR,
        replace(VANILLA, normalisation="batchnorm"),
        RECIPE,
    ),
    _classifier(
        "resnet164",
        "the ResNet-164 that the paper compares with: bottlenecks, strides, no inverse",
        CIFAR,
        RESNET,
        RECIPE,
    ),
    _classifier(
        "resnet164-plain",
        "the same with activations after the layers and the sum, as ResNets were at first; no inverse",
        CIFAR,
        replace(RESNET, family="resnet-plain"),
        RECIPE,
    ),
    _classifier(
        "mnist-iresnet64",
        "the paper's MNIST classifier: 21 blocks, every layer below 0.9",
        MNIST,
        MNIST_NETWORK,
        MNIST_RECIPE,
    ),
    _classifier(
        "mnist-vanilla64",
        "mnist-iresnet64 without its constraint: nothing is proven of it",
        MNIST,
        replace(MNIST_NETWORK, constrained=False),
        MNIST_RECIPE,
    ),
    _classifier(
        "mnist-classifier",
        "28x28 digits: an invertible classifier of 21 blocks on two scales, 0.9 M parameters",
        MNIST,
        replace(MNIST_NETWORK, blocks=(10, 11)),
        MNIST_RECIPE,
    ),
    _certified(
        "digits-certified",
        "8x8 digits: classes that are proven to hold in a ball",
        DIGITS,
        replace(CERTIFIED, width=128),
        replace(CERTIFIED_RECIPE, epochs=0, steps=1500, warmup=50),
        radius=4.0,
    ),
    _certified(
        "mnist-certified",
        "28x28 digits: classes that are proven to hold in a ball",
        replace(MNIST, shift=1),
        CERTIFIED,
        CERTIFIED_RECIPE,
        radius=127.0,
    ),
    _certified(
        "cifar10-certified",
        "32x32 colour photographs: classes that are proven to hold in a ball",
        replace(CIFAR, cutout=0),
        replace(CERTIFIED, blocks=(4, 4, 8), kernels=(3, 3, 0), padding=1),
        replace(CERTIFIED_RECIPE, epochs=30, learning_rate=2e-3),
        radius=54.0,
    ),
)


def with_coefficient(experiment: Experiment, coefficient: str) -> Experiment:
    """The experiment with the paper's c: every layer of every g has this norm at most.

    >>> with_coefficient(CLASSIFIERS[0], "0.5").network.lipschitz
    0.125
    """
    network, c = experiment.network, float(coefficient)
    if network.family != "iresnet" or not network.constrained:
        raise ValueError(
            f"{experiment.name} has no constraint, so no coefficient either; got {coefficient}. Use {experiment.name}."
        )
    if not 0 < c < 1:
        raise ValueError(
            f"the coefficient of a layer must lie in (0, 1); got {coefficient}. Example: {experiment.name}-c0.9"
        )
    if c < SMALLEST:
        raise ValueError(
            f"a coefficient below {SMALLEST:g} leaves nothing of g; got {coefficient}. Example: {experiment.name}-c0.9"
        )
    layers = len(network.kernels) if schema_of(experiment.data.source).is_image else network.depth + 1
    if network.branch != "chain":  # W and W'; or the last layer, since those before it keep their input
        layers = 2 if network.branch == "potential" else 1
    return replace(
        experiment,
        name=f"{experiment.name}-c{coefficient}",
        about=f"{experiment.about}; here every layer below {coefficient}",
        network=replace(network, lipschitz=float(f"{c**layers:.12g}")),
    )

"""Densities of images: the paper's flows (Table 4, App. C.3) in the appendix's shape and the released one, and others.

    preset                  scales, channels @ size                    between the scales
    cifar10-flow            12 @ 16, 24 @ 8, 48 @ 4, 16 blocks each    half of the channels leaves; squeeze, also first
    cifar10-flow-appendix    3 @ 32, 12 @ 16, 48 @ 8, 32 blocks each    squeeze
    cifar10-flow-modern      3 @ 32, 12 @ 16, 48 @ 8, 16 blocks each    squeeze; 4 blocks on all of the code at the end;
                                                                        g dense
    cifar10-flow-principal  12 @ 16, 48 @ 8, 192 @ 4, 28, 8, 4 blocks   squeeze, also first; principal axes before
                                                                        the blocks of a scale
    mnist-flow               1 @ 28, 4 @ 14, 16 @ 7, 32 blocks each     squeeze
    mnist-flow-released      4 @ 14, 8 @ 7, 16 blocks each              half of the channels leaves; squeeze, also first
    mnist-flow-small         4 @ 14, 16 @ 7, 24 and 8 blocks            squeeze, also first; principal axes; 2 blocks on
                                                                        all of the code at the end
    cifar10-flow-noise      `cifar10-flow-principal` with noise that is learned
    mnist-flow-noise         4 @ 14, 16 @ 7, 28 and 4 blocks            as `mnist-flow-small`; noise that is learned,
                                                                        ten components in the base

The released shape has three scales and two splits. Digits of 28 x 28 are 7 x 7 after two squeezes and cannot be halved
again, so `mnist-flow-released` has the two scales that fit, and one split; the script pads them to 32 x 32 x 3 instead,
whose bits are not those of the digits. The paper trains for 200 epochs by Adamax with the rate .003; these take Adam,
whose rate ends at zero.
"""

from __future__ import annotations

from dataclasses import replace

from ..architectures import Network
from ..data import DataSettings
from ..objective import Aim
from ..training import Training
from .experiment import Experiment

#: Warm-up, flat, and straight down to zero over the last 40 %; averaged weights are released.
RECIPE = Training(
    epochs=80,
    batch=128,
    learning_rate=2e-3,
    schedule="linear",
    warmup=500,
    cooldown=0.4,
    clip=1.0,
    average=0.999,
    validate_every=2000,
    save_every=1000,
)

CIFAR = DataSettings(source="cifar10", validation=5000, flip=True)
MNIST = DataSettings(source="mnist", validation=5000)

#: Three layers with the norm 0.9 each; pixels only centred, as in the released script; a learned diagonal normal.
RELEASED = Network(
    blocks=(16, 16, 16),
    width=512,
    lipschitz=0.729,
    last_scale=0.1,
    preprocessing="centre",
    factor_out=True,
    estimator="series",
    terms=5,
)
APPENDIX = replace(RELEASED, blocks=(32, 32, 32), squeeze_first=False, factor_out=False)
#: Most pixels of a drawing are blank. There the logit of x + u is spread over several units, where x - 1/2 is as wide
#: as u, 1/256, which a base of width 1 takes long to learn. The paper does not say how it scales MNIST for densities.
MNIST_APPENDIX = replace(APPENDIX, width=32, preprocessing="logit", alpha=1e-4, terms=10)
#: Two scales: 7 x 7 cannot be halved.
MNIST_RELEASED = replace(MNIST_APPENDIX, blocks=(16, 16), squeeze_first=True, factor_out=True)
#: For minutes of training (docs/recipes.md): axes first, sines after them, their frequency for this width; one
#: hidden layer in g, and most blocks where the image is fine; nothing leaves early. An estimate without bias: a network
#: that learns so fast learns to use what a series of few terms leaves out.
PRINCIPAL = replace(
    RELEASED,
    blocks=(28, 8, 4),
    kernels=(3, 3),
    lipschitz=0.8,
    activation="sine",
    frequency=10.0,
    mixing=True,
    principal=True,
    factor_out=False,
    estimator="roulette",
    terms=4,
)
#: The same for digits, with a tail.
MNIST_SMALL = replace(
    MNIST_APPENDIX,
    blocks=(24, 8),
    squeeze_first=True,
    kernels=(3, 3),
    width=128,
    lipschitz=0.85,
    activation="sine",
    frequency=12.0,
    mixing=True,
    principal=True,
    tail=2,
    tail_width=128,
    estimator="roulette",
    terms=4,
)
#: Wider, with a mixture for a base and noise that is learned. The noise of a blank pixel can be u = e^v with a normal v
#: far below zero: its logit is v - ln(levels), normal again and free of charge, if alpha is small beside 1 / levels.
MNIST_NOISE = replace(MNIST_SMALL, blocks=(28, 4), width=256, frequency=16.0, alpha=1e-6, components=10, dequantiser=32)
#: What later work found: LipSwish, an estimate without bias and blocks that see all of the code (Residual Flows, 2019);
#: a g whose layers keep their input (i-DenseNets, 2021): each of norm .98, of which only the last counts for Lip(g).
MODERN = replace(
    APPENDIX,
    blocks=(16, 16, 16),
    branch="dense",
    width=128,
    kernels=(3, 3, 3, 1),
    lipschitz=0.98,
    activation="lipswish",
    preprocessing="logit",
    alpha=0.05,
    tail=4,
    tail_width=128,
    estimator="roulette",
    terms=2,
)

#: Those of the two recipes that were found here.
PRINCIPAL_RECIPE = replace(RECIPE, epochs=100, learning_rate=4e-3)
SMALL_RECIPE = replace(RECIPE, epochs=70, learning_rate=4e-3)


def _flow(name: str, about: str, data: DataSettings, network: Network, training: Training) -> Experiment:
    return Experiment(name, about, 0, data, network, Aim(kind="density"), training)


FLOWS = (
    _flow(
        "cifar10-flow",
        "32x32 colour photographs: the paper's density in the shape of the released script, 48 blocks",
        CIFAR,
        RELEASED,
        RECIPE,
    ),
    _flow(
        "cifar10-flow-appendix",
        "the same in the shape of the paper's appendix: 96 blocks, nothing leaves before the end",
        CIFAR,
        APPENDIX,
        RECIPE,
    ),
    _flow(
        "cifar10-flow-modern",
        "the same with what later work found: dense g, LipSwish, 0.98 a layer, no bias, fully connected blocks last",
        CIFAR,
        MODERN,
        replace(RECIPE, batch=64, learning_rate=1e-3, warmup=1000),
    ),
    _flow(
        "cifar10-flow-principal",
        "from principal axes on, with sines, most of its 40 blocks at 16 x 16; nothing leaves before the end, no bias",
        CIFAR,
        PRINCIPAL,
        PRINCIPAL_RECIPE,
    ),
    _flow(
        "mnist-flow",
        "28x28 digits: the paper's density, 96 blocks of 32 filters",
        MNIST,
        MNIST_APPENDIX,
        replace(RECIPE, epochs=40),
    ),
    _flow(
        "mnist-flow-released",
        "the same in the shape of the released script, as far as 28 x 28 can be halved: 32 blocks on two scales",
        MNIST,
        MNIST_RELEASED,
        replace(RECIPE, epochs=40),
    ),
    _flow(
        "mnist-flow-small",
        "28x28 digits: a density of 34 blocks on two scales that fits in a few megabytes",
        MNIST,
        MNIST_SMALL,
        SMALL_RECIPE,
    ),
    _flow(
        "cifar10-flow-noise",
        "cifar10-flow-principal whose dequantisation is learned with it",
        CIFAR,
        replace(PRINCIPAL, dequantiser=64),
        PRINCIPAL_RECIPE,
    ),
    _flow(
        "mnist-flow-noise",
        "28x28 digits: a density of 34 blocks with learned dequantisation and a mixture of ten for a base",
        MNIST,
        MNIST_NOISE,
        SMALL_RECIPE,
    ),
)

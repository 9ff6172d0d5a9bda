"""Experiments on digits, tables and points: densities, hybrids and small classifiers."""

from __future__ import annotations

from dataclasses import replace

from ..architectures import Network
from ..data import DataSettings
from ..objective import Aim
from ..training import Training
from .experiment import Experiment

DIGITS = Experiment(
    name="digits-hybrid",
    about="8x8 digits, embedded in scikit-learn: one network that classifies, scores, samples and is inverted",
    data=DataSettings(source="digits", shift=1, shifted=0.1, border="blank"),
    network=Network(
        blocks=(4, 3),
        width=32,
        kernels=(3, 3),
        lipschitz=0.97,
        activation="sine",
        frequency=2.5,
        alpha=0.002,
        bayes=True,
        terms=4,
    ),
    objective=Aim(kind="hybrid", weight=0.2, shifted=0.7),
    training=Training(
        steps=1800, batch=128, learning_rate=5e-3, warmup=100, weight_decay=0.5, average=0.999, validate_every=250
    ),
)

MNIST = Experiment(
    name="mnist-hybrid",
    about="28x28 digits: one network that classifies and gives likelihoods",
    data=DataSettings(source="mnist", validation=5000),
    network=Network(
        blocks=(12, 4),
        width=64,
        kernels=(3, 3),
        lipschitz=0.8,
        activation="sine",
        frequency=9.0,
        alpha=1e-4,
        mixing=True,
        principal=True,
        head=(256,),
        dropout=0.3,
        estimator="roulette",
        terms=4,
    ),
    objective=Aim(kind="hybrid", weight=1.0, label_smoothing=0.1),
    training=Training(
        epochs=30, batch=128, learning_rate=4e-3, warmup=200, average=0.999, validate_every=500, save_every=500
    ),
)

CIFAR = Experiment(
    name="cifar10-hybrid",
    about="32x32 colour photographs: one network that classifies and gives likelihoods",
    data=DataSettings(source="cifar10", validation=5000, shift=4, shifted=0.0, flip=True),
    network=Network(
        blocks=(12, 8, 8),
        width=256,
        kernels=(3, 3),
        lipschitz=0.8,
        activation="sine",
        frequency=8.0,
        last_scale=0.1,
        preprocessing="centre",
        mixing=True,
        principal=True,
        readout="batchnorm",
        pool=True,
        estimator="roulette",
        terms=4,
    ),
    objective=Aim(kind="hybrid", weight=1.0, shifted=1.0),
    training=Training(
        epochs=30, batch=128, learning_rate=4e-3, warmup=500, average=0.999, validate_every=2000, save_every=1000
    ),
)

TABLE = Experiment(
    name="table-density",
    about="a table of numbers (give --data FILE): its density, for anomaly scores and samples",
    data=DataSettings(source="table.csv"),
    network=Network(blocks=(8,), width=64, depth=2, lipschitz=0.97, preprocessing="standardise"),
    objective=Aim(kind="density"),
    training=Training(
        steps=1000, batch=256, learning_rate=2e-3, warmup=100, weight_decay=2.0, average=0.99, validate_every=20
    ),
)

GENERAL = (
    DIGITS,
    replace(
        DIGITS,
        name="digits-density",
        about="8x8 digits: the density alone",
        network=replace(DIGITS.network, components=10, bayes=False),
        objective=Aim(kind="density"),
        training=replace(DIGITS.training, learning_rate=2e-2),
    ),
    replace(
        DIGITS,
        name="digits-classifier",
        about="8x8 digits: an invertible classifier",
        data=replace(DIGITS.data, shifted=0.7),
        objective=Aim(kind="classification", label_smoothing=0.1),
        training=replace(DIGITS.training, steps=1500),
    ),
    replace(
        DIGITS,
        name="digits-semi-supervised",
        about="8x8 digits with one label in ten",
        data=replace(DIGITS.data, labelled=0.1),
        objective=replace(DIGITS.objective, kind="semi-supervised"),
    ),
    Experiment(
        name="points-density",
        about="points in the plane; --data moons, circles, rings, spirals, ...",
        data=DataSettings(source="moons"),
        network=Network(
            blocks=(16,),
            width=64,
            depth=2,
            lipschitz=0.99,
            activation="sine",
            frequency=4.0,
            preprocessing="standardise",
            learned_base=False,
            estimator="exact",
        ),
        objective=Aim(kind="density"),
        training=Training(steps=1200, batch=256, learning_rate=8e-3),
    ),
    Experiment(
        name="toy-iresnet",
        about="points in the plane: the paper's density of 100 blocks, 2-64-64-64-2 (Figure 2); toy-glow is its rival",
        data=DataSettings(source="checkerboard"),
        network=Network(
            blocks=(100,),
            width=64,
            depth=3,
            lipschitz=0.97,
            preprocessing="standardise",
            learned_base=False,
            estimator="exact",
        ),
        objective=Aim(kind="density"),
        training=Training(steps=1500, batch=256, learning_rate=4e-3, warmup=100),
    ),
    TABLE,
    replace(
        TABLE,
        name="table-hybrid",
        about="a table with a label column (give --data FILE --label COLUMN): classes and density from one network",
        network=replace(TABLE.network, head=(64,), dropout=0.1),
        objective=Aim(kind="hybrid", weight=3.0, label_smoothing=0.05),
    ),
    replace(
        TABLE,
        name="table-classifier",
        about="a table with a label column (give --data FILE --label COLUMN): an invertible classifier",
        network=replace(TABLE.network, head=(64,), dropout=0.1),
        objective=Aim(kind="classification", label_smoothing=0.05),
    ),
    MNIST,
    CIFAR,
)

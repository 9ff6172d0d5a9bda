"""The experiment of a cell: its preset, changed by budget and recipe according to what its network is for.

budget    smoke: 8x8 digits and a few blocks, or four in the plane; a few steps. short: classifiers with fewer epochs,
          flows as their presets say, 1,000 steps in the plane. paper: 200 epochs, and 20,000 steps in the plane
recipe    ours: that of the preset. paper: App. C.2 for classifiers, App. C.3 for flows and hybrids, without weight
          averaging and clipping. The paper does not describe training in the plane, nor with few labels. A cell with
          an optimiser of its own takes the images, objective and batch size of the recipe, and keeps how its steps are
          taken
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import presets
from ..presets import Experiment
from ..train import ObjectiveSettings
from .cells import DATASETS, DIGITS, Cell

BUDGETS, RECIPES = ("smoke", "short", "paper"), ("ours", "paper")

#: Epochs of classifiers by budget (MNIST needs fewer in the short one) and of flows; steps in the plane.
EPOCHS = {"short": {"mnist": 10, "cifar10": 30, "cifar100": 30}, "paper": dict.fromkeys(DATASETS, 200)}
FLOW_EPOCHS, STEPS = 200, {"smoke": 30, "short": 1_000, "paper": 20_000}
#: Training images that the paper's recipe leaves out: it trains on all of them, and selects nothing.
HELD_OUT = 100
#: Terms of the paper's power series.
TERMS = {"mnist": 10, "cifar10": 5}


@dataclass(frozen=True)
class Kind:
    """What all networks of one purpose share.

    `home` is the result whose folder holds their runs, `fixed` the settings that identify a cell; `budget` applies a
    budget to an experiment. The paper's recipe has two parts: `task` sets images, objective and batch size, and
    `optimiser` how a step is taken.
    """

    home: str
    fixed: tuple[str, ...]
    task: Callable[[Experiment], Experiment]
    optimiser: Callable[[Experiment], Experiment]
    budget: Callable[[Experiment, str], Experiment]


def experiment(
    cell: Cell, budget: str, recipe: str, *, seed: int = 0, data_dir: str | None = None, overrides: Sequence[str] = ()
) -> Experiment:
    """Return the experiment of a cell; `overrides` are a user's own settings, such as "training.epochs=100"."""
    e, kind = cell.experiment, KINDS[cell.purpose]
    if cell.budget_of:
        ours = presets.find(cell.budget_of)
        t = ours.training
        e = _with_training(replace(e, data=ours.data), epochs=t.epochs, steps=t.steps, batch=t.batch)
    data = replace(e.data, source=cell.dataset)
    e = replace(e, seed=seed, data=data if data_dir is None else replace(data, folder=data_dir))
    if recipe == "paper":
        e = kind.task(e)
        e = e if cell.own_optimiser else kind.optimiser(e)
    return presets.with_overrides(kind.budget(e, budget), overrides)


def unchanged(e: Experiment) -> Experiment:
    """Return the experiment as it is, where the paper says nothing."""
    return e


def _with_training(e: Experiment, **settings: Any) -> Experiment:
    return replace(e, training=replace(e.training, **settings))


def use_images_of_c2(e: Experiment) -> Experiment:
    """Train a classifier on all but a few images; shift them, and flip those of CIFAR.

    The released script shifts by up to 4 pixels on CIFAR, and mirrors at the border. It has nothing for MNIST, whose
    border is blank.
    """
    small = e.data.source == "mnist"
    data = replace(e.data, shift=2 if small else 4, shifted=1.0, flip=not small, cutout=0, validation=HELD_OUT)
    data = replace(data, border="blank" if small else "mirror")
    e = _with_training(e, batch=128, average=0.0, select="last")
    return replace(e, data=data, objective=ObjectiveSettings(kind="classification"))


def use_sgd_of_c2(e: Experiment) -> Experiment:
    """Train by SGD with momentum, at a learning rate of 0.1 that falls three times.

    As in the released script, it rises over the first 10 of 200 epochs, and weight decay acts on all parameters.
    """
    e = _with_training(e, optimiser="sgd", learning_rate=0.1, momentum=0.9, nesterov=False, warmup=0.05, clip=math.inf)
    e = _with_training(e, schedule="milestones", milestones=(0.3, 0.6, 0.8), decay=0.2)
    return _with_training(e, weight_decay=5e-4, head_decay=5e-4, other_decay=5e-4)


def use_adamax_of_c3(e: Experiment) -> Experiment:
    """Train a flow by Adamax at a constant learning rate; the paper gives neither batch size nor schedule.

    Probes are Gaussian (Algorithm 2). The released script runs five power iterations per step, and Adamax with its
    usual betas.
    """
    network = replace(e.network, estimator="series", terms=TERMS.get(e.data.source, e.network.terms))
    network = replace(network, probe="gaussian", norm="power-iteration", norm_iterations=5)
    e = _with_training(e, optimiser="adamax", learning_rate=0.003, schedule="constant", warmup=0, clip=math.inf)
    e = _with_training(e, betas=(0.9, 0.999))
    return replace(_with_training(e, weight_decay=0.0, average=0.0, select="last"), network=network)


def _budget_classifier(e: Experiment, budget: str) -> Experiment:
    if budget != "smoke":
        return _with_training(e, epochs=EPOCHS[budget].get(e.data.source, e.training.epochs))
    few = replace(e.network, blocks=(1, 1, 1), padding=3 if e.network.padding else 0)
    data = replace(e.data, validation=0.15, shift=1, flip=False, cutout=0)
    e = _with_training(e, learning_rate=0.1 if e.training.optimiser == "sgd" else 0.01)
    return _on_digits(replace(e, network=replace(few, width=min(few.width, 16)), data=data), steps=30)


def _budget_flow(e: Experiment, budget: str) -> Experiment:
    if budget != "smoke":
        return _with_training(e, epochs=FLOW_EPOCHS) if budget == "paper" else e
    network = replace(e.network, blocks=(1,) * len(e.network.blocks), width=16)
    return _on_digits(replace(e, network=network), steps=40)


def _budget_few_labels(e: Experiment, budget: str) -> Experiment:
    """Draw the labels by the seed of the run; the paper has no such network, and no budget of its own for one."""
    e = replace(e, data=replace(e.data, seed=e.seed))
    return _budget_flow(e, budget) if budget == "smoke" else e


def _on_digits(e: Experiment, steps: int) -> Experiment:
    """Train on 8x8 digits for a few steps."""
    warmup, data = min(5, e.training.warmup), replace(e.data, source=DIGITS)  # a fraction stays one
    e = _with_training(e, steps=steps, epochs=0, batch=64, warmup=warmup, validate_every=steps, save_every=10)
    return replace(e, data=data)


def _budget_plane(e: Experiment, budget: str) -> Experiment:
    steps = STEPS[budget]
    e = _with_training(e, steps=steps, epochs=0)
    if budget != "smoke":
        return e
    e = _with_training(e, batch=64, warmup=5, validate_every=steps, save_every=10)
    return replace(e, network=replace(e.network, blocks=(4,), width=16))


KINDS = {
    "classification": Kind(
        "table2",
        ("network.family", "network.constrained", "network.lipschitz", "network.kernels", "network.normalisation"),
        use_images_of_c2,
        use_sgd_of_c2,
        _budget_classifier,
    ),
    "density": Kind("table4", (), unchanged, use_adamax_of_c3, _budget_flow),
    "hybrid": Kind("hybrid", ("objective.kind", "objective.weight"), unchanged, use_adamax_of_c3, _budget_flow),
    "semi-supervised": Kind(
        "semi-supervised",
        ("objective.kind", "objective.density", "data.labelled", "data.seed"),
        unchanged,
        unchanged,
        _budget_few_labels,
    ),
    "plane": Kind("figure2", (), unchanged, unchanged, _budget_plane),
}

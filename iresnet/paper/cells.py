"""The networks of the paper's results, each on its data: a cell, and the experiment that makes it.

A cell is a data set and a model: the ResNet-164 baseline, "vanilla" (the architecture of an i-ResNet without its
constraint), BatchNorm (vanilla with BatchNorm in g), an i-ResNet with the coefficient c for every layer, or a flow,
whose experiments are in `flows`.

budget    smoke: 8x8 digits, three blocks, a few steps; short: fewer epochs; paper: 200
recipe    ours: that of the preset; paper: SGD, momentum .9, decay 5e-4, rate .1 times .2 after 60, 120 and 160 epochs
          of 200 (App. C.2), nothing averaged and nothing clipped
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .. import presets
from ..objective import Aim
from ..presets import Experiment
from ..spelling import hint

BUDGETS, RECIPES, DATASETS = ("smoke", "short", "paper"), ("ours", "paper"), ("mnist", "cifar10", "cifar100")
RESNET, VANILLA, BATCHNORM = "ResNet-164", "vanilla", "BatchNorm"
BASELINES = (RESNET, VANILLA, BATCHNORM)

#: The preset of every flow, by data set and name.
FLOWS = {
    ("digits", "flow"): "digits-density",
    ("mnist", "flow"): "mnist-flow",
    ("mnist", "flow-small"): "mnist-flow-small",
    ("cifar10", "flow"): "cifar10-flow",
    ("cifar10", "flow-appendix"): "cifar10-flow-appendix",
    ("cifar10", "flow-modern"): "cifar10-flow-modern",
}
FLOW_NAMES = tuple(dict.fromkeys(model for _, model in FLOWS))

#: What the budget smoke is made of, whatever the paper's set.
DIGITS = "digits"

#: Epochs of a budget; MNIST needs fewer in the short one.
EPOCHS = {"short": {"mnist": 10, "cifar10": 30, "cifar100": 30}, "paper": dict.fromkeys(DATASETS, 200)}


@dataclass(frozen=True)
class Cell:
    """One model on one data set."""

    dataset: str
    model: str

    def __post_init__(self) -> None:
        if self.dataset not in (DIGITS, *DATASETS):
            raise ValueError(f"there is no data set {self.dataset!r} in these results. {hint(self.dataset, DATASETS)}")
        if self.is_flow and not exists(self.dataset, self.model):
            raise ValueError(
                f"there is no {self.model} on {self.dataset}. Flows: {', '.join(' '.join(k) for k in FLOWS)}."
            )
        if not exists(self.dataset, self.model):
            raise ValueError(f"the paper has no {self.model} on mnist. Its cells there are vanilla and c=0.9 to c=0.5.")

    def __str__(self) -> str:
        return f"{self.dataset} {self.model}"

    @property
    def is_flow(self) -> bool:
        """Whether it is a density, not a classifier."""
        return self.model in FLOW_NAMES

    @property
    def coefficient(self) -> float | None:
        """c, where the network is constrained."""
        return coefficient_of(self.model)

    @property
    def folder(self) -> str:
        """The name of its run folder."""
        return f"{self.dataset}-{self.model.lower().replace('=', '').replace('-', '')}"

    @property
    def preset(self) -> str:
        """The preset it is made from."""
        small = self.dataset == "mnist"
        if self.is_flow:
            return FLOWS[self.dataset, self.model]
        if self.coefficient is not None:
            return f"{'mnist-iresnet64' if small else 'iresnet164'}-c{self.coefficient:g}"
        return (
            "mnist-vanilla64" if small else {RESNET: "resnet164", VANILLA: "vanilla164"}.get(self.model, "batchnorm164")
        )


def exists(dataset: str, model: str) -> bool:
    """Whether there is a preset for this model on this set: MNIST has no baseline but vanilla."""
    if model in FLOW_NAMES:
        return (dataset, model) in FLOWS
    return dataset != "mnist" or model not in (RESNET, BATCHNORM)


def constrained(*coefficients: float) -> tuple[str, ...]:
    """The names of i-ResNets.

    >>> constrained(0.9, 0.5)
    ('c=0.9', 'c=0.5')
    """
    return tuple(f"c={c:g}" for c in coefficients)


def coefficient_of(model: str) -> float | None:
    """c of an i-ResNet, by its name; None for other models.

    >>> coefficient_of("c=0.9"), coefficient_of("vanilla")
    (0.9, None)
    """
    return float(model[2:]) if model.startswith("c=") else None


def model_of(word: str) -> str:
    """The model that a user means.

    >>> model_of("resnet164"), model_of("c=.9"), model_of("C0.90"), model_of("batchnorm")
    ('ResNet-164', 'c=0.9', 'c=0.9', 'BatchNorm')
    """
    plain = word.strip().lower().replace("-", "")
    for name in (*BASELINES, *FLOW_NAMES):
        if plain == name.lower().replace("-", ""):
            return name
    if found := re.fullmatch(r"c=?(\d*\.?\d+)", plain):
        c = float(found[1])
        if not 0 < c < 1:
            raise ValueError(f"c is a layer's coefficient, in (0, 1); got {word!r}. Use e.g. c=0.9.")
        return constrained(c)[0]
    raise ValueError(f"there is no cell {word!r}. {hint(word, ('c=0.9', 'c=0.5', VANILLA, 'batchnorm', 'resnet164'))}")


def order(model: str) -> tuple[int, float]:
    """The place of a model in the paper's tables: baselines, then c from large to small; rivals, flows."""
    if model in BASELINES:
        return BASELINES.index(model), 0.0
    if (c := coefficient_of(model)) is not None:
        return len(BASELINES), -c
    return len(BASELINES) + 1 + (model in FLOW_NAMES), 0.0


def experiment(
    cell: Cell, budget: str, recipe: str, *, seed: int = 0, folder: str | None = None, changes: Sequence[str] = ()
) -> Experiment:
    """All that decides the run of a cell; `changes` are a user's own settings, such as "training.epochs=100"."""
    made = presets.find(cell.preset)
    data = (
        replace(made.data, source=cell.dataset)
        if folder is None
        else replace(made.data, source=cell.dataset, folder=folder)
    )
    made = replace(made, seed=seed, data=data)
    if recipe == "paper":
        made = as_in_the_paper(made)
    made = smallest(made) if budget == "smoke" else _with_epochs(made, EPOCHS[budget][cell.dataset])
    return presets.changed(made, changes)


def as_in_the_paper(made: Experiment) -> Experiment:
    """The same network, trained as in App. C.2; shifts bring in zeros, up to 4 pixels on CIFAR (the released code)."""
    small = made.data.source == "mnist"
    data = replace(made.data, shift=2 if small else 4, shifted=1.0, border="blank", flip=not small, cutout=0)
    training = replace(
        made.training,
        optimiser="sgd",
        batch=128,
        learning_rate=0.1,
        momentum=0.9,
        nesterov=False,
        weight_decay=5e-4,
        head_decay=5e-4,
        schedule="milestones",
        milestones=(0.3, 0.6, 0.8),
        decay=0.2,
        warmup=0,
        clip=math.inf,
        average=0.0,
        select="last",
    )
    return replace(made, data=data, training=training, objective=Aim(kind="classification"))


def smallest(made: Experiment) -> Experiment:
    """The same kind of network with three blocks, for 8x8 digits, and training for a few steps."""
    network = replace(made.network, blocks=(1, 1, 1), padding=3 if made.network.padding else 0)
    data = replace(made.data, source=DIGITS, validation=0.15, shift=1, flip=False, cutout=0)
    warmup = min(5, made.training.warmup)
    training = replace(
        made.training, steps=30, epochs=0, batch=64, warmup=warmup, learning_rate=0.1, validate_every=30, save_every=10
    )
    return replace(made, data=data, network=network, training=training)


def _with_epochs(made: Experiment, epochs: int) -> Experiment:
    return replace(made, training=replace(made.training, epochs=epochs))

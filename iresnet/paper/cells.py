"""The networks of the paper's results, each on its data: a cell, and the experiment that makes it.

A cell is a data set and a model: the ResNet-164 baseline, "vanilla" (the architecture of an i-ResNet without its
constraint), BatchNorm (vanilla with BatchNorm in g), an i-ResNet with the coefficient c for every layer; a flow, ours
or a rival's (Table 4), whose experiments are in `flows`; a flow on a density in the plane (`planes`); a rival's
classifier (Table 3); or a hybrid with the weight w of its cross-entropy.

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
from ..data import toy
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
    ("mnist", "flow-released"): "mnist-flow-released",
    ("mnist", "flow-small"): "mnist-flow-small",
    ("mnist", "flow-noise"): "mnist-flow-noise",
    ("cifar10", "flow"): "cifar10-flow",
    ("cifar10", "flow-appendix"): "cifar10-flow-appendix",
    ("cifar10", "flow-modern"): "cifar10-flow-modern",
    ("cifar10", "flow-principal"): "cifar10-flow-principal",
    ("cifar10", "flow-noise"): "cifar10-flow-noise",
}
FLOW_NAMES = tuple(dict.fromkeys(model for _, model in FLOWS))

#: The flows of others that Table 4 has, in its order, and Glow with additive couplings; their presets by data set.
OTHERS = ("NICE", "MADE", "MAF", "Real NVP", "Glow", "additive", "FFJORD")
OTHER_FLOWS = {
    (dataset, model): preset
    for dataset in dict.fromkeys(d for d, _ in FLOWS)
    for model in OTHERS
    if (preset := f"{dataset}-{model.lower().replace(' ', '')}") in presets.PRESETS
}

#: Densities in the plane (Figure 2), and the preset of every model on them.
DENSITIES = tuple(toy.names())
PLANES = {"Glow": "toy-glow", "i-ResNet": "toy-iresnet"}

#: The preset of the hybrid on every data set that has one.
HYBRIDS = {"digits": "digits-hybrid", "mnist": "mnist-hybrid", "cifar10": "cifar10-hybrid"}

#: Classifiers beside the paper's own (Table 3), on CIFAR-10 and on the digits of the budget smoke.
RIVALS = {
    "affine Glow": "cifar10-glow-classifier",
    "additive Glow": "cifar10-additive-classifier",
    "i-RevNet": "cifar10-irevnet",
    "i-ResNet Glow-style": "cifar10-iresnet-glow-style",
}
#: Of these, those that need Adam and small rates (Sec. 5.2), whatever the recipe is.
COUPLINGS = ("affine Glow", "additive Glow")
#: Every model whose name has no number.
NAMED = (*BASELINES, *FLOW_NAMES, *OTHERS, *PLANES, *RIVALS)

#: What the budget smoke is made of, whatever the paper's set.
DIGITS = "digits"

#: The data set of what is made of none.
NONE = "-"

#: Epochs of a budget; MNIST needs fewer in the short one.
EPOCHS = {"short": {"mnist": 10, "cifar10": 30, "cifar100": 30}, "paper": dict.fromkeys(DATASETS, 200)}


@dataclass(frozen=True)
class Cell:
    """One model on one data set."""

    dataset: str
    model: str

    def __post_init__(self) -> None:
        if self.dataset not in (DIGITS, *DATASETS, *DENSITIES):
            raise ValueError(f"there is no data set {self.dataset!r} in these results. {hint(self.dataset, DATASETS)}")
        if self.dataset in DENSITIES and self.model not in PLANES:
            raise ValueError(f"there is no {self.model} on {self.dataset}. Models there: {', '.join(PLANES)}.")
        if self.is_flow and not exists(self.dataset, self.model):
            flows = FLOWS if self.model in FLOW_NAMES else [k for k in OTHER_FLOWS if k[1] == self.model]
            raise ValueError(
                f"there is no {self.model} on {self.dataset}. Flows: {', '.join(' '.join(k) for k in flows)}."
            )
        if self.is_plane and self.dataset not in DENSITIES:
            known = ", ".join(DENSITIES)
            raise ValueError(f"{self.model} is a model of densities in the plane, {known}; got {self.dataset}.")
        if self.is_rival and not exists(self.dataset, self.model):
            raise ValueError(f"there is no {self.model} on {self.dataset}; there is one on cifar10.")
        if self.weight is not None and self.dataset not in HYBRIDS:
            raise ValueError(f"there is no hybrid on {self.dataset}. Hybrids: {', '.join(HYBRIDS)}.")
        if not exists(self.dataset, self.model):
            raise ValueError(f"the paper has no {self.model} on mnist. Its cells there are vanilla and c=0.9 to c=0.5.")

    def __str__(self) -> str:
        return f"{self.dataset} {self.model}"

    @property
    def is_flow(self) -> bool:
        """Whether it is a density of images, not a classifier: ours or a rival's."""
        return self.dataset not in DENSITIES and is_flow(self.model)

    @property
    def is_other(self) -> bool:
        """Whether it is a rival's density of images."""
        return self.is_flow and self.model in OTHERS

    @property
    def is_plane(self) -> bool:
        """Whether it is a density in the plane; a Glow is one by its data."""
        return self.model in PLANES and not self.is_flow

    @property
    def is_rival(self) -> bool:
        """Whether it is a classifier that stands beside the paper's own."""
        return self.model in RIVALS

    @property
    def coefficient(self) -> float | None:
        """c, where the network is constrained."""
        return coefficient_of(self.model)

    @property
    def weight(self) -> float | None:
        """w, where it is a hybrid."""
        return weight_of(self.model)

    @property
    def folder(self) -> str:
        """The name of its run folder."""
        return f"{self.dataset}-{self.model.lower().replace('=', '').replace('-', '').replace(' ', '-')}"

    @property
    def preset(self) -> str:
        """The preset it is made from."""
        small = self.dataset == "mnist"
        if self.is_flow:
            return {**FLOWS, **OTHER_FLOWS}[self.dataset, self.model]
        if self.is_plane or self.is_rival:
            return PLANES.get(self.model) or RIVALS[self.model]
        if self.weight is not None:
            return HYBRIDS[self.dataset]
        if self.coefficient is not None:
            return f"{'mnist-iresnet64' if small else 'iresnet164'}-c{self.coefficient:g}"
        return (
            "mnist-vanilla64" if small else {RESNET: "resnet164", VANILLA: "vanilla164"}.get(self.model, "batchnorm164")
        )


def exists(dataset: str, model: str) -> bool:
    """Whether there is a preset for this model on this set: MNIST has no baseline but vanilla."""
    if dataset in DENSITIES or (model in PLANES and not is_flow(model)):
        return model in PLANES and dataset in DENSITIES
    if is_flow(model):
        return (dataset, model) in {**FLOWS, **OTHER_FLOWS}
    if model in RIVALS:
        return dataset in (DIGITS, "cifar10")
    if weight_of(model) is not None:
        return dataset in HYBRIDS
    return dataset != "mnist" or model not in (RESNET, BATCHNORM)


def is_flow(model: str) -> bool:
    """Whether a model of this name is a density of images, ours or a rival's."""
    return model in FLOW_NAMES or model in OTHERS


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


def weighted(*weights: float) -> tuple[str, ...]:
    """The names of hybrids.

    >>> weighted(0.1, 10)
    ('w=0.1', 'w=10')
    """
    return tuple(f"w={w:g}" for w in weights)


def weight_of(model: str) -> float | None:
    """w of a hybrid, by its name; None for other models."""
    return float(model[2:]) if model.startswith("w=") else None


def model_of(word: str) -> str:
    """The model that a user means; a word that means none stays as it is, and `Plan.cells` refuses it.

    >>> model_of("resnet164"), model_of("c=.9"), model_of("C0.90"), model_of("batchnorm"), model_of("w=.5")
    ('ResNet-164', 'c=0.9', 'c=0.9', 'BatchNorm', 'w=0.5')
    """
    if found := re.fullmatch(r"([cw])(?:=|(?=[\d.]))(.*)", word.lower().replace(" ", "")):
        return _numbered(found[1], found[2], word)
    return next((name for name in NAMED if _plain(name) == _plain(word)), word)


def _numbered(letter: str, number: str, word: str) -> str:
    try:
        value = float(f"{float(number):g}")  # as a name has it
    except ValueError:
        value = math.nan
    if letter == "c" and not 0 < value < 1:
        raise ValueError(f"c is a layer's coefficient, in (0, 1); got {word!r}. Use e.g. c=0.9.")
    if not 0 < value < math.inf:
        raise ValueError(f"w is the weight of the cross-entropy, a finite number above 0; got {word!r}. Use e.g. w=1.")
    return f"{letter}={value:g}"


def _plain(word: str) -> str:
    return word.strip().lower().replace("-", "").replace(" ", "")


def order(model: str) -> tuple[int, float]:
    """The place of a model in the paper's tables: baselines, then c from large to small; rivals, flows; hybrids."""
    if model in BASELINES:
        return BASELINES.index(model), 0.0
    if (c := coefficient_of(model)) is not None:
        return len(BASELINES), -c
    if (w := weight_of(model)) is not None:
        return len(BASELINES) + 3, w
    return len(BASELINES) + 1 + (model in FLOW_NAMES), 0.0


def experiment(
    cell: Cell, budget: str, recipe: str, *, seed: int = 0, folder: str | None = None, changes: Sequence[str] = ()
) -> Experiment:
    """All that decides the run of a cell; `changes` are a user's own settings, such as "training.epochs=100"."""
    made = presets.find(cell.preset)
    data = replace(made.data, source=cell.dataset, folder=made.data.folder if folder is None else folder)
    made = replace(made, seed=seed, data=data)
    if recipe == "paper" and cell.model not in COUPLINGS:
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
    few = replace(made.network, blocks=(1, 1, 1), padding=3 if made.network.padding else 0)
    network = replace(few, width=min(few.width, 16))
    data = replace(made.data, source=DIGITS, validation=0.15, shift=1, flip=False, cutout=0)
    warmup, rate = min(5, made.training.warmup), 0.1 if made.training.optimiser == "sgd" else 0.01
    training = replace(
        made.training, steps=30, epochs=0, batch=64, warmup=warmup, learning_rate=rate, validate_every=30, save_every=10
    )
    return replace(made, data=data, network=network, training=training)


def _with_epochs(made: Experiment, epochs: int) -> Experiment:
    return replace(made, training=replace(made.training, epochs=epochs))

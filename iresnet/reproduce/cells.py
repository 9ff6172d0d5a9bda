"""The cells of the paper's results: a model on a data set, as a record.

A cell has the label that a table prints and a command asks for, the preset it is made from with what is replaced in it,
and the value that the paper has for it. Tables and figures hold lists of them. Here are all that have a name, without
the paper's values; networks with the coefficient c for every layer, and hybrids with the weight w of their
cross-entropy, are made for any number: "c=0.9", "w=1".
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .. import presets
from ..data import toy

DATASETS = ("mnist", "cifar10", "cifar100")
#: What the budget smoke is made of, whatever the paper's set; the data set of what is made of none.
DIGITS, NONE = "digits", "-"
#: Densities in the plane (Figure 2).
DENSITIES = tuple(toy.names())
#: Every data set, in the order of the paper.
SETS = (DIGITS, *DATASETS, *DENSITIES, NONE)

RESNET, VANILLA, BATCHNORM = BASELINES = "ResNet-164", "vanilla", "BatchNorm"


@dataclass(frozen=True)
class Cell:
    """One model on one data set."""

    dataset: str
    label: str
    preset: str
    overrides: tuple[str, ...] = ()
    paper: Any = None  # the paper's value
    budget_of: str = ""  # a preset: its data, epochs, steps and batch stand instead of its own
    own_recipe: bool = False  # whether it is trained as its preset says where the paper's recipe is asked for

    def __str__(self) -> str:
        return f"{self.dataset} {self.label}"

    @property
    def folder(self) -> str:
        """The name of its run folder."""
        return f"{self.dataset}-{self.label.lower().replace('=', '').replace('-', '').replace(' ', '-')}"

    @property
    def purpose(self) -> str:
        """What its network is for, as its preset says: classification, density, hybrid; or plane."""
        made = presets.find(self.preset)
        return "plane" if made.data.source in DENSITIES else made.objective.kind


#: The paper's classifiers without a constraint on their layers; MNIST has its own vanilla, and no other.
CLASSIFIERS = (
    *(Cell(d, RESNET, "resnet164") for d in (DIGITS, "cifar10", "cifar100")),
    *(Cell(d, VANILLA, "mnist-vanilla64" if d == "mnist" else "vanilla164") for d in (DIGITS, *DATASETS)),
    *(Cell(d, BATCHNORM, "batchnorm164") for d in (DIGITS, "cifar10", "cifar100")),
)

#: Densities of images.
FLOWS = (
    Cell(DIGITS, "flow", "digits-density"),
    *(Cell("mnist", name, f"mnist-{name}") for name in ("flow", "flow-released", "flow-small", "flow-noise")),
    *(Cell("cifar10", name, f"cifar10-{name}") for name in ("flow", "flow-appendix", "flow-modern")),
    *(Cell("cifar10", name, f"cifar10-{name}") for name in ("flow-principal", "flow-noise")),
)

#: The flows of others that Table 4 has, in its order, and Glow with additive couplings: trained with the budget of our
#: flow on the same set, at their own rates.
OTHER_FLOWS = tuple(
    Cell(ours.dataset, label, preset, budget_of=ours.preset, own_recipe=True)
    for ours in FLOWS
    for label in ("NICE", "MADE", "MAF", "Real NVP", "Glow", "additive", "FFJORD")
    if ours.label == "flow" and (preset := f"{ours.dataset}-{label.lower().replace(' ', '')}") in presets.PRESETS
)

PLANES = tuple(
    Cell(d, label, f"toy-{label.lower().replace('-', '')}") for d in DENSITIES for label in ("Glow", "i-ResNet")
)

#: Classifiers beside the paper's own (Table 3). Couplings need Adam and small rates (Sec. 5.2), whatever the recipe is.
RIVALS = tuple(
    Cell(d, label, f"cifar10-{name}", own_recipe=couplings)
    for d in (DIGITS, "cifar10")
    for label, name, couplings in (
        ("affine Glow", "glow-classifier", True),
        ("additive Glow", "additive-classifier", True),
        ("i-RevNet", "irevnet", False),
        ("i-ResNet Glow-style", "iresnet-glow-style", False),
    )
)

#: The preset of the hybrid on every data set that has one.
HYBRIDS = {DIGITS: "digits-hybrid", "mnist": "mnist-hybrid", "cifar10": "cifar10-hybrid"}

NAMED = {(c.dataset, c.label): c for c in (*CLASSIFIERS, *FLOWS, *OTHER_FLOWS, *PLANES, *RIVALS)}
LABELS = tuple(dict.fromkeys(label for _, label in NAMED))
OURS, OTHERS = (tuple(dict.fromkeys(c.label for c in cells)) for cells in (FLOWS, OTHER_FLOWS))


def find(dataset: str, label: str) -> Cell | None:
    """The cell of this label on a data set; None where there is none.

    >>> find("mnist", "vanilla").preset, find("cifar10", "c=0.7").preset, find("mnist", "ResNet-164")
    ('mnist-vanilla64', 'iresnet164-c0.7', None)
    """
    match numbered(label):
        case "c", number if dataset in (DIGITS, *DATASETS):
            return Cell(dataset, label, f"{'mnist-iresnet64' if dataset == 'mnist' else 'iresnet164'}-c{number:g}")
        case "w", number if dataset in HYBRIDS:
            return Cell(dataset, label, HYBRIDS[dataset], (f"objective.weight={number!r}",))
    return NAMED.get((dataset, label))


def on(dataset: str, labels: Iterable[str] | Mapping[str, Any], paper: Any = None) -> tuple[Cell, ...]:
    """The cells of these labels that a data set has, with the paper's value: of each, or the same for all."""
    values = labels if isinstance(labels, Mapping) else dict.fromkeys(labels, paper)
    return tuple(replace(cell, paper=v) for label, v in values.items() if (cell := find(dataset, label)))


def constrained(*coefficients: float, letter: str = "c") -> tuple[str, ...]:
    """The labels of i-ResNets.

    >>> constrained(0.9, 0.5)
    ('c=0.9', 'c=0.5')
    """
    return tuple(f"{letter}={c:g}" for c in coefficients)


def numbered(label: str) -> tuple[str, float] | None:
    """The letter and number of a label that has them.

    >>> numbered("c=0.9"), numbered("w=1"), numbered("vanilla")
    (('c', 0.9), ('w', 1.0), None)
    """
    return (label[0], float(label[2:])) if label[:2] in ("c=", "w=") else None


def label_of(word: str) -> str:
    """The label that a user means; a word that means none stays as it is, and `Plan.chosen` refuses it.

    >>> label_of("resnet164"), label_of("c=.9"), label_of("C0.90"), label_of("batchnorm"), label_of("w=.5")
    ('ResNet-164', 'c=0.9', 'c=0.9', 'BatchNorm', 'w=0.5')
    """
    if found := re.fullmatch(r"([cw])(?:=|(?=[\d.]))(.*)", word.lower().replace(" ", "")):
        return _with_number(found[1], found[2], word)
    return next((label for label in LABELS if _plain(label) == _plain(word)), word)


def _with_number(letter: str, number: str, word: str) -> str:
    try:
        value = float(f"{float(number):g}")  # as a label has it
    except ValueError:
        value = math.nan
    if letter == "c" and not 0 < value < 1:
        raise ValueError(f"c is a layer's coefficient, in (0, 1); got {word!r}. Use e.g. c=0.9.")
    if not 0 < value < math.inf:
        raise ValueError(f"w is the weight of the cross-entropy, a finite number above 0; got {word!r}. Use e.g. w=1.")
    return f"{letter}={value:g}"


def _plain(word: str) -> str:
    return word.strip().lower().replace("-", "").replace(" ", "")


def order(label: str) -> tuple[int, float]:
    """The place of a label in the paper's tables: baselines, then c from large to small; rivals, flows; hybrids."""
    match numbered(label):
        case "c", number:
            return len(BASELINES), -number
        case "w", number:
            return len(BASELINES) + 3, number
    return (BASELINES.index(label) if label in BASELINES else len(BASELINES) + 1 + (label in OURS)), 0.0

"""The cells of the paper's results: one model on one dataset, as a record.

A cell has the label that tables print and commands accept, the preset it is made from with its overrides, and the
paper's value. Tables and figures hold lists of cells. Here are all cells with a name, without the paper's values. Two
families exist for any number: networks with the coefficient c in every layer, "c=0.9", and hybrids with the weight w
of the cross-entropy, "w=1".
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .. import presets
from ..data import toy
from ..presets import Experiment

DATASETS = ("mnist", "cifar10", "cifar100")
#: The dataset of the smoke budget, whatever the paper uses; and the name for no dataset.
DIGITS, NONE = "digits", "-"
#: Densities in the plane (Figure 2).
DENSITIES = tuple(toy.names())
#: Every dataset, in the order of the paper.
ALL_DATASETS = (DIGITS, *DATASETS, *DENSITIES, NONE)

NO_PADDING = "no padding"
RESNET, VANILLA, BATCHNORM = BASELINES = "ResNet-164", "vanilla", "BatchNorm"


@dataclass(frozen=True)
class Cell:
    """One model on one dataset."""

    dataset: str
    label: str
    preset: str
    overrides: tuple[str, ...] = ()  # settings that replace those of the preset
    paper: Any = None  # the paper's value
    budget_of: str = ""  # a preset whose data, epochs, steps and batch size replace those of the cell's own
    own_optimiser: bool = False  # whether it keeps its preset's optimiser where the paper's recipe is requested

    def __str__(self) -> str:
        return f"{self.dataset} {self.label}"

    @property
    def folder(self) -> str:
        """The name of its run folder."""
        return f"{self.dataset}-{self.label.lower().replace('=', '').replace('-', '').replace(' ', '-')}"

    @property
    def experiment(self) -> Experiment:
        """Its preset with its overrides."""
        return presets.with_overrides(presets.find(self.preset), self.overrides)

    @property
    def purpose(self) -> str:
        """What its network is for: the kind of its objective; or plane."""
        return "plane" if self.experiment.data.source in DENSITIES else self.experiment.objective.kind


#: The paper's unconstrained classifiers. MNIST has a vanilla network of its own, and no other.
CLASSIFIERS = (
    *(Cell(d, RESNET, "resnet164") for d in (DIGITS, "cifar10", "cifar100")),
    *(Cell(d, VANILLA, "mnist-vanilla64" if d == "mnist" else "vanilla164") for d in (DIGITS, *DATASETS)),
    *(Cell(d, BATCHNORM, "batchnorm164") for d in (DIGITS, "cifar10", "cifar100")),
)

#: Our flows on images.
FLOWS = (
    Cell(DIGITS, "flow", "digits-density"),
    *(Cell("mnist", name, f"mnist-{name}") for name in ("flow", "flow-released", "flow-small", "flow-noise")),
    *(Cell("cifar10", name, f"cifar10-{name}") for name in ("flow", "flow-appendix", "flow-modern")),
    *(Cell("cifar10", name, f"cifar10-{name}") for name in ("flow-principal", "flow-noise")),
)

#: The flows that Table 4 compares with, in its order, and Glow with additive couplings. They have the budget of our
#: flow on the same dataset and their own learning rates.
OTHER_FLOWS = tuple(
    Cell(ours.dataset, label, preset, budget_of=ours.preset, own_optimiser=True)
    for ours in FLOWS
    for label in ("NICE", "MADE", "MAF", "Real NVP", "Glow", "additive", "FFJORD")
    if ours.label == "flow" and (preset := f"{ours.dataset}-{label.lower().replace(' ', '')}") in presets.PRESETS
)

#: Flows in the plane (Figure 2): a Glow, the paper's i-ResNet with ELU, and ours with sines.
PLANES = tuple(
    Cell(d, label, preset)
    for d in DENSITIES
    for label, preset in (("Glow", "toy-glow"), ("i-ResNet", "toy-iresnet"), ("i-ResNet sine", "toy-iresnet-sine"))
)

#: The classifiers that Table 3 compares with. Couplings need Adam and small learning rates (Sec. 5.2) in any recipe.
OTHER_CLASSIFIERS = tuple(
    Cell(d, label, f"cifar10-{name}", own_optimiser=couplings)
    for d in (DIGITS, "cifar10")
    for label, name, couplings in (
        ("affine Glow", "glow-classifier", True),
        ("additive Glow", "additive-classifier", True),
        ("i-RevNet", "irevnet", False),
        ("i-ResNet Glow-style", "iresnet-glow-style", False),
    )
)

#: Networks of the paper's text: c = 0.9 without its channels of zeros (App. C.2), and the Glows of Table 3 with the
#: optimiser of the residual networks (Sec. 5.2).
SGD = ("optimiser=sgd", "learning_rate=0.1", "weight_decay=5e-4", "head_decay=5e-4", "clip=10.0")
TEXT_CLASSIFIERS = tuple(
    Cell(d, label, preset, overrides)
    for d in (DIGITS, "cifar10")
    for label, preset, overrides in (
        (NO_PADDING, "iresnet164-c0.9", ("network.padding=0",)),
        ("affine Glow SGD", "cifar10-glow-classifier", SGD),
        ("additive Glow SGD", "cifar10-additive-classifier", SGD),
    )
)

#: The preset of the hybrid by dataset.
HYBRIDS = {DIGITS: "digits-hybrid", "mnist": "mnist-hybrid", "cifar10": "cifar10-hybrid"}

#: Hybrids with few labels, and the same networks trained on the labelled images alone.
FEW_LABELS = tuple(
    Cell(d, f"{name} {labels}", f"{d}-semi-supervised", (f"data.labelled={labels}", f"objective.density={density}"))
    for d in (DIGITS, "mnist")
    for labels in (10, 100, 1000)
    for name, density in (("hybrid", 1.0), ("labels alone", 0.0))
)

#: Classifiers whose codes are compared with those of flows.
CLASSIFIER = "classifier"
PROBED_CLASSIFIERS = tuple(Cell(d, CLASSIFIER, f"{d}-classifier") for d in (DIGITS, "mnist"))

NAMED_CELLS = {
    (c.dataset, c.label): c
    for cells in (
        *(CLASSIFIERS, FLOWS, OTHER_FLOWS, PLANES, OTHER_CLASSIFIERS, TEXT_CLASSIFIERS),
        *(FEW_LABELS, PROBED_CLASSIFIERS),
    )
    for c in cells
}
LABELS = tuple(dict.fromkeys(label for _, label in NAMED_CELLS))
FLOW_LABELS, OTHER_FLOW_LABELS = (tuple(dict.fromkeys(c.label for c in cells)) for cells in (FLOWS, OTHER_FLOWS))


def find_cell(dataset: str, label: str) -> Cell | None:
    """Return the cell of a label on a dataset, or None.

    >>> find_cell("mnist", "vanilla").preset, find_cell("cifar10", "c=0.7").preset, find_cell("mnist", "ResNet-164")
    ('mnist-vanilla64', 'iresnet164-c0.7', None)
    """
    match parse_number(label):
        case "c", number if dataset in (DIGITS, *DATASETS):
            return Cell(dataset, label, f"{'mnist-iresnet64' if dataset == 'mnist' else 'iresnet164'}-c{number:g}")
        case "w", number if dataset in HYBRIDS:
            return Cell(dataset, label, HYBRIDS[dataset], (f"objective.weight={number!r}",))
    return NAMED_CELLS.get((dataset, label))


def cells_on(dataset: str, labels: Iterable[str] | Mapping[str, Any], paper: Any = None) -> tuple[Cell, ...]:
    """Return the cells of these labels that exist on a dataset, with the paper's value by label or one for all."""
    values = labels if isinstance(labels, Mapping) else dict.fromkeys(labels, paper)
    return tuple(replace(cell, paper=v) for label, v in values.items() if (cell := find_cell(dataset, label)))


def number_labels(letter: str, *numbers: float) -> tuple[str, ...]:
    """Return the labels of i-ResNets ("c") or hybrids ("w").

    >>> number_labels("c", 0.9, 0.5)
    ('c=0.9', 'c=0.5')
    """
    return tuple(f"{letter}={number:g}" for number in numbers)


def parse_number(label: str) -> tuple[str, float] | None:
    """Return the letter and number of a label that has them.

    >>> parse_number("c=0.9"), parse_number("w=1"), parse_number("vanilla")
    (('c', 0.9), ('w', 1.0), None)
    """
    return (label[0], float(label[2:])) if label[:2] in ("c=", "w=") else None


def to_label(word: str) -> str:
    """Return the label that a user's word means; an unknown word is returned unchanged and `Plan.choose` refuses it.

    >>> to_label("resnet164"), to_label("c=.9"), to_label("C0.90"), to_label("batchnorm"), to_label("w=.5")
    ('ResNet-164', 'c=0.9', 'c=0.9', 'BatchNorm', 'w=0.5')
    """
    if match := re.fullmatch(r"([cw])(?:=|(?=[\d.]))(.*)", word.lower().replace(" ", "")):
        return _number_label(match[1], match[2], word)
    return next((label for label in LABELS if _letters(label) == _letters(word)), word)


def _number_label(letter: str, number: str, word: str) -> str:
    try:
        value = float(f"{float(number):g}")  # with the digits of a label
    except ValueError:
        value = math.nan
    if letter == "c" and not 0 < value < 1:
        raise ValueError(f"c is a layer's coefficient, in (0, 1); got {word!r}. Use e.g. c=0.9.")
    if not 0 < value < math.inf:
        raise ValueError(f"w is the weight of the cross-entropy, a finite number above 0; got {word!r}. Use e.g. w=1.")
    return f"{letter}={value:g}"


def _letters(word: str) -> str:
    return word.strip().lower().replace("-", "").replace(" ", "")


def sort_key(label: str) -> tuple[int, float]:
    """Order labels as the paper does: baselines, c from large to small, other models, our flows, hybrids by w."""
    match parse_number(label):
        case "c", number:
            return len(BASELINES), -number
        case "w", number:
            return len(BASELINES) + 3, number
    return (BASELINES.index(label) if label in BASELINES else len(BASELINES) + 1 + (label in FLOW_LABELS)), 0.0

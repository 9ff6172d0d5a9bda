"""How often a classifier is wrong, with the interval that so many rows allow."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..classifier import Classifier
from ..data import Dataset
from ..hybrid import Hybrid
from ..train.objective import MISSING, bin_centres
from .chunks import in_chunks
from .likelihood import CHUNK

#: The two-sided 95 % quantile of the normal distribution.
NORMAL_95 = 1.959964


@dataclass(frozen=True)
class Error:
    """Classification error in percent, with its 95 % interval."""

    value: float
    wrong: int
    rows: int
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} % ({self.wrong} of {self.rows}; 95 % interval {self.low:.2f} to {self.high:.2f} %)"


def has_head(model: nn.Module) -> bool:
    """Whether the model classifies."""
    return isinstance(model, Classifier | Hybrid)


def as_classifier(model: nn.Module, wish: str = "classes need a head") -> Classifier:
    """The classifier of a model, or the reason why it has none."""
    if isinstance(model, Hybrid):
        return model.classifier
    if isinstance(model, Classifier):
        return model
    raise ValueError(f"{wish}; this model only has a density. Train with objective.kind=hybrid.")


@torch.no_grad()
def logits(model: nn.Module, data: Dataset) -> Tensor:
    """The logits of every row, integers at the middle of their bins."""
    view = as_classifier(model)
    return in_chunks(lambda x: view(bin_centres(x, data.schema.levels)), data.x, CHUNK)


def error(model: nn.Module, data: Dataset) -> Error:
    """The classification error over the rows that have a label."""
    y = labels(data)
    predictions = logits(model, data).argmax(dim=1)
    return error_of(int(((predictions != y) & (y != MISSING)).sum()), int((y != MISSING).sum()))


def labels(data: Dataset) -> Tensor:
    """The labels of data that must have some."""
    if data.y is None or not bool((data.y != MISSING).any()):
        raise ValueError("an error needs labels; these data have none. Name the label column, or ask for scores.")
    return data.y


def labelled(data: Dataset) -> Dataset:
    """The rows of such data that have a label."""
    return data.take((labels(data) != MISSING).nonzero().flatten())


def error_of(wrong: int, rows: int) -> Error:
    """An error rate with Wilson's interval.

    >>> print(error_of(6, 360))
    1.67 % (6 of 360; 95 % interval 0.77 to 3.59 %)
    """
    p, z = wrong / rows, NORMAL_95
    middle, scale = p + z * z / (2 * rows), 1 + z * z / rows
    half = z * math.sqrt(p * (1 - p) / rows + z * z / (4 * rows * rows))
    return Error(100 * p, wrong, rows, 100 * max(0.0, middle - half) / scale, 100 * min(scale, middle + half) / scale)


def confusion(model: nn.Module, data: Dataset) -> list[list[int]]:
    """Rows by true class (first index) and predicted class."""
    y, predictions, k = labels(data), logits(model, data).argmax(dim=1), len(data.schema.classes)
    known = y != MISSING
    return torch.bincount(k * y[known] + predictions[known], minlength=k * k).reshape(k, k).tolist()

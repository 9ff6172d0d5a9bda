"""Classification error on a dataset, with its 95 % confidence interval (Wilson)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data import Dataset
from ..data.dataset import check_dataset, check_unweighted
from ..data.labels import MISSING
from ..data.units import bin_centres
from ..model import Model
from .chunks import CHUNK, in_chunks
from .roles import as_classifier

#: The two-sided 95 % quantile of the normal distribution.
NORMAL_95 = 1.959964


@dataclass(frozen=True)
class Error:
    """Classification error in percent, with its 95 % confidence interval."""

    value: float
    wrong: int
    rows: int
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} % ({self.wrong} of {self.rows}; 95 % interval {self.low:.2f} to {self.high:.2f} %)"


@torch.no_grad()
def logits(model: Model, data: Dataset) -> Tensor:
    """Compute the logits of every sample; integers are placed at the centres of their bins."""
    check_dataset(data)
    view = as_classifier(model)
    dtype = next((p.dtype for p in view.parameters()), torch.float32)
    return in_chunks(lambda x: view(bin_centres(x, data.schema.levels).to(dtype)), data.x, CHUNK)


def error(model: Model, data: Dataset) -> Error:
    """Compute the classification error over the samples that have a label."""
    y = require_labels(data)
    check_unweighted(data)
    predictions = logits(model, data).argmax(dim=1)
    return error_from_counts(int(((predictions != y) & (y != MISSING)).sum()), int((y != MISSING).sum()))


def require_labels(data: Dataset) -> Tensor:
    """Return the labels of a dataset; raise a `ValueError` if it has none."""
    check_dataset(data)
    if data.y is None or not bool((data.y != MISSING).any()):
        raise ValueError(
            "this metric needs labels; the dataset has none. Name the label column, or use `iresnet score`."
        )
    return data.y


def labelled_samples(data: Dataset) -> Dataset:
    """Select the samples that have a label; raise a `ValueError` if there are none."""
    return data.take((require_labels(data) != MISSING).nonzero().flatten())


def error_from_counts(wrong: int, rows: int) -> Error:
    """Compute an error rate with Wilson's interval.

    >>> print(error_from_counts(6, 360))
    1.67 % (6 of 360; 95 % interval 0.77 to 3.59 %)
    """
    p, z = wrong / rows, NORMAL_95
    middle, scale = p + z * z / (2 * rows), 1 + z * z / rows
    half = z * math.sqrt(p * (1 - p) / rows + z * z / (4 * rows * rows))
    return Error(100 * p, wrong, rows, 100 * max(0.0, middle - half) / scale, 100 * min(scale, middle + half) / scale)


def confusion(model: Model, data: Dataset) -> list[list[int]]:
    """Count the samples by true class (first index) and predicted class (second index)."""
    y = require_labels(data)
    predictions = logits(model, data).argmax(dim=1)
    k = len(data.schema.classes)
    check_unweighted(data)
    known = y != MISSING
    return torch.bincount(k * y[known] + predictions[known], minlength=k * k).reshape(k, k).tolist()

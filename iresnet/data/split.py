"""Splits: which rows are held out, and which labels are kept.

Rows are held out by systematic sampling: shuffled, sorted by class, and every k-th taken from a random start. Every
row has the same chance, and every class gives its share, rounded up or down.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from .dataset import Dataset, stream


def check_part(name: str, part: float) -> None:
    """Refuse what is neither a part of the rows, below 1, nor a number of rows."""
    if not 0 < part < math.inf or (part >= 1 and part != int(part)):
        raise ValueError(f"{name} must be a part in (0, 1) or a number of rows; got {part}. Use e.g. 0.15 or 5000.")


def count(name: str, part: float, rows: int) -> int:
    """How many of the rows `part` means; at least one is held out and one is left.

    >>> count("validation", 0.15, 100), count("validation", 40, 100)
    (15, 40)
    """
    n = int(part) if part >= 1 else max(1, round(part * rows))
    if n >= rows:
        raise ValueError(
            f"{name} takes {n} of {rows} rows, which leaves none to train on. Lower it, e.g. --set data.{name}=0.15, "
            "or give more rows."
        )
    return n


def hold_out(dataset: Dataset, n: int, generator: torch.Generator) -> tuple[Dataset, Dataset]:
    """(the others, n rows), the same share of every class; both keep the order of the rows."""
    rows = len(dataset)
    classes = torch.zeros(rows, dtype=torch.int64) if dataset.y is None else dataset.y.cpu()
    held = torch.zeros(rows, dtype=torch.bool)
    held[spread(classes, n, generator)] = True
    return dataset.take((~held).nonzero()[:, 0]), dataset.take(held.nonzero()[:, 0])


def hold_out_last(dataset: Dataset, n: int) -> tuple[Dataset, Dataset]:
    """(the others, the last n rows): the custom for sets whose order is known and already mixed."""
    rows = torch.arange(len(dataset))
    return dataset.take(rows[:-n]), dataset.take(rows[-n:])


def subsample(dataset: Dataset, n: int) -> Dataset:
    """The data set itself, or n of its rows if it has more: always the same ones, in the order of the file.

    They are drawn without replacement, since the first rows of a sorted file are those of its first classes.
    """
    if n < 1:
        raise ValueError(f"the number of rows must be at least 1; got {n}.")
    if len(dataset) <= n:
        return dataset
    return dataset.take(torch.randperm(len(dataset), generator=stream(0, "some"))[:n].sort().values)


def keep_labels(dataset: Dataset, part: float, generator: torch.Generator) -> Dataset:
    """The same rows with that part of the labels, of every class alike; the others become -1."""
    if part == 1:
        return dataset
    if dataset.y is None:
        raise ValueError(f"labelled keeps a part of the labels; got {part} for rows without labels. Set labelled = 1.")
    known = (dataset.y >= 0).nonzero()[:, 0].cpu()
    classes = dataset.y.cpu()[known]
    kept = known[spread(classes, round(part * len(known)), generator)]
    y = torch.full_like(dataset.y, -1)
    y[kept] = dataset.y[kept]
    lost = set(classes.tolist()) - set(y[kept].tolist())
    if lost:
        name = dataset.schema.classes[min(lost)]
        raise ValueError(f"labelled = {part} leaves no label of class {name!r} among {len(known)}. Raise it.")
    return replace(dataset, y=y)


def spread(classes: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """n of the indices of `classes`, every class in proportion to its size, rounded up or down."""
    shuffled = torch.randperm(len(classes), generator=generator)
    by_class = shuffled[classes[shuffled].argsort(stable=True)]
    start = torch.rand((), generator=generator, dtype=torch.float64)
    steps = (torch.arange(n) + start) * (len(classes) / max(n, 1))
    return by_class[steps.long().clamp(max=len(classes) - 1)]

"""Splits: which samples are held out, and which labels are kept.

Samples are held out by systematic sampling: shuffled, sorted by class, and every k-th one taken from a random start.
Every sample is equally likely to be held out, and every class is represented in proportion, rounded up or down. So is a
fraction of the labels; a number of labels is kept in turn, one of every class, so that all classes have as many.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from .dataset import Dataset, concatenate
from .labels import MISSING
from .sampling import seeded_generator


def check_fraction(name: str, value: float) -> None:
    """Refuse a value that is neither a fraction below 1 nor a whole number of samples."""
    if not 0 < value < math.inf or (value >= 1 and value != int(value)):
        raise ValueError(
            f"{name} must be a fraction in (0, 1) or a number of samples; got {value}. Use e.g. 0.15 or 5000."
        )


def held_out_count(name: str, value: float, samples: int) -> int:
    """Convert a fraction or a count to a number of samples; at least one is held out and one is left.

    >>> held_out_count("validation", 0.15, 100), held_out_count("validation", 40, 100)
    (15, 40)
    """
    n = int(value) if value >= 1 else max(1, round(value * samples))
    if n >= samples:
        raise ValueError(
            f"{name} holds out {n} of {samples} samples, which leaves none to train on. Lower it, e.g. --set "
            f"data.{name}=0.15, or add samples."
        )
    return n


def hold_out(dataset: Dataset, n: int, generator: torch.Generator) -> tuple[Dataset, Dataset]:
    """Split into (the rest, n samples), stratified by class; both keep the order of the samples."""
    classes = torch.zeros(len(dataset), dtype=torch.int64) if dataset.y is None else dataset.y.cpu()
    return divide(dataset, stratified_indices(classes, n, generator))


def divide(dataset: Dataset, rows: Tensor) -> tuple[Dataset, Dataset]:
    """Split into (the rest, the samples at these positions); both keep the order of the samples."""
    held = torch.zeros(len(dataset), dtype=torch.bool)
    held[rows] = True
    return dataset.take((~held).nonzero()[:, 0]), dataset.take(held.nonzero()[:, 0])


def test_rows(y: Tensor | None, rows: int, value: float) -> Tensor:
    """Draw the samples that are held out for the test: the same for every seed, a fraction or a number of them."""
    classes = torch.zeros(rows, dtype=torch.int64) if y is None else y.cpu()
    return stratified_indices(classes, held_out_count("test", value, rows), seeded_generator(0, "test"))


def hold_out_last(dataset: Dataset, n: int) -> tuple[Dataset, Dataset]:
    """Split into (the rest, the last n samples): the convention for datasets that are published in shuffled order."""
    order = torch.arange(len(dataset))
    return dataset.take(order[:-n]), dataset.take(order[-n:])


def subsample(dataset: Dataset, n: int) -> Dataset:
    """Return the dataset, or n of its samples if it has more: always the same ones, in their original order.

    They are drawn at random without replacement, since the first samples of a sorted file are all of its first classes.
    """
    if n < 1:
        raise ValueError(f"the number of samples must be at least 1; got {n}.")
    if len(dataset) <= n:
        return dataset
    return dataset.take(torch.randperm(len(dataset), generator=seeded_generator(0, "some"))[:n].sort().values)


#: The random keys that are skipped at a time.
SKIPPED = 1_000_000


class RandomRows:
    """Draws n samples from those that come in chunks, all equally likely: always the same ones, in their order."""

    def __init__(self, n: int) -> None:
        self.n, self.generator = n, seeded_generator(0, "some of a stream")
        self.keys = torch.empty(0, dtype=torch.float64)
        self._kept: Dataset | None = None

    @property
    def dataset(self) -> Dataset:
        """The samples that were drawn."""
        if self._kept is None:
            raise ValueError("a dataset needs at least one sample; got none.")
        return self._kept

    def add(self, data: Dataset) -> None:
        """Add a chunk: every sample gets a random key, and those with the smallest are kept."""
        self._keep(data, self._draw(len(data)))

    def skip(self, rows: int) -> None:
        """Continue as after so many samples, which are drawn from elsewhere."""
        for start in range(0, rows, SKIPPED):
            self._draw(min(SKIPPED, rows - start))

    def merge(self, later: RandomRows) -> None:
        """Add the samples drawn from later chunks, by a generator that had skipped those before."""
        if later._kept is not None:
            self._keep(later._kept, later.keys)

    def _draw(self, n: int) -> Tensor:
        return torch.rand(n, generator=self.generator, dtype=torch.float64)

    def _keep(self, data: Dataset, more: Tensor) -> None:
        keys = torch.cat([self.keys, more])
        kept = keys.argsort()[: self.n].sort().values
        before = 0 if self._kept is None else len(self._kept)
        old, new = kept[kept < before], kept[kept >= before] - before
        parts = [p.take(i) for p, i in ((self._kept, old), (data, new)) if p is not None and len(i)]
        self._kept, self.keys = concatenate(parts), keys[kept]


def keep_labels(dataset: Dataset, labelled: float, generator: torch.Generator) -> Dataset:
    """Keep a fraction of the labels, stratified by class, or a number of them, balanced; the others become -1.

    For generators of the same seed, the labels of a smaller number are among those of a larger one.
    """
    if labelled == 1:
        return dataset
    if dataset.y is None:
        raise ValueError(f"labelled must be 1 for data without labels; got {labelled}. Set labelled = 1.")
    known = (dataset.y >= 0).nonzero()[:, 0].cpu()
    classes = dataset.y.cpu()[known]
    if labelled > len(known):
        raise ValueError(f"labelled = {labelled} exceeds the {len(known)} labels of the training data. Lower it.")
    draw, n = (balanced_indices, int(labelled)) if labelled > 1 else (stratified_indices, round(labelled * len(known)))
    kept = known[draw(classes, n, generator)]
    y = torch.full_like(dataset.y, MISSING)
    y[kept] = dataset.y[kept]
    lost = set(classes.tolist()) - set(y[kept].tolist())
    if lost:
        name = dataset.schema.classes[min(lost)]
        raise ValueError(
            f"labelled = {labelled} keeps no label of class {name!r} out of {len(known)} labels. Raise it."
        )
    return replace(dataset, y=y)


def stratified_indices(classes: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Draw n of the indices of `classes`, each class in proportion to its size, rounded up or down."""
    shuffled = torch.randperm(len(classes), generator=generator)
    by_class = shuffled[classes[shuffled].argsort(stable=True)]
    start = torch.rand((), generator=generator, dtype=torch.float64)
    steps = (torch.arange(n) + start) * (len(classes) / max(n, 1))
    return by_class[steps.long().clamp(max=len(classes) - 1)]


def balanced_indices(classes: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Draw n of the indices of `classes`, in turn one of every class that has one left.

    >>> classes = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    >>> classes[balanced_indices(classes, 6, torch.Generator())].tolist()
    [0, 1, 2, 0, 1, 0]
    """
    shuffled = torch.randperm(len(classes), generator=generator)
    by_class, counts = shuffled[classes[shuffled].argsort(stable=True)], classes.bincount()
    turn = torch.arange(len(classes)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    return by_class[turn.argsort(stable=True)[:n]]

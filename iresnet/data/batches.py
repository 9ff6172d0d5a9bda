"""Batches of a dataset. Batch t is a function of (seed, t) alone.

Epoch e = t // n, with n batches per epoch, visits the samples in an order drawn from (seed, e), and the augmentation of
batch t draws from (seed, t). A run resumed at step t therefore sees the same batches as one that never stopped. All
random numbers are drawn on the CPU, so they do not depend on the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from ..spelling import at_least
from .augment import Augment, to_device
from .dataset import Batch, Dataset
from .sampling import seeded_generator, weighted_indices


class Batches:
    """An endless stream of batches of `size` samples (of all samples, if there are fewer); `batches[t]` is batch t.

    Every sample appears at most once in an epoch of `per_epoch` batches, or as often as its weight says if the dataset
    has weights. An incomplete last batch is dropped; each epoch drops other samples. With `labelled`, that many samples
    with a label (all, if there are fewer) are appended to every batch, from an epoch of their own: where labels are
    few, most batches would have none. `stream` names the random numbers, so that those of the appended samples are
    independent of the others.
    """

    def __init__(
        self,
        dataset: Dataset,
        size: int,
        *,
        seed: int = 0,
        augment: Augment | None = None,
        labelled: int = 0,
        stream: str = "",
    ) -> None:
        if size < 1:
            raise ValueError(f"the batch size must be at least 1; got {size}.")
        self.dataset, self.seed, self.augment = dataset, seed, Augment() if augment is None else augment
        self.augment.check(dataset.schema.shape)
        self.size = min(size, dataset.total)
        self.per_epoch = dataset.total // self.size
        self.stream, self.labelled = stream, None
        if labelled:
            self.labelled = Batches(_labelled(dataset), labelled, seed=seed, augment=augment, stream="labelled ")
        self._epoch, self._order = -1, torch.empty(0)

    def __getitem__(self, step: int) -> Batch:
        at_least(0, step=step)
        epoch, place = divmod(step, self.per_epoch)
        x, y = self._samples(epoch, place * self.size, (place + 1) * self.size)
        x = self.augment(x, seeded_generator(self.seed, f"{self.stream}augment", step))
        return (x, y) if y is None or self.labelled is None else _joined((x, y), self.labelled[step])

    def _samples(self, epoch: int, start: int, stop: int) -> Batch:
        """The samples start, ..., stop - 1 of an epoch."""
        dataset = self.dataset
        if dataset.blocks is not None:
            x, y = dataset.blocks.batch(self.seed, epoch, start, stop)
            return to_device(x, dataset.x.device), None if y is None else to_device(y, dataset.x.device)
        indices = self._order_of(epoch)[start:stop]
        return dataset.x[indices], None if dataset.y is None else dataset.y[indices]

    @property
    def labelled_size(self) -> int:
        """The number of samples with a label that are appended to every batch."""
        return 0 if self.labelled is None else self.labelled.size

    def starting_at(self, step: int) -> Iterator[Batch]:
        """Iterate over batches step, step + 1, ... without end."""
        return (self[t] for t in itertools.count(step))

    def _order_of(self, epoch: int) -> Tensor:
        """The order of the samples in an epoch; the last one computed is cached."""
        if epoch != self._epoch:
            generator, n = seeded_generator(self.seed, "order", epoch), len(self.dataset)
            order = torch.randperm(n, generator=generator)
            if self.dataset.weights is not None:
                order = weighted_indices(self.dataset.weights.cpu(), n, generator)[order]
            self._epoch, self._order = epoch, to_device(order, self.dataset.x.device)
        return self._order


def _labelled(dataset: Dataset) -> Dataset:
    """The samples that have a label."""
    if dataset.y is None or not bool((dataset.y >= 0).any()):
        raise ValueError("batches with labelled samples need data with labels; got none. Set labelled_batch = 0.")
    return dataset.take((dataset.y >= 0).nonzero()[:, 0])


def _joined(*batches: Batch) -> Batch:
    (x, y), (more_x, more_y) = batches
    assert y is not None
    assert more_y is not None
    return torch.cat([x, more_x]), torch.cat([y, more_y])

"""The metrics of `evaluate` for samples that come in chunks: sums over them, in memory that does not grow.

Errors are counted, means and standard errors follow from the sums of `moments`, and noise and probes continue from
chunk to chunk, so the metrics are those of all samples at once. The inverse is computed for some samples, drawn at
random.

Several processes can share the chunks, each a contiguous part of them: noise and draws continue as after the samples
of the ranks before, and rank 0 merges the sums. So counts and the samples of the inverse are those of one process, and
means are the same up to the rounding of their sums.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..data import Dataset, Splits
from ..data.labels import MISSING
from ..data.split import RandomRows
from ..device import device_of
from ..model import Model
from ..train.distributed import ALONE, Group
from .baselines import BaselineSums, Comparison, why_no_baselines
from .classes import confusion, error_from_counts
from .density import DensitySums, check_mean_counts
from .draws import Likelihoods, draw_seeds
from .roles import has_density, has_head, has_inverse
from .solving import inverse


def evaluate_chunks(
    model: Model,
    chunks: Iterable[Dataset],
    *,
    split: str = "test",
    draws: int = 8,
    rows: int = 500,
    fitting: Splits | None = None,
    group: Group = ALONE,
    size: int = 0,
) -> dict[str, Any]:
    """Compute the metrics of `evaluate` for the samples of all chunks, which are moved to the model's device.

    In a group, `chunks` are those of this process. The first begins at sample `rows[0]` of all, and each of those
    before, which are another's, has `size` samples. Rank 0 returns the metrics, the others nothing.
    """
    device = device_of(model)
    adder = _Adder(model, draws, fitting, Sums(RandomRows(rows)))
    for data in chunks:
        if group.rank and not adder.sums.rows:
            adder.skip(data.to(device), data.rows[0], size)
        adder.sums.drawn.add(data)
        adder.add(data.to(device))
    sums, *others = group.gather(adder.sums)
    if group.rank:
        return {}
    for other in others:
        sums.merge(other)
    content: dict[str, Any] = {"split": split, "rows": sums.rows, **sums.summarise(model)}
    if has_inverse(model):
        content["inverse"] = asdict(inverse(model, sums.drawn.dataset.to(device)))
    return content


@dataclass
class Sums:
    """Sums over samples that all metrics but that of the inverse follow from, and the samples drawn for that one."""

    drawn: RandomRows
    rows: int = 0
    outside: int = 0
    confusion: Tensor | None = None
    density: DensitySums = field(default_factory=DensitySums)
    baselines: list[Comparison] = field(default_factory=list)

    def merge(self, later: Sums) -> None:
        """Add the sums over the samples that follow."""
        self.rows, self.outside = self.rows + later.rows, self.outside + later.outside
        self.count(later.confusion)
        self.density.merge(later.density)
        self.drawn.merge(later.drawn)
        if not self.baselines:
            self.baselines = later.baselines
        elif later.baselines:
            for mine, other in zip(self.baselines, later.baselines, strict=True):
                mine.merge(other)

    def count(self, confusion: Tensor | None) -> None:
        """Add numbers of samples by true and predicted class."""
        if confusion is not None:
            self.confusion = confusion if self.confusion is None else self.confusion + confusion

    def summarise(self, model: Model) -> dict[str, Any]:
        """Return the metrics, as plain values."""
        content: dict[str, Any] = {}
        if self.confusion is not None:
            total = int(self.confusion.sum())
            wrong = total - int(self.confusion.trace())
            content |= {"error": asdict(error_from_counts(wrong, total)), "confusion": self.confusion.tolist()}
        if has_density(model):
            check_mean_counts(self.rows, self.outside)
            content["density"] = asdict(self.density.summarise(model, self.drawn.dataset))
        if self.baselines:
            content["baselines"] = [asdict(comparison.summarise()) for comparison in self.baselines]
        return content


class _Adder:
    """Evaluates a model on chunks and adds the results to sums."""

    def __init__(self, model: Model, draws: int, fitting: Splits | None, sums: Sums) -> None:
        self.model, self.draws, self.fitting, self.sums = model, draws, fitting, sums
        self.likelihoods: Likelihoods | None = None
        self.baselines: BaselineSums | None = None

    def add(self, data: Dataset) -> None:
        """Add the samples of a chunk."""
        self.sums.rows += len(data)
        if has_head(self.model) and data.y is not None and bool((data.y != MISSING).any()):
            self.sums.count(torch.tensor(confusion(self.model, data)))
        if has_density(self.model):
            self._add_likelihoods(data)

    def skip(self, like: Dataset, rows: int, size: int) -> None:
        """Continue as after `rows` samples like these, in chunks of `size`, which another process adds."""
        self.sums.drawn.skip(rows)
        if has_density(self.model):
            likelihoods = self._prepare(like)
            likelihoods.skip(like, rows, size)
            if self.baselines is not None:
                self.baselines.skip(like, len(likelihoods.seeds), rows, size)

    def _add_likelihoods(self, data: Dataset) -> None:
        """Add log-likelihoods; after a value that its column cannot have, only count such rows: there is no mean."""
        self.sums.outside += int((~data.schema.inside(data.x)).sum())
        if self.sums.outside:
            return
        found = self._prepare(data)(data)
        self.sums.density.add(found)
        if self.baselines is not None:
            self.baselines.add(data, found)

    def _prepare(self, like: Dataset) -> Likelihoods:
        """Return what computes the likelihoods; the first time, create it and fit the baselines."""
        if self.likelihoods is None:
            seeds = draw_seeds(self.model, like.schema, self.draws)
            self.likelihoods = Likelihoods(self.model, like.schema, like.x.device, seeds)
            if self.fitting is not None and not why_no_baselines(like.schema):
                self.baselines = BaselineSums(self.model, self.fitting.train, self.fitting.validation)
                self.sums.baselines = self.baselines.sums
        return self.likelihoods

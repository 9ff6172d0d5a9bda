"""The metrics of `evaluate` for samples that come in chunks: sums over them, in memory that does not grow.

Errors are counted, means and standard errors follow from the sums of `moments`, and noise and probes continue from
chunk to chunk, so the metrics are those of all samples at once. The inverse is computed for some samples, drawn at
random.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from ..data import Dataset, Splits
from ..data.split import RandomRows
from ..train.objective import MISSING
from .baselines import BaselineSums, why_no_baselines
from .classes import confusion, error_from_counts, has_head
from .likelihood import DensitySums, Likelihoods, check_mean_counts, draw_seeds, has_density
from .solving import has_inverse, inverse


def evaluate_chunks(
    model: nn.Module,
    chunks: Iterable[Dataset],
    *,
    split: str = "test",
    draws: int = 8,
    rows: int = 500,
    fitting: Splits | None = None,
) -> dict[str, Any]:
    """Compute the metrics of `evaluate` for the samples of all chunks, which are on the model's device."""
    sums, some = _Sums(model, draws, fitting), RandomRows(rows)
    for data in chunks:
        sums.add(data)
        some.add(data)
    content: dict[str, Any] = {"split": split, "rows": sums.rows, **sums.summarise(some.dataset)}
    if has_inverse(model):
        content["inverse"] = asdict(inverse(model, some.dataset))
    return content


class _Sums:
    """Sums over chunks, of which every metric but that of the inverse is a function."""

    def __init__(self, model: nn.Module, draws: int, fitting: Splits | None) -> None:
        self.model, self.draws, self.fitting = model, draws, fitting
        self.rows = self.outside = 0
        self.confusion: Tensor | None = None
        self.density = DensitySums()
        self.likelihoods: Likelihoods | None = None
        self.baselines: BaselineSums | None = None

    def add(self, data: Dataset) -> None:
        """Add the samples of a chunk."""
        self.rows += len(data)
        if has_head(self.model) and data.y is not None and bool((data.y != MISSING).any()):
            counts = torch.tensor(confusion(self.model, data))
            self.confusion = counts if self.confusion is None else self.confusion + counts
        if has_density(self.model):
            self._add_likelihoods(data)

    def _add_likelihoods(self, data: Dataset) -> None:
        """Add log-likelihoods; after a value that its column cannot have, only count such rows: there is no mean."""
        self.outside += int((~data.schema.inside(data.x)).sum())
        if self.outside:
            return
        if self.likelihoods is None:
            seeds = draw_seeds(self.model, data.schema, self.draws)
            self.likelihoods = Likelihoods(self.model, data.schema, data.x.device, seeds)
            if self.fitting is not None and not why_no_baselines(data.schema):
                self.baselines = BaselineSums(self.model, self.fitting.train, self.fitting.validation)
        found = self.likelihoods(data)
        self.density.add(found)
        if self.baselines is not None:
            self.baselines.add(data, found)

    def summarise(self, like: Dataset) -> dict[str, Any]:
        """Return the metrics, as plain values, for samples like these."""
        content: dict[str, Any] = {}
        if self.confusion is not None:
            total = int(self.confusion.sum())
            wrong = total - int(self.confusion.trace())
            content |= {"error": asdict(error_from_counts(wrong, total)), "confusion": self.confusion.tolist()}
        if has_density(self.model):
            check_mean_counts(self.rows, self.outside)
            content["density"] = asdict(self.density.summarise(like))
        if self.baselines is not None:
            content["baselines"] = [asdict(baseline) for baseline in self.baselines.summarise()]
        return content

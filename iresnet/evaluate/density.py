"""The likelihood of a dataset: the mean over its samples, with its errors reported separately."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data import Dataset
from ..data.dataset import check_dataset, check_unweighted
from ..data.units import nats_per_unit, unit_name
from ..model import Model
from .draws import DRAWS, log_prob_draws
from .likelihood import bound_bias
from .moments import Moments


@dataclass(frozen=True)
class Density:
    """Mean of -log p over samples, in `unit`, with its errors: over samples, of the estimator, and its bias."""

    value: float
    unit: str
    rows: int
    standard_error: float
    estimator_error: float
    bias_bound: float
    draws: int

    def __str__(self) -> str:
        return f"{self.value:.3f} {self.unit} (± {self.standard_error:.3f} over {self.rows} samples)"


def density(model: Model, data: Dataset, *, draws: int = DRAWS, seed: int = 0) -> Density:
    """Compute the mean negative log-likelihood: in bits per dimension for integers, in nats otherwise."""
    check_mean(data)
    return summarise_density(log_prob_draws(model, data, draws, seed=seed), model, data)


def summarise_density(values: Tensor, model: Model, data: Dataset) -> Density:
    """Summarise the log-likelihoods of a dataset, (draws, samples), as their mean, with its errors."""
    sums = DensitySums()
    sums.add(values)
    return sums.summarise(model, data)


class DensitySums:
    """Sums over the log-likelihoods of samples, chunk by chunk, that their mean and its errors follow from."""

    def __init__(self) -> None:
        self.rows, self.by_draw = Moments(), torch.zeros(1, dtype=torch.float64)

    def add(self, values: Tensor) -> None:
        """Add the log-likelihoods of more samples."""
        self.rows.add(values.mean(0))
        self.by_draw = self.by_draw + values.sum(1).cpu()

    def merge(self, other: DensitySums) -> None:
        """Add the sums over other samples."""
        self.rows.merge(other.rows)
        self.by_draw = self.by_draw + other.by_draw

    def summarise(self, model: Model, like: Dataset) -> Density:
        """Return the mean over all samples, in the unit for samples like these."""
        scale = nats_per_unit(like.x.shape[1:], like.schema.levels)
        n = self.rows.count
        count = len(self.by_draw)
        return Density(
            value=-self.rows.mean / scale,
            unit=unit_name(like.schema.levels),
            rows=n,
            standard_error=self.rows.standard_error / scale,
            estimator_error=float((self.by_draw / n).std()) / math.sqrt(count) / scale if count > 1 else 0.0,
            bias_bound=bound_bias(model, like.schema)[0] if math.isfinite(self.rows.mean) else math.inf,
            draws=count,
        )


def check_mean(data: Dataset) -> None:
    """Refuse a dataset whose mean log-likelihood has no standard error, or is infinite."""
    check_dataset(data)
    check_unweighted(data)
    check_mean_counts(len(data), int((~data.schema.inside(data.x)).sum()))


def check_mean_counts(rows: int, outside: int) -> None:
    """Refuse a mean over so many rows, of which some hold values that their columns cannot have."""
    if rows < 2:
        raise ValueError(
            f"a mean with a standard error needs at least two samples; got {rows}. Give more, or score it alone."
        )
    if outside:
        raise ValueError(
            f"{outside} of {rows} rows hold values that a column of the model cannot have, so their likelihood is "
            "0 and the mean has no finite logarithm. `iresnet score` shows which: remove them, or train with other "
            "kinds of columns."
        )

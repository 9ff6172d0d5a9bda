"""A density, like scikit-learn's KernelDensity and GaussianMixture."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import DensityMixin
from sklearn.utils.validation import check_is_fitted

from .. import evaluate
from ..data.table import Table
from .base import FlowEstimator, Self, generator_from
from .rows import Array, checked_weights


class LikelihoodMixin:
    """The methods of an estimator whose model is a density of the rows."""

    model_: Any

    def score_samples(self, X: ArrayLike) -> Array:
        """Return the log-density of every row, in nats and in the units of the data."""
        return self._log_density(self._rows(X))  # type: ignore[attr-defined, no-any-return]

    def sample(self, n_samples: int = 1, random_state: int | np.random.RandomState | None = None) -> Any:
        """Draw rows from the density; every block's inverse is proven.

        They are an array, as those of KernelDensity and GaussianMixture. If the training rows were a data frame with
        words, categories or truth values, they are a data frame with the same columns; `set_output` changes neither.
        """
        check_is_fitted(self)
        flow = evaluate.as_flow(self.model_, "a sample")
        if n_samples < 1:
            raise ValueError(f"n_samples must be at least 1; got {n_samples}.")
        drawn = flow.sample((int(n_samples),), generator=generator_from(random_state))
        return self._values(drawn)  # type: ignore[attr-defined]


class MeanScoreMixin(LikelihoodMixin):
    """These methods, and the score of an estimator that is only a density."""

    def score(self, X: ArrayLike, y: object = None) -> float:
        """Return the mean log-density of the rows, in nats."""
        return float(self.score_samples(X).mean())


class DensityFit(FlowEstimator):
    """The `fit` of estimators that are trained as a density of the rows."""

    def fit(self: Self, X: ArrayLike, y: object = None, sample_weight: ArrayLike | None = None) -> Self:
        """Train a density by maximum likelihood; `y` is ignored. A row of weight 2 counts like two rows."""
        rows = self._training_rows(X)
        self._fit_rows(rows, checked_weights(sample_weight, rows.x))
        return self

    def _opened(self) -> None:
        evaluate.as_flow(self.model_, f"a {type(self).__name__}")

    def _fit_rows(self, rows: Table, weights: Array | None) -> None:
        self._train(rows, weights)


class FlowDensity(MeanScoreMixin, DensityMixin, DensityFit):  # type: ignore[misc]
    """A normalizing flow of residual blocks: the density of a table.

    Parameters and attributes are those of `base.FlowEstimator`.

    >>> import numpy as np
    >>> rows = np.random.default_rng(0).normal(size=(200, 2))
    >>> density = FlowDensity(blocks=2, width=8, max_steps=20, random_state=0).fit(rows)
    >>> density.score_samples(rows).shape, density.sample(3, random_state=0).shape, density.certificate_.passed
    ((200,), (3, 2), True)
    """

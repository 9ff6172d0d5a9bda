"""An outlier detector: rows whose density is low."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import OutlierMixin
from torch import Tensor

from .. import evaluate
from ..data.conversion import dataset_for_schema
from ..data.table import Table
from ..run import Logger
from ..train import checkpoint
from .density import DensityFit, MeanScoreMixin
from .rows import Array

#: The fraction of rows like those in training that are outliers if the contamination is "auto".
AUTO = 0.01


class FlowOutlierDetector(MeanScoreMixin, OutlierMixin, DensityFit):  # type: ignore[misc]
    """Calls the rows of lowest density outliers, like scikit-learn's EllipticEnvelope with any density.

    Parameters and attributes are those of `base.FlowEstimator`.

    `offset_` is the log-density below which a row is an outlier. With `contamination="auto"`, one in a hundred rows
    like those in training is: `offset_` is a quantile over the validation rows, which the model was not fitted to. A
    number in (0, 0.5] is the fraction of the training rows, by weight, that are outliers; a model fits these better
    than new rows, of which more are below, above all if rows are few. An opened run has its validation rows in both
    cases.
    """

    def __init__(
        self,
        *,
        contamination: float | Literal["auto"] = "auto",
        preset: str | None = None,
        blocks: int | None = None,
        width: int | None = None,
        learning_rate: float | None = None,
        max_steps: int | None = None,
        max_time: float | None = None,
        batch_size: int | None = None,
        validation_fraction: float | None = None,
        patience: int | None = None,
        settings: dict[str, Any] | None = None,
        device: str = "cpu",
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
        loggers: Sequence[Logger] = (),
    ) -> None:
        super().__init__(
            preset=preset,
            blocks=blocks,
            width=width,
            learning_rate=learning_rate,
            max_steps=max_steps,
            max_time=max_time,
            batch_size=batch_size,
            validation_fraction=validation_fraction,
            patience=patience,
            settings=settings,
            device=device,
            random_state=random_state,
            verbose=verbose,
            loggers=loggers,
        )
        self.contamination = contamination

    def _fit_rows(self, rows: Table, weights: Array | None) -> None:
        self._check_contamination()
        super()._fit_rows(rows, weights)
        if self.contamination == "auto":
            self._set_offset(self._validation_scores(), None)
        else:
            self._set_offset(self._log_density(dataset_for_schema(rows, self.trained_.schema)), weights)

    def _opened(self) -> None:
        super()._opened()
        self._check_contamination()
        self._set_offset(self._validation_scores(), None)

    def _check_weights(self) -> None:
        """Raise if the weights have changed since the log-densities that a row is compared with were computed."""
        if checkpoint.digest(self.model_.state_dict()) != self._scored_by:
            raise ValueError(
                "the weights of model_ have changed since the fit, so rows would be compared with those of another "
                "model. Fit again, or use score_samples."
            )

    def _validation_scores(self) -> Array:
        return cast(Tensor, self.trained_.reference).double().numpy()

    def _check_contamination(self) -> None:
        given = self.contamination
        if given != "auto" and (isinstance(given, str) or not 0 < given <= 0.5):
            raise ValueError(f"contamination must be 'auto' or in (0, 0.5]; got {given!r}.")

    def _set_offset(self, scores: Array, weights: Array | None) -> None:
        self._scored_by = checkpoint.digest(self.model_.state_dict())
        fraction = AUTO if isinstance(self.contamination, str) else self.contamination
        if weights is None:
            self.offset_ = float(np.percentile(scores, 100 * fraction))
            return
        order = scores.argsort()
        share = weights[order].cumsum() / weights.sum()
        self.offset_ = float(scores[order[np.searchsorted(share, fraction, side="right")]])

    def decision_function(self, X: ArrayLike) -> Array:
        """Return the log-density minus `offset_`: negative for outliers."""
        scores = self.score_samples(X)
        self._check_weights()
        return scores - self.offset_

    def anomaly(self, X: ArrayLike) -> Array:
        """Return the anomaly score of `iresnet score`: the share of validation rows that are more likely, up to 1.

        Of new rows like those in training, about one in twenty has a score above 0.95.
        """
        scores = torch.from_numpy(self.score_samples(X))
        self._check_weights()
        return cast(Array, evaluate.anomaly(scores, cast(Tensor, self.trained_.reference).double()).numpy())

    def predict(self, X: ArrayLike) -> NDArray[np.int64]:
        """Return 1 for every row that is an inlier, and -1 for outliers."""
        return np.where(self.decision_function(X) >= 0, 1, -1)

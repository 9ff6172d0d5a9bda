"""A classifier that also gives the density of a row."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d

from .. import evaluate
from ..data.labels import EMPTY, class_name
from .base import FlowEstimator, Self
from .density import LikelihoodMixin
from .rows import Array, checked_weights

#: Names for the label column of a saved run: the first that is not a column of numbers.
LABELS = ("y", "class", "label", "target")


class FlowClassifier(LikelihoodMixin, ClassifierMixin, FlowEstimator):  # type: ignore[misc]
    """One invertible network that classifies rows and gives their log-density (`score_samples`).

    Parameters and attributes are those of `base.FlowEstimator`.

    With the preset "table-classifier" it only classifies.

    >>> import numpy as np
    >>> rows = np.random.default_rng(0).normal(size=(200, 2))
    >>> model = FlowClassifier(blocks=2, width=8, max_steps=20, random_state=0).fit(rows, rows[:, 0] > 0)
    >>> model.predict_proba(rows).shape, model.score_samples(rows).shape
    ((200, 2), (200,))
    """

    _preset: ClassVar[str] = "table-hybrid"
    _kinds: ClassVar[tuple[str, ...]] = ("hybrid", "classification")

    def fit(self: Self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train for the classes `y` and the density of the rows. A row of weight 2 counts like two rows."""
        rows, targets = self._training_rows(X, y)
        targets = column_or_1d(targets, warn=True)
        check_classification_targets(targets)
        weights = checked_weights(sample_weight, rows.x)
        counted = targets if weights is None else targets[weights > 0]
        self.classes_ = np.unique(counted)
        if len(self.classes_) < 2:
            raise ValueError(f"{type(self).__name__} needs at least two classes; y has only 1 class. Add others.")
        names, columns = dict(zip(self.classes_.tolist(), class_names(self.classes_), strict=True)), self._columns()
        label = next(name for name in (*LABELS, *map(str, range(len(columns) + 1))) if name not in columns)
        labels = [names.get(value, EMPTY) for value in targets.tolist()]
        self._train(replace(rows, label=label, labels=labels), weights)
        return self

    def predict(self, X: ArrayLike) -> NDArray[np.generic]:
        """Return the most probable class of every row."""
        check_is_fitted(self)
        found: NDArray[np.generic] = self.classes_[self.predict_proba(X).argmax(axis=1)]
        return found

    def predict_proba(self, X: ArrayLike) -> Array:
        """Return the probability of every class, in the order of `classes_`."""
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: ArrayLike) -> Array:
        """Return the logarithms of the probabilities."""
        rows = self._rows(X, known=True)
        found = evaluate.logits(self.model_, rows).log_softmax(dim=1)
        order = [self.trained_.schema.classes.index(name) for name in class_names(self.classes_)]
        values: Array = found[:, order].numpy()
        return values

    def _opened(self) -> None:
        evaluate.as_classifier(self.model_)
        self.classes_ = classes_of(self.trained_.schema.classes)


def class_names(classes: NDArray[np.generic]) -> list[str]:
    """Return a name for every class, as in a file: integers without a decimal point.

    >>> class_names(np.array([1.0, 2.0])), class_names(np.array([False, True]))
    (['1', '2'], ['False', 'True'])
    """
    texts = [str(value) for value in classes.tolist()]
    names = [class_name(text) for text in texts]
    return names if all(names) and len(set(names)) == len(names) else texts


def classes_of(names: Sequence[str]) -> NDArray[np.generic]:
    """Return the classes of these names, sorted: integers or truth values, if all are, else text.

    >>> classes_of(["10", "9"]), classes_of(["True", "False"])
    (array([ 9, 10]), array([False,  True]))
    """
    if all(name in ("True", "False") for name in names):
        return np.unique([name == "True" for name in names])
    integers = all(re.fullmatch("-?[0-9]{1,18}", name) for name in names)
    return np.unique(np.array(names, dtype=np.int64 if integers else None))

"""A conditional density p(y | X): regression that predicts a whole distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_array
from torch import Tensor

from ..data import Dataset, conversion, table
from ..evaluate.chunks import CHUNK
from ..flow import Flow
from ..spelling import quoted
from ..transforms.dequantisation import column_steps
from .base import FlowEstimator, Self, generator_from
from .frames import word_columns
from .quantiles import base_cdf, base_quantile, has_quantiles, value_below
from .rows import Array, checked_weights

#: Samples of every row from which quantiles are estimated where there is no formula.
DRAWS = 1000


class ConditionalFlowDensity(FlowEstimator):
    """The density p(y | X) of one or more numbers y, given the columns of X, as a flow whose blocks depend on X.

    Parameters and attributes are those of `base.FlowEstimator`.

    Like a regression, but it predicts the whole distribution: skewed, with several modes, wider for some X.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).normal(size=(200, 2))
    >>> model = ConditionalFlowDensity(blocks=2, width=8, max_steps=20, random_state=0).fit(X, X.sum(axis=1))
    >>> model.quantiles(X, [0.1, 0.5, 0.9]).shape, model.sample(X, 4).shape, model.log_prob(X, X.sum(axis=1)).shape
    ((200, 3), (200, 4), (200,))
    """

    _conditional: ClassVar[bool] = True

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.target_tags.multi_output = True
        return tags

    def fit(self: Self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train by maximum likelihood of y given X. A row of weight 2 counts like two rows."""
        names = getattr(y, "columns", [getattr(y, "name", None)])
        rows, targets = self._training_rows(X, y, y_numeric=True, multi_output=True)
        weights = checked_weights(sample_weight, rows.x)
        model = cast(ConditionalFlowDensity, self)
        model.n_targets_, model.is_scalar_ = (1, True) if targets.ndim == 1 else (targets.shape[1], False)
        model.target_names_ = target_names(names, model.n_targets_, self._columns())
        self._train(with_targets(rows, targets, model.target_names_), weights, model.target_names_)
        return self

    def log_prob(self, X: ArrayLike, y: ArrayLike) -> Array:
        """Return ln p(y | X) of every row, in nats and in the units of y."""
        return self._log_density(self._pairs(X, y))

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Return the mean of ln p(y | X), in nats, weighted if there are weights."""
        values = self.log_prob(X, y)
        return float(np.average(values, weights=checked_weights(sample_weight, values)))

    def predict(self, X: ArrayLike) -> Array:
        """Return the median of p(y | X) for every row, and for every column of y."""
        return self.quantiles(X, 0.5)

    def sample(
        self, X: ArrayLike, n_samples: int = 1, random_state: int | np.random.RandomState | None = None
    ) -> Array:
        """Draw from p(y | X) for every row: shape (rows, n_samples), and a third axis if y has columns."""
        if n_samples < 1:
            raise ValueError(f"n_samples must be at least 1; got {n_samples}.")
        contexts = self._contexts(X)
        drawn = self._flow.sample((int(n_samples),), contexts, generator=generator_from(random_state))
        return self._targets(drawn.transpose(0, 1))

    def cdf(self, X: ArrayLike, y: ArrayLike) -> Array:
        """Return P(Y <= y | X) of every row, for a y of one number; uniform for new rows if the model is calibrated.

        It has jumps at the values of a discrete y, is 0 below the lower bound of y, and 1 from the upper bound on.
        """
        flow = self._flow
        if not has_quantiles(flow.base):
            raise ValueError("cdf needs a y of one number, with a base of normals. Use the share of samples below y.")
        values, known = value_below(self.trained_.schema.column_kinds[-1], self._checked_targets(y))
        rows = self._pairs(X, values).x.double()
        if (step := column_steps(flow)) is not None:
            rows = rows + step / 2  # the upper end of the cell around a discrete value
        with torch.no_grad():
            below = base_cdf(flow.base, flow.transform(rows)[:, 0])
        found: Array = (below if self._increases(rows[:1, :-1]) else 1 - below).numpy()
        return np.where(np.isnan(known[:, 0]), found, known[:, 0])

    def quantiles(
        self,
        X: ArrayLike,
        q: float | Sequence[float] = (0.05, 0.5, 0.95),
        random_state: int | np.random.RandomState | None = 0,
    ) -> Array:
        """Return the quantiles of p(y | X) at levels q in (0, 1): shape (rows,), or (rows, levels) for several.

        They are exact for a y of one number, by the proven inverse of the base's quantiles; otherwise, for each column
        of y (a last axis), those of 1000 samples drawn with `random_state`.
        """
        levels = np.atleast_1d(np.asarray(q, dtype=np.float64))
        if levels.ndim != 1 or not ((levels > 0) & (levels < 1)).all():
            raise ValueError(f"q must be a level in (0, 1), or several; got {q}.")
        contexts = self._contexts(X)
        if has_quantiles(self._flow.base):
            found = self._exact_quantiles(contexts, torch.from_numpy(levels))
        else:
            found = self._estimated_quantiles(contexts, torch.from_numpy(levels), generator_from(random_state))
        values = self._targets(found.transpose(0, 1))
        return values[:, 0] if np.ndim(q) == 0 else values

    @torch.no_grad()
    def _exact_quantiles(self, contexts: Tensor, levels: Tensor) -> Tensor:
        """Return rows with the quantiles, shape (levels, rows, columns)."""
        flow = self._flow
        z = base_quantile(flow.base, levels if self._increases(contexts[:1]) else 1 - levels)
        codes, repeated = z.repeat_interleave(len(contexts))[:, None], contexts.repeat(len(levels), 1)
        return flow.transform.inverse(codes, repeated).reshape(len(levels), len(contexts), -1)

    def _estimated_quantiles(self, contexts: Tensor, levels: Tensor, generator: torch.Generator) -> Tensor:
        """Return rows with the quantiles of samples, shape (levels, rows, columns), some rows at a time."""
        drawn = (self._flow.sample((DRAWS,), some, generator=generator) for some in torch.split(contexts, CHUNK))
        return torch.cat([torch.quantile(samples, levels, dim=0) for samples in drawn], dim=1)

    @torch.no_grad()
    def _increases(self, context: Tensor) -> bool:
        """Whether codes increase with the target, which is the same for every context."""
        low, high = self._flow.transform.inverse(torch.tensor([[-1.0], [1.0]]).double(), context.expand(2, -1))[:, -1]
        return bool(low < high)

    @property
    def _flow(self) -> Flow:
        return cast(Flow, self.model_)

    def _targets(self, rows: Tensor) -> Array:
        """Return the targets of rows; a y of one number has no axis for its column."""
        targets: Array = self._numbers(rows)[..., -self.n_targets_ :]
        return targets[..., 0] if self.is_scalar_ else targets

    def _contexts(self, X: ArrayLike) -> Tensor:
        rows = self._new_rows(X)
        return conversion.dataset_for_schema(rows, self.trained_.schema.select(rows.columns)).x.double()

    def _pairs(self, X: ArrayLike, y: ArrayLike) -> Dataset:
        """Check rows and targets, and convert them to the dataset that the model takes."""
        rows, targets = self._new_rows(X), self._checked_targets(y)
        if targets.shape != (len(rows.x), self.n_targets_):
            raise ValueError(f"y must have {len(rows.x)} rows of {self.n_targets_} numbers; got {targets.shape}.")
        return conversion.dataset_for_schema(with_targets(rows, targets, self.target_names_), self.trained_.schema)

    def _checked_targets(self, y: ArrayLike) -> Array:
        """Return y as an array with a column for each of its numbers."""
        targets: Array = check_array(y, dtype=np.float64, ensure_2d=False, input_name="y")
        return targets.reshape(len(targets), -1)

    def _opened(self) -> None:
        schema = self.trained_.schema
        for name, kind in word_columns(schema).items():
            if name in schema.targets:
                raise ValueError(
                    f"y must hold numbers; column {quoted(name)} has a {kind.describe()}. Use the commands."
                )
        if schema.columns[-len(schema.targets) :] != schema.targets:
            raise ValueError(
                f"the targets {list(schema.targets)} must be the last columns; got {list(schema.columns)}."
            )
        self.target_names_, self.n_targets_ = schema.targets, len(schema.targets)
        self.is_scalar_ = self.n_targets_ == 1


def with_targets(rows: table.Table, targets: Array, names: tuple[str, ...]) -> table.Table:
    """Return a table with further columns."""
    return replace(rows, columns=(*rows.columns, *names), x=np.column_stack([rows.x, targets]))


def target_names(names: Sequence[object], count: int, columns: Sequence[str]) -> tuple[str, ...]:
    """Return names for the targets: those of a pandas object, if they are different strings, else y0, y1, ...

    >>> target_names([None], 1, ["x0"]), target_names(["a", "b"], 2, ["a"])
    (('y',), ('y0', 'y1'))
    """
    given = tuple(name for name in names if isinstance(name, str) and name not in columns)
    if len(set(given)) == count:
        return given
    plain = ("y",) if count == 1 else tuple(f"y{i}" for i in range(count))
    while set(plain) & set(columns):
        plain = tuple(f"{name}_" for name in plain)
    return plain

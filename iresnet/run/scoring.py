"""Scores of samples by the model of a run: the columns that `iresnet score` writes, also for batches of a table.

A `Scorer` is a function of one batch, for `map_batches` of Ray Data and `mapInPandas` of Spark. The scores of a row
depend neither on the other rows nor on the batch, up to the rounding of float32. It is pickled as the path of the run
and its options, and loads the model where it runs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data import Dataset
from ..data.arrays import as_pandas, column_table, column_values, is_polars
from ..data.choice import choose_schema_columns
from ..data.conversion import dataset_for_schema
from ..data.missing import whole_rows
from ..evaluate import (
    DRAWS,
    Tolerance,
    anomaly,
    atypicality,
    column_gains,
    has_density,
    has_head,
    log_likelihood,
    logits,
    score_tolerance,
)
from ..model import Model
from ..train import checkpoint
from .folder import Run

Batch = TypeVar("Batch")

#: What a batch is called in error messages.
BATCH = Path("batch")


class Scorer:
    """Scores batches of a table: a dict of NumPy columns, a data frame of pandas or polars, or a pyarrow table.

    A call returns the batch with the columns that `iresnet score` writes: log_likelihood in nats, standard_error,
    bias_bound, anomaly and atypicality, and for a model with a classifier class and probability; with `explain`, also
    the columns that make a row unlikely. `missing` says what to do with rows with missing cells: "refuse" them, or give
    them the scores "nan".

    >>> from iresnet.run import Scorer
    >>> import pickle
    >>> pickle.loads(pickle.dumps(Scorer("runs/mine", draws=4))).draws
    4
    """

    def __init__(
        self,
        run: str | Path | Run,
        *,
        draws: int | None = None,
        tolerance: float | None = None,
        explain: int = 0,
        missing: str = "refuse",
        device: str | torch.device = "cpu",
    ) -> None:
        if draws is not None and tolerance is not None:
            raise ValueError(
                f"draws and tolerance exclude each other; got {draws} and {tolerance:g}. Give one of them."
            )
        if missing not in ("refuse", "nan"):
            raise ValueError(f"missing must be 'refuse' or 'nan'; got {missing!r}.")
        self.folder, self.draws, self.explain = run.folder if isinstance(run, Run) else Path(run), draws, explain
        if isinstance(run, Run):
            self.run = run
        self.tolerance, self.missing, self.device = tolerance, missing, device
        self._reference: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**{name: v for name, v in vars(self).items() if name not in ("run", "_loaded")}, "_reference": None}

    @cached_property
    def run(self) -> Run:
        """The run, opened when it is first needed."""
        return Run.open(self.folder)

    @property
    def model(self) -> Model:
        """The trained model."""
        return self._loaded[0]

    @property
    def reference(self) -> Tensor:
        """The log-likelihoods of validation samples by the model as it was trained; raise if it has been changed."""
        model, weights, file = self._loaded
        if checkpoint.digest(model.state_dict()) != weights:
            raise ValueError(
                "the weights of the model have changed since it was loaded, so anomaly scores would be relative to "
                "another model. Create another Scorer, or use iresnet.evaluate.log_likelihood."
            )
        if self._reference is None:
            self._reference = self.run.reference()
            if self.run.sha256() != file:
                raise ValueError(
                    f"{self.run.folder} was trained again since its model was loaded. Create another Scorer."
                )
        return self._reference

    @cached_property
    def _loaded(self) -> tuple[Model, str, str]:
        """The model, the digest of its weights, and that of the file that it was loaded from."""
        file, model = self.run.sha256(), self.run.model(device=self.device)
        return model, checkpoint.digest(model.state_dict()), file

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch with the scores of its rows as further columns."""
        columns = _arrays(batch)
        scores = self._scores(columns)
        if impossible := int(np.isneginf(scores.get("log_likelihood", np.zeros(0))).sum()):
            warnings.warn(
                f"{impossible} of {len(scores['log_likelihood'])} rows hold a value that its column cannot have, so "
                "their log-likelihood is -inf; explain=1 names it.",
                stacklevel=2,
            )
        return _with_columns(batch, scores)

    def _scores(self, columns: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        schema = self.run.schema
        if schema.is_image:
            raise ValueError(f"a batch must be a table; the model takes {schema}. Use iresnet.evaluate.log_likelihood.")
        skip = self.missing == "nan"
        table = column_table(BATCH, columns, choose_schema_columns(schema, labels=False, skip_missing=skip))
        kept = whole_rows(table) if skip else np.arange(len(table.x))
        scores = self.score(dataset_for_schema(table.take(kept), schema)) if len(kept) else self._no_scores()
        return {name: _spread(values, kept, len(table.x)) for name, values in scores.items()}

    def _no_scores(self) -> dict[str, list[Any]]:
        """The columns of a batch without rows."""
        schema = self.run.schema
        one = Dataset(torch.zeros(1, *schema.shape), None, schema)
        return {name: values[:0] for name, values in self.score(one).items()}

    @torch.no_grad()
    def score(self, data: Dataset) -> dict[str, list[Any]]:
        """Return the scores of samples, column by column."""
        data = data.to(self.device)
        columns: dict[str, list[Any]] = {}
        if has_density(self.model):
            reference, tolerance = self.reference, cast("float | Tolerance | None", self.tolerance)
            if self.draws is None and tolerance is None:
                tolerance = score_tolerance(self.model, data.schema, reference)
            e = log_likelihood(self.model, data, draws=self.draws or DRAWS, tolerance=tolerance)
            columns["log_likelihood"] = e.value.tolist()
            columns["standard_error"] = e.standard_error.tolist()
            columns["bias_bound"] = e.bias_bound.tolist()
            if data.schema.levels is not None:
                columns["bits_per_dim"] = e.bits_per_dim().value.tolist()
            for of in (anomaly, atypicality):
                columns[of.__name__] = of(e.value.cpu(), reference).tolist()
        if has_head(self.model):
            columns |= self._classify(data)
        return columns | (_explanations(self.model, data, self.explain) if self.explain else {})

    def _classify(self, data: Dataset) -> dict[str, list[Any]]:
        """Return class and probability; none for a row with a value that its column cannot have."""
        possible = data.schema.inside(data.x).nonzero()[:, 0]
        names, values = [""] * len(data), [math.nan] * len(data)
        if len(possible):
            best = torch.softmax(logits(self.model, data.take(possible)).double(), dim=1).max(dim=1)
            for row, place, value in zip(*(t.tolist() for t in (possible, best.indices, best.values)), strict=True):
                names[row], values[row] = self.run.schema.classes[place], value
        return {"class": names, "probability": values}


def _explanations(model: Model, data: Dataset, count: int) -> dict[str, list[Any]]:
    """Return the columns with the largest gains, and these, for every row; empty where no change is a gain."""
    gains = column_gains(model, data)
    best = gains.topk(min(count, gains.shape[1]), dim=1)
    columns: dict[str, list[Any]] = {}
    for k, (places, values) in enumerate(zip(best.indices.T.tolist(), best.values.T.tolist(), strict=True), 1):
        columns[f"column_{k}"] = [data.schema.names[i] if g > 0 else "" for i, g in zip(places, values, strict=True)]
        columns[f"gain_{k}"] = [g if g > 0 else "" for g in values]
    return columns


def _arrays(batch: Any) -> dict[str, NDArray[Any]]:
    """Return the columns of a batch: arrays of numbers, or of objects."""
    if isinstance(batch, Mapping):
        made = {str(name): np.asarray(values) for name, values in batch.items()}
        return {name: v if v.dtype.kind in "biuf" else v.astype(object) for name, v in made.items()}
    frame = as_pandas(batch)
    return {str(name): column_values(frame[name]) for name in frame.columns}


def _spread(values: list[Any], kept: NDArray[np.int64], rows: int) -> NDArray[Any]:
    """Return a column with the values at the positions of the rows that were scored, and none at others."""
    text = any(isinstance(value, str) and value for value in values)
    if text:
        column: NDArray[Any] = np.full(rows, "", dtype=object)
    else:
        column, values = np.full(rows, np.nan), [np.nan if value == "" else value for value in values]
    column[kept] = values
    return column


def _with_columns(batch: Batch, scores: Mapping[str, NDArray[Any]]) -> Batch:
    """Return a batch of the same kind with further columns, which replace those of the same name."""
    if isinstance(batch, Mapping):
        return cast(Batch, {**batch, **scores})
    frame: Any = batch
    if hasattr(frame, "iloc"):
        return cast(Batch, frame.assign(**scores))
    if is_polars(frame):
        kept = [name for name in frame.columns if name not in scores]
        return cast(Batch, frame.select(kept).hstack(type(frame)(scores)))
    for name, values in scores.items():
        at = frame.schema.get_field_index(name)
        frame = frame.remove_column(at) if at >= 0 else frame
        frame = frame.append_column(name, [values])
    return cast(Batch, frame)

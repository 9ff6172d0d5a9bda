"""What all estimators share: parameters, training on arrays, saving and opening run folders.

An estimator's settings are those of a preset, and its training is that of a run (`run.train_in_memory`): rows are held
out to validate, the best averaged weights are kept, tightened to their bounds and certified. Nothing is written.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from rich.console import Console
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from .. import evaluate
from ..certificate import Certificate
from ..data import Dataset, conversion, split, table
from ..data.arrays import as_pandas
from ..data.columns import parse_kinds
from ..data.numerals import is_number
from ..data.sampling import seeded_generator
from ..device import choose_device
from ..model import Model
from ..presets import Experiment
from ..run import Logger, TrainedModel, train_in_memory
from ..run.progress import progress, reporter
from ..run.weights import complete_state, slim_state
from ..spelling import quoted
from ..train import Report
from ..train.threads import suitable_threads
from . import frames
from .parameters import SETTINGS, make_experiment, seed_from
from .rows import (
    MIN_ROWS,
    Array,
    as_table,
    training_dataset,
    unnamed,
    warn_of_degenerate_columns,
    warn_of_unknown_categories,
)

Self = TypeVar("Self", bound="FlowEstimator")

#: The number of rows that is held out even if they are more than the fraction, unless they are a quarter of all.
FEW_HELD_OUT = 3


class FlowEstimator(BaseEstimator):  # type: ignore[misc]
    """Base class of the estimators. A parameter that is None has the value of the preset.

    | parameter | meaning |
    | :-- | :-- |
    | `preset` | the name of a preset, or a path to a TOML file of settings; None: the one for this estimator |
    | `blocks` | the number of residual blocks |
    | `width` | the hidden units of each layer of a block |
    | `learning_rate` | the peak learning rate |
    | `max_steps` | the number of training steps, unless training ends early |
    | `max_time` | the time after which training ends, in seconds |
    | `batch_size` | rows per step |
    | `validation_fraction` | the fraction of the rows (or, from 1 on, their number) that is held out, to choose the best weights; of few rows, up to 3 are |
    | `patience` | the number of validations without an improvement after which training ends; 0: it goes on |
    | `settings` | any other settings of an experiment, by name: `{"network.lipschitz": 0.9}` |
    | `device` | where to train: "cpu", "cuda", "cuda:1", or "auto": a GPU if there is one |
    | `random_state` | the seed of weights, batches and held-out rows: an integer for the same result every time |
    | `verbose` | whether to show a progress bar |
    | `loggers` | `run.Logger`s that get settings, metrics and the trained model: W&B, MLflow, or your own |

    After `fit`: `model_` is the trained model, in float64; `certificate_` what is proven of it; `n_steps_` the number
    of steps; `validation_scores_` the score of the held-out rows at every validation; `n_features_in_` and, for tables
    with column names, `feature_names_in_`.

    `X` is an array of numbers, or a data frame of pandas or polars that may also have columns of words, categories
    (dtype `category`) and truth values; so may an array of objects, such as a `ColumnTransformer` makes. After `fit`,
    the columns of a data frame may be in any order.
    """  # noqa: E501

    _preset: ClassVar[str] = "table-density"
    _kinds: ClassVar[tuple[str, ...]] = ("density",)
    _conditional: ClassVar[bool] = False
    _cells: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        *,
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
        self.preset = preset
        self.blocks = blocks
        self.width = width
        self.learning_rate = learning_rate
        self.max_steps = max_steps
        self.max_time = max_time
        self.batch_size = batch_size
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.settings = settings
        self.device = device
        self.random_state = random_state
        self.verbose = verbose
        self.loggers = loggers

    # ------------------------------------------------------------------------------------------------ run folders

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write a run folder, which every command accepts; return its path.

        The rows are not saved: give them to commands that need some, with --data.
        """
        check_is_fitted(self)
        return self.trained_.save(folder, overwrite=overwrite).folder

    @classmethod
    def from_run(cls: type[Self], folder: str | Path, **parameters: Any) -> Self:
        """Open a run folder as a fitted estimator. Fitting it, or a clone, trains again with the run's settings."""
        trained = TrainedModel.open(folder)
        if trained.schema.is_image:
            raise ValueError(f"an estimator needs a table; {folder} has {trained.schema}. Use iresnet.load.")
        if bool(trained.schema.targets) != cls._conditional:
            kind = "conditional" if trained.schema.targets else "not conditional"
            right = "ConditionalFlowDensity" if trained.schema.targets else "FlowDensity"
            raise ValueError(f"{cls.__name__} cannot open {folder}, whose density is {kind}. Use {right}.")
        estimator = cls(preset=str(Path(folder) / "config.toml"), **parameters)
        estimator._set_trained(trained)
        estimator._set_columns([name for name in trained.schema.names if name not in trained.schema.targets])
        estimator._opened()
        return estimator

    def _opened(self) -> None:
        """Set the attributes of a fitted estimator that follow from the trained model."""

    def _set_columns(self, names: Sequence[str]) -> None:
        """Set the columns as `fit` would; names that the library gave stand for a table without names."""
        self.n_features_in_ = len(names)
        if tuple(names) != unnamed(len(names)):
            self.feature_names_in_ = np.asarray(names, dtype=object)

    # ---------------------------------------------------------------------------------------------------- training

    def _experiment(self, seed: int) -> Experiment:
        parameters = {name: getattr(self, name) for name in SETTINGS}
        experiment = make_experiment(self.preset or self._preset, parameters, self.settings or {}, seed)
        kind = experiment.objective.kind
        if kind not in self._kinds:
            if len(self._kinds) > 1:
                raise ValueError(
                    f"{type(self).__name__} needs a preset with objective.kind {' or '.join(self._kinds)}; got "
                    f"{self.preset!r}, with {kind!r}. Use {self._preset!r}."
                )
            objective = replace(experiment.objective, kind="density", density=1.0, radius=0.0)
            experiment = replace(experiment, objective=objective)
        return experiment

    def _train(self, rows: table.Table, weights: Array | None, targets: tuple[str, ...] = ()) -> None:
        """Train on the rows of a table, part of which is held out."""
        seed, device = seed_from(self.random_state), choose_device(self.device)
        experiment = self._experiment(seed)
        dataset = training_dataset(rows, weights, experiment.data.kinds, targets)
        count = split.held_out_count("validation", experiment.data.validation, len(dataset))
        count = max(count, min(FEW_HELD_OUT, len(dataset) // 4))  # without any, a table of few rows is learned by heart
        train, validation = split.hold_out(dataset, count, seeded_generator(seed, "validation"))
        conversion.refuse_constant_columns(train)
        if experiment.objective.kind != "classification":
            warn_of_degenerate_columns(train)
        with (
            _forked_generators(device),
            suitable_threads(dataset.schema.dimension),
            _reporting(type(self).__name__, self.verbose) as report,
        ):
            options: dict[str, Any] = {"device": device, "report": report, "loggers": self.loggers}
            trained = train_in_memory(experiment, train, validation, **options)
        self._set_trained(trained)

    def _set_trained(self, trained: TrainedModel) -> None:
        self.trained_, self.model_ = trained, in_float64(trained.model)

    @property
    def certificate_(self) -> Certificate | None:
        """What is proven of the model as it is now; None for a family without residual blocks."""
        check_is_fitted(self)
        return replace(self.trained_, model=self.model_).certificate

    @property
    def n_steps_(self) -> int:
        """The number of training steps."""
        check_is_fitted(self)
        last = self.trained_.log[-1]["step"] if self.trained_.log else 0
        return int(self.trained_.environment.get("step") or last or 0)

    @property
    def validation_scores_(self) -> Array:
        """The mean log-likelihood of the held-out rows (their accuracy, without a density) at every validation."""
        check_is_fitted(self)
        nats = [row.get("validation nats") for row in self.trained_.log]
        if any(value is not None for value in nats):
            return np.array([-value for value in nats if value is not None])
        errors = [row.get("validation error %") for row in self.trained_.log]
        return np.array([1 - value / 100 for value in errors if value is not None])

    # -------------------------------------------------------------------------------------------------------- rows

    def _columns(self) -> tuple[str, ...]:
        names = getattr(self, "feature_names_in_", None)
        return unnamed(self.n_features_in_) if names is None else tuple(names)

    def _training_rows(self, X: ArrayLike, *y: ArrayLike, **options: Any) -> Any:
        """Check rows to train on, and `y` if given; remember the columns, and the cells of those of categories."""
        X, declared = as_pandas(X), parse_kinds(self._experiment(0).data.kinds)
        categories = frames.find_categories(X, declared) if frames.is_frame(X) else []
        checked = self._checked(X, *y, categories=categories, ensure_min_samples=MIN_ROWS, **options)
        words = (checked[0] if y else checked).words
        self._cells = {name: frames.cells_of(frames.columns_of(X)[name]) for name in words}
        return checked

    def _new_rows(self, X: ArrayLike) -> table.Table:
        """Check rows for the trained model, whose columns may be in any order if they have names."""
        check_is_fitted(self)
        X, schema = as_pandas(X), self.trained_.schema
        if frames.is_frame(X):
            X = frames.in_order(X, self._columns())
        elif words := frames.word_columns(schema):
            name, kind = next(iter(words.items()))
            raise ValueError(
                f"X must be a data frame, since column {quoted(name)} holds words ({kind.describe()}); got "
                f"{type(X).__name__}. Use pandas.DataFrame(X, columns=...)."
            )
        kinds = zip(schema.names, schema.column_kinds, strict=True)
        rows: table.Table = self._checked(X, categories=[name for name, k in kinds if k.categories], reset=False)
        return rows

    def _checked(self, X: ArrayLike, *y: ArrayLike, categories: Collection[str], **options: Any) -> Any:
        """Return rows as a table that scikit-learn has checked, and `y` if given."""
        numbers, words = frames.split_words(X, categories) if frames.is_frame(X) else (X, {})
        checked = validate_data(self, numbers, *y, dtype=np.float64, **options)
        x, *others = checked if y else (checked,)
        rows = as_table(x, self._columns(), words)
        return (rows, *others) if y else rows

    def _rows(self, X: ArrayLike, *, known: bool = False) -> Dataset:
        """Check rows and convert them to what the model takes; refuse unknown categories if `known`, else warn."""
        rows = self._new_rows(X)
        data = conversion.dataset_for_schema(rows, self.trained_.schema, known=known)
        warn_of_unknown_categories(rows, data)
        return data

    def _log_density(self, rows: Dataset) -> Array:
        values: Array = evaluate.log_likelihood(self.model_, rows).value.numpy()
        return values

    def _numbers(self, rows: Tensor) -> Array:
        """Return samples as numbers that the columns may have, categories in their own numbers, NaN for words."""
        schema = self.trained_.schema
        values: Array = schema.restore(rows.flatten(0, -2)).numpy()
        for i, kind in enumerate(schema.kinds):
            if kind.categories:
                numbers = [float(name) if is_number(name) else np.nan for name in kind.categories]
                values[:, i] = np.array(numbers)[values[:, i].astype(int)]
        return values.reshape(rows.shape)

    def _values(self, rows: Tensor) -> Any:
        """Return samples as the training rows were: an array, or a data frame if some column held no numbers."""
        schema = self.trained_.schema
        if not self._cells and not frames.word_columns(schema):
            return self._numbers(rows)
        frame = frames.samples_frame(schema.restore(rows).numpy(), schema, self._cells)
        return frame if hasattr(self, "feature_names_in_") else frame.set_axis(range(self.n_features_in_), axis=1)


def in_float64(model: Model) -> Model:
    """Return a copy in float64 that is the same function: its weights are those that the model uses in float32.

    Predictions in float64 do not depend on the other rows, which decide how a product in float32 is rounded.
    """
    twin = copy.deepcopy(model)
    twin.load_state_dict(complete_state(twin, slim_state(twin)))
    return twin.double().eval()


def generator_from(random_state: int | np.random.RandomState | None) -> torch.Generator:
    """Return a torch generator seeded by a random state."""
    return torch.Generator().manual_seed(seed_from(random_state))


@contextmanager
def _forked_generators(device: str) -> Iterator[None]:
    """Leave torch's global generators as they were."""
    with torch.random.fork_rng(devices=[device] if device.startswith("cuda") else []):
        yield


@contextmanager
def _reporting(name: str, verbose: bool) -> Iterator[Report | None]:
    """Show a progress bar if requested."""
    if not verbose:
        yield None
        return
    with progress(Console()) as bars:
        yield reporter(bars, name)

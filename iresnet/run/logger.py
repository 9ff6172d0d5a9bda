"""The interface to experiment trackers: a logger gets the settings of a training, its metrics, and its result.

The file of TensorBoard (`board`), Weights & Biases and MLflow (`trackers`) are loggers, and a user's own class can be
one. `Loggers` calls several. A logger is a copy of what the run keeps itself, so none can end a training: one that
raises an exception is dropped with a warning, and the training goes on without it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from .. import config
from ..presets import Experiment
from ..spelling import first_line

if TYPE_CHECKING:
    from .fit import FitResult
    from .trained import TrainedModel

    Result: TypeAlias = FitResult | TrainedModel


class Logger:
    """Receives the settings, the metrics and the result of a training. Override the methods you need.

    >>> class Printer(Logger):
    ...     def log(self, step, metrics):
    ...         print(step, metrics)
    """

    def begin(self, settings: Mapping[str, Any], step: int, folder: Path | None) -> None:
        """Start before the first step, with every setting by its full name (`training.steps`).

        `step` is 0, or the step from which a run is resumed. `folder` is the run folder; None for one in memory.
        """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a row of the log, about every ten steps: those of training are means since the last."""

    def end(self, result: Result | None) -> None:
        """Finish with what the training returns, certified; None if it raised an exception, such as divergence.

        A run that was stopped, to be resumed, has `result.finished` False.
        """

    def __str__(self) -> str:
        return type(self).__name__


class Loggers:
    """Calls several loggers, and drops one that raises an exception, with a warning."""

    def __init__(self, loggers: Iterable[Logger]) -> None:
        self.active = list(loggers)

    @contextmanager
    def logging(self, experiment: Experiment, step: int, folder: Path | None = None) -> Iterator[Loggers]:
        """Begin, and end with None if an exception is raised in this context."""
        settings = dict(config.flatten(config.to_mapping(experiment)))
        self._call(lambda logger: logger.begin(settings, step, folder))
        try:
            yield self
        except BaseException:
            self.end(None)
            raise

    def log(self, row: Mapping[str, float]) -> None:
        """Pass on a row of the log."""
        metrics = {name: value for name, value in row.items() if name != "step"}
        self._call(lambda logger: logger.log(int(row["step"]), metrics))

    def end(self, result: Result | None) -> None:
        """Pass on the result; nothing can be logged any more."""
        self._call(lambda logger: logger.end(result))
        self.active = []

    def _call(self, call: Callable[[Logger], None]) -> None:
        for logger in list(self.active):
            try:
                call(logger)
            except Exception as error:
                self.active = [other for other in self.active if other is not logger]
                with suppress(Exception):
                    logger.end(None)
                warnings.warn(
                    f"cannot log to {logger}: {_reason(error)}. Training "
                    "continues without it; the run's own log has the same metrics.",
                    stacklevel=3,
                )


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or first_line(error)).rstrip(".")

"""Run folders: one training run from its settings to a certified model, with everything that later commands need."""

from .callback import TRUNCATION, truncation_warning, validate
from .fit import FitResult, resume, start
from .folder import Run, load
from .logger import Logger
from .releasing import publish, release, write_certificate
from .scoring import Scorer
from .shared import SharedTraining, follow
from .trackers import MLflow, WeightsAndBiases
from .trained import TrainedModel, train_in_memory
from .weights import shipped

__all__ = [
    "TRUNCATION", "FitResult", "Logger", "MLflow", "Run", "Scorer", "SharedTraining", "TrainedModel",
    "WeightsAndBiases", "follow", "load", "publish", "release", "resume", "shipped", "start", "train_in_memory",
    "truncation_warning", "validate", "write_certificate",
]  # fmt: skip

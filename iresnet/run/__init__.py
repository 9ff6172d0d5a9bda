"""Run folders: one training run from its settings to a certified model, with everything that later commands need."""

from .callback import TRUNCATION, truncation_warning, validate
from .fit import FitResult, publish, release, resume, start, write_certificate
from .folder import Run, load
from .weights import shipped

__all__ = [
    "TRUNCATION", "FitResult", "Run", "load", "publish", "release", "resume", "shipped", "start",
    "truncation_warning", "validate", "write_certificate",
]  # fmt: skip

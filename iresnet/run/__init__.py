"""Run folders: one training run from its settings to a certified model, and all that later commands need of it."""

from .fit import Outcome, publish, release, resume, start, write_certificate
from .folder import Run, load
from .watch import TRUNCATION, flattered, judge
from .weights import shipped

__all__ = [
    "TRUNCATION", "Outcome", "Run", "flattered", "judge", "load", "publish", "release", "resume", "shipped", "start",
    "write_certificate",
]  # fmt: skip

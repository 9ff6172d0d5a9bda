"""Datasets: `load` returns the training, validation and test splits; `read` returns samples for a trained model.

`toy` holds two-dimensional densities with known entropy, for demonstrations and tests.
"""

from . import toy
from .augment import Augment
from .batches import Batches
from .builtin import names
from .columns import ColumnKind
from .dataset import Dataset, Splits
from .schema import Schema
from .settings import DataSettings
from .source import load, read
from .split import subsample

__all__ = [
    "toy",
    "Schema",
    "ColumnKind",
    "Dataset",
    "Splits",
    "Batches",
    "Augment",
    "DataSettings",
    "load",
    "read",
    "names",
    "subsample",
]

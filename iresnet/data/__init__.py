"""Data sets: `load` gives the three parts of one to train on, `read` the rows of a file for a trained model.

`toy` holds two-dimensional densities whose entropy is known, for demonstrations and tests.
"""

from . import toy
from .augment import Augment
from .dataset import Batches, Dataset, Schema, Splits
from .source import DataSettings, load, names, read
from .split import subsample

__all__ = [
    "toy",
    "Schema",
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

"""The built-in datasets: scikit-learn's digits, the densities of `toy`, and those that are downloaded (`canonical`)."""

from __future__ import annotations

import torch

from . import canonical, toy
from .dataset import Dataset
from .sampling import seeded_generator
from .schema import Schema

TOY_SIZES = {"train": 50_000, "test": 10_000}  # points drawn from a toy density
DIGITS = Schema((1, 8, 8), 17, classes=tuple("0123456789"))


def names() -> list[str]:
    """Return the names of the built-in datasets."""
    return ["digits", *canonical.DATASETS, *toy.names()]


def schema_of(name: str) -> Schema:
    """Return the schema of a built-in dataset."""
    if name in canonical.DATASETS:
        return canonical.DATASETS[name].schema
    return DIGITS if name == "digits" else Schema((2,), columns=("x0", "x1"))


def split_sizes(name: str) -> dict[str, int]:
    """Return the sizes of the splits of a built-in dataset."""
    if name in canonical.DATASETS:
        return canonical.DATASETS[name].sizes
    return {"train": 1437, "test": 360} if name == "digits" else TOY_SIZES


def load_builtin(name: str, folder: str, part: str, seed: int = 0) -> Dataset:
    """Load a split of a built-in dataset."""
    if part not in split_sizes(name):
        raise ValueError(f"{name} has no {part} split of its own, only {' and '.join(split_sizes(name))}. Choose one.")
    if name in canonical.DATASETS:
        return canonical.read_canonical(name, folder, part)
    if name == "digits":
        return _digits(part)
    generator = seeded_generator(seed if part == "train" else 0, name, part)
    return Dataset(toy.sample(name, TOY_SIZES[part], generator), None, schema_of(name))


def _digits(part: str) -> Dataset:
    """Load scikit-learn's 1,797 digits, of which 360 are the test split."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    indices = dict(
        zip(("train", "test"), train_test_split(range(len(y)), test_size=360, random_state=0, stratify=y), strict=True)
    )
    pixels = torch.from_numpy(x.astype("uint8")).view(-1, *DIGITS.shape)
    return Dataset(pixels, torch.from_numpy(y.astype("int64")), DIGITS).take(indices[part])

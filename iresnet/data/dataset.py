"""Datasets: samples of one schema, held as tensors on one device, and their splits."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from ..spelling import quoted
from .labels import MISSING
from .sampling import seeded_generator, weighted_indices
from .schema import Schema

Batch: TypeAlias = tuple[Tensor, Tensor | None]


class Blocks(Protocol):
    """Training rows that are read from disk in blocks."""

    @property
    def rows(self) -> int:
        """How many there are."""

    def batch(self, seed: int, epoch: int, start: int, stop: int) -> Batch:
        """Return the rows start, ..., stop - 1 of an epoch, whose order is a function of (seed, epoch)."""

    def fingerprint(self) -> str:
        """Hash what the rows are."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples x, uint8 (N, C, H, W) or float32 (N, D), and labels y, int64 (N,), or None; -1 is a missing label.

    `names` holds the name of each sample: the file it came from, or the id of the row; it is empty where samples have
    no names. `rows` holds the row of the table, counted from 0, that each sample came from, if some were left out.
    `weights`, float64 (N,), say how often a sample counts: batches draw it in proportion. None: all equally often.
    `blocks` are the rows of a table that is larger than memory, of which x and y are a sample; batches come from them.
    """

    x: Tensor
    y: Tensor | None
    schema: Schema
    names: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    weights: Tensor | None = None
    blocks: Blocks | None = None

    def __post_init__(self) -> None:
        _check_kind(self.x, self.schema)
        (_check_pixels if self.schema.is_image else _check_numbers)(self.x, self.schema)
        if self.y is not None:
            _check_labels(self.y, len(self.x), len(self.schema.classes))
        for what, given in (("name", self.names), ("row", self.rows)):
            if given and len(given) != len(self.x):
                raise ValueError(
                    f"there must be one {what} per sample; got {len(given)} for {len(self.x)}. Give all, or none."
                )
        if self.weights is not None:
            _check_weights(self.weights, len(self.x))

    def __len__(self) -> int:
        return len(self.x)

    @property
    def total(self) -> int:
        """The number of samples that batches are drawn from."""
        return len(self.x) if self.blocks is None else self.blocks.rows

    def to(self, device: torch.device | str) -> Dataset:
        """Copy the samples and labels to another device."""
        y, weights = (None if t is None else t.to(device) for t in (self.y, self.weights))
        return replace(self, x=self.x.to(device), y=y, weights=weights)

    def take(self, indices: Tensor | Sequence[int]) -> Dataset:
        """Select the samples with these indices, in this order."""
        i = torch.as_tensor(indices, dtype=torch.int64, device=self.x.device)
        chosen = i.tolist() if self.names or self.rows else []
        names, rows = (tuple(given[k] for k in chosen) if given else () for given in (self.names, self.rows))
        y, weights = (None if t is None else t[i] for t in (self.y, self.weights))
        return Dataset(self.x[i], y, self.schema, names, rows, weights)

    def repeated(self, at_least: int = 1000) -> Dataset:
        """Return a dataset without weights in which samples occur in proportion to theirs, rounded up or down.

        It has a multiple of the samples of this dataset, and `at_least` so many. Without weights, it is this dataset.
        """
        if self.weights is None:
            return self
        n = len(self) * math.ceil(max(at_least, len(self)) / len(self))
        drawn = self.take(weighted_indices(self.weights.cpu(), n, seeded_generator(0, "repeated")))
        return replace(drawn, weights=None)

    def fingerprint(self) -> str:
        """Hash the samples, labels, weights and schema, not the names, to sixteen hexadecimal digits."""
        digest = hashlib.sha256()
        for tensor in (t for t in (self.x, self.y, self.weights) if t is not None):
            digest.update(tensor.cpu().contiguous().view(-1).numpy().data)
        digest.update(json.dumps(self.schema.to_dict(), sort_keys=True).encode())
        digest.update(b"" if self.blocks is None else self.blocks.fingerprint().encode())
        return digest.hexdigest()[:16]


def check_dataset(data: object) -> None:
    """Refuse what is not a dataset, such as a tensor of samples."""
    if not isinstance(data, Dataset):
        raise ValueError(
            f"data must be a Dataset; got {type(data).__name__}. For real numbers x, without labels, use "
            "data.Dataset(x, None, data.Schema(tuple(x.shape[1:])))."
        )


def check_unweighted(data: Dataset) -> None:
    """Refuse a dataset with weights where every sample counts once, in a mean and in its standard error."""
    if data.weights is not None:
        raise ValueError(
            "this metric counts every sample once; the dataset has weights. Leave them out: "
            "dataclasses.replace(data, weights=None)."
        )


def concatenate(parts: Sequence[Dataset]) -> Dataset:
    """Concatenate datasets of one schema; weights are for those that are whole."""
    x = torch.cat([part.x for part in parts])
    labels = [part.y for part in parts if part.y is not None]
    y = torch.cat(labels) if len(labels) == len(parts) else None
    names, rows = (tuple(itertools.chain.from_iterable(getattr(p, of) for p in parts)) for of in ("names", "rows"))
    return Dataset(x, y, parts[0].schema, names, rows)


@dataclass(frozen=True, eq=False)
class Splits:
    """The training, validation and test splits of a dataset; no sample is in two of them.

    `held_out` is the test split, None if nothing is held out; `test` raises an error then.
    """

    train: Dataset
    validation: Dataset
    held_out: Dataset | None

    def __post_init__(self) -> None:
        for name, part in (("validation", self.validation), ("test", self.held_out)):
            if part is not None and part.schema != self.schema:
                raise ValueError(f"all splits must have one schema; train has {self.schema}, {name} has {part.schema}.")

    @property
    def schema(self) -> Schema:
        """The schema that all splits share."""
        return self.train.schema

    @property
    def test(self) -> Dataset:
        """The test split."""
        if self.held_out is None:
            raise ValueError(
                "no test data are held out (data.test = 0). Give a file of your own with --data, or use --split "
                "validation."
            )
        return self.held_out

    @property
    def held_out_data(self) -> Dataset:
        """The test split or, if nothing is held out for it, the validation split."""
        return self.validation if self.held_out is None else self.held_out

    @property
    def parts(self) -> dict[str, Dataset]:
        """The splits by name."""
        known = {"train": self.train, "validation": self.validation}
        return known if self.held_out is None else {**known, "test": self.held_out}

    def to(self, device: torch.device | str) -> Splits:
        """Copy all splits to another device."""
        held_out = None if self.held_out is None else self.held_out.to(device)
        return Splits(self.train.to(device), self.validation.to(device), held_out)


def _check_kind(x: Tensor, schema: Schema) -> None:
    if type(x) is not Tensor:  # likelihoods and radii are proven of plain numbers
        raise ValueError(
            f"{schema} must come as a torch.Tensor; got {type(x).__name__}. Use x.as_subclass(torch.Tensor)."
        )
    dtype = torch.uint8 if schema.is_image else torch.float32
    if x.dtype != dtype or x.shape[1:] != schema.shape:
        raise ValueError(
            f"{schema} must come as {_name(dtype)} of shape (N, {', '.join(map(str, schema.shape))}); "
            f"got {_name(x.dtype)} of shape {tuple(x.shape)}."
        )
    if not len(x):
        raise ValueError("a dataset needs at least one sample; got none.")


def _check_pixels(x: Tensor, schema: Schema) -> None:
    levels = schema.levels or 256
    largest = x.flatten(1).amax(dim=1)
    if int(largest.max()) >= levels:
        i = int((largest >= levels).nonzero()[0])
        raise ValueError(f"pixels must lie in 0 .. {levels - 1}; got {int(largest[i])} in image {i}.")


def _check_numbers(x: Tensor, schema: Schema) -> None:
    finite = torch.isfinite(x)
    if not bool(finite.all()):
        row, column = (int(i) for i in (~finite).nonzero()[0])
        name = schema.names[column]
        raise ValueError(f"numbers must be finite; got {float(x[row, column])} in row {row}, column {quoted(name)}.")


def _check_labels(y: Tensor, samples: int, classes: int) -> None:
    if y.dtype != torch.int64 or y.shape != (samples,):
        got = f"{_name(y.dtype)} {tuple(y.shape)} for {samples} samples"
        raise ValueError(f"labels must be int64, one per sample; got {got}.")
    if not classes:
        raise ValueError("a dataset with labels needs a schema with classes; got none.")
    wrong = (y != MISSING) & ((y < 0) | (y >= classes))
    if bool(wrong.any()):
        i = int(wrong.nonzero()[0])
        raise ValueError(
            f"labels of {classes} classes must lie in 0 .. {classes - 1}, or be {MISSING} where one is missing; got "
            f"{int(y[i])} for sample {i}. Correct the labels or add the class."
        )


def _check_weights(weights: Tensor, samples: int) -> None:
    if weights.dtype != torch.float64 or weights.shape != (samples,):
        got = f"{_name(weights.dtype)} {tuple(weights.shape)} for {samples} samples"
        raise ValueError(f"weights must be float64, one per sample; got {got}.")
    if not bool((weights.isfinite() & (weights >= 0)).all()) or not bool((weights > 0).any()):
        raise ValueError(
            f"weights must be finite and not negative, and one of them positive; got {float(weights.min()):g} to "
            f"{float(weights.max()):g}. Remove samples that should not count."
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""What a report is made from: plain data, which a command collects from a run folder.

Shapes are checked here, so that what draws them need not ask.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ..data import Schema
from ..train.objective import OBJECTIVE_KINDS


@dataclass(frozen=True)
class Reconstruction:
    """Rows rebuilt from their codes: each with its l2 error, evaluations of g and largest bound of a block."""

    originals: Tensor
    rebuilt: Tensor
    errors: Tensor
    iterations: Tensor
    bounds: Tensor

    def __post_init__(self) -> None:
        n = len(self.originals)
        if self.rebuilt.shape != self.originals.shape:
            raise ValueError(
                f"rebuilt must have the shape of originals, {tuple(self.originals.shape)}; got "
                f"{tuple(self.rebuilt.shape)}. Pass each row beside its reconstruction."
            )
        for name in ("errors", "iterations", "bounds"):
            _check_shape(name, getattr(self, name), (n,), "Pass one number a row.")


@dataclass(frozen=True)
class SpectrumOfLayer:
    """The singular values of one layer, the largest first, beside the coefficient asked for and the proven bound."""

    name: str
    coefficient: float | None
    bound: float
    values: list[float]


@dataclass(frozen=True)
class Anomaly:
    """Rows changed in one way, each with its score in [0, 1]; 1: less likely than every held-out row."""

    name: str
    images: Tensor
    scores: Tensor
    note: str = ""

    def __post_init__(self) -> None:
        _check_shape(f"the scores of {self.name!r}", self.scores, (len(self.images),), "Pass one number a row.")
        if not bool(((self.scores >= 0) & (self.scores <= 1)).all()):
            raise ValueError(
                f"the scores of {self.name!r} must lie in [0, 1]; got {float(self.scores.min()):.3g} to "
                f"{float(self.scores.max()):.3g}. Use the share of held-out rows that are more likely."
            )


@dataclass(frozen=True)
class UnusualRows:
    """Held-out rows of a table by their anomaly scores: `scores` and log-likelihoods of all, and the highest few.

    Of these, `rows` are the values (k, D), `names` their names, `top` their scores and `likelihoods` their
    log-likelihoods; `gains` (k, D) say how many nats an ordinary value in a column would add.
    """

    scores: Tensor
    all_likelihoods: Tensor
    names: tuple[str, ...]
    rows: Tensor
    top: Tensor
    likelihoods: Tensor
    gains: Tensor

    def __post_init__(self) -> None:
        k = len(self.names)
        _check_shape("the log-likelihoods", self.all_likelihoods, tuple(self.scores.shape), "Pass one number a row.")
        for name in ("top", "likelihoods"):
            _check_shape(name, getattr(self, name), (k,), "Pass one number a row.")
        for name in ("rows", "gains"):
            _check_shape(name, getattr(self, name), (k, self.rows.shape[1]), "Pass one number a column.")


@dataclass(frozen=True)
class Material:
    """Everything that a page shows. What is missing (None, or an empty list or dict) is left out of the page.

    `log` holds the rows of log.csv; `evaluation` the content of evaluation.json; `certificate` that of
    `Certificate.to_json`; `interpolation` decoded lines (pairs, steps, *shape); `pictures` triples of title, path of
    a PNG file, caption; `family` the network's, as in its settings; `sha256` the digest of the file with its weights.
    `source` names the data, and `sizes` has the number of rows of each split; `unusual` are the rows of a table with
    the highest anomaly scores; `released` is the step whose weights are the model's.
    """

    name: str
    objective: str
    schema: Schema
    config: str
    environment: dict[str, Any]
    parameters: int
    log: list[dict[str, float | None]] = field(default_factory=list)
    evaluation: dict[str, Any] = field(default_factory=dict)
    certificate: dict[str, Any] = field(default_factory=dict)
    samples: Tensor | None = None
    data: Tensor | None = None
    reconstruction: Reconstruction | None = None
    interpolation: Tensor | None = None
    spectra: list[SpectrumOfLayer] = field(default_factory=list)
    anomalies: list[Anomaly] = field(default_factory=list)
    pictures: list[tuple[str, str | Path, str]] = field(default_factory=list)
    family: str = "iresnet"
    sha256: str = ""
    source: str = ""
    sizes: dict[str, int] = field(default_factory=dict)
    unusual: UnusualRows | None = None
    released: int | None = None

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVE_KINDS:
            raise ValueError(f"objective must be one of {', '.join(OBJECTIVE_KINDS)}; got {self.objective!r}.")
        rows = {"samples": self.samples, "data": self.data}
        if self.unusual is not None:
            rows["the unusual rows"] = self.unusual.rows
        if self.reconstruction is not None:
            rows["the originals of the reconstruction"] = self.reconstruction.originals
        if self.interpolation is not None:
            _check_interpolation(self.interpolation, self.schema.shape)
        rows |= {f"the rows of {a.name!r}": a.images for a in self.anomalies}
        for name, tensor in rows.items():
            if tensor is not None:
                shape = (len(tensor), *self.schema.shape)
                _check_shape(name, tensor, shape, "Pass rows in the shape that the schema says.")

    @property
    def is_image(self) -> bool:
        return self.schema.is_image

    @property
    def levels(self) -> int:
        """Levels of a pixel."""
        return self.schema.levels or 256

    @property
    def columns(self) -> list[str]:
        """One name a column."""
        return list(self.schema.names)

    @property
    def unproven(self) -> bool:
        """Whether there are blocks that are not proven to be contractions: what is decoded then has no proof."""
        return bool(self.certificate.get("blocks")) and not self.certificate.get("passed")

    @property
    def is_inverted(self) -> bool:
        """Whether anything is known of an inverse; of an ordinary ResNet nothing is."""
        known = self.evaluation.get("inverse") or self.certificate.get("blocks")
        return self.reconstruction is not None or bool(known)

    @property
    def split(self) -> str:
        """The name of the rows that the figures are about."""
        return str(self.evaluation.get("split") or "test")


def _check_interpolation(interpolation: Tensor, shape: tuple[int, ...]) -> None:
    if interpolation.dim() != 2 + len(shape) or tuple(interpolation.shape[2:]) != shape:
        raise ValueError(
            f"interpolation must have shape (pairs, steps, {', '.join(map(str, shape))}); got "
            f"{tuple(interpolation.shape)}. Stack the steps of each pair."
        )


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], remedy: str) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}; got {tuple(tensor.shape)}. {remedy}")

"""A run without a folder: what `Run` writes to files is kept in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from ..data import Schema
from ..lipschitz import defer_norms
from ..model import Model
from ..models import build
from ..presets import Experiment
from ..train.checkpoint import Checkpoint


@dataclass
class MemoryLog:
    """The rows of a log."""

    rows: list[dict[str, float | None]] = field(default_factory=list)

    def write(self, row: Mapping[str, float | None]) -> None:
        """Append a row."""
        self.rows.append(dict(row))

    def close(self) -> None:
        """Do nothing: there is no file."""


@dataclass(frozen=True)
class MemoryRun:
    """A training run without a folder; it cannot be resumed."""

    experiment: Experiment
    schema: Schema
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    log: MemoryLog = field(default_factory=MemoryLog)

    resumable: ClassVar[bool] = False

    def open_log(self, step: int, validation: list[str]) -> MemoryLog:
        """Return the log to write to."""
        return self.log

    def save_checkpoint(self, content: Checkpoint, name: str) -> None:
        """Keep a checkpoint."""
        self.checkpoints[name] = content

    def has_checkpoint(self, name: str) -> bool:
        """Whether a checkpoint of this name is kept."""
        return name in self.checkpoints

    def model(self, device: str | torch.device = "cpu") -> Model:
        """Return the model with the best averaged weights, in eval mode."""
        with torch.random.fork_rng(devices=[]), defer_norms():  # leave the user's random state unchanged
            model = build(self.experiment.network, self.schema, self.experiment.objective.kind).eval()
        model.load_state_dict(dict(self.checkpoints["best.safetensors"].tensors["weights"]))
        return model.to(device)

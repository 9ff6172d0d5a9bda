"""The settings of an experiment: data, network, objective, training and acceleration, written as one TOML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .. import config
from ..data import DataSettings
from ..data.sampling import check_seed
from ..gpu import Acceleration
from ..models import Network
from ..spelling import quoted
from ..train import Training
from ..train.objective import HYBRID_KINDS, ObjectiveSettings

#: Maximum number of steps or epochs.
LONGEST = 10**9


@dataclass(frozen=True)
class Experiment:
    """All settings of a run. `seed` seeds the initial weights, the order of the data and the noise."""

    name: str = "experiment"
    about: str = ""
    seed: int = 0
    data: DataSettings = field(default_factory=DataSettings)
    network: Network = field(default_factory=Network)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    training: Training = field(default_factory=Training)
    acceleration: Acceleration = field(default_factory=Acceleration)

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for name in ("steps", "epochs"):
            if (got := getattr(self.training, name)) > LONGEST:
                raise ValueError(f"{name} must be at most {LONGEST:,}; got {quoted(got)}.")
        if (got := self.training.labelled_batch) and self.objective.kind not in HYBRID_KINDS:
            raise ValueError(
                f"labelled_batch is for hybrids; got {got} for objective.kind = {self.objective.kind!r}. "
                "Set labelled_batch = 0."
            )


def with_overrides(experiment: Experiment, assignments: Sequence[str] | str) -> Experiment:
    """Return the experiment with settings replaced, each given as "training.steps=500"; setting steps resets epochs."""
    assignments = [assignments] if isinstance(assignments, str) else assignments
    experiment = config.override(experiment, *assignments)
    keys = {a.partition("=")[0].strip().rsplit(".", 1)[-1] for a in assignments}
    if "steps" in keys and "epochs" not in keys:
        experiment = replace(experiment, training=replace(experiment.training, epochs=0))
    return experiment

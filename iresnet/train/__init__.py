"""Training: from an objective and batches to a model with averaged weights.

In reading order: `objective` (a batch in, a loss and figures out), `settings` (how to train), `optimiser`, `average`
(of the weights), `guard` (what stops a training that has gone wrong), `checkpoint` (tensors and a JSON in one file),
`restoring` (what a training is resumed from, checked), `loop` (all of it, with the step written out).
"""

from .average import Average
from .guard import TrainingError
from .loop import Batch, Report, State, train
from .objective import Classification, Joint, Margin, MaximumLikelihood, Objective, ObjectiveSettings
from .optimiser import make_optimiser, parameter_groups, set_learning_rate
from .settings import OPTIMISERS, Training

__all__ = [
    "OPTIMISERS",
    "ObjectiveSettings",
    "Average",
    "Batch",
    "Classification",
    "Joint",
    "Margin",
    "MaximumLikelihood",
    "Objective",
    "Report",
    "State",
    "Training",
    "TrainingError",
    "make_optimiser",
    "parameter_groups",
    "set_learning_rate",
    "train",
]

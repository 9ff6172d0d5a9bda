"""Training: from an objective and batches to a model with averaged weights.

In reading order: `objective` (batch -> loss and metrics), `settings` (the training settings), `optimiser`, `average`
(of the weights), `guard` (stops a diverging run with a message that names the cause), `checkpoint` (tensors and JSON in
one file), `restoring` (what a checkpoint must hold to be resumed from), `distributed` (the processes that share a
training), `loop` (all of it; the step is written out).
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

"""Round the constrained weights of a run to float16: python -m tools.float16 RUN OUT

OUT is a run folder of its own: its model has the rounded weights, and its certificate and the likelihoods of validation
samples are computed for exactly them. It has no evaluation.json: evaluate it, compare it with RUN, and ship it
(`tools/ship.py`), which stores such weights in half the bytes. Biases, scales and statistics, one in a hundred numbers,
keep float32; some of them are too large for float16.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from torch import nn

from iresnet.run import Run
from iresnet.run.releasing import reference_likelihoods
from iresnet.run.trained import TrainedModel
from iresnet.run.weights import complete_state, slim_state

#: What environment.json says of such a run, so that results/shipped.json does.
NOTE = "rounded to float16 after training"


def round_weights_(model: nn.Module) -> None:
    """Replace every constrained weight of a model in eval mode, W min(1, c / sigma), by the nearest float16 numbers."""
    state = {k: v.half() if k.endswith(".weight.original") else v for k, v in slim_state(model).items()}
    model.load_state_dict(complete_state(model, state))


def round_run(run: Run, folder: Path) -> Run:
    """Write a run folder with the rounded model of a run, certified; a certificate that does not pass raises."""
    before = TrainedModel.open(run.folder)
    round_weights_(before.model)
    if (certificate := before.certificate) is None or not certificate.passed:
        raise ValueError(f"the rounded weights of {run.folder} must be certified; they are not. Ship them as float32.")
    reference = None if before.reference is None else reference_likelihoods(before.model, run.splits().validation)
    noted = {**before.environment, "weights": NOTE}
    return replace(before, reference=reference, environment=noted).save(folder)


if __name__ == "__main__":
    print(round_run(Run.open(sys.argv[1]), Path(sys.argv[2])).folder)

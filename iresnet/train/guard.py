"""What stops a training that has gone wrong: the first number that is not one, its step, its layer and a remedy."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from .objective import Objective

#: On a GPU the loss is read this often, in steps: every reading makes it wait.
GUARD_EVERY = 20

#: The methods whose results are looked at when a step is replayed.
COMPUTING = ("forward", "forward_and_logdet")


class TrainingError(RuntimeError):
    """Training cannot go on; the message names the step, the place and the remedy."""


REMEDY = "Lower learning_rate, lengthen warmup, or clip harder."


def guard_loss(
    objective: Objective, loss: Tensor, step: int, x: Tensor, y: Tensor | None, chance: Mapping[str, Any]
) -> None:
    """Stop at the first loss that is not a number, and say where it came from.

    `chance` are the options that the objective was called with.
    """
    if (loss.is_cuda and (step + 1) % GUARD_EVERY) or math.isfinite(float(loss.detach())):
        return
    bad = [n for n, p in objective.named_parameters() if not bool(torch.isfinite(p).all())]
    place = f"{bad[0]} is the first parameter that is not finite" if bad else _first_bad_module(objective, x, y, chance)
    since = f" (it is looked at every {GUARD_EVERY} steps)" if loss.is_cuda else ""
    raise TrainingError(f"the loss of step {step + 1} is {float(loss.detach())}{since}; {place}. {REMEDY}")


def guard_gradient(objective: Objective, norm: Tensor, step: int) -> None:
    """Stop at a gradient that is not a number: on a CPU before it reaches the weights, on a GPU within some steps."""
    if (norm.is_cuda and (step + 1) % GUARD_EVERY) or math.isfinite(float(norm)):
        return
    bad = [n for n, p in objective.named_parameters() if p.grad is not None and not bool(p.grad.isfinite().all())]
    place = f"that of {bad[0]} is the first that is not finite" if bad else "its norm overflows"
    after = (
        f"(it is looked at every {GUARD_EVERY} steps)"
        if norm.is_cuda
        else f"The weights are still those of step {step}."
    )
    raise TrainingError(f"the gradient of step {step + 1} is {float(norm)}; {place}. {after} {REMEDY}")


def _first_bad_module(objective: Objective, x: Tensor, y: Tensor | None, chance: Mapping[str, Any]) -> str:
    """Replay the step and name the innermost module whose output is the first that is not finite."""
    names = {m: name for name, m in objective.named_modules() if name}
    found: list[str] = []

    def look(frame: FrameType, event: str, output: Any) -> None:
        """What every function returns. A density asks for value and determinant together, which no hook sees."""
        if event != "return" or frame.f_code.co_name not in COMPUTING or found:
            return
        module = frame.f_locals.get("self")
        tensors = [t for t in (output if isinstance(output, tuple) else (output,)) if isinstance(t, Tensor)]
        if isinstance(module, nn.Module) and module in names and not all(bool(t.isfinite().all()) for t in tensors):
            found.append(names[module])

    before = sys.getprofile()
    try:
        with torch.no_grad():
            sys.setprofile(look)
            objective(x, y, **chance)
    except ValueError:  # an input that is refused
        found.append("an unknown layer")
    finally:
        sys.setprofile(before)
    return (
        f"the output of {found[0]} is the first that is not finite"
        if found
        else "every layer is finite, so see the data"
    )

"""Guards that stop a diverging run: the error names the step, the first layer that is not finite, and a remedy."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ..fused import unfused
from .objective import Objective

#: On a GPU the loss is read every so many steps: each read makes the CPU wait.
GUARD_EVERY = 20

#: The methods whose outputs are inspected when a step is replayed.
REPLAYED_METHODS = ("forward", "forward_and_logdet")


class TrainingError(RuntimeError):
    """Training cannot continue. The message names the step, the layer and the remedy."""


REMEDY = "Lower learning_rate, lengthen warmup, or clip harder."


def guard_loss(
    objective: Objective, loss: Tensor, step: int, x: Tensor, y: Tensor | None, options: Mapping[str, Any]
) -> None:
    """Raise `TrainingError` if the loss is not finite, and name the layer that caused it.

    `options` are the keyword arguments that the objective was called with.
    """
    if (loss.is_cuda and (step + 1) % GUARD_EVERY) or math.isfinite(float(loss.detach())):
        return
    bad = [n for n, p in objective.named_parameters() if not bool(torch.isfinite(p).all())]
    place = (
        f"{bad[0]} is the first parameter that is not finite" if bad else _first_bad_module(objective, x, y, options)
    )
    since = f" (checked every {GUARD_EVERY} steps)" if loss.is_cuda else ""
    raise TrainingError(f"the loss of step {step + 1} is {float(loss.detach())}{since}; {place}. {REMEDY}")


def guard_gradient(objective: Objective, norm: Tensor, step: int) -> None:
    """Raise `TrainingError` if the gradient is not finite.

    On a CPU that is before the gradient reaches the weights, on a GPU within `GUARD_EVERY` steps.
    """
    if (norm.is_cuda and (step + 1) % GUARD_EVERY) or math.isfinite(float(norm)):
        return
    bad = [n for n, p in objective.named_parameters() if p.grad is not None and not bool(p.grad.isfinite().all())]
    place = f"that of {bad[0]} is the first that is not finite" if bad else "its norm overflows"
    after = f"(checked every {GUARD_EVERY} steps)" if norm.is_cuda else f"The weights are still those of step {step}."
    raise TrainingError(f"the gradient of step {step + 1} is {float(norm)}; {place}. {after} {REMEDY}")


def _first_bad_module(objective: Objective, x: Tensor, y: Tensor | None, options: Mapping[str, Any]) -> str:
    """Replay the forward pass and name the innermost module with the first output that is not finite."""
    names = {m: name for name, m in objective.named_modules() if name}
    found: list[str] = []

    def inspect(frame: FrameType, event: str, output: Any) -> None:
        """Inspect what each method returns. Module hooks would miss `forward_and_logdet`, which densities call."""
        if event != "return" or frame.f_code.co_name not in REPLAYED_METHODS or found:
            return
        module = frame.f_locals.get("self")
        tensors = [t for t in (output if isinstance(output, tuple) else (output,)) if isinstance(t, Tensor)]
        if isinstance(module, nn.Module) and module in names and not all(bool(t.isfinite().all()) for t in tensors):
            found.append(names[module])

    before = sys.getprofile()
    try:
        with torch.no_grad(), unfused():
            sys.setprofile(inspect)
            objective(x, y, **options)
    except ValueError:  # a module refused its input
        found.append("an unknown layer")
    finally:
        sys.setprofile(before)
    return (
        f"the output of {found[0]} is the first that is not finite"
        if found
        else "every layer is finite: check the data"
    )

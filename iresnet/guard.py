"""What stops a training that has gone wrong: the first number that is not one, its step, its layer and a remedy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .objective import Objective
from .transform import Transform

#: On a GPU the loss is read this often, in steps: every reading makes it wait.
GUARD_EVERY = 20


class TrainingError(RuntimeError):
    """Training cannot go on; the message names the step, the place and the remedy."""


REMEDY = "Lower learning_rate, lengthen warmup, or clip harder."


def guard_loss(
    objective: Objective, loss: Tensor, step: int, x: Tensor, y: Tensor | None, generator: torch.Generator | None
) -> None:
    """Stop at the first loss that is not a number, and say where it came from."""
    if (loss.is_cuda and (step + 1) % GUARD_EVERY) or math.isfinite(float(loss.detach())):
        return
    bad = [n for n, p in objective.named_parameters() if not bool(torch.isfinite(p).all())]
    if bad:
        place = f"{bad[0]} is the first parameter that is not finite"
    else:
        place = _first_bad_module(objective, x, y, generator)
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


def _first_bad_module(objective: Objective, x: Tensor, y: Tensor | None, generator: torch.Generator | None) -> str:
    """Replay the step and name the innermost module whose output is the first that is not finite."""
    found: list[str] = []

    def look(name: str, output: Any) -> None:
        tensors = [t for t in (output if isinstance(output, tuple) else (output,)) if isinstance(t, Tensor)]
        if not found and not all(bool(t.isfinite().all()) for t in tensors):
            found.append(name)

    def looking(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            output = method(*args, **options)
            look(name, output)
            return output

        return call

    named = [(name, m) for name, m in objective.named_modules() if name]
    handles = [m.register_forward_hook(lambda _, __, output, name=name: look(name, output)) for name, m in named]
    # A density asks transforms for value and determinant together, which no hook sees.
    transforms = [(name, m) for name, m in named if isinstance(m, Transform)]
    for name, m in transforms:
        vars(m)["forward_and_logdet"] = looking(name, m.forward_and_logdet)
    try:
        with torch.no_grad():
            objective(x, y, generator=generator)
    except ValueError:  # an input that is refused, or a bound that hooks make unreadable
        found.append("an unknown layer")
    finally:
        for handle in handles:
            handle.remove()
        for _, m in transforms:
            del vars(m)["forward_and_logdet"]
    return (
        f"the output of {found[0]} is the first that is not finite"
        if found
        else "every layer is finite, so see the data"
    )

"""g as steps, as `lipschitz.program` reads it, and layers that keep their input beside what they make of it.

h -> (a h, b f(h))        is        keep, the steps of f, join        with a and b as the tensor of `join`
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..lipschitz import Concatenated, leaves, program
from ..lipschitz.program import Program, Step
from ..spectral import NoBoundKnown
from .convolution import Convolution

KEEP, JOIN = Step("keep"), Step("join", 1)

#: Activations whose slope is known from x and y.
SLOPES = frozenset({"elu", "tanh", "relu", "softplus", "sine", "lipswish", "identity"})


def read(g: nn.Module) -> Program | None:
    """The steps of g; None where it has a forward, a layer or a padding that cannot be read."""
    if not any(isinstance(m, Concatenated) for m in g.modules()):
        return program.read(g)
    steps = list[Step]()
    try:
        for _, leaf in leaves(g):
            own = read(leaf.f) if type(leaf) is Concatenated else program.read(leaf)
            if own is None:
                return None
            steps += [KEEP, *own, JOIN] if type(leaf) is Concatenated else own
    except NoBoundKnown:
        return None
    return tuple(steps)


def tensors(g: nn.Module) -> list[Tensor]:
    """What the steps take beside x, in order; cos and sin are those of float64, as in what is proven."""
    found = list[Tensor]()
    for _, leaf in leaves(g):
        if type(leaf) is Concatenated:
            angle = leaf.angle.double()
            found += [*tensors(leaf.f), torch.stack([angle.cos(), angle.sin()])]
        else:
            found += program.tensors(leaf)
    return found


def unknown(steps: Program) -> str:
    """The first activation without a slope, or nothing."""
    return next((s.kind for s in steps if acts(s) and s.kind not in SLOPES), "")


def acts(step: Step) -> bool:
    """Whether a step is an activation."""
    return step.kind not in ("linear", "conv", "keep", "join")


def advance(step: Step, way: Convolution, x: Tensor, values: list[Tensor], kept: list[Tensor]) -> Tensor:
    """One step of g in a given way; `kept` holds what waits for its join."""
    if step.kind == "keep":
        kept.append(x)
        return x
    if step.kind == "join":
        a, b = values[0].unbind()
        return torch.cat([a * kept.pop(), b * x], dim=1)
    return way(step, x, values)

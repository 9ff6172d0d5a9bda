"""tr J where it has a closed form, for about the price of a forward pass: a first term of ln det(I + J) without noise.

With one hidden layer J = D2 W2 D1 W1 D0, where D1 holds the slopes of the activation between the layers, and D0 and D2
those at the ends, where there are any. The trace is cyclic, so that

    tr J = sum_h D1_h (R d)_h,     R = W1 o W2' entry by entry,     d = the diagonal of D0 D2.

For convolutions R is one too: the products W1[h, c, o] W2[c, h, -o] of the offsets o that both have. The zeros around d
are those around x, so that the borders are right. Three linear layers become two: tr(W3 D2 W2 D1 W1) is
tr(D2 W2 D1 W), W = W1 W3. Longer chains would take more than a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor
from torch.nn import functional

from .program import LINEAR, Program, Step, apply_step

#: A result of a step -> what comes back to each of its inputs.
StepTranspose: TypeAlias = Callable[[Tensor], "list[Tensor]"]


def closed_form_trace(
    program: Program, x: Tensor, values: Sequence[Tensor], backs: Sequence[StepTranspose]
) -> Callable[[], Tensor] | None:
    """What computes tr J of every sample, from what `derivative.linearised` was given at x and the transposes that it
    returned; None where there is no closed form."""
    if any(step.kind in ("join", "descent") for step in program.steps):
        return None
    layers = [step for step in program.steps if step.kind in LINEAR]
    weights, slopes = _weights_and_slopes(program, values, backs)
    if len(layers) == 2 and all(_is_supported(step) for step in layers):
        return lambda: _trace(layers[0], x, weights[0], weights[1], slopes[1], slopes[0] + slopes[2])
    if len(layers) == 3 and all(step.kind == "linear" for step in layers) and not slopes[0] + slopes[3]:
        return lambda: _trace(layers[0], x, weights[0] @ weights[2], weights[1], slopes[1], slopes[2])
    return None


def _weights_and_slopes(
    program: Program, values: Sequence[Tensor], backs: Sequence[StepTranspose]
) -> tuple[list[Tensor], list[list[StepTranspose]]]:
    """The weights, and the slopes before, between and after them as maps v -> D v."""
    weights: list[Tensor] = []
    slopes: list[list[StepTranspose]] = [[]]
    for (step, _, own), back in zip(program.with_tensors(values), backs, strict=True):
        if step.kind in LINEAR:
            weights.append(own[0])
            slopes.append([])
        elif step.activation is not None:
            slopes[-1].append(back)
    return weights, slopes


def _is_supported(step: Step) -> bool:
    """A linear layer, or a convolution of all channels with all at every position."""
    g = step.geometry
    return step.kind == "linear" or (g is not None and {*g.stride, *g.dilation, g.groups} == {1})


def _trace(
    layer: Step, x: Tensor, first: Tensor, second: Tensor, hidden: list[StepTranspose], ends: list[StepTranspose]
) -> Tensor:
    """sum_h D1_h (R d)_h; without activations at the ends d is all ones, one row and one channel of them."""
    joint, d = _joint_weight(first, second), _apply_slopes(ends, x.new_ones(1, 1, *x.shape[2:]))
    if not ends:
        joint = joint.sum(1, keepdim=True)
    rows = _apply_slopes(hidden, apply_step(Step(layer.kind, 1, layer.geometry), [d.to(joint.dtype)], [joint]))
    return rows.sum(tuple(range(1, rows.dim()))).expand(len(x))


def _apply_slopes(slopes: list[StepTranspose], v: Tensor) -> Tensor:
    for back in slopes:
        (v,) = back(v)
    return v


def _joint_weight(first: Tensor, second: Tensor) -> Tensor:
    """W1[h, c, o] W2[c, h, -o]: kernels are centred on each other, since both layers together keep the size of x."""
    back = second.transpose(0, 1).flip(tuple(range(2, second.dim())))
    margins = [(a - b) // 2 for a, b in zip(first.shape[2:], back.shape[2:], strict=True)]
    return first * functional.pad(back, [m for margin in reversed(margins) for m in (margin, margin)])

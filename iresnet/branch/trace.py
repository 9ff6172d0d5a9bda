"""tr J in closed form, at about the cost of a forward pass: the first term of ln det(I + J) without noise.

With one hidden layer J = D2 W2 D1 W1 D0, where D1 holds the slopes of the activation between the layers, and D0 and D2
those before and after, if any. The trace is cyclic, so

    tr J = sum_h D1_h (R d)_h,     R = W1 o W2' entry by entry,     d = the diagonal of D0 D2.

For convolutions R is a convolution too: the products W1[h, c, o] W2[c, h, -o] over the offsets o that both have. d is
padded with zeros like x, so the borders are right. Three linear layers reduce to two: tr(W3 D2 W2 D1 W1) =
tr(D2 W2 D1 W), W = W1 W3. Deeper networks would cost more than a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor
from torch.nn import functional

from .program import LINEAR, Program, Step, apply_step

#: The transposed derivative of a step: gradient of its result -> gradients of its inputs.
StepTranspose: TypeAlias = Callable[[Tensor], "list[Tensor]"]


def closed_form_trace(
    program: Program, x: Tensor, values: Sequence[Tensor], transposes: Sequence[StepTranspose]
) -> Callable[[], Tensor] | None:
    """Return a function that computes tr J of every sample; None if there is no closed form.

    `values` and `transposes` are the arguments and the result of `derivative.linearise_program` at x.
    """
    if any(step.kind in ("join", "descent") for step in program.steps):
        return None
    layers = [step for step in program.steps if step.kind in LINEAR]
    weights, slopes = _weights_and_slopes(program, values, transposes)
    if len(layers) == 2 and all(_is_supported(step) for step in layers):
        return lambda: _trace(layers[0], x, weights[0], weights[1], slopes[1], slopes[0] + slopes[2])
    if len(layers) == 3 and all(step.kind == "linear" for step in layers) and not slopes[0] + slopes[3]:
        return lambda: _trace(layers[0], x, weights[0] @ weights[2], weights[1], slopes[1], slopes[2])
    return None


def _weights_and_slopes(
    program: Program, values: Sequence[Tensor], transposes: Sequence[StepTranspose]
) -> tuple[list[Tensor], list[list[StepTranspose]]]:
    """Return the weights, and the slopes before, between and after them as maps v -> D v."""
    weights: list[Tensor] = []
    slopes: list[list[StepTranspose]] = [[]]
    for (step, _, own), transpose in zip(program.with_tensors(values), transposes, strict=True):
        if step.kind in LINEAR:
            weights.append(own[0])
            slopes.append([])
        elif step.activation is not None:
            slopes[-1].append(transpose)
    return weights, slopes


def _is_supported(step: Step) -> bool:
    """Whether a step is a linear layer, or a convolution without stride, dilation and groups."""
    g = step.geometry
    return step.kind == "linear" or (g is not None and {*g.stride, *g.dilation, g.groups} == {1})


def _trace(
    layer: Step, x: Tensor, first: Tensor, second: Tensor, hidden: list[StepTranspose], ends: list[StepTranspose]
) -> Tensor:
    """Compute sum_h D1_h (R d)_h. Without activations at the ends d is all ones, and one sample and channel do."""
    joint, d = _joint_weight(first, second), _apply_slopes(ends, x.new_ones(1, 1, *x.shape[2:]))
    if not ends:
        joint = joint.sum(1, keepdim=True)
    diagonal = _apply_slopes(hidden, apply_step(Step(layer.kind, 1, layer.geometry), [d.to(joint.dtype)], [joint]))
    return diagonal.sum(tuple(range(1, diagonal.dim()))).expand(len(x))


def _apply_slopes(slopes: list[StepTranspose], v: Tensor) -> Tensor:
    for transpose in slopes:
        (v,) = transpose(v)
    return v


def _joint_weight(first: Tensor, second: Tensor) -> Tensor:
    """Compute R = W1[h, c, o] W2[c, h, -o]. The kernels share their centre, as g keeps the size of x."""
    mirrored = second.transpose(0, 1).flip(tuple(range(2, second.dim())))
    margins = [(a - b) // 2 for a, b in zip(first.shape[2:], mirrored.shape[2:], strict=True)]
    return first * functional.pad(mirrored, [m for margin in reversed(margins) for m in (margin, margin)])

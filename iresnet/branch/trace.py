"""tr J in closed form, at about the cost of a forward pass: the first term of ln det(I + J) without noise.

With one hidden layer J = D2 W2 D1 W1 D0, where D1 holds the slopes of the activation between the layers, and D0 and D2
those before and after, if any. The trace is cyclic, so

    tr J = sum_h D1_h (R d)_h,     R = W1 o W2' entry by entry,     d = the diagonal of D0 D2.

For convolutions R is a convolution too: the products W1[h, c, o] W2[c, h, -o] over the offsets o that both have. d is
padded with zeros like x, so the borders are right. Three linear layers reduce to two: tr(W3 D2 W2 D1 W1) =
tr(D2 W2 D1 W), W = W1 W3. So do three convolutions whose middle one is 1 x 1, as in the paper, at every hidden position
by itself: W[h1, h2] = sum_o W1[h1, :, o] W3[:, h2, -o] over the offsets o that lie inside the image there. Deeper
networks would cost more than a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
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
    if len(layers) == 3 and _is_pointwise_inside(layers, weights) and not slopes[0] + slopes[3]:
        return lambda: _trace_by_position(layers[0], x, weights, slopes[1], slopes[2])
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


def _is_pointwise_inside(layers: list[Step], weights: list[Tensor]) -> bool:
    """Whether three layers are convolutions, the middle one 1 x 1 without padding."""
    middle = layers[1].geometry
    if middle is None or not all(_is_supported(step) for step in layers):
        return False
    return weights[1].shape[2:].numel() == 1 and not any(middle.before + middle.after)


def _trace_by_position(
    layer: Step, x: Tensor, weights: list[Tensor], first: list[StepTranspose], second: list[StepTranspose]
) -> Tensor:
    """Compute sum_q tr(D2_q W2 D1_q W_q) over the hidden positions q; W_q differs only near the border."""
    w1, w2, w3 = weights
    matrices = torch.einsum("hc...,cg...->gh...", w1, _mirrored(w1, w3)) * w2
    offsets = torch.eye(w1.shape[2:].numel(), dtype=w1.dtype, device=x.device).reshape(-1, 1, *w1.shape[2:])
    inside = apply_step(Step(layer.kind, 1, layer.geometry), [offsets.new_ones(1, 1, *x.shape[2:])], [offsets])[0]
    # The kinds of positions, by the offsets inside.
    kinds, kind = inside.flatten(1).unique(dim=1, return_inverse=True)  # type: ignore[no-untyped-call]
    ones = x.new_ones(1, 1, *inside.shape[1:])
    d1, d2 = (
        _apply_slopes(slopes, ones.expand(1, len(w), *inside.shape[1:])).movedim(1, -1).flatten(1, -2)
        for slopes, w in ((first, w1), (second, w2))
    )
    total = x.new_zeros(len(x))
    for i, matrix in enumerate((matrices.flatten(2) @ kinds).unbind(2)):
        here = kind == i
        total = total + (d1[:, here] @ matrix.T * d2[:, here]).sum((1, 2))
    return total


def _apply_slopes(slopes: list[StepTranspose], v: Tensor) -> Tensor:
    for transpose in slopes:
        (v,) = transpose(v)
    return v


def _joint_weight(first: Tensor, second: Tensor) -> Tensor:
    """Compute R = W1[h, c, o] W2[c, h, -o]."""
    return first * _mirrored(first, second).transpose(0, 1)


def _mirrored(first: Tensor, last: Tensor) -> Tensor:
    """Return W[c, h, -o] for the offsets of the first kernel. They share their centre, as g keeps the size of x."""
    mirrored = last.flip(tuple(range(2, last.dim())))
    margins = [(a - b) // 2 for a, b in zip(first.shape[2:], mirrored.shape[2:], strict=True)]
    return functional.pad(mirrored, [m for margin in reversed(margins) for m in (margin, margin)])

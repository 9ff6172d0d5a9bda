"""tr J where it has a closed form, for about the price of a forward pass: a first term of ln det(I + J) without noise.

With one hidden layer J = D2 W2 D1 W1 D0, where D1 holds the slopes of the activation between the layers, and D0 and D2
those at the ends, where there are any. The trace is cyclic, so that

    tr J = sum_h D1_h (R d)_h,     R = W1 o W2' entry by entry,     d = the diagonal of D0 D2.

For convolutions R is one too: the products W1[h, c, o] W2[c, h, -o] of the offsets o that both have. The zeros around d
are those around x, so that the borders are right. Three linear layers become two: tr(W3 D2 W2 D1 W1) is
tr(D2 W2 D1 W), W = W1 W3. Longer chains would take more than a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from ..logdet import Pull
from .program import Program, Step, acts, apply, pull


def closed_trace(
    program: Program, x: Tensor, values: list[Tensor], transposes: list[Pull]
) -> Callable[[], Tensor] | None:
    """What computes tr J of every sample, from what `program.linearise` was given at x and its transposes; None where
    there is no closed form."""
    layers = [step for step in program if not acts(step)]
    weights, slopes = _parts(program, values, transposes)
    if len(layers) == 2 and all(_plain(step) for step in layers):
        return lambda: _trace(layers[0], x, weights[0], weights[1], slopes[1], slopes[0] + slopes[2])
    if len(layers) == 3 and all(step.kind == "linear" for step in layers) and not slopes[0] + slopes[3]:
        return lambda: _trace(layers[0], x, weights[0] @ weights[2], weights[1], slopes[1], slopes[2])
    return None


def _parts(program: Program, values: list[Tensor], transposes: list[Pull]) -> tuple[list[Tensor], list[list[Pull]]]:
    """The weights, and the slopes before, between and after them as maps v -> D v."""
    weights: list[Tensor] = []
    slopes: list[list[Pull]] = [[]]
    used = 0
    for step, transpose in zip(program, transposes, strict=True):
        if acts(step):
            slopes[-1].append(transpose)
        else:
            weights.append(values[used])
            slopes.append([])
        used += step.tensors
    return weights, slopes


def _plain(step: Step) -> bool:
    """A linear layer, or a convolution of all channels with all at every position."""
    g = step.geometry
    return step.kind == "linear" or (g is not None and {*g.stride, *g.dilation, g.groups} == {1})


def _trace(layer: Step, x: Tensor, first: Tensor, second: Tensor, hidden: list[Pull], ends: list[Pull]) -> Tensor:
    """sum_h D1_h (R d)_h; without activations at the ends d is all ones, one row and one channel of them."""
    joint, d = _joint(first, second), pull(ends, x.new_ones(1, 1, *x.shape[2:]))
    if not ends:
        joint = joint.sum(1, keepdim=True)
    rows = pull(hidden, apply(Step(layer.kind, 1, layer.geometry), d.to(joint.dtype), [joint]))
    return rows.sum(tuple(range(1, rows.dim()))).expand(len(x))


def _joint(first: Tensor, second: Tensor) -> Tensor:
    """W1[h, c, o] W2[c, h, -o]: kernels are centred on each other, since both layers together keep the size of x."""
    back = second.transpose(0, 1).flip(tuple(range(2, second.dim())))
    margins = [(a - b) // 2 for a, b in zip(first.shape[2:], back.shape[2:], strict=True)]
    return first * functional.pad(back, [m for margin in reversed(margins) for m in (margin, margin)])

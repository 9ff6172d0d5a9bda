"""A unit with few channels outside and many inside, by `product`: k x k, 1 x 1, ..., and again k x k convolutions.

There may be any number of 1 x 1 convolutions, also none. The activation is the same everywhere, ELU or a sine,
sin(w h) / w; here it is represented by a number, w, or 0 for ELU. With U the values and tangents gathered with their
neighbours (`maps.Unrolled.spread`), all linear maps are matrix products:

    A_1 = activate(U W_1'),   A_2 = activate(A_1 W_2'), ...,
    [y'; J v] = sums over neighbours of the last A times the last W'

and the backward pass calls `activate_backward` once for every A. Only the A are saved, and for a sine also the slopes
and their derivatives along the tangents, D = [a'; a'' t], which do not follow from A: twice as much memory.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...branch import Step
from ...timing import can_measure, fastest
from ..maps import Dense, Map, Unrolled
from . import counts, is_ready


class Tile(NamedTuple):
    """Rows of the state, columns and depth of a tile, warps, stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


#: The first is used if nothing can be measured.
TILES = (Tile(64, 128, 64, 8, 3), Tile(64, 128, 64, 4, 3))


def supported(maps: list[Map], activations: list[Step | None], biases: list[Tensor | None], like: Tensor) -> bool:
    """Whether maps, the activations before them (None: none) and biases form such a unit, for matrices like `like`."""
    if len(maps) < 2 or [type(m) for m in maps] != [Unrolled, *[Dense] * (len(maps) - 2), Unrolled]:
        return False
    if (
        activations[0] is not None
        or any(a != activations[1] for a in activations[2:])
        or kernel_of(activations[1]) is None
    ):
        return False
    first, *middle, last = maps
    inner = {last.shape[1], *(n for m in middle for n in m.shape[:2])}  # type: ignore[attr-defined]
    wide = first.widens and not last.widens and all(n % 128 == 0 for n in inner)  # type: ignore[attr-defined]
    fits = wide and all(bias is not None for bias in biases[:-1]) and counts(len(like), max(inner))
    return fits and is_ready(like.dtype, like.device)


def kernel_of(activation: Step | None) -> float | None:
    """Return the number that represents an activation: the frequency of a sine, 0 for ELU; None for any other."""
    return None if activation is None else activation.kernel


class Wide(torch.autograd.Function):
    """(x', [x'; v], W_1, b_1, W_2, b_2, ..., the last W) -> [y'; J v], and for every A its D, or A itself for ELU.

    `matrices` are the weights as returned by `Map.matrix`.
    """

    @staticmethod
    def forward(ctx: Any, maps: list[Any], matrices: list[Tensor], frequency: float, x: Tensor, both: Tensor,
                *tensors: Tensor) -> tuple[Tensor, ...]:  # fmt: skip
        dual, made, kept = len(both) > len(x), list[Tensor](), list[Tensor]()
        for matrix, bias in zip(matrices[:-1], tensors[1::2], strict=True):
            a = made[-1] if made else maps[0].spread(both, matrix, back=False)
            a, d = activate(a, matrix, bias.detach(), dual, frequency)
            made.append(a)
            kept.append(d)
        for m in matrices[1:]:  # measured here, since the backward pass runs in another thread
            _tile("activate_backward", len(both), len(m), m.shape[1], dual, frequency, both.dtype, both.device)
        ctx.maps, ctx.matrices, ctx.frequency, ctx.rows, ctx.dual = maps, matrices, frequency, len(x), dual
        ctx.save_for_backward(both, *made, *kept)
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)  # otherwise every backward pass would write large tensors of zeros
        return maps[-1].forward(made[-1], matrices[-1]), *kept

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        both, *tensors = ctx.saved_tensors
        made, kept = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        (first, *middle, last), (m1, *matrices) = ctx.maps, ctx.matrices
        g = last.spread(g, matrices[-1], back=True)
        found = [last.folded(g.T @ made[-1])]
        for k in range(len(kept) - 1, -1, -1):
            g, sums = activate_backward(g, matrices[k], kept[k], ctx.dual, ctx.frequency)
            weight = middle[k - 1].gradient(made[k - 1], g, matrices[k - 1]) if k else first.gradient(both, g, m1)
            found += [sums.sum(0), weight]
        return None, None, None, first.transpose(g[: ctx.rows], m1), None, *found[::-1]


def activate(a: Tensor, b: Tensor, bias: Tensor, dual: bool, frequency: float) -> tuple[Tensor, Tensor]:
    """Return A = [a(h + bias); a'(h + bias) t] for a b' = [h; t], and D (for ELU: A) for `activate_backward`."""
    out = a.new_empty(len(a), len(b))
    kept = torch.empty_like(out) if frequency else out
    tile = _tile("activate", len(a), a.shape[1], len(b), dual, frequency, a.dtype, a.device)
    _launch_activate(a, b.contiguous(), bias, out, kept, dual, frequency, tile)
    return out, kept


def activate_backward(a: Tensor, b: Tensor, kept: Tensor, dual: bool, frequency: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of [h; t] from a b, those of the output of `activate`, and partial sums over rows."""
    tile = _tile("activate_backward", len(a), a.shape[1], b.shape[1], dual, frequency, a.dtype, a.device)
    return _launch_back(a, b.contiguous(), kept, dual, frequency, tile)


def _launch_activate(
    a: Tensor, b: Tensor, bias: Tensor, out: Tensor, kept: Tensor, dual: bool, frequency: float, tile: Tile
) -> None:
    from .product import activate as kernel

    rows, columns = len(a) // (1 + dual), len(b)
    grid = -(-rows // tile.rows) * (columns // tile.columns)
    kernel[(grid,)](a, b, bias, out, kept, rows, K=a.shape[1], N=columns, BM=tile.rows, BN=tile.columns, BK=tile.depth,
                    STAGES=tile.stages, DUAL=dual, FREQUENCY=frequency, num_warps=tile.warps)  # fmt: skip


def _launch_back(a: Tensor, b: Tensor, kept: Tensor, dual: bool, frequency: float, tile: Tile) -> tuple[Tensor, Tensor]:
    from .product import activate_backward as kernel

    rows, columns = len(a) // (1 + dual), b.shape[1]
    tiles, out = -(-rows // tile.rows), torch.empty_like(kept)
    sums = kept.new_empty(tiles, columns, dtype=torch.float32)
    kernel[(tiles * (columns // tile.columns),)](
        a, b, kept, out, sums, rows, K=a.shape[1], N=columns, BM=tile.rows, BN=tile.columns, BK=tile.depth,
        STAGES=tile.stages, DUAL=dual, ACTIVATED=not frequency, num_warps=tile.warps)  # fmt: skip
    return out, sums


@cache
def _tile(
    kind: str, rows: int, depth: int, columns: int, dual: bool, frequency: float, dtype: torch.dtype,
    device: torch.device,
) -> Tile:  # fmt: skip
    if not can_measure(device):
        return TILES[0]
    a, out = (torch.zeros(rows, n, dtype=dtype, device=device) for n in (depth, columns))
    kept = torch.zeros_like(out) if frequency else out
    b, bias = torch.zeros(columns * depth, dtype=dtype, device=device), torch.zeros(columns, device=device)

    def call(tile: Tile) -> None:
        if kind == "activate":
            _launch_activate(a, b.view(columns, depth), bias, out, kept, dual, frequency, tile)
        else:
            _launch_back(a, b.view(depth, columns), kept, dual, frequency, tile)

    return fastest(f"{kind}, {rows} rows times ({depth}, {columns})", TILES, call)

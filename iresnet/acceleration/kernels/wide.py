"""A unit of few channels outside and many inside, of convolutions of k, 1 and k places, by `product`.

Its activation is ELU or a sine, sin(w h) / w, the same both times; here it is a number, w, or 0 for ELU.

With U the values and tangents beside their neighbours (`maps.spread`), all linear maps are products of matrices:

    A_1 = bend(U W_1'),   A_2 = bend(A_1 W_2'),   [y'; J v] = sums over neighbours of A_2 W_3'

and a gradient goes back by `bend_back` twice. Only A_1 and A_2 are kept, and for a sine its slopes with their
derivatives along the tangents, D = [a'; a'' t], which no A tells: twice as much.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...lipschitz.program import Step
from ..maps import Dense, Map, Unrolled
from ..timing import can_measure, fastest
from . import counts, is_ready


class Tile(NamedTuple):
    """Rows of the state, columns and depth of a tile, warps, stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


#: The first is taken where nothing can be measured.
TILES = (Tile(64, 128, 64, 8, 3), Tile(128, 128, 64, 8, 3))


def supported(maps: list[Map], bends: list[Step | None], biases: list[Tensor | None], like: Tensor) -> bool:
    """Whether maps, activations before them (None for none) and biases make such a unit, for matrices like `like`."""
    if [type(m) for m in maps] != [Unrolled, Dense, Unrolled] or bends[0] is not None or bends[1] != bends[2]:
        return False
    first, middle, last = maps
    wide = first.widens and not last.widens and middle.shape[0] % 128 == 0 and middle.shape[1] % 128 == 0  # type: ignore[attr-defined]
    fits = wide and frequency(bends[1]) is not None and counts(len(like), max(middle.shape))  # type: ignore[attr-defined]
    return fits and biases[0] is not None and biases[1] is not None and is_ready(like.dtype, like.device)


def frequency(bend: Step | None) -> float | None:
    """That of a sine, 0 for ELU; None for any other activation."""
    match bend:
        case Step("elu", constant=1.0):
            return 0.0
        case Step("sine"):
            return bend.constant
        case _:
            return None


class Wide(torch.autograd.Function):
    """(x', [x'; v], W_1, b_1, W_2, b_2, W_3) -> [y'; J v], and D_1, D_2, or A_1, A_2 for ELU.

    `matrices` are the weights as `maps` take them.
    """

    @staticmethod
    def forward(ctx: Any, maps: list[Any], matrices: list[Tensor], frequency: float, x: Tensor, both: Tensor,
                *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        b1, b2, dual = tensors[1].detach(), tensors[3].detach(), len(both) > len(x)
        a1, d1 = bend(maps[0].spread(both, matrices[0], back=False), matrices[0], b1, dual, frequency)
        a2, d2 = bend(a1, matrices[1], b2, dual, frequency)
        for m in matrices[1:]:  # measured here: in a backward pass another thread would do it
            _tile("bend_back", len(both), len(m), m.shape[1], dual, frequency, a1.dtype, a1.device)
        ctx.maps, ctx.matrices, ctx.frequency, ctx.rows, ctx.dual = maps, matrices, frequency, len(x), dual
        ctx.save_for_backward(both, a1, a2, d1, d2)
        ctx.mark_non_differentiable(d1, d2)
        ctx.set_materialize_grads(False)  # or zeros as large as these are written in every backward pass
        return maps[2].forward(a2, matrices[2]), d1, d2

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        both, a1, a2, d1, d2 = ctx.saved_tensors
        (first, middle, last), (m1, m2, m3) = ctx.maps, ctx.matrices
        spread = last.spread(g, m3, back=True)
        g2, s2 = bend_back(spread, m3, d2, ctx.dual, ctx.frequency)
        dw3 = last.folded(spread.T @ a2)
        g1, s1 = bend_back(g2, m2, d1, ctx.dual, ctx.frequency)
        dx = first.transpose(g1[: ctx.rows], m1)
        dw1, dw2 = first.gradient(both, g1, m1), middle.gradient(a1, g2, m2)
        return None, None, None, dx, None, dw1, s1.sum(0), dw2, s2.sum(0), dw3


def bend(a: Tensor, b: Tensor, bias: Tensor, dual: bool, frequency: float) -> tuple[Tensor, Tensor]:
    """A = [a(h + bias); a'(h + bias) t] for a b' = [h; t], and what `bend_back` needs: D, or for ELU the same A."""
    out = a.new_empty(len(a), len(b))
    kept = torch.empty_like(out) if frequency else out
    tile = _tile("bend", len(a), a.shape[1], len(b), dual, frequency, a.dtype, a.device)
    _launch_bend(a, b.contiguous(), bias, out, kept, dual, frequency, tile)
    return out, kept


def bend_back(a: Tensor, b: Tensor, kept: Tensor, dual: bool, frequency: float) -> tuple[Tensor, Tensor]:
    """The gradients of [h; t] from a b, those of what `bend` made, and sums over rows, to be added up."""
    tile = _tile("bend_back", len(a), a.shape[1], b.shape[1], dual, frequency, a.dtype, a.device)
    return _launch_back(a, b.contiguous(), kept, dual, frequency, tile)


def _launch_bend(
    a: Tensor, b: Tensor, bias: Tensor, out: Tensor, kept: Tensor, dual: bool, frequency: float, tile: Tile
) -> None:
    from .product import bend as kernel

    rows, columns = len(a) // (1 + dual), len(b)
    grid = -(-rows // tile.rows) * (columns // tile.columns)
    kernel[(grid,)](a, b, bias, out, kept, rows, K=a.shape[1], N=columns, BM=tile.rows, BN=tile.columns, BK=tile.depth,
                    STAGES=tile.stages, DUAL=dual, FREQUENCY=frequency, num_warps=tile.warps)  # fmt: skip


def _launch_back(a: Tensor, b: Tensor, kept: Tensor, dual: bool, frequency: float, tile: Tile) -> tuple[Tensor, Tensor]:
    from .product import bend_back as kernel

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
        if kind == "bend":
            _launch_bend(a, b.view(columns, depth), bias, out, kept, dual, frequency, tile)
        else:
            _launch_back(a, b.view(depth, columns), kept, dual, frequency, tile)

    return fastest(f"{kind}, {rows} rows times ({depth}, {columns})", TILES, call)

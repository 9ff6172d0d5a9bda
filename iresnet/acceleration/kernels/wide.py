"""A unit of few channels outside and many inside, of ELU and convolutions of k, 1 and k places, by `product`.

With U the values and tangents beside their neighbours (`maps.spread`), all linear maps are products of matrices:

    A_1 = bend(U W_1'),   A_2 = bend(A_1 W_2'),   [y'; J v] = sums over neighbours of A_2 W_3'

and a gradient goes back by `bend_back` twice. Only A_1 and A_2 are kept.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

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


def supported(maps: list[Map], kinds: list[str], biases: list[Tensor | None], like: Tensor) -> bool:
    """Whether maps, activations before them ("" for none) and biases make such a unit, for matrices like `like`."""
    if [type(m) for m in maps] != [Unrolled, Dense, Unrolled] or kinds != ["", "elu", "elu"]:
        return False
    first, middle, last = maps
    wide = first.widens and not last.widens and middle.shape[0] % 128 == 0 and middle.shape[1] % 128 == 0  # type: ignore[attr-defined]
    fits = wide and counts(len(like), max(middle.shape))  # type: ignore[attr-defined]
    return fits and biases[0] is not None and biases[1] is not None and is_ready(like.dtype, like.device)


class Wide(torch.autograd.Function):
    """(x', [x'; v], W_1, b_1, W_2, b_2, W_3) -> [y'; J v], A_1, A_2; `matrices` are the weights as `maps` take them."""

    @staticmethod
    def forward(ctx: Any, maps: list[Any], matrices: list[Tensor], x: Tensor, both: Tensor,
                *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        b1, b2, dual = tensors[1].detach(), tensors[3].detach(), len(both) > len(x)
        a1 = bend(maps[0].spread(both, matrices[0], back=False), matrices[0], b1, dual)
        a2 = bend(a1, matrices[1], b2, dual)
        for m in matrices[1:]:  # measured here: in a backward pass another thread would do it
            _tile("bend_back", len(both), len(m), m.shape[1], dual, a1.dtype, a1.device)
        ctx.maps, ctx.matrices, ctx.rows, ctx.dual = maps, matrices, len(x), dual
        ctx.save_for_backward(both, a1, a2)
        ctx.mark_non_differentiable(a1, a2)
        return maps[2].forward(a2, matrices[2]), a1, a2

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        both, a1, a2 = ctx.saved_tensors
        (first, middle, last), (m1, m2, m3) = ctx.maps, ctx.matrices
        spread = last.spread(g, m3, back=True)
        g2, s2 = bend_back(spread, m3, a2, ctx.dual)
        dw3 = last.folded(spread.T @ a2)
        g1, s1 = bend_back(g2, m2, a1, ctx.dual)
        dx = first.transpose(g1[: ctx.rows], m1)
        dw1, dw2 = first.gradient(both, g1, m1), middle.gradient(a1, g2, m2)
        return None, None, dx, None, dw1, s1.sum(0), dw2, s2.sum(0), dw3


def bend(a: Tensor, b: Tensor, bias: Tensor, dual: bool) -> Tensor:
    """[a(h + bias); a'(h + bias) t] for a b' = [h; t]."""
    out = a.new_empty(len(a), len(b))
    _launch_bend(a, b.contiguous(), bias, out, dual, _tile("bend", len(a), a.shape[1], len(b), dual, a.dtype, a.device))
    return out


def bend_back(a: Tensor, b: Tensor, made: Tensor, dual: bool) -> tuple[Tensor, Tensor]:
    """The gradients of [h; t] from a b, those of what `bend` made, and sums over rows, to be added up."""
    tile = _tile("bend_back", len(a), a.shape[1], b.shape[1], dual, a.dtype, a.device)
    return _launch_back(a, b.contiguous(), made, dual, tile)


def _launch_bend(a: Tensor, b: Tensor, bias: Tensor, out: Tensor, dual: bool, tile: Tile) -> None:
    from .product import bend as kernel

    rows, columns = len(a) // (1 + dual), len(b)
    grid = -(-rows // tile.rows) * (columns // tile.columns)
    kernel[(grid,)](a, b, bias, out, rows, K=a.shape[1], N=columns, BM=tile.rows, BN=tile.columns, BK=tile.depth,
                    STAGES=tile.stages, DUAL=dual, num_warps=tile.warps)  # fmt: skip


def _launch_back(a: Tensor, b: Tensor, made: Tensor, dual: bool, tile: Tile) -> tuple[Tensor, Tensor]:
    from .product import bend_back as kernel

    rows, columns = len(a) // (1 + dual), b.shape[1]
    tiles, out = -(-rows // tile.rows), torch.empty_like(made)
    sums = made.new_empty(tiles, columns, dtype=torch.float32)
    kernel[(tiles * (columns // tile.columns),)](
        a, b, made, out, sums, rows, K=a.shape[1], N=columns, BM=tile.rows, BN=tile.columns, BK=tile.depth,
        STAGES=tile.stages, DUAL=dual, num_warps=tile.warps)  # fmt: skip
    return out, sums


@cache
def _tile(kind: str, rows: int, depth: int, columns: int, dual: bool, dtype: torch.dtype, device: torch.device) -> Tile:
    if not can_measure(device):
        return TILES[0]
    a, made = (torch.zeros(rows, n, dtype=dtype, device=device) for n in (depth, columns))
    b, bias = torch.zeros(columns * depth, dtype=dtype, device=device), torch.zeros(columns, device=device)

    def call(tile: Tile) -> None:
        if kind == "bend":
            _launch_bend(a, b.view(columns, depth), bias, made, dual, tile)
        else:
            _launch_back(a, b.view(depth, columns), made, dual, tile)

    return fastest(f"{kind}, {rows} rows times ({depth}, {columns})", TILES, call)

"""The kernels of a unit's backward pass. For a loss L, with the incoming gradient g' = dL/dx',

    dL/dh_2 = (W_3^T * dL/dy') ELU'(h_2),   dL/dh_1 = (W_2^T dL/dh_2) ELU'(h_1),   g = g' + (W_1^T * dL/dh_1) ELU'(x')
    dL/dx = dL/dy = g exp(log_scale),   dL/dbias = dL/dshift = sum of dL/dx,   dL/dlog_scale = sum of g x'

where h_1 and h_2 are the pre-activations of a_1 and a_2, and sums are over pixels. Every program writes the sums of its
tiles, C numbers each, and `weights.reduce` adds them up in a deterministic order.
"""

# mypy: ignore-errors

from __future__ import annotations

from .language import convolve, elu_slope, jit, tl


@jit
def convolve_mix_back(
    gy, w3, w2, a1, a2, g1, g2, sums, P,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dL/dh_2 and dL/dh_1 from dL/dy', and their sums: the gradients of b_1 and b_2."""
    tile = tl.program_id(0)
    p = tile * M + tl.arange(0, M)
    c = tl.arange(0, C)
    at = p[:, None] * C + c[None, :]
    keep = (p < P)[:, None]
    g = convolve(gy, w3, p, P, H, W, C, M, True, STAGES) * elu_slope(tl.load(a2 + at, mask=keep, other=0.0))
    tl.store(g2 + at, g.to(g2.dtype.element_ty), mask=keep)
    tl.store(sums + tile * (2 * C) + C + c, tl.sum(g, 0))
    g = tl.dot(g.to(g2.dtype.element_ty), tl.load(w2 + c[:, None] * C + c[None, :]))
    g *= elu_slope(tl.load(a1 + at, mask=keep, other=0.0))
    tl.store(g1 + at, g.to(g1.dtype.element_ty), mask=keep)
    tl.store(sums + tile * (2 * C) + c, tl.sum(g, 0))


@jit
def mix_back(
    d, w2, a1, a2, g1, g2, sums, P,
    C: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same from d = W_3^T * dL/dy', for many channels; each program computes N columns of dL/dh_1."""
    tile = tl.program_id(0)
    first = tl.program_id(1) == 0
    p = tile * M + tl.arange(0, M)
    n = tl.program_id(1) * N + tl.arange(0, N)
    keep = (p < P)[:, None]
    acc = tl.zeros((M, N), tl.float32)
    for start in tl.range(0, C, K, num_stages=STAGES):
        k = start + tl.arange(0, K)
        at = p[:, None] * C + k[None, :]
        slope = elu_slope(tl.load(a2 + at, mask=keep, other=0.0))
        g = tl.load(d + at, mask=keep, other=0.0).to(tl.float32) * slope
        tl.store(g2 + at, g.to(g2.dtype.element_ty), mask=keep & first)
        tl.store(sums + tile * (2 * C) + C + k, tl.sum(g, 0), mask=(k < C) & first)
        acc = tl.dot(g.to(g2.dtype.element_ty), tl.load(w2 + k[:, None] * C + n[None, :]), acc)
    at = p[:, None] * C + n[None, :]
    g = acc * elu_slope(tl.load(a1 + at, mask=keep, other=0.0))
    tl.store(g1 + at, g.to(g1.dtype.element_ty), mask=keep)
    tl.store(sums + tile * (2 * C) + n, tl.sum(g, 0))


@jit
def leave(
    g1, w1, a0, x, gx, log_scale, dx, dy, sums, P,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, M: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    CONVOLVE: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """dL/dx and dL/dy from dL/dh_1 and g', with the sums for bias, shift and log_scale; x is x'.

    Without CONVOLVE, g1 already holds W_1^T * dL/dh_1. A program processes TILES tiles in sequence; with a single tile
    its sums need no extra registers.
    """
    program = tl.program_id(0)
    c = tl.arange(0, C)
    first = sums + program * (2 * C) + c
    factor = tl.exp(tl.load(log_scale + c))[None, :] if HAS_NORM else 1.0
    if TILES > 1:
        plain = tl.zeros((M, C), tl.float32)
        scaled = tl.zeros((M, C), tl.float32)
    for t in tl.range(0, TILES, num_stages=1 if CONVOLVE else STAGES):
        p = (program * TILES + t) * M + tl.arange(0, M)
        at = p[:, None] * C + c[None, :]
        keep = (p < P)[:, None]
        if CONVOLVE:
            d = convolve(g1, w1, p, P, H, W, C, M, True, STAGES)
        else:
            d = tl.load(g1 + at, mask=keep, other=0.0).to(tl.float32)
        g = tl.load(gx + at, mask=keep, other=0.0) + d * elu_slope(tl.load(a0 + at, mask=keep, other=0.0))
        product = g * tl.load(x + at, mask=keep, other=0.0)
        if TILES > 1:
            scaled += product
        else:
            tl.store(first + C, tl.sum(product, 0))
        g *= factor
        if TILES > 1:
            plain += g
        else:
            tl.store(first, tl.sum(g, 0))
        tl.store(dx + at, g, mask=keep)
        tl.store(dy + at, g.to(dy.dtype.element_ty), mask=keep)
    if TILES > 1:
        tl.store(first, tl.sum(plain, 0))
        tl.store(first + C, tl.sum(scaled, 0))

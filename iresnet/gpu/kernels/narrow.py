"""The backward pass for few channels, which also computes the gradients of the weights; notation as in `backward`.

The nine products of a transposed convolution read the shifted tiles of a gradient, and the gradient of the weights
needs the same tiles. With few channels its nine matrices stay in registers while a program processes its tiles, and
nothing is read twice. Every program writes its partial sums, W_1, W_3, W_2 in this order, for `weights.reduce`.
"""

# mypy: ignore-errors

from __future__ import annotations

from .language import convolve_both, elu_slope, jit, no_totals, outer_products, store_totals, tl


@jit
def convolve_mix_back(
    gy, w3, w2, a1, a2, g1, sums, partial, P,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, M: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dL/dh_1 from dL/dy', with the gradients of W_3, W_2, b_2 and b_1."""
    program = tl.program_id(0)
    c = tl.arange(0, C)
    matrix = tl.load(w2 + c[:, None] * C + c[None, :])
    totals = no_totals(C)
    middle = tl.zeros((4, C, C), tl.float32)
    first = tl.zeros((M, C), tl.float32)
    second = tl.zeros((M, C), tl.float32)
    for t in tl.range(0, TILES, num_stages=STAGES):
        p = (program * TILES + t) * M + tl.arange(0, M)
        at = p[:, None] * C + c[None, :]
        keep = (p < P)[:, None]
        a = tl.load(a2 + at, mask=keep, other=0.0)
        before = tl.load(a1 + at, mask=keep, other=0.0)
        g, totals = convolve_both(gy, w3, a, p, P, totals, H, W, C, M)
        g *= elu_slope(a)
        second += g
        g = g.to(g1.dtype.element_ty)
        middle = outer_products(g, before, middle, C)
        g = tl.dot(g, matrix) * elu_slope(before)
        first += g
        tl.store(g1 + at, g.to(g1.dtype.element_ty), mask=keep)
    tl.store(sums + program * (2 * C) + c, tl.sum(first, 0))
    tl.store(sums + program * (2 * C) + C + c, tl.sum(second, 0))
    store_totals(partial + program * (19 * C * C) + 9 * C * C, totals, C)
    tl.store(partial + program * (19 * C * C) + 18 * C * C + c[:, None] * C + c[None, :], tl.sum(middle, 0))


@jit
def leave(
    g1, w1, a0, x, gx, log_scale, dx, dy, sums, partial, P,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, M: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    """dL/dx and dL/dy from dL/dh_1 and g', with the gradient of W_1 and the sums for bias, shift and log_scale."""
    program = tl.program_id(0)
    c = tl.arange(0, C)
    factor = tl.exp(tl.load(log_scale + c))[None, :] if HAS_NORM else 1.0
    totals = no_totals(C)
    plain = tl.zeros((M, C), tl.float32)
    scaled = tl.zeros((M, C), tl.float32)
    for t in tl.range(0, TILES, num_stages=STAGES):
        p = (program * TILES + t) * M + tl.arange(0, M)
        at = p[:, None] * C + c[None, :]
        keep = (p < P)[:, None]
        a = tl.load(a0 + at, mask=keep, other=0.0)
        g = tl.load(gx + at, mask=keep, other=0.0)
        value = tl.load(x + at, mask=keep, other=0.0)
        d, totals = convolve_both(g1, w1, a, p, P, totals, H, W, C, M)
        g += d * elu_slope(a)
        scaled += g * value
        g *= factor
        plain += g
        tl.store(dx + at, g, mask=keep)
        tl.store(dy + at, g.to(dy.dtype.element_ty), mask=keep)
    tl.store(sums + program * (2 * C) + c, tl.sum(plain, 0))
    tl.store(sums + program * (2 * C) + C + c, tl.sum(scaled, 0))
    store_totals(partial + program * (19 * C * C), totals, C)

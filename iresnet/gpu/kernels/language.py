"""Triton, if it is installed, and functions that the kernels share: ELU and its derivative, sine, a 3 x 3 convolution.

Images are a matrix: its rows are the pixels of the batch, numbered p = (n H + row) W + column, its columns the channels
(channels-last memory format). A kernel works on a tile of rows. Without Triton the files can be imported, but not run.
"""

# mypy: ignore-errors

from __future__ import annotations

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None


def jit(function):
    """Return the function as a Triton kernel, or unchanged without Triton."""
    return function if triton is None else triton.jit(function)


@jit
def elu(h):
    """h where it is positive, exp(h) - 1 elsewhere."""
    return tl.where(h > 0, h, tl.exp(tl.minimum(h, 0.0)) - 1.0)


@jit
def elu_slope(a):
    """The derivative of ELU at h, from its value a = elu(h): 1 or exp(h) = a + 1."""
    a = a.to(tl.float32)
    return tl.where(a > 0, 1.0, a + 1.0)


@jit
def sine_and_cosine(x):
    """sin(x) and cos(x) in float32, within 2e-6 for |x| < 10 and 5e-6 for |x| < 50; bfloat16 rounds 1 by 2e-3.

    Triton's own contain a loop for huge arguments, for every entry of a tile. Here f is x in turns, |f| <= 1/2; minimax
    polynomials in f^2 give 2 sin(pi f) and cos(pi f), and the double-angle formulas the rest.
    """
    f = x * 0.15915494309189535
    f -= tl.floor(f + 0.5)
    z = f * f
    s = f * (6.2831853 + z * (-10.33542 + z * (5.1001553 + z * (-1.1965843 + z * 0.15531882))))
    c = 0.99999995 + z * (-4.9347929 + z * (4.0584119 + z * (-1.3318802 + z * 0.2196968)))
    return s * c, 1.0 - 0.5 * s * s


@jit
def moved_tile(x, tap, p, row, column, P, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BACK: tl.constexpr):
    """The pixels of the tile shifted by one tap of the kernel; BACK: in the other direction. 0 outside the image."""
    dy = 1 - tap // 3 if BACK else tap // 3 - 1
    dx = 1 - tap % 3 if BACK else tap % 3 - 1
    inside = (p < P) & (row + dy >= 0) & (row + dy < H) & (column + dx >= 0) & (column + dx < W)
    return tl.load(x + (p + dy * W + dx)[:, None] * C + tl.arange(0, C)[None, :], mask=inside[:, None], other=0.0)


@jit
def tap_weights(w, tap, C: tl.constexpr, BACK: tl.constexpr):
    """The weights of one tap of the kernel, (in, out); BACK: (out, in)."""
    k = tl.arange(0, C)[:, None]
    n = tl.arange(0, C)[None, :]
    return tl.load(w + tap * C + k * (9 * C) + n) if BACK else tl.load(w + tap * C + n * (9 * C) + k)


@jit
def tap_product(
    x, w, tap, p, row, column, P, acc, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BACK: tl.constexpr
):
    """acc + X_tap W_tap."""
    return tl.dot(moved_tile(x, tap, p, row, column, P, H, W, C, BACK), tap_weights(w, tap, C, BACK), acc)


@jit
def convolve(
    x, w, p, P,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, M: tl.constexpr, BACK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A 3 x 3 convolution with zero padding as nine products; BACK: its transpose, for the backward pass.

    y[p, o] = sum over taps and i of x[p + tap, i] w[o, tap, i];   BACK: y[p, i] = sum of x[p - tap, o] w[o, tap, i].
    STAGES: how many taps of the kernel are loaded ahead; 0 unrolls the loop.
    """
    row = (p // W) % H
    column = p % W
    acc = tl.zeros((M, C), tl.float32)
    if STAGES == 0:
        for tap in tl.static_range(9):
            acc = tap_product(x, w, tap, p, row, column, P, acc, H, W, C, BACK)
    else:
        for tap in tl.range(9, num_stages=STAGES):
            acc = tap_product(x, w, tap, p, row, column, P, acc, H, W, C, BACK)
    return acc


@jit
def tap_both(
    g, w, a, acc, total, tap: tl.constexpr, p, row, column, P, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr
):
    """One tap of the kernel of `convolve_both`."""
    moved = moved_tile(g, tap, p, row, column, P, H, W, C, True)
    return tl.dot(moved, tap_weights(w, tap, C, True), acc), outer_products(moved, a, total, C)


@jit
def outer_products(g, a, total, C: tl.constexpr):
    """total + g^T a in four parts (4, C, C), a quarter of the pixels each, to share the work among four warps."""
    left = tl.permute(tl.reshape(g, (4, g.shape[0] // 4, C)), (0, 2, 1))
    return tl.dot(left, tl.reshape(a, (4, a.shape[0] // 4, C)), total)


@jit
def convolve_both(g, w, a, p, P, totals, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, M: tl.constexpr):
    """Both gradients of a convolution from a single read of g, the gradient of its output; a is the tile of its input.

    Returns the transposed convolution of g, and `totals`, nine matrices (out, in) in four parts, plus the sum over p of
    g[p - tap, o] a[p, i]: the gradient of the weights, for few channels.
    """
    row = (p // W) % H
    column = p % W
    acc = tl.zeros((M, C), tl.float32)
    t0, t1, t2, t3, t4, t5, t6, t7, t8 = totals
    acc, t0 = tap_both(g, w, a, acc, t0, 0, p, row, column, P, H, W, C)
    acc, t1 = tap_both(g, w, a, acc, t1, 1, p, row, column, P, H, W, C)
    acc, t2 = tap_both(g, w, a, acc, t2, 2, p, row, column, P, H, W, C)
    acc, t3 = tap_both(g, w, a, acc, t3, 3, p, row, column, P, H, W, C)
    acc, t4 = tap_both(g, w, a, acc, t4, 4, p, row, column, P, H, W, C)
    acc, t5 = tap_both(g, w, a, acc, t5, 5, p, row, column, P, H, W, C)
    acc, t6 = tap_both(g, w, a, acc, t6, 6, p, row, column, P, H, W, C)
    acc, t7 = tap_both(g, w, a, acc, t7, 7, p, row, column, P, H, W, C)
    acc, t8 = tap_both(g, w, a, acc, t8, 8, p, row, column, P, H, W, C)
    return acc, (t0, t1, t2, t3, t4, t5, t6, t7, t8)


@jit
def no_totals(C: tl.constexpr):
    """The nine zero matrices that `convolve_both` starts with."""
    z = tl.zeros((4, C, C), tl.float32)
    return (z, z, z, z, z, z, z, z, z)


@jit
def store_totals(out, totals, C: tl.constexpr):
    """Store the nine matrices as one weight (out, tap, in), the four parts of each added."""
    at = tl.arange(0, C)[:, None] * (9 * C) + tl.arange(0, C)[None, :]
    for tap in tl.static_range(9):
        tl.store(out + at + tap * C, tl.sum(totals[tap], 0))

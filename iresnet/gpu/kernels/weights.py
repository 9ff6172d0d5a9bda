"""The kernels for the gradients of the weights, and the one that adds partial sums up.

dL/dW[o, tap, i] = sum over pixels p of g[p, o] a[p + tap, i], with g the gradient of the convolution's output and a its
input: a product of g^T with the matrix whose columns j = (tap, i) are shifted images. It has few rows and columns and a
long sum, so the pixels are split among programs, each writes its partial sum in float32, and `reduce` adds these.
"""

# mypy: ignore-errors

from __future__ import annotations

from .language import jit, tl


@jit
def partial_gradients(
    a0, a1, a2, g1, g2, gy, out, P,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, N: tl.constexpr, J: tl.constexpr, K: tl.constexpr,
    STEPS: tl.constexpr, CONVOLVE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A block of N rows and J columns of one of the three gradients, from STEPS times K pixels.

    The gradients are stored in sequence: W_1, W_3 (only with CONVOLVE), W_2. W_2 has a single tap, the centre.
    """
    split = tl.program_id(0)
    job = tl.program_id(1)
    JOBS: tl.constexpr = (C // N) * ((9 * C + J - 1) // J)
    LENGTH: tl.constexpr = 19 * C * C if CONVOLVE else C * C
    columns = C
    place = 4
    offset = 0
    a = a1
    g = g2
    if CONVOLVE:
        if job < JOBS:
            a, g, columns, place = a0, g1, 9 * C, 0
        elif job < 2 * JOBS:
            a, g, columns, place, offset, job = a2, gy, 9 * C, 0, 9 * C * C, job - JOBS
        else:
            offset, job = 18 * C * C, job - 2 * JOBS
    o = (job % (C // N)) * N + tl.arange(0, N)
    j = (job // (C // N)) * J + tl.arange(0, J)
    tap = j // C + place
    dy = tap // 3 - 1
    dx = tap % 3 - 1
    moved = ((dy * W + dx) * C + j % C)[None, :]
    used = j < columns
    acc = tl.zeros((N, J), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        p = (split * STEPS + step) * K + tl.arange(0, K)
        row = ((p // W) % H)[:, None] + dy[None, :]
        column = (p % W)[:, None] + dx[None, :]
        inside = (row >= 0) & (row < H) & (column >= 0) & (column < W) & used[None, :] & (p < P)[:, None]
        right = tl.load(a + p[:, None] * C + moved, mask=inside, other=0.0)
        left = tl.load(g + p[:, None] * C + o[None, :], mask=(p < P)[:, None], other=0.0)
        acc = tl.dot(tl.trans(left), right, acc)
    place_out = out + split * LENGTH + offset + o[:, None] * columns + j[None, :]
    tl.store(place_out, acc, mask=used[None, :])


@jit
def column_sums(values, column, ROWS: tl.constexpr, STRIDE: tl.constexpr, R: tl.constexpr, L: tl.constexpr):
    """The sums of L columns over all ROWS, R of them at a time."""
    total = tl.zeros((L,), tl.float32)
    for start in range(0, ROWS, R):
        r = start + tl.arange(0, R)
        keep = (r < ROWS)[:, None] & (column < STRIDE)[None, :]
        total += tl.sum(tl.load(values + r[:, None] * STRIDE + column[None, :], mask=keep, other=0.0), 0)
    return total


@jit
def reduce(
    partial, gradient, sums_mix, sums_leave, vectors,
    C: tl.constexpr, LENGTH: tl.constexpr, SPLITS: tl.constexpr, MIX: tl.constexpr, LEAVE: tl.constexpr,
    L: tl.constexpr, S: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """All gradients of a unit from their partial sums: of weights into `gradient`, of vectors into `vectors`.

    `vectors` holds C numbers each for b_1, b_2, bias, shift (the same numbers twice) and log_scale.
    """
    block = tl.program_id(0)
    BLOCKS: tl.constexpr = (LENGTH + L - 1) // L
    if block < BLOCKS:
        at = block * L + tl.arange(0, L)
        total = column_sums(partial, at, SPLITS, LENGTH, S, L)
        tl.store(gradient + at, total.to(gradient.dtype.element_ty), mask=at < LENGTH)
    else:
        column = (block - BLOCKS) * 16 + tl.arange(0, 16)
        if (block - BLOCKS) * 16 < 2 * C:
            tl.store(vectors + column, column_sums(sums_mix, column, MIX, 2 * C, R, 16))
        else:
            total = column_sums(sums_leave, column - 2 * C, LEAVE, 2 * C, R, 16)
            tl.store(vectors + column, total, mask=column < 3 * C)
            tl.store(vectors + column + C, total)

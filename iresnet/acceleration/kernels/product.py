"""Products of matrices with what comes after them, so that no result is read and written once more for it.

With [h; t] a state and its tangents, both R rows (`dual`), and a the activation ELU:

    bend        a b = [h; t]   ->   [a(h + bias); a'(h + bias) t]
    bend_back   a b = [p; q], the gradients of what `bend` made   ->   those of [h; t], and sums for that of the bias
    times       a b            ->   (a b) * d, d slopes, or activations whose slopes are meant

ELU' follows from the activation, and so does its derivative: a'' t' is a' t' = t where h < 0, t' the tangent before.
"""

# mypy: ignore-errors

from __future__ import annotations

from .language import elu, elu_slope, jit, tl


@jit
def multiply(
    a, b, p, n, keep, acc,
    K: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, TURNED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """acc + a b for rows p and columns n; TURNED: b is stored as (N, K)."""
    for start in tl.range(0, K, BK, num_stages=STAGES):
        k = start + tl.arange(0, BK)
        left = tl.load(a + p[:, None] * K + k[None, :], mask=keep & (k < K)[None, :], other=0.0)
        place = n[None, :] * K + k[:, None] if TURNED else k[:, None] * N + n[None, :]
        acc = tl.dot(left, tl.load(b + place, mask=(k < K)[:, None], other=0.0), acc)
    return acc


@jit
def multiply_two(
    a, b, p, n, keep, rows, first, second,
    K: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, TURNED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same for rows p and for rows p + `rows`, with one reading of b."""
    for start in tl.range(0, K, BK, num_stages=STAGES):
        k = start + tl.arange(0, BK)
        mask = keep & (k < K)[None, :]
        place = n[None, :] * K + k[:, None] if TURNED else k[:, None] * N + n[None, :]
        right = tl.load(b + place, mask=(k < K)[:, None], other=0.0)
        first = tl.dot(tl.load(a + p[:, None] * K + k[None, :], mask=mask, other=0.0), right, first)
        second = tl.dot(tl.load(a + (p + rows)[:, None] * K + k[None, :], mask=mask, other=0.0), right, second)
    return first, second


@jit
def times(
    a, b, d, out, rows, period,
    K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    ACTIVATED: tl.constexpr,
):  # fmt: skip
    """A tile of (a b) * d, a (rows, K), b (K, N), d (period, N), whose rows repeat; accumulated in float32."""
    tile = tl.program_id(0)
    p = (tile // (N // BN)) * BM + tl.arange(0, BM)
    n = (tile % (N // BN)) * BN + tl.arange(0, BN)
    keep = (p < rows)[:, None]
    acc = multiply(a, b, p, n, keep, tl.zeros((BM, BN), tl.float32), K, N, BK, False, STAGES)
    slope = tl.load(d + (p % period)[:, None] * N + n[None, :], mask=keep, other=0.0)
    slope = elu_slope(slope) if ACTIVATED else slope.to(tl.float32)
    tl.store(out + p[:, None] * N + n[None, :], (acc * slope).to(out.dtype.element_ty), mask=keep)


@jit
def bend(
    a, b, bias, out, rows,
    K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    DUAL: tl.constexpr,
):  # fmt: skip
    """[a(h + bias); a'(h + bias) t] for a b' = [h; t], b (N, K); without DUAL there are no tangents."""
    tile = tl.program_id(0)
    p = (tile // (N // BN)) * BM + tl.arange(0, BM)
    n = (tile % (N // BN)) * BN + tl.arange(0, BN)
    keep = (p < rows)[:, None]
    zero = tl.zeros((BM, BN), tl.float32)
    at = p[:, None] * N + n[None, :]
    if DUAL:
        h, t = multiply_two(a, b, p, n, keep, rows, zero, zero, K, N, BK, True, STAGES)
    else:
        h = multiply(a, b, p, n, keep, zero, K, N, BK, True, STAGES)
    value = elu(h + tl.load(bias + n)[None, :])
    tl.store(out + at, value.to(out.dtype.element_ty), mask=keep)
    if DUAL:
        tl.store(out + rows * N + at, (t * elu_slope(value)).to(out.dtype.element_ty), mask=keep)


@jit
def bend_back(
    a, b, made, out, sums, rows,
    K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    DUAL: tl.constexpr,
):  # fmt: skip
    """The gradients of [h; t] from a b = [p; q], b (K, N), those of what `bend` `made`; and sums over a tile's rows."""
    tile = tl.program_id(0)
    p = (tile // (N // BN)) * BM + tl.arange(0, BM)
    n = (tile % (N // BN)) * BN + tl.arange(0, BN)
    keep = (p < rows)[:, None]
    zero = tl.zeros((BM, BN), tl.float32)
    at = p[:, None] * N + n[None, :]
    if DUAL:
        g, q = multiply_two(a, b, p, n, keep, rows, zero, zero, K, N, BK, False, STAGES)
    else:
        g = multiply(a, b, p, n, keep, zero, K, N, BK, False, STAGES)
    value = tl.load(made + at, mask=keep, other=0.0).to(tl.float32)
    g *= elu_slope(value)
    if DUAL:
        tangent = tl.load(made + rows * N + at, mask=keep, other=0.0).to(tl.float32)
        g += tl.where(value < 0, q * tangent, 0.0)
        tl.store(out + rows * N + at, (q * elu_slope(value)).to(out.dtype.element_ty), mask=keep)
    tl.store(out + at, g.to(out.dtype.element_ty), mask=keep)
    tl.store(sums + (tile // (N // BN)) * N + n, tl.sum(g, 0))

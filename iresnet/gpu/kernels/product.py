"""Matrix products fused with the operations after them, which saves reading and writing the intermediate result.

With [h; t] a state and its tangents, R rows each (`dual`), and a the activation, ELU or sine, sin(w h) / w:

    activate    a b = [h; t]   ->   [a(h + bias); a'(h + bias) t], and for sine also [a'; a'' t]
    activate_backward
                a b = [p; q], the gradients of the output of `activate`   ->   [p a' + q a'' t; q a'], the gradients of
                [h; t], and sums for the gradient of the bias
    times       a b            ->   (a b) * d, where d are slopes, or outputs of ELU that stand for their slopes

For ELU everything follows from the output: a' from a, and a'' t' = a' t' = t where h < 0, with t' the tangent before.
The slope of a sine does not follow from its output, so a' and a'' t are stored as well.
"""

# mypy: ignore-errors

from __future__ import annotations

from .language import elu, elu_slope, jit, sine_and_cosine, tl


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
    """The same for rows p and for rows p + `rows`, with a single read of b."""
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
def activate(
    a, b, bias, out, kept, rows,
    K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    DUAL: tl.constexpr, FREQUENCY: tl.constexpr,
):  # fmt: skip
    """[a(h + bias); a'(h + bias) t] for a b' = [h; t], b (N, K); without DUAL there are no tangents.

    FREQUENCY: of the sine, for which [a'; a'' t] is stored in `kept`; 0: ELU, for which `kept` is not used.
    """
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
    h += tl.load(bias + n)[None, :]
    if FREQUENCY == 0:
        value = elu(h)
        slope = elu_slope(value)
    else:
        value, slope = sine_and_cosine(h * FREQUENCY)
        value *= 1.0 / FREQUENCY
    tl.store(out + at, value.to(out.dtype.element_ty), mask=keep)
    if DUAL:
        tl.store(out + rows * N + at, (t * slope).to(out.dtype.element_ty), mask=keep)
    if FREQUENCY != 0:
        tl.store(kept + at, slope.to(kept.dtype.element_ty), mask=keep)
        if DUAL:
            change = t * value * (-FREQUENCY * FREQUENCY)
            tl.store(kept + rows * N + at, change.to(kept.dtype.element_ty), mask=keep)


@jit
def activate_backward(
    a, b, kept, out, sums, rows,
    K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    DUAL: tl.constexpr, ACTIVATED: tl.constexpr,
):  # fmt: skip
    """The gradients of [h; t] from a b = [p; q], b (K, N), those of the output of `activate`; and sums over tile rows.

    ACTIVATED: `kept` is the output of `activate` for ELU; else [a'; a'' t].
    """
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
    value = tl.load(kept + at, mask=keep, other=0.0).to(tl.float32)
    slope = elu_slope(value) if ACTIVATED else value
    g *= slope
    if DUAL:
        change = tl.load(kept + rows * N + at, mask=keep, other=0.0).to(tl.float32)
        g += tl.where(value < 0, q * change, 0.0) if ACTIVATED else q * change
        tl.store(out + rows * N + at, (q * slope).to(out.dtype.element_ty), mask=keep)
    tl.store(out + at, g.to(out.dtype.element_ty), mask=keep)
    tl.store(sums + (tile // (N // BN)) * N + n, tl.sum(g, 0))

"""The kernels of the forward pass. With a_0 = elu(x'), the unit is

    x' = (x + y + bias + shift) exp(log_scale),  a_1 = elu(W_1 * a_0 + b_1),  a_2 = elu(W_2 a_1 + b_2),  y' = W_3 * a_2

(* is a 3 x 3 convolution, W_2 a 1 x 1 convolution). Activations are stored, not pre-activations: ELU' follows from
either.
"""

# mypy: ignore-errors

from __future__ import annotations

from .language import convolve, elu, jit, tl


@jit
def enter(
    x, y, bias, shift, log_scale, out, a0, P,
    C: tl.constexpr, M: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """x' and a_0 from the previous pair (x, y)."""
    p = tl.program_id(0) * M + tl.arange(0, M)
    c = tl.arange(0, C)
    at = p[:, None] * C + c[None, :]
    keep = (p < P)[:, None]
    s = tl.load(x + at, mask=keep, other=0.0) + tl.load(y + at, mask=keep, other=0.0).to(tl.float32)
    if HAS_BIAS:
        s += tl.load(bias + c)[None, :]
    if HAS_NORM:
        s = (s + tl.load(shift + c)[None, :]) * tl.exp(tl.load(log_scale + c))[None, :]
    tl.store(out + at, s, mask=keep)
    tl.store(a0 + at, elu(s).to(a0.dtype.element_ty), mask=keep)


@jit
def convolve_mix(
    a0, w1, b1, w2, b2, a1, a2, P,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """a_1 and a_2 from a_0: the 1 x 1 convolution uses the tile of the 3 x 3 convolution before it."""
    p = tl.program_id(0) * M + tl.arange(0, M)
    c = tl.arange(0, C)
    at = p[:, None] * C + c[None, :]
    keep = (p < P)[:, None]
    h = convolve(a0, w1, p, P, H, W, C, M, False, STAGES) + tl.load(b1 + c)[None, :]
    a = elu(h).to(a1.dtype.element_ty)
    tl.store(a1 + at, a, mask=keep)
    h = tl.dot(a, tl.load(w2 + c[None, :] * C + c[:, None])) + tl.load(b2 + c)[None, :]
    tl.store(a2 + at, elu(h).to(a2.dtype.element_ty), mask=keep)


@jit
def convolve_plain(
    a2,
    w3,
    y,
    P,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    M: tl.constexpr,
    STAGES: tl.constexpr,
):
    """y' from a_2."""
    p = tl.program_id(0) * M + tl.arange(0, M)
    c = tl.arange(0, C)
    value = convolve(a2, w3, p, P, H, W, C, M, False, STAGES)
    tl.store(y + p[:, None] * C + c[None, :], value.to(y.dtype.element_ty), mask=(p < P)[:, None])


@jit
def mix(
    h1,
    b1,
    w2,
    b2,
    a1,
    a2,
    P,
    C: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """a_1 and a_2 from h_1 = W_1 * a_0, for many channels: a matrix product with ELU applied to input and output.

    A program computes N of the C columns of its tile of a_2; the programs of the first columns also store a_1.
    """
    p = tl.program_id(0) * M + tl.arange(0, M)
    n = tl.program_id(1) * N + tl.arange(0, N)
    keep = (p < P)[:, None]
    acc = tl.zeros((M, N), tl.float32)
    for start in tl.range(0, C, K, num_stages=STAGES):
        k = start + tl.arange(0, K)
        at = p[:, None] * C + k[None, :]
        h = tl.load(h1 + at, mask=keep, other=0.0).to(tl.float32) + tl.load(b1 + k)[None, :]
        a = elu(h).to(a1.dtype.element_ty)
        tl.store(a1 + at, a, mask=keep & (tl.program_id(1) == 0))
        acc = tl.dot(a, tl.load(w2 + n[None, :] * C + k[:, None]), acc)
    h = acc + tl.load(b2 + n)[None, :]
    tl.store(a2 + p[:, None] * C + n[None, :], elu(h).to(a2.dtype.element_ty), mask=keep)

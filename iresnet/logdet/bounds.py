"""Theorem 3: the truncation error of the power series, and the number of terms needed for a tolerance."""

from __future__ import annotations

from ..allowed import positive


def truncation_bound(lipschitz: float, dimension: int, terms: int) -> float:
    """Bound the truncation error (Theorem 3): |ln det - n terms| <= -d (ln(1 - L) + sum_{k<=n} L^k / k), in nats.

    Computed as the tail d sum_{k>n} L^k / k, with a geometric series for its remainder, so that no digits cancel.

    >>> truncation_bound(0.5, 1, 1) < 0.1932
    True
    """
    _check_lipschitz(lipschitz)
    if dimension < 1 or terms < 0:
        raise ValueError(f"dimension must be at least 1 and terms at least 0; got {dimension} and {terms}.")
    if lipschitz == 0:
        return 0.0
    total, k, power = 0.0, terms + 1, lipschitz ** (terms + 1)
    for _ in range(100_000):
        total += power / k
        k, power = k + 1, power * lipschitz
        if power <= total * (1 - lipschitz) * 1e-12:
            break
    return dimension * (total + power / (k * (1 - lipschitz)))


def terms_needed(lipschitz: float, dimension: int, tolerance: float) -> int:
    """Return the smallest number of terms with a truncation error of at most `tolerance` nats, by Theorem 3."""
    _check_lipschitz(lipschitz)
    positive.check("tolerance", tolerance)
    low, high = 0, 1
    while truncation_bound(lipschitz, dimension, high) > tolerance:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if truncation_bound(lipschitz, dimension, middle) > tolerance else (low, middle)
    return high


def _check_lipschitz(lipschitz: float) -> None:
    if not 0 <= lipschitz < 1:
        raise ValueError(f"lipschitz must lie in [0, 1); got {lipschitz}. The series converges only for a contraction.")

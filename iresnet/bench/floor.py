"""The arithmetic floor: the matrix products that each task needs, alone, on prepared matrices.

They are computed by the libraries that this package calls. No algorithm that does the same arithmetic with them can be
faster on this device; activations, sums, norms, determinants and the optimiser come on top. For a batch of B, in every
block:

    g, or one vector-Jacobian product      B rows through every layer
    exact log-determinant                  B d more rows through every layer but the first, whose products are known
    gradient                               two products for each product of the forward pass
    series of n terms                      n + 1 vector-Jacobian products, of which one is differentiated
    inverse                                as many evaluations of g as our solve needed, and one in float64: the proof
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch

from ..allocator import keep_freed_memory
from ..branch.products import gram, times
from .case import ROULETTE_STEPS, TERMS, Case, Method, Run
from .networks import expected_terms

#: One product: rows, inner size, columns, dtype.
Product = tuple[int, int, int, torch.dtype]


def floor(case: Case, evaluations: float) -> Method:
    """Return the products of every task; `evaluations` of g per sample were needed for the inverse, in all blocks."""
    series = partial(training_products, case, terms=TERMS)
    inverse = partial(inverse_products, case, evaluations)
    tasks: dict[str, Callable[[], Run]] = {
        "exact": lambda: multiply(case, exact_products(case, training=True), case.blocks),
        "series": lambda: multiply(case, series(), case.blocks),
        "roulette": lambda: multiply(
            case, training_products(case, round(expected_terms())), ROULETTE_STEPS * case.blocks
        ),
        "log-prob": lambda: multiply(case, exact_products(case, training=False), case.blocks),
        "estimate": lambda: multiply(case, estimate_products(case, round(expected_terms())), case.blocks),
        "inverse": lambda: multiply(case, inverse(), 1),
        "sample": lambda: multiply(case, inverse(), 1),
    }
    return Method(0, tasks)


def forward_products(rows: int, widths: Sequence[int], dtype: torch.dtype = torch.float32) -> list[Product]:
    """Return the products that take rows through layers of these widths.

    >>> [product[:3] for product in forward_products(5, (2, 8, 2))]
    [(5, 2, 8), (5, 8, 2)]
    """
    return [(rows, a, b, dtype) for a, b in pairwise(widths)]


def with_gradient(products: Sequence[Product]) -> list[Product]:
    """Return products with those of their gradient: of the input, and of the matrix.

    >>> [product[:3] for product in with_gradient([(5, 2, 8, torch.float32)])]
    [(5, 2, 8), (5, 8, 2), (2, 5, 8)]
    """
    return [p for m, k, n, dtype in products for p in ((m, k, n, dtype), (m, n, k, dtype), (k, m, n, dtype))]


def exact_products(case: Case, *, training: bool) -> list[Product]:
    """Return the products of one block with its whole Jacobian."""
    rows = forward_products(case.batch, case.widths) + forward_products(case.batch * case.dimension, case.widths[1:])
    return with_gradient(rows) if training else rows


def training_products(case: Case, terms: int) -> list[Product]:
    """Return the products of one block in a training step with a series of this length."""
    once = forward_products(case.batch, case.widths)
    return terms * once + 2 * with_gradient(once)


def estimate_products(case: Case, terms: int) -> list[Product]:
    """Return the products of one block with a series of this length, without a gradient."""
    return (1 + terms) * forward_products(case.batch, case.widths)


def inverse_products(case: Case, evaluations: float) -> list[Product]:
    """Return the products of the whole inverse."""
    once = forward_products(case.batch, case.widths)
    return round(evaluations) * once + case.blocks * forward_products(case.batch, case.widths, torch.float64)


def multiply(case: Case, products: Sequence[Product], repeats: int) -> Run:
    """Return a function that computes these products so many times; equal products share their matrices."""
    prepared = {p: _multiplication(p, case.device) for p in dict.fromkeys(products)}
    calls = [prepared[p] for p in products]
    keep_freed_memory()

    def run() -> None:
        for _ in range(repeats):
            for call in calls:
                call()

    return run


def _multiplication(product: Product, device: str) -> Run:
    m, k, n, dtype = product
    a, b = (torch.randn(shape, dtype=dtype, device=device) for shape in ((m, k), (k, n)))
    if device != "cpu":
        return partial(torch.mm, a, b)
    return partial(gram, a.t().contiguous(), b) if k > max(m, n) else partial(times, a, b)

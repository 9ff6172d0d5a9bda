"""Couplings as compiled functions: the conditioner, what it moves, and both joined, in few kernels.

All couplings of one shape share one function, since the compiler takes their weights as arguments of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from ..compiler import compiled_or_plain
from ..rivals import Coupling


def couplings(module: nn.Module) -> list[Coupling]:
    """The couplings of a module."""
    return [m for m in module.modules() if isinstance(m, Coupling)]


@contextmanager
def compiled_couplings(module: nn.Module) -> Iterator[None]:
    """Within this context every coupling of the module computes its forward map by a compiled function."""
    found = couplings(module)
    try:
        for coupling in found:
            vars(coupling)["through"] = partial(compiled_or_plain(_through, True), coupling)
        yield
    finally:
        for coupling in found:
            vars(coupling).pop("through", None)


def _through(coupling: Coupling, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return type(coupling).through(coupling, x, context)

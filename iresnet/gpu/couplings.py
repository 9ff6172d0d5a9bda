"""Couplings as compiled functions: the conditioner, what it moves, and both joined, in few kernels.

All couplings of one shape share one function, since the compiler takes their weights as arguments of it.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from ..compiler import maybe_compile
from ..transforms import Coupling
from ..trust import why_modified
from .wrapper import Wrapper


class CompiledCoupling(Wrapper):
    """A coupling whose forward map is computed by a compiled function."""

    inner: Coupling
    forward = cast(Any, Coupling.forward)
    forward_and_logdet = cast(Any, Coupling.forward_and_logdet)

    def through(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """As `Coupling.through`, which those two go by."""
        return cast("tuple[Tensor, Tensor | None]", maybe_compile(_through, True)(self.inner, x, context))


def _through(coupling: Coupling, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return coupling.through(x, context)


def can_compile(module: nn.Module) -> bool:
    """Whether a module is a coupling with the forward map of all couplings, and no hooks."""
    if not isinstance(module, Coupling) or why_modified(module) is not None:
        return False
    own = type(module)
    return own.forward is Coupling.forward and own.forward_and_logdet is Coupling.forward_and_logdet


def find_couplings(module: nn.Module) -> list[Coupling]:
    """The couplings of a module."""
    return [m for m in module.modules() if isinstance(m, Coupling)]

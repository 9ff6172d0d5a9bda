"""Couplings as compiled functions: conditioner, transform and concatenation in few kernels.

All couplings of one shape share one compiled function, since their weights are arguments of it.
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
    _compute_forward_and_logdet = cast(Any, Coupling._compute_forward_and_logdet)

    def forward_and_log_scale(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Compute `Coupling.forward_and_log_scale`, which the methods above call, by a compiled function."""
        compiled = maybe_compile(_forward_and_log_scale, True)
        return cast("tuple[Tensor, Tensor | None]", compiled(self.inner, x, context))


def _forward_and_log_scale(coupling: Coupling, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return coupling.forward_and_log_scale(x, context)


def can_compile(module: nn.Module) -> bool:
    """Whether a module is a coupling that does not override `forward` and has no hooks."""
    if not isinstance(module, Coupling) or why_modified(module) is not None:
        return False
    names = ("forward", "forward_and_logdet", "_compute_forward_and_logdet")
    return all(getattr(type(module), name) is getattr(Coupling, name) for name in names)


def find_couplings(module: nn.Module) -> list[Coupling]:
    """Return all couplings in a module."""
    return [m for m in module.modules() if isinstance(m, Coupling)]

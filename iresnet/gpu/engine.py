"""How the steps of a training are taken: what is asked for (`Acceleration`), and what can be had (`Engine`).

eager       every operation is launched by Python; what a CPU does, and what everything else is judged against
fused       runs of residual blocks as compiled functions, g in bfloat16 (`plan`); couplings too (`find_couplings`)
graph       the whole step (forward, backward, clipping, optimiser) as one CUDA graph, launched at once

What a device, an objective or a network does not allow is left out, and `reasons` say why.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, TypeAlias

import torch
from torch import nn

from ..allowed import check_settings
from ..logdet import Estimator, FixedSeries, RussianRoulette
from ..residual import ResidualBlock
from .couplings import find_couplings
from .plan import unfused_convolutions

Choice: TypeAlias = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class Acceleration:
    """How a step is made fast. "auto" takes what the device has: everything on a GPU, nothing on a CPU. A density is
    fused where its estimator is a power series or a roulette."""

    #: The step as one CUDA graph.
    graph: Choice = "auto"
    #: Residual blocks and couplings by torch.compile, once a shape.
    compile: Choice = "auto"
    #: That of g in training, while the state between the blocks stays in float32.
    precision: Literal["auto", "float32", "bfloat16"] = "auto"

    def __post_init__(self) -> None:
        check_settings(self)


class Engine:
    """How the steps of an objective are taken: `method` says it, `reasons` why not faster.

    `needs_logdet` says whether the objective asks for log-determinants, and `estimator` how those of blocks are found.
    """

    def __init__(
        self, objective: nn.Module, wish: Acceleration, *, needs_logdet: bool, estimator: Estimator | None
    ) -> None:
        self.reasons, device = list[str](), next(objective.parameters()).device
        self.blocks = any(isinstance(m, ResidualBlock) for m in objective.modules())
        self.rest, self.couplings = bool(unfused_convolutions(objective)), bool(find_couplings(objective))
        self.series = isinstance(estimator, FixedSeries | RussianRoulette)  # one that is stopped is such a series
        other = needs_logdet and self.blocks and not self.series
        obstacle = "the log-determinant is not a power series" if other else None
        absent = None if device.type == "cuda" else f"this device is {'a CPU' if device.type == 'cpu' else device.type}"
        self.graph = self._allow(wish.graph, "CUDA graph", absent or obstacle or adaptive_solver_reason(objective))
        idle = None if self.blocks or self.couplings else "there are neither residual blocks nor couplings"
        # Compiling also works on a CPU, but takes longer than it saves: only where it is asked for.
        missing = (absent or _no_compiler()) if wish.compile == "auto" else None
        self.compiled = self._allow(wish.compile, "compiled blocks", obstacle or idle or missing)
        coarse = None if absent or torch.cuda.is_bf16_supported() else "this GPU has none"
        half = wish.precision == "bfloat16" or (wish.precision == "auto" and absent is None)
        coarse = coarse or (None if self.blocks or self.rest else "there are neither residual blocks nor convolutions")
        if half and (obstacle or coarse):
            self.reasons.append(f"no bfloat16: {obstacle or coarse}")
            half = False
        self.dtype = torch.bfloat16 if half else torch.float32

    def _allow(self, wish: str, what: str, obstacle: str | None) -> bool:
        if wish == "off":
            return False
        if obstacle is not None:
            self.reasons.append(f"no {what}: {obstacle}")
        return obstacle is None

    @property
    def fuse(self) -> bool:
        """Whether blocks are fused: compiled, or in another precision."""
        return self.compiled or self.dtype != torch.float32

    @property
    def method(self) -> str:
        """How the steps are taken, in a few words."""
        parts = ["one CUDA graph" if self.graph else "operation by operation"]
        if self.fuse and self.blocks:
            parts.append("blocks compiled" if self.compiled else "blocks fused")
        if self.compiled and self.couplings:
            parts.append("couplings compiled")
        if self.fuse and (self.blocks or self.dtype != torch.float32):
            parts.append(f"{self._inside} in {str(self.dtype)[6:]}")
        return ", ".join(parts)

    @property
    def precision(self) -> str:
        """In which precision the steps compute."""
        return "float32" if self.dtype == torch.float32 else f"float32, {self._inside} in {str(self.dtype)[6:]}"

    @property
    def _inside(self) -> str:
        """What may run in another precision than the rest."""
        return "g" if self.blocks else "convolutions"

    def __str__(self) -> str:
        return f"{self.method} ({'; '.join(self.reasons)})" if self.reasons else self.method


def adaptive_solver_reason(objective: nn.Module) -> str | None:
    """Why no graph can be recorded: a solver that chooses its steps by what it reads from the device."""
    found = any(getattr(m, "adaptive", False) for m in objective.modules())
    return "an adaptive solver chooses its steps while it goes" if found else None


def _no_compiler() -> str | None:
    return None if find_spec("triton") is not None else "Triton is not installed"

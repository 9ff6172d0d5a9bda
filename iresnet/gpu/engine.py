"""How training steps are executed: the requested acceleration (`Acceleration`) and the available one (`Engine`).

eager       every operation is launched by Python, as on a CPU; the reference for everything else
fused       runs of residual blocks as compiled functions, g in bfloat16 (`plan`); couplings too (`couplings`)
graph       the whole step (forward, backward, clipping, optimiser) as one CUDA graph, launched at once

What a device, an objective or a network does not support is left out, and `reasons` says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, TypeAlias

import torch
from torch import nn

from ..allowed import check_settings
from ..device import device_of
from ..logdet import Estimator, FixedSeries, RussianRoulette
from ..residual import ResidualBlock
from .couplings import find_couplings
from .plan import unfused_convolutions

Choice: TypeAlias = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class Acceleration:
    """How to accelerate training steps. "auto" uses what the device supports: everything on a GPU, nothing on a CPU.

    A density is fused if its estimator is a power series or a roulette.
    """

    #: Launch the whole step as one CUDA graph.
    graph: Choice = "auto"
    #: Compile residual blocks and couplings with torch.compile, once per shape.
    compile: Choice = "auto"
    #: The precision of g in training; the state between the blocks stays in float32.
    precision: Literal["auto", "float32", "bfloat16"] = "auto"

    def __post_init__(self) -> None:
        check_settings(self)


class Engine:
    """How the steps of an objective are executed: `method` describes it, `reasons` says why it is not faster.

    `needs_logdet` says whether the objective uses log-determinants; `estimator` is the estimator for blocks; `ranks` is
    the number of processes that share a step.
    """

    def __init__(
        self,
        objective: nn.Module,
        requested: Acceleration,
        *,
        needs_logdet: bool,
        estimator: Estimator | None,
        ranks: int = 1,
    ) -> None:
        self.ranks = ranks
        self.reasons, device = list[str](), device_of(objective)
        self.blocks = any(isinstance(m, ResidualBlock) for m in objective.modules())
        self.rest, self.couplings = bool(unfused_convolutions(objective)), bool(find_couplings(objective))
        self.series = isinstance(estimator, FixedSeries | RussianRoulette)  # a stopped roulette is a fixed series
        other = needs_logdet and self.blocks and not self.series
        obstacle = "the log-determinant is not a power series" if other else None
        absent = None if device.type == "cuda" else f"this device is {'a CPU' if device.type == 'cpu' else device.type}"
        shared = "several processes share a step" if ranks > 1 else None
        uncapturable = absent or obstacle or adaptive_solver_reason(objective) or shared
        self.graph = self._allow(requested.graph, "CUDA graph", uncapturable)
        idle = None if self.blocks or self.couplings else "there are neither residual blocks nor couplings"
        # Compiling also works on a CPU, but takes longer than it saves: only if requested explicitly.
        missing = (absent or _no_compiler()) if requested.compile == "auto" else None
        self.compiled = self._allow(requested.compile, "compiled blocks", obstacle or idle or missing)
        no_half = None if absent or torch.cuda.is_bf16_supported() else "this GPU does not support it"
        half = requested.precision == "bfloat16" or (requested.precision == "auto" and absent is None)
        no_half = no_half or (
            None if self.blocks or self.rest else "there are neither residual blocks nor convolutions"
        )
        if half and (obstacle or no_half):
            self.reasons.append(f"no bfloat16: {obstacle or no_half}")
            half = False
        self.dtype = torch.bfloat16 if half else torch.float32
        if ranks > 1 and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in objective.modules()):
            self.reasons.append("BatchNorm normalises by the rows of each process")

    def _allow(self, choice: str, what: str, obstacle: str | None) -> bool:
        if choice == "off":
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
        """How the steps are executed, in a few words."""
        parts = ["one CUDA graph" if self.graph else "eager"]
        if self.fuse and self.blocks:
            parts.append("blocks compiled" if self.compiled else "blocks fused")
        if self.compiled and self.couplings:
            parts.append("couplings compiled")
        if self.fuse and (self.blocks or self.dtype != torch.float32):
            parts.append(f"{self._inside} in {str(self.dtype)[6:]}")
        if self.ranks > 1:
            parts.append(f"{self.ranks} processes")
        return ", ".join(parts)

    @property
    def precision(self) -> str:
        """The precision of the steps."""
        return "float32" if self.dtype == torch.float32 else f"float32, {self._inside} in {str(self.dtype)[6:]}"

    @property
    def _inside(self) -> str:
        """The part that may run in lower precision."""
        return "g" if self.blocks else "convolutions"

    def __str__(self) -> str:
        return f"{self.method} ({'; '.join(self.reasons)})" if self.reasons else self.method


def adaptive_solver_reason(objective: nn.Module) -> str | None:
    """Return why no CUDA graph can be captured if there is an adaptive solver, which reads values from the device."""
    found = any(getattr(m, "adaptive", False) for m in objective.modules())
    return "an adaptive solver chooses its steps at run time" if found else None


def _no_compiler() -> str | None:
    return None if find_spec("triton") is not None else "Triton is not installed"

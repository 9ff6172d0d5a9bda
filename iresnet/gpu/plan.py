"""Residual blocks in few kernels: which blocks are fused, and how a model runs with them. `unit` has the computation.

A `Plan` wraps a chain: every residual block whose g can be read as a program becomes a unit with the ActNorm before it.
All units of one shape share one compiled function, and those of the paper's classifier have custom kernels (`kernels`).
All other transforms are called unchanged. `planned` returns a view of a model, or of an objective, in which every chain
is wrapped; it shares all parameters and buffers, and the model itself is not changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ..branch import ParsedBranch, Program, try_parse
from ..chain import Chain
from ..compiler import compile_settings
from ..lipschitz import cap_of, scale_weights_in
from ..lipschitz.scaling import cast_weights
from ..logdet import Estimator, FixedSeries
from ..residual import ResidualBlock
from ..transform import Transform, context_for
from ..transforms import Coupling
from ..transforms.dequantisation import LearnedNoise
from ..transforms.elementary import ActNorm
from ..trust import why_modified
from . import density, kernels, maps
from .couplings import CompiledCoupling, can_compile
from .density import advance_with_logdet, pack
from .dual import ExecutionMode, Stage, stages
from .unit import state_sum, unit_function
from .view import module_view
from .wrapper import Wrapper

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Unit:
    """A residual block with the ActNorm before it, if there is one."""

    block: ResidualBlock
    norm: ActNorm | None
    reading: ParsedBranch
    stages: tuple[Stage, ...]

    @property
    def program(self) -> Program:
        return self.reading.program

    @property
    def affine(self) -> tuple[Tensor, Tensor] | None:
        return None if self.norm is None else (self.norm.shift, self.norm.log_scale)


@dataclass
class PendingState:
    """A state x + y + bias that is not summed yet: the next unit fuses the sum."""

    x: Tensor
    y: Tensor | None = None
    bias: Tensor | None = None

    def total(self) -> Tensor:
        return state_sum(self.x, self.y, self.bias)


class Plan(Wrapper):
    """A chain with runs of blocks fused."""

    inner: Chain

    def __init__(self, chain: Chain, dtype: torch.dtype, compiled: bool) -> None:
        super().__init__(chain)
        self.dtype, self.compiled = dtype, compiled
        self.pieces = list(_units(list(chain)))
        self.free = _groups(self.units)

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Transform]:
        return iter(self.inner)

    def __getitem__(self, index: int) -> Transform:
        return self.inner[index]

    @property
    def units(self) -> list[Unit]:
        return [part for part in self.pieces if isinstance(part, Unit)]

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """As `Chain.forward`."""
        state, given = PendingState(x), self._cast_free_weights()
        for part in self.pieces:
            if isinstance(part, Unit) and part.program.accepts(state.x):
                values, last = self._enter(part, state, given)
                y = cast(Tensor, state.y)
                if self.compiled and kernels.supported(part.program, state.x, values):
                    x, y = kernels.advance(state.x, y.to(self.dtype), state.bias, part.affine, values)
                elif self.compiled and maps.may_unroll(part.program, values, state.x):
                    mode = ExecutionMode(self.dtype, 0, True)
                    x, y = self._call(
                        density.advance_without_logdet, part.stages, mode, state.x, y, state.bias, part.affine, values
                    )
                else:
                    function = unit_function(part.program, self.dtype, self.compiled)
                    x, y = self._call(function, state.x, y, state.bias, part.affine, values)
                state = PendingState(x, y, last)
            else:
                x = state.total()
                for t in _members(part):
                    x = t(x, context_for(t, context))
                state = PendingState(x)
        return state.total()

    def forward_and_logdet(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        estimator: Estimator | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `Chain.forward_and_logdet`; blocks are fused if the estimator's number of terms is fixed in advance."""
        if not isinstance(estimator, FixedSeries):
            return self.inner.forward_and_logdet(x, context, estimator=estimator, generator=generator)
        mode, weights = ExecutionMode(self.dtype, estimator.probes, self.compiled), pack(*estimator.weights(x))
        state, given = PendingState(x), self._cast_free_weights()
        logdets, scales = [x.new_zeros(len(x))], dict[int, list[Tensor]]()
        for part in self.pieces:
            if isinstance(part, Unit) and part.program.accepts(state.x):
                values, last = self._enter(part, state, given)
                drawn = [estimator.noise(state.x, generator) for _ in range(estimator.probes)]
                noise = drawn[0] if len(drawn) == 1 else torch.cat(drawn)
                arguments = state.x, state.y, state.bias, part.affine, values, noise, weights
                x, y, logdet = self._call(advance_with_logdet, part.stages, mode, *arguments)
                state = PendingState(x, y, last)
                logdets.append(logdet)
                if part.norm is not None:
                    scales.setdefault(math.prod(x.shape[2:]), []).append(part.norm.log_scale)
            else:
                x = state.total()
                for t in _members(part):
                    own = context_for(t, context)
                    x, logdet = t.forward_and_logdet(x, own, estimator=estimator, generator=generator)
                    logdets.append(logdet)
                state = PendingState(x)
        logdets += [(pixels * torch.cat(each).sum()).expand(len(x)) for pixels, each in scales.items()]
        return state.total(), torch.stack(logdets).sum(0)

    def _enter(
        self, unit: Unit, state: PendingState, given: dict[Tensor, Tensor]
    ) -> tuple[list[Tensor], Tensor | None]:
        """Prepare the state for a unit; return the tensors of its g and, apart, its last bias, which is added later."""
        values = unit.reading.tensors()
        last = values.pop() if unit.program.steps[-1].tensors == 2 else None
        unit.reading.record_sizes(tuple(state.x.shape[2:]))
        if unit.norm is not None and unit.norm.awaits_data:
            unit.norm(state.total().detach())  # the first batch initialises an ActNorm
        if state.x.dim() == 4:
            state.x = state.x.contiguous(memory_format=torch.channels_last)
        if state.y is None:  # zeros, so that the first block of a run is the same function as the others
            sums = self.compiled and maps.may_unroll(unit.program, values, state.x)  # their results are in float32
            state.y = torch.zeros_like(state.x, dtype=state.x.dtype if sums else self.dtype)
            state.bias = None if last is None else torch.zeros_like(last)
        return [given.get(v, v) for v in values], last

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        with compile_settings() if self.compiled else nullcontext():
            return function(*arguments)

    def _cast_free_weights(self) -> dict[Tensor, Tensor]:
        """Cast unconstrained weights to `dtype`, batched by shape; constrained ones are computed in it already."""
        found: dict[Tensor, Tensor] = {}
        for group in self.free:
            found.update(zip(group, cast_weights(group, self.dtype), strict=True))
        return found


def _members(part: Transform | Unit) -> list[Transform]:
    if isinstance(part, Unit):
        return [part.block] if part.norm is None else [part.norm, part.block]
    return [part]


def _groups(units: list[Unit]) -> list[list[Tensor]]:
    """Group the weights of unconstrained layers by shape."""
    groups: dict[Any, list[Tensor]] = {}
    for unit in units:
        for layer in unit.block.g.modules():
            if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) and cap_of(layer) is None:
                key = (layer.weight.shape, layer.weight.dtype, layer.weight.device)
                groups.setdefault(key, []).append(layer.weight)
    return list(groups.values())


def _units(transforms: list[Transform]) -> Iterator[Transform | Unit]:
    """Pair every readable block with the ActNorm directly before it, if any."""
    waiting: ActNorm | None = None
    for t in transforms:
        readable = isinstance(t, ResidualBlock) and type(t).forward is ResidualBlock.forward and why_modified(t) is None
        found = try_parse(cast(ResidualBlock, t).g) if readable else None
        parts = None if found is None or not found.program.has_slopes else stages(found.program)
        if found is not None and parts is not None:
            yield Unit(cast(ResidualBlock, t), waiting, found, parts)
            waiting = None
            continue
        if waiting is not None:
            yield waiting
        waiting = t if type(t) is ActNorm and why_modified(t) is None else None
        if waiting is None:
            yield t
    if waiting is not None:
        yield waiting


def can_plan(module: nn.Module) -> bool:
    """Whether a plan can replace a module: a plain chain, without overridden methods or hooks."""
    return type(module) is Chain and why_modified(module) is None


def unfused_convolutions(module: nn.Module) -> list[nn.Module]:
    """Return the convolutions that no plan covers, except those of learned noise, which stays in float32."""
    chains = [cast(Chain, m) for m in module.modules() if can_plan(m)]
    units = [unit for chain in chains for unit in _units(list(chain)) if isinstance(unit, Unit)]
    noises = [m for m in module.modules() if isinstance(m, LearnedNoise)]
    covered = {m for part in (*(unit.block.g for unit in units), *noises) for m in part.modules()}
    return [m for m in module.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d) and m not in covered]


@contextmanager
def planned(module: M, dtype: torch.dtype, *, compiled: bool) -> Iterator[M]:
    """Yield a view of a module in which every chain is wrapped by its plan; with `compiled`, couplings are wrapped too.

    Within this context, the constrained weights of units are computed in `dtype`.
    """

    def wrapped(m: nn.Module) -> nn.Module:
        if can_plan(m):
            return Plan(cast(Chain, m), dtype, compiled)
        return CompiledCoupling(cast(Coupling, m)) if compiled and can_compile(m) else m

    view = module_view(module, wrapped)
    units = [unit for plan in view.modules() if isinstance(plan, Plan) for unit in plan.units]
    caps = [cap for unit in units for m in unit.block.g.modules() if (cap := cap_of(m)) is not None]
    with scale_weights_in(caps, dtype, compiled=compiled):
        yield cast(M, view)

"""Residual blocks in few kernels: ActNorm and block as one compiled function for each shape, g in another precision.

Between two blocks stand a sum, an ActNorm and an activation. The carried pair (x, y) is a state x + y whose sum is not
made yet, so that all three become one kernel:

    x <- (x + y + b + shift) exp(log_scale),   y <- g(x) without the bias b of its last layer

x stays in the precision of the data (float32); g computes in `dtype`, convolutions with their channels last. All blocks
of one shape share one compiled function, as g comes as data (`lipschitz.program`); those of the paper's classifier have
kernels of their own (`kernels`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..elementary import ActNorm
from ..lipschitz import Program, cap_of, program
from ..lipschitz.scaling import in_precision
from ..residual import ResidualBlock
from ..transform import Chain, Transform
from . import kernels


@dataclass(frozen=True)
class Unit:
    """One block with the ActNorm before it, if there is one."""

    block: ResidualBlock
    norm: ActNorm | None
    steps: Program


class Plan:
    """The forward pass of a chain with runs of blocks fused; everything else is called as it is."""

    def __init__(self, chain: Chain, dtype: torch.dtype, compiled: bool) -> None:
        self.dtype, self.compiled = dtype, compiled
        self.parts = list(_units(list(chain)))
        self.free = _groups(self.units)

    @property
    def units(self) -> list[Unit]:
        return [part for part in self.parts if isinstance(part, Unit)]

    def __call__(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        y = bias = None
        cast = self._cast_free_weights()
        for part in self.parts:
            if isinstance(part, Unit):
                x, y, bias = self._advance(part, x, y, bias, cast)
            else:
                x, y, bias = part(_settled(x, y, bias), context), None, None
        return _settled(x, y, bias)

    def _advance(
        self, unit: Unit, x: Tensor, y: Tensor | None, bias: Tensor | None, cast: dict[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        values = program.tensors(unit.block.g)
        last = values.pop() if unit.steps[-1].tensors == 2 else None
        _note_sizes(unit.block.g, x)
        values = [cast.get(v, v) for v in values]
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        if y is None:  # zero, so that the first block of a run is the same function as the others
            y = torch.zeros_like(x, dtype=self.dtype)
            bias = None if last is None else torch.zeros_like(last)
        norm = None if unit.norm is None else (unit.norm.shift, unit.norm.log_scale)
        with warnings.catch_warnings(), _many_shapes(self.compiled):
            # The compiler looks at .grad of every input, and torch warns of that for scaled weights.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            if self.compiled and kernels.supported(unit.steps, x, values):
                x, y = kernels.advance(x, y, bias, norm, values)
            else:
                x, y = advance(unit.steps, self.dtype, self.compiled)(x, y, bias, norm, values)
        return x, y, last

    def _cast_free_weights(self) -> dict[Tensor, Tensor]:
        """Weights without a constraint in `dtype`, those of one shape at once; constrained ones come in it already."""
        found: dict[Tensor, Tensor] = {}
        for group in self.free:
            found.update(zip(group, in_precision(group, self.dtype), strict=True))
        return found


@cache
def advance(steps: Program, dtype: torch.dtype, compiled: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """The function of all blocks with these steps: (x, y, bias, ActNorm, tensors of g) -> the next (x, y)."""
    final = steps[-1]
    bare = (*steps[:-1], program.Step(final.kind, min(final.tensors, 1), final.geometry, final.constant))

    def function(
        x: Tensor, y: Tensor | None, bias: Tensor | None, norm: tuple[Tensor, Tensor] | None, values: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        x = _settled(x, y, bias)
        if norm is not None:
            x = (x + _per_channel(norm[0], x)) * _per_channel(norm[1], x).exp()
        return x, _in_precision(bare, x, values, dtype)

    return cast(Any, torch.compile(function, dynamic=False)) if compiled else function


def _in_precision(steps: Program, x: Tensor, values: list[Tensor], dtype: torch.dtype) -> Tensor:
    """g(x) with linear maps in `dtype`; biases and activations in float32 where the compiler joins them."""
    h, used = x, 0
    for step in steps:
        taken, used = values[used : used + step.tensors], used + step.tensors
        if step.kind in ("linear", "conv"):
            bare = program.Step(step.kind, 1, step.geometry)
            h = program.apply(bare, h.to(dtype), taken[:1])
            if step.tensors == 2:
                h = h + _per_channel(taken[1], h)
        else:
            h = program.apply(step, h, taken)
    return h


def _settled(x: Tensor, y: Tensor | None, bias: Tensor | None) -> Tensor:
    if y is None:
        return x
    return x + y if bias is None else x + y + _per_channel(bias, x)


def _per_channel(value: Tensor, x: Tensor) -> Tensor:
    return value.view(-1, *(1,) * (x.dim() - 2))


def _many_shapes(compiled: bool) -> AbstractContextManager[Any]:
    """One function is compiled for every shape: more often than the compiler expects of one function."""
    return torch._dynamo.config.patch(recompile_limit=256) if compiled else nullcontext()


def _groups(units: list[Unit]) -> list[list[Tensor]]:
    """The weights of layers without a constraint, by shape."""
    groups: dict[Any, list[Tensor]] = {}
    for unit in units:
        for layer in unit.block.g.modules():
            if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) and cap_of(layer) is None:
                groups.setdefault(layer.weight.shape, []).append(layer.weight)
    return list(groups.values())


def _units(transforms: list[Transform]) -> Iterator[Transform | Unit]:
    """Pair every readable block with an ActNorm that stands right before it."""
    waiting: ActNorm | None = None
    for t in transforms:
        readable = isinstance(t, ResidualBlock) and type(t).forward is ResidualBlock.forward
        steps = program.read(cast(ResidualBlock, t).g) if readable else None
        if steps is not None and _ends_linear(steps):
            yield Unit(cast(ResidualBlock, t), waiting, steps)
            waiting = None
            continue
        if waiting is not None:
            yield waiting
        waiting = t if type(t) is ActNorm else None
        if waiting is None:
            yield t
    if waiting is not None:
        yield waiting


def _ends_linear(steps: Program) -> bool:
    return steps[-1].kind in ("linear", "conv")


def _note_sizes(g: nn.Module, x: Tensor) -> None:
    """What the layers' own hooks would have seen: the size at which their norm is taken."""
    for layer in g.modules():
        cap = cap_of(layer)
        if cap is not None and cap.geometry.axes:
            cap.see(tuple(x.shape[2:]))


def unfused(module: nn.Module) -> list[nn.Module]:
    """The convolutions of a module that no plan covers."""
    chains = [m for m in module.modules() if type(m) is Chain]
    units = [unit for chain in chains for unit in _units(list(chain)) if isinstance(unit, Unit)]
    covered = {m for unit in units for m in unit.block.g.modules()}
    return [m for m in module.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d) and m not in covered]


@contextmanager
def fused(module: nn.Module, dtype: torch.dtype, *, compiled: bool) -> Iterator[list[Unit]]:
    """Within this context every chain of the module computes by its plan; gives the units that are fused."""
    plans = {m: Plan(m, dtype, compiled) for m in module.modules() if type(m) is Chain}
    units = [unit for plan in plans.values() for unit in plan.units]
    caps = [cap for unit in units for m in unit.block.g.modules() if (cap := cap_of(m)) is not None]
    try:
        for chain, plan in plans.items():
            vars(chain)["forward"] = plan
        for cap in caps:
            cap.dtype, cap.fast = dtype, compiled
        yield units
    finally:
        for chain in plans:
            vars(chain).pop("forward", None)
        for cap in caps:
            cap.dtype, cap.fast = None, False

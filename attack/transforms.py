"""Models with user-defined parts: hidden blocks, hooks on chains, subclasses, transforms with false claims."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from iresnet import ActNorm, Chain, Multiscale, ResidualBlock, Transform
from iresnet.fixed_point import Solver
from iresnet.logdet import Estimator
from iresnet.transform import Stretch

from . import networks, tricks
from .branches import BLOCK_TRICKS
from .mutations import network
from .networks import Shape

Maker: TypeAlias = Callable[[random.Random, Shape], Transform]


class UserTransform(Transform):
    """A user-defined transform that wraps another, without listing it, and scales its output."""

    def __init__(self, inner: Transform, factor: float = 1.0, *, proven: bool = True, lists: bool = False) -> None:
        super().__init__()
        self.inner, self.factor, self.proven, self.lists = inner, factor, proven, lists

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return cast(Tensor, self.factor * self.inner(x, context))

    def forward_and_logdet(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        estimator: Estimator | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        z, logdet = self.inner.forward_and_logdet(x, context, estimator=estimator, generator=generator)
        return self.factor * z, logdet + math.prod(x.shape[1:]) * math.log(abs(self.factor))

    def inverse(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> Tensor:
        return self.inner.inverse(z / self.factor, context, tolerance=tolerance, solver=solver)

    def stretch(self, input_shape: Shape | None = None) -> Stretch:
        inner = self.inner.stretch(input_shape)
        shift = math.inf if input_shape is None else math.prod(input_shape) * math.log(abs(self.factor))
        low, high = inner.logdet or (-math.inf, math.inf)
        pair = (low + shift, high + shift) if math.isfinite(shift) else (-math.inf, math.inf)
        k = abs(self.factor)
        return Stretch(inner.forward * k, inner.inverse / k, pair, inner.proven and self.proven)

    def parts(self, input_shape: Shape | None = None) -> list[tuple[str, Transform, Shape | None]]:
        return [("inner", self.inner, input_shape)] if self.lists else []


class FalseStretch(UserTransform):
    """A user-defined transform with a false claim: the stretch of the identity."""

    def stretch(self, input_shape: Shape | None = None) -> Stretch:
        return Stretch(1.0, 1.0, (0.0, 0.0), self.proven)


class TripledChain(Chain):
    """A chain with a custom forward."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return 3 * super().forward(x, context)


class ScaledActNorm(ActNorm):
    """A closed form of the library with a custom forward."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return 5 * super().forward(x, context)


def block(r: random.Random, shape: Shape) -> ResidualBlock:
    """A block with a proven constant."""
    return ResidualBlock(network(r, shape, torch.float64))


def expanding_block(r: random.Random, shape: Shape) -> ResidualBlock:
    """A block that is not a contraction: its weights were scaled up after it was created."""
    found = block(r, shape)
    with torch.no_grad():
        for p in found.parameters():
            p.mul_(5)
    return found


# ------------------------------------------------------------------------------------------------- models


def _hidden(r: random.Random, shape: Shape) -> Transform:
    inner = r.choice([block, expanding_block])(r, shape)
    return Chain(block(r, shape), r.choice([UserTransform, FalseStretch])(inner, r.choice([1.0, 3.0])))


def _listed(r: random.Random, shape: Shape) -> Transform:
    return Chain(UserTransform(r.choice([block, expanding_block])(r, shape), 2.0, lists=True), block(r, shape))


def _unproven(r: random.Random, shape: Shape) -> Transform:
    return UserTransform(block(r, shape), 1.5, proven=False, lists=r.random() < 0.5)


def _asserted(r: random.Random, shape: Shape) -> Transform:
    g = tricks.Hidden(network(r, shape, torch.float64), 0.5 * tricks.factor(r))
    return Chain(block(r, shape), ResidualBlock(g, lipschitz=0.9))


def _asserted_activation(r: random.Random, shape: Shape) -> Transform:
    """A block with an asserted constant: a user-defined activation in a network of otherwise known parts."""
    d = math.prod(shape)
    steep = tricks.subclassed(nn.ELU(), forward=lambda self, x: torch.nn.functional.elu(0.3 * x) + 0.2 * torch.sin(x))
    g = nn.Sequential(nn.Flatten(), nn.Linear(d, 6), steep, nn.Linear(6, d), nn.Unflatten(1, shape)).double()
    networks.scale_(g, shape, 0.8)
    return ResidualBlock(g if len(shape) > 1 else nn.Sequential(*list(g)[1:4]), lipschitz=0.8)


def _hooked(r: random.Random, shape: Shape) -> Transform:
    chain, k = Chain(ActNorm(shape[0]).double(), block(r, shape)), tricks.factor(r)
    where: Any = r.choice([chain, chain[0], chain[1], chain.transforms])
    if where is chain.transforms:  # a hook on a ModuleList is never called
        where = chain
    where.register_forward_hook(lambda module, inputs, output: k * output)
    return chain


def _subclassed(r: random.Random, shape: Shape) -> Transform:
    if r.random() < 0.5:
        return TripledChain(block(r, shape), block(r, shape))
    return Chain(ScaledActNorm(shape[0]).double(), block(r, shape))


def _forward_set(r: random.Random, shape: Shape) -> Transform:
    chain = Chain(ActNorm(shape[0]).double(), block(r, shape))
    where: Any = r.choice([chain, chain[0], chain[1]])
    parent, k = where.forward, tricks.factor(r)
    where.forward = lambda x, context=None: k * parent(x, context)
    return chain


def _tricked(r: random.Random, shape: Shape) -> Transform:
    return Chain(block(r, shape), r.choice(BLOCK_TRICKS)(r, block(r, shape)))


def _echoing(r: random.Random, shape: Shape) -> Transform:
    """A chain whose list of transforms is a user-defined class."""
    chain = Chain(block(r, shape))
    chain.transforms = tricks.Echoing([block(r, shape)])
    return chain


def _parametrized(r: random.Random, shape: Shape) -> Transform:
    norm = ActNorm(shape[0]).double()
    nn.utils.parametrize.register_parametrization(norm, "shift", tricks.Scale(3.0))
    with torch.no_grad():
        cast(Any, norm).parametrizations.shift.original.add_(1.0)
    return Chain(norm, block(r, shape))


def _multiscale(r: random.Random, shape: Shape) -> Transform:
    if shape[0] % 2:
        raise tricks.NotApplicable
    half = (shape[0] // 2, *shape[1:])
    return Multiscale(
        [r.choice([block, _hidden])(r, shape), r.choice([block, expanding_block, _hidden])(r, half)], shape
    )


def _nested(r: random.Random, shape: Shape) -> Transform:
    return Chain(Chain(block(r, shape)), r.choice([_hidden, _hooked, _subclassed, _forward_set])(r, shape))


def _plain(r: random.Random, shape: Shape) -> Transform:
    return Chain(block(r, shape), ActNorm(shape[0]).double(), block(r, shape))


MAKERS: tuple[Maker, ...] = (
    _hidden, _listed, _unproven, _asserted, _asserted_activation, _hooked, _subclassed, _forward_set, _tricked,
    _parametrized, _multiscale, _nested, _echoing, _plain,
)  # fmt: skip

"""Attacks on whole models: blocks that are hidden from a certificate, hooks on chains, transforms and flows of a user's own.

What is claimed of a transform F: `certify` passes only if every residual block inside is a contraction and Lip(F) is as
stated; what `solve` proves fits the live residual; a log-likelihood that claims to be exact or proven is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

import iresnet
from iresnet import ActNorm, Chain, DiagonalNormal, Flow, Multiscale, ResidualBlock, Transform, certify
from iresnet.fixed_point import Solver
from iresnet.logdet import Estimator
from iresnet.transform import Stretch

from . import Violation, kind, networks, tricks
from .branches import BLOCK_TRICKS, REFUSALS
from .mutations import network
from .networks import Shape
from .search import largest_ratio, norms

Maker: TypeAlias = Callable[[random.Random, Shape], Transform]


class Own(Transform):
    """A user's transform around another, which it does not list: F followed by a factor."""

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


class Lax(Own):
    """A user's transform that states what it does not know: the stretch of the identity."""

    def stretch(self, input_shape: Shape | None = None) -> Stretch:
        return Stretch(1.0, 1.0, (0.0, 0.0), self.proven)


class Stray(Chain):
    """A chain with a forward of its own."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return 3 * super().forward(x, context)


class Tilted(ActNorm):
    """A closed form of the library with a forward of the user's own."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return 5 * super().forward(x, context)


def block(r: random.Random, shape: Shape) -> ResidualBlock:
    """A block that is proven."""
    return ResidualBlock(network(r, shape, torch.float64))


def wild(r: random.Random, shape: Shape) -> ResidualBlock:
    """A block that is no contraction: weights written after it was made."""
    found = block(r, shape)
    with torch.no_grad():
        for p in found.parameters():
            p.mul_(5)
    return found


# ------------------------------------------------------------------------------------------------- models


def _hidden(r: random.Random, shape: Shape) -> Transform:
    inner = r.choice([block, wild])(r, shape)
    return Chain(block(r, shape), r.choice([Own, Lax])(inner, r.choice([1.0, 3.0])))


def _listed(r: random.Random, shape: Shape) -> Transform:
    return Chain(Own(r.choice([block, wild])(r, shape), 2.0, lists=True), block(r, shape))


def _unproven(r: random.Random, shape: Shape) -> Transform:
    return Own(block(r, shape), 1.5, proven=False, lists=r.random() < 0.5)


def _asserted(r: random.Random, shape: Shape) -> Transform:
    g = tricks.Hidden(network(r, shape, torch.float64), 0.5 * tricks.factor(r))
    return Chain(block(r, shape), ResidualBlock(g, lipschitz=0.9))


def _asserted_activation(r: random.Random, shape: Shape) -> Transform:
    """An activation of the user's own in a network that could otherwise be read, its constant asserted."""
    d = math.prod(shape)
    steep = tricks.subclassed(nn.ELU(), forward=lambda self, x: torch.nn.functional.elu(0.3 * x) + 0.2 * torch.sin(x))
    g = nn.Sequential(nn.Flatten(), nn.Linear(d, 6), steep, nn.Linear(6, d), nn.Unflatten(1, shape)).double()
    networks.scale_(g, shape, 0.8)
    return ResidualBlock(g if len(shape) > 1 else nn.Sequential(*list(g)[1:4]), lipschitz=0.8)


def _hooked(r: random.Random, shape: Shape) -> Transform:
    chain, k = Chain(ActNorm(shape[0]).double(), block(r, shape)), tricks.factor(r)
    where: Any = r.choice([chain, chain[0], chain[1], chain.transforms])
    if where is chain.transforms:  # a hook on a list is never called
        where = chain
    where.register_forward_hook(lambda module, inputs, output: k * output)
    return chain


def _subclassed(r: random.Random, shape: Shape) -> Transform:
    if r.random() < 0.5:
        return Stray(block(r, shape), block(r, shape))
    return Chain(Tilted(shape[0]).double(), block(r, shape))


def _forward_set(r: random.Random, shape: Shape) -> Transform:
    chain = Chain(ActNorm(shape[0]).double(), block(r, shape))
    where: Any = r.choice([chain, chain[0], chain[1]])
    parent, k = where.forward, tricks.factor(r)
    where.forward = lambda x, context=None: k * parent(x, context)
    return chain


def _tricked(r: random.Random, shape: Shape) -> Transform:
    return Chain(block(r, shape), r.choice(BLOCK_TRICKS)(r, block(r, shape)))


def _echoing(r: random.Random, shape: Shape) -> Transform:
    """A chain whose list of transforms is a user's own."""
    chain = Chain(block(r, shape))
    chain.transforms = tricks.Echoing([block(r, shape)])
    return chain


def _parametrized(r: random.Random, shape: Shape) -> Transform:
    norm = ActNorm(shape[0]).double()
    nn.utils.parametrize.register_parametrization(norm, "shift", tricks.Times(3.0))
    with torch.no_grad():
        norm.parametrizations.shift.original.add_(1.0)  # type: ignore[union-attr]
    return Chain(norm, block(r, shape))


def _multiscale(r: random.Random, shape: Shape) -> Transform:
    if shape[0] % 2:
        raise tricks.Unfit
    half = (shape[0] // 2, *shape[1:])
    return Multiscale([r.choice([block, _hidden])(r, shape), r.choice([block, wild, _hidden])(r, half)], shape)


def _nested(r: random.Random, shape: Shape) -> Transform:
    return Chain(Chain(block(r, shape)), r.choice([_hidden, _hooked, _subclassed, _forward_set])(r, shape))


def _plain(r: random.Random, shape: Shape) -> Transform:
    return Chain(block(r, shape), ActNorm(shape[0]).double(), block(r, shape))


MAKERS: tuple[Maker, ...] = (
    _hidden, _listed, _unproven, _asserted, _asserted_activation, _hooked, _subclassed, _forward_set, _tricked, _parametrized, _multiscale,
    _nested, _echoing, _plain,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------- the attack


@kind("models", cases=3_000)
def models(r: random.Random) -> str:
    """Certificates, solves and likelihoods of chains with hidden blocks, hooks and transforms of a user's own."""
    shape = r.choice([(2,), (3,), (4,), (6,), (2, 4)])
    maker = r.choice(MAKERS)
    name = maker.__name__.strip("_")
    try:
        model = maker(r, shape).eval()
    except tricks.Unfit:
        return "unfit"
    x = networks.points(r, 3, shape, torch.float64, largest=0.5)
    with torch.no_grad():
        z = model(x.clone())
    proven = check_certificate(r, model, x, name)
    proven |= check_solve(model, x, z, name)
    if r.random() < 0.5:
        proven |= check_likelihood(r, model, x, z, name)
    return "proven" if proven else "not proven"


def check_certificate(r: random.Random, model: Transform, x: Tensor, name: str) -> bool:
    """If a certificate passes: every block is a contraction, and Lip(F) is as stated."""
    shape = tuple(x.shape[1:])
    holder: Any = r.choice([lambda: model, lambda: Flow(model, DiagonalNormal((math.prod(shape),)), event_shape=shape)])()
    try:
        certificate = certify(holder, shape)
    except REFUSALS:
        return False
    if not certificate.passed:
        return False
    blocks = [m for m in model.modules() if isinstance(m, ResidualBlock)]
    if len(certificate.blocks) < len(blocks):
        raise Violation(f"{name}: PASSED {len(certificate.blocks)} of {len(blocks)} blocks: {_short(model)}")
    for inner in blocks:
        at = _shape_of(model, inner, x)
        if at is not None:
            ratio = largest_ratio(lambda t, inner=inner: inner(t.clone()) - t, at, r, steps=3)
            if not ratio < 1 + 1e-6:
                raise Violation(f"{name}: PASSED, but a block has a ratio of {ratio:.4g}: {_short(inner)}")
    stretch = certificate.stretch
    if stretch is not None and stretch.proven:
        ratio = largest_ratio(lambda t: model(t.clone()), x, r, steps=3)
        if not ratio <= stretch.forward * (1 + 1e-6) + 1e-9:
            raise Violation(f"{name}: Lip(F) <= {stretch.forward:.5g} proven, found {ratio:.5g}: {_short(model)}")
    return True


def _shape_of(model: nn.Module, inner: nn.Module, x: Tensor) -> Tensor | None:
    """What a block is given when the model is given x."""
    seen = list[Tensor]()
    handle = inner.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach().clone()))
    try:
        with torch.no_grad():
            model(x.clone())
    finally:
        handle.remove()
    return seen[0] if seen else None


def check_solve(model: Transform, x: Tensor, z: Tensor, name: str) -> bool:
    """What is proven of a solve fits the distance to the x that made the code."""
    try:
        s: Any = model.solve(z)
    except Exception as error:
        raise Violation(f"{name}: solve raises {type(error).__name__}: {error}") from error
    good = s.error_bound.isfinite()
    if not (s.proven and bool(good.any())):
        return False
    if _has_unproven(model):
        raise Violation(f"{name}: solve says proven although a part is asserted or says that it is not: {_short(model)}")
    with torch.no_grad():
        residual = norms(model(s.x.clone()) - z)
    most = 1e3 * s.error_bound + 1e-9 * (1 + norms(z) + norms(s.x))
    if bool((residual > most)[good].any()):
        raise Violation(
            f"{name}: solve proven to {float(s.error_bound[good].max()):.3g}, residual {float(residual[good].max()):.3g}: "
            f"{_short(model)}"
        )
    error = norms(s.x - x)
    if bool((error > s.error_bound * (1 + 1e-6) + 1e-9 * (1 + norms(x)))[good].any()):
        raise Violation(f"{name}: solve proven to {float(s.error_bound[good].max()):.3g}, error {float(error[good].max()):.3g}")
    return True


def _has_unproven(model: nn.Module) -> bool:
    return any(getattr(m, "asserted", None) is not None or (isinstance(m, Own) and not m.proven) for m in model.modules())


def check_likelihood(r: random.Random, model: Transform, x: Tensor, z: Tensor, name: str) -> bool:
    """A log-likelihood that claims errors holds them; where a part is asserted or unknown it claims nothing."""
    base = DiagonalNormal(tuple(z.shape[1:])).double()
    flow = Flow(model, base, event_shape=tuple(x.shape[1:])).eval()
    try:
        found = flow.log_prob_with_error(x)
    except REFUSALS:
        return False
    if name.startswith("asserted"):  # nothing is proven, but the value must be that of the live function all the same
        off = (found.value - base.log_prob(z) - _logdet(model, x)).abs()
        if bool((off > 1e-6 * (1 + found.value.abs())).any()):
            raise Violation(f"{name}: log p is off by {float(off.max()):.3g}: {_short(model)}")
    claims = bool(getattr(found, "proven", True)) and bool(found.bias_bound.isfinite().all())
    if not claims:
        return False
    if _has_unproven(model):
        raise Violation(f"{name}: log_prob_with_error is proven although a part is asserted: {_short(model)}")
    exact = base.log_prob(z) + _logdet(model, x)
    off = (found.value - exact).abs()
    most = found.bias_bound + 6 * found.standard_error + 1e-9 * (1 + exact.abs())
    if bool((off > most).any()):
        raise Violation(f"{name}: log p claims {float(most.max()):.3g}, is off by {float(off.max()):.3g}: {_short(model)}")
    return True


def _logdet(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """ln |det| of the live function, from its Jacobian by autograd, sample by sample."""
    found = []
    for row in x:
        j = torch.autograd.functional.jacobian(lambda t, like=row: f(t.reshape(1, *like.shape)).flatten(), row.flatten())
        found.append(torch.linalg.slogdet(cast(Tensor, j))[1])
    return torch.stack(found)


def _short(model: nn.Module) -> str:
    return " ".join(str(model).split())[:220]

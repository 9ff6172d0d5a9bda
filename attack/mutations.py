"""Attacks on caches: solve, change the model (`changes`), solve again.

The second proof must hold for the changed model.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import iresnet
from iresnet import ActNorm, Chain, DiagonalNormal, Flow, InvertibleConv1x1, ResidualBlock, Standardise, constrain_
from iresnet.lipschitz import SpectralCap

from . import Violation, kind, networks, tricks
from .branches import REFUSALS, SLACK
from .changes import MUTATIONS, Masked
from .networks import Shape, one_line
from .search import largest_ratio, norms

# ------------------------------------------------------------------------------------------------- models


def embedding(r: random.Random, size: int, width: int) -> nn.Module:
    """A user-defined context network."""
    makers: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(size, width),
        lambda: Masked(size, width),
        lambda: nn.Sequential(nn.Linear(size, width), nn.BatchNorm1d(width)),
        lambda: nn.Sequential(nn.Linear(size, 4), nn.ReLU(inplace=True), nn.Linear(4, width)),
    ]
    return r.choice(makers)()


@dataclass
class Subject:
    """A transform to solve, its input shape and dtype, and a context."""

    model: iresnet.Transform
    shape: Shape
    dtype: torch.dtype
    context: Tensor | None = None


def subject(r: random.Random) -> Subject:
    """A block, a conditional one, a constrained one, or a chain with closed forms."""
    dtype = r.choice([torch.float32, torch.float64])
    choice = r.random()
    if choice < 0.3:
        conditional, shape, _ = networks.conditional_network(r, dtype)
        width = cast(Any, conditional.first)[0].weight.shape[0]
        conditional.embed = embedding(r, 2, width).to(dtype)
        return Subject(ResidualBlock(conditional).eval(), shape, dtype, torch.randn(3, 2, dtype=dtype))
    shape = networks.vector_shape(r) if r.random() < 0.8 else networks.image_shape(r)
    g = network(r, shape, dtype)
    if choice < 0.35:
        constrain_(g, coefficient=0.9)
    elif choice < 0.4:
        parametrize.register_parametrization(tricks.linear(r, g), "weight", tricks.Scale(0.9))
        return Subject(ResidualBlock(g, lipschitz=0.95).eval(), shape, dtype)
    block = ResidualBlock(g)
    if choice < 0.7:
        return Subject(block.eval(), shape, dtype)
    channels = shape[0]
    closed: list[iresnet.Transform] = [
        ActNorm(channels),
        InvertibleConv1x1(channels),
        Standardise(torch.rand(channels), 0.5 + torch.rand(channels)),
    ]
    return Subject(Chain(r.choice(closed), block, ActNorm(channels)).to(dtype).eval(), shape, dtype)


def network(r: random.Random, shape: Shape, dtype: torch.dtype) -> nn.Module:
    """A network that a block accepts, with biases of ordinary size."""
    while True:
        g, _, _ = networks.branch(r, shape, lipschitz=r.uniform(0.3, 0.9), dtype=torch.float64)
        networks.clamp_biases_(g)
        try:
            ResidualBlock(g)
        except ValueError:
            continue
        return g.to(dtype)


# ------------------------------------------------------------------------------------------------- the attack


@kind("mutations", cases=7_000)
def mutations(r: random.Random) -> str:
    """Two solves with a change between them: weights, buffers, attributes, hooks, modules, modes."""
    try:
        s = subject(r)
    except tricks.NotApplicable:
        return "unfit"
    x = networks.inputs(r, 3, s.shape, s.dtype, largest=0.5)
    z = _code(s, x)
    _solved(s, z, "before")
    names = [_mutated(r, s.model) for _ in range(r.choice([1, 1, 2]))]
    name = " then ".join(names)
    try:
        z = _code(s, x)
    except Exception:
        return "invalid"
    if not bool(z.isfinite().all()):
        return "invalid"
    proven = _solved(s, z, name)
    if any(isinstance(m, SpectralCap) for m in s.model.modules()) and r.random() < 0.5:
        _check_cached(s, x, name)
    if proven and isinstance(s.model, ResidualBlock) and r.random() < 0.3:
        _check_bound(r, s, x, name)
    if r.random() < 0.2 and s.context is None:
        _check_samples(s, z, name)
    return "proven" if proven else "not proven"


def _mutated(r: random.Random, model: nn.Module) -> str:
    for _ in range(30):
        name = r.choice(sorted(MUTATIONS))
        try:
            MUTATIONS[name](r, model)
        # torch has no such operation for what a trick made of a weight, or cannot copy it, such as a lock
        except (tricks.NotApplicable, RuntimeError, TypeError):
            continue
        return name
    return "nothing"


def _code(s: Subject, x: Tensor) -> Tensor:
    """The output of the live model for x."""
    with torch.no_grad():
        return cast(Tensor, s.model(x.clone(), s.context))


def _solved(s: Subject, z: Tensor, name: str) -> bool:
    """Solve, and check the proven bound against the live model's residual; return whether all samples are proven."""
    try:
        found: Any = s.model.solve(z, s.context)
    except Exception as error:
        if "NaN or infinity; no bound" in str(error):  # a broken model, reported as such
            return False
        raise Violation(f"{name}: solve raises {type(error).__name__}: {error}") from error
    good = found.converged & found.error_bound.isfinite()
    if not (found.proven and bool(good.any())):
        return False
    residual = _residual(s, found.x, z)
    stretch = max(2.0, s.model.stretch(s.shape).forward)
    most = stretch * found.error_bound + 1e4 * torch.finfo(s.dtype).eps * (1 + norms(z) + norms(found.x)) * stretch
    if bool((residual > most)[good].any()) and bool((_residual_in_float64(s, found.x, z) > most)[good].any()):
        raise Violation(
            f"{name}: proven to {float(found.error_bound[good].max()):.3g}, "
            f"residual {float(residual[good].max()):.3g}: {one_line(s.model)}"
        )
    return bool(good.all())


def _residual(s: Subject, x: Tensor, z: Tensor) -> Tensor:
    return norms(_code(s, x).double() - z.double())


def _residual_in_float64(s: Subject, x: Tensor, z: Tensor) -> Tensor:
    """The same by the live model in float64: in float32 a bias of a million hides the phase of a sine."""
    s.model.double()
    context = None if s.context is None else s.context.double()
    try:
        return _residual(replace(s, context=context), x.double(), z)
    finally:
        s.model.to(s.dtype)


def _check_cached(s: Subject, x: Tensor, name: str) -> None:
    """Check that within torch's `parametrize.cached()` proofs hold for the cached weights."""
    with parametrize.cached():
        try:
            _code(s, x)
            with torch.no_grad():
                for p in s.model.parameters():
                    p.neg_()
            z = _code(s, x)
            s.model.solve(z, s.context)
        except REFUSALS:  # reporting that this is not supported is fine too
            return
        _solved(s, z, f"{name}, cached")


def _check_bound(r: random.Random, s: Subject, x: Tensor, name: str) -> None:
    block = cast(ResidualBlock, s.model)
    try:
        bound = block.bound(s.shape)
    except REFUSALS:
        return
    ratio = largest_ratio(lambda t: _with_grad(s, t) - t, x, r, steps=3)
    if bound.proven and bound.value < 1 and not ratio <= bound.value * (1 + SLACK[s.dtype]) + 1e-9:
        raise Violation(f"{name}: bound {bound.value:.5g} kept, found {ratio:.5g}: {one_line(block)}")


def _with_grad(s: Subject, t: Tensor) -> Tensor:
    return cast(Tensor, s.model(t, s.context))


def _check_samples(s: Subject, z: Tensor, name: str) -> None:
    """Check that a flow that was sampled before its weights changed samples from its current function."""
    base = DiagonalNormal(tuple(z.shape[1:])).to(s.dtype)
    flow = Flow(s.model, base, event_shape=s.shape).eval()
    try:
        flow.sample((2,), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            for p in s.model.parameters():
                p.neg_()
        x = flow.sample((3,), generator=torch.Generator().manual_seed(1))
    except (*REFUSALS, RuntimeError) as error:
        if not isinstance(error, REFUSALS):
            raise Violation(f"{name}: sample raises {type(error).__name__}: {error}") from error
        return
    wanted = base.rsample(3, torch.Generator().manual_seed(1)).detach()
    residual = norms(_code(s, x).double() - wanted.double())
    stretch = max(2.0, s.model.stretch(s.shape).forward)
    if bool((residual > 1e-3 * stretch * (1 + norms(wanted) + norms(x))).any()):
        raise Violation(f"{name}: samples have residual {float(residual.max()):.3g} after weights were negated")

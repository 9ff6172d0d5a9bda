"""Attacks on what is kept between calls: solve, change something, solve again; the second proof must hold for the second
function. Changes are what honest code does: weights written in any way, optimisers, buffers, attributes, hooks, modules."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import iresnet
from iresnet import ActNorm, Chain, DiagonalNormal, Flow, InvertibleConv1x1, ResidualBlock, Standardise, constrain_
from iresnet.lipschitz import Concatenated, Conditioned, LipSwish, SpectralCap

from . import Violation, kind, networks, tricks
from .branches import REFUSALS, SLACK
from .networks import Shape
from .search import largest_ratio, norms

Mutation: TypeAlias = Callable[[random.Random, nn.Module], None]

MUTATIONS: dict[str, Mutation] = {}


def mutation(function: Mutation) -> Mutation:
    """Register a change of a model; it raises `Unfit` where there is nothing to change."""
    MUTATIONS[function.__name__.strip("_")] = function
    return function


def parameters(r: random.Random, model: nn.Module) -> list[nn.Parameter]:
    """The parameters of a model, in random order."""
    found = list(model.parameters())
    if not found:
        raise tricks.Unfit
    r.shuffle(found)
    return found


# ------------------------------------------------------------------------------------------------- weights


@mutation
def negated(r: random.Random, model: nn.Module) -> None:
    with torch.no_grad():
        for p in parameters(r, model)[: r.choice([1, 100])]:
            p.neg_()


@mutation
def negated_data(r: random.Random, model: nn.Module) -> None:
    parameters(r, model)[0].data.neg_()


@mutation
def permuted(r: random.Random, model: nn.Module) -> None:
    p = parameters(r, model)[0]
    order = torch.randperm(p.numel(), generator=networks.generator(r))
    with torch.no_grad():
        p.copy_(p.flatten()[order].reshape(p.shape))


@mutation
def reflected(r: random.Random, model: nn.Module) -> None:
    """Another vector with the same norm and the same weighted sum, for weights that rise from 1 to 2."""
    p = parameters(r, model)[0]
    with torch.no_grad():
        w = p.detach().double().flatten()
        a = torch.linspace(1, 2, len(w), dtype=torch.float64)
        p.copy_((2 * (a @ w) / (a @ a) * a - w).reshape(p.shape))


@mutation
def swapped(r: random.Random, model: nn.Module) -> None:
    """Two weights of one shape change places."""
    found = parameters(r, model)
    pairs = [(a, b) for i, a in enumerate(found) for b in found[:i] if a.shape == b.shape]
    if not pairs:
        raise tricks.Unfit
    a, b = r.choice(pairs)
    with torch.no_grad():
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)


@mutation
def shrunk(r: random.Random, model: nn.Module) -> None:
    with torch.no_grad():
        parameters(r, model)[0].mul_(r.choice([0.5, -0.3, 0.0]))


@mutation
def one_number(r: random.Random, model: nn.Module) -> None:
    p = parameters(r, model)[0]
    with torch.no_grad():
        p.view(-1)[r.randrange(p.numel())] *= -1


@mutation
def new_data(r: random.Random, model: nn.Module) -> None:
    p = parameters(r, model)[0]
    p.data = -0.7 * p.data.clone()


@mutation
def new_parameter(r: random.Random, model: nn.Module) -> None:
    owners = [(m, n) for m in model.modules() for n, p in m._parameters.items() if p is not None]
    if not owners:
        raise tricks.Unfit
    owner, name = r.choice(owners)
    setattr(owner, name, nn.Parameter(-0.8 * cast(Tensor, owner._parameters[name]).detach()))


@mutation
def loaded(r: random.Random, model: nn.Module) -> None:
    state = {k: -v if v.is_floating_point() and "size" not in k else v for k, v in model.state_dict().items()}
    model.load_state_dict(state)


@mutation
def stepped(r: random.Random, model: nn.Module) -> None:
    """A step of an optimiser; fused ones leave version counters as they are."""
    found = [p for p in parameters(r, model) if p.requires_grad]
    makers: list[Callable[[], torch.optim.Optimizer]] = [
        lambda: torch.optim.SGD(found, lr=0.3),
        lambda: torch.optim.AdamW(found, lr=0.05, fused=True),
        lambda: torch.optim.Adam(found, lr=0.05, foreach=True),
    ]
    for p in found:
        p.grad = torch.randn(p.shape, generator=networks.generator(r), dtype=torch.float64).to(p.dtype)
    r.choice(makers)().step()
    for p in found:
        p.grad = None


@mutation
def averaged(r: random.Random, model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(parameters(r, model)), -0.5)


# ------------------------------------------------------------------------------------------------- modules


@mutation
def replaced(r: random.Random, model: nn.Module) -> None:
    """Another activation in the place of one."""
    tricks.replace(model, tricks.act(r, model), r.choice([nn.Tanh, nn.Softsign, nn.Sigmoid, nn.ReLU, nn.SiLU])())


@mutation
def removed(r: random.Random, model: nn.Module) -> None:
    tricks.replace(model, tricks.act(r, model), nn.Identity())


@mutation
def another_branch(r: random.Random, model: nn.Module) -> None:
    """Another network in the block, of the same shape."""
    block = next((m for m in model.modules() if isinstance(m, ResidualBlock)), None)
    if block is None or isinstance(block.g, Conditioned):
        raise tricks.Unfit
    twin = copy.deepcopy(block.g)
    with torch.no_grad():
        for p in twin.parameters():
            p.neg_()
    block.g = twin


@mutation
def slope(r: random.Random, model: nn.Module) -> None:
    """An attribute or parameter of an activation."""
    layer = tricks.act(r, model)
    match layer:
        case nn.ELU() | nn.CELU():
            layer.alpha = r.choice([0.1, 0.9])
        case nn.LeakyReLU():
            layer.negative_slope = -layer.negative_slope
        case nn.Softplus():
            layer.beta = r.choice([0.3, 7.0])
        case LipSwish():
            with torch.no_grad():
                layer.raw_beta.fill_(r.choice([-3.0, 3.0]))
        case nn.Hardtanh():
            layer.min_val, layer.max_val = -0.01, 0.01
        case iresnet.Sine():
            layer.frequency = r.choice([0.2, 5.0])
        case _:
            raise tricks.Unfit


@mutation
def angle(r: random.Random, model: nn.Module) -> None:
    layer = next((m for m in model.modules() if isinstance(m, Concatenated)), None)
    if layer is None:
        raise tricks.Unfit
    layer.angle.data.fill_(r.uniform(-4, 4))


@mutation
def of_parametrization(r: random.Random, model: nn.Module) -> None:
    """An attribute of a parametrization, that of the constraint too."""
    found = [m for m in model.modules() if isinstance(m, tricks.Times | SpectralCap)]
    if not found:
        raise tricks.Unfit
    chosen = r.choice(found)
    if isinstance(chosen, SpectralCap):
        chosen.coefficient = r.choice([0.1, 0.5])
    else:
        chosen.k = -chosen.k / 2


@mutation
def played(r: random.Random, model: nn.Module) -> None:
    """Any trick that can be played on a network that exists: hooks, forward, parametrizations, attributes."""
    block = next((m for m in model.modules() if isinstance(m, ResidualBlock)), None)
    if block is None or not isinstance(block.g, nn.Sequential):
        raise tricks.Unfit
    tricks.AFTERWARDS[r.choice(sorted(tricks.AFTERWARDS))](r, block.g)


@mutation
def mode(r: random.Random, model: nn.Module) -> None:
    model.train()
    if r.random() < 0.5:
        model.eval()


@mutation
def buffers(r: random.Random, model: nn.Module) -> None:
    """Buffers of closed forms and of a context's network."""
    found = [b for name, b in model.named_buffers() if b.is_floating_point() and "parametrizations" not in name]
    if not found:
        raise tricks.Unfit
    b = r.choice(found)
    with torch.no_grad():
        b.copy_(torch.where(b.isfinite(), 0.5 * b, b) if r.random() < 0.5 else torch.where(b > 0, 2 * b, b))


@mutation
def nothing(r: random.Random, model: nn.Module) -> None:
    """No change: the same proof again."""


# ------------------------------------------------------------------------------------------------- what is solved


class Masked(nn.Module):
    """A context's network with a mask of minus infinities, as attention has, and an attribute."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(size, width)
        self.gain = 1.0
        self.register_buffer("mask", torch.full((3,), -torch.inf))

    def forward(self, c: Tensor) -> Tensor:
        weights = torch.softmax(torch.cat([c.new_zeros(1), self.mask.to(c.dtype)]), 0)
        return cast(Tensor, self.gain * weights[0] * self.inner(c))


def embedding(r: random.Random, size: int, width: int) -> nn.Module:
    """A context's network of the user's own."""
    makers: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(size, width),
        lambda: Masked(size, width),
        lambda: nn.Sequential(nn.Linear(size, width), nn.BatchNorm1d(width)),
        lambda: nn.Sequential(nn.Linear(size, 4), nn.ReLU(inplace=True), nn.Linear(4, width)),
    ]
    return r.choice(makers)()


@mutation
def gain(r: random.Random, model: nn.Module) -> None:
    """An attribute of a context's network."""
    found = [m for m in model.modules() if isinstance(m, Masked)]
    if not found:
        raise tricks.Unfit
    found[0].gain = r.choice([-1.0, 2.0])


@dataclass
class Subject:
    """A transform to solve, and what it takes."""

    model: iresnet.Transform
    shape: Shape
    dtype: torch.dtype
    context: Tensor | None = None


def subject(r: random.Random) -> Subject:
    """A block, a conditional one, a constrained one, or a chain with closed forms."""
    dtype = r.choice([torch.float32, torch.float64])
    choice = r.random()
    if choice < 0.3:
        g, shape, _ = networks.conditioned(r, dtype)
        width = cast(Any, g.first)[0].weight.shape[0]
        g.embed = embedding(r, 2, width).to(dtype)
        return Subject(ResidualBlock(g).eval(), shape, dtype, torch.randn(3, 2, dtype=dtype))
    shape = networks.rows(r) if r.random() < 0.8 else networks.images(r)
    g = network(r, shape, dtype)
    if choice < 0.35:
        constrain_(g, coefficient=0.9)
    elif choice < 0.4:
        parametrize.register_parametrization(tricks.linear(r, g), "weight", tricks.Times(0.9))
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
    """A network with biases of usual size that a block takes."""
    while True:
        g, _, _ = networks.branch(r, shape, lipschitz=r.uniform(0.3, 0.9), dtype=torch.float64)
        with torch.no_grad():
            for name, p in g.named_parameters():
                if name.endswith("bias"):
                    p.clamp_(-1, 1)
        try:
            ResidualBlock(g)
        except ValueError:
            continue
        return g.to(dtype)


# ------------------------------------------------------------------------------------------------- the attack


@kind("mutations", cases=9_000)
def mutations(r: random.Random) -> str:
    """Two solves with a change between them: weights, buffers, attributes, hooks, modules, modes."""
    try:
        s = subject(r)
    except tricks.Unfit:
        return "unfit"
    x = networks.points(r, 3, s.shape, s.dtype, largest=0.5)
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
        except tricks.Unfit:
            continue
        return name
    return "nothing"


def _code(s: Subject, x: Tensor) -> Tensor:
    """What the live model makes of x."""
    with torch.no_grad():
        return cast(Tensor, s.model(x.clone(), s.context))


def _solved(s: Subject, z: Tensor, name: str) -> bool:
    """Solve, and compare what is proven with the residual of the live model; whether all was proven."""
    try:
        found: Any = s.model.solve(z, s.context)
    except Exception as error:
        raise Violation(f"{name}: solve raises {type(error).__name__}: {error}") from error
    good = found.converged & found.error_bound.isfinite()
    if not (found.proven and bool(good.any())):
        return False
    residual = norms(_code(s, found.x).double() - z.double())
    stretch = max(2.0, s.model.stretch(s.shape).forward)
    most = stretch * found.error_bound + 1e4 * torch.finfo(s.dtype).eps * (1 + norms(z) + norms(found.x)) * stretch
    if bool((residual > most)[good].any()):
        raise Violation(
            f"{name}: proven to {float(found.error_bound[good].max()):.3g}, residual {float(residual[good].max()):.3g}: "
            + " ".join(str(s.model).split())[:250]
        )
    return bool(good.all())


def _check_cached(s: Subject, x: Tensor, name: str) -> None:
    """Within torch's `parametrize.cached()` a layer keeps the weight it had: that is then the function."""
    with parametrize.cached():
        _code(s, x)
        with torch.no_grad():
            for p in s.model.parameters():
                p.neg_()
        try:
            z = _code(s, x)
        except REFUSALS:
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
        raise Violation(f"{name}: bound {bound.value:.5g} kept, found {ratio:.5g}: {' '.join(str(block).split())[:200]}")


def _with_grad(s: Subject, t: Tensor) -> Tensor:
    return cast(Tensor, s.model(t, s.context))


def _check_samples(s: Subject, z: Tensor, name: str) -> None:
    """Samples of a flow that was sampled before are those of its present function."""
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

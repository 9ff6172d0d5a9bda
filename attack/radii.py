"""Attacks on certified radii: no change of x within the radius may change its class, whatever the head is."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from iresnet import ActNorm, Chain, Classifier, Logit, NoBoundKnown, ResidualBlock, Standardise, Transform
from iresnet.data import Dataset, Schema
from iresnet.evaluate import certified_radius

from . import Violation, kind, networks, tricks
from .mutations import network

Head: TypeAlias = Callable[[random.Random, int, int], nn.Module]


class SineLinear(nn.Linear):
    """A subclass of Linear that is not linear."""

    def forward(self, input: Tensor) -> Tensor:
        return 30 * torch.sin(5 * super().forward(input))


class Scaled(nn.Linear):
    """A subclass of Linear with a temperature."""

    temperature = 25.0

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input * self.temperature)


class SineFlatten(nn.Flatten):
    """A subclass of Flatten that is not linear."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.sin(9 * super().forward(input))


def _plain(r: random.Random, d: int, classes: int) -> nn.Module:
    return r.choice(
        [lambda: nn.Linear(d, classes), lambda: nn.Sequential(nn.Flatten(), nn.Linear(d, 5), nn.Linear(5, classes))]
    )()


def _subclass(r: random.Random, d: int, classes: int) -> nn.Module:
    head = r.choice([SineLinear, Scaled])(d, classes)
    return r.choice([lambda: head, lambda: nn.Sequential(nn.Identity(), head)])()


def _reshaped(r: random.Random, d: int, classes: int) -> nn.Module:
    return nn.Sequential(SineFlatten(), nn.Linear(d, classes))


def _hooked(r: random.Random, d: int, classes: int) -> nn.Module:
    head = nn.Linear(d, classes)
    if r.random() < 0.5:
        head.register_forward_hook(lambda module, inputs, output: torch.sin(20 * output))
    else:
        head.register_forward_pre_hook(lambda module, inputs: (torch.sin(20 * inputs[0]),))
    return head


def _forward_set(r: random.Random, d: int, classes: int) -> nn.Module:
    head = nn.Linear(d, classes)
    parent = head.forward
    cast(Any, head).forward = lambda x: torch.sin(20 * parent(x))
    return head


def _parametrized(r: random.Random, d: int, classes: int) -> nn.Module:
    head = nn.Linear(d, classes)
    parametrize.register_parametrization(head, "weight", tricks.Scale(tricks.factor(r)))
    return head


def _normalised(r: random.Random, d: int, classes: int) -> nn.Module:
    return nn.Sequential(
        r.choice([nn.LayerNorm(d), nn.Dropout(0.5), nn.ELU(), nn.BatchNorm1d(d)]), nn.Linear(d, classes)
    )


def _compiled(r: random.Random, d: int, classes: int) -> nn.Module:
    head = nn.Linear(d, classes)
    inner = head.forward
    cast(Any, head)._compiled_call_impl = lambda x: torch.sin(20 * inner(x))
    return head


HEADS: tuple[Head, ...] = (_plain, _subclass, _reshaped, _hooked, _forward_set, _parametrized, _normalised, _compiled)


@kind("radii", cases=1_500)
def radii(r: random.Random) -> str:
    """Certified radii of classifiers with many kinds of heads against projected gradient descent in float64."""
    d, classes = r.choice([2, 3, 4, 6]), r.randint(2, 4)
    play = r.choice(HEADS) if r.random() < 0.6 else _plain
    transform, rows = _transform(r, d)
    model = Classifier(transform, play(r, d, classes)).eval()
    model.float()
    with torch.no_grad():
        try:
            y = model(rows).argmax(dim=1)
        except Exception:
            return "invalid"
    data = Dataset(rows, y, Schema((d,), classes=tuple(f"c{i}" for i in range(classes))))
    try:
        found = certified_radius(model, data)
    except NoBoundKnown:
        return "refused"
    model.double()
    good = (found > 1e-6).nonzero().flatten()
    if not len(good):
        return "no radius"
    inside = any(isinstance(m, Logit) for m in model.modules())
    fooled = fooled_samples(model, rows[good].double(), y[good], found[good] * (1 - 1e-6), r, inside=inside)
    if bool(fooled.any()):
        raise Violation(
            f"{play.__name__.strip('_')}: {int(fooled.sum())} of {len(good)} certified rows fooled: {model}"
        )
    return "certified"


def _transform(r: random.Random, d: int) -> tuple[Transform, Tensor]:
    """A transform and samples for it; with a Logit, also samples at the ends of its interval."""
    block = ResidualBlock(network(r, (d,), torch.float32))
    x = torch.randn(16, d, generator=networks.generator(r))
    match r.randrange(4):
        case 0:
            norm = ActNorm(d)
            with torch.no_grad():
                norm.log_scale.copy_(torch.randn(d, generator=networks.generator(r)))
            return Chain(norm, block), x
        case 1:
            return Chain(Standardise(torch.zeros(d), torch.rand(d, generator=networks.generator(r)) + 0.1), block), x
        case 2:
            return Chain(Logit(1, 0.05), block), torch.rand(16, d, generator=networks.generator(r)).round(decimals=1)
        case _:
            return block, x


def fooled_samples(
    model: Classifier, x: Tensor, y: Tensor, radius: Tensor, r: random.Random, *, inside: bool = False
) -> Tensor:
    """Which samples change their class within the radius: gradient descent on the margin from several starts.

    `inside` keeps them in [0, 1], the domain of a Logit.
    """
    fooled = torch.zeros(len(x), dtype=torch.bool)
    for _ in range(3):
        step = torch.randn(x.shape, generator=networks.generator(r), dtype=x.dtype)
        at = _project(x, x + 0.1 * step, radius, inside)
        for _ in range(12):
            at = at.detach().requires_grad_()
            logits = cast(Tensor, model(at))
            own = logits.gather(1, y[:, None])[:, 0]
            margin = own - logits.scatter(1, y[:, None], -torch.inf).amax(dim=1)
            fooled |= margin.detach() < -1e-9
            (gradient,) = torch.autograd.grad(margin.sum(), at)
            length = gradient.norm(dim=1, keepdim=True).clamp_min(1e-30)
            at = _project(x, at.detach() - gradient / length * (0.4 * radius[:, None]), radius, inside)
    return fooled


def _project(x: Tensor, at: Tensor, radius: Tensor, inside: bool) -> Tensor:
    change = at - x
    at = x + change * (radius[:, None] / change.norm(dim=1, keepdim=True).clamp_min(1e-30)).clamp_max(1)
    return at.clamp(0, 1) if inside else at

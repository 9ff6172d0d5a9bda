"""The properties of Table 1, each found by running a transform with random weights, in float64.

free-form        the Jacobian of a layer: no entry of it is zero for all weights and inputs. Of a chain, the layers are
                 those whose Jacobian depends on x; a linear map between them is not what learns
closed form      how often the network inside a layer is evaluated: the same number whatever the input and the
                 tolerance, or a number that an iteration or a solver decides
volume           ln |det| of the whole, from its Jacobian: zero everywhere, or not
exact            ln |det| as the model computes it, against that of its Jacobian
unbiased         the mean of many estimates at one x, against the exact value, in standard errors
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from ..residual import ResidualBlock
from ..transform import Transform

#: What is as good as zero in float64 for maps of some layers.
ROUNDING = 1e-9
#: A mean so many standard errors away from the exact value is taken for biased.
ERRORS = 4.0
#: Inputs that the number of evaluations is counted at, and the tolerances of an inverse.
SCALES, TOLERANCES = (0.1, 1.0, 3.0), (1e-2, 1e-9)

Map: TypeAlias = Callable[[Tensor], Tensor]


def jacobian(f: Map, x: Tensor) -> Tensor:
    """The Jacobians of a map at every row of x, (batch, d, d), by one backward pass for each coordinate."""
    x = x.detach().requires_grad_()
    z = f(x).flatten(1)
    rows = [torch.autograd.grad(z[:, i].sum(), x, retain_graph=True)[0].flatten(1) for i in range(z.shape[1])]
    return torch.stack(rows, dim=1).detach()


def log_volume(f: Map, x: Tensor) -> Tensor:
    """ln |det dF/dx| of every row, from the Jacobian."""
    return cast(Tensor, torch.linalg.slogdet(jacobian(f, x))[1])


# ---------------------------------------------------------------------------------------------- free-form


@dataclass(frozen=True)
class Pattern:
    """Of a layer's Jacobian: how many entries there are, and how many are zero at every input and all weights tried."""

    entries: int
    always_zero: int

    @property
    def free(self) -> bool:
        return self.always_zero == 0


def pattern(instances: Sequence[Transform], x: Tensor) -> Pattern:
    """The worst layer of a system, over instances of it that differ in their weights alone."""
    found = [_patterns(instance, x) for instance in instances]
    merged = [torch.stack(layers).amax(0) for layers in zip(*found, strict=True)]
    counts = [int((m == 0).sum()) for m in merged]
    return Pattern(int(merged[0].numel()), max(counts))


def _patterns(instance: Transform, x: Tensor) -> list[Tensor]:
    """For every layer whose Jacobian depends on x, the largest size of each entry."""
    sizes = []
    for layer in layers(instance):
        j = jacobian(layer, x)
        if float((j - j[:1]).abs().max()) > ROUNDING:
            sizes.append(j.abs().amax(0))
        x = layer(x).detach()
    return sizes


def layers(transform: Transform) -> list[Transform]:
    """A chain's parts, or the transform itself."""
    parts = [part for _, part, _ in transform.parts()]
    return [leaf for part in parts for leaf in layers(part)] if parts else [transform]


# ---------------------------------------------------------------------------------------------- closed form


@dataclass(frozen=True)
class Evaluations:
    """How often the network of a layer is evaluated, at least and at most over the inputs tried; and the error."""

    fewest: int
    most: int
    error: float | None = None

    @property
    def closed(self) -> bool:
        return self.fewest == self.most and (self.error is None or self.error < ROUNDING)


def forward_evaluations(transform: Transform, x: Tensor) -> Evaluations:
    """Evaluations a layer in the map itself."""
    return _evaluations([_count(layer, partial(layer, s * x)) for layer in layers(transform) for s in SCALES])


def inverse_evaluations(transform: Transform, x: Tensor) -> Evaluations:
    """Evaluations a layer in the inverse, and the largest error of the whole."""
    counts = []
    for layer in layers(transform):
        for z in (layer(s * x).detach() for s in SCALES):
            counts += [_inverse_count(layer, z, t) for t in TOLERANCES]
    with torch.no_grad():
        error = float((transform.inverse(transform(x), tolerance=TOLERANCES[-1]) - x).abs().max())
    found = _evaluations(counts)
    return Evaluations(found.fewest, found.most, error)


def _inverse_count(layer: Transform, z: Tensor, tolerance: float) -> int:
    if isinstance(layer, ResidualBlock):  # which solves with a copy of its network, and counts itself
        return int(layer.solve(z, tolerance=tolerance).iterations.max())
    return _count(layer, partial(layer.inverse, z, tolerance=tolerance))


def _evaluations(counts: Sequence[int]) -> Evaluations:
    positive = [c for c in counts if c]  # a layer without a network has none
    return Evaluations(min(positive), max(positive))


def _count(layer: Transform, run: Callable[[], object]) -> int:
    """How often the first layer of the network inside is evaluated."""
    inner = next((m for m in layer.modules() if _is_layer(m)), None)
    if inner is None:
        return 0
    with torch.no_grad(), _counting(inner) as count:
        run()
        return len(count)


def _is_layer(module: nn.Module) -> bool:
    """Whether this is a linear layer or a convolution of a network, and no transform itself."""
    return not isinstance(module, Transform) and getattr(getattr(module, "weight", None), "dim", lambda: 0)() > 1


@contextmanager
def _counting(module: nn.Module) -> Iterator[list[None]]:
    """Every call of a module, by a hook of all modules, which changes nothing."""
    calls: list[None] = []

    def note(called: nn.Module, *_: object) -> None:
        if called is module:
            calls.append(None)

    handle = register_module_forward_hook(note)
    try:
        yield calls
    finally:
        handle.remove()


# ---------------------------------------------------------------------------------------------- likelihood


@torch.no_grad()
def logdet_error(transform: Transform, x: Tensor) -> float:
    """The largest difference between ln |det| as the model gives it in eval and that of its Jacobian."""
    given = transform.forward_and_logdet(x)[1]
    with torch.enable_grad():
        exact = log_volume(transform, x)
    return float((given - exact).abs().max())


@dataclass(frozen=True)
class Bias:
    """The mean of so many estimates less the exact value, and its standard error."""

    mean: float
    standard_error: float
    draws: int

    @property
    def distance(self) -> float:
        """In standard errors."""
        return abs(self.mean) / self.standard_error if self.standard_error else math.inf

    @property
    def unbiased(self) -> bool:
        return self.distance < ERRORS


def bias(estimate: Map, exact: float, x: Tensor, draws: int) -> Bias:
    """Estimates at one x, (1, d), repeated: `estimate` gives one for each row, from noise of its own."""
    values = estimate(x.expand(draws, *x.shape[1:])).detach().double()
    return Bias(float(values.mean()) - exact, float(values.std()) / math.sqrt(draws), draws)

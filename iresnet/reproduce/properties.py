"""The properties of Table 1, each tested by running a transform with random weights, in float64.

free-form        no entry of a layer's Jacobian is zero for all weights and inputs. The layers of a chain are those
                 whose Jacobian depends on x; linear maps between them are not tested
closed form      how often the network inside a layer is evaluated: the same number for all inputs and tolerances, or a
                 number that depends on an iteration or a solver
volume           ln |det| of the Jacobian of the whole chain: zero everywhere, or not
exact            ln |det| as the model computes it, compared with that of its Jacobian
unbiased         the mean of many estimates at one x, compared with the exact value, in standard errors
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

#: A rounding error in float64 for maps of a few layers; smaller values count as zero.
ROUNDING = 1e-9
#: A mean that many standard errors from the exact value counts as biased.
ERRORS = 4.0
#: Scales of the inputs for which evaluations are counted, and tolerances of the inverse.
SCALES, TOLERANCES = (0.1, 1.0, 3.0), (1e-2, 1e-9)

Map: TypeAlias = Callable[[Tensor], Tensor]


def jacobian(f: Map, x: Tensor) -> Tensor:
    """Return the Jacobians of a map at every sample, (batch, d, d), by one backward pass per coordinate."""
    x = x.detach().requires_grad_()
    z = f(x).flatten(1)
    rows = [torch.autograd.grad(z[:, i].sum(), x, retain_graph=True)[0].flatten(1) for i in range(z.shape[1])]
    return torch.stack(rows, dim=1).detach()


def log_volume(f: Map, x: Tensor) -> Tensor:
    """Return ln |det dF/dx| of every sample, from the Jacobian."""
    return cast(Tensor, torch.linalg.slogdet(jacobian(f, x))[1])


# ---------------------------------------------------------------------------------------------- free-form


@dataclass(frozen=True)
class Pattern:
    """The entries of a layer's Jacobian, and how many of them are zero at all inputs and weights."""

    entries: int
    always_zero: int

    @property
    def free(self) -> bool:
        return self.always_zero == 0


def zero_pattern(instances: Sequence[Transform], x: Tensor) -> Pattern:
    """Return the pattern with most zeros among the layers, over instances with different weights."""
    found = [_entry_sizes(instance, x) for instance in instances]
    merged = [torch.stack(layers).amax(0) for layers in zip(*found, strict=True)]
    counts = [int((m == 0).sum()) for m in merged]
    return Pattern(int(merged[0].numel()), max(counts))


def _entry_sizes(instance: Transform, x: Tensor) -> list[Tensor]:
    """Return the largest absolute value of each entry, for every layer whose Jacobian depends on x."""
    sizes = []
    for layer in layers(instance):
        j = jacobian(layer, x)
        if float((j - j[:1]).abs().max()) > ROUNDING:
            sizes.append(j.abs().amax(0))
        x = layer(x).detach()
    return sizes


def layers(transform: Transform) -> list[Transform]:
    """Return the layers of a chain, or the transform itself."""
    parts = [part for _, part, _ in transform.parts()]
    return [leaf for part in parts for leaf in layers(part)] if parts else [transform]


# ---------------------------------------------------------------------------------------------- closed form


@dataclass(frozen=True)
class Evaluations:
    """The fewest and most evaluations of a layer's network over all inputs, and the error of the result."""

    fewest: int
    most: int
    error: float | None = None

    @property
    def closed(self) -> bool:
        return self.fewest == self.most and (self.error is None or self.error < ROUNDING)


def forward_evaluations(transform: Transform, x: Tensor) -> Evaluations:
    """Count evaluations per layer in the forward pass."""
    return _evaluations([_count(layer, partial(layer, s * x)) for layer in layers(transform) for s in SCALES])


def inverse_evaluations(transform: Transform, x: Tensor) -> Evaluations:
    """Count evaluations per layer in the inverse, and measure its largest error."""
    counts = []
    for layer in layers(transform):
        for z in (layer(s * x).detach() for s in SCALES):
            counts += [_inverse_count(layer, z, t) for t in TOLERANCES]
    with torch.no_grad():
        error = float((transform.inverse(transform(x), tolerance=TOLERANCES[-1]) - x).abs().max())
    found = _evaluations(counts)
    return Evaluations(found.fewest, found.most, error)


def _inverse_count(layer: Transform, z: Tensor, tolerance: float) -> int:
    if isinstance(layer, ResidualBlock):  # it solves with a copy of its network and counts itself
        return int(layer.solve(z, tolerance=tolerance).iterations.max())
    return _count(layer, partial(layer.inverse, z, tolerance=tolerance))


def _evaluations(counts: Sequence[int]) -> Evaluations:
    positive = [c for c in counts if c]  # a layer without a network has none
    return Evaluations(min(positive), max(positive))


def _count(layer: Transform, run: Callable[[], object]) -> int:
    """Count how often the first layer of the network inside is evaluated."""
    inner = next((m for m in layer.modules() if _is_layer(m)), None)
    if inner is None:
        return 0
    with torch.no_grad(), _counting(inner) as count:
        run()
        return len(count)


def _is_layer(module: nn.Module) -> bool:
    """Whether this is a linear layer or a convolution, and not itself a transform."""
    return not isinstance(module, Transform) and getattr(getattr(module, "weight", None), "dim", lambda: 0)() > 1


@contextmanager
def _counting(module: nn.Module) -> Iterator[list[None]]:
    """Record every call of a module by a global hook."""
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
    """Return the largest difference between the model's ln |det| in eval mode and that of its Jacobian."""
    given = transform.forward_and_logdet(x)[1]
    with torch.enable_grad():
        exact = log_volume(transform, x)
    return float((given - exact).abs().max())


@dataclass(frozen=True)
class Bias:
    """The mean of estimates minus the exact value, its standard error, and the number of estimates."""

    mean: float
    standard_error: float
    draws: int

    @property
    def distance(self) -> float:
        """The absolute bias in standard errors."""
        return abs(self.mean) / self.standard_error if self.standard_error else math.inf

    @property
    def unbiased(self) -> bool:
        return self.distance < ERRORS


def measure_bias(estimate: Map, exact: float, x: Tensor, draws: int) -> Bias:
    """Measure the bias of an estimate at one x, (1, d); `estimate` returns one value per sample of a repeated x."""
    values = estimate(x.expand(draws, *x.shape[1:])).detach().double()
    return Bias(float(values.mean()) - exact, float(values.std()) / math.sqrt(draws), draws)

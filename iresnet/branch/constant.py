"""What is proven about a network g: its Lipschitz constant, from those of the steps of its program.

Constants multiply along the steps; where results are put side by side their squares add, weighed as they are; a
context shifts, and changes no constant. What cannot be read into a program (a forward of the user's own, which may
reuse a layer, add a skip or call an unknown function; a hook; a parametrization of another library: see `trust`) is not
composed: its constant must be asserted, and is shown as asserted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from .. import spectral
from ..lipschitz.activations import lipschitz_constant
from ..lipschitz.constraint import cap_of
from ..lipschitz.dense import Concatenated
from ..lipschitz.order import describe_layer, leaves, may_return_input, primitives
from ..lipschitz.potential import Potential
from ..spectral import Geometry
from ..trust import NoBoundKnown, check_global_state
from .program import LINEAR, ParsedBranch, Step, no_bound_error, parse

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class LayerBound:
    """One layer of g: the coefficient asked for, the norm from below, the proven bound from above."""

    name: str
    kind: str
    bound: float
    coefficient: float | None = None
    estimate: float | None = None
    input_shape: Shape | None = None


@dataclass(frozen=True)
class Bound:
    """The statement Lip(g) <= `value`.

    `parts` lists the layers in order; an asserted bound has none and is not proven. `constants` holds the Lipschitz
    constant of every step of the program. `negative_semidefinite`: the Jacobian of g is symmetric with eigenvalues in
    [-value, 0]. `reason` says why nothing is known of g, where the value is infinite.
    """

    value: float
    proven: bool
    parts: tuple[LayerBound, ...] = ()
    negative_semidefinite: bool = False
    reason: str = ""
    constants: tuple[float, ...] = ()

    @property
    def block_lipschitz(self) -> float:
        """Lip(x + g(x)) at most: 1 + Lip(g) (Lemma 2), or that of eigenvalues in [1 - value, 1]."""
        return max(1.0, self.value - 1) if self.negative_semidefinite else 1 + self.value


def lipschitz_bound(g: nn.Module, input_shape: Shape | None = None, *, estimate: bool = False) -> Bound:
    """The proven Lipschitz bound of g for inputs of `input_shape` (no batch), from its parts.

    Sizes: the given shape, else all up to the largest that each layer has met, else all; under circular padding, where
    a smaller input may have a larger norm, the given shape or all. With `estimate` the norms from below are computed
    as well. Raises `NoBoundKnown` where a part has no bound.
    """
    check_global_state()
    return bound_of_parsed(parse(g), input_shape, estimate=estimate)


def bound_of_parsed(found: ParsedBranch, input_shape: Shape | None = None, *, estimate: bool = False) -> Bound:
    """The bound of a g that has been read."""
    shapes = [None if input_shape is None else tuple(input_shape)]
    parts, constants, values = list[LayerBound](), list[float](), [1.0]
    for step, into, (name, layer) in zip(found.program.steps, found.program.inputs, found.layers, strict=True):
        _check_finite(name, layer)
        shape = shapes[into[0]]
        if step.kind == "join":
            constants.append(1.0)
            values.append(cast(Concatenated, layer).constant(*(values[n] for n in into)))
            shapes.append(_concatenated_shape(*(shapes[n] for n in into)))
            continue
        if step.kind == "descent":
            constants.append(constants[into[0] - 2])  # that of the same layer, before the activation
            shapes.append(shapes[found.program.inputs[into[0] - 2][0]])
        elif step.kind == "shift":
            constants.append(1.0)
            shapes.append(shape)
        else:
            part, after = _layer_bound(step, name, layer, shape, estimate)
            parts.append(part)
            constants.append(part.bound)
            shapes.append(after)
        values.append(_product(values[into[0]], constants[-1]))
    return Bound(values[-1], True, tuple(parts), _is_potential(found.g), constants=tuple(constants))


def _product(a: float, b: float) -> float:
    """a b; a product of nonzero constants that underflows is rounded up, as a later one may be large."""
    return 0.0 if a == 0 or b == 0 else max(a * b, 2.0**-1000)


def _concatenated_shape(kept: Shape | None, made: Shape | None) -> Shape | None:
    return None if kept is None or made is None else (kept[0] + made[0], *kept[1:])


def _is_potential(g: nn.Module) -> bool:
    """Whether g is one `Potential`, between reshapings at most: what comes back to x's shape undoes what left it."""
    rest = [leaf for _, leaf in leaves(g) if not may_return_input(leaf)]
    return len(rest) == 1 and type(rest[0]) is Potential


def _check_finite(name: str, layer: nn.Module) -> None:
    """Refuse numbers for which g(x) is none; weights are looked at where their norm is taken."""
    for kind, p in layer.named_parameters(recurse=False):
        if not bool(torch.isfinite(p).all()):
            raise ValueError(
                f"{kind} of {describe_layer(name, layer)} holds NaN or infinity; no bound exists. "
                "Restore it from a checkpoint."
            )


def _layer_bound(
    step: Step, name: str, layer: nn.Module, shape: Shape | None, estimate: bool
) -> tuple[LayerBound, Shape | None]:
    """What is known of one layer or activation, and the shape that it returns."""
    if step.activation is not None:
        after = shape
        if may_return_input(layer) and shape is not None:
            after = tuple(layer(torch.empty(1, *shape)).shape[1:])
        return LayerBound(name, type(layer).__name__, _largest_slope(step, name, layer), input_shape=shape), after
    geometry, weight, cap = step.geometry or Geometry(), cast(Tensor, layer.weight), cap_of(layer)
    size = spectral.spatial_size(geometry, weight, shape)
    if shape is None and cap is not None and cap.seen and not geometry.circular:
        size = cap.seen  # zero padding: no smaller input has a larger norm
    at = None if size is None else (weight.shape[1] * geometry.groups, *size)
    part = LayerBound(
        name,
        type(layer).__name__.removeprefix("Parametrized"),
        float(spectral.norm_bounds(weight[None], geometry, size)),
        None if cap is None else cap.coefficient,
        spectral.norm_estimate(layer, at) if estimate else None,
        at,
    )
    if shape is None:
        return part, None
    if geometry.axes == 0:
        return part, (*shape[:-1], weight.shape[0])
    return part, (weight.shape[0], *geometry.output_size(shape[1:], tuple(weight.shape[2:])))


def _largest_slope(step: Step, name: str, layer: nn.Module) -> float:
    """The largest slope of an activation."""
    record = step.activation
    constant = None if record is None else record.lipschitz(*step.settings)
    if constant is None:
        raise no_bound_error(name, layer)
    return constant


def nominal_constant(g: nn.Module) -> float:
    """The constant asked for: coefficients where layers are constrained, proven norms where they are not. Cheap."""
    found = parse(g)
    values, constants = [1.0], list[float]()
    for step, into, (name, layer) in zip(found.program.steps, found.program.inputs, found.layers, strict=True):
        if step.kind in LINEAR:
            constants.append(_requested_norm(step, layer))
        elif step.kind == "descent":
            constants.append(constants[into[0] - 2])
        else:
            constants.append(1.0 if step.activation is None else _largest_slope(step, name, layer))
        # Side by side no more than the larger, whatever the angle is, which is not read from a device.
        values.append(max(values[n] for n in into) * constants[-1])
    return values[-1]


def _requested_norm(step: Step, layer: nn.Module) -> float:
    cap = cap_of(layer)
    if cap is not None:
        return cap.coefficient
    return float(spectral.norm_bounds(cast(Tensor, layer.weight)[None], step.geometry or Geometry(), None))


def requested_bound(g: nn.Module) -> Bound:
    """What the coefficients of g promise, before anything is proven; `NoBoundKnown` where a layer has none."""
    if any(cap_of(layer) is None and lipschitz_constant(layer) is None for _, layer in primitives(g)):
        raise NoBoundKnown("A layer of a block is not constrained, so that nothing keeps its norm. Constrain it.")
    return Bound(nominal_constant(g), False, (), _is_potential(g))


def tighten_layers_(g: nn.Module, input_shape: Shape | None = None) -> list[str]:
    """Rescale the layers of g whose proven bound exceeds their coefficient; the names of those that changed.

    The stored weight becomes the constrained one times coefficient / bound, so that power iteration finds nothing to
    do.
    """
    changed: list[str] = []
    done: set[nn.Module] = set()  # a layer may be used twice
    for part in lipschitz_bound(g, input_shape).parts:
        layer = g.get_submodule(part.name)
        cap = cap_of(layer)
        if cap is None or part.bound <= cap.coefficient or layer in done:
            continue
        done.add(layer)
        with torch.no_grad():
            # A hair below, for the rounding of the product to the weight's own precision.
            margin = 1 - 4 * torch.finfo(cast(Tensor, layer.weight).dtype).eps
            weight = cast(Tensor, layer.weight) * (cap.coefficient / part.bound * margin)
            cast(Any, layer).parametrizations.weight.original.copy_(weight)
            cap.right_inverse(weight)
        changed.append(part.name)
    return changed

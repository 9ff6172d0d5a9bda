"""A proven upper bound on the Lipschitz constant of g, from the bounds of the steps of its program (Sec. 2.1).

Constants multiply along a sequence of steps. For concatenated results, the squares add, with their weights. A context
only shifts and does not change the constant. A g that cannot be parsed (a custom forward, which may reuse a layer, add
a skip connection or call an unknown function; hooks or parametrizations of other libraries, see `trust`) gets no bound
here: its constant must be asserted by the user, and is reported as asserted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import spectral
from ..batch import Shape
from ..lipschitz.activations import lipschitz_constant
from ..lipschitz.constraint import cap_of
from ..lipschitz.dense import Concatenated
from ..lipschitz.order import describe_layer, leaves, may_return_input, primitives
from ..lipschitz.potential import Potential
from ..proof import product
from ..spectral import Geometry
from ..trust import NoBoundKnown, check_global_state
from .program import LINEAR, ParsedBranch, Step, no_bound_error, parse


@dataclass(frozen=True)
class LayerBound:
    """One layer of g: the requested coefficient, the estimate of the norm from below, the proven bound from above."""

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
        """The bound on Lip(x + g(x)): 1 + Lip(g) (Lemma 2); smaller for eigenvalues in [1 - value, 1]."""
        return max(1.0, self.value - 1) if self.negative_semidefinite else 1 + self.value


def lipschitz_bound(g: nn.Module, input_shape: Shape | None = None, *, estimate: bool = False) -> Bound:
    """Prove a Lipschitz bound of g for inputs of `input_shape` (without batch); raise `NoBoundKnown` if not possible.

    Without `input_shape` the bound covers all sizes up to the largest that each layer has seen, or all sizes if it has
    seen none. Under circular padding, where a smaller input may have a larger norm, it then covers all sizes. With
    `estimate`, the norms are also estimated from below.
    """
    check_global_state()
    return bound_of_parsed(parse(g), input_shape, estimate=estimate)


def bound_of_parsed(parsed: ParsedBranch, input_shape: Shape | None = None, *, estimate: bool = False) -> Bound:
    """Prove a Lipschitz bound of a parsed g."""
    shapes = [None if input_shape is None else tuple(input_shape)]
    parts, constants, values = list[LayerBound](), list[float](), [1.0]
    for step, into, (name, layer) in zip(parsed.program.steps, parsed.program.inputs, parsed.layers, strict=True):
        _check_finite(name, layer)
        shape = shapes[into[0]]
        if step.kind == "join":
            constants.append(1.0)
            values.append(cast(Concatenated, layer).constant(*(values[n] for n in into)))
            shapes.append(_concatenated_shape(*(shapes[n] for n in into)))
            continue
        if step.kind == "descent":
            constants.append(constants[into[0] - 2])  # of the same layer, two steps back
            shapes.append(shapes[parsed.program.inputs[into[0] - 2][0]])
        elif step.kind == "shift":
            constants.append(1.0)
            shapes.append(shape)
        else:
            part, after = _layer_bound(step, name, layer, shape, estimate)
            parts.append(part)
            constants.append(part.bound)
            shapes.append(after)
        values.append(product(values[into[0]], constants[-1]))
    return Bound(values[-1], True, tuple(parts), _is_potential(parsed.g), constants=tuple(constants))


def _concatenated_shape(a: Shape | None, b: Shape | None) -> Shape | None:
    return None if a is None or b is None else (a[0] + b[0], *a[1:])


def _is_potential(g: nn.Module) -> bool:
    """Whether g is a single `Potential`, up to reshapes, which cancel since g keeps the shape of x."""
    rest = [leaf for _, leaf in leaves(g) if not may_return_input(leaf)]
    return len(rest) == 1 and type(rest[0]) is Potential


def _check_finite(name: str, layer: nn.Module) -> None:
    """Raise if a parameter is not finite; constrained weights are checked where their norm is computed."""
    for kind, p in layer.named_parameters(recurse=False):
        if not bool(torch.isfinite(p).all()):
            raise ValueError(
                f"{kind} of {describe_layer(name, layer)} holds NaN or infinity; no bound exists. "
                "Restore it from a checkpoint."
            )


def _layer_bound(
    step: Step, name: str, layer: nn.Module, shape: Shape | None, estimate: bool
) -> tuple[LayerBound, Shape | None]:
    """Bound one layer or activation; return it with the shape of its output."""
    if step.activation is not None:
        after = shape
        if may_return_input(layer) and shape is not None:
            after = tuple(layer(torch.empty(1, *shape)).shape[1:])
        return LayerBound(name, type(layer).__name__, _largest_slope(step, name, layer), input_shape=shape), after
    geometry, weight, cap = step.geometry or Geometry(), cast(Tensor, layer.weight), cap_of(layer)
    size = spectral.spatial_size(geometry, weight, shape)
    if shape is None and cap is not None and cap.seen and not geometry.circular:
        size = cap.seen  # under zero padding no smaller input has a larger norm
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
    """Return the largest slope of an activation."""
    record = step.activation
    constant = None if record is None else record.lipschitz(*step.settings)
    if constant is None:
        raise no_bound_error(name, layer)
    return constant


def requested_constant(g: nn.Module | ParsedBranch) -> float:
    """Return the constant that the coefficients of g allow, with proven norms for unconstrained layers. Cheap."""
    parsed = g if isinstance(g, ParsedBranch) else parse(g)
    values, constants = [1.0], list[float]()
    for step, into, (name, layer) in zip(parsed.program.steps, parsed.program.inputs, parsed.layers, strict=True):
        if step.kind in LINEAR:
            constants.append(_requested_norm(step, layer))
        elif step.kind == "descent":
            constants.append(constants[into[0] - 2])
        else:
            constants.append(1.0 if step.activation is None else _largest_slope(step, name, layer))
        # Concatenated results have at most the larger constant, for any angle, so none is read from the device.
        values.append(max(values[n] for n in into) * constants[-1])
    return values[-1]


def _requested_norm(step: Step, layer: nn.Module) -> float:
    cap = cap_of(layer)
    if cap is not None:
        return cap.coefficient
    return float(spectral.norm_bounds(cast(Tensor, layer.weight)[None], step.geometry or Geometry(), None))


def requested_bound(g: nn.Module) -> Bound:
    """Return the bound that the coefficients of g request, not proven; raise `NoBoundKnown` for a layer without one."""
    if any(cap_of(layer) is None and lipschitz_constant(layer) is None for _, layer in primitives(g)):
        raise NoBoundKnown("A layer of a block is not constrained, so its norm has no limit. Constrain it.")
    return Bound(requested_constant(g), False, (), _is_potential(g))


def tighten_layers_(g: nn.Module, input_shape: Shape | None = None) -> list[str]:
    """Rescale the layers of g whose proven bound exceeds their coefficient; return the names of the changed layers.

    The stored weight becomes the constrained weight times coefficient / bound, so the constraint has no effect on it.
    """
    changed: list[str] = []
    done: set[nn.Module] = set()  # a layer may occur twice
    for part in lipschitz_bound(g, input_shape).parts:
        layer = g.get_submodule(part.name)
        cap = cap_of(layer)
        if cap is None or part.bound <= cap.coefficient or layer in done:
            continue
        done.add(layer)
        with torch.no_grad():
            # Slightly below, for the rounding of the product to the weight's dtype.
            margin = 1 - 4 * torch.finfo(cast(Tensor, layer.weight).dtype).eps
            weight = cast(Tensor, layer.weight) * (cap.coefficient / part.bound * margin)
            cast(Any, layer).parametrizations.weight.original.copy_(weight)
            cap.right_inverse(weight)
        changed.append(part.name)
    return changed

"""What is proven about a network g: its Lipschitz constant, from those of its parts.

Bounds multiply along an `nn.Sequential` of linear layers, convolutions and known activations, and through
`Conditioned`; a `Potential` counts its layer twice, and is known never to stretch; a `Concatenated` layer weighs what
it keeps and what it makes. Anything else (a forward of the user's own, which may reuse a layer, add a skip or call an
unknown function; a hook; a parametrization of another library: see `trust`) is not composed: its constant must be
asserted, and is shown as asserted.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, cast

import torch
from torch import Tensor, nn

from .. import spectral
from ..spectral import Geometry
from ..trust import TORCH, NoBoundKnown, changed, check_process, doubt, unwrap
from .activations import lipschitz_constant, unknown
from .constraint import cap_of, release_
from .dense import Concatenated
from .potential import Potential

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """One layer of g: the coefficient asked for, the norm from below, the proven bound from above."""

    name: str
    kind: str
    bound: float
    coefficient: float | None = None
    estimate: float | None = None
    input_shape: Shape | None = None


@dataclass(frozen=True)
class Bound:
    """Lip(g) <= value. `parts` lists the layers in order; an asserted bound has none and is not proven.

    Where g `descends`, its Jacobian is symmetric with eigenvalues in [-value, 0]. `reason` says why nothing is known of
    g, where the value is infinite.
    """

    value: float
    proven: bool
    parts: tuple[Part, ...] = ()
    descends: bool = False
    reason: str = ""

    @property
    def expansion(self) -> float:
        """Lip(x + g(x)) at most: 1 + Lip(g) (Lemma 2), or that of eigenvalues in [1 - value, 1]."""
        return max(1.0, self.value - 1) if self.descends else 1 + self.value


class Conditioned(nn.Module):
    """g(x; c) = rest(first(x) + embed(c)): a network that is Lipschitz in x whatever the context does.

    `embed` is free: its output must fit what `first` returns. Only x counts for invertibility, so only `first` and
    `rest` are bounded. An inverse evaluates `embed` once, and is one for that value of it.
    """

    outside_proof: ClassVar[tuple[str, ...]] = ("embed",)

    def __init__(self, first: nn.Module, embed: nn.Module, rest: nn.Module) -> None:
        super().__init__()
        self.first, self.embed, self.rest = first, embed, rest

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return cast(Tensor, self.rest(self.shifted(self.first(x), context)))

    def shifted(self, h: Tensor, context: Tensor | None) -> Tensor:
        """h + embed(context), an embedding per channel spread over the positions."""
        return spread_over(h, self.embedded(context, len(h)))

    def embedded(self, context: Tensor | None, rows: int) -> Tensor:
        """embed(context), for so many samples."""
        if context is None:
            raise ValueError("this network is conditional; pass context=...")
        if len(context) != rows:
            raise ValueError(f"context must have a row for every sample; got {len(context)} rows for {rows} samples.")
        return cast(Tensor, self.embed(context))

    def in_its_precision(self, context: Tensor) -> Tensor:
        """The context as `embed` takes it: numbers in the type of its weights, integers as they are."""
        like = next((p for p in self.embed.parameters() if p.is_floating_point()), context)
        return context.to(like.dtype) if context.is_floating_point() else context

    def at(self, x: Tensor, shift: Tensor) -> Tensor:
        """g(x) for what `embed` returned."""
        return cast(Tensor, self.rest(spread_over(self.first(x), shift)))


def spread_over(h: Tensor, shift: Tensor) -> Tensor:
    """h + shift, a number per channel spread over the positions."""
    return h + shift.reshape(*shift.shape, *(1,) * (h.dim() - shift.dim()))


def leaves(g: nn.Module, prefix: str = "", *, fresh: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """The layers of g in the order in which they act on x; `NoBoundKnown` where that order cannot be read.

    `fresh` says that x is a tensor of g's own, on which its first step may work in place.
    """
    for name, leaf in _leaves(g, prefix):
        if getattr(leaf, "inplace", False) and not fresh:
            raise NoBoundKnown(f"g must leave x as it is; its first step, {leaf}, works in place. Use inplace=False.")
        fresh = fresh or not isinstance(leaf, nn.Flatten | nn.Unflatten | nn.Identity)  # those may return x itself
        yield name, leaf


def _leaves(g: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    if (reason := changed(g)) is not None:
        raise NoBoundKnown(f"{_where(prefix, g)} {reason}")
    inside = unwrap(g)
    if inside is not g:
        yield from _leaves(inside, prefix)
    elif is_sequential(g):
        for name, child in g._modules.items():  # named_children would leave out a layer used twice
            yield from _leaves(cast(nn.Module, child), _inside(prefix, name))
    elif type(g) is Conditioned:
        yield from _leaves(g.first, _inside(prefix, "first"))
        yield from _leaves(g.rest, _inside(prefix, "rest"))
    else:
        yield prefix, g


def is_sequential(module: nn.Module) -> bool:
    """Whether a module is an `nn.Sequential` in all but its constructor."""
    return isinstance(module, nn.Sequential) and doubt(module) == ""


def primitives(g: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The linear layers and activations of g in order, those inside of a `Potential` or `Concatenated` too."""
    for name, leaf in leaves(g, prefix):
        if type(leaf) is Concatenated:
            yield from primitives(leaf.f, _inside(name, "f"))
        elif type(leaf) is Potential:
            yield _inside(name, "layer"), leaf.layer
            yield from leaves(leaf.activation, _inside(name, "activation"), fresh=True)
        else:
            yield name, leaf


def _inside(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _descends(g: nn.Module) -> bool:
    """Whether g is one `Potential`, between reshapings at most: what comes back to x's shape undoes what left it."""
    rest = [leaf for _, leaf in leaves(g) if not isinstance(leaf, nn.Flatten | nn.Unflatten | nn.Identity)]
    return len(rest) == 1 and type(rest[0]) is Potential


def _where(name: str, module: nn.Module) -> str:
    return f"{type(module).__name__} ({name})" if name else type(module).__name__


def bound(g: nn.Module, input_shape: Shape | None = None, *, estimate: bool = False) -> Bound:
    """The proven Lipschitz bound of g for inputs of `input_shape` (no batch), from its parts.

    Sizes: the given shape, else all up to the largest that each layer has met, else all; under circular padding, where
    a smaller input may have a larger norm, the given shape or all. With `estimate` the norms from below are computed
    as well. Raises `NoBoundKnown` where a part has no bound.
    """
    check_process()
    parts, value, _ = _composed("", g, None if input_shape is None else tuple(input_shape), estimate)
    return Bound(value, True, tuple(parts), _descends(g))


def _composed(prefix: str, g: nn.Module, shape: Shape | None, estimate: bool) -> tuple[list[Part], float, Shape | None]:
    """The parts of g, its constant, and the shape that it returns."""
    parts, value = list[Part](), 1.0
    for name, leaf in leaves(g, prefix):
        found, constant, shape = _measured(name, leaf, shape, estimate)
        parts += found
        value = _times(value, constant)
    return parts, value, shape


def _times(a: float, b: float) -> float:
    """a b; a product of nonzero constants that underflows is rounded up, as a later one may be large."""
    return 0.0 if a == 0 or b == 0 else max(a * b, 2.0**-1000)


def _measured(
    name: str, leaf: nn.Module, shape: Shape | None, estimate: bool
) -> tuple[list[Part], float, Shape | None]:
    """The parts of a leaf, its constant, and the shape that it returns."""
    if type(leaf) is Concatenated:
        _check_finite(name, leaf)
        parts, value, made = _composed(_inside(name, "f"), leaf.f, shape, estimate)
        joined = None if shape is None or made is None else (shape[0] + made[0], *shape[1:])
        return parts, leaf.constant(value), joined
    if type(leaf) is not Potential:
        part, after = _part(name, leaf, shape, estimate)
        return [part], part.bound, after
    activations = list(leaves(leaf.activation, _inside(name, "activation"), fresh=True))
    leaf.check()
    layer, hidden = _part(_inside(name, "layer"), leaf.layer, shape, estimate)
    ((within, activation),) = activations
    slope, _ = _part(within, activation, hidden, estimate)
    return [layer, slope], _times(_times(layer.bound, layer.bound), slope.bound), shape


def _check_finite(name: str, layer: nn.Module) -> None:
    """Refuse numbers for which g(x) is none; weights are looked at where their norm is taken."""
    for kind, p in layer.named_parameters(recurse=False):
        if not bool(torch.isfinite(p).all()):
            raise ValueError(
                f"{kind} of {_where(name, layer)} holds NaN or infinity; no bound exists. Restore it from a checkpoint."
            )


def _part(name: str, layer: nn.Module, shape: Shape | None, estimate: bool) -> tuple[Part, Shape | None]:
    _check_finite(name, layer)
    constant = lipschitz_constant(layer)
    if constant is not None:
        after = shape
        if isinstance(layer, nn.Flatten | nn.Unflatten) and shape is not None:
            after = tuple(layer(torch.empty(1, *shape)).shape[1:])
        return Part(name, type(layer).__name__, constant, input_shape=shape), after
    geometry, weight, cap = _geometry(name, layer), cast(Tensor, layer.weight), cap_of(layer)
    size = spectral.spatial_size(geometry, weight, shape)
    if shape is None and cap is not None and cap.seen and not geometry.circular:
        size = cap.seen  # zero padding: no smaller input has a larger norm
    at = None if size is None else (weight.shape[1] * geometry.groups, *size)
    part = Part(
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


def _geometry(name: str, layer: nn.Module) -> Geometry:
    try:
        return Geometry.of(layer)
    except NoBoundKnown as error:
        reason = str(error)
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            reason = "it is another function at every call. Remove it from g."
        elif isinstance(layer, nn.modules.batchnorm._NormBase):
            reason = "no bound is computed through it. Remove it from g; ActNorm before the block does its work."
        elif next(layer.children(), None) is not None:
            reason = "its forward is its own and cannot be read. Write g as an nn.Sequential."
        elif _is_changed(layer):
            reason = doubt(layer)
        elif not isinstance(getattr(layer, "weight", None), Tensor):
            reason = unknown(layer)
        raise NoBoundKnown(f"no Lipschitz bound is known for {_where(name, layer)}: {reason}") from None


def _is_changed(layer: nn.Module) -> bool:
    """Whether a layer is known but for what a user has changed about it."""
    return bool(doubt(layer)) and any(base in TORCH for base in type(layer).__mro__)


def nominal(g: nn.Module) -> float:
    """The constant asked for: coefficients where layers are constrained, proven norms where they are not. Cheap."""
    value = 1.0
    for name, leaf in leaves(g):
        if type(leaf) is Concatenated:
            value *= max(1.0, nominal(leaf.f))  # whatever the angle is, which is not read from a device
        elif type(leaf) is Potential:
            value *= _nominal(_inside(name, "layer"), leaf.layer) ** 2 * _slope(leaf.activation)
        else:
            value *= _nominal(name, leaf)
    return value


def _slope(activation: nn.Module) -> float:
    return math.prod(_nominal(name, leaf) for name, leaf in leaves(activation, fresh=True))


def _nominal(name: str, layer: nn.Module) -> float:
    cap, constant = cap_of(layer), lipschitz_constant(layer)
    if cap is not None:
        return cap.coefficient
    if constant is not None:
        return constant
    geometry = _geometry(name, layer)
    return float(spectral.norm_bounds(cast(Tensor, layer.weight)[None], geometry, None))


def asked(g: nn.Module) -> Bound:
    """What the coefficients of g promise, before anything is proven; `NoBoundKnown` where a layer has none."""
    if any(cap_of(layer) is None and lipschitz_constant(layer) is None for _, layer in primitives(g)):
        raise NoBoundKnown("A layer of a block is not constrained, so that nothing keeps its norm. Constrain it.")
    return Bound(nominal(g), False, (), _descends(g))


def plain(g: nn.Module) -> nn.Module:
    """A copy of g without constraints: the stored, constrained weights as they are, in eval.

    What a user wrote beside the function of x (`Conditioned.embed`) is not copied.
    """
    return released(copied(g))


def released(g: nn.Module) -> nn.Module:
    """g itself without constraints, its weights as they are, in eval and without gradients."""
    return release_(g).requires_grad_(False).eval()


def copied(g: nn.Module) -> nn.Module:
    """A copy of g, without what is not part of the function of x."""
    memo: dict[int, Any] = {}
    for m in g.modules():
        memo |= {
            id(getattr(m, name)): nn.Identity() for name in getattr(type(m), "outside_proof", ()) if name in m._modules
        }
    return copy.deepcopy(g, memo)


def tighten_(g: nn.Module, input_shape: Shape | None = None) -> list[str]:
    """Rescale the layers of g whose proven bound exceeds their coefficient; the names of those that changed.

    The stored weight becomes the constrained one times coefficient / bound, so that power iteration finds nothing to
    do.
    """
    changed: list[str] = []
    done: set[nn.Module] = set()  # a layer may be used twice
    for part in bound(g, input_shape).parts:
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

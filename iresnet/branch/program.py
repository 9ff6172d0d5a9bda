"""A branch g as data: a program, which is a graph of steps, and the tensors that the steps use.

`parse(g)` reads the structure of g once: linear layers, convolutions and known activations in sequence, and the
library's combinators, which keep their input (`Concatenated`), take a context (`Conditioned`) or apply a transpose
(`Potential`). A g with a custom forward has no program. A program is hashable and holds no weights, so all branches of
one architecture share one program, and `run_program(program, x, tensors)` is a pure function. Everything else is
computed from the program: derivatives (`derivative`), tr J (`trace`), the Lipschitz constant (`constant`) and the
rounding error (`rounding`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..lipschitz.activations import ACTIVATIONS, Activation, record_of, why_no_constant
from ..lipschitz.conditioned import Conditioned, add_per_channel
from ..lipschitz.constraint import cap_of, weight_of
from ..lipschitz.dense import Concatenated, concatenate_weighted, mixing_weights
from ..lipschitz.order import child_name, describe_layer, leaves_and_shifts
from ..lipschitz.potential import Potential
from ..spectral import Geometry, weight_shape
from ..trust import KNOWN_TORCH, NoBoundKnown, unwrap, why_untrusted

#: Steps that multiply by a weight W, and those that multiply by W or -W'.
LINEAR = frozenset({"linear", "conv"})
LAYERS = LINEAR | {"descent"}

Size: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One step of g: a linear map, an activation, or the operation of a combinator.

    linear, conv    W h + b
    descent         -W' h, with the W of an earlier step (`Potential`: one step of gradient descent)
    join            (cos(t) h, sin(t) k), two results concatenated (`Concatenated`)
    shift           h + e, with the embedding e of a context (`Conditioned`)
    others          the activation of this name (`lipschitz.activations`) with these settings
    """

    kind: str
    #: How many tensors the step uses.
    tensors: int = 0
    geometry: Geometry | None = None
    settings: tuple[Any, ...] = ()

    @property
    def activation(self) -> Activation | None:
        return ACTIVATIONS.get(self.kind)

    @property
    def is_plain(self) -> bool:
        """Whether the padding, if any, is with zeros and equal on both sides, as `torch.convolution` takes it."""
        g = self.geometry
        return g is None or (not g.circular and g.before == g.after)

    @property
    def kernel(self) -> float | None:
        """The code of an activation in the GPU kernels; None if there is none."""
        record = self.activation
        return None if record is None else record.kernel(*self.settings)


@dataclass(frozen=True)
class Program:
    """Steps in execution order, and the results that each step uses: 0 is x, n the result of the n-th step.

    The last result is g(x).
    """

    steps: tuple[Step, ...]
    inputs: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, *steps: Step) -> Program:
        """Make a program that runs these steps in sequence."""
        return cls(steps, tuple((i,) for i in range(len(steps))))

    @property
    def is_chain(self) -> bool:
        """Whether every step uses only the result before it, and no context."""
        return all(into == (i,) for i, into in enumerate(self.inputs)) and not self.is_conditional

    @property
    def is_conditional(self) -> bool:
        return any(step.kind == "shift" for step in self.steps)

    @property
    def has_slopes(self) -> bool:
        """Whether every step has a derivative in closed form."""
        return all(step.is_plain for step in self.steps) and not self.first_without_slope

    @property
    def first_without_slope(self) -> str:
        """The name of the first activation without a slope in closed form; empty if there is none."""
        records = (step.activation for step in self.steps)
        return next((record.name for record in records if record is not None and record.slope is None), "")

    def accepts(self, x: Tensor) -> bool:
        """Whether x has the number of axes that all layers need: (batch, features) or (batch, channels, *size)."""
        layers = (step.geometry for step in self.steps if step.kind in LAYERS)
        return all(x.dim() == (0 if geometry is None else geometry.axes) + 2 for geometry in layers)

    def with_tensors(self, values: Sequence[Tensor]) -> Iterator[tuple[Step, tuple[int, ...], list[Tensor]]]:
        """Yield every step, the results it uses, and its own tensors out of `values`, the tensors of all steps."""
        used = 0
        for step, into in zip(self.steps, self.inputs, strict=True):
            yield step, into, list(values[used : used + step.tensors])
            used += step.tensors


#: (step, x, tensors) -> y: an implementation of a linear step.
StepFunction: TypeAlias = Callable[[Step, Tensor, list[Tensor]], Tensor]


def run_program(
    program: Program, x: Tensor, values: Sequence[Tensor], functions: Sequence[StepFunction] = ()
) -> Tensor:
    """Compute g(x) from the program and tensors of g; `functions`, one per step, implement its linear steps."""
    return interpret(program, x, values, partial(run_step, functions))


def run_step(functions: Sequence[StepFunction], i: int, step: Step, inputs: list[Tensor], own: list[Tensor]) -> Tensor:
    """Compute the result of step i, with `functions[i]` if it is linear and there are any."""
    return functions[i](step, inputs[0], own) if functions and step.kind in LINEAR else apply_step(step, inputs, own)


def interpret(
    program: Program,
    x: Tensor,
    values: Sequence[Tensor],
    function: Callable[[int, Step, list[Tensor], list[Tensor]], Tensor],
) -> Tensor:
    """Run a program with `function(number, step, inputs, tensors)` for every step; return the last result.

    A result is dropped as soon as no later step uses it.
    """
    last = {n: i for i, into in enumerate(program.inputs) for n in into}
    results = {0: x}
    for i, (step, into, own) in enumerate(program.with_tensors(values)):
        inputs = [results[n] for n in into]
        for n in into:
            if last[n] == i:
                results.pop(n, None)
        results[i + 1] = function(i, step, inputs, own)
    return results[len(program.steps)]


def apply_step(step: Step, inputs: list[Tensor], own: list[Tensor]) -> Tensor:
    """Compute the result of one step."""
    x = inputs[0]
    match step.kind:
        case "linear":
            return F.linear(x, own[0], own[1] if step.tensors == 2 else None)
        case "conv":
            return _convolve(cast(Geometry, step.geometry), x, own)
        case "descent":
            return -apply_transpose(step, x, own[0])
        case "join":
            return concatenate_weighted(own[0], *inputs)
        case "shift":
            return add_per_channel(x, own[0])
        case kind:
            return ACTIVATIONS[kind].function(x, *step.settings, *own)


def _convolve(g: Geometry, x: Tensor, own: list[Tensor]) -> Tensor:
    none, bias, before = (0,) * g.axes, own[1] if len(own) == 2 else None, g.before
    if g.circular or g.before != g.after:
        sides = [n for pair in zip(reversed(g.before), reversed(g.after), strict=True) for n in pair]
        x, before = F.pad(x, sides, mode="circular" if g.circular else "constant"), none
    return torch.convolution(x, own[0], bias, g.stride, before, g.dilation, False, none, g.groups)


def apply_transpose(step: Step, v: Tensor, weight: Tensor, size: Sequence[int] = ()) -> Tensor:
    """Compute W' v in the dtype of W. With a stride, `size` must be the spatial size of the input of W."""
    g, v = step.geometry, v.to(weight.dtype)
    if g is None:
        return v @ weight
    rest = g.output_padding(tuple(size), tuple(weight.shape[2:]), tuple(v.shape[2:])) if size else (0,) * g.axes
    return torch.convolution(v, weight, None, g.stride, g.before, g.dilation, True, rest, g.groups)


# ---------------------------------------------------------------------------------------------- parsing


@dataclass(frozen=True)
class ParsedBranch:
    """A parsed g: its program, and the name and module of every step."""

    g: nn.Module
    program: Program
    layers: tuple[tuple[str, nn.Module], ...]

    def tensors(self, shift: Tensor | None = None, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return the tensors for `run_program`: constrained weights, biases and parameters in order, with gradients.

        `shift` is the embedding of a context. With a `dtype`, derived values (the cosine of an angle) are computed in
        it.
        """
        tensors: list[Tensor] = []  # not list[Tensor](), which torch.compile cannot trace
        weights: dict[nn.Module, Tensor] = {}
        for step, (_, layer) in zip(self.program.steps, self.layers, strict=True):
            tensors += [t if dtype is None else t.to(dtype) for t in self._own(step, layer, shift, weights, dtype)]
        return tensors

    def _own(
        self, step: Step, layer: Any, shift: Tensor | None, weights: dict[nn.Module, Tensor], dtype: torch.dtype | None
    ) -> list[Tensor]:
        if step.kind in LAYERS:
            if step.kind != "descent":  # a descent uses the same weight tensor, so that J is exactly symmetric
                weights[layer] = weight_of(layer)
            return [weights[layer], layer.bias] if step.tensors == 2 else [weights[layer]]
        if step.kind == "join":
            return [mixing_weights(layer.angle if dtype is None else layer.angle.to(dtype))]
        if step.kind == "shift":
            if shift is None:
                raise ValueError("this network is conditional; pass context=...")
            return [shift]
        return ACTIVATIONS[step.kind].tensors_of(layer)

    def record_sizes(self, size: Size) -> None:
        """Record the input sizes of constrained layers for an x of this size, as their hooks would."""
        sizes = [size]
        for step, into, (_, layer) in zip(self.program.steps, self.program.inputs, self.layers, strict=True):
            size = sizes[into[-1]]
            if step.kind == "conv":
                cap = cap_of(layer)
                if cap is not None:
                    cap.record_size(size)
                size = cast(Geometry, step.geometry).output_size(size, tuple(weight_shape(layer)[2:]))
            elif step.kind == "descent":  # back to the size of its layer's input
                size = sizes[self.program.inputs[into[0] - 2][0]]
            sizes.append(size)


def try_parse(g: nn.Module) -> ParsedBranch | None:
    """Parse g; return None if it has a custom forward, or a layer or padding that is not supported."""
    try:
        return parse(g)
    except NoBoundKnown:
        return None


def parse(g: nn.Module) -> ParsedBranch:
    """Parse g; raise `NoBoundKnown` with the reason if that is not possible."""
    parser = _Parser(unwrap(g))
    parser.walk(g, "", 0)
    return ParsedBranch(g, Program(tuple(parser.steps), tuple(parser.inputs)), tuple(parser.layers))


class _Parser:
    """Collects the steps of g in execution order; results are numbered as in `Program`."""

    def __init__(self, whole: nn.Module) -> None:
        self.whole = whole
        self.steps: list[Step] = []
        self.inputs: list[tuple[int, ...]] = []
        self.layers: list[tuple[str, nn.Module]] = []

    def walk(self, g: nn.Module, prefix: str, h: int, *, fresh: bool = False) -> int:
        """Add the steps of g applied to result h; return the number of the last result."""
        for name, leaf in leaves_and_shifts(g, prefix, fresh=fresh):
            h = self.leaf(name, leaf, h, unmodified=True)  # it has just been checked
        return h

    def leaf(self, name: str, leaf: nn.Module, h: int, *, unmodified: bool = False) -> int:
        if type(leaf) is Conditioned:
            if leaf is not self.whole:
                raise NoBoundKnown("a Conditioned inside another network gets no context. Make it the whole of g.")
            return self.add(Step("shift", 1), name, leaf, h)
        if type(leaf) is Concatenated:
            return self.add(Step("join", 1), name, leaf, h, self.walk(leaf.f, child_name(name, "f"), h))
        if type(leaf) is Potential:
            return self.descent(name, leaf, h)
        return self.add(_layer_step(name, leaf, unmodified), name, leaf, h)

    def descent(self, name: str, leaf: Potential, h: int) -> int:
        """Add the steps of -W' s(W h + b)."""
        for _ in leaves_and_shifts(leaf.activation, child_name(name, "activation"), fresh=True):
            pass  # raises for an activation that cannot be parsed
        leaf.check()
        hidden = self.leaf(child_name(name, "layer"), leaf.layer, h)
        hidden = self.walk(leaf.activation, child_name(name, "activation"), hidden, fresh=True)
        step = Step("descent", 1, self.steps[hidden - 2].geometry)
        return self.add(step, child_name(name, "layer"), leaf.layer, hidden)

    def add(self, step: Step, name: str, layer: nn.Module, *inputs: int) -> int:
        self.steps.append(step)
        self.inputs.append(inputs)
        self.layers.append((name, layer))
        return len(self.steps)


def _layer_step(name: str, layer: nn.Module, unmodified: bool) -> Step:
    """Return the step of a layer; `unmodified` as in `trust.known_type`."""
    # Most layers are linear, and asking for the record of one takes longer than all else here.
    record = None if isinstance(layer, nn.Linear) else record_of(layer, unmodified=unmodified)
    if record is not None:
        return Step(record.name, len(record.tensors), settings=record.settings_of(layer))
    geometry, tensors = _geometry(name, layer, unmodified), 1 if layer.bias is None else 2
    return Step("conv", tensors, geometry) if geometry.axes else Step("linear", tensors)


def _geometry(name: str, layer: nn.Module, unmodified: bool) -> Geometry:
    try:
        return Geometry.of(layer, unmodified=unmodified)
    except NoBoundKnown as error:
        raise no_bound_error(name, layer, str(error)) from None


def no_bound_error(name: str, layer: nn.Module, reason: str = "") -> NoBoundKnown:
    """Make the error for a layer without a Lipschitz bound, with the reason and a remedy."""
    if isinstance(layer, nn.modules.dropout._DropoutNd):
        reason = "it is a different function at every call. Remove it from g."
    elif isinstance(layer, nn.modules.batchnorm._NormBase):
        reason = "its bound is not known. Remove it from g; use ActNorm before the block instead."
    elif next(layer.children(), None) is not None:
        reason = "it has a custom forward. Write g as an nn.Sequential."
    elif why_untrusted(layer) and any(
        base in KNOWN_TORCH for base in type(layer).__mro__
    ):  # a known class that a user has modified
        reason = why_untrusted(layer)
    elif not isinstance(getattr(layer, "weight", None), Tensor):
        reason = why_no_constant(layer)
    return NoBoundKnown(f"no Lipschitz bound is known for {describe_layer(name, layer)}: {reason}")

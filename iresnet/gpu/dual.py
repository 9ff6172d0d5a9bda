"""A unit in forward mode: beside x', the probes v are propagated through g as tangents J v.

Values and tangents are the rows of one matrix, [h; t], so a linear map is one product for all of them, and so is the
gradient of its weight. An activation maps h to a(h) and t to a'(h) t. Linear maps run in `dtype`, activations in
float32. Only the input of an activation is saved for the backward pass, which recomputes its output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..branch import Program, Step
from ..branch.derivative import activation_slope as slope_of
from ..branch.program import LINEAR, apply_step
from ..compiler import maybe_compile
from ..logdet import noise_to_probes
from ..timing import can_measure, fastest
from .kernels import wide
from .maps import Convolution, Map, as_matrix, candidates, choose_map
from .neighbours import Size


@dataclass(frozen=True)
class Stage:
    """An activation, if there is one, and the linear map after it."""

    activation: Step | None
    linear: Step


def stages(program: Program) -> tuple[Stage, ...] | None:
    """Return a program as stages; None if it is not a chain, has two activations in a row, or ends in one."""
    found, activation = list[Stage](), None
    if not program.is_chain or any(step.activation is None and step.kind not in LINEAR for step in program.steps):
        return None
    for step in program.steps:
        if step.kind in LINEAR:
            found.append(Stage(activation or (Step("identity") if found else None), step))
            activation = None
        elif activation is None:
            activation = step
        else:
            return None
    return tuple(found) if activation is None else None


class Slope(NamedTuple):
    """The slope of an activation, None without one; `activated`: `values` are outputs of ELU, which give its slope."""

    values: Tensor | None
    activated: bool = False


@dataclass(frozen=True)
class ExecutionMode:
    """How a unit runs: the dtype of its linear maps, the number of probes per sample, and whether it is compiled."""

    dtype: torch.dtype
    probes: int
    compiled: bool


@dataclass(frozen=True)
class Layer:
    """A stage with its tensors: parameters of the activation, weight, and the bias, which the next stage adds."""

    stage: Stage
    map: Map
    parameters: list[Tensor]
    weight: Tensor
    matrix: Tensor
    bias: Tensor | None


def read_layers(
    parts: Sequence[Stage], values: list[Tensor], size: Size, count: int, mode: ExecutionMode
) -> list[Layer]:
    """Combine the stages of g with its tensors, for `count` images of this size."""
    found, used = [], 0
    for part in parts:
        n = 0 if part.activation is None else part.activation.tensors
        parameters, weight = values[used : used + n], values[used + n].to(mode.dtype)
        used += n + 1
        bias = values[used] if part.linear.tensors == 2 and used < len(values) else None
        used += bias is not None
        linear = choose_map(part.linear, weight, size, count, compiled=mode.compiled)
        found.append(Layer(part, linear, parameters, weight, linear.matrix(weight.detach()), bias))
        if part.linear.geometry is not None:
            size = part.linear.geometry.output_size(size, tuple(weight.shape[2:]))
    return found


def forward(
    mode: ExecutionMode, layers: Sequence[Layer], x: Tensor, y: Tensor, bias: Tensor | None,
    norm: tuple[Tensor, Tensor] | None, noise: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Sequence[Layer], list[Slope]]:  # fmt: skip
    """Return x', the probes, [y'; J v], the layers as they were computed, and the slopes of all activations."""
    x, v, h = EnterUnit.apply(mode, x, y, bias, *(norm or (None, None)), noise)  # type: ignore[no-untyped-call]
    if layers[0].stage.activation is not None:
        h = x if v is None else torch.cat([x, v])
    run = _layer_by_layer
    if _has_kernels(mode, layers, h) and _kernels_win(mode, layers, x, h):
        layers, run = [_unrolled(layer) for layer in layers], _by_kernels
    h, slopes = run(mode, layers, x, h)
    return x, v, h, layers, slopes


def _layer_by_layer(mode: ExecutionMode, layers: Sequence[Layer], x: Tensor, h: Tensor) -> tuple[Tensor, list[Slope]]:
    shift, slopes = None, list[Slope]()
    for layer in layers:
        if layer.stage.activation is None:
            h, d = FirstMap.apply(layer, x, h, layer.weight), None  # type: ignore[no-untyped-call]
        else:
            h, d = ActivationThenMap.apply(mode, layer, h, shift, layer.weight, *layer.parameters)  # type: ignore[no-untyped-call]
        slopes.append(Slope(d))
        shift = layer.bias
    return h, slopes


def _has_kernels(mode: ExecutionMode, layers: Sequence[Layer], h: Tensor) -> bool:
    """Whether custom kernels support these layers."""
    activations, usual = [layer.stage.activation for layer in layers], mode.compiled and mode.probes <= 1
    return usual and wide.supported([_unrolled_map(t) for t in layers], activations, [t.bias for t in layers], h)


def _unrolled_map(layer: Layer) -> Map:
    """Return the map of a layer as a matrix product, if possible, even if it is not the fastest on its own."""
    m = layer.map
    return candidates(m.geometry, tuple(layer.weight.shape), m.size, True)[0] if isinstance(m, Convolution) else m


def _unrolled(layer: Layer) -> Layer:
    m = _unrolled_map(layer)
    return layer if m is layer.map else replace(layer, map=m, matrix=m.matrix(layer.weight.detach()))


_WINS: dict[Any, bool] = {}


def _kernels_win(mode: ExecutionMode, layers: Sequence[Layer], x: Tensor, h: Tensor) -> bool:
    """Whether the custom kernels are faster than layer by layer, forward and backward; measured once per shape."""
    key = (mode, len(x), layers[1].stage.activation, *(layer.map for layer in layers))
    if key not in _WINS:
        if not can_measure(x.device):
            return True
        twins = [replace(t, weight=_leaf(t.weight), bias=None if t.bias is None else _leaf(t.bias)) for t in layers]
        inputs = [_leaf(x), *(t for twin in twins for t in (twin.weight, twin.bias) if t is not None)]
        unrolled = [_unrolled(twin) for twin in twins]

        def call(kernels: bool) -> None:
            with torch.enable_grad():
                run, used = (_by_kernels, unrolled) if kernels else (_layer_by_layer, twins)
                out, _ = run(mode, used, inputs[0], h.detach())
                torch.autograd.grad(out, inputs, torch.zeros_like(out))

        _WINS[key] = fastest(f"a unit by kernels, {len(x)} rows, {mode.probes} probes", [True, False], call)
    return _WINS[key]


def _leaf(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_()


def _by_kernels(mode: ExecutionMode, layers: Sequence[Layer], x: Tensor, h: Tensor) -> tuple[Tensor, list[Slope]]:
    tensors = [t for layer in layers for t in (layer.weight, layer.bias) if t is not None]
    maps, matrices = [layer.map for layer in layers], [layer.matrix for layer in layers]
    frequency = cast(float, wide.kernel_of(layers[1].stage.activation))
    h, *kept = wide.Wide.apply(maps, matrices, frequency, x, h, *tensors)  # type: ignore[no-untyped-call]
    return h, [Slope(None), *(Slope(d[: len(x)], activated=not frequency) for d in kept)]


# ---------------------------------------------------------------------------------------------- entering a unit


class EnterUnit(torch.autograd.Function):
    """(x, y, bias, shift, log_scale, noise) -> x', the probes, and both as one matrix in the dtype of the maps."""

    @staticmethod
    def forward(ctx: Any, mode: ExecutionMode, x: Tensor, y: Tensor, bias: Tensor | None, shift: Tensor | None,
                log_scale: Tensor | None, noise: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
        x, v, both = maybe_compile(enter_unit, mode.compiled)(
            *_detached(x, y, bias, shift, log_scale, noise), mode.dtype
        )
        ctx.mode, ctx.has_bias, ctx.dtype = mode, bias is not None, y.dtype
        ctx.save_for_backward(x, log_scale)
        ctx.mark_non_differentiable(*([both] if v is None else [v, both]))
        ctx.set_materialize_grads(False)  # otherwise every backward pass would write large tensors of zeros
        return x, v, both

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, log_scale = _detached(*ctx.saved_tensors)
        dx, dy, plain, scaled = maybe_compile(leave_unit, ctx.mode.compiled)(g, x, log_scale, ctx.dtype)
        norm = (None, None) if log_scale is None else (plain, scaled)
        return None, dx, dy, plain if ctx.has_bias else None, *norm, None


def enter_unit(
    x: Tensor, y: Tensor, bias: Tensor | None, shift: Tensor | None, log_scale: Tensor | None, noise: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Return x', the probes v, if any, and [x'; v] in `dtype`."""
    x = x + y if bias is None else x + y + bias
    if shift is not None and log_scale is not None:
        x = (x + shift) * log_scale.exp()
    if noise is None:
        return x, None, x.to(dtype, copy=True)
    v = noise_to_probes(as_matrix(noise), x.dtype)
    return x, v, torch.cat([x.to(dtype), v.to(dtype)])


def leave_unit(
    g: Tensor, x: Tensor, log_scale: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, of y, of bias and shift, and of log_scale, given that of x'."""
    scaled = (g * x).sum(0)
    g = g if log_scale is None else g * log_scale.exp()
    return g, g.to(dtype), g.sum(0), scaled


class FirstMap(torch.autograd.Function):
    """The first linear map, if there is no activation before it; probes have no gradient."""

    @staticmethod
    def forward(ctx: Any, layer: Layer, x: Tensor, both: Tensor, weight: Tensor) -> Tensor:
        ctx.map, ctx.matrix, ctx.rows, ctx.dtype = layer.map, layer.matrix, len(x), x.dtype
        ctx.save_for_backward(both)
        return layer.map.forward(both, layer.matrix)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (both,), m = ctx.saved_tensors, ctx.matrix
        part = len(g) * ctx.rows // len(both)
        return None, ctx.map.transpose(g[:part], m).to(ctx.dtype), None, ctx.map.gradient(both, g, m)


# ---------------------------------------------------------------------------------------------- inside a unit


class ActivationThenMap(torch.autograd.Function):
    """Apply an activation to [h; tangents] and then a linear map; also return the slope of the activation."""

    @staticmethod
    def forward(ctx: Any, mode: ExecutionMode, layer: Layer, h: Tensor, bias: Tensor | None, weight: Tensor,
                *parameters: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.mode, ctx.activation, ctx.map, ctx.matrix = mode, layer.stage.activation, layer.map, layer.matrix
        ctx.save_for_backward(h, bias, *parameters)
        both, slope = maybe_compile(activate, mode.compiled)(
            ctx.activation, mode, *_detached(h, bias), _detached(*parameters)
        )
        ctx.mark_non_differentiable(slope)
        ctx.set_materialize_grads(False)
        return layer.map.forward(both, layer.matrix), slope

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        h, bias, *parameters = _detached(*ctx.saved_tensors)
        back = ctx.map.transpose(g, ctx.matrix)
        function = maybe_compile(activate_backward, ctx.mode.compiled)
        both, dh, dbias, more = function(ctx.activation, ctx.mode, h, bias, parameters, back)
        return None, None, dh, dbias, ctx.map.gradient(both, g, ctx.matrix), *more


def activate(
    step: Step, mode: ExecutionMode, h: Tensor, bias: Tensor | None, parameters: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return [a; slope t] and the slope, for the activation a of h + bias and tangents t."""
    h, t = _split_tangents(h, mode)
    a, d = _activation_and_slope(step, h, bias, parameters)
    return _join_tangents(a, d * t, mode.dtype), d.to(mode.dtype) if mode.probes else d.new_empty(0)


def activate_backward(
    step: Step, mode: ExecutionMode, h: Tensor, bias: Tensor | None, parameters: list[Tensor], g: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
    """Recompute [a; slope t], and return it with the gradients of [h; t], of the bias and of the parameters."""

    def function(h: Tensor, t: Tensor, parameters: list[Tensor]) -> tuple[Tensor, Tensor]:
        a, d = _activation_and_slope(step, h, bias, parameters)
        return a, d * t

    dtype, (h, t) = h.dtype, _split_tangents(h, mode)
    (a, b), pull, *_ = torch.func.vjp(function, h, t, parameters)
    dh, dt, more = pull(_split_tangents(g, mode))
    dh = dh.to(dtype)
    dbias = None if bias is None else dh.to(bias.dtype).sum(0)
    return _join_tangents(a, b, mode.dtype), _join_tangents(dh, dt, dtype), dbias, more


def _activation_and_slope(
    step: Step, h: Tensor, bias: Tensor | None, parameters: list[Tensor]
) -> tuple[Tensor, Tensor]:
    h = h if bias is None else h + bias
    a = apply_step(step, [h], parameters)
    return a, slope_of(step, h, a, parameters)


def _split_tangents(h: Tensor, mode: ExecutionMode) -> tuple[Tensor, Tensor]:
    """Return the rows of the state, and those of the tangents (probes, rows, channels), in at least float32."""
    h = h.to(torch.promote_types(h.dtype, torch.float32)).view(1 + mode.probes, -1, h.shape[1])
    return h[0], h[1:]


def _join_tangents(a: Tensor, t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows of the state and those of the tangents, if any, as one matrix."""
    return torch.cat([a.to(dtype), t.to(dtype).flatten(0, 1)]) if len(t) else a.to(dtype)


def _detached(*tensors: Tensor | None) -> list[Any]:
    """Detach tensors from their autograd graph, which the compiler would inspect."""
    return [None if t is None else t.detach() for t in tensors]

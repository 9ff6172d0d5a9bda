"""A branch g as data: its steps and the tensors they take. What compilers, graphs and other precisions need.

A standard g (linear layers, convolutions with zero padding, known activations, one after another) is read into a
`Program`, a hashable tuple; `run(program, x, tensors)` is then a pure function, the same for all branches of one
shape, whatever their weights. A g with a forward of its own has no program. A layer that keeps its input
(`Concatenated`) is a step with a program inside, for those who ask for nested ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..logdet import Pull
from ..spectral import Geometry
from ..trust import NoBoundKnown, known_type, unwrap
from .activations import LipSwish, MaxMin, Sine, beta_of
from .bound import Conditioned, leaves
from .constraint import cap_of
from .dense import Concatenated, beside


@dataclass(frozen=True)
class Step:
    """One step of g: a linear layer, a convolution or an activation, with its constants and its number of tensors; or
    a dense one, which has steps inside."""

    kind: str
    tensors: int = 0
    geometry: Geometry | None = None
    constant: float = 0.0
    inner: tuple[Step, ...] = ()
    threshold: float = 0.0  # of softplus


Program: TypeAlias = tuple[Step, ...]

LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def read(g: nn.Module, *, nested: bool = False) -> Program | None:
    """The program of g; None where it has a forward, a layer or a padding that cannot be read, or steps within steps
    unless they are `nested` on purpose."""
    if any(isinstance(m, Conditioned) for m in g.modules()):
        return None
    try:
        steps = [_nested(layer) if nested and type(layer) is Concatenated else _step(layer) for _, layer in leaves(g)]
    except NoBoundKnown:
        return None
    return None if None in steps else cast(Program, tuple(steps))


def tensors(g: nn.Module) -> list[Tensor]:
    """What `run` takes beside x: constrained weights, biases and parameters of activations, in order, with gradient."""
    found: list[Tensor | None] = []
    for _, layer in leaves(g):
        if type(layer) is Concatenated:
            found += [layer.angle, *tensors(layer.f)]
        elif isinstance(layer, LipSwish):
            found.append(layer.raw_beta)
        elif isinstance(layer, LINEAR):
            found += [layer.weight, layer.bias]
    return [t for t in found if t is not None]


def run(program: Program, x: Tensor, values: list[Tensor]) -> Tensor:
    """g(x), for the tensors of a g with this program, in the precision of both."""
    used = 0
    for step in program:
        x, used = apply(step, x, values[used : used + step.tensors]), used + step.tensors
    return x


def apply(step: Step, x: Tensor, values: list[Tensor]) -> Tensor:
    """One step."""
    match step.kind:
        case "linear":
            return F.linear(x, values[0], values[1] if step.tensors == 2 else None)
        case "conv":
            g, none = cast(Geometry, step.geometry), (0,) * cast(Geometry, step.geometry).axes
            bias = values[1] if step.tensors == 2 else None
            return torch.convolution(x, values[0], bias, g.stride, g.before, g.dilation, False, none, g.groups)
        case "elu":
            return F.elu(x, step.constant)
        case "tanh":
            return torch.tanh(x)
        case "relu":
            return F.relu(x)
        case "softplus":
            return F.softplus(x, step.constant, step.threshold)
        case "sine":
            return torch.sin(step.constant * x) / step.constant
        case "lipswish":
            return x * torch.sigmoid(beta_of(values[0]) * x) / 1.1
        case "maxmin":
            return cast(Tensor, MaxMin()(x))
        case "dense":
            return beside(values[0], x, run(step.inner, x, values[1:]))
        case _:
            return x


# ---------------------------------------------------------------------------------------------- derivatives


def acts(step: Step) -> bool:
    """Whether a step is an activation."""
    return step.kind not in ("linear", "conv", "dense")


def takes(program: Program, x: Tensor) -> bool:
    """Whether all steps are meant for inputs with as many axes as x: rows for linear layers, or images."""
    linear = [step for step in program if step.kind in ("linear", "conv")]
    axes = [0 if step.geometry is None else step.geometry.axes for step in linear]
    return all(x.dim() == n + 2 for n in axes) and all(takes(step.inner, x) for step in program)


def has_slopes(program: Program) -> bool:
    """Whether every activation is elementwise with a slope in closed form: all but MaxMin."""
    return all(step.kind != "maxmin" and has_slopes(step.inner) for step in program)


def slope(step: Step, x: Tensor, y: Tensor, values: list[Tensor]) -> Tensor:
    """d y / d x of an activation y = step(x), differentiable in x."""
    match step.kind:
        case "elu" if step.constant == 1:
            return y.clamp(max=0) + 1
        case "elu":
            return torch.where(x > 0, torch.ones_like(x), y + step.constant)
        case "tanh":
            return 1 - y.square()
        case "relu":
            return (x > 0).to(x.dtype)
        case "softplus":
            return torch.sigmoid(step.constant * x)
        case "sine":
            return torch.cos(step.constant * x)
        case "lipswish":
            beta = beta_of(values[0])
            s = torch.sigmoid(beta * x)
            return (s + beta * x * s * (1 - s)) / 1.1
        case "identity":
            return torch.ones_like(x)
        case _:
            raise ValueError(f"no closed slope is known for {step.kind}.")


def linearise(program: Program, x: Tensor, values: list[Tensor]) -> tuple[Tensor, list[Pull]]:
    """g(x) and the transpose of every step's derivative there: J' v is the last applied to v, and so on to the first.

    All is one ordinary graph: J' = W_1' D_1 W_2' D_2 ..., differentiable in x and in the tensors.
    """
    used, transposes = 0, cast("list[Pull]", [])
    for step in program:
        own, used = values[used : used + step.tensors], used + step.tensors
        if step.kind == "dense":
            made, within = linearise(step.inner, x, own[1:])
            transposes.append(_pull_beside(own[0], x, within))
            x = beside(own[0], x, made)
            continue
        y = apply(step, x, own)
        transposes.append(transpose(step, x, y, own))
        x = y
    return x, transposes


def _pull_beside(angle: Tensor, x: Tensor, within: list[Pull]) -> Pull:
    """(v, w) -> cos(t) v + sin(t) J' w for the derivative J of what is made of x, given by its transposes."""
    a, b, channels, dim = angle.cos(), angle.sin(), x.shape[1], 1 if x.dim() > 2 else -1

    def pulled(v: Tensor) -> Tensor:
        kept, made = torch.split(v, [channels, v.shape[dim] - channels], dim)
        return a * kept + pull(within, b * made)

    return pulled


def pull(transposes: list[Pull], v: Tensor) -> Tensor:
    """J' v."""
    for transpose in reversed(transposes):
        v = transpose(v)
    return v


def transpose(step: Step, x: Tensor, y: Tensor, values: list[Tensor]) -> Pull:
    """The transpose of the derivative of y = step(x); a v in another precision is brought to that of the weight."""
    if acts(step):
        d = slope(step, x, y, values)
        return lambda v: v * d
    weight = values[0]
    if step.kind == "linear":
        return lambda v: v.to(weight.dtype) @ weight
    g = cast(Geometry, step.geometry)
    # What a stride leaves over at the end must be said to the transpose, or its output would be short.
    rest = tuple(
        n + 2 * p - d * (k - 1) - 1 - s * (m - 1)
        for n, p, d, k, s, m in zip(
            x.shape[2:], g.before, g.dilation, weight.shape[2:], g.stride, y.shape[2:], strict=True
        )
    )
    options = (None, g.stride, g.before, g.dilation, True, rest, g.groups)
    return lambda v: torch.convolution(v.to(weight.dtype), weight, *options)


def note_sizes(g: nn.Module, size: tuple[int, ...]) -> None:
    """What the hooks of constrained layers would have seen of an input of this spatial size, without calling them."""
    for _, layer in leaves(g):
        cap = cap_of(layer)
        if type(layer) is Concatenated:
            note_sizes(layer.f, size)
        if isinstance(layer, LINEAR[1:]):
            if cap is not None:
                cap.see(size)
            size = Geometry.settings(layer).output_size(size, tuple(layer.weight.shape[2:]))


def _nested(layer: Concatenated) -> Step | None:
    inner = read(layer.f, nested=True)
    return None if inner is None else Step("dense", 1 + sum(step.tensors for step in inner), inner=inner)


def _step(layer: nn.Module) -> Step | None:
    kind, layer = known_type(layer), unwrap(layer)
    if issubclass(kind, LINEAR):
        geometry, count = Geometry.of(layer), 1 if layer.bias is None else 2
        if issubclass(kind, nn.Linear):
            return Step("linear", count)
        # Circular and asymmetric padding take a padding of their own first.
        plain = not geometry.circular and geometry.before == geometry.after
        return Step("conv", count, geometry) if plain else None
    match layer:
        case LipSwish():
            return Step("lipswish", 1)
        case nn.ELU():
            return Step("elu", constant=float(layer.alpha))
        case nn.Softplus():
            return Step("softplus", constant=float(layer.beta), threshold=float(layer.threshold))
        case Sine():
            return Step("sine", constant=layer.frequency)
        case nn.Tanh() | nn.ReLU() | MaxMin() | nn.Identity():
            return Step(kind.__name__.lower())
        case _:
            return None

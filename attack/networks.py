"""Random layers and networks of supported parts, with random sizes, paddings, structures, scales and precisions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from iresnet.lipschitz import Concatenated, Conditioned, LipSwish, MaxMin, Potential, Sine

from .reference import dense, spectral_norm

Shape: TypeAlias = tuple[int, ...]

CONVOLUTIONS: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def one_line(module: nn.Module, limit: int = 220) -> str:
    """A module as one line of text, cut to `limit` characters."""
    return " ".join(str(module).split())[:limit]


def generator(r: random.Random) -> torch.Generator:
    """A torch generator seeded by the case's random generator."""
    return torch.Generator().manual_seed(r.getrandbits(62))


def log_uniform(r: random.Random, low: float, high: float) -> float:
    """Ten to a uniformly random power between `low` and `high`."""
    return float(10 ** r.uniform(low, high))


def precision(r: random.Random) -> torch.dtype:
    """A random dtype for weights."""
    return r.choices([torch.float32, torch.float64, torch.float16, torch.bfloat16], [6, 3, 1, 1])[0]


def scale(r: random.Random, dtype: torch.dtype) -> float:
    """A random scale for weights: often an ordinary one, else 1e-30 to 1e15 as far as the dtype allows."""
    if r.random() < 0.3:
        return log_uniform(r, -1, 1)
    if dtype == torch.float16:
        return log_uniform(r, -6, 3)
    if dtype == torch.float64 and r.random() < 0.1:
        return log_uniform(r, -300, 200)
    return log_uniform(r, -30, 15)


def fill_(w: Tensor, r: random.Random) -> Tensor:
    """Fill a weight with one of several structures, with entries of order one."""
    g = generator(r)
    values = torch.randn(w.shape, generator=g, dtype=torch.float64)
    match r.randrange(9):
        case 0:
            values = torch.ones_like(values)
        case 1:
            values = values * (torch.rand(w.shape, generator=g) < 0.3)
        case 2:  # rank one
            values = values[:, :1].expand_as(values) * values[:1]
        case 3:  # a convolution with its largest gain at the highest frequency
            for axis in range(2, values.dim()):
                values = values.abs() * (1 - 2.0 * (torch.arange(values.shape[axis]) % 2)).view(
                    *(1,) * axis, -1, *(1,) * (values.dim() - axis - 1)
                )
        case 4:  # rows of very different sizes
            rows = 10 ** (8 * torch.rand(len(values), generator=g, dtype=torch.float64) - 8)
            values = values * rows.view(-1, *(1,) * (values.dim() - 1))
        case 5:
            values = torch.zeros_like(values)
            if r.random() < 0.8:
                values.view(-1)[r.randrange(values.numel())] = 1
        case _:
            pass
    with torch.no_grad():
        w.copy_(values)
    return w


# ------------------------------------------------------------------------------------------------- single layers


def layer(r: random.Random) -> tuple[nn.Module, Shape]:
    """A linear layer or a convolution with random weights, and an input shape for it."""
    made, shape = _linear(r) if r.random() < 0.25 else convolution(r)
    dtype = precision(r)
    weight = fill_(made.weight, r).double() * scale(r, dtype)
    made.to(dtype)
    with torch.no_grad():
        made.weight.copy_(weight.to(dtype))
        if not bool(made.weight.isfinite().all()):
            made.weight.copy_(torch.nan_to_num(made.weight))
    return made, shape


def _linear(r: random.Random) -> tuple[Any, Shape]:
    i, o = r.choice([1, 2, r.randint(1, 40)]), r.choice([1, 2, r.randint(1, 40)])
    return nn.Linear(i, o, bias=r.random() < 0.5), (i,) if r.random() < 0.8 else (r.randint(1, 3), i)


def convolution(r: random.Random) -> tuple[Any, Shape]:
    """A convolution in one, two or three dimensions, and an input shape for it."""
    axes = r.choices([1, 2, 3], [3, 5, 1])[0]
    groups = r.choice([1, 1, 1, 2, 3])
    most = (5, 4, 2)[axes - 1]
    kernel = tuple(r.randint(1, most) for _ in range(axes))
    dilation = tuple(r.choice([1, 1, 1, 2, 3]) for _ in range(axes))
    stride = tuple(r.choice([1, 1, 1, 2, 3]) for _ in range(axes))
    padding: Any = tuple(r.randint(0, (3, 2, 1)[axes - 1]) for _ in range(axes))
    if r.random() < 0.25:
        padding, stride = "same", (1,) * axes
    elif r.random() < 0.1:
        padding = "valid"
    mode = r.choices(["zeros", "circular", "reflect", "replicate"], [12, 7, 1, 1])[0]
    made = CONVOLUTIONS[axes - 1](
        r.randint(1, 3) * groups,
        r.randint(1, 3) * groups,
        kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=r.random() < 0.3,
        padding_mode=mode,
    )
    return made, (made.in_channels, *spatial_size(r, made))


def spatial_size(r: random.Random, made: Any, largest: int | None = None) -> Shape:
    """A spatial size that a convolution accepts."""
    axes = len(made.kernel_size)
    most = largest or (20, 7, 3)[axes - 1]
    found = []
    for axis in range(axes):
        span = made.dilation[axis] * (made.kernel_size[axis] - 1)
        pad = made.padding if isinstance(made.padding, str) else made.padding[axis]
        if pad == "same":
            least = 1 if made.padding_mode == "zeros" else span - span // 2 + 1
        else:
            p = 0 if isinstance(pad, str) else int(pad)
            least = max(1, span + 1 - 2 * p, 0 if made.padding_mode == "zeros" else p + 1)
        found.append(r.randint(least, max(least, most)))
    return tuple(found)


# ------------------------------------------------------------------------------------------------- networks


def activation(r: random.Random, *, monotone: bool = False, even: bool = True) -> nn.Module:
    """A supported activation with slopes of at most one; `monotone` for a Potential, `even` channels for MaxMin."""
    rising: list[Callable[[], nn.Module]] = [
        lambda: nn.ELU(r.choice([1.0, 1.0, r.uniform(0, 1)])),
        lambda: nn.CELU(r.uniform(0.1, 3)),
        lambda: nn.LeakyReLU(r.uniform(0, 1)),
        lambda: nn.Softplus(r.choice([1, 10, r.uniform(0.1, 30)]), r.choice([40, 45, r.uniform(40, 80)])),
        lambda: nn.Hardtanh(r.uniform(-3, 0), r.uniform(0.1, 3)),
        nn.ReLU,
        nn.Tanh,
        nn.Softsign,
        nn.LogSigmoid,
        nn.Sigmoid,
    ]
    others: list[Callable[[], nn.Module]] = [
        lambda: LipSwish(log_uniform(r, -2, 2)),
        lambda: Sine(log_uniform(r, -1, 1)),
        lambda: nn.ELU(-r.random()),
        lambda: nn.LeakyReLU(-r.random()),
        MaxMin if even else nn.Identity,
    ]
    return r.choice(rising if monotone else rising + others)()


def branch(
    r: random.Random, shape: Shape | None = None, *, lipschitz: float | None = None, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Shape, float]:
    """A network g of supported parts with Lip(g) at most a random number below one, for inputs of this shape.

    Returns g, the shape, and the product of the norms of its layers.
    """
    shape = shape or (vector_shape(r) if r.random() < 0.7 else image_shape(r))
    g = _network(r, shape)
    want = r.choice([r.uniform(0.05, 0.9), r.uniform(0.9, 0.97)]) if lipschitz is None else lipschitz
    g.to(torch.float64)
    scale_(g, shape, want)
    bias_(g, r)
    return g.to(dtype), shape, want


def vector_shape(r: random.Random) -> Shape:
    """The shape of a small vector."""
    return (r.choice([1, 2, 2, 3, 4, 6, 10]),)


def image_shape(r: random.Random) -> Shape:
    """The shape of a small image or signal."""
    channels = r.choice([1, 2, 2, 3])
    return (channels, r.randint(3, 7)) if r.random() < 0.4 else (channels, r.randint(2, 4), r.randint(2, 4))


def _network(r: random.Random, shape: Shape) -> nn.Sequential:
    if len(shape) > 1 and r.random() < 0.2:  # fully connected, between reshapings
        d = math.prod(shape)
        return nn.Sequential(nn.Flatten(), *_network(r, (d,)), nn.Unflatten(1, shape))
    if r.random() < 0.15:
        width = shape[0] + r.randint(0, 6)
        layer = _layer(r, shape, width, potential=True)
        return nn.Sequential(Potential(cast(Any, layer), activation(r, monotone=True)))
    channels, found = shape[0], list[nn.Module]()
    if r.random() < 0.2:
        found.append(activation(r, even=channels % 2 == 0))
    for _ in range(r.choice([0, 1, 1, 2, 3])):
        width = r.choice([1, 2, r.randint(1, 4), r.randint(4, 16 if len(shape) == 1 else 6)])
        if r.random() < 0.15:
            f = nn.Sequential(_layer(r, (channels, *shape[1:]), width), activation(r, even=width % 2 == 0))
            found.append(Concatenated(f))
            cast(Tensor, found[-1].angle).data.fill_(r.uniform(-4, 4))
            channels += width
        else:
            found.append(_layer(r, (channels, *shape[1:]), width))
            channels = width
        found += [activation(r, even=channels % 2 == 0)] if r.random() < 0.85 else []
        found += [nn.Identity()] if r.random() < 0.05 else []
    found.append(_layer(r, (channels, *shape[1:]), shape[0]))
    if r.random() < 0.15:
        found.append(activation(r, even=shape[0] % 2 == 0))
    if len(found) > 2 and r.random() < 0.15:  # nested
        cut = r.randrange(1, len(found))
        found = [nn.Sequential(*found[:cut]), nn.Sequential(nn.Sequential(*found[cut:]))]
    return nn.Sequential(*found)


def _layer(r: random.Random, shape: Shape, out: int, *, potential: bool = False) -> nn.Module:
    bias = r.random() < 0.8
    if len(shape) == 1:
        made: Any = nn.Linear(shape[0], out, bias=bias)
    else:
        kernel = tuple(r.choice([1, 3]) for _ in shape[1:])
        padding: Any = tuple(k // 2 for k in kernel)
        mode = "zeros" if potential else r.choices(["zeros", "circular"], [3, 1])[0]
        if not potential and r.random() < 0.2:
            kernel, padding = tuple(r.choice([1, 2, 3]) for _ in shape[1:]), "same"
        made = CONVOLUTIONS[len(shape) - 2](shape[0], out, kernel, padding=padding, bias=bias, padding_mode=mode)
    made.to(torch.float64)
    fill_(made.weight, r)
    return cast(nn.Module, made)


def linear_layers(g: nn.Module, shape: Shape) -> list[tuple[nn.Module, Shape, int]]:
    """(layer, its input shape, how often its norm counts) of all linear layers of g; 0 for those in a Concatenated."""
    found, _ = _walk(g, shape, 1)
    return found


def _walk(g: nn.Module, shape: Shape, times: int) -> tuple[list[tuple[nn.Module, Shape, int]], Shape]:
    if isinstance(g, nn.Sequential):
        found = []
        for child in g:
            more, shape = _walk(child, shape, times)
            found += more
        return found, shape
    if isinstance(g, Conditioned):
        first, shape = _walk(g.first, shape, times)
        rest, shape = _walk(g.rest, shape, times)
        return first + rest, shape
    if isinstance(g, Concatenated):
        found, made = _walk(g.f, shape, 0)
        return found, (shape[0] + made[0], *shape[1:])
    if isinstance(g, Potential):
        return [(g.layer, shape, 2 * times)], shape
    if isinstance(g, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        with torch.no_grad():
            after = g(torch.zeros(1, *shape, dtype=g.weight.dtype)).shape[1:]
        return [(g, shape, times)], tuple(after)
    if isinstance(g, nn.Flatten | nn.Unflatten):
        return [], tuple(g(torch.empty(1, *shape)).shape[1:])
    return [], shape


@torch.no_grad()
def scale_(g: nn.Module, shape: Shape, lipschitz: float) -> None:
    """Scale the layers so that their norms multiply to `lipschitz`; those in a Concatenated get a norm of one."""
    layers = linear_layers(g, shape)
    root = lipschitz ** (1 / max(1, sum(times for _, _, times in layers)))
    for made, at, times in layers:
        weight = cast(Tensor, made.weight)
        norm = spectral_norm(dense(made, at))
        if norm > 0:
            weight.mul_((root if times else 1.0) / norm)


@torch.no_grad()
def bias_(g: nn.Module, r: random.Random) -> None:
    """Draw biases of ordinary size, or so large that rounding matters."""
    biases = [p for name, p in g.named_parameters() if name.endswith("bias")]
    size = log_uniform(r, -3, 0) if r.random() < 0.6 else log_uniform(r, 0, 8)
    for p in biases:
        p.copy_(size * torch.randn(p.shape, generator=generator(r), dtype=torch.float64))


@torch.no_grad()
def clamp_biases_(g: nn.Module) -> None:
    """Limit biases to [-1, 1]."""
    for name, p in g.named_parameters():
        if name.endswith("bias"):
            p.clamp_(-1, 1)


@torch.no_grad()
def cancel_(g: nn.Sequential, shape: Shape) -> None:
    """Set the last bias so that g(0) = 0: g is then small although its intermediate values are large."""
    last = g[-1]
    bias = getattr(last, "bias", None)
    if bias is not None and isinstance(last, nn.Linear):
        bias.sub_(g(torch.zeros(1, *shape, dtype=bias.dtype))[0])


def conditional_network(r: random.Random, dtype: torch.dtype) -> tuple[Conditioned, Shape, int]:
    """A conditional network, its input shape and the size of its context.

    Its embedding has few binary digits, so that every precision evaluates it exactly.
    """
    shape, width, size = vector_shape(r), r.randint(1, 8), r.randint(1, 3)
    first = nn.Sequential(_layer(r, shape, width))
    rest = nn.Sequential(activation(r, even=width % 2 == 0), _layer(r, (width,), shape[0]))
    embed = nn.Linear(size, width)
    with torch.no_grad():
        for p in embed.parameters():
            p.copy_(torch.randint(-8, 9, p.shape, generator=generator(r)) / 4)
    g = Conditioned(first, embed, rest).to(torch.float64)
    scale_(g, shape, r.uniform(0.1, 0.95))
    return g.to(dtype), shape, size


def inputs(r: random.Random, count: int, shape: Shape, dtype: torch.dtype, *, largest: float = 4) -> Tensor:
    """Random inputs of a random scale."""
    high = min(largest, 2.0) if dtype == torch.float16 else largest
    x = torch.randn(count, *shape, generator=generator(r), dtype=torch.float64)
    return (x * log_uniform(r, -3, high)).to(dtype)

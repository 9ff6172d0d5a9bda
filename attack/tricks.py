"""What honest PyTorch can do to a network: subclasses, hooks, parametrizations, attributes, wrappers, unknown parts.

A trick takes a network g, a sequence of supported parts for rows or signals, and changes its function, most often so that
it expands. It returns the network, the same object or another. `TRICKS` has them all by name; those of `AFTERWARDS` can
be played on the network of a block that exists. A trick that does not fit a network raises `Unfit`.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import iresnet
from iresnet.lipschitz import Concatenated, Conditioned, LipSwish, Potential, Sine

Trick: TypeAlias = Callable[[random.Random, nn.Sequential], nn.Module]

TRICKS: dict[str, Trick] = {}
AFTERWARDS: dict[str, Trick] = {}


class Unfit(Exception):
    """The trick has nothing to act on in this network."""


def trick(function: Trick) -> Trick:
    """Register a trick that builds another network."""
    TRICKS[function.__name__.strip("_")] = function
    return function


def afterwards(function: Trick) -> Trick:
    """Register a trick that changes a network in place."""
    AFTERWARDS[function.__name__.strip("_")] = function
    return trick(function)


# ------------------------------------------------------------------------------------------------- where to act


def linear(r: random.Random, g: nn.Module) -> Any:
    """A linear layer of g, wherever it is."""
    return _pick(r, g, nn.Linear | nn.Conv1d | nn.Conv2d)


def unchanged(r: random.Random, g: nn.Module) -> Any:
    """A linear layer of g whose weight is still a plain parameter."""
    layer = linear(r, g)
    if "weight" not in layer._parameters:
        raise Unfit
    return layer


def convolution(r: random.Random, g: nn.Module) -> Any:
    """A convolution of g."""
    return _pick(r, g, nn.Conv1d | nn.Conv2d)


def act(r: random.Random, g: nn.Module) -> Any:
    """An activation of g."""
    return _pick(r, g, nn.ELU | nn.ReLU | nn.Tanh | nn.Softplus | nn.LeakyReLU | nn.CELU | LipSwish | Sine | nn.Hardtanh)


def _pick(r: random.Random, g: nn.Module, kinds: Any) -> Any:
    found = [m for m in g.modules() if isinstance(m, kinds)]
    if not found:
        raise Unfit
    return r.choice(found)


def replace(g: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """Put another module in the place of one."""
    for parent in list(g.modules()):
        for name, child in list(parent._modules.items()):
            if child is old:
                parent._modules[name] = new
    return new if g is old else g


def subclassed(layer: nn.Module, **methods: Any) -> nn.Module:
    """The layer as an instance of a user's subclass with these methods."""
    twin = copy.copy(layer)
    twin.__dict__ = dict(layer.__dict__)
    twin.__class__ = type(f"User{type(layer).__name__}", (type(layer),), {**methods, "__module__": __name__})
    return twin


def factor(r: random.Random) -> float:
    """By how much a trick lets the function expand."""
    return r.choice([3.0, 30.0, -4.0, 1.5])


# ------------------------------------------------------------------------------------------------- subclasses


@trick
def subclass_forward(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer, k = r.choice([linear, act])(r, g), factor(r)
    parent = type(layer).forward
    return replace(g, layer, subclassed(layer, forward=lambda self, x: k * parent(self, x)))


@trick
def subclass_conv_forward(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer, k = convolution(r, g), factor(r)
    parent = type(layer)._conv_forward
    return replace(g, layer, subclassed(layer, _conv_forward=lambda self, x, w, b: parent(self, x, k * w, b)))


@trick
def subclass_call(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer, k = r.choice([linear, act])(r, g), factor(r)
    parent = type(layer).__call__
    return replace(g, layer, subclassed(layer, __call__=lambda self, x: k * parent(self, x)))


@trick
def subclass_call_impl(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer, k = r.choice([linear, act])(r, g), factor(r)
    return replace(g, layer, subclassed(layer, _call_impl=lambda self, x: k * self.forward(x)))


@trick
def subclass_weight_property(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer, k = unchanged(r, g), factor(r)
    return replace(g, layer, subclassed(layer, weight=property(lambda self: k * self._parameters["weight"])))


@trick
def subclass_attribute_property(r: random.Random, g: nn.Sequential) -> nn.Module:
    """A property that says one thing at first and another when the layer is called."""
    layer = _pick(r, g, nn.ELU | nn.LeakyReLU)
    name = "alpha" if isinstance(layer, nn.ELU) else "negative_slope"
    return replace(g, layer, subclassed(layer, **{name: property(lambda self: 9.0)}))


@trick
def subclass_getattr(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer, k = unchanged(r, g), factor(r)

    def found(self: Any, name: str) -> Any:
        value = nn.Module.__getattr__(self, name)
        return k * value if name == "weight" else value

    return replace(g, layer, subclassed(layer, __getattr__=found))


@trick
def subclass_by_mode(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer, k = linear(r, g), factor(r)
    parent = type(layer).forward
    return replace(
        g, layer, subclassed(layer, forward=lambda self, x: (1 if self.training else k) * parent(self, x))
    )


class Twice(nn.Sequential):
    """A sequence that is run twice, scaled up."""

    def forward(self, input: Any) -> Any:
        return 3 * super().forward(input)


class Skip(nn.Sequential):
    """A sequence with a skip connection."""

    def forward(self, input: Any) -> Any:
        return input + super().forward(input)


class Called(nn.Sequential):
    """A sequence with a call of its own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return 3 * super().__call__(*args, **kwargs)


class Repeated(nn.Sequential):
    """A sequence that lists its first layer once and runs it three times."""

    def __iter__(self) -> Any:
        children = list(self._modules.values())
        return iter([children[0]] * 1 + children)


@trick
def subclass_sequential(r: random.Random, g: nn.Sequential) -> nn.Module:
    return r.choice([Twice, Skip, Called])(*g)


@trick
def subclass_nested(r: random.Random, g: nn.Sequential) -> nn.Module:
    return nn.Sequential(r.choice([Twice, Called])(*g))


@trick
def subclass_combinator(r: random.Random, g: nn.Sequential) -> nn.Module:
    """Subclasses of the library's own combinators."""
    found = [m for m in g.modules() if isinstance(m, Potential | Concatenated)]
    if not found:
        raise Unfit
    layer, k = r.choice(found), factor(r)
    parent = type(layer).forward
    return replace(g, layer, subclassed(layer, forward=lambda self, x: k * parent(self, x)))


class Steep(nn.ELU):
    """A user's activation that expands, with a parameter that is parametrized: its class is then made by torch."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(3.0, dtype=torch.float64))

    def forward(self, input: Tensor) -> Tensor:
        return F.elu(input) * self.gain.to(input.dtype)


class Times(nn.Module):
    """A parametrization W -> k W."""

    def __init__(self, k: float) -> None:
        super().__init__()
        self.k = k

    def forward(self, w: Tensor) -> Tensor:
        return self.k * w


@trick
def parametrized_activation(r: random.Random, g: nn.Sequential) -> nn.Module:
    steep = Steep()
    parametrize.register_parametrization(steep, "gain", Times(factor(r)))
    return replace(g, act(r, g), steep)


@trick
def parametrized_lipswish(r: random.Random, g: nn.Sequential) -> nn.Module:
    swish = LipSwish().to(torch.float64)
    parametrize.register_parametrization(swish, "raw_beta", Times(factor(r)))
    return replace(g, act(r, g), swish)


# ------------------------------------------------------------------------------------------------- instance attributes


@afterwards
def instance_forward(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer, k = r.choice([linear, act, lambda r, g: g])(r, g), factor(r)
    parent = layer.forward
    layer.forward = lambda x: k * parent(x)
    return g


@afterwards
def instance_conv_forward(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer, k = convolution(r, g), factor(r)
    parent = layer._conv_forward
    layer._conv_forward = lambda x, w, b: parent(x, k * w, b)
    return g


@afterwards
def instance_call_impl(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer, k = r.choice([linear, act, lambda r, g: g])(r, g), factor(r)
    layer._call_impl = lambda x: k * layer.forward(x)
    return g


@afterwards
def instance_compiled(r: random.Random, g: nn.Sequential) -> nn.Module:
    """What `module.compile(backend=...)` leaves behind, for a backend that changes the function."""
    layer, k = r.choice([linear, act, lambda r, g: g])(r, g), factor(r)
    layer._compiled_call_impl = lambda x: k * layer.forward(x)
    return g


@afterwards
def attributes(r: random.Random, g: nn.Sequential) -> nn.Module:
    """An attribute of an activation that decides its slope."""
    layer = act(r, g)
    match layer:
        case nn.ELU():
            layer.alpha = r.choice([8.0, -3.0, 0.5])
        case nn.CELU():
            layer.alpha = r.choice([-0.3, 5.0])
        case nn.LeakyReLU():
            layer.negative_slope = r.choice([4.0, -4.0])
        case nn.Softplus():
            layer.beta, layer.threshold = r.choice([(1, 0.1), (3, 1.0), (-1, 20)])
        case Sine():
            layer.frequency = r.choice([-3.0, 5.0, 1e-9])
        case LipSwish():
            with torch.no_grad():
                layer.raw_beta.fill_(r.choice([-50.0, 50.0, 1e6]))
        case nn.Hardtanh():
            layer.min_val, layer.max_val = r.choice([(3.0, -3.0), (-9.0, 9.0)])
        case _:
            layer.inplace = True
    return g


@afterwards
def convolution_attributes(r: random.Random, g: nn.Sequential) -> nn.Module:
    """Attributes of a convolution that keep the shape and change the operator."""
    layer = convolution(r, g)
    kernel = layer.kernel_size
    if r.random() < 0.5:
        layer.padding_mode = r.choice(["circular", "reflect", "replicate", "zeros"])
    else:
        layer.dilation = tuple(2 if k == 3 else 1 for k in kernel)
        layer.padding = tuple(2 if k == 3 else 0 for k in kernel)
    return g


@afterwards
def in_place(r: random.Random, g: nn.Sequential) -> nn.Module:
    found = [m for m in g.modules() if hasattr(m, "inplace")]
    if not found:
        raise Unfit
    r.choice(found).inplace = True
    return g


@trick
def in_place_first(r: random.Random, g: nn.Sequential) -> nn.Module:
    """An activation in place before which nothing makes a copy of x."""
    inplace = r.choice([nn.ReLU(inplace=True), nn.ELU(inplace=True), nn.Hardtanh(-0.1, 0.1, inplace=True)])
    front: list[nn.Module] = [r.choice([nn.Identity(), nn.Sequential(), nn.Flatten(1, 1), nn.Unflatten(1, (-1,))])]
    return nn.Sequential(*(front if r.random() < 0.8 else []), inplace, *g)


# ------------------------------------------------------------------------------------------------- hooks


@afterwards
def forward_hook(r: random.Random, g: nn.Sequential) -> nn.Module:
    k = factor(r)
    _anywhere(r, g).register_forward_hook(lambda module, inputs, output: k * output)
    return g


@afterwards
def forward_hook_kwargs(r: random.Random, g: nn.Sequential) -> nn.Module:
    k = factor(r)
    _anywhere(r, g).register_forward_hook(lambda m, inputs, kwargs, output: k * output, with_kwargs=True)
    return g


@afterwards
def forward_pre_hook(r: random.Random, g: nn.Sequential) -> nn.Module:
    k = factor(r)
    _anywhere(r, g).register_forward_pre_hook(lambda module, inputs: (k * inputs[0],))
    return g


@afterwards
def backward_hook(r: random.Random, g: nn.Sequential) -> nn.Module:
    """Changes gradients, not the function: what is computed by products with J' is no longer right."""
    _anywhere(r, g).register_full_backward_hook(lambda module, to_input, to_output: tuple(3 * t for t in to_input))
    return g


@afterwards
def watching_hook(r: random.Random, g: nn.Sequential) -> nn.Module:
    """A hook that only looks, as those of profilers and of feature extractors do."""
    seen = list[Tensor]()
    _anywhere(r, g).register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    return g


def _anywhere(r: random.Random, g: nn.Module) -> nn.Module:
    return r.choice([m for m in g.modules() if not isinstance(m, parametrize.ParametrizationList | Times)])


# ------------------------------------------------------------------------------------------------- weights


@afterwards
def own_parametrization(r: random.Random, g: nn.Sequential) -> nn.Module:
    parametrize.register_parametrization(linear(r, g), "weight", Times(factor(r)))
    return g


@afterwards
def weight_norm(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer = linear(r, g)
    parametrizations.weight_norm(layer)
    with torch.no_grad():
        next(iter(layer.parametrizations.weight.parameters())).mul_(abs(factor(r)))
    return g


@afterwards
def spectral_norm(r: random.Random, g: nn.Sequential) -> nn.Module:
    parametrizations.spectral_norm(linear(r, g))
    return g


@afterwards
def orthogonal(r: random.Random, g: nn.Sequential) -> nn.Module:
    parametrizations.orthogonal(_pick(r, g, nn.Linear))
    return g


@afterwards
def old_weight_norm(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer = unchanged(r, g)
    nn.utils.weight_norm(layer)
    with torch.no_grad():
        layer.weight_g.mul_(abs(factor(r)))  # the weight is made anew by a hook of the next call
    return g


@afterwards
def old_spectral_norm(r: random.Random, g: nn.Sequential) -> nn.Module:
    nn.utils.spectral_norm(unchanged(r, g))
    return g


@afterwards
def pruned(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer = unchanged(r, g)
    prune.l1_unstructured(layer, "weight", amount=0.3)
    with torch.no_grad():
        layer.weight_orig.mul_(abs(factor(r)))  # the weight is made anew by a hook of the next call
    return g


class Louder(Tensor):
    """A weight whose products are three times as large."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        if function in (F.linear, F.conv1d, F.conv2d):
            return 3 * result.as_subclass(Tensor)
        return result


@afterwards
def tensor_subclass(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer = unchanged(r, g)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Louder))
    return g


@afterwards
def tied_weights(r: random.Random, g: nn.Sequential) -> nn.Module:
    layers = [m for m in g.modules() if isinstance(m, nn.Linear) and "weight" in m._parameters]
    pairs = [(a, b) for a in layers for b in layers if a is not b and a.weight.shape == b.weight.shape]
    if not pairs:
        raise Unfit
    a, b = r.choice(pairs)
    a.weight = b.weight
    with torch.no_grad():
        b.weight.mul_(r.choice([1.0, 3.0]))
    return g


@trick
def shared_layer(r: random.Random, g: nn.Sequential) -> nn.Module:
    """One layer used several times."""
    return nn.Sequential(*g, *list(g) * r.randint(1, 2))


@afterwards
def plain_tensor(r: random.Random, g: nn.Sequential) -> nn.Module:
    """A weight that is a tensor and no parameter."""
    layer = unchanged(r, g)
    weight = factor(r) * layer.weight.detach()
    del layer.weight
    layer.weight = weight
    return g


@afterwards
def scaled_weight(r: random.Random, g: nn.Sequential) -> nn.Module:
    """A weight written in place, which no class can see."""
    unchanged(r, g).weight.data.mul_(factor(r))
    return g


@afterwards
def stale_padding(r: random.Random, g: nn.Sequential) -> nn.Module:
    """A circular convolution pads by what it noted when it was made, not by its attribute."""
    found = [m for m in g.modules() if isinstance(m, nn.Conv1d | nn.Conv2d) and m.padding_mode == "circular"]
    if not found:
        raise Unfit
    layer = r.choice(found)
    if r.random() < 0.5:
        layer.padding = tuple(0 for _ in layer.kernel_size)
    else:
        layer.padding = "same"
    return g


@afterwards
def rolled_padding(r: random.Random, g: nn.Sequential) -> nn.Module:
    """The note itself is changed: all of the padding on one side."""
    found = [m for m in g.modules() if isinstance(m, nn.Conv1d | nn.Conv2d) and m.padding_mode == "circular"]
    if not found:
        raise Unfit
    layer = r.choice(found)
    pads = list(layer._reversed_padding_repeated_twice)
    layer._reversed_padding_repeated_twice = [p for a, b in zip(pads[::2], pads[1::2], strict=True) for p in (a + b, 0)]
    return g


@afterwards
def strange_layout(r: random.Random, g: nn.Sequential) -> nn.Module:
    """Weights that are views: sparse, expanded, negated lazily, transposed."""
    layer = unchanged(r, g)
    w = layer.weight.detach()
    match r.randrange(4):
        case 0 if w.dim() == 2:
            w = (factor(r) * w).to_sparse()
        case 1:
            w = w[:1].expand_as(w) * 1 if r.random() < 0.5 else w[:1].expand_as(w)
        case 2:
            w = torch.complex(torch.zeros_like(w), factor(r) * w).conj().imag
        case _:
            w = (factor(r) * w).transpose(0, 1).contiguous().transpose(0, 1)
    layer.weight = nn.Parameter(w)
    return g


@afterwards
def tensor_setting(r: random.Random, g: nn.Sequential) -> nn.Module:
    """A slope that is a tensor, changed in place after it was set."""
    layer = _pick(r, g, nn.ELU | nn.LeakyReLU)
    name = "alpha" if isinstance(layer, nn.ELU) else "negative_slope"
    slope = torch.tensor(0.5)
    setattr(layer, name, slope)
    if r.random() < 0.7:
        iresnet.lipschitz.lipschitz_constant(layer)
        slope.fill_(abs(factor(r)))
    return g


@afterwards
def not_numbers(r: random.Random, g: nn.Sequential) -> nn.Module:
    """A bias or a parameter of an activation that is not a number."""
    found = [p for name, p in g.named_parameters() if name.split(".")[-1] in ("bias", "raw_beta", "angle")]
    if not found:
        raise Unfit
    with torch.no_grad():
        r.choice(found).view(-1)[0] = r.choice([float("nan"), float("inf"), float("-inf")])
    return g


class Echoing(nn.ModuleList):
    """A list that iterates over its modules twice."""

    def __iter__(self) -> Any:
        return iter([*self._modules.values(), *self._modules.values()])


@trick
def meta_numbers(r: random.Random, g: nn.Sequential) -> nn.Module:
    """A weight that is not a number."""
    layer = unchanged(r, g)
    with torch.no_grad():
        layer.weight.view(-1)[0] = r.choice([float("nan"), float("inf")])
    return g


# ------------------------------------------------------------------------------------------------- unknown parts


class Hidden(nn.Module):
    """A user's network whose forward is its own."""

    def __init__(self, inner: nn.Module, k: float) -> None:
        super().__init__()
        self.inner, self.k = inner, k

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, x + self.k * self.inner(x))


class Counting(nn.Module):
    """A function that is another one at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + self.calls % 5)


@trick
def hidden_skip(r: random.Random, g: nn.Sequential) -> nn.Module:
    return r.choice([lambda: Hidden(g, factor(r)), lambda: nn.Sequential(Hidden(g, factor(r)))])()


@trick
def unknown_layer(r: random.Random, g: nn.Sequential) -> nn.Module:
    """A module of torch's that has no rule, or one with a slope above one, somewhere in g."""
    makers: list[Callable[[], nn.Module]] = [
        lambda: nn.Dropout(0.5),
        lambda: nn.AlphaDropout(0.5),
        lambda: nn.LayerNorm([], elementwise_affine=False),
        lambda: nn.PReLU(init=4.0),
        lambda: nn.Softmax(1),
        nn.Mish,
        nn.Hardswish,
        nn.GELU,
        nn.SiLU,
        nn.SELU,
        nn.ReLU6,
        nn.RReLU,
        lambda: nn.RReLU(3.0, 4.0),
        nn.Tanhshrink,
        lambda: nn.Hardshrink(0.1),
        lambda: nn.Threshold(0.1, 20.0),
        lambda: nn.Softshrink(0.1),
        nn.Hardsigmoid,
        lambda: nn.ELU(7.0),
        lambda: nn.LeakyReLU(-5.0),
        lambda: nn.Softplus(threshold=0.1),
        lambda: nn.LocalResponseNorm(2),
        lambda: nn.ChannelShuffle(1),
        Counting,
        lambda: Times(3.0),
    ]
    layers = list(g)
    layers.insert(r.randint(0, len(layers)), r.choice(makers)())
    return nn.Sequential(*layers)


@trick
def batch_norm(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer = linear(r, g)
    made: Any = nn.BatchNorm1d if layer.weight.dim() < 4 else nn.BatchNorm2d
    return replace(g, layer, nn.Sequential(layer, made(len(layer.weight), dtype=layer.weight.dtype)))


@trick
def transposed(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer = _pick(r, g, nn.Conv1d)
    made = nn.ConvTranspose1d(layer.in_channels, layer.out_channels, 3, padding=1, dtype=layer.weight.dtype)
    return replace(g, layer, made)


@trick
def mixed_samples(r: random.Random, g: nn.Sequential) -> nn.Module:
    """Reshapings that join two samples: a function of the batch, not of a sample."""
    first = next((m for m in g.modules() if isinstance(m, nn.Linear)), None)
    if first is None or not isinstance(g[0], nn.Linear):
        raise Unfit
    d = first.in_features
    joint = nn.Linear(2 * d, 2 * d, dtype=first.weight.dtype)
    nn.init.orthogonal_(joint.weight)
    with torch.no_grad():
        joint.weight.mul_(0.5)
    return nn.Sequential(nn.Flatten(0, 1), nn.Unflatten(0, (-1, 2 * d)), joint, nn.Flatten(0, 1), nn.Unflatten(0, (-1, d)))


# ------------------------------------------------------------------------------------------------- wrappers


@trick
def averaged(r: random.Random, g: nn.Sequential) -> nn.Module:
    wrapped = torch.optim.swa_utils.AveragedModel(g)
    with torch.no_grad():
        for p in wrapped.parameters():
            p.mul_(factor(r))
    return wrapped


@trick
def wrapped_forward(r: random.Random, g: nn.Sequential) -> nn.Module:
    """A wrapper of torch's whose forward was replaced, or that has a hook."""
    wrapped = r.choice([torch.optim.swa_utils.AveragedModel, nn.DataParallel])(g)
    inner, k = wrapped.module, factor(r)
    match r.randrange(3):
        case 0:
            wrapped.forward = lambda x: k * inner(x)
        case 1:
            wrapped._call_impl = lambda x: k * inner(x)
        case _:
            wrapped.register_forward_hook(lambda module, inputs, output: k * output)
    return wrapped


@trick
def wrapped_subclass(r: random.Random, g: nn.Sequential) -> nn.Module:
    class Loud(nn.DataParallel):
        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, 3 * self.module(x))

    return Loud(g)


@trick
def data_parallel(r: random.Random, g: nn.Sequential) -> nn.Module:
    return nn.DataParallel(g)


@trick
def traced(r: random.Random, g: nn.Sequential) -> nn.Module:
    return cast(nn.Module, torch.fx.symbolic_trace(g))


@trick
def compiled(r: random.Random, g: nn.Sequential) -> nn.Module:
    """`torch.compile`, rarely, as it takes a while; else what it wraps, with a hook on the wrapper."""
    wrapped = cast(nn.Module, torch.compile(g, backend="eager"))
    k = factor(r)
    wrapped.register_forward_hook(lambda module, inputs, output: k * output)
    return wrapped


@trick
def listed(r: random.Random, g: nn.Sequential) -> nn.Module:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(g)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x) * 2
            return x

    return Listed()


@trick
def nested_block(r: random.Random, g: nn.Sequential) -> nn.Module:
    """A residual block as the network of another."""
    return r.choice([lambda: iresnet.ResidualBlock(g), lambda: nn.Sequential(iresnet.ResidualBlock(g), *g)])()


@trick
def constrained_over(r: random.Random, g: nn.Sequential) -> nn.Module:
    """The library's constraint on top of another parametrization, or below one."""
    layer = linear(r, g)
    below = r.choice([own_parametrization, weight_norm, spectral_norm])
    if r.random() < 0.5:
        below(r, cast(nn.Sequential, nn.Sequential(layer)))
        iresnet.constrain_(g, coefficient=0.9)
    else:
        iresnet.constrain_(g, coefficient=0.9)
        own_parametrization(r, cast(nn.Sequential, nn.Sequential(layer)))
    return g


@trick
def subclass_conditioned(r: random.Random, g: nn.Sequential) -> nn.Module:
    class Scaled(Conditioned):
        def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
            return cast(Tensor, 3 * self.rest(self.first(x)))

    return Scaled(g, nn.Identity(), nn.Identity())


@trick
def harmless(r: random.Random, g: nn.Sequential) -> nn.Module:
    """No trick at all."""
    return g

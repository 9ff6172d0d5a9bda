"""Constrained layers: `LipschitzLinear`, `LipschitzConv2d`, and `constrain_` for your own network (Eq. 2)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from .. import spectral
from .activations import check_contractive, lipschitz_constant
from .conditioned import Conditioned
from .constraint import SpectralCap
from .dense import Concatenated
from .parametrized import check_coefficient, constrain_layer_
from .potential import Potential
from .rules import NormRule, default_rule

#: Steps of power iteration for an initial norm, which need not be accurate.
INITIAL_ITERATIONS = 20


def constrain_(
    module: nn.Module,
    coefficient: float | None = None,
    *,
    lipschitz: float | None = None,
    norm: NormRule | None = None,
    initial_norm: float = 0.0,
    input_size: tuple[int, ...] | None = None,
) -> nn.Module:
    """Constrain every linear and convolution layer of a module, in place, so that your own network is contractive.

    Give `coefficient` per layer, or `lipschitz` for a whole `nn.Sequential`: each of n layers gets the n-th root. The
    layer of a `Potential` counts twice; layers inside a `Concatenated`, whose constant is at most 1 anyway, do not
    count. The embedding of a `Conditioned` network is not constrained: only layers that act on x are.

    The constraint scales weights down, never up. With `initial_norm`, in (0, 1], the weights of every layer are first
    scaled to that fraction of its coefficient: torch's initial weights of wide layers have small norms. Convolutions
    have that norm for inputs of the spatial size `input_size`; by default a few kernels wide.

    >>> g = constrain_(nn.Sequential(nn.Linear(2, 16), nn.ELU(), nn.Linear(16, 2)), lipschitz=0.9)
    >>> from iresnet import certify, ResidualBlock
    >>> certify(ResidualBlock(g)).passed
    True
    """
    layers = list(
        dict.fromkeys(m for m in _modules_acting_on_x(module) if _is_linear(m))
    )  # a layer that is used twice counts once
    _refuse_unknown(module)
    if not layers:
        raise ValueError(f"a module to constrain must have a Linear or Conv layer; {type(module).__name__} has none.")
    if (coefficient is None) == (lipschitz is None):
        raise ValueError("give either coefficient (per layer) or lipschitz (for the whole module), not both or none.")
    if not 0 <= initial_norm <= 1:
        raise ValueError(f"initial_norm must lie in [0, 1]; got {initial_norm}. It is relative to the coefficient.")
    if lipschitz is not None:
        if not 0 < lipschitz < 1:
            raise ValueError(f"lipschitz must lie in (0, 1); got {lipschitz}.")
        for m in _modules_acting_on_x(module):
            if not (_is_linear(m) or _is_composable(m) or lipschitz_constant(m) is not None):
                raise ValueError(
                    "lipschitz= needs an nn.Sequential of layers and known activations, whose constants multiply; got "
                    f"{type(m).__name__}. Use coefficient= and state the constant: ResidualBlock(g, lipschitz=...)."
                )
        coefficient = lipschitz ** (1 / _count_factors(module, layers))
    assert coefficient is not None
    check_coefficient(coefficient)
    for layer in layers:  # check all of them before any is changed
        _refuse_foreign(layer)
        axes = len(spectral.weight_shape(layer)) - 2
        if axes and input_size is not None and len(input_size) != axes:
            raise ValueError(f"input_size must have a number for each of {axes} axes; got {input_size}.")
    for layer in layers:
        if initial_norm:
            _scale_norm_(layer, initial_norm * coefficient, input_size)
        constrain_layer_(layer, coefficient, default_rule(spectral.weight_shape(layer)) if norm is None else norm)
    return module


@torch.no_grad()
def _scale_norm_(layer: nn.Module, norm: float, size: tuple[int, ...] | None) -> None:
    """Scale the weight of a layer to this norm, as power iteration estimates it; a zero weight stays zero."""
    weight = cast(nn.Parameter, layer.weight)
    shape = None if size is None or isinstance(layer, nn.Linear) else (cast(nn.Conv2d, layer).in_channels, *size)
    if (sigma := spectral.norm_estimate(layer, shape, INITIAL_ITERATIONS)) > 0:
        weight.mul_(norm / sigma)


def _count_factors(module: nn.Module, layers: list[nn.Module]) -> int:
    """Count the layer norms whose product is the Lipschitz constant of a module."""
    dense = {m for c in _modules_acting_on_x(module) if type(c) is Concatenated for m in _modules_acting_on_x(c)}
    count = sum(m not in dense for m in (*layers, *(p for p in _modules_acting_on_x(module) if type(p) is Potential)))
    if count < 1:
        raise ValueError("lipschitz= needs a Linear or Conv layer after the last Concatenated; got none.")
    return count


def _modules_acting_on_x(module: nn.Module) -> Iterable[nn.Module]:
    """Yield the modules that act on x: not the embedding of a context, nor torch's parametrizations."""
    yield module
    for name, child in module.named_children():
        if name != "parametrizations" and not (type(module) is Conditioned and name == "embed"):
            yield from _modules_acting_on_x(child)


def _is_composable(module: nn.Module) -> bool:
    return type(module) in (Concatenated, Conditioned, Potential) or (
        isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    )


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)


def _refuse_unknown(module: nn.Module) -> None:
    """Raise for modules that would silently break the Lipschitz bound."""
    for m in _modules_acting_on_x(module):
        if isinstance(m, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d | nn.AlphaDropout):
            raise ValueError(f"g must be the same function at every call; got {type(m).__name__}. Remove it.")
        if isinstance(m, nn.modules.batchnorm._NormBase | nn.LayerNorm | nn.GroupNorm):
            raise ValueError(
                f"{type(m).__name__} inside g has no Lipschitz bound; remove it, or use ActNorm before the block."
            )
        if isinstance(m, nn.modules.conv._ConvTransposeNd | nn.Bilinear | nn.MultiheadAttention | nn.RNNBase):
            raise ValueError(f"no Lipschitz bound is known for {type(m).__name__}; use Linear or Conv layers.")
        constant = lipschitz_constant(m)
        if constant is not None and not _is_linear(m):
            check_contractive(m)


def _refuse_foreign(layer: nn.Module) -> None:
    """Raise for a layer whose weight is not a plain parameter: lazy, parametrized, or computed by a hook."""
    kind, weight = parametrize.type_before_parametrizations(layer).__name__, layer._parameters.get("weight")
    if weight is not None and is_lazy(weight):
        raise ValueError(
            f"a layer to constrain must have a weight with a shape; that of {kind} is lazy. Pass a batch through it."
        )
    if parametrize.is_parametrized(layer, "weight"):
        rules = [type(p).__name__ for p in cast(Any, layer).parametrizations.weight if not isinstance(p, SpectralCap)]
    else:
        rules = ["a hook"] if weight is None else []
    if rules:
        raise ValueError(
            f"the weight of a layer to constrain must be a plain parameter; that of {kind} is computed by "
            f"{', '.join(rules)}. Remove that first: torch.nn.utils.parametrize.remove_parametrizations(layer, "
            "'weight'), or for the older functions remove_weight_norm, remove_spectral_norm or prune.remove."
        )


class LipschitzLinear(nn.Linear):
    """`nn.Linear` with ||W|| <= coefficient.

    >>> import torch
    >>> layer = LipschitzLinear(4, 4, coefficient=0.5)
    >>> bool(torch.linalg.matrix_norm(layer.weight, 2) < 0.501)
    True
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        coefficient: float = 0.9,
        norm: NormRule | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        constrain_layer_(self, coefficient, default_rule(tuple(self.weight.shape)) if norm is None else norm)


class LipschitzConv2d(nn.Conv2d):
    """`nn.Conv2d` whose operator, at the input sizes it sees, has norm at most `coefficient`."""

    def __init__(self, *args: Any, coefficient: float = 0.9, norm: NormRule | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        constrain_layer_(self, coefficient, default_rule(tuple(self.weight.shape)) if norm is None else norm)

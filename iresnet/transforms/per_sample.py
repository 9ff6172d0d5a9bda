"""Networks that are known to be functions of one sample: what is proven of a conditioner or an embedding relies on it.

They may be any network, and are never inverted or bounded. But a likelihood is one of a sample only if they compute the
same for it at every call and in every batch. Layers of this library do, and those layers of torch that are listed here,
some of them with a condition on their settings. Of all others nothing is known, such as attention and recurrent layers,
which take a batch of vectors for one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.jit import ScriptModule
from torch.nn.utils import parametrize

from ..lipschitz.activations import ACTIVATIONS, lipschitz_constant
from ..trust import unwrap, why_modified, wrapped_module

#: Classes of torch that hold code of a user's own: traced and scripted networks.
_HOLDING_CODE = (GraphModule, ScriptModule)

#: Layers of torch that draw random numbers in eval mode too.
_RANDOM_IN_EVAL = (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def _always(layer: Any) -> bool:
    return True


def _has_statistics(layer: Any) -> bool:
    return layer.running_mean is not None and layer.running_var is not None


def _along_axis(layer: Any) -> bool:
    """Whether an axis is given, and is not that of the batch; a negative one may turn out to be."""
    return isinstance(layer.dim, int) and layer.dim >= 1


def _along_last_axis(layer: Any) -> bool:
    return layer.dim == -1 or _along_axis(layer)


def _normalises_features(layer: Any) -> bool:
    return len(layer.normalized_shape) == 1


def _only_pads(layer: Any) -> bool:
    """Whether nothing is cropped: of inputs with few axes the first of them, the batch, might be shifted."""
    return all(n >= 0 for n in layer.padding)


def _keeps_weights(layer: Any) -> bool:
    return layer.max_norm is None


def _keeps_the_batch_axis(layer: Any) -> bool:
    return lipschitz_constant(layer) is not None


#: What is known of the classes of torch: whether a layer in eval mode treats every sample alone.
_RULES: dict[type, Callable[[Any], bool]] = {
    **dict.fromkeys(
        (
            nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict,
            parametrize.ParametrizationList,
            nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d,
            nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
            *(record.kind for record in ACTIVATIONS.values() if not record.is_reshape),
            nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Mish, nn.PReLU, nn.RReLU, nn.SELU, nn.Softshrink,
            nn.Tanhshrink, nn.Threshold,
            nn.AlphaDropout, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout,
            nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.LocalResponseNorm,
            nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d,
            nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
            nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
            nn.PixelShuffle, nn.PixelUnshuffle, nn.Upsample, nn.UpsamplingBilinear2d, nn.UpsamplingNearest2d,
            nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d,
            nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d,
            nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d,
        ),
        _always,
    ),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), _has_statistics),
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), _normalises_features),
    **dict.fromkeys((nn.GLU, nn.LogSoftmax, nn.Softmax, nn.Softmin), _along_last_axis),
    **dict.fromkeys(
        (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d),
        _only_pads,
    ),
    **dict.fromkeys((nn.Embedding, nn.EmbeddingBag), _keeps_weights),
    **dict.fromkeys((record.kind for record in ACTIVATIONS.values() if record.is_reshape), _keeps_the_batch_axis),
}  # fmt: skip


def why_no_function(network: nn.Module) -> str:
    """Return why a network may be no function of one sample, such as a user's own layer; empty if it is one.

    >>> why_no_function(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    ''
    >>> why_no_function(nn.Softmax(dim=0))
    'Softmax(dim=0) may mix the samples of a batch.'
    """
    return next(filter(None, map(_why_unknown, network.modules())), "")


def _why_unknown(module: nn.Module) -> str:
    """Why the function of a module is unknown; empty if its class and settings determine it, for every sample alone."""
    own: Any = type(module)
    kind = parametrize.type_before_parametrizations(module)
    if _is_users_own(own):
        return f"{kind.__name__} is a user's own layer."
    if isinstance(module, _RANDOM_IN_EVAL):
        return f"{kind.__name__} is a different function at every call."
    if kind.__module__.partition(".")[0] == "torch" and wrapped_module(module) is None:
        rule = _RULES.get(kind)
        if rule is None:
            return f"{kind.__name__} is not a layer that is known to treat every sample of a batch alone."
        if not rule(module):
            return f"{module} may mix the samples of a batch."
    reason = why_modified(module)
    return "" if reason is None else f"{type(module).__name__} {reason}"


@cache
def _is_users_own(kind: type) -> bool:
    """Whether modules of this class compute by code that is neither torch's nor this library's."""
    if kind.__module__ == parametrize.__name__ and kind is not parametrize.ParametrizationList:
        kind = kind.__bases__[0]  # torch gives a parametrized layer a class of its own
    return kind.__module__.partition(".")[0] not in ("torch", "iresnet") or issubclass(kind, _HOLDING_CODE)


def check_axes(network: nn.Module, x: Tensor) -> None:
    """Refuse an x with too few axes for a layer such as a convolution, which would take the batch for its channels."""
    if not torch.compiler.is_compiling():  # the eager calls before it have been checked
        _follow_axes(network, x, x.dim())


def _follow_axes(network: nn.Module, x: Tensor, axes: int | None) -> int | None:
    """Return how many axes the output has for an input with so many; None if that is unknown. x is for the message."""
    network = unwrap(network)
    if parametrize.type_before_parametrizations(network) not in _RULES:
        return None
    needed = _axes_needed(network)
    if axes is not None and needed is not None and axes != needed and (axes < needed or not _is_pixel_layer(network)):
        got = f"{tuple(x.shape)}" if axes == x.dim() else f"{axes} axes"
        raise ValueError(
            f"{type(network).__name__} needs {needed} axes, (batch, channels, ...); got {got}, of which it would take "
            "the batch for channels. Unflatten it first."
        )
    match network:
        case nn.Sequential():
            for layer in network:
                axes = _follow_axes(layer, x, axes)
            return axes
        case nn.Flatten() if axes is not None:
            first, last = (n % axes for n in (network.start_dim, network.end_dim))
            return axes - (last - first)
        case nn.Unflatten() if axes is not None:
            return axes + len(network.unflattened_size) - 1
        case nn.Embedding() if axes is not None:
            return axes + 1
        case nn.EmbeddingBag():
            return 2
    return axes


#: The axes of what these layers normalise.
_NORM_AXES: dict[type, int] = {nn.InstanceNorm1d: 3, nn.InstanceNorm2d: 4, nn.InstanceNorm3d: 5}


def _is_pixel_layer(layer: nn.Module) -> bool:
    """Whether a layer may have more axes before the channels."""
    return isinstance(layer, nn.PixelShuffle | nn.PixelUnshuffle)


def _axes_needed(layer: Any) -> int | None:
    """Return how many axes a layer of channels needs, with that of the batch; None for one that treats them alike."""
    if isinstance(layer, nn.modules.conv._ConvNd):
        return len(layer.kernel_size) + 2
    if isinstance(layer, nn.modules.instancenorm._InstanceNorm):
        by_channel = layer.weight is not None or layer.running_mean is not None
        return _NORM_AXES.get(parametrize.type_before_parametrizations(layer)) if by_channel else None
    return 4 if _is_pixel_layer(layer) else None


def may_work_in_place(module: nn.Module) -> bool:
    """Whether a module may overwrite its input: one that says so, has hooks, or is of a class that is not known."""
    hooked = bool(module._forward_hooks or module._forward_pre_hooks)
    known = type(module) in _RULES or type(module).__module__.startswith("iresnet.")
    return hooked or not known or bool(getattr(module, "inplace", False))

"""Installing the constraint on a layer, and removing it: a torch parametrization that can be pickled and copied.

torch gives a parametrized layer a class of its own. `_install_methods_` adds to it what torch's lacks: pickling, copies
that do not share the class, a `weight` that ignores `parametrize.cached()`, and a `train` that brings the norm to
convergence on the way to eval.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from .constraint import SpectralCap, are_norms_deferred, cap_of, parametrizations_of
from .refresh import prepare_layer, refresh_
from .rules import NormRule


def constrain_layer_(layer: nn.Module, coefficient: float, norm: NormRule) -> nn.Module:
    """Constrain one Linear or convolution layer, replacing an earlier constraint."""
    check_coefficient(coefficient)
    if cap_of(layer) is not None:
        release_(layer)
    cap = SpectralCap(layer, coefficient, norm)
    parametrize.register_parametrization(layer, "weight", cap)
    layer.register_forward_pre_hook(prepare_layer)
    return _install_methods_(layer)


def check_coefficient(coefficient: float) -> None:
    """Raise for a coefficient that is no bound of a contraction."""
    if not 0 < coefficient < 1:
        raise ValueError(f"coefficient must lie in (0, 1); got {coefficient}. The paper uses 0.5 to 0.9.")


def release_(module: nn.Module) -> nn.Module:
    """Remove every constraint, leaving plain layers with the constrained weights: the same function."""
    for layer in module.modules():
        if cap_of(layer) is not None:
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
            for key, hook in list(layer._forward_pre_hooks.items()):
                if hook is prepare_layer:
                    del layer._forward_pre_hooks[key]
    return module


# ---------------------------------------------------------------------------------------------- methods


def _train(layer: nn.Module, mode: bool = True) -> nn.Module:
    """`train` of a constrained layer: on the way to eval, bring the norm to convergence."""
    leaving = layer.training and not mode and not are_norms_deferred()
    nn.Module.train(layer, mode)
    if leaving:
        refresh_(layer, settle=True)
    return layer


def _set_weight(layer: nn.Module, weight: Tensor) -> None:
    parametrizations_of(layer).right_inverse(weight)


#: The weight of a constrained layer. Torch's own property returns, inside `parametrize.cached()`, the weight of an
#: earlier pass: in training one without a graph, so that gradients vanish, or that of a layer that no longer exists.
_weight = property(lambda layer: parametrizations_of(layer)(), _set_weight)


def _reduce(layer: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """`__reduce_ex__` of a constrained layer, for pickle and copy: its original class, parametrized names and state.

    A copy gets a class of its own. In torch both would share one, and removing the parametrization of one would remove
    the weight of the other.
    """
    names = tuple(cast(nn.ModuleDict, layer.parametrizations))
    return _empty_layer, (parametrize.type_before_parametrizations(layer), names), *object.__reduce_ex__(layer, 2)[2:]


def _empty_layer(kind: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """Create an empty layer of this class with these tensors parametrized, to be filled from a state."""
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    for name in names:
        layer.register_buffer(name, torch.empty(0))
        parametrize.register_parametrization(layer, name, nn.Identity())
    return _install_methods_(layer)


def _setstate(layer: nn.Module, state: dict[str, Any]) -> None:
    """`__setstate__` of a constrained layer.

    A new process numbers hooks from zero; a hook registered there must not get the number of `prepare_layer` and
    replace it.
    """
    cast(Any, parametrize.type_before_parametrizations(layer)).__setstate__(layer, state)
    RemovableHandle.next_id = max(RemovableHandle.next_id, 1 + max(layer._forward_pre_hooks, default=-1))


def _install_methods_(layer: nn.Module) -> nn.Module:
    """Add methods to the class that torch created for a parametrized layer and drops with the parametrization."""
    own = cast(Any, type(layer))
    own.train, own.__reduce_ex__, own.__setstate__ = _train, _reduce, _setstate
    own.__deepcopy__ = None  # copy by __reduce_ex__
    if parametrize.is_parametrized(layer, "weight"):
        own.weight = _weight
    if "__getstate__" in vars(own):
        del own.__getstate__  # torch's, which raises
    return layer

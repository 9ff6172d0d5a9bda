"""The constraint of Eq. (2): W -> W min(1, c / sigma(W)), as a torch parametrization that looks after itself.

`layer.weight` is always the constrained weight; `deepcopy`, EMA and `state_dict` work as for any module, and removing
the parametrization leaves a plain layer. With u and v of the power iteration held fixed, sigma = u' T(W) v = <W, G> is
linear in W, so a refresh stores G, and the forward pass only multiplies.

The refresh (one step of power iteration from the last v) happens once per training forward: a model refreshes and
scales all its layers at once (`batched_refresh`), those of equal shape as one batch, and holds them for the rest of its
pass; a lone layer does it itself. In eval, in a solve, in a series, in a recomputation during backward nothing moves;
on the way from train to eval the estimate is brought to convergence. Which pass holds a layer is noted in the layer, by
thread: there is no state of the process that one thread could leave behind for another.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from .. import spectral
from ..compiler import detach_completely, is_batched, is_transforming, outside_transforms
from ..precision import float32_matmul_precision
from ..spectral import Geometry
from ..trust import trusted_hook, trusted_parametrization
from .rules import NormRule, PowerIteration
from .scaling import ScalingRule, scale_weights, stack_weights

#: Iterations from a random start, when a layer is made or meets a larger input.
COLD_ITERATIONS = 30


@trusted_parametrization
class SpectralCap(nn.Module):
    """The parametrization W -> W min(1, coefficient / <W, G>) of one layer, with its state: G, v and the input size."""

    gradient: Tensor
    direction: Tensor
    size: Tensor

    #: Where the next refresh begins, not what the weight is.
    outside_proof: ClassVar[tuple[str, ...]] = ("direction", "size")

    def __init__(self, layer: nn.Module, coefficient: float, norm: NormRule) -> None:
        super().__init__()
        self.coefficient, self.norm, self.geometry = coefficient, norm, Geometry.unchecked(cast(Any, layer))
        weight = cast(Tensor, layer.weight).detach()
        # The largest input met; the buffer `size` is written when it is saved, as torch.func.vjp, inside of which the
        # first input may come by, allows no writing, and reading it would wait for the device.
        self.seen: tuple[int, ...] = ()
        # The passes that hold this layer, by thread, and the constrained weight where `batched_refresh` made those
        # of all layers; and how `scale_weights_in` wants it.
        self._frozen: dict[int, Tensor | None] = {}
        self._scale_in: dict[int, tuple[torch.dtype, bool]] = {}
        size = torch.zeros(self.geometry.axes, dtype=torch.long, device=weight.device)
        for name, tensor in ("gradient", torch.zeros_like(weight)), ("direction", weight.new_empty(0)), ("size", size):
            self.register_buffer(name, _persistent(tensor))

    def forward(self, weight: Tensor) -> Tensor:
        ready = self._frozen.get(_thread_id()) if self._frozen else None
        if ready is not None:
            return ready
        # A copy of G: the next refresh writes into the buffer, perhaps before this pass has gone backward.
        sigma = (weight * self.gradient.clone()).sum()
        if not self.norm.differentiate:
            sigma = sigma.detach()
        return weight * (self.coefficient / sigma.clamp_min(self.coefficient))

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Called by torch when a weight is assigned: store it as it is and measure its norm."""
        if not _thread_state.deferred:
            with torch.no_grad():
                _refresh_group([(self, weight)], settle=True)
        return weight

    def record_size(self, size: tuple[int, ...]) -> None:
        """Remember the largest input met, axis by axis: the norm under zero padding grows with it."""
        self.seen = tuple(max(a, b) for a, b in zip(self.seen, size, strict=True)) if self.seen else size

    def working_size(self, weight: Tensor) -> tuple[int, ...]:
        return self.seen or spectral.default_size(self.geometry, weight)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_frozen": {}, "_scale_in": {}}  # these belong to a pass under way

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if self.seen:
            self.size.copy_(torch.tensor(self.seen))
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        direction, size = state_dict.get(prefix + "direction"), state_dict.get(prefix + "size")
        if isinstance(direction, Tensor) and direction.shape != self.direction.shape:
            self.direction = _persistent(self.direction.new_empty(direction.shape))
        if isinstance(size, Tensor) and size.numel() == self.geometry.axes:
            self.seen = tuple(size.tolist()) if bool((size > 0).all()) else ()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"coefficient={self.coefficient:g}, norm={self.norm}"


# ---------------------------------------------------------------------------------------------- refresh


class _ThreadState(threading.local):
    deferred = False


_thread_state = _ThreadState()


def _thread_id() -> int:
    """Whose pass it is. A compiler, which traces one pass at a time, cannot read the thread."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def _is_frozen(cap: SpectralCap) -> bool:
    """Whether a pass of this thread holds a layer; for a compiler, of any."""
    return bool(cap._frozen) if torch.compiler.is_compiling() else threading.get_ident() in cap._frozen


def _is_recomputing() -> bool:
    """Whether a backward pass is under way in this thread: a forward in it repeats one that was (checkpointing)."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _persistent(tensor: Tensor) -> Tensor:
    """A tensor to keep: made inside of `torch.inference_mode`, it could not be written to in training."""
    if not torch.is_inference_mode_enabled():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


@contextmanager
def freeze_norms(module: nn.Module) -> Iterator[None]:
    """Within this context no constrained layer of this module refreshes in this thread: the function stands still."""
    caps, thread = [cap for cap, _ in _unfrozen(module)], _thread_id()
    try:
        for cap in caps:
            cap._frozen[thread] = None
        yield
    finally:
        for cap in caps:
            cap._frozen.pop(thread, None)


@contextmanager
def scale_weights_in(caps: Sequence[SpectralCap], dtype: torch.dtype, *, compiled: bool) -> Iterator[None]:
    """Within this context `batched_refresh` makes the weights of these layers in this precision, channels last."""
    thread = _thread_id()
    try:
        for cap in caps:
            cap._scale_in[thread] = dtype, compiled
        yield
    finally:
        for cap in caps:
            cap._scale_in.pop(thread, None)


@contextmanager
def defer_norms() -> Iterator[None]:
    """Within this context no layer measures its norm by itself, when it is constrained or goes from train to eval.

    For a model that is moved to another device or filled from a file first: `refresh_(model, settle=True)` must follow,
    or `load_state_dict`.
    """
    before, _thread_state.deferred = _thread_state.deferred, True
    try:
        yield
    finally:
        _thread_state.deferred = before


def cap_of(layer: nn.Module) -> SpectralCap | None:
    """The constraint of a layer, if it has one."""
    if not parametrize.is_parametrized(layer, "weight"):
        return None
    caps = [p for p in _parametrizations(layer) if isinstance(p, SpectralCap)]
    return caps[-1] if caps else None


def _parametrizations(layer: nn.Module) -> Any:
    return cast(Any, layer).parametrizations.weight


@torch.no_grad()
def refresh_(module: nn.Module, *, settle: bool = False) -> None:
    """Bring the norms of constrained layers up to date with their weights, batched over layers of equal shape.

    One step of its rule for every layer in training, or with `settle` all layers to convergence (after loading,
    averaging or editing weights).
    """
    layers = [(cap, weight) for layer, cap, weight in _constrained_layers(module) if settle or layer.training]
    for group in _group_by_shape(layers):
        _refresh_group(group, settle=settle)


@contextmanager
def batched_refresh(module: nn.Module) -> Iterator[None]:
    """Refresh the layers in training, and within this context hold them, their weights scaled at once, as a stack.

    Layers that a pass of this thread holds already stay as they are: the outermost call of a model does it for all.
    """
    layers, thread = _unfrozen(module), _thread_id()
    try:
        for group in _group_by_shape(layers):
            _freeze_group(group, thread)
        yield
    finally:
        for cap, _ in layers:
            cap._frozen.pop(thread, None)


def _freeze_group(group: list[tuple[SpectralCap, Tensor]], thread: int) -> None:
    """Refresh layers of one shape, and note the constrained weight of each for this pass."""
    (cap, first), *others = group
    if torch.compiler.is_compiling() or is_transforming():  # these see through the layers one by one
        _refresh_group(group, settle=False)
        for each, _ in group:
            each._frozen[thread] = None
        return
    # Tensor cores will do for one step of power iteration: its sigma is second order in the error of v.
    with torch.no_grad(), float32_matmul_precision("tf32", first.device):
        weight, gradient, sigma = _stored_group(group) if _is_recomputing() else _refresh_group(group, settle=False)
    ready: Sequence[Tensor | None] = [None]
    dtype, compiled = cap._scale_in.get(thread, (None, False))
    if others or dtype is not None:
        rule = ScalingRule(cap.coefficient, cap.norm.differentiate, dtype, compiled)
        ready = scale_weights(weight, gradient, sigma, rule, [w for _, w in group])
    for (each, _), one in zip(group, ready, strict=True):
        each._frozen[thread] = one


def _constrained_layers(module: nn.Module) -> Iterator[tuple[nn.Module, SpectralCap, Tensor]]:
    """(layer, its constraint, its weight before it) for every constrained layer."""
    for layer in module.modules():
        cap = cap_of(layer)
        if cap is not None:
            yield layer, cap, _parametrizations(layer).original


def _unfrozen(module: nn.Module) -> list[tuple[SpectralCap, Tensor]]:
    """The constrained layers in training that no pass of this thread holds."""
    return [
        (cap, weight) for layer, cap, weight in _constrained_layers(module) if layer.training and not _is_frozen(cap)
    ]


def _group_by_shape(layers: list[tuple[SpectralCap, Tensor]]) -> list[list[tuple[SpectralCap, Tensor]]]:
    """Constrained layers, those of equal shape, size and rule together."""
    groups: dict[Any, list[tuple[SpectralCap, Tensor]]] = {}
    thread = _thread_id()
    for cap, weight in layers:
        key = (
            cap.geometry,
            weight.shape,
            cap.seen,
            cap.coefficient,
            cap.norm,
            cap._scale_in.get(thread),
            weight.dtype,
            weight.device,
        )
        groups.setdefault(key, []).append((cap, weight))
    return list(groups.values())


def _stored_group(group: list[tuple[SpectralCap, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """The weights, G and sigma of layers of one shape as the last refresh left them, as stacks."""
    dtype = torch.promote_types(group[0][1].dtype, torch.float32)
    weight = stack_weights([w.detach() for _, w in group]).to(dtype)
    gradient = torch.stack([cap.gradient for cap, _ in group]).to(dtype)
    return weight, gradient, (weight * gradient).flatten(1).sum(1)


def _refresh_group(group: list[tuple[SpectralCap, Tensor]], *, settle: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Refresh layers of one shape; their weights, the G and the sigma of each, as stacks."""
    cap, first = group[0]
    if is_transforming():  # what is written here outlasts the transform
        _refuse_batched(first)
        with outside_transforms():
            return _refresh_group([(c, detach_completely(w)) for c, w in group], settle=settle)
    size = cap.working_size(first)
    dtype = torch.promote_types(first.dtype, torch.float32)  # half precision cannot tell .9 from .903
    weight = stack_weights([w.detach() for _, w in group]).to(dtype)
    shape = (weight.shape[2] * cap.geometry.groups, *size)
    met = cap.seen or None
    cold = any(tuple(c.direction.shape) != shape for c, _ in group)
    if cold:
        v = spectral.start_vector(weight, cap.geometry, size)
        sigma, v, gradient = cap.norm.refresh(weight, cap.geometry, met, v)
        for _ in range(COLD_ITERATIONS if isinstance(cap.norm, PowerIteration) and not settle else 0):
            sigma, v, gradient = cap.norm.refresh(weight, cap.geometry, met, v)
    else:
        v = torch.stack([c.direction for c, _ in group]).to(dtype)
    if settle:
        sigma, v, gradient = cap.norm.settle(weight, cap.geometry, met, v)
    elif not cold:
        sigma, v, gradient = cap.norm.refresh(weight, cap.geometry, met, v)
    if cold:
        for (c, w), direction in zip(group, v, strict=True):
            c.direction = _persistent(direction.to(w.dtype, copy=True))
    else:
        torch._foreach_copy_([c.direction for c, _ in group], list(v.unbind(0)))
    torch._foreach_copy_([c.gradient for c, _ in group], list(gradient.unbind(0)))
    return weight, gradient, sigma


def _refuse_batched(weight: Tensor) -> None:
    if is_batched(weight):
        raise RuntimeError(
            "in training a constrained layer keeps its norm, which vmap over weights does not allow: the weights are "
            "many at once here. Call model.eval() before torch.func.functional_call, and after a step "
            "iresnet.lipschitz.refresh_(model, settle=True) for every member with its weights."
        )


@trusted_hook
def prepare_layer(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Forward pre-hook of a constrained layer: see the input's size; refresh if training and on its own."""
    cap = cap_of(layer)
    if cap is None:  # the parametrization was removed; a plain layer needs nothing
        return
    if cap.geometry.axes and inputs:
        cap.record_size(tuple(inputs[0].shape[-cap.geometry.axes :]))
    if layer.training and torch.is_grad_enabled() and not (_is_frozen(cap) or _is_recomputing()):
        with torch.no_grad():
            _refresh_group([(cap, _parametrizations(layer).original)], settle=False)


def _train(layer: nn.Module, mode: bool = True) -> nn.Module:
    """`train()` of a constrained layer: on the way to eval, bring the norm to convergence."""
    leaving = layer.training and not mode and not _thread_state.deferred
    nn.Module.train(layer, mode)
    if leaving:
        refresh_(layer, settle=True)
    return layer


def _set_weight(layer: nn.Module, weight: Tensor) -> None:
    _parametrizations(layer).right_inverse(weight)


#: The weight of a constrained layer. Not torch's own property, which within `parametrize.cached()` returns what an
#: earlier pass made: in training one without a graph, so that gradients vanish, or that of a layer which is no more.
_weight = property(lambda layer: _parametrizations(layer)(), _set_weight)


def _reduce(layer: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """How a constrained layer is pickled and copied: as a layer of its class before the parametrization, its tensors'
    names, and its state. A copy gets a class of its own: torch would let both share one, and removing the
    parametrization of either would take the weight of the other."""
    names = tuple(cast(nn.ModuleDict, layer.parametrizations))
    return _empty_layer, (parametrize.type_before_parametrizations(layer), names), *object.__reduce_ex__(layer, 2)[2:]


def _empty_layer(kind: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """A layer of this class whose tensors of these names are parametrized, to be filled with a state."""
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    for name in names:
        layer.register_buffer(name, torch.empty(0))
        parametrize.register_parametrization(layer, name, nn.Identity())
    return _install_methods_(layer)


def _setstate(layer: nn.Module, state: dict[str, Any]) -> None:
    """`__setstate__` of a constrained layer. A new process numbers hooks from zero: one that is registered there must
    not get the number, and so the place, of `prepare_layer`."""
    cast(Any, parametrize.type_before_parametrizations(layer)).__setstate__(layer, state)
    RemovableHandle.next_id = max(RemovableHandle.next_id, 1 + max(layer._forward_pre_hooks, default=-1))


def _install_methods_(layer: nn.Module) -> nn.Module:
    """torch gave a parametrized layer a class of its own, which goes when the parametrization goes: its methods."""
    own = cast(Any, type(layer))
    own.train, own.__reduce_ex__, own.__setstate__ = _train, _reduce, _setstate
    own.__deepcopy__ = None  # by __reduce_ex__
    if parametrize.is_parametrized(layer, "weight"):
        own.weight = _weight
    if "__getstate__" in vars(own):
        del own.__getstate__  # torch's, which refuses
    return layer


# ---------------------------------------------------------------------------------------------- constraining layers


def constrain_layer_(layer: nn.Module, coefficient: float, norm: NormRule) -> nn.Module:
    """Put the constraint on one Linear or convolution layer, replacing one it had."""
    if not 0 < coefficient < 1:
        raise ValueError(f"coefficient must lie in (0, 1); got {coefficient}. The paper uses 0.5 to 0.9.")
    if cap_of(layer) is not None:
        release_(layer)
    cap = SpectralCap(layer, coefficient, norm)
    parametrize.register_parametrization(layer, "weight", cap)
    layer.register_forward_pre_hook(prepare_layer)
    return _install_methods_(layer)


def release_(module: nn.Module) -> nn.Module:
    """Take every constraint off, leaving plain layers with the constrained weights: the same function."""
    for layer in module.modules():
        if cap_of(layer) is not None:
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
            for key, hook in list(layer._forward_pre_hooks.items()):
                if hook is prepare_layer:
                    del layer._forward_pre_hooks[key]
    return module

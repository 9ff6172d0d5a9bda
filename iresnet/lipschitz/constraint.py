"""The constraint of Eq. (2), W -> W min(1, c / sigma(W)), as a torch parametrization that refreshes itself.

`layer.weight` is always the constrained weight; `deepcopy`, EMA and `state_dict` work as for any module, and removing
the parametrization leaves a plain layer. For fixed u and v of the power iteration, sigma = u' T(W) v = <W, G> is linear
in W, so a refresh stores G, and the forward pass only multiplies.

A refresh (one step of power iteration from the last v) happens once per forward pass in training. A model refreshes and
scales all its layers at once (`batched_refresh`), those of equal shape as one batch, and freezes them for the rest of
the pass; a layer that is called alone refreshes itself. In eval, inside a solve or a series, and when checkpointing
recomputes a forward pass, nothing changes. On the way from train to eval the estimate is brought to convergence. Which
pass has frozen a layer is recorded in the layer, per thread: there is no global state that one thread could leave
behind for another.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from .. import spectral
from ..compiler import detach_completely, is_batched, is_transforming, outside_transforms
from ..precision import float32_matmul_precision, without_autocast
from ..spectral import Geometry
from ..streams import concurrently
from ..tree import modules_of
from ..trust import trusted_hook, trusted_parametrization
from .rules import NormRule, PowerIteration
from .scaling import ScalingRule, scale_weights, stack_weights

#: Iterations from a new start vector, when a layer is new or sees a larger input.
COLD_ITERATIONS = 30


@trusted_parametrization
class SpectralCap(nn.Module):
    """The parametrization W -> W min(1, coefficient / <W, G>) of one layer.

    Its buffers are G (`gradient`), v (`direction`) and the largest input size seen (`size`).
    """

    gradient: Tensor
    direction: Tensor
    size: Tensor

    #: Where the next refresh starts; not part of the weight.
    outside_proof: ClassVar[tuple[str, ...]] = ("direction", "size")

    def __init__(self, layer: nn.Module, coefficient: float, norm: NormRule) -> None:
        super().__init__()
        self.coefficient, self.norm, self.geometry = coefficient, norm, Geometry.unchecked(cast(Any, layer))
        weight = cast(Tensor, layer.weight).detach()
        # The largest input seen. The buffer `size` is written when the state is saved: torch.func.vjp, inside which the
        # first input may come, allows no writes to buffers, and reading a buffer would wait for the device.
        self.seen: tuple[int, ...] = ()
        # By thread: the weight to use if a pass has frozen this layer (None: compute it), and the dtype that
        # `scale_weights_in` asks for.
        self._frozen: dict[int, Tensor | None] = {}
        self._scale_in: dict[int, tuple[torch.dtype, bool]] = {}
        size = torch.zeros(self.geometry.axes, dtype=torch.long, device=weight.device)
        for name, tensor in ("gradient", torch.zeros_like(weight)), ("direction", weight.new_empty(0)), ("size", size):
            self.register_buffer(name, _persistent(tensor))

    def forward(self, weight: Tensor) -> Tensor:
        frozen = self._frozen.get(_thread_id()) if self._frozen else None
        if frozen is not None:
            return frozen
        # A copy of G: the next refresh may write into the buffer before the backward of this pass.
        gradient = self.gradient.clone() if torch.is_grad_enabled() else self.gradient
        sigma = (weight * gradient).sum()
        if not self.norm.differentiate:
            sigma = sigma.detach()
        return weight * (self.coefficient / sigma.clamp_min(self.coefficient))

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Store an assigned weight unchanged and compute its norm; torch calls this on assignment."""
        if not _thread_state.deferred:
            with torch.no_grad():
                _refresh_group([(self, weight)], settle=True)
        return weight

    def record_size(self, size: tuple[int, ...]) -> None:
        """Record the largest input size seen, per axis: under zero padding the norm grows with it."""
        self.seen = tuple(max(a, b) for a, b in zip(self.seen, size, strict=True)) if self.seen else size

    def working_size(self, weight: Tensor) -> tuple[int, ...]:
        """Return the input size at which the norm is estimated."""
        return self.seen or spectral.default_size(self.geometry, weight)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_frozen": {}, "_scale_in": {}}  # these belong to a pass in progress

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
    """Return the current thread; 0 while compiling, as dynamo cannot read it and traces one pass at a time."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def _is_frozen(cap: SpectralCap) -> bool:
    """Whether a pass of this thread has frozen the layer; while compiling, of any thread."""
    return bool(cap._frozen) if torch.compiler.is_compiling() else threading.get_ident() in cap._frozen


def _is_recomputing() -> bool:
    """Whether a backward pass is running in this thread: a forward inside it recomputes an earlier one."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _persistent(tensor: Tensor) -> Tensor:
    """Return a tensor that training can write to, also if created inside `torch.inference_mode`."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():  # which a compiler cannot trace
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


@contextmanager
def freeze_norms(module: nn.Module) -> Iterator[None]:
    """Context in which no constrained layer of a module refreshes in this thread: the function does not change."""
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
    """Context in which `batched_refresh` returns the weights of these layers in `dtype`, channels last."""
    thread = _thread_id()
    try:
        for cap in caps:
            cap._scale_in[thread] = dtype, compiled
        yield
    finally:
        for cap in caps:
            cap._scale_in.pop(thread, None)


def are_norms_deferred() -> bool:
    """Whether this thread is inside `defer_norms`."""
    return _thread_state.deferred


@contextmanager
def defer_norms() -> Iterator[None]:
    """Context in which layers do not compute their norms when they are constrained or go from train to eval.

    Use it for a model that is first moved to another device or loaded from a file. `refresh_(model, settle=True)` or
    `load_state_dict` must follow.
    """
    before, _thread_state.deferred = _thread_state.deferred, True
    try:
        yield
    finally:
        _thread_state.deferred = before


def cap_of(layer: nn.Module) -> SpectralCap | None:
    """Return the constraint of a layer; None if it has none."""
    chain = _chain_of(layer)
    caps = [] if chain is None else [p for p in chain._modules.values() if isinstance(p, SpectralCap)]
    return caps[-1] if caps else None


def weight_of(layer: nn.Module) -> Tensor:
    """Return `layer.weight`; that of a layer with this constraint alone, without torch's calls in between."""
    chain, cap = (None, None) if torch.compiler.is_compiling() else (_chain_of(layer), cap_of(layer))
    if chain is None or cap is None or len(chain._modules) != 1 or _has_hooks(chain) or _has_hooks(cap):
        return cast(Tensor, layer.weight)
    return cap.forward(cast(Any, chain).original)


def _chain_of(layer: nn.Module) -> nn.Module | None:
    """Return `parametrizations_of(layer)`, or None, from the dicts of modules: their attributes take longer."""
    if "parametrizations" not in layer._modules:
        return None
    named = layer._modules["parametrizations"]
    return named._modules["weight"] if isinstance(named, nn.ModuleDict) and "weight" in named._modules else None


def _has_hooks(module: nn.Module) -> bool:
    m = module
    return bool(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks)


def parametrizations_of(layer: nn.Module) -> Any:
    """Return torch's list of parametrizations of the weight, which also holds the original weight."""
    return cast(Any, layer).parametrizations.weight


@torch.no_grad()
def refresh_(module: nn.Module, *, settle: bool = False) -> None:
    """Update the norms of constrained layers to their current weights, batched over layers of equal shape.

    By default this takes one step of the norm rule for layers in training mode. With `settle` it brings all layers to
    convergence: use that after loading, averaging or editing weights.
    """
    layers = [(cap, weight) for layer, cap, weight in _constrained_layers(module) if settle or layer.training]
    for group in _group_by_shape(layers):
        _refresh_group(group, settle=settle)


@contextmanager
def batched_refresh(module: nn.Module) -> Iterator[None]:
    """Refresh the layers in training mode, scale their weights in stacks, and freeze them inside this context.

    Layers already frozen by this thread are skipped: the outermost call of a model handles all of them.
    """
    layers, thread = _unfrozen(module), _thread_id()
    try:
        _freeze_groups(_group_by_shape(layers), thread)
        yield
    finally:
        for cap, _ in layers:
            cap._frozen.pop(thread, None)


def _freeze_groups(groups: list[list[tuple[SpectralCap, Tensor]]], thread: int) -> None:
    """Refresh groups of layers of one shape, and store the constrained weight of each layer for this pass."""
    if not groups:
        return
    if torch.compiler.is_compiling() or is_transforming():  # these trace the layers one by one
        for group in groups:
            _refresh_group(group, settle=False)
            for cap, _ in group:
                cap._frozen[thread] = None
        return
    device = groups[0][0][1].device
    refresh = _stored_group if _is_recomputing() else partial(_refresh_group, settle=False)
    # TF32 is enough for one step of power iteration: sigma is second order in the error of v.
    with torch.no_grad(), float32_matmul_precision("tf32", device):
        stacks = concurrently([partial(refresh, group) for group in groups], device)
    for group, stack in zip(groups, stacks, strict=True):
        _scale_group(group, stack, thread)


def _scale_group(group: list[tuple[SpectralCap, Tensor]], stack: tuple[Tensor, Tensor, Tensor], thread: int) -> None:
    """Store the constrained weight of each layer for this pass, from stacks of the weights, G and sigma."""
    cap, weights = group[0][0], cast(Sequence[Tensor | None], [None])
    dtype, compiled = cap._scale_in.get(thread, (None, False))
    if len(group) > 1 or dtype is not None:
        rule = ScalingRule(cap.coefficient, cap.norm.differentiate, dtype, compiled)
        weights = scale_weights(*stack, rule, [w for _, w in group])
    for (each, _), constrained in zip(group, weights, strict=True):
        each._frozen[thread] = constrained


def _constrained_layers(module: nn.Module) -> Iterator[tuple[nn.Module, SpectralCap, Tensor]]:
    """Yield (layer, constraint, unconstrained weight) for every constrained layer."""
    for layer in modules_of(module):
        cap = cap_of(layer)
        if cap is not None:
            yield layer, cap, parametrizations_of(layer).original


def _unfrozen(module: nn.Module) -> list[tuple[SpectralCap, Tensor]]:
    """Return the constrained layers in training mode that this thread has not frozen."""
    return [
        (cap, weight) for layer, cap, weight in _constrained_layers(module) if layer.training and not _is_frozen(cap)
    ]


def _group_by_shape(layers: list[tuple[SpectralCap, Tensor]]) -> list[list[tuple[SpectralCap, Tensor]]]:
    """Group constrained layers of equal shape, input size and rule."""
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
    """Return stacks of the weights, G and sigma of layers of one shape, as of the last refresh."""
    dtype = torch.promote_types(group[0][1].dtype, torch.float32)
    weight = stack_weights([w.detach() for _, w in group]).to(dtype)
    gradient = torch.stack([cap.gradient for cap, _ in group]).to(dtype)
    return weight, gradient, (weight * gradient).flatten(1).sum(1)


def _refresh_group(group: list[tuple[SpectralCap, Tensor]], *, settle: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Refresh layers of one shape, without autocast; return stacks of their weights, G and sigma."""
    first = group[0][1]
    if is_transforming():  # the buffers written here outlive the transform
        _refuse_batched(first)
        with outside_transforms():
            return _refresh_group([(c, detach_completely(w)) for c, w in group], settle=settle)
    with without_autocast(first):  # a norm of products in half precision may lie below the true one
        return _update_group(group, settle=settle)


def _update_group(group: list[tuple[SpectralCap, Tensor]], *, settle: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `_refresh_group` in the precision of the weights, outside of `torch.func`."""
    cap, first = group[0]
    size = cap.working_size(first)
    dtype = torch.promote_types(first.dtype, torch.float32)  # half precision cannot distinguish .9 from .903
    weight = stack_weights([w.detach() for _, w in group]).to(dtype)
    shape = (weight.shape[2] * cap.geometry.groups, *size)
    seen = cap.seen or None
    cold = any(tuple(c.direction.shape) != shape for c, _ in group)
    if cold:
        v = spectral.start_vector(weight, cap.geometry, size)
        sigma, v, gradient = cap.norm.refresh(weight, cap.geometry, seen, v)
        for _ in range(COLD_ITERATIONS if isinstance(cap.norm, PowerIteration) and not settle else 0):
            sigma, v, gradient = cap.norm.refresh(weight, cap.geometry, seen, v)
    else:
        v = torch.stack([c.direction for c, _ in group]).to(dtype)
    if settle:
        sigma, v, gradient = cap.norm.settle(weight, cap.geometry, seen, v)
    elif not cold:
        sigma, v, gradient = cap.norm.refresh(weight, cap.geometry, seen, v)
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
            "a constrained layer in training stores its norm, which is not possible under vmap over weights. Call "
            "model.eval() before torch.func.functional_call, and after a step call "
            "iresnet.lipschitz.refresh_(model, settle=True) for every ensemble member with its weights."
        )


@trusted_hook
def prepare_layer(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Forward pre-hook of a constrained layer: record the input size; refresh if training and called alone."""
    cap = cap_of(layer)
    if cap is None:  # the parametrization was removed
        return
    if cap.geometry.axes and inputs:
        cap.record_size(tuple(inputs[0].shape[-cap.geometry.axes :]))
    if layer.training and torch.is_grad_enabled() and not (_is_frozen(cap) or _is_recomputing()):
        with torch.no_grad():
            _refresh_group([(cap, parametrizations_of(layer).original)], settle=False)

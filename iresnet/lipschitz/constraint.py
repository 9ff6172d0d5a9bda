"""The constraint of Eq. (2), W -> W min(1, c / sigma(W)), as a torch parametrization that refreshes itself.

`layer.weight` is always the constrained weight; `deepcopy`, EMA and `state_dict` work as for any module, and removing
the parametrization leaves a plain layer. For fixed u and v of the power iteration, sigma = u' T(W) v = <W, G> is linear
in W, so a refresh stores G, and the forward pass only multiplies.

When G is computed anew is decided in `refresh`, and how in `group`. On the way from train to eval the estimate is
brought to convergence.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from .. import spectral
from ..spectral import Geometry
from ..trust import trusted_parametrization
from .group import persistent, refresh_group
from .rules import NormRule


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
            self.register_buffer(name, persistent(tensor))

    def forward(self, weight: Tensor) -> Tensor:
        frozen = self._frozen.get(thread_id()) if self._frozen else None
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
                refresh_group([(self, weight)], settle=True)
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
            self.direction = persistent(self.direction.new_empty(direction.shape))
        if isinstance(size, Tensor) and size.numel() == self.geometry.axes:
            self.seen = tuple(size.tolist()) if bool((size > 0).all()) else ()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"coefficient={self.coefficient:g}, norm={self.norm}"


# ---------------------------------------------------------------------------------------------- per thread


class _ThreadState(threading.local):
    deferred = False


_thread_state = _ThreadState()


def thread_id() -> int:
    """Return the current thread; 0 while compiling, as dynamo cannot read it and traces one pass at a time."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def is_frozen(cap: SpectralCap) -> bool:
    """Whether a pass of this thread has frozen the layer; while compiling, of any thread."""
    return bool(cap._frozen) if torch.compiler.is_compiling() else threading.get_ident() in cap._frozen


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

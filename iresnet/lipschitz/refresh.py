"""When norms are refreshed, and when they are frozen.

A refresh happens once per forward pass in training. A model refreshes and scales all its layers at once
(`batched_refresh`), those of equal shape as one batch, and freezes them for the rest of the pass; a layer that is
called alone refreshes itself (`prepare_layer`). In eval, inside a solve or a series, and when checkpointing recomputes
a forward pass, nothing changes. Which pass has frozen a layer is recorded in the layer, per thread: there is no global
state that one thread could leave behind for another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..compiler import is_transforming
from ..precision import float32_matmul_precision
from ..streams import concurrently
from ..tree import modules_of
from ..trust import trusted_hook
from .constraint import SpectralCap, cap_of, is_frozen, parametrizations_of, thread_id
from .group import Group, Stacks, refresh_group, stored_group
from .scaling import ScalingRule, scale_weights


@contextmanager
def freeze_norms(module: nn.Module) -> Iterator[None]:
    """Context in which no constrained layer of a module refreshes in this thread: the function does not change."""
    caps, thread = [cap for cap, _ in _unfrozen(module)], thread_id()
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
    thread = thread_id()
    try:
        for cap in caps:
            cap._scale_in[thread] = dtype, compiled
        yield
    finally:
        for cap in caps:
            cap._scale_in.pop(thread, None)


@torch.no_grad()
def refresh_(module: nn.Module, *, settle: bool = False) -> None:
    """Update the norms of constrained layers to their current weights, batched over layers of equal shape.

    By default this takes one step of the norm rule for layers in training mode. With `settle` it brings all layers to
    convergence: use that after loading, averaging or editing weights.
    """
    layers = [(cap, weight) for layer, cap, weight in _constrained_layers(module) if settle or layer.training]
    for group in _group_by_shape(layers):
        refresh_group(group, settle=settle)


@contextmanager
def batched_refresh(module: nn.Module) -> Iterator[None]:
    """Refresh the layers in training mode, scale their weights in stacks, and freeze them inside this context.

    Layers already frozen by this thread are skipped: the outermost call of a model handles all of them.
    """
    layers, thread = _unfrozen(module), thread_id()
    try:
        _freeze_groups(_group_by_shape(layers), thread)
        yield
    finally:
        for cap, _ in layers:
            cap._frozen.pop(thread, None)


def _freeze_groups(groups: list[Group], thread: int) -> None:
    """Refresh groups of layers of one shape, and store the constrained weight of each layer for this pass."""
    if not groups:
        return
    if torch.compiler.is_compiling() or is_transforming():  # these trace the layers one by one
        for group in groups:
            refresh_group(group, settle=False)
            for cap, _ in group:
                cap._frozen[thread] = None
        return
    device = groups[0][0][1].device
    refresh = stored_group if _is_recomputing() else partial(refresh_group, settle=False)
    # TF32 is enough for one step of power iteration: sigma is second order in the error of v.
    with torch.no_grad(), float32_matmul_precision("tf32", device):
        stacks = concurrently([partial(refresh, group) for group in groups], device)
    for group, each in zip(groups, stacks, strict=True):
        _scale_group(group, each, thread)


def _scale_group(group: Group, stacks: Stacks, thread: int) -> None:
    """Store the constrained weight of each layer for this pass, from stacks of the weights, G and sigma."""
    cap, weights = group[0][0], cast(Sequence[Tensor | None], [None])
    dtype, compiled = cap._scale_in.get(thread, (None, False))
    if len(group) > 1 or dtype is not None:
        rule = ScalingRule(cap.coefficient, cap.norm.differentiate, dtype, compiled)
        weights = scale_weights(*stacks, rule, [w for _, w in group])
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
        (cap, weight) for layer, cap, weight in _constrained_layers(module) if layer.training and not is_frozen(cap)
    ]


def _group_by_shape(layers: list[tuple[SpectralCap, Tensor]]) -> list[Group]:
    """Group constrained layers of equal shape, input size and rule."""
    groups: dict[Any, Group] = {}
    thread = thread_id()
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


@trusted_hook
def prepare_layer(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Forward pre-hook of a constrained layer: record the input size; refresh if training and called alone."""
    cap = cap_of(layer)
    if cap is None:  # the parametrization was removed
        return
    if cap.geometry.axes and inputs:
        cap.record_size(tuple(inputs[0].shape[-cap.geometry.axes :]))
    if layer.training and torch.is_grad_enabled() and not (is_frozen(cap) or _is_recomputing()):
        with torch.no_grad():
            refresh_group([(cap, parametrizations_of(layer).original)], settle=False)


def _is_recomputing() -> bool:
    """Whether a backward pass is running in this thread: a forward inside it recomputes an earlier one."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1

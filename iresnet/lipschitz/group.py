"""The norms of constrained layers of one shape, as one batch: computed anew, or as of the last refresh.

A refresh is one step of the norm rule (`rules`) from the last v. Its results are written to the buffers of every layer,
and returned as stacks of weights, G and sigma, with sigma = <W, G>, for `scaling`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from .. import spectral
from ..compiler import detach_completely, is_batched, is_transforming, outside_transforms
from ..precision import without_autocast
from .rules import PowerIteration
from .scaling import stack_weights

if TYPE_CHECKING:
    from .constraint import SpectralCap

#: Constraints of one shape with their unconstrained weights.
Group: TypeAlias = "list[tuple[SpectralCap, Tensor]]"

#: Stacks of weights, G and sigma.
Stacks: TypeAlias = tuple[Tensor, Tensor, Tensor]

#: Iterations from a new start vector, when a layer is new or sees a larger input.
COLD_ITERATIONS = 30


def stored_group(group: Group) -> Stacks:
    """Return stacks of the weights, G and sigma of layers of one shape, as of the last refresh."""
    dtype = torch.promote_types(group[0][1].dtype, torch.float32)
    weight = stack_weights([w.detach() for _, w in group]).to(dtype)
    gradient = torch.stack([cap.gradient for cap, _ in group]).to(dtype)
    return weight, gradient, (weight * gradient).flatten(1).sum(1)


def refresh_group(group: Group, *, settle: bool) -> Stacks:
    """Refresh layers of one shape, without autocast; return stacks of their weights, G and sigma."""
    first = group[0][1]
    if is_transforming():  # the buffers written here outlive the transform
        _refuse_batched(first)
        with outside_transforms():
            return refresh_group([(c, detach_completely(w)) for c, w in group], settle=settle)
    with without_autocast(first):  # a norm of products in half precision may lie below the true one
        return _update_group(group, settle=settle)


def _update_group(group: Group, *, settle: bool) -> Stacks:
    """Compute `refresh_group` in the precision of the weights, outside of `torch.func`."""
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
            c.direction = persistent(direction.to(w.dtype, copy=True))
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


def persistent(tensor: Tensor) -> Tensor:
    """Return a tensor that training can write to, also if created inside `torch.inference_mode`."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():  # which a compiler cannot trace
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()

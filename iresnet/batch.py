"""What a batch of samples must be: checks with a sentence, and the shape and size of a sample."""

from __future__ import annotations

import math
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from .compiler import can_read_values
from .trust import PLAIN_TENSORS

#: The shape of a sample, without the batch dimension.
Shape: TypeAlias = tuple[int, ...]

T = TypeVar("T")


def check_batch(x: Tensor, name: str = "x", shape: Shape | None = None) -> None:
    """Refuse a tensor that is not a batch: wrong dtype, no batch dimension, empty, or the wrong shape."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        if isinstance(x, list | tuple) and x and isinstance(x[0], Tensor):
            raise ValueError(
                f"{name} must be one tensor; got {len(x)} in a {type(x).__name__}, as a DataLoader gives "
                f"them. Use {name}[0], or for ({name},) in loader."
            )
        got, tensor = (x.dtype, name) if isinstance(x, Tensor) else (type(x).__name__, f"torch.as_tensor({name})")
        raise ValueError(f"{name} must be a floating-point tensor; got {got}. Convert it with {tensor}.float() first.")
    if x.dim() < 2:
        raise ValueError(
            f"{name} must have a batch dimension, shape (batch, ...); got {tuple(x.shape)}. "
            f"Use {name}[None] for one sample."
        )
    if x.numel() == 0:
        raise ValueError(f"{name} must hold at least one sample; got an empty batch of shape {tuple(x.shape)}.")
    if shape is not None and tuple(x.shape[1:]) != shape:
        lead = x.dim() - len(shape)
        remedy = f" Flatten its batch dimensions: {name}.flatten(0, {lead - 1})." if x.shape[lead:] == shape else ""
        expected = f"(batch, {', '.join(map(str, shape))})"
        raise ValueError(f"{name} must have shape {expected}; got {tuple(x.shape)}.{remedy}")


def check_is_batch(context: Tensor) -> None:
    """Refuse a context of real numbers without a batch dimension, which might be taken for one number per sample."""
    if isinstance(context, Tensor) and context.is_floating_point() and context.dim() < 2:
        raise ValueError(
            f"context must have a batch dimension, shape (batch, ...); got {tuple(context.shape)}. Give each sample "
            "its own row: context.expand(len(x), -1). (flow.given takes a single one.)"
        )


def check_finite(x: Tensor, name: str) -> None:
    """Refuse NaN and infinity, naming the first sample that has them."""
    if not can_read_values(x):
        return
    if bool(x.detach().sum().isfinite()):  # in a fraction of the time; the sum of finite numbers may overflow
        return
    finite = torch.isfinite(x)
    bad = ~(finite.flatten(1).all(dim=1) if x.dim() > 1 else finite)
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        raise ValueError(
            f"{name} must be finite; sample {first} of {len(x)} holds NaN or infinity. Remove it or fix the data."
        )


def as_plain(x: T) -> T:
    """Return what a proof is about as a plain tensor: operations of a subclass may compute anything, also a residual.

    Refuse a subclass that only stands for other tensors and has no numbers of its own.

    >>> type(as_plain(torch.zeros(1).as_subclass(type("Image", (Tensor,), {})))).__name__
    'Tensor'
    """
    kind: Any = type(x)
    if not isinstance(x, Tensor) or kind in PLAIN_TENSORS:
        return x
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise ValueError(f"proofs are about plain tensors; got a {kind.__name__}. Convert it to a torch.Tensor.")
    with torch._C.DisableTorchFunctionSubclass():
        return cast(T, x.as_subclass(Tensor))


def in_float64(context: Tensor | None) -> Tensor | None:
    """Convert a context to float64; integers, which may be indices, stay as they are."""
    return context.double() if context is not None and context.is_floating_point() else context


def dimension(x: Tensor) -> int:
    """Return the number of elements of one sample."""
    return math.prod(x.shape[1:])

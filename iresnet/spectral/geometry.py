"""Everything that determines the operator of a layer except its weight: stride, padding, dilation and groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..trust import NoBoundKnown, known_type, unwrap, unwrap_unmodified

#: The number of spatial axes of a convolution, by class: torch.fx cannot trace the shape of its weight.
AXES = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}


@dataclass(frozen=True)
class Geometry:
    """Stride, padding, dilation and groups: all that determines the operator except the weight.

    A linear layer has no spatial axes; a convolution has one to three. `before` and `after` are the padding per axis.
    """

    stride: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    circular: bool = False

    @classmethod
    def of(cls, layer: nn.Module, *, unmodified: bool = False) -> Geometry:
        """Read the geometry of a trusted Linear or Conv1d/2d/3d layer; raise `NoBoundKnown` for anything else.

        `unmodified` as in `trust.known_type`.
        """
        wrapped, layer = layer, unwrap(layer)
        if not isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            raise NoBoundKnown(
                f"no norm bound is known for {type(layer).__name__}; Linear, Conv1d, Conv2d and Conv3d have one."
            )
        try:
            known_type(unwrap_unmodified(wrapped), unmodified=unmodified)
        except NoBoundKnown as error:
            raise NoBoundKnown(f"no norm bound is known for {type(layer).__name__}: {error}") from None
        return cls.unchecked(layer)

    @classmethod
    def unchecked(cls, layer: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) -> Geometry:
        """Read the geometry from the settings alone, for callers that compute and prove nothing."""
        if isinstance(layer, nn.Linear):
            return cls()
        if layer.padding_mode not in ("zeros", "circular"):
            raise NoBoundKnown(
                f"no norm bound is known for padding_mode={layer.padding_mode!r}; use 'zeros' or 'circular'."
            )
        before, after = _padding(layer)
        if any(type(n) is not int or n < 0 for n in before + after):
            raise NoBoundKnown(
                f"padding must be integers of at least 0; got {before} before and {after} after the input."
            )
        return cls(
            stride=_per_axis(layer.stride, layer),
            before=before,
            after=after,
            dilation=_per_axis(layer.dilation, layer),
            groups=layer.groups,
            circular=layer.padding_mode == "circular",
        )

    @property
    def axes(self) -> int:
        return len(self.stride)

    def output_size(self, size: tuple[int, ...], kernel: tuple[int, ...]) -> tuple[int, ...]:
        """Return the spatial size of the output; raise ValueError if the kernel does not fit."""
        out = tuple(
            (n + b + a - d * (k - 1) - 1) // s + 1
            for n, b, a, d, k, s in zip(size, self.before, self.after, self.dilation, kernel, self.stride, strict=True)
        )
        if any(m < 1 for m in out):
            raise ValueError(f"the padded input must not be smaller than the kernel {kernel}; got input size {size}.")
        return out

    def output_padding(self, size: tuple[int, ...], kernel: tuple[int, ...], out: tuple[int, ...]) -> tuple[int, ...]:
        """Return `output_padding` of the transposed convolution: the input positions that the stride leaves out."""
        return tuple(
            n + b + a - d * (k - 1) - 1 - s * (m - 1)
            for n, b, a, d, k, s, m in zip(
                size, self.before, self.after, self.dilation, kernel, self.stride, out, strict=True
            )
        )


def _padding(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the padding (before, after) per axis, from the settings that the layer's forward uses."""
    if layer.padding_mode != "zeros":
        pads = list(layer._reversed_padding_repeated_twice)[::-1]  # last axis first, (after, before) once reversed
        return tuple(pads[1::2]), tuple(pads[0::2])
    if layer.padding == "same":
        dilation = _per_axis(layer.dilation, layer)
        totals = [d * (k - 1) for d, k in zip(dilation, weight_shape(layer)[2:], strict=True)]
        return tuple(t // 2 for t in totals), tuple(t - t // 2 for t in totals)
    sides = _per_axis(0 if layer.padding == "valid" else layer.padding, layer)
    return sides, sides


def weight_shape(layer: nn.Module) -> torch.Size:
    """Return the shape of a layer's weight, without computing the weight if it is parametrized."""
    parametrizations: Any = getattr(layer, "parametrizations", {})
    stored = getattr(parametrizations["weight"], "original", None) if "weight" in parametrizations else None
    return cast(Tensor, layer.weight if stored is None else stored).shape


def _per_axis(value: Any, layer: nn.Module) -> tuple[int, ...]:
    """Return a setting of a convolution per axis; torch also accepts one number for all axes."""
    axes = next(n for kind, n in AXES.items() if isinstance(layer, kind))
    values = tuple(value) if isinstance(value, list | tuple) else (value,) * axes
    if len(values) != axes or not all(type(v) is int for v in values):
        raise NoBoundKnown(f"a convolution over {axes} axes needs {axes} integers; got {value!r}.")
    return values

"""The input shape that the first layer of g expects, to reject a wrong one with a clear message."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ..lipschitz.activations import record_of
from ..lipschitz.order import primitives
from ..spectral import weight_shape


@dataclass(frozen=True)
class InputSpec:
    """x must have `size` elements along `axis`, and `dims` axes unless that is 0."""

    axis: int
    size: int
    dims: int = 0

    @classmethod
    def of(cls, g: nn.Module) -> InputSpec | None:
        """Read the spec from the first linear layer of g; None if there is none or a reshape comes before it."""
        for _, layer in primitives(g):
            if isinstance(layer, nn.Linear):
                return cls(-1, layer.in_features)
            if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
                return cls(1, layer.in_channels, len(weight_shape(layer)))
            record = record_of(layer)
            if record is not None and record.is_reshape:
                return None
        return None

    def check(self, x: Tensor, name: str) -> None:
        """Raise ValueError for a wrong shape, before torch raises from inside a layer."""
        if x.shape[self.axis] != self.size or (self.dims and x.dim() != self.dims):
            shape = f"(batch, {self.size}{', n' * (self.dims - 2)})" if self.dims else f"(batch, ..., {self.size})"
            raise ValueError(f"{name} must have shape {shape} for this block; got {tuple(x.shape)}. Reshape it, or g.")

"""The Jacobian of g at a batch, as the map v -> J' v."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

VectorJacobianProduct: TypeAlias = Callable[[Tensor], Tensor]

#: Elements of the basis batch that `Jacobian.matrix` handles at once.
_CHUNK = 1 << 22


class Jacobian:
    """The Jacobian of g at a batch x, known by v -> J' v. `broadcasts` says that v may have one more leading axis;
    `trace` computes tr J of every sample without a probe, where there is a way."""

    def __init__(
        self, vjp: VectorJacobianProduct, *, broadcasts: bool = False, trace: Callable[[], Tensor] | None = None
    ) -> None:
        self.vjp, self.broadcasts, self.trace = vjp, broadcasts, trace

    def __call__(self, v: Tensor) -> Tensor:
        return self.vjp(v)

    def matrix(self, x: Tensor) -> Tensor:
        """The dense Jacobians, (batch, d, d)."""
        batch, d = len(x), math.prod(x.shape[1:])
        basis = torch.eye(d, dtype=x.dtype, device=x.device).reshape(d, 1, *x.shape[1:]).expand(d, *x.shape)
        if self.broadcasts:
            rows = self.vjp(basis)
        else:
            chunk = max(1, _CHUNK // (batch * d))
            rows = torch.func.vmap(self.vjp, chunk_size=chunk)(basis)
        return rows.reshape(d, batch, d).transpose(0, 1)

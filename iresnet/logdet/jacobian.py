"""The Jacobian of g at a batch, as the linear map v -> J' v."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

VectorJacobianProduct: TypeAlias = Callable[[Tensor], Tensor]

#: How many numbers of the basis `Jacobian.matrix` handles at once.
_CHUNK = 1 << 22


class Jacobian:
    """The Jacobian J of g at a batch x, given by its vector-Jacobian product v -> J' v.

    `broadcasts`: v may have an additional leading axis. `trace` computes tr J of every sample in closed form, if known.
    """

    def __init__(
        self, vjp: VectorJacobianProduct, *, broadcasts: bool = False, trace: Callable[[], Tensor] | None = None
    ) -> None:
        self.vjp, self.broadcasts, self.trace = vjp, broadcasts, trace

    def __call__(self, v: Tensor) -> Tensor:
        return self.vjp(v)

    def matrix(self, x: Tensor) -> Tensor:
        """Compute the dense Jacobians, (batch, d, d)."""
        batch, d = len(x), math.prod(x.shape[1:])
        basis = torch.eye(d, dtype=x.dtype, device=x.device).reshape(d, 1, *x.shape[1:]).expand(d, *x.shape)
        if self.broadcasts:
            rows = self.vjp(basis)
        else:
            chunk = max(1, _CHUNK // (batch * d))
            rows = torch.func.vmap(self.vjp, chunk_size=chunk)(basis)
        return rows.reshape(d, batch, d).transpose(0, 1)

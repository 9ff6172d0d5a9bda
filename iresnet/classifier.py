"""Classifier: an invertible transform with a head. What it classifies by can be turned back into the input."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from .fixed_point import Solver
from .inverse import Decoder
from .residual import outermost_call
from .transform import Transform, check_context


class Classifier(nn.Module):
    """Logits from the code of an invertible network; `decode` returns the input a code came from.

    >>> import torch
    >>> from iresnet import ResidualBlock, contractive_mlp
    >>> model = Classifier(ResidualBlock(contractive_mlp(4, hidden=(8,))), nn.Linear(4, 3)).eval()
    >>> x = torch.randn(2, 4)
    >>> model(x).shape, bool((model.decode(model.encode(x)) - x).abs().max() < 1e-4)
    (torch.Size([2, 3]), True)
    """

    def __init__(self, transform: Transform, head: nn.Module) -> None:
        super().__init__()
        self.transform, self.head = transform, head
        #: What turns codes into inputs, as a flow's (`Flow.decoder`).
        self.decoder = Decoder()

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        check_context(self.transform, context)
        with outermost_call(self, x):
            return cast(Tensor, self.head(self.transform(x, context)))

    def encode(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """The code of x: what the head sees."""
        check_context(self.transform, context)
        with outermost_call(self, x):
            return cast(Tensor, self.transform(x, context))

    def decode(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> Tensor:
        """The input with code z, each block's solve proven."""
        check_context(self.transform, context)
        return self.decoder(self.transform, z, context, tolerance=tolerance, solver=solver)

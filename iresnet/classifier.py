"""Classifier: an invertible transform with a head. The code that it classifies can be decoded to the input."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from .model import Model
from .outermost import outermost_call
from .transform import Transform, check_context


class Classifier(Model):
    """Computes logits from the code of an invertible network; `decode` returns the input of a code.

    >>> import torch
    >>> from iresnet import ResidualBlock, contractive_mlp
    >>> model = Classifier(ResidualBlock(contractive_mlp(4, hidden=(8,))), nn.Linear(4, 3)).eval()
    >>> x = torch.randn(2, 4)
    >>> model(x).shape, bool((model.decode(model.encode(x)) - x).abs().max() < 1e-4)
    (torch.Size([2, 3]), True)
    """

    def __init__(self, transform: Transform, head: nn.Module) -> None:
        super().__init__(transform)
        self.head = head

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        check_context(self.transform, context)
        with outermost_call(self, x):
            return cast(Tensor, self.head(self.transform(x, context)))

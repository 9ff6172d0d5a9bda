"""g(x; c) = rest(first(x) + embed(c)): a network with a context, and Lipschitz in x whatever that does."""

from __future__ import annotations

from typing import ClassVar, cast

from torch import Tensor, nn


class Conditioned(nn.Module):
    """g(x; c) = rest(first(x) + embed(c)): a network that is Lipschitz in x whatever the context does.

    `embed` is free: its output must fit what `first` returns. Only x counts for invertibility, so only `first` and
    `rest` are bounded. An inverse evaluates `embed` once, and is one for that value of it.
    """

    outside_proof: ClassVar[tuple[str, ...]] = ("embed",)

    def __init__(self, first: nn.Module, embed: nn.Module, rest: nn.Module) -> None:
        super().__init__()
        self.first, self.embed, self.rest = first, embed, rest

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return cast(Tensor, self.rest(self.add_embedding(self.first(x), context)))

    def add_embedding(self, h: Tensor, context: Tensor | None) -> Tensor:
        """h + embed(context), an embedding per channel spread over the positions."""
        return add_per_channel(h, self.embed_context(context, len(h)))

    def embed_context(self, context: Tensor | None, rows: int) -> Tensor:
        """embed(context), for so many samples."""
        if context is None:
            raise ValueError("this network is conditional; pass context=...")
        if len(context) != rows:
            raise ValueError(f"context must have a row for every sample; got {len(context)} rows for {rows} samples.")
        return cast(Tensor, self.embed(context))

    def cast_context(self, context: Tensor) -> Tensor:
        """The context as `embed` takes it: numbers in the type of its weights, integers as they are."""
        like = next((p for p in self.embed.parameters() if p.is_floating_point()), context)
        return context.to(like.dtype) if context.is_floating_point() else context


def add_per_channel(h: Tensor, shift: Tensor) -> Tensor:
    """h + shift, a number per channel spread over the positions."""
    return h + shift.reshape(*shift.shape, *(1,) * (h.dim() - shift.dim()))

"""A branch with a context: g(x; c) = rest(first(x) + embed(c)) is Lipschitz in x, whatever `embed` does."""

from __future__ import annotations

from typing import ClassVar, cast

from torch import Tensor, nn

from ..batch import check_is_batch


class Conditioned(nn.Module):
    """g(x; c) = rest(first(x) + embed(c)), Lipschitz in x for every context c.

    `embed` may be any network whose output can be added to that of `first`. Invertibility in x needs bounds on `first`
    and `rest` only. An inverse evaluates `embed` once and is valid for that value.
    """

    outside_proof: ClassVar[tuple[str, ...]] = ("embed",)

    def __init__(self, first: nn.Module, embed: nn.Module, rest: nn.Module) -> None:
        super().__init__()
        self.first, self.embed, self.rest = first, embed, rest

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return cast(Tensor, self.rest(self.add_embedding(self.first(x), context)))

    def add_embedding(self, h: Tensor, context: Tensor | None) -> Tensor:
        """Return h + embed(context); an embedding per channel is broadcast over the positions."""
        return add_per_channel(h, self.embed_context(context, len(h)))

    def embed_context(self, context: Tensor | None, samples: int) -> Tensor:
        """Return embed(context), in the dtype of its weights, after checking that there is one context per sample."""
        if context is None:
            raise ValueError("this network is conditional; pass context=...")
        check_is_batch(context)
        if len(context) != samples:
            raise ValueError(f"context must have one row per sample; got {len(context)} rows for {samples} samples.")
        first = self.embed[0] if isinstance(self.embed, nn.Sequential) and len(self.embed) else self.embed
        if isinstance(first, nn.Linear) and context.shape[-1] != first.in_features:
            raise ValueError(f"context must have shape (batch, {first.in_features}); got {tuple(context.shape)}.")
        return cast(Tensor, self.embed(self._cast(context)))

    def _cast(self, context: Tensor) -> Tensor:
        """Copy a context, as `embed` may work in place, in the dtype of its weights; integers stay integers."""
        like = next((p for p in self.embed.parameters() if p.is_floating_point()), context)
        return context.to(like.dtype if context.is_floating_point() else context.dtype, copy=True)


def add_per_channel(h: Tensor, shift: Tensor) -> Tensor:
    """Return h + shift; one number per channel is broadcast over the positions, but h must not be, which expands g."""
    wide = shift.reshape(*shift.shape, *(1,) * (h.dim() - shift.dim()))
    if wide.dim() > h.dim() or any(size not in (1, n) for size, n in zip(wide.shape, h.shape, strict=True)):
        raise ValueError(
            f"embed must return one number per channel, or the shape of what it is added to, {tuple(h.shape)}; got "
            f"{tuple(shift.shape)}."
        )
    return h + wide

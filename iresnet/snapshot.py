"""g as it was at one moment: what a proof is about, and what an inverse is computed with.

A private copy without constraints, in float64, beside its Lipschitz bound and the bound of what rounding hides of it.
An inverse is solved and proven with it alone, so that nothing that happens to the live g meanwhile, in this thread or
in another, can make a proof false. What embeds a context is not part of it: its value is given.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from . import lipschitz as lip
from .fixed_point import Branch
from .float64 import Rounding
from .lipschitz import Bound, Conditioned

Shape: TypeAlias = tuple[int, ...]


@dataclass
class Snapshot:
    """g as it was at one moment, without constraints and in float64, and what is known of it then.

    What is proven is proven of this copy: whatever another thread does to the weights meanwhile, it stays true of it.
    """

    g: nn.Module
    bound: Bound
    #: Where g is a user's: the module itself, for what a copy in float64 cannot do.
    live: nn.Module | None = None
    _copies: dict[torch.dtype, nn.Module] = field(default_factory=dict)
    _rounding: Rounding | None = None

    def rounding(self, input_shape: Shape, given: Tensor | None = None) -> Rounding:
        """What rounding in float64 can hide of x + g(x) - z; assumed where nothing is proven of g.

        `input_shape` is the shape of the snapshot. Of a conditional g it depends on the embeddings that are `given`.
        """
        if not (self.bound.proven and self.bound.value < 1):
            return Rounding.assumed()
        if given is not None:
            return lip.rounding(self.g, self.bound, input_shape, given)
        if self._rounding is None:
            self._rounding = lip.rounding(self.g, self.bound, input_shape)
        return self._rounding

    def branch(self, given: Tensor | None, dtype: torch.dtype = torch.float64) -> Branch:
        """g in this precision as a function of x and its rows, for what is given beside x."""
        if dtype not in self._copies:
            self._copies[dtype] = self.g if dtype == torch.float64 else copy.deepcopy(self.g).to(dtype)
        g: Any = self._copies[dtype]

        def at(x: Tensor, rows: Tensor) -> Tensor:
            part = [] if given is None else [given[rows].to(dtype) if given.is_floating_point() else given[rows]]
            y = g.at(x, *part) if type(g) is Conditioned and part else self._of_user(g, x, *part)
            check_shape(x, y)
            return y

        return at

    def _of_user(self, g: nn.Module, *arguments: Tensor) -> Tensor:
        """g of these; a user's, which may close over what it was copied from, in its own precision if need be."""
        try:
            return cast(Tensor, g(*arguments))
        except RuntimeError:
            if self.live is None:
                raise
            return cast(Tensor, Live(self.live)(*arguments))


def check_shape(x: Tensor, y: Tensor) -> None:
    """Refuse a g that returns another shape than it is given."""
    if y.shape != x.shape:
        raise ValueError(
            f"g must return the shape it is given; got {tuple(y.shape)} for {tuple(x.shape)}. "
            "Let its last layer have as many outputs as its first has inputs."
        )


class Live(nn.Module):
    """A user's g that cannot be copied, as it is, in its own precision."""

    def __init__(self, g: nn.Module) -> None:
        super().__init__()
        self._g = [g]  # not a submodule: nothing that is done to this one is done to g

    def __deepcopy__(self, memo: dict[int, Any]) -> Live:
        return self

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        (g,) = self._g
        like = next(_numbers(g), x)
        given = [c.to(like.dtype) if c.is_floating_point() else c for c in context]
        return cast(Tensor, g(x.to(like.dtype), *given)).to(x.dtype)


def _numbers(g: nn.Module) -> Iterator[Tensor]:
    """The floating-point tensors of a module, wherever it keeps them."""
    for m in g.modules():
        for value in (*m._parameters.values(), *m._buffers.values(), *vars(m).values()):
            if isinstance(value, Tensor) and value.is_floating_point():
                yield value

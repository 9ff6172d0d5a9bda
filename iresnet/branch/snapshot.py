"""g as it was at one moment: what a proof is about, and what an inverse is computed with.

A private copy without constraints, in float64, beside its Lipschitz bound and the bound of what rounding hides of it.
An inverse is solved and proven with it alone, so that nothing that happens to the live g meanwhile, in this thread or
in another, can make a proof false. What embeds a context is not part of it: its value is given.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from ..fixed_point import Branch
from ..float64 import Rounding
from ..lipschitz.constraint import release_
from .constant import Bound
from .convolution import cpu_convolution, pack_weights
from .form import PreparedBranch, to_channels_last
from .program import ParsedBranch
from .rounding import rounding_bound

Shape: TypeAlias = tuple[int, ...]


@dataclass
class Snapshot:
    """g as it was at one moment, without constraints and in float64, and what is known of it then.

    What is proven is proven of this copy: whatever another thread does to the weights meanwhile, it stays true of it.
    """

    g: nn.Module
    bound: Bound
    #: Its program, where it is known and can be read.
    parsed: ParsedBranch | None = None
    #: Where g is a user's: the module itself, for what a copy in float64 cannot do.
    live: nn.Module | None = None
    _copies: dict[torch.dtype, Any] = field(default_factory=dict)
    _rounding: Rounding | None = None

    @property
    def inverse_lipschitz(self) -> float:
        """Lip(F^-1) <= 1 / (1 - L) of F(x) = x + g(x) (Lemma 2); infinite where no contraction is known."""
        return 1 / (1 - self.bound.value) if self.bound.value < 1 else math.inf

    def rounding(self, input_shape: Shape, given: Tensor | None = None) -> Rounding:
        """What rounding in float64 can hide of x + g(x) - z; assumed where nothing is proven of g.

        `input_shape` is the shape of the snapshot. Of a conditional g it depends on the embeddings that are `given`.
        """
        if self.parsed is None or not (self.bound.proven and self.bound.value < 1):
            return Rounding.assumed()
        if given is not None:
            values = self.parsed.tensors(given, torch.float64)
            return rounding_bound(self.parsed.program, values, self.bound.constants, input_shape, len(given))
        if self._rounding is None:
            values = self.parsed.tensors(dtype=torch.float64)
            self._rounding = rounding_bound(self.parsed.program, values, self.bound.constants, input_shape)
        return self._rounding

    def branch(self, given: Tensor | None, dtype: torch.dtype = torch.float64) -> Branch:
        """g in this precision as a function of x and its rows, for what is given beside x."""
        if self.parsed is None:
            return self._module(given, dtype)
        if dtype not in self._copies:
            self._copies[dtype] = self._form(dtype)
        form, conditional, on_cpu = (
            cast(PreparedBranch, self._copies[dtype]),
            self.parsed.program.is_conditional,
            _on_cpu(self.g),
        )
        if conditional and given is None:
            raise ValueError("this network is conditional; pass context=...")

        def at(x: Tensor, rows: Tensor) -> Tensor:
            now = _with_embedding(form, cast(Tensor, given)[rows].to(dtype)) if conditional else form
            y = now(to_channels_last(x) if on_cpu else x)
            check_same_shape(x, y)
            return y

        return at

    def _form(self, dtype: torch.dtype) -> PreparedBranch:
        """On a CPU images have their channels last, and float64 convolves by what takes the least time there."""
        found = cast(ParsedBranch, self.parsed)
        values = [t.to(dtype) for t in found.tensors(torch.zeros(()), torch.float64)]
        if not _on_cpu(self.g):
            return PreparedBranch(found.program, values)
        if dtype != torch.float64:
            return PreparedBranch(found.program, [to_channels_last(t) for t in values])
        ways = [cpu_convolution(step, own) for step, _, own in found.program.with_tensors(values)]
        return PreparedBranch(found.program, pack_weights(found.program, values, ways), ways)

    def _module(self, given: Tensor | None, dtype: torch.dtype) -> Branch:
        """A g that cannot be read, by a copy of it."""
        if dtype not in self._copies:
            self._copies[dtype] = self.g if dtype == torch.float64 else copy.deepcopy(self.g).to(dtype)
        g: Any = self._copies[dtype]

        def at(x: Tensor, rows: Tensor) -> Tensor:
            part = [] if given is None else [given[rows].to(dtype) if given.is_floating_point() else given[rows]]
            y = self._of_user(g, x, *part)
            check_same_shape(x, y)
            return y

        return at

    def _of_user(self, g: nn.Module, *arguments: Tensor) -> Tensor:
        """g of these; a user's, which may close over what it was copied from, in its own precision if need be."""
        try:
            return cast(Tensor, g(*arguments))
        except RuntimeError:
            if self.live is None:
                raise
            return cast(Tensor, UncopiedBranch(self.live)(*arguments))


def _with_embedding(form: PreparedBranch, shift: Tensor) -> PreparedBranch:
    """The form with the embedding of a context in its place."""
    values = [[shift] if step.kind == "shift" else own for step, _, own in form.program.with_tensors(form.values)]
    return replace(form, values=[t for own in values for t in own])


def _on_cpu(g: nn.Module) -> bool:
    return all(p.device.type == "cpu" for p in g.parameters())


def unconstrained_copy(g: nn.Module) -> nn.Module:
    """A copy of g without constraints: the stored, constrained weights as they are, in eval.

    What a user wrote beside the function of x (`Conditioned.embed`) is not copied.
    """
    return remove_constraints_(copy_branch(g))


def remove_constraints_(g: nn.Module) -> nn.Module:
    """g itself without constraints, its weights as they are, in eval and without gradients."""
    return release_(g).requires_grad_(False).eval()


def copy_branch(g: nn.Module) -> nn.Module:
    """A copy of g, without what is not part of the function of x."""
    memo: dict[int, Any] = {}
    for m in g.modules():
        memo |= {
            id(getattr(m, name)): nn.Identity() for name in getattr(type(m), "outside_proof", ()) if name in m._modules
        }
    return copy.deepcopy(g, memo)


def check_same_shape(x: Tensor, y: Tensor) -> None:
    """Refuse a g that returns another shape than it is given."""
    if y.shape != x.shape:
        raise ValueError(
            f"g must return the shape it is given; got {tuple(y.shape)} for {tuple(x.shape)}. "
            "Let its last layer have as many outputs as its first has inputs."
        )


class UncopiedBranch(nn.Module):
    """A user's g that cannot be copied, as it is, in its own precision."""

    def __init__(self, g: nn.Module) -> None:
        super().__init__()
        self._g = [g]  # not a submodule: nothing that is done to this one is done to g

    def __deepcopy__(self, memo: dict[int, Any]) -> UncopiedBranch:
        return self

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        (g,) = self._g
        like = next(_float_tensors(g), x)
        given = [c.to(like.dtype) if c.is_floating_point() else c for c in context]
        return cast(Tensor, g(x.to(like.dtype), *given)).to(x.dtype)


def _float_tensors(g: nn.Module) -> Iterator[Tensor]:
    """The floating-point tensors of a module, wherever it keeps them."""
    for m in g.modules():
        for value in (*m._parameters.values(), *m._buffers.values(), *vars(m).values()):
            if isinstance(value, Tensor) and value.is_floating_point():
                yield value

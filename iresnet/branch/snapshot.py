"""A snapshot of g: a private copy, which proofs are about and inverses are computed with.

The copy has no constraints and is in float64; the snapshot holds it with its Lipschitz bound and its rounding error. An
inverse is solved and proven with the snapshot alone, so nothing that happens to the live g meanwhile, in this or
another thread, can make a proof false. The embedding of a context is not part of it: its value is passed in.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..batch import Shape
from ..fingerprint import MODULE_ATTRIBUTES, Fingerprint, modules_in_proof
from ..fixed_point import FEW_DIMENSIONS, MAX_DIMENSION, Affine, Branch
from ..float64 import Rounding
from ..lipschitz.order import primitives
from ..lipschitz.parametrized import release_
from ..trust import NoBoundKnown, unwrap, why_modified
from .constant import Bound, lipschitz_bound
from .convolution import cpu_convolution, pack_weights
from .explicit import VectorBranch, is_explicit
from .prepared import PreparedBranch, to_channels_last
from .program import ParsedBranch, Program, try_parse
from .rounding import rounding_bound


@dataclass
class Snapshot:
    """A copy of g at one moment, without constraints and in float64, and what is proven of it.

    A proof is about this copy: it stays true whatever another thread does to the weights of the live g.
    """

    g: nn.Module
    bound: Bound
    #: Its program; None if it cannot be parsed.
    parsed: ParsedBranch | None = None
    #: For a user's g: the live module, for calls that fail on a float64 copy.
    live: nn.Module | None = None
    _copies: dict[torch.dtype, Any] = field(default_factory=dict)
    _rounding: Rounding | None = None
    _affine: dict[torch.dtype, Affine | None] = field(default_factory=dict)
    _vectors: dict[torch.dtype, VectorBranch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._on_cpu = all(p.device.type == "cpu" for p in self.g.parameters())

    @property
    def inverse_lipschitz(self) -> float:
        """The bound Lip(F^-1) <= 1 / (1 - L) of F(x) = x + g(x) (Lemma 2); infinite if L is not below 1."""
        return 1 / (1 - self.bound.value) if self.bound.value < 1 else math.inf

    def rounding(self, input_shape: Shape, conditioning: Tensor | None = None) -> Rounding:
        """Bound the rounding error of x + g(x) - z in float64; a default is assumed if nothing is proven of g.

        `input_shape` must be that of the snapshot. For a conditional g the bound depends on its `conditioning`.
        """
        if self.parsed is None or not (self.bound.proven and self.bound.value < 1):
            return Rounding.assumed()
        if conditioning is not None:
            values = self.parsed.tensors(conditioning, torch.float64)
            return rounding_bound(self.parsed.program, values, self.bound.constants, input_shape, len(conditioning))
        if self._rounding is None:
            values = self.parsed.tensors(dtype=torch.float64)
            self._rounding = rounding_bound(self.parsed.program, values, self.bound.constants, input_shape)
        return self._rounding

    def affine(self, input_shape: Shape, dtype: torch.dtype = torch.float64) -> Affine | None:
        """Return an affine approximation of a g on vectors, on a CPU; None with a context and for a user's g."""
        if dtype not in self._affine:
            fitted = self._fit_affine(input_shape) if dtype == torch.float64 else self.affine(input_shape)
            self._affine[dtype] = None if fitted is None else fitted.to(dtype)
        return self._affine[dtype]

    def _fit_affine(self, input_shape: Shape) -> Affine | None:
        if self.parsed is None or len(input_shape) != 1 or input_shape[0] > MAX_DIMENSION or not self.bound.value < 1:
            return None
        if self.parsed.program.is_conditional or not is_explicit(self.parsed.program) or not self._on_cpu:
            return None
        reference = self.branch(None)

        def g(x: Tensor) -> Tensor:
            return reference(x, torch.arange(len(x), device=x.device))

        linearise = self._linearise if input_shape[0] <= FEW_DIMENSIONS else None
        return Affine.fit(g, *input_shape, self.bound.value, linearise)

    def _linearise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._on_vectors(x.dtype).linearise(x)

    def _on_vectors(self, dtype: torch.dtype) -> VectorBranch:
        if dtype not in self._vectors:
            program, values = self._in(dtype)
            self._vectors[dtype] = VectorBranch(program, values)
        return self._vectors[dtype]

    def _in(self, dtype: torch.dtype) -> tuple[Program, list[Tensor]]:
        """Return the program and its tensors in this dtype."""
        parsed = cast(ParsedBranch, self.parsed)
        return parsed.program, [t.to(dtype) for t in parsed.tensors(torch.zeros(()), torch.float64)]

    def branch(self, conditioning: Tensor | None, dtype: torch.dtype = torch.float64) -> Branch:
        """Return g in this dtype as a function of (x, indices of its samples in the batch).

        `conditioning` is what g gets beside x: the embedding of a context, or the context itself for a user's g.
        """
        if self.parsed is None:
            return self._module(conditioning, dtype)
        if dtype not in self._copies:
            self._copies[dtype] = self._prepare(dtype)
        prepared, conditional, on_cpu = (
            cast("PreparedBranch | VectorBranch", self._copies[dtype]),
            self.parsed.program.is_conditional,
            self._on_cpu,
        )
        if conditional and conditioning is None:
            raise ValueError("this network is conditional; pass context=...")

        def at(x: Tensor, rows: Tensor) -> Tensor:
            now = prepared
            if conditional:
                now = _with_embedding(cast(PreparedBranch, prepared), cast(Tensor, conditioning)[rows].to(dtype))
            y = now(to_channels_last(x) if on_cpu else x)
            check_same_shape(x, y)
            return y

        return at

    def _prepare(self, dtype: torch.dtype) -> PreparedBranch | VectorBranch:
        """Prepare g for this dtype. On a CPU images are channels-last, and float64 uses the fastest convolution."""
        program, values = self._in(dtype)
        if not self._on_cpu:
            return PreparedBranch(program, values)
        if dtype in (torch.float32, torch.float64) and is_explicit(program):
            return self._on_vectors(dtype)
        if dtype != torch.float64:
            return PreparedBranch(program, [to_channels_last(t) for t in values])
        functions = [cpu_convolution(step, own) for step, _, own in program.with_tensors(values)]
        return PreparedBranch(program, pack_weights(program, values, functions), functions)

    def _module(self, conditioning: Tensor | None, dtype: torch.dtype) -> Branch:
        """Return a g that cannot be parsed, as a copy of the module in this dtype."""
        if dtype not in self._copies:
            self._copies[dtype] = self.g if dtype == torch.float64 else copy_branch(self.g).to(dtype)
        g: Any = self._copies[dtype]

        def at(x: Tensor, rows: Tensor) -> Tensor:
            parts = [] if conditioning is None else [conditioning[rows]]
            y = self._call(g, x, *(c.to(dtype) if c.is_floating_point() else c for c in parts))
            check_same_shape(x, y)
            return y

        return at

    def _call(self, g: nn.Module, *arguments: Tensor) -> Tensor:
        """Call g; if the copy of a user's g fails, since it refers to its original, call the live one."""
        try:
            return cast(Tensor, g(*arguments))
        except RuntimeError:
            if self.live is None:
                raise
            return cast(Tensor, UncopiedBranch(self.live)(*arguments))


def take_snapshot(
    g: nn.Module, input_shape: Shape | None, asserted: float | None = None
) -> tuple[Snapshot, Fingerprint | None]:
    """Copy g as it is now and prove what can be proven of it; the fingerprint, to cache it by, is None for a user's g.

    `asserted` replaces the proven Lipschitz bound by one that the user vouches for.
    """
    private = _private_copy(g)  # everything below is about this copy
    if private is None:
        return Snapshot(
            UncopiedBranch(g), _unproven("g cannot be copied, and proofs are about a copy.", asserted)
        ), None
    bound, fingerprint = _prove_bound(private, g, input_shape, asserted), None
    with suppress(NoBoundKnown):
        fingerprint = Fingerprint(private)
    plain = unwrap(remove_constraints_(private)).double()
    parsed = try_parse(plain) if bound.proven or fingerprint is not None else None
    if bound.proven and parsed is None:  # its rounding error is not known
        bound = _unproven("g cannot be parsed in float64.")
    return Snapshot(plain, bound, parsed, g if fingerprint is None else None), fingerprint


def _private_copy(g: nn.Module) -> nn.Module | None:
    """Copy g, if that is possible and the copy computes the same function; else return None."""
    if any("_compiled_call_impl" in (why_modified(m) or "") for m in g.modules()):  # a copy would lose it
        return None
    try:
        return copy_branch(g)
    except (RuntimeError, TypeError):
        return None


def _unproven(reason: str, asserted: float | None = None) -> Bound:
    return Bound(math.inf, False, reason=reason) if asserted is None else Bound(asserted, False)


def _prove_bound(g: nn.Module, live: nn.Module, input_shape: Shape | None, asserted: float | None) -> Bound:
    """Bound Lip(g), where g may be a copy of `live`; infinite, with the reason, if that is not possible."""
    if asserted is not None:
        return Bound(asserted, False)
    try:
        for _ in primitives(live):  # raises for modifications that a copy may have lost
            pass
        return lipschitz_bound(g, input_shape)
    except NoBoundKnown as error:
        return _unproven(str(error))


def _with_embedding(prepared: PreparedBranch, shift: Tensor) -> PreparedBranch:
    """Return the prepared branch with the embedding of a context as the tensor of its shift."""
    values = [
        [shift] if step.kind == "shift" else own for step, _, own in prepared.program.with_tensors(prepared.values)
    ]
    return replace(prepared, values=[t for own in values for t in own])


def unconstrained_copy(g: nn.Module) -> nn.Module:
    """Return a copy of g in eval mode whose constrained weights are plain parameters.

    Modules outside the function of x (`Conditioned.embed`) are not copied.
    """
    return remove_constraints_(copy_branch(g))


def remove_constraints_(g: nn.Module) -> nn.Module:
    """Remove the constraints of g in place, keeping its weights; set it to eval mode without gradients."""
    return release_(g).requires_grad_(False).eval()


def copy_branch(g: nn.Module) -> nn.Module:
    """Copy g, without modules that are not part of the function of x.

    Of tensors that were computed, such as those of `torch.func.functional_call`, the values are copied. Attributes that
    cannot be copied, such as a lock or an open file, are shared.
    """
    needed = modules_in_proof(g)
    outside = {
        id(child): nn.Identity()
        for m in g.modules()
        for name in getattr(type(m), "outside_proof", ())
        if (child := m._modules.get(name)) is not None and id(child) not in needed
    }
    try:
        copied = copy.deepcopy(g, dict(outside))
    except (RuntimeError, TypeError):
        copied = copy.deepcopy(g, {**_uncopied_values(needed.values()), **outside})
    live = {id(t) for t in (*g.parameters(), *g.buffers())}
    if any(id(t) in live for t in (*copied.parameters(), *copied.buffers())):
        raise RuntimeError(f"a copy of {type(g).__name__} shares tensors with it. Remove its __deepcopy__.")
    return copied


def _uncopied_values(modules: Iterable[nn.Module]) -> dict[int, Any]:
    """Return what stands in the copies of these modules for tensors and attributes that `copy.deepcopy` refuses."""
    values: dict[int, Any] = {}
    for m in modules:
        attributes = {name: value for name, value in vars(m).items() if name not in MODULE_ATTRIBUTES}
        for value in (*m._parameters.values(), *m._buffers.values(), *attributes.values()):
            if isinstance(value, Tensor):
                if not value.is_leaf:
                    values[id(value)] = value.detach().clone()
                continue
            try:
                copy.deepcopy(value)
            except (RuntimeError, TypeError):
                values[id(value)] = value
    return values


def check_same_shape(x: Tensor, y: Tensor) -> None:
    """Raise if g returns another shape than its input."""
    if y.shape != x.shape:
        remedy = "Let its last layer have as many outputs as its first has inputs."
        if x.dim() > 2 and y.shape[:2] == x.shape[:2]:
            remedy = "Use stride 1 and padding that keeps the size; Squeeze() before the block halves that of an image."
        raise ValueError(f"g must keep the shape of its input; got {tuple(y.shape)} for {tuple(x.shape)}. {remedy}")


class UncopiedBranch(nn.Module):
    """Calls a user's g that cannot be copied, in its own dtype."""

    def __init__(self, g: nn.Module) -> None:
        super().__init__()
        self._g = [g]  # not a submodule: what is done to this module must not be done to g

    def __deepcopy__(self, memo: dict[int, Any]) -> UncopiedBranch:
        return self

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        (g,) = self._g
        like = next(_float_tensors(g), x)
        cast_context = (c.to(like.dtype) if c.is_floating_point() else c for c in context)
        return cast(Tensor, g(x.to(like.dtype), *cast_context)).to(x.dtype)


def _float_tensors(g: nn.Module) -> Iterator[Tensor]:
    """Yield the floating-point tensors of a module, wherever it stores them."""
    for m in g.modules():
        for value in (*m._parameters.values(), *m._buffers.values(), *vars(m).values()):
            if isinstance(value, Tensor) and value.is_floating_point():
                yield value

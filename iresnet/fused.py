"""Runs of ActNorms and residual blocks on vectors as one function, forward and backward written out, on a CPU.

    block       z = x + g(x)                        ln det(I + J), with d ln det = sum_p s_p' dJ v_p  (`branch.factors`)
    ActNorm     z = (x + shift) exp(log_scale)      ln det = sum(log_scale)

An autograd graph of a deep flow on vectors consists of thousands of small operations, whose overhead exceeds their
arithmetic. Here a whole run is one node of the graph. It computes the same as its parts one by one, which are the
fallback for everything else (images, contexts, a g of a user's own, other devices, compilers, `torch.func`, forward
mode) and for second derivatives.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from .allocator import keep_freed_memory
from .branch import ParsedBranch, Program, try_parse
from .branch.derivative import linearise_program, vector_jacobian_product
from .branch.explicit import DualPass, is_explicit
from .branch.factors import TINY, exact_factors, series_factors, tiny_series_factors
from .compiler import has_tangent, is_transforming
from .logdet import (
    EXACT_UP_TO,
    DrawnSeries,
    Estimator,
    Exact,
    Jacobian,
    PowerSeries,
    RussianRoulette,
    SeriesDraw,
    StoppedRoulette,
    refuse_second_derivative,
)
from .residual import ResidualBlock
from .transform import Transform
from .transforms.closed_form import check_channels
from .transforms.elementary import ActNorm
from .trust import why_modified

#: The most rows, values and tangents together, that are handled at once: their activations fit into a core's cache.
_ROWS = 12288


#: The dtypes of fused runs. In float64, which is for results that depend on nothing else, the parts run one by one.
DTYPES = (torch.float32,)


@dataclass(frozen=True)
class Part:
    """One transform of a run; `branch` is the parsed g of a residual block, None for an ActNorm."""

    transform: ActNorm | ResidualBlock
    branch: ParsedBranch | None

    def tensors(self) -> list[Tensor]:
        if self.branch is not None:
            return self.branch.tensors()
        norm = cast(ActNorm, self.transform)
        return [norm.shift, norm.log_scale]


class _ThreadState(threading.local):
    by_parts = False


_thread_state = _ThreadState()


@contextmanager
def unfused() -> Iterator[None]:
    """Context in which this thread runs the parts of every chain one by one, as when a failed step is replayed."""
    before, _thread_state.by_parts = _thread_state.by_parts, True
    try:
        yield
    finally:
        _thread_state.by_parts = before


def read_run(transforms: Sequence[Transform], x: Tensor, estimator: Estimator | None) -> list[Part]:
    """Return the longest run at the start of `transforms`, for inputs like x; empty if it has no residual block."""
    if not suits(x, estimator):
        return []
    parts = list[Part]()
    for t in transforms:
        if (part := _read_part(t)) is None:
            break
        parts.append(part)
    return parts if any(part.branch is not None for part in parts) else []


def suits(x: Tensor, estimator: Estimator | None) -> bool:
    """Whether this batch and estimator can be handled here."""
    if torch.compiler.is_compiling() or _thread_state.by_parts or x.dim() != 2:
        return False
    if estimator is None and x.shape[1] > EXACT_UP_TO:  # a default that is not known here
        return False
    known = estimator is None or type(estimator) in (Exact, PowerSeries, RussianRoulette, StoppedRoulette)
    plain = x.device.type == "cpu" and x.dtype in DTYPES
    return known and plain and not (is_transforming() or torch.is_autocast_enabled("cpu"))


def _read_part(t: Transform) -> Part | None:
    if type(t) is ActNorm:
        return Part(t, None) if why_modified(t) is None else None
    if type(t) is not ResidualBlock or why_modified(t) is not None:
        return None
    parsed = try_parse(t.g)
    return None if parsed is None or not is_explicit(parsed.program) else Part(t, parsed)


def run_forward_and_logdet(
    parts: Sequence[Part], x: Tensor, estimator: Estimator | None, generator: torch.Generator | None
) -> tuple[Tensor, Tensor] | None:
    """Return the code and ln det of a run; None if its tensors or its default estimator do not allow it."""
    tensors, counts = list[Tensor](), list[int]()
    for part in parts:
        own = part.tensors()
        tensors += own
        counts.append(len(own))
    if any(t.dtype != x.dtype or t.device != x.device for t in tensors) or has_tangent(x, *tensors):
        return None
    draws = _draw(parts, x, estimator, generator)
    if draws is None:
        return None
    run = Run([None if part.branch is None else part.branch.program for part in parts], counts, draws)
    if torch.is_grad_enabled() and (x.requires_grad or any(t.requires_grad for t in tensors)):
        return cast("tuple[Tensor, Tensor]", _RunFunction.apply(run, x, *tensors))  # type: ignore[no-untyped-call]
    with torch.no_grad():
        z, logdet, _ = run.forward(x, tensors, keep=False)
    return z, logdet


#: The draws of a series for every probe; None for an exact log-determinant.
Draws = list[SeriesDraw] | None


def _draw(
    parts: Sequence[Part], x: Tensor, estimator: Estimator | None, generator: torch.Generator | None
) -> list[Draws] | None:
    """Draw the random numbers of every part, in order; None if a default estimator is not known here."""
    found = list[Draws]()
    for part in parts:
        block, chosen = part.transform, estimator
        if not isinstance(block, ResidualBlock):
            check_channels(x, "x", "ActNorm", block.channels)
            found.append(None)
            continue
        block.check_input(x, None)
        if chosen is None:
            chosen, generator = block.default_estimator(x, generator)
        if isinstance(chosen, DrawnSeries):
            constant = block.constant(tuple(x.shape[1:]), part.branch) if chosen.needs_lipschitz else None
            found.append([chosen.draw(x, constant, generator) for _ in range(chosen.probes)])
        elif type(chosen) is Exact:
            found.append(None)
        else:
            return None
    return found


class Run:
    """The computation of a run: programs (None for an ActNorm), number of tensors and draws of every part."""

    def __init__(self, programs: Sequence[Any], counts: Sequence[int], draws: Sequence[Draws]) -> None:
        self.programs, self.counts, self.draws = programs, counts, draws
        self.is_random = any(each is not None for each in draws)
        keep_freed_memory()

    def own(self, tensors: Sequence[Any]) -> Iterator[tuple[Any, Draws, list[Any]]]:
        """Yield (program, draws, own entries of `tensors`) of every part."""
        used = 0
        for program, count, draws in zip(self.programs, self.counts, self.draws, strict=True):
            yield program, draws, list(tensors[used : used + count])
            used += count

    def forward(self, x: Tensor, tensors: Sequence[Tensor], *, keep: bool) -> tuple[Tensor, Tensor, list[Any]]:
        """Return z, ln det, and the tape of every chunk of the batch, for `backward`."""
        size = len(x) if self.is_random else max(16, _ROWS // (1 + x.shape[1]))
        # Chunks of nearly equal size: few different shapes.
        chunks = torch.tensor_split(x, max(1, -(-len(x) // size))) if len(x) > size else [x]
        done = [self._forward_chunk(chunk, tensors, keep) for chunk in chunks]
        if len(done) == 1:
            z, logdet, tape = done[0]
            return z, logdet, [tape]
        return torch.cat([z for z, _, _ in done]), torch.cat([d for _, d, _ in done]), [tape for _, _, tape in done]

    def _forward_chunk(self, x: Tensor, tensors: Sequence[Tensor], keep: bool) -> tuple[Tensor, Tensor, list[Any]]:
        total, constant, tape = x.new_zeros(len(x)), x.new_zeros(()), list[Any]()
        for program, draws, own in self.own(tensors):
            if program is None:
                shift, log_scale = own
                tape.append((x, log_scale))
                x = (x + shift) * log_scale.exp()
                constant += log_scale.sum()
            else:
                y, logdet, entry = block_forward(program, own, x, draws, keep=keep)
                tape.append(entry)
                x, total = x + y, total + logdet
        return x, total + constant, tape if keep else []

    def backward(
        self, tapes: list[Any], tensors: Sequence[Tensor], dz: Tensor, dlogdet: Tensor, wanted: Sequence[bool]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the gradients of x and of the wanted tensors, given those of z and ln det."""
        sizes = [len(tape[0][0]) for tape in tapes]
        parts = list(self.own(tensors)), list(self.own(wanted))
        dx, total = list[Tensor](), list[Any]()
        for tape, *seeds in zip(tapes, torch.split(dz, sizes), torch.split(dlogdet, sizes), strict=True):
            first, found = self._backward_chunk(tape, parts, *seeds)
            dx.append(first)
            total = [a if a is None else a + b for a, b in zip(total, found, strict=True)] if total else found
        return torch.cat(dx) if len(dx) > 1 else dx[0], total

    def _backward_chunk(self, tape: list[Any], parts: Any, dz: Tensor, dlogdet: Tensor) -> tuple[Tensor, list[Any]]:
        found, summed, (own_tensors, own_wanted) = list[Any](), dlogdet.sum(), parts
        for entry, (program, _, own), (_, _, wanted) in zip(
            reversed(tape), reversed(own_tensors), reversed(own_wanted), strict=True
        ):
            if program is None:
                (x, log_scale), (shift, _) = entry, own
                dx = dz * log_scale.exp()
                gradients = [dx.sum(0), ((x + shift) * dx).sum(0) + summed]
                dz = dx
            else:
                dz, gradients = block_backward(entry, dz, dlogdet, wanted)
            found = [g if want else None for g, want in zip(gradients, wanted, strict=True)] + found
        return dz, found

    def plain(self, x: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return z and ln det as an ordinary graph, which can be differentiated any number of times."""
        total = x.new_zeros(len(x))
        for program, _, own in self.own(tensors):
            if program is None:
                shift, log_scale = own
                x, total = (x + shift) * log_scale.exp(), total + log_scale.sum()
                continue
            y, transposes = linearise_program(program, x, own)
            jacobian = Jacobian(partial(vector_jacobian_product, program, transposes), broadcasts=True)
            x, total = x + y, total + Exact()(jacobian, x)
        return x, total


def block_forward(
    program: Program, own: list[Tensor], x: Tensor, draws: Draws, *, keep: bool
) -> tuple[Tensor, Tensor, Any]:
    """Return g(x), ln det and what `block_backward` needs: the pass and the factors s."""
    if draws is None or x.shape[1] <= TINY:
        dual = DualPass(program, own, x, None, keep=keep)
    else:
        dual = DualPass(program, own, x, torch.stack([draw.v for draw in draws]), keep=keep)
    logdet, s = _logdet_and_factors(dual, draws, gradient=keep)
    dual.forget_slopes()
    return dual.y, logdet, (x, dual, s)


def _logdet_and_factors(dual: DualPass, draws: Draws, *, gradient: bool) -> tuple[Tensor, Tensor | None]:
    if draws is None:
        return exact_factors(dual, gradient=gradient)
    if dual.basis:
        values, s = zip(*(tiny_series_factors(dual, draw) for draw in draws), strict=True)
        return torch.stack(values).mean(0), torch.stack(s).mean(0)
    values, s = zip(*(series_factors(dual, draw, jv) for draw, jv in zip(draws, dual.jv, strict=True)), strict=True)
    return torch.stack(values).mean(0), torch.stack(s) / len(s)


def block_backward(
    entry: Any, dz: Tensor, dlogdet: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the gradients of x and of the tensors of g."""
    _, dual, s = entry
    dx, gradients = dual.backward(dz, s * dlogdet[:, None], wanted)
    return dx.add_(dz), gradients


class _RunFunction(torch.autograd.Function):
    """(x, tensors of all parts) -> z, ln det."""

    @staticmethod
    def forward(ctx: Any, run: Run, x: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        z, logdet, ctx.tapes = run.forward(x, tensors, keep=True)
        ctx.run = run
        ctx.save_for_backward(x, *tensors)  # refuses those that were changed in place
        return z, logdet

    @staticmethod
    def backward(ctx: Any, dz: Tensor, dlogdet: Tensor) -> tuple[Tensor | None, ...]:
        x, *tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            return (None, *_differentiable_backward(ctx.run, x, tensors, dz, dlogdet, wanted))
        # The tapes are freed at once, as autograd frees saved tensors. A second backward pass computes them again.
        tapes, ctx.tapes = ctx.tapes or ctx.run.forward(x, tensors, keep=True)[2], None
        dx, gradients = ctx.run.backward(tapes, tensors, dz, dlogdet, wanted[1:])
        return None, dx if wanted[0] else None, *gradients


def _differentiable_backward(
    run: Run, x: Tensor, tensors: Sequence[Tensor], dz: Tensor, dlogdet: Tensor, wanted: Sequence[bool]
) -> Iterator[Tensor | None]:
    """Return the gradients with a graph, by an ordinary pass; refused where the estimator is random."""
    if run.is_random:
        refuse_second_derivative()
    # Views, since autograd would count twice a tensor that comes twice, or that x is computed from: a block used again.
    x, *tensors = (t.view_as(t) for t in (x, *tensors))
    inputs = [t for t, want in zip((x, *tensors), wanted, strict=True) if want]
    # ln det does not depend on the shift of the last ActNorm, for example.
    pairs = [(t, g) for t, g in zip(run.plain(x, tensors), (dz, dlogdet), strict=True) if t.requires_grad]
    outputs, gradients = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outputs, inputs, gradients, create_graph=True, allow_unused=True))
    return (next(found) if want else None for want in wanted)

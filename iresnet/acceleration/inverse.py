"""The inverse of a whole chain as one fixed sequence of kernels, every block's solve proven in float64.

    Inverter(transform, codes).solve(z)        the report of `Chain.solve`, x in float64

Block by block, last to first: half precision finds the solution roughly, residuals in float32 and float64 refine it
(`refinement`), and ||x - x*|| <= ||x + g(x) - z|| / (1 - L) proves it, by a float64 residual or by the correction's
own product with the Jacobian (`rounding`). How much each block needs is found on the example. On a GPU all of it is
one CUDA graph and the only thing read back is whether every sample is proven; those that are not get one more
refinement, and after that `Chain.solve`, which takes the iterations it needs.

The code residual F(x) - z can be carried instead of evaluated. Going forward from x, let e be the difference of the
recomputed state and the solved one, zero at first. A block with residual r = z - x - g(x) maps it to

    e <- e + J e - r + O(||e||^2),        and a closed form to        e <- F_t(x + e) - z.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from ..elementary import ActNorm, InjectivePad, Squeeze
from ..fixed_point import RESIDUAL_ROUNDING, default_tolerance
from ..lipschitz import program, release_
from ..mixing import InvertibleConv1x1
from ..multiscale import Flatten
from ..preprocess import Logit, Standardise
from ..residual import ResidualBlock
from ..transform import Chain, ChainSolution, Shape, Transform, check_batch, check_finite
from .arithmetic import Arithmetic, Run, captured
from .branch import SLOPES, Branch, Maker, laid_out
from .refinement import Schedule, Solved, calibrate, norms, scaled, solve

#: Transforms whose inverse is a formula, and the largest code residual that is carried: its square is left out.
CLOSED = (ActNorm, Flatten, InjectivePad, InvertibleConv1x1, Squeeze, Standardise, Logit)
FAR = 1e-3


@dataclass
class _Part:
    """One transform of the chain; `branch` is the g of a residual block, None for a closed form."""

    transform: Transform
    expansion: float  # Lip(F^-1)
    lipschitz: float = 0.0
    proven: bool = True
    branch: Branch | None = None
    schedule: Schedule = field(default_factory=Schedule)


class Inverter:
    """The inverse of a chain of residual blocks and closed forms, for batches like `example`.

    `example` is a batch of codes, or the shape of one, (batch, ...), for which normal codes are drawn. Other batches
    are cut or filled up to its size. The weights are those of this moment: make another one when they have changed.
    `tolerance` is absolute, in l2, for every block and sample; None takes what float64 can hold. `schedule` fixes how
    much is done for every block, instead of what the example needs.

    >>> from iresnet import Chain, ResidualBlock, contractive_mlp
    >>> chain = Chain(ResidualBlock(contractive_mlp(2, hidden=(16,), lipschitz=0.8)))
    >>> bool(Inverter(chain, (4, 2)).solve(torch.randn(4, 2)).converged.all())
    True
    """

    def __init__(
        self,
        transform: Transform,
        example: Tensor | Shape,
        *,
        tolerance: float | None = 1e-5,
        arithmetic: Arithmetic | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        if tolerance is not None and not tolerance > 0:
            raise ValueError(f"tolerance must be positive; got {tolerance}.")
        z = self._example(transform, example)
        self.tolerance, self.shape = tolerance, tuple(z.shape)
        self.arithmetic = Arithmetic.on(z.device) if arithmetic is None else arithmetic
        # The stored weights as they are, in float64: the function that is inverted, and that proves the inverse.
        if tolerance is None and self.arithmetic.code == "linear":  # three digits of rounding errors say nothing
            self.arithmetic = replace(self.arithmetic, code="float64")
        exact = cast(Transform, release_(copy.deepcopy(transform)).double().eval().requires_grad_(False))
        self.transform = exact if exact.parts() else Chain(exact)
        #: Why `solve` is that of the chain, in a sentence; empty where it is accelerated.
        self.reason = _refusal(self.transform)
        self._runs: dict[int, Run] = {}
        if not self.reason:
            with torch.no_grad(), self.arithmetic.precision(z.device):
                self._prepare(z, schedule)

    @staticmethod
    def _example(transform: Transform, example: Tensor | Shape) -> Tensor:
        if isinstance(example, Tensor):
            check_batch(example, "example")
            check_finite(example, "example")
            return example.double()
        like = next(transform.parameters(), torch.zeros(()))
        generator = torch.Generator().manual_seed(0)
        z = torch.randn(*example, dtype=torch.float64, generator=generator).to(like.device)
        check_batch(z, "example")
        return z

    # ------------------------------------------------------------------------------------------------- preparing

    def _prepare(self, z: Tensor, schedule: Schedule | None) -> None:
        self.parts: list[_Part] = []
        self.maker = Maker(self.arithmetic)
        x = laid_out(z)
        for t in reversed(list(_flat(self.transform))):
            x = self._add(t, x, schedule)
            if self.reason:
                return
        self._constants(z)
        self._run(z, 0)

    @property
    def schedules(self) -> list[Schedule]:
        """How much is done for each block, last to first."""
        return [p.schedule for p in self.parts if p.branch is not None]

    def _add(self, t: Transform, z: Tensor, schedule: Schedule | None) -> Tensor:
        """Append the part for one transform, given its codes; its solutions."""
        if not isinstance(t, ResidualBlock):
            x = laid_out(t.inverse(z))
            self.parts.append(_Part(t, t.stretch(tuple(x.shape[1:])).inverse))
            return x
        bound = t.bound(tuple(z.shape[1:]))
        if not bound.value < 1:
            self.reason = f"not accelerated: a residual block is no proven contraction, Lip(g) <= {bound.value:.4g}."
            return z
        branch = self.maker.branch(t, z, bound)
        part = _Part(t, 1 / (1 - bound.value), bound.value, bound.proven, branch)
        if schedule is None:
            goal = self._goal(bound.value) * (1.0 if self.tolerance else float(norms(z).min().clamp_min(1)))
            part.schedule, x = calibrate(branch, z, goal * (1 - bound.value))
        else:
            part.schedule, x = schedule, solve(branch, z, schedule).x
        self.parts.append(part)
        return x

    def _goal(self, lipschitz: float) -> float:
        """The tolerance of a block; where none is given, that for a code with a norm of one."""
        one = torch.ones(1, 1, dtype=torch.float64)
        return self.tolerance or float(default_tolerance(one, lipschitz))

    def _constants(self, z: Tensor) -> None:
        """What the report needs of every part, as columns on the device."""

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=z.device)[:, None]

        self._goals = column([self._goal(p.lipschitz) if p.branch is not None else math.inf for p in self.parts])
        self._solved = column([float(p.branch is not None) for p in self.parts]) > 0
        own = [0.0 if isinstance(p.transform, InjectivePad) else p.expansion for p in self.parts]
        self._factor = column(own)
        later = [1.0]
        for p in reversed(self.parts[1:]):
            later.append(later[-1] * p.expansion)
        self._carried = column(later[::-1])

    def _run(self, z: Tensor, more: int) -> Run:
        """The computation for codes like z, with so many more refinements, prepared once."""
        if more not in self._runs:
            run = partial(self._compute, more=more)
            self._runs[more] = captured(run, z) if z.is_cuda and self.arithmetic.graph else run
        return self._runs[more]

    def with_code(self, code: str) -> Inverter:
        """The same inverse with the code residual found in another way, as `Arithmetic.code` says."""
        other = copy.copy(self)
        other.arithmetic, other._runs = replace(self.arithmetic, code=code), {}
        return other

    # ------------------------------------------------------------------------------------------------- solving

    def solve(self, z: Tensor) -> ChainSolution:
        """The inverse of these codes with a report, as `Chain.solve` gives it; x in float64."""
        check_batch(z, "z", self.shape[1:])
        check_finite(z, "z")
        if self.reason:
            return self._again(z.double())
        for more in range(2):  # one refinement more is cheaper than a solve of its own
            solution = self.attempt(z, more)
            behind = ~solution.converged
            if not bool(behind.any()):
                return solution
        better = self._again(z[behind].double())
        for f in fields(ChainSolution):
            if f.name != "proven":
                getattr(solution, f.name)[behind] = getattr(better, f.name).to(getattr(solution, f.name))
        return solution

    def attempt(self, z: Tensor, more: int = 0) -> ChainSolution:
        """What the fixed schedule achieves, with so many more refinements; no further try where it is not enough."""
        if self.reason:
            raise ValueError(f"attempt needs a chain that is accelerated; this one is {self.reason} Use solve.")
        size, count = self.shape[0], len(z)
        filled = [
            torch.cat([part, part[:1].expand(size - len(part), *part.shape[1:])]) for part in torch.split(z, size)
        ]
        with torch.no_grad(), self.arithmetic.precision(z.device):
            results = [self._run(part.double(), more)(part.double()) for part in filled]
        rows = [torch.cat(column)[:count] for column in zip(*results, strict=True)]
        x, converged, largest, residual, composed = rows
        if self.arithmetic.code == "linear" and not bool((residual < FAR).all()):
            with torch.no_grad():
                residual = norms(self.transform.reference(x) - z)
        evaluations = sum(s.extended(more).evaluations for s in self.schedules)
        iterations = torch.full((count,), evaluations, device=z.device)
        proven, diverged = all(p.proven for p in self.parts), torch.zeros_like(converged)
        return ChainSolution(x, iterations, converged, largest, residual, composed, diverged, proven)

    def _again(self, z: Tensor) -> ChainSolution:
        solution = self.transform.solve(z, tolerance=self.tolerance)
        assert isinstance(solution, ChainSolution)
        return solution

    def _compute(self, z: Tensor, more: int) -> tuple[Tensor, ...]:
        """(x, converged, largest block bound, code residual, composed bound): kernels only, no value is read."""
        x, solved = laid_out(z), []
        for part in self.parts:
            if part.branch is None:
                code, x = x, laid_out(part.transform.inverse(x))
                r = code - part.transform.reference(x)
                solved.append(Solved(x, r, r.new_zeros(len(r)), []))
            else:
                plan = part.schedule.extended(more)
                solved.append(solve(part.branch, x, plan, compiled=self.arithmetic.compiled))
                x = solved[-1].x
        residuals = torch.stack([norms(s.residual) + s.slack for s in solved])
        judged = self._judge(residuals, torch.stack([norms(z), *(norms(s.x) for s in solved)]))
        return x.contiguous(), *judged[:2], self._code_residual(z, solved), judged[2]

    def _code_residual(self, z: Tensor, solved: list[Solved]) -> Tensor:
        """||F(x) - z|| in the way that is asked for."""
        x = solved[-1].x
        if self.arithmetic.code == "none":
            return torch.full_like(norms(z), torch.nan)
        if self.arithmetic.code == "float64":
            for part in reversed(self.parts):
                x = laid_out(part.transform.reference(x)) if part.branch is None else x + part.branch.exact(x)
            return norms(x - z)
        e = torch.zeros_like(x)
        codes = [z, *(s.x for s in solved[:-1])]
        for part, s, code in zip(self.parts[::-1], solved[::-1], codes[::-1], strict=True):
            if part.branch is None:
                e = laid_out(part.transform.reference(s.x + e)) - code
            else:
                scale, small = scaled(e, part.branch.dtype)
                moved = part.branch.working.tangent(small, s.slopes)
                e = torch.addcmul(e, scale, moved.double()) - s.residual
        return norms(e)

    def _judge(self, residuals: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(converged, largest bound, composed bound) from norms: rows are parts, last to first, columns samples."""
        z, x = sizes[:-1], sizes[1:]
        # ||g(x)|| is at most ||x|| + ||z|| + ||r||.
        rounding = RESIDUAL_ROUNDING * torch.where(self._solved, 2 * x + 2 * z + residuals, 1 + z)
        bounds = torch.where(self._factor > 0, self._factor * (residuals + rounding), 0.0)
        bounds = torch.nan_to_num(bounds, nan=torch.inf, posinf=torch.inf)
        goals = self._goals if self.tolerance else self._goals * z.clamp_min(1)
        good = (bounds <= goals) & torch.isfinite(bounds)
        composed = torch.where(bounds > 0, self._carried * bounds, 0.0).sum(0)
        return good.all(0), bounds.amax(0), composed


def _flat(transform: Transform) -> Iterator[Transform]:
    """The transforms of nested chains, in order."""
    if type(transform) is Chain:
        for t in transform:
            yield from _flat(t)
    else:
        yield transform


def _refusal(transform: Transform) -> str:
    """Why this chain takes the ordinary way, or nothing."""
    for position, t in enumerate(_flat(transform)):
        where = f"not accelerated: transform {position}, {type(t).__name__},"
        if type(t) in CLOSED:
            continue
        if type(t) is not ResidualBlock:
            return f"{where} is neither a residual block nor a closed form that is known here."
        steps = program.read(t.g)
        if steps is None:
            return f"{where} has a g that cannot be read as linear layers, convolutions and activations in a row."
        unknown = [s.kind for s in steps if s.kind not in SLOPES and s.kind not in ("linear", "conv")]
        if unknown:
            return f"{where} has an activation without a slope, {unknown[0]}."
    return ""

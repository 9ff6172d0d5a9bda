"""The inverse of a whole transform as one fixed sequence of kernels, every block's solve proven in float64.

    Inverter(transform, codes).solve(z)        the report of `Transform.solve`, x in float64

Block by block, last to first: half precision finds the solution roughly, residuals in float32 and float64 refine it
(`refinement`), and ||x - x*|| <= ||x + g(x) - z|| / (1 - L) proves it, the residual in float64
(`verification`). How much each block needs is found on the example. On a GPU all of it is one CUDA graph and the only
thing read back is whether every sample is proven; those that are not get one more refinement, and after that the
ordinary solve, which takes the iterations it needs.
"""

from __future__ import annotations

import copy
import time
from dataclasses import fields, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from ..branch import copy_branch, to_channels_last
from ..cuda_graph import as_cuda_graph
from ..fingerprint import Fingerprint
from ..fixed_point import default_tolerance
from ..lipschitz import release_
from ..proof import sample_norms
from ..residual import ResidualBlock
from ..transform import (
    ChainSolution,
    Move,
    Shape,
    Step,
    Transform,
    back,
    check_batch,
    check_finite,
    path,
)
from ..transforms.mixing import InvertibleConv1x1
from ..transforms.preprocess import Logit
from . import ordinary
from .arithmetic import Arithmetic, Run
from .precisions import Maker
from .refinement import Schedule, calibrate, found, solve
from .refusal import refusal
from .verification import Part, Verifier, evaluated, led_to

#: The part of its goal that a block aims at where the residuals of all of them add up to what is judged.
SHARE = 0.1


class Inverter:
    """The inverse of residual blocks and closed forms, chained or in a Multiscale, for batches like `example`.

    `example` is a batch of codes, or the shape of one, (batch, ...), for which normal codes are drawn. Other batches
    are cut or filled up to its size. The weights are those of this moment: make another one when they have changed.
    `tolerance` is absolute, in l2, for every block and sample; None takes what the precision of the example can hold,
    float64 for a shape. `schedule` fixes how much is done for every block, instead of what the example needs.

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
        begin, z = time.perf_counter(), self._example(transform, example)
        self.tolerance, self.shape, self._precision = tolerance, tuple(z.shape), z.dtype
        self.arithmetic = Arithmetic.on(z.device) if arithmetic is None else arithmetic
        # The stored weights as they are, in float64: the function that is inverted, and that proves the inverse.
        private = copy_branch(transform)
        #: Why `solve` is that of the transform, in a sentence; empty where it is accelerated.
        self.reason = refusal(transform)
        self._seal = None if self.reason else Fingerprint(private)
        self.transform = cast(Transform, release_(private).double().eval().requires_grad_(False))
        #: Whether a chain is proven by the states that x leads to, as `verification` says.
        self.goes_forward = False
        self.route: list[Part | Move] = []
        self._runs: dict[int, Run] = {}
        if not self.reason:
            with torch.no_grad(), self.arithmetic.precision(z.device):
                self._prepare(z.double(), schedule)
        #: How long it took to prepare.
        self.seconds = time.perf_counter() - begin

    @staticmethod
    def _example(transform: Transform, example: Tensor | Shape) -> Tensor:
        if isinstance(example, Tensor):
            check_batch(example, "example")
            check_finite(example, "example")
            return example
        like = next(transform.parameters(), torch.zeros(()))
        generator = torch.Generator().manual_seed(0)
        z = torch.randn(*example, dtype=torch.float64, generator=generator).to(like.device)
        check_batch(z, "example")
        return z

    def fits(self, transform: Transform) -> bool:
        """Whether this transform is the function that was prepared for, by its settings and numbers."""
        return self._seal is not None and self._seal.matches(transform)

    # ------------------------------------------------------------------------------------------------- preparing

    def _prepare(self, z: Tensor, schedule: Schedule | None) -> None:
        self.maker = Maker(self.arithmetic)
        self._build(z, schedule, 1.0)
        if self.reason:
            return
        if self.arithmetic.proof == "forward" and self.arithmetic.code == "float64":
            self._try_forward(z, schedule)
        self._verify = Verifier(self.route, z.device, relative=self.tolerance is None)
        self._run(z, 0)

    def _build(self, z: Tensor, schedule: Schedule | None, share: float) -> None:
        """The way from code to data, each block aiming at this part of its goal."""
        self.route, stack = [], [z]
        for t in list(path(self.transform))[::-1]:
            self._add(t, stack, schedule, share)
            if self.reason:
                return

    def _try_forward(self, z: Tensor, schedule: Schedule | None) -> None:
        """Go forward if that proves the example easily, as it is or with more exact solves, and spares evaluations."""
        if len(self.parts) < len(self.route) or not self.schedules:
            return
        usual, spared = self.route, len(self.schedules)
        work = sum(s.exact_evaluations for s in self.schedules)
        self.goes_forward = self._proves_forward(z)
        if not self.goes_forward and schedule is None:
            self._build(z, None, SHARE)
            more = sum(s.exact_evaluations for s in self.schedules) - work
            self.goes_forward = more < spared and self._proves_forward(z)
        if not self.goes_forward:
            self.route = usual

    def _proves_forward(self, z: Tensor) -> bool:
        self._verify = Verifier(self.route, z.device, relative=self.tolerance is None, share=0.5)
        return bool(self._led_to(z)[1].all())

    @property
    def parts(self) -> list[Part]:
        """Residual blocks and closed forms, last to first."""
        return [p for p in self.route if isinstance(p, Part)]

    @property
    def schedules(self) -> list[Schedule]:
        """How much is done for each block, last to first."""
        return [p.schedule for p in self.parts if p.branch is not None]

    def _add(self, t: Step, stack: list[Tensor], schedule: Schedule | None, share: float) -> None:
        """Append one step, given the codes on the stack, which become its solutions."""
        if isinstance(t, Move):
            t.inverse(stack)
            self.route.append(t)
        elif isinstance(t, ResidualBlock):
            self._add_block(t, stack, schedule, share)
        else:
            stack.append(t.inverse(to_channels_last(stack.pop())))
            self.route.append(_closed(t, tuple(stack[-1].shape[1:])))

    def _add_block(self, t: ResidualBlock, stack: list[Tensor], schedule: Schedule | None, share: float) -> None:
        z = to_channels_last(stack.pop())
        now = t.snapshot(tuple(z.shape[1:]))
        bound = now.bound
        if not bound.value < 1:
            self.reason = f"not accelerated: a residual block is no proven contraction, Lip(g) <= {bound.value:.4g}."
            return
        branch, goal = self.maker.branch(t, z), self._goal(bound.value)
        if schedule is None:
            size = 1.0 if self.tolerance else float(torch.nan_to_num(sample_norms(z), nan=torch.inf).min().clamp_min(1))
            plan, x = calibrate(branch, z, share * goal * size * (1 - bound.value))
        else:
            plan, x = schedule, found(branch, z, schedule)
        rounding = now.rounding(tuple(z.shape[1:]))
        self.route.append(Part(t, now.inverse_lipschitz, rounding, goal, bound.value, bound.proven, branch, plan))
        stack.append(x)

    def _goal(self, lipschitz: float) -> float:
        """The tolerance of a block; where none is given, that for a code with a norm of one."""
        one = torch.ones(1, 1, dtype=self._precision)
        return self.tolerance or float(default_tolerance(one, lipschitz))

    def _run(self, z: Tensor, more: int) -> Run:
        """The computation for codes like z, with so many more refinements, prepared once."""
        run = partial(self._compute, more=more)
        if not (z.is_cuda and self.arithmetic.graph):
            return run
        if more not in self._runs:
            self._runs[more] = as_cuda_graph(run, z)
        return self._runs[more]

    def with_code(self, code: str) -> Inverter:
        """The same inverse with the code residual found in another way, as `Arithmetic.code` says."""
        other = copy.copy(self)
        other.arithmetic, other._runs = replace(self.arithmetic, code=code), {}
        other.goes_forward = self.goes_forward and code == "float64"
        return other

    # ------------------------------------------------------------------------------------------------- solving

    def solve(self, z: Tensor) -> ChainSolution:
        """The inverse of these codes with a report, as `Transform.solve` gives it; x in float64."""
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
            if f.name not in ("proven", "reason"):
                getattr(solution, f.name)[behind] = getattr(better, f.name).to(getattr(solution, f.name))
        return solution

    def attempt(self, z: Tensor, more: int = 0) -> ChainSolution:
        """What the fixed schedule achieves, with so many more refinements; no further try where it is not enough."""
        if self.reason:
            raise ValueError(f"attempt needs a transform that is accelerated; this one is {self.reason} Use solve.")
        size, count = self.shape[0], len(z)
        filled = [
            torch.cat([part, part[:1].expand(size - len(part), *part.shape[1:])]) for part in torch.split(z, size)
        ]
        with torch.no_grad(), self.arithmetic.precision(z.device):
            results = [self._run(part.double(), more)(part.double()) for part in filled]
        rows = [torch.cat(column)[:count] for column in zip(*results, strict=True)]
        x, converged, largest, residual, composed = rows
        evaluations = sum(s.extended(more).evaluations for s in self.schedules)
        iterations = torch.full((count,), evaluations, device=z.device)
        proven, diverged = all(p.proven for p in self.parts), torch.zeros_like(converged)
        return ChainSolution(x, iterations, converged, largest, residual, composed, diverged, proven)

    def _again(self, z: Tensor) -> ChainSolution:
        return ordinary.solve(self.transform, z, tolerance=self.tolerance)

    def _compute(self, z: Tensor, more: int) -> tuple[Tensor, ...]:
        """(x, converged, largest block bound, code residual, composed bound): kernels only, no value is read."""
        if self.goes_forward and not more:
            return self._led_to(z)
        codes, solutions, residuals = list[Tensor](), list[Tensor](), list[Tensor]()

        def act(part: Part, y: Tensor) -> Tensor:
            codes.append(to_channels_last(y))
            x, r = self._solved(part, codes[-1], more)
            solutions.append(x)
            residuals.append(sample_norms(r))
            return x

        x = back(self.route[::-1], z, act)
        tensors = [*codes, *solutions]
        sizes = {id(t): sample_norms(t) for t in {id(t): t for t in tensors}.values()}  # a solution is the next code
        codes_and_xs = torch.stack([sizes[id(t)] for t in tensors]).chunk(2)
        converged, largest, composed = self._verify(torch.stack(residuals), *codes_and_xs)
        wanted = self.arithmetic.code == "float64"
        code = evaluated(self.route, x, z) if wanted else torch.full_like(sample_norms(z), torch.nan)
        return x.contiguous(), converged, largest, code, composed

    def _led_to(self, z: Tensor) -> tuple[Tensor, ...]:
        """The same for a chain, proven by the states that x leads to."""
        x, codes = to_channels_last(z), list[Tensor]()
        for part in self.parts:
            codes.append(x)
            x = part.inverse(x) if part.branch is None else found(part.branch, x, part.schedule)
        residuals, before, after, code = led_to(self.parts, x, z, codes)
        converged, largest, composed = self._verify(residuals, before, after)
        return x.contiguous(), converged, largest, code, composed

    def _solved(self, part: Part, z: Tensor, more: int) -> tuple[Tensor, Tensor]:
        """(x, its residual) of one part."""
        if part.branch is not None:
            return solve(part.branch, z, part.schedule.extended(more))
        x = part.inverse(z)
        return x, z - part.transform.reference(x)


def _closed(t: Transform, shape: Shape) -> Part:
    """The part of a closed form with solutions of this shape."""
    expansion, rounding = t.stretch(shape).inverse, t.rounding(shape)
    if isinstance(t, InvertibleConv1x1):
        return Part(t, expansion, rounding, unmixing=torch.linalg.inv(t.weight))
    if isinstance(t, Logit):
        return Part(t, expansion, rounding, formula=t.inverse_error(shape))
    return Part(t, expansion, rounding)

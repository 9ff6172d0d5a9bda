"""The accelerated inverse of a whole transform: a fixed sequence of kernels, every block's solve proven in float64.

    Inverter(transform, codes).solve(z)        the report of `Transform.solve`, x in float64

For each block, last to first: half precision approximates the solution, residuals in float32 and float64 refine it
(`refinement`), and ||x - x*|| <= ||x + g(x) - z|| / (1 - L), with the residual in float64, proves it (`verification`).
How many steps each block needs is determined on the example. On a GPU everything is one CUDA graph, and the only value
read back is whether every sample is proven. The others get one more refinement and, if that does not suffice, the
ordinary solver, which takes as many iterations as it needs.
"""

from __future__ import annotations

import copy
import time
from dataclasses import fields, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from ..allowed import positive
from ..batch import Shape, as_plain, check_batch, check_finite
from ..branch import copy_branch, to_channels_last
from ..cuda_graph import as_cuda_graph
from ..fingerprint import Fingerprint
from ..fixed_point import ChainSolution, default_tolerance
from ..lipschitz import release_
from ..proof import sample_norms
from ..residual import ResidualBlock
from ..transform import StackOperation, Step, Transform, flat_steps, run_inverse
from ..transforms.mixing import InvertibleConv1x1
from ..transforms.preprocess import Logit
from ..trust import why_untrusted
from . import ordinary
from .arithmetic import Arithmetic, Run
from .precisions import BranchBuilder
from .refinement import Schedule, approximate, calibrate, solve_block
from .refusal import why_not_accelerated, why_values_unknown
from .verification import PreparedPart, Verifier, code_residual, forward_residuals

#: The share of its goal that a block aims at for a forward proof, where the residuals of all blocks add up.
FORWARD_SHARE = 0.1


class Inverter:
    """Inverts residual blocks and closed forms, in chains or a Multiscale, for batches like `example`.

    `example` is a batch of codes, or the shape of one, (batch, ...), for which normal codes are drawn. Other batches
    are split or padded to its size. The weights are copied now: create a new Inverter when they have changed.
    `tolerance` is an absolute l2 error for every block and sample; None selects what the dtype of the example allows
    (float64 for a shape). `schedule` fixes the steps of every block, which are otherwise determined on the example.

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
        if tolerance is not None:
            positive.check("tolerance", tolerance)
        begin, z = time.perf_counter(), self._example(transform, example)
        self.tolerance, self.shape, self._precision = tolerance, tuple(z.shape), z.dtype
        self.arithmetic = Arithmetic.on(z.device) if arithmetic is None else arithmetic
        # The stored weights in float64 define the function that is inverted and that proves the inverse.
        private = copy_branch(transform)
        #: Why `solve` falls back to the ordinary method, in a sentence; empty if it is accelerated.
        self.reason = why_not_accelerated(transform) or why_values_unknown(transform)
        self._fingerprint = None if self.reason else Fingerprint(private)
        self._transform = cast(Transform, release_(private).double().eval().requires_grad_(False))
        #: Whether the forward proof of `verification` is used.
        self.proves_forward = False
        self.route: list[PreparedPart | StackOperation] = []
        self._runs: dict[int, Run] = {}
        if not self.reason:
            with torch.no_grad(), self.arithmetic.precision(z.device):
                self._prepare(z.double(), schedule)
        #: How long the preparation took.
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

    @property
    def transform(self) -> Transform:
        """A copy of the transform that is inverted, in float64; no change of it reaches what was proven."""
        return copy.deepcopy(self._transform)

    def fits(self, transform: Transform) -> bool:
        """Whether this transform still has the settings and weights that the inverse was prepared for."""
        return self._fingerprint is not None and self._fingerprint.matches(transform)

    # ------------------------------------------------------------------------------------------------- preparing

    def _prepare(self, z: Tensor, schedule: Schedule | None) -> None:
        self.builder = BranchBuilder(self.arithmetic)
        self._build(z, schedule, 1.0)
        if self.reason:
            return
        if self.arithmetic.proof == "forward" and self.arithmetic.code == "float64":
            self._try_forward(z, schedule)
        self._verify = Verifier(self.route, z.device, relative=self.tolerance is None)
        self._run(z, 0)

    def _build(self, z: Tensor, schedule: Schedule | None, share: float) -> None:
        """Set up the route from code to data, each block aiming at this share of its goal."""
        self.route, stack = [], [z]
        for t in list(flat_steps(self._transform))[::-1]:
            self._add(t, stack, schedule, share)
            if self.reason:
                return

    def _try_forward(self, z: Tensor, schedule: Schedule | None) -> None:
        """Use the forward proof if it proves the example with a margin and saves evaluations in total.

        If it does not with the schedules at hand, try more exact solves.
        """
        if len(self.parts) < len(self.route) or not self.schedules:
            return
        blockwise, saved = self.route, len(self.schedules)
        evaluations = sum(s.exact_evaluations for s in self.schedules)
        self.proves_forward = self._forward_proof_holds(z)
        if not self.proves_forward and schedule is None:
            self._build(z, None, FORWARD_SHARE)
            more = sum(s.exact_evaluations for s in self.schedules) - evaluations
            self.proves_forward = more < saved and self._forward_proof_holds(z)
        if not self.proves_forward:
            self.route = blockwise

    def _forward_proof_holds(self, z: Tensor) -> bool:
        self._verify = Verifier(self.route, z.device, relative=self.tolerance is None, share=0.5)
        return bool(self._compute_forward(z)[1].all())

    @property
    def parts(self) -> list[PreparedPart]:
        """The residual blocks and closed forms, last to first."""
        return [p for p in self.route if isinstance(p, PreparedPart)]

    @property
    def schedules(self) -> list[Schedule]:
        """The schedule of each block, last to first."""
        return [p.schedule for p in self.parts if p.branch is not None]

    def _add(self, t: Step, stack: list[Tensor], schedule: Schedule | None, share: float) -> None:
        """Append one step to the route, and replace the codes on the stack by its solutions."""
        if isinstance(t, StackOperation):
            t.inverse(stack)
            self.route.append(t)
        elif isinstance(t, ResidualBlock):
            self._add_block(t, stack, schedule, share)
        else:
            stack.append(t.inverse(to_channels_last(stack.pop())))
            self.route.append(_closed_form(t, tuple(stack[-1].shape[1:])))

    def _add_block(self, t: ResidualBlock, stack: list[Tensor], schedule: Schedule | None, share: float) -> None:
        z = to_channels_last(stack.pop())
        now = t.snapshot(tuple(z.shape[1:]))
        bound = now.bound
        if not bound.value < 1:
            self.reason = f"not accelerated: a residual block is not a proven contraction, Lip(g) <= {bound.value:.4g}."
            return
        branch, goal = self.builder.branch(t, z), self._goal(bound.value)
        if schedule is None:
            size = 1.0 if self.tolerance else float(torch.nan_to_num(sample_norms(z), nan=torch.inf).min().clamp_min(1))
            schedule, x = calibrate(branch, z, share * goal * size * (1 - bound.value))
        else:
            x = approximate(branch, z, schedule)
        rounding = now.rounding(tuple(z.shape[1:]))
        self.route.append(
            PreparedPart(t, now.inverse_lipschitz, rounding, goal, bound.value, bound.proven, branch, schedule)
        )
        stack.append(x)

    def _goal(self, lipschitz: float) -> float:
        """The tolerance of a block; by default that for a code of norm one."""
        one = torch.ones(1, 1, dtype=self._precision)
        return self.tolerance or float(default_tolerance(one, lipschitz))

    def _run(self, z: Tensor, more: int) -> Run:
        """Return the computation for codes like z with `more` further refinements, captured once."""
        run = partial(self._compute, more=more)
        if not (z.is_cuda and self.arithmetic.graph):
            return run
        if more not in self._runs:
            self._runs[more] = as_cuda_graph(run, z)
        return self._runs[more]

    def with_code(self, code: str) -> Inverter:
        """Return the same inverse with another `Arithmetic.code`: how the code residual is computed."""
        other = copy.copy(self)
        other.arithmetic, other._runs = replace(self.arithmetic, code=code), {}
        other.proves_forward = self.proves_forward and code == "float64"
        return other

    # ------------------------------------------------------------------------------------------------- solving

    def solve(self, z: Tensor) -> ChainSolution:
        """Invert these codes and report, as `Transform.solve` does; x in float64."""
        check_batch(z, "z", self.shape[1:])
        z = as_plain(z)
        check_finite(z, "z")
        if self.reason or why_untrusted(self._transform):  # a hook or a mode of everything, since it was prepared
            return self._solve_ordinary(z.double())
        for more in range(2):  # one more refinement is cheaper than an ordinary solve
            solution = self.attempt(z, more)
            unproven = ~solution.converged
            if not bool(unproven.any()):
                return solution
        better = self._solve_ordinary(z[unproven].double())
        for f in fields(ChainSolution):
            if f.name not in ("proven", "reason"):
                getattr(solution, f.name)[unproven] = getattr(better, f.name).to(getattr(solution, f.name))
        return solution

    def attempt(self, z: Tensor, more: int = 0) -> ChainSolution:
        """Invert by the fixed schedule with `more` further refinements, and report, without a retry."""
        if self.reason:
            raise ValueError(f"attempt needs a transform that is accelerated; this one is {self.reason} Use solve.")
        z, size, count = as_plain(z), self.shape[0], len(z)
        padded = [
            torch.cat([chunk, chunk[:1].expand(size - len(chunk), *chunk.shape[1:])]) for chunk in torch.split(z, size)
        ]
        with torch.no_grad(), self.arithmetic.precision(z.device):
            results = [self._run(chunk.double(), more)(chunk.double()) for chunk in padded]
        x, converged, largest, residual, composed = (torch.cat(each)[:count] for each in zip(*results, strict=True))
        evaluations = sum(s.extended(more).evaluations for s in self.schedules)
        iterations = torch.full((count,), evaluations, device=z.device)
        reason, diverged = why_untrusted(self._transform), torch.zeros_like(converged)
        proven = all(p.proven for p in self.parts) and not reason
        return ChainSolution(x, iterations, converged, largest, residual, composed, diverged, proven, reason)

    def _solve_ordinary(self, z: Tensor) -> ChainSolution:
        return ordinary.solve(self._transform, z, tolerance=self.tolerance)

    def _compute(self, z: Tensor, more: int) -> tuple[Tensor, ...]:
        """Return (x, converged, largest block bound, code residual, composed bound) without reading any value."""
        if self.proves_forward and not more:
            return self._compute_forward(z)
        codes, solutions, residuals = list[Tensor](), list[Tensor](), list[Tensor]()

        def act(part: PreparedPart, y: Tensor) -> Tensor:
            codes.append(to_channels_last(y))
            x, r = self._solve_part(part, codes[-1], more)
            solutions.append(x)
            residuals.append(sample_norms(r))
            return x

        x = run_inverse(self.route[::-1], z, act)
        tensors = [*codes, *solutions]
        sizes = {id(t): sample_norms(t) for t in {id(t): t for t in tensors}.values()}  # a solution is the next code
        codes_and_xs = torch.stack([sizes[id(t)] for t in tensors]).chunk(2)
        converged, largest, composed = self._verify(torch.stack(residuals), *codes_and_xs)
        wanted = self.arithmetic.code == "float64"
        code = code_residual(self.route, x, z) if wanted else torch.full_like(sample_norms(z), torch.nan)
        return x.contiguous(), converged, largest, code, composed

    def _compute_forward(self, z: Tensor) -> tuple[Tensor, ...]:
        """Return the same for a chain with the forward proof."""
        x, codes = to_channels_last(z), list[Tensor]()
        for part in self.parts:
            codes.append(x)
            x = part.inverse(x) if part.branch is None else approximate(part.branch, x, part.schedule)
        residuals, before, after, code = forward_residuals(self.parts, x, z, codes)
        converged, largest, composed = self._verify(residuals, before, after)
        return x.contiguous(), converged, largest, code, composed

    def _solve_part(self, part: PreparedPart, z: Tensor, more: int) -> tuple[Tensor, Tensor]:
        """Return (x, its residual) of one part."""
        if part.branch is not None:
            return solve_block(part.branch, z, part.schedule.extended(more))
        x = part.inverse(z)
        return x, z - part.transform.reference(x)


def _closed_form(t: Transform, shape: Shape) -> PreparedPart:
    """Prepare a closed form with solutions of this shape."""
    inverse_lipschitz, rounding = t.stretch(shape).inverse, t.rounding(shape)
    if isinstance(t, InvertibleConv1x1):
        return PreparedPart(t, inverse_lipschitz, rounding, inverse_weight=torch.linalg.inv(t.weight))
    if isinstance(t, Logit):
        return PreparedPart(t, inverse_lipschitz, rounding, formula_error=t.inverse_error(shape))
    return PreparedPart(t, inverse_lipschitz, rounding)

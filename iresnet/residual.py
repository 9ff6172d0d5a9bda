"""The residual block F(x) = x + g(x) with Lip(g) = L < 1: the paper on one page.

invertible      z = x + g(x) has exactly one solution x for every z                        Theorem 1
inverse         the fixed point of x <- z - g(x), error at most ||x + g(x) - z|| / (1 - L)   Algorithm 1, Eq. 1
Lipschitz       Lip(F) <= 1 + L (1 for a `Potential`),  Lip(F^-1) <= 1 / (1 - L)            Lemma 2
determinant     ln det(I + J) = tr ln(I + J), between d ln(1 - L) and d ln(1 + L)           Eq. 4, Lemmas 6 and 7
dynamics        x + tau g(x) is a bijection for every tau in [0, 1]                         Sec. 4.2
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from . import lipschitz as lip
from .branch import (
    Bound,
    Snapshot,
    UncopiedBranch,
    check_same_shape,
    copy_branch,
    linearise,
    lipschitz_bound,
    nominal_constant,
    remove_constraints_,
    try_parse,
)
from .compiler import is_transforming, outside_transforms
from .fingerprint import Fingerprint
from .fixed_point import Anderson, ConvergenceError, Solution, Solver, default_tolerance, iteration_limit
from .fixed_point import solve as solve_fixed_point
from .float64 import Rounding
from .lipschitz import Conditioned
from .lipschitz.activations import record_of
from .logdet import (
    EVAL_PROBES,
    EVAL_SEED,
    EVAL_TOLERANCE,
    EXACT_UP_TO,
    CertifiedSeries,
    Estimator,
    Exact,
    attach_gradient,
    refuse_second_derivative,
)
from .precision import full_precision
from .transform import Shape, Stretch, Transform, check_batch, check_context, check_finite, dimension
from .trust import NoBoundKnown, unwrap, why_modified, why_untrusted


class ResidualBlock(Transform):
    """x + g(x) for a contraction g, whose constant is proven from its parts.

    `lipschitz=` asserts a constant for a g that cannot be read; it is then shown as asserted, and no certificate
    passes. What a user adds to g later (a hook, a parametrization) works, and ends what is proven: `bound().reason`.

    >>> from iresnet import contractive_mlp
    >>> block = ResidualBlock(contractive_mlp(2, hidden=(16,), lipschitz=0.8))
    >>> x = torch.randn(4, 2)
    >>> bool((block.inverse(block(x)) - x).norm() < 1e-4)
    True
    """

    def __init__(self, g: nn.Module, *, lipschitz: float | None = None) -> None:
        super().__init__()
        if lipschitz is not None and not 0 <= lipschitz < 1:
            raise ValueError(
                f"lipschitz must lie in [0, 1); got {lipschitz}. A block with a larger constant has no inverse."
            )
        self.g, self.asserted = g, lipschitz
        self._cached: tuple[Any, Fingerprint, Snapshot] | None = None
        self._entry: tuple[int, int, int] | None = None  # (axis, its size, dimensions or 0) that g asks of x, if known
        if lipschitz is None:
            self._check_contraction()
            self._read_entry()

    def _check_contraction(self) -> None:
        try:
            value = nominal_constant(self.g)
        except NoBoundKnown as error:
            raise ValueError(
                f"{error} A constant that you know can be asserted: ResidualBlock(g, lipschitz=0.9)."
            ) from None
        if not value < 1:
            for _, layer in lip.primitives(self.g):
                if lip.lipschitz_constant(layer) is not None:
                    lip.check_contractive(layer)  # names an activation that expands
            raise ValueError(
                f"g must be a contraction; its layers allow a Lipschitz constant of {value:.4g}. "
                "Use iresnet.lipschitz.constrain_(g, lipschitz=0.9) first."
            )

    def _read_entry(self) -> None:
        for _, layer in lip.primitives(self.g):
            if isinstance(layer, nn.Linear):
                self._entry = (-1, layer.in_features, 0)
                return
            if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
                self._entry = (1, layer.in_channels, layer.weight.dim())
                return
            record = record_of(layer)
            if record is not None and record.is_reshape:
                return

    def _check_input(self, x: Tensor, context: Tensor | None, name: str = "x") -> None:
        """A sentence for a wrong shape, before torch complains from inside a layer, or a context that g cannot take."""
        check_context(self, context)
        if context is not None and len(context) != len(x):
            raise ValueError(
                f"context must have one row for every sample; got {len(context)} for {len(x)}. Repeat it with expand."
            )
        if self._entry is None:
            return
        axis, size, dims = self._entry
        if x.shape[axis] != size or (dims and x.dim() != dims):
            shape = f"(batch, {size}{', n' * (dims - 2)})" if dims else f"(batch, ..., {size})"
            raise ValueError(f"{name} must have shape {shape} for this block; got {tuple(x.shape)}. Reshape it, or g.")

    # ------------------------------------------------------------------ forward

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        with outermost_call(self, x):
            return x + self._branch(x, context)

    def _branch(self, x: Tensor, context: Tensor | None) -> Tensor:
        self._check_input(x, context)
        y = self.g(x) if context is None else self.g(x, context)
        check_same_shape(x, y)
        return cast(Tensor, y)

    @property
    def takes_context(self) -> bool:
        return "context" in inspect.signature(type(unwrap(self.g)).forward).parameters

    def forward_and_logdet(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        estimator: Estimator | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """z and ln det(I + J).

        Without an estimator: exact up to 64 dimensions; beyond that, in eval, enough terms for an error below 1e-3
        nats and probes from a fixed seed, so that the same x gives the same number.
        """
        with outermost_call(self, x):
            self._check_input(x, context)
            if estimator is None:
                estimator, generator = self._default_estimator(x, generator)
            constant = self._constant(tuple(x.shape[1:])) if estimator.needs_lipschitz else None
            y, jacobian = linearise(self.g, x, context)
            check_same_shape(x, y)
            return x + y, estimator(jacobian, x, lipschitz=constant, generator=generator)

    def _constant(self, shape: Shape) -> float:
        """Lip(g) as far as a step needs it: asked for while training, proven in eval."""
        if self.asserted is not None:
            return self.asserted
        return nominal_constant(self.g) if self.training else self.bound(shape).value

    def _default_estimator(
        self, x: Tensor, generator: torch.Generator | None
    ) -> tuple[Estimator, torch.Generator | None]:
        d = dimension(x)
        if d <= EXACT_UP_TO:
            return Exact(), generator
        if self.training:
            raise ValueError(
                f"training in {d} dimensions needs a named estimator; pass estimator=PowerSeries(terms=10) or "
                f"RussianRoulette(). (Up to {EXACT_UP_TO} dimensions the determinant is exact.)"
            )
        if generator is None:
            generator = torch.Generator(device=x.device).manual_seed(EVAL_SEED)
        return CertifiedSeries(EVAL_TOLERANCE, probes=EVAL_PROBES, shared=True), generator

    def trajectory(self, x: Tensor, steps: int = 8, context: Tensor | None = None) -> list[Tensor]:
        """x + tau g(x) for tau = 0, 1/steps, ..., 1: every state a bijective image of x (Sec. 4.2)."""
        if steps < 1:
            raise ValueError(f"steps must be at least 1; got {steps}.")
        y = self._branch(x, context)
        return [x + (i / steps) * y for i in range(steps + 1)]

    # ------------------------------------------------------------------ what is proven

    def bound(self, input_shape: Shape | None = None) -> Bound:
        """Lip(g), proven from its parts, or as asserted; infinite, with the reason, where nothing is known of g."""
        return self.snapshot(input_shape).bound

    def stretch(self, input_shape: Shape | None = None) -> Stretch:
        now = self.snapshot(input_shape)
        b, inverse = now.bound, now.inverse_lipschitz
        low = math.log1p(-b.value) if b.value < 1 else -math.inf
        if input_shape is None:
            return Stretch(b.block_lipschitz, inverse, (-math.inf, math.inf), b.proven)
        d = math.prod(input_shape)
        return Stretch(b.block_lipschitz, inverse, (d * low, d * math.log(b.block_lipschitz)), b.proven)

    def reference(self, x: Tensor, context: Tensor | None = None, *, now: Snapshot | None = None) -> Tensor:
        """The code of x in float64; with `now`, with g as it was at that moment."""
        x, rows = x.double(), torch.arange(len(x), device=x.device)
        now = self.snapshot(tuple(x.shape[1:])) if now is None else now
        return x + now.branch(self._given(context, len(x)))(x, rows)

    @torch.no_grad()
    def snapshot(self, input_shape: Shape | None = None) -> Snapshot:
        """g as it is now, and what is known of it. Kept while g is known and the same; never where it is a user's."""
        if is_transforming():  # by torch.func, whose tensors must not be kept
            with outside_transforms():
                return self.snapshot(input_shape)
        key = (input_shape, self.asserted)
        kept = self._cached
        if kept is not None and kept[0] == key and kept[1].matches(self.g):
            return kept[2]
        self._cached = None
        if any("_compiled_call_impl" in (why_modified(m) or "") for m in self.g.modules()):  # which a copy would lose
            return Snapshot(UncopiedBranch(self.g), self._measured(self.g, input_shape))
        try:
            private = copy_branch(self.g)  # all that follows is about this copy
        except RuntimeError:  # torch copies no tensor that was computed, such as a pruned weight
            return Snapshot(UncopiedBranch(self.g), self._measured(self.g, input_shape))
        found, seal = self._measured(private, input_shape), None
        with suppress(NoBoundKnown):
            seal = Fingerprint(private)
        g = unwrap(remove_constraints_(private)).double()
        program = try_parse(g) if found.proven or seal is not None else None
        made = Snapshot(g, found, program, self.g if seal is None else None)
        self._cached = None if seal is None else (key, seal, made)
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_cached": None}  # type: ignore[no-untyped-call]

    def rounding(self, input_shape: Shape) -> Rounding:
        """What rounding in float64 can hide of x + g(x) - z, without a context."""
        return self.snapshot(input_shape).rounding(input_shape)

    def _measured(self, g: nn.Module, input_shape: Shape | None) -> Bound:
        if self.asserted is not None:
            return Bound(self.asserted, False)
        try:
            for _ in lip.primitives(self.g):  # the live one: a copy may have lost what makes it another function
                pass
            return lipschitz_bound(g, input_shape)
        except NoBoundKnown as error:
            return Bound(math.inf, False, reason=str(error))

    def _given(self, context: Tensor | None, rows: int) -> Tensor | None:
        """What g is given beside x: its embedding of the context, evaluated here and now; a user's g takes it as is."""
        check_context(self, context)
        if context is None:
            return None
        g = unwrap(self.g)
        return g.embed_context(g.cast_context(context), rows) if type(g) is Conditioned else context

    # ------------------------------------------------------------------ inverse

    def solve(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> Solution:
        """The inverse with a report (no gradient): x, iterations, proven error bound and success, per sample."""
        return self.solve_with_snapshot(z, context, tolerance=tolerance, solver=solver)[0]

    def solve_with_snapshot(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> tuple[Solution, Snapshot]:
        """`solve`, and g as it was: what the report is about."""
        check_batch(z, "z")
        if is_transforming():
            raise RuntimeError(
                "an inverse is iterated until it is proven, which torch.func cannot transform. Give it the whole batch "
                "in place of vmap, and take derivatives of it with torch.autograd."
            )
        check_finite(z, "z")
        if tolerance is not None and not tolerance > 0:
            raise ValueError(f"tolerance must be positive; got {tolerance}.")
        self._check_input(z, context, "z")
        with torch.no_grad(), full_precision(z):
            now = self.snapshot(tuple(z.shape[1:]))
            given = self._given(context, len(z))
            reference = now.branch(given)

            def coarse(x: Tensor, rows: Tensor) -> Tensor:  # half precision stalls at once: iterate in float64
                return reference(x.double(), rows).to(x.dtype)

            solution = solve_fixed_point(
                coarse if z.dtype.itemsize < 4 else now.branch(given, z.dtype),
                z,
                lipschitz=now.bound.value,
                tolerance=tolerance,
                solver=Anderson() if solver is None else solver,
                reference=reference,
                rounding=now.rounding(tuple(z.shape[1:]), given),
            )
        reason = now.bound.reason or why_untrusted(self)
        if reason:  # what was solved for may be another function than this block
            none = torch.full_like(solution.error_bound, torch.inf)
            solution = replace(solution, error_bound=none, converged=none < 0, reason=reason)
        return replace(solution, proven=now.bound.proven and not reason), now

    def inverse(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> Tensor:
        """The x with x + g(x) = z, proven to `tolerance` in l2 per sample, or `ConvergenceError`.

        Differentiable by the implicit function theorem: dx = (I + J)^-1 (dz - dg); the adjoint system is solved by the
        same solver, and no iteration is unrolled.
        """
        solution = self.solve(z, context, tolerance=tolerance, solver=solver)
        if not bool(solution.converged.all()):
            constant = self.bound(tuple(z.shape[1:])).value
            goal = tolerance or float(default_tolerance(z, constant)[~solution.converged].max())
            raise ConvergenceError(solution, goal, constant)
        if not torch.is_grad_enabled():
            return solution.x
        return self._with_gradient(solution.x, z, context, Anderson() if solver is None else solver)

    def _with_gradient(self, x: Tensor, z: Tensor, context: Tensor | None, solver: Solver) -> Tensor:
        with lip.freeze_norms(self.g):  # the function that was solved for
            y, jacobian = linearise(self.g, x, context)
        step = z - y  # equals x; its gradient is right up to the factor (I + J)^-1, which the adjoint solve supplies
        if not step.requires_grad:
            return x
        constant = self.bound(tuple(z.shape[1:])).value
        corrected = _Adjoint.apply(step, jacobian, constant, solver)  # type: ignore[no-untyped-call]
        return attach_gradient(x, cast(Tensor, corrected))

    def extra_repr(self) -> str:
        return "" if self.asserted is None else f"lipschitz={self.asserted:g} (asserted)"


class _Adjoint(torch.autograd.Function):
    """The identity, whose backward solves w + J' w = v: the adjoint of the implicit function theorem."""

    @staticmethod
    def forward(ctx: Any, step: Tensor, jacobian: Any, constant: float, solver: Solver) -> Tensor:
        ctx.jacobian, ctx.constant, ctx.solver = jacobian, constant, solver
        return step.clone()

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()

        def pull(w: Tensor, rows: Tensor) -> Tensor:
            if len(rows) == len(v):
                return cast(Tensor, ctx.jacobian(w))
            padded = torch.zeros_like(v).index_copy(0, rows, w)
            return cast(Tensor, ctx.jacobian(padded)[rows])

        relative = (1 - ctx.constant) * (1e-12 if v.dtype == torch.float64 else 1e-6)
        relative = max(relative, 4 * torch.finfo(v.dtype).eps)
        limit = iteration_limit(ctx.constant, 1.0, relative)
        with torch.no_grad(), full_precision(v):
            w, _ = ctx.solver.run(pull, v, v, relative * v.flatten(1).norm(dim=1), ctx.constant, limit)
        return w, None, None, None


class _Pass(threading.local):
    checked = False


_pass = _Pass()


@contextmanager
def outermost_call(module: nn.Module, x: Tensor) -> Iterator[None]:
    """What the outermost call of a model does: check the input, in training refresh the norms and hold them."""
    holding = (
        nullcontext()
        if not module.training
        else (lip.batched_refresh if torch.is_grad_enabled() else lip.freeze_norms)(module)
    )
    if torch.compiler.is_compiling():
        with holding:
            yield
        return
    outermost = not _pass.checked  # a check that is left out or made twice changes no result
    if outermost:
        check_batch(x)
        if not (x.is_cuda and module.training):  # there it would make every step wait; the training loop has its own
            check_finite(x, "x")
    try:
        _pass.checked = True
        with holding:
            yield
    finally:
        _pass.checked = not outermost

"""The residual block F(x) = x + g(x) with Lip(g) = L < 1: the paper on one page.

    invertible      z = x + g(x) has exactly one solution x for every z                         Theorem 1
    inverse         the fixed point of x <- z - g(x), error <= ||x + g(x) - z|| / (1 - L)       Algorithm 1, Eq. 1
    Lipschitz       Lip(F) <= 1 + L (1 for a `Potential`),  Lip(F^-1) <= 1 / (1 - L)            Lemma 2
    determinant     ln det(I + J) = tr ln(I + J), between d ln(1 - L) and d ln(1 + L)           Eq. 4, Lemmas 6 and 7
    dynamics        x + tau g(x) is a bijection for every tau in [0, 1]                         Sec. 4.2

The mathematics is in the packages below: norms in `lipschitz` and `spectral`, the bound L and the Jacobian J in
`branch`, the inverse in `fixed_point`, the determinant in `logdet`.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from .allowed import positive
from .batch import Shape, as_plain, check_batch, check_finite, dimension
from .branch import (
    Bound,
    InputSpec,
    ParsedBranch,
    Snapshot,
    attach_implicit_gradient,
    check_same_shape,
    linearise,
    requested_constant,
    take_snapshot,
)
from .compiled import empty_inverse, is_logdet_opaque, opaque_logdet, opaque_logdet_function
from .compiler import has_tangent, is_batched, is_transforming, outside_transforms
from .fingerprint import Fingerprint
from .fixed_point import (
    Anderson,
    Banach,
    ConvergenceError,
    Newton,
    Solution,
    Solver,
    default_solver,
    default_tolerance,
)
from .fixed_point import solve as solve_fixed_point
from .float64 import Rounding
from .lipschitz import Conditioned, check_contractive, freeze_norms, lipschitz_constant, primitives
from .logdet import (
    EVAL_PROBES,
    EVAL_SEED,
    EVAL_TOLERANCE,
    EXACT_UP_TO,
    CertifiedSeries,
    Estimator,
    Exact,
    check_estimator,
)
from .opaque import Function, call, define, outside_graph
from .outermost import outermost_call
from .precision import full_precision
from .spelling import at_least
from .transform import Stretch, Transform, check_context
from .trust import NoBoundKnown, unwrap, why_untrusted


class ResidualBlock(Transform):
    """x + g(x) for a contraction g, whose Lipschitz constant is proven from its layers.

    `lipschitz=` asserts a constant for a g that cannot be parsed; it is reported as asserted, and no certificate
    passes. A hook or parametrization added to g later works, but nothing is proven any more: see `bound().reason`.

    >>> from iresnet import contractive_mlp
    >>> block = ResidualBlock(contractive_mlp(2, hidden=(16,), lipschitz=0.8))
    >>> x = torch.randn(4, 2)
    >>> bool((block.inverse(block(x)) - x).norm() < 1e-4)
    True
    """

    def __init__(self, g: nn.Module, *, lipschitz: float | None = None) -> None:
        super().__init__()
        if not isinstance(g, nn.Module):
            raise ValueError(f"g must be an nn.Module; got {type(g).__name__}. Call a function in a module's forward.")
        if lipschitz is not None and not 0 <= lipschitz < 1:
            raise ValueError(
                f"lipschitz must lie in [0, 1); got {lipschitz}. A block with a larger constant has no inverse."
            )
        self.g, self.asserted = g, lipschitz
        self._cached: tuple[Any, Fingerprint, Snapshot] | None = None
        self._input_spec: InputSpec | None = None
        if lipschitz is None:
            self._check_contraction()
            self._input_spec = InputSpec.of(g)

    def _check_contraction(self) -> None:
        try:
            value = requested_constant(self.g)
        except NoBoundKnown as error:
            raise ValueError(
                f"{error} A constant that you know can be asserted: ResidualBlock(g, lipschitz=0.9)."
            ) from None
        if not value < 1:
            for _, layer in primitives(self.g):
                if lipschitz_constant(layer) is not None:
                    check_contractive(layer)  # raises for an activation that expands, and names it
            raise ValueError(
                f"g must be a contraction; its layers allow a Lipschitz constant of {value:.4g}. "
                "Use iresnet.lipschitz.constrain_(g, lipschitz=0.9) first."
            )

    def check_input(self, x: Tensor, context: Tensor | None, name: str = "x") -> None:
        """Raise ValueError for a wrong shape, or a context that does not fit."""
        check_context(self, context)
        if context is not None and len(context) != len(x):
            raise ValueError(
                f"context must have one row per sample; got {len(context)} for {len(x)}. Repeat it with expand."
            )
        if self._input_spec is not None:
            self._input_spec.check(x, name)

    # ------------------------------------------------------------------ forward

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        with outermost_call(self, x):
            return x + self._branch(x, context)

    def _branch(self, x: Tensor, context: Tensor | None) -> Tensor:
        self.check_input(x, context)
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
        """Return z and ln det(I + J).

        Without an estimator, the determinant is exact up to 64 dimensions. Beyond that, in eval, the series has enough
        terms for a truncation error below 1e-3 nats and probes from a fixed seed, so the same x gives the same number.
        """
        if is_logdet_opaque(self, x, estimator):
            return opaque_logdet("block's log-determinant", self, x, context, estimator, generator)
        with outermost_call(self, x):
            self.check_input(x, context)
            if estimator is None:
                estimator, generator = self.default_estimator(x, generator)
            check_estimator(estimator)
            constant = self.constant(tuple(x.shape[1:])) if estimator.needs_lipschitz else None
            y, jacobian = linearise(self.g, x, context)
            check_same_shape(x, y)
            return x + y, estimator(jacobian, x, lipschitz=constant, generator=generator)

    def constant(self, shape: Shape, parsed: ParsedBranch | None = None) -> float:
        """Return the bound on Lip(g) for an estimator: the requested one in training, the proven one in eval.

        `parsed` is the parsed g, if the caller has it.
        """
        if self.training or self.asserted is not None:
            return self.requested_constant(parsed)
        return self.bound(shape).value

    def requested_constant(self, parsed: ParsedBranch | None = None) -> float:
        """Return the Lip(g) that was asserted, or that the coefficients of the layers request; cheap, not proven."""
        return requested_constant(parsed or self.g) if self.asserted is None else self.asserted

    def default_estimator(
        self, x: Tensor, generator: torch.Generator | None
    ) -> tuple[Estimator, torch.Generator | None]:
        """Return the estimator for x, and its generator, where none was given."""
        d = dimension(x)
        if d <= EXACT_UP_TO:
            return Exact(), generator
        if self.training:
            raise ValueError(
                f"training in {d} dimensions needs an estimator; pass estimator=PowerSeries(terms=10) or "
                f"RussianRoulette(). (Up to {EXACT_UP_TO} dimensions the determinant is exact.)"
            )
        if generator is None:
            generator = torch.Generator(device=x.device).manual_seed(EVAL_SEED)
        return CertifiedSeries(EVAL_TOLERANCE, probes=EVAL_PROBES, shared=True), generator

    def trajectory(self, x: Tensor, steps: int = 8, context: Tensor | None = None) -> list[Tensor]:
        """Return x + tau g(x) for tau = 0, 1/steps, ..., 1; every state is a bijective image of x (Sec. 4.2)."""
        at_least(1, steps=steps)
        with outermost_call(self, x):
            y = self._branch(x, context)
            return [x + (i / steps) * y for i in range(steps + 1)]

    # ------------------------------------------------------------------ proofs

    def bound(self, input_shape: Shape | None = None) -> Bound:
        """Return the bound on Lip(g), proven or asserted; infinite, with the reason, if nothing is known of g."""
        return self.snapshot(input_shape).bound

    def stretch(self, input_shape: Shape | None = None) -> Stretch:
        snapshot = self.snapshot(input_shape)
        b, inverse = snapshot.bound, snapshot.inverse_lipschitz
        low = math.log1p(-b.value) if b.value < 1 else -math.inf
        if input_shape is None:
            return Stretch(b.block_lipschitz, inverse, (-math.inf, math.inf), b.proven)
        d = math.prod(input_shape)
        return Stretch(b.block_lipschitz, inverse, (d * low, d * math.log(b.block_lipschitz)), b.proven)

    def reference(self, x: Tensor, context: Tensor | None = None, *, snapshot: Snapshot | None = None) -> Tensor:
        """Return the code of x in float64, with the g of a snapshot or the current one."""
        x, rows = x.double(), torch.arange(len(x), device=x.device)
        snapshot = self.snapshot(tuple(x.shape[1:])) if snapshot is None else snapshot
        return x + snapshot.branch(self._conditioning(context, len(x)))(x, rows)

    @torch.no_grad()
    def snapshot(self, input_shape: Shape | None = None) -> Snapshot:
        """Return a private copy of g with what is proven of it; cached while g is trusted and unchanged."""
        if is_transforming():  # by torch.func, whose tensors must not be cached
            if any(map(is_batched, self.g.parameters())):
                raise RuntimeError(
                    "a block whose weights are a batch, inside torch.func.vmap, has no Lipschitz bound, which inverses "
                    "and log-determinants beyond 64 dimensions need. Call one model after the other."
                )
            with outside_transforms():
                return self.snapshot(input_shape)
        key = (input_shape, self.asserted)
        cached = self._cached
        if cached is not None and cached[0] == key and cached[1].matches(self.g):
            return cached[2]
        self._cached = None
        snapshot, fingerprint = take_snapshot(self.g, input_shape, self.asserted)
        self._cached = None if fingerprint is None else (key, fingerprint, snapshot)
        return snapshot

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_cached": None}  # type: ignore[no-untyped-call]

    def rounding(self, input_shape: Shape) -> Rounding:
        """Bound the rounding error of x + g(x) - z in float64, without a context."""
        return self.snapshot(input_shape).rounding(input_shape)

    def _conditioning(self, context: Tensor | None, samples: int) -> Tensor | None:
        """Return what g gets beside x: the embedding of the context, computed now; a user's g gets the context."""
        check_context(self, context)
        if context is None:
            return None
        g = unwrap(self.g)
        return as_plain(g.embed_context(context, samples) if type(g) is Conditioned else context)

    # ------------------------------------------------------------------ inverse

    def solve(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> Solution:
        """Invert with a report (no gradient): x, iterations, proven error bound and success per sample."""
        if torch.compiler.is_compiling():
            return outside_graph(ResidualBlock.solve, self, z, context, tolerance=tolerance, solver=solver)
        return self.solve_with_snapshot(z, context, tolerance=tolerance, solver=solver)[0]

    def solve_with_snapshot(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> tuple[Solution, Snapshot]:
        """Like `solve`, and also return the snapshot of g that the report is about."""
        check_batch(z, "z")
        if is_transforming() or has_tangent(z):
            raise RuntimeError(
                "torch.func cannot transform an inverse, which iterates until it is proven, and forward-mode AD cannot "
                "differentiate it. Pass the whole batch, not a vmap over samples, and use torch.autograd.grad."
            )
        z, context = as_plain(z), as_plain(context)
        check_finite(z, "z")
        if tolerance is not None:
            positive.check("tolerance", tolerance)
        self.check_input(z, context, "z")
        if context is not None:
            check_finite(context, "context")
        with torch.no_grad(), full_precision(z):
            snapshot = self.snapshot(tuple(z.shape[1:]))
            conditioning = self._conditioning(context, len(z))
            reference = snapshot.branch(conditioning)
            affine = snapshot.affine(tuple(z.shape[1:]), torch.promote_types(z.dtype, torch.float32))

            def in_half_precision(x: Tensor, rows: Tensor) -> Tensor:  # would stall at once: evaluate in float64
                return reference(x.double(), rows).to(x.dtype)

            solution = solve_fixed_point(
                in_half_precision if z.dtype.itemsize < 4 else snapshot.branch(conditioning, z.dtype),
                z,
                lipschitz=snapshot.bound.value,
                tolerance=tolerance,
                solver=default_solver(affine) if solver is None else solver,
                reference=reference,
                rounding=snapshot.rounding(tuple(z.shape[1:]), conditioning),
                affine=affine,
            )
        reason = snapshot.bound.reason or why_untrusted(self)
        if reason:  # the block may compute another function than the one that was solved for
            unbounded = torch.full_like(solution.error_bound, torch.inf)
            solution = replace(solution, error_bound=unbounded, converged=unbounded < 0, reason=reason)
        return replace(solution, proven=snapshot.bound.proven and not reason), snapshot

    def inverse(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> Tensor:
        """Return the x with x + g(x) = z, proven to `tolerance` in l2 per sample; else raise `ConvergenceError`.

        Differentiable by the implicit function theorem; see `branch.implicit`.
        """
        if torch.compiler.is_compiling():
            return call("block's inverse", self, z, context, tolerance, None, {"solver": solver})[0]
        solution = self.solve(z, context, tolerance=tolerance, solver=solver)
        if not bool(solution.converged.all()):
            constant = self.bound(tuple(z.shape[1:])).value
            goal = tolerance or float(default_tolerance(z, constant)[~solution.converged].max())
            raise ConvergenceError(solution, goal, constant)
        if not torch.is_grad_enabled():
            return solution.x
        return self._with_gradient(solution.x, z, context, Anderson() if solver is None else solver)

    def _with_gradient(self, x: Tensor, z: Tensor, context: Tensor | None, solver: Solver) -> Tensor:
        dtype = next((p.dtype for p in self.g.parameters() if p.is_floating_point()), x.dtype)
        with freeze_norms(self.g):  # the function that was solved for
            y, jacobian = linearise(self.g, x.to(dtype), context)
        step = z.to(dtype) - y
        if not step.requires_grad:
            return x
        return attach_implicit_gradient(x, step, jacobian, self.bound(tuple(z.shape[1:])).value, solver)

    def extra_repr(self) -> str:
        return "" if self.asserted is None else f"lipschitz={self.asserted:g} (asserted)"


def _inverse(
    block: ResidualBlock, z: Tensor, context: Tensor | None, *, generator: None, **options: Any
) -> tuple[Tensor]:
    return (ResidualBlock.inverse(block, z, context, **options),)


# Not a block's own methods, which may be those of a subclass that call these.
define("block's inverse", Function(_inverse, empty_inverse, (Anderson, Banach, Newton)))
define("block's log-determinant", opaque_logdet_function(ResidualBlock.forward_and_logdet))

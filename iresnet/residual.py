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
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from . import lipschitz as lip
from .fixed_point import Anderson, ConvergenceError, Solution, Solver, default_tolerance, iteration_limit
from .fixed_point import solve as solve_fixed_point
from .float64 import Rounding
from .lipschitz import Bound, linearise, nominal, plain
from .lipschitz.mark import mark_of
from .logdet import CertifiedSeries, Estimator, Exact, attach_gradient, refuse_second_derivative
from .precision import float32_products
from .spectral import NoBoundKnown
from .transform import Shape, Stretch, Transform, check_batch, check_finite, dimension

#: Up to this dimension the log-determinant is exact unless an estimator is named.
EXACT_UP_TO = 64

#: In eval, beyond that dimension: truncation error per block in nats, probes per block, and their seed.
EVAL_TOLERANCE, EVAL_PROBES, EVAL_SEED = 1e-3, 4, 0


class ResidualBlock(Transform):
    """x + g(x) for a contraction g, whose constant is proven from its parts.

    `lipschitz=` asserts a constant for a g that cannot be read; it is then shown as asserted, and no certificate
    passes.

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
        self._snapshot: tuple[Any, ...] | None = None
        self._evaluation: tuple[Bound, Rounding] | None = None
        self._entry: tuple[int, int, int] | None = None  # (axis, its size, dimensions or 0) that g asks of x, if known
        if lipschitz is None:
            self._check_contraction()
            self._read_entry()

    def _check_contraction(self) -> None:
        try:
            value = nominal(self.g)
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
            if getattr(layer, "inplace", False):
                raise ValueError(
                    f"g must leave x as it is; its first step, {layer}, works in place. Use inplace=False."
                )
            if isinstance(layer, nn.Flatten | nn.Unflatten):
                return

    def _check_input(self, x: Tensor, context: Tensor | None, name: str = "x") -> None:
        """A sentence for a wrong shape, before torch complains from inside a layer."""
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
        with entering(self, x):
            return x + self._branch(x, context)

    def _branch(self, x: Tensor, context: Tensor | None) -> Tensor:
        context = context if self._takes_context() else None
        self._check_input(x, context)
        y = self.g(x) if context is None else self.g(x, context)
        self._check_shape(x, y)
        return cast(Tensor, y)

    def _takes_context(self) -> bool:
        return "context" in inspect.signature(type(self.g).forward).parameters

    @staticmethod
    def _check_shape(x: Tensor, y: Tensor) -> None:
        if y.shape != x.shape:
            raise ValueError(
                f"g must return the shape it is given; got {tuple(y.shape)} for {tuple(x.shape)}. "
                "Let its last layer have as many outputs as its first has inputs."
            )

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
        with entering(self, x):
            context = context if self._takes_context() else None
            self._check_input(x, context)
            if estimator is None:
                estimator, generator = self._default_estimator(x, generator)
            constant = self._constant(tuple(x.shape[1:])) if estimator.needs_lipschitz else None
            y, jacobian = linearise(self.g, x, context)
            self._check_shape(x, y)
            return x + y, estimator(jacobian, x, lipschitz=constant, generator=generator)

    def _constant(self, shape: Shape) -> float:
        """Lip(g) as far as a step needs it: asked for while training, proven in eval."""
        if self.asserted is not None:
            return self.asserted
        return nominal(self.g) if self.training else self.bound(shape).value

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
        """Lip(g), proven from its parts, or as asserted. Kept until the weights change."""
        return self._frozen_copy(input_shape)[1]

    def stretch(self, input_shape: Shape | None = None) -> Stretch:
        b = self.bound(input_shape)
        inverse, low = (1 / (1 - b.value), math.log1p(-b.value)) if b.value < 1 else (math.inf, -math.inf)
        if input_shape is None:
            return Stretch(b.expansion, inverse, (-math.inf, math.inf), b.proven)
        d = math.prod(input_shape)
        return Stretch(b.expansion, inverse, (d * low, d * math.log(b.expansion)), b.proven)

    def reference(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        g = self._frozen_copy(tuple(x.shape[1:]))[0]
        x = x.double()
        y = g(x) if context is None or not self._takes_context() else g(x, context.double())
        return x + cast(Tensor, y)

    def _frozen_copy(self, input_shape: Shape | None) -> tuple[nn.Module, Bound]:
        """(g in float64 with its stored weights, its bound), made anew when weights, layers or shape have changed."""
        sizes = tuple(m.seen for m in self.g.modules() if isinstance(m, lip.SpectralCap))
        mark = (input_shape, self.asserted, sizes, *mark_of(self.g))
        if self._snapshot is None or self._snapshot[0] != mark:
            with torch.no_grad():
                self._snapshot = (mark, plain(self.g).double(), self._measured(input_shape))
        return self._snapshot[1], self._snapshot[2]

    def _measured(self, input_shape: Shape | None) -> Bound:
        return Bound(self.asserted, False) if self.asserted is not None else lip.bound(self.g, input_shape)

    def rounding(self, input_shape: Shape, shift: Tensor | None = None) -> Rounding:
        """What rounding in float64 can hide of x + g(x) - z; assumed where nothing is proven of g.

        Of a conditional g it depends on `shift`, the embeddings of the contexts.
        """
        copy, b = self._frozen_copy(input_shape)
        if not (b.proven and b.value < 1):
            return Rounding.assumed()
        if shift is not None:
            return lip.rounding(copy, b, input_shape, shift)
        if self._evaluation is None or self._evaluation[0] is not b:
            self._evaluation = (b, lip.rounding(copy, b, input_shape))
        return self._evaluation[1]

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
        check_batch(z, "z")
        check_finite(z, "z")
        if tolerance is not None and not tolerance > 0:
            raise ValueError(f"tolerance must be positive; got {tolerance}.")
        c = context if self._takes_context() else None
        self._check_input(z, c, "z")
        copy, b = self._frozen_copy(tuple(z.shape[1:]))

        def reference(x: Tensor, rows: Tensor) -> Tensor:
            return cast(Tensor, copy(x) if c is None else copy(x, c[rows].double()))

        def branch(x: Tensor, rows: Tensor) -> Tensor:
            if z.dtype.itemsize < 4:  # half precision stalls at once: iterate on the float64 copy
                return reference(x.double(), rows).to(x.dtype)
            return self._branch(x, None if c is None else c[rows])

        with torch.no_grad(), lip.frozen(), parametrize.cached(), full_precision(z):
            shift = None if c is None or not b.proven else cast(Any, copy).embed(c.double())
            solution = solve_fixed_point(
                branch,
                z,
                lipschitz=b.value,
                tolerance=tolerance,
                solver=Anderson() if solver is None else solver,
                reference=reference,
                rounding=self.rounding(tuple(z.shape[1:]), cast("Tensor | None", shift)),
            )
        return replace(solution, proven=b.proven)

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
        with lip.frozen():
            y, jacobian = linearise(self.g, x, context if self._takes_context() else None)
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


@contextmanager
def full_precision(like: Tensor) -> Iterator[None]:
    """TF32 and autocast off: both stall an iteration near 1e-3."""
    with torch.autocast(device_type=like.device.type, enabled=False), float32_products("ieee", like.device):
        yield


@contextmanager
def entering(module: nn.Module, x: Tensor) -> Iterator[None]:
    """What the outermost call of a model does: check the input, refresh the norms in training, then stand still."""
    if lip.is_frozen():
        yield
        return
    check_batch(x)
    if not (x.is_cuda and module.training):  # there the check would make every step wait; the training loop has its own
        check_finite(x, "x")
    refreshing = lip.together(module) if module.training and torch.is_grad_enabled() else nullcontext()
    with refreshing, lip.frozen():
        yield

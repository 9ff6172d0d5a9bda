"""g, the products J v and J' w, and the gradients of g and J v, written out for vectors, without an autograd graph.

For a sequence of linear layers and activations, h_l = W_l a_(l-1) + b_l and a_l = s(h_l), with tangents v:

    forward     p_l = W_l t_(l-1),   t_l = s'(h_l) p_l                       J v = p_n, beside y = h_n
    backward    dW_l = dh_l' a_(l-1) + dp_l' t_(l-1)                         likewise da, dt = dh W, dp W
                dp_l = s'(h_l) dt_l,   dh_l = s'(h_l) da_l + s''(h_l) sum p_l dt_l

Values and tangents are the rows of one matrix, [h; p], so every layer is one product in each direction. This is the
same calculus as that of `derivative`, which is an ordinary graph; it takes a third of the time, most of it in products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import torch
from torch import Tensor

from ..allocator import keep_freed_memory
from ..compiler import is_transforming
from ..logdet import safe_inverse_and_logdet
from .derivative import activation_slope
from .products import gram, times, times_transpose
from .program import Program, Step, apply_step, run_program

#: Up to so many tangents, all inputs are kept for the backward pass.
_FEW = 4

#: (step, its own tensors)
Stage: TypeAlias = tuple[Step, Sequence[Tensor]]


def is_explicit(program: Program) -> bool:
    """Whether a program is a sequence of linear layers and elementwise activations with known slopes."""
    return program.is_chain and program.has_slopes and all(_is_known(step) for step in program.steps)


def _is_known(step: Step) -> bool:
    return step.kind == "linear" or (step.activation is not None and not step.activation.is_reshape)


class VectorBranch:
    """g on vectors, for the many evaluations of a solve and the one in float64 that proves it."""

    #: How many samples are handled at once: their activations fit into a core's cache.
    ROWS = 2048

    def __init__(self, program: Program, values: Sequence[Tensor]) -> None:
        self.program, self.values, self.stages = program, values, _stages(program, values)
        keep_freed_memory()

    def __call__(self, x: Tensor) -> Tensor:
        """g(x); x may have axes between the batch and its features. Where derivatives may be taken, it has some."""
        if torch.is_grad_enabled() or is_transforming():
            return run_program(self.program, x, self.values)
        h = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        chunks = [h] if len(h) <= self.ROWS else h.tensor_split(-(-len(h) // self.ROWS))
        y = torch.cat([self._evaluate(chunk) for chunk in chunks]) if len(chunks) > 1 else self._evaluate(h)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], -1)

    def _evaluate(self, h: Tensor) -> Tensor:
        for step, own in self.stages:
            if step.kind == "linear":
                h = times_transpose(h, *own)
            elif step.activation is not None and step.activation.fast_value is not None:
                h = step.activation.fast_value(h, *step.settings)
            else:
                h = apply_step(step, [h], list(own))
        return h

    def linearise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return g(x) and (I + J)^-1, (batch, d, d); the identity where that is not finite."""
        chunks = [self._linearise(chunk) for chunk in x.tensor_split(max(1, -(-len(x) // self.ROWS)))]
        return chunks[0] if len(chunks) == 1 else (torch.cat([y for y, _ in chunks]), torch.cat([p for _, p in chunks]))

    def _linearise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        dual = DualPass(self.program, self.values, x, None, keep=False)
        eye = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
        a = dual.jv.permute(1, 2, 0) + eye
        if (found := safe_inverse_and_logdet(a)) is not None:
            return dual.y, found[0]
        inverse, _ = torch.linalg.inv_ex(a)
        return dual.y, torch.where(inverse.isfinite().all(-1).all(-1)[:, None, None], inverse, eye)


def _stages(program: Program, values: Sequence[Tensor]) -> list[Stage]:
    return [(step, own) for step, _, own in program.with_tensors(values) if step.kind != "identity"]


class DualPass:
    """One evaluation of g at x with tangents v, (probes, batch, d); without v, with all unit vectors.

    `y` is g(x), `jv` the products J v, (probes, batch, d). With `keep`, all inputs are kept for `backward`. With many
    tangents only those of the activations are, which halves the memory; `backward` computes their outputs again.
    """

    def __init__(self, program: Program, values: Sequence[Tensor], x: Tensor, v: Tensor | None, *, keep: bool) -> None:
        self.stages = _stages(program, values)
        self.x, self.basis, self.rows, self.keep = x, v is None, len(x), keep
        self.probes = x.shape[1] if v is None else len(v)
        #: The tangents of a matrix that has none: those of the first stage, for unit vectors, equal for all samples.
        self.columns = torch.eye(self.probes, dtype=x.dtype, device=x.device)[:, None] if self.basis else x.new_empty(0)
        #: The input of every stage, if kept, and the slopes of the activations.
        self.inputs: list[Tensor | None] = []
        self.slopes: list[Tensor | None] = []
        h = x if v is None else torch.cat([x, v.reshape(-1, x.shape[1])])
        for number in range(len(self.stages)):
            h = self._advance(number, h)
        self.y, self.jv = self._split(h)

    def _is_linear(self, number: int) -> bool:
        return self.stages[number][0].kind == "linear"

    def _split(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values and the tangents, (probes, batch, features)."""
        if self.basis and len(h) == self.rows:
            return h, self.columns.expand(-1, self.rows, -1)
        return h[: self.rows], h[self.rows :].view(self.probes, self.rows, h.shape[1])

    def _advance(self, number: int, h: Tensor) -> Tensor:
        step, own = self.stages[number]
        if not self._is_linear(number):
            self.inputs.append(h if self.keep else None)
            h, slope = self._activate(step, own, h)
            self.slopes.append(slope)
            return h
        if number and self.basis and len(h) == self.rows:  # two linear layers in a row
            h = torch.cat([h, self._split(h)[1].reshape(-1, h.shape[1])])
        recomputed = self.probes > _FEW and number > 0 and not self._is_linear(number - 1)
        self.inputs.append(h if self.keep and not recomputed else None)
        self.slopes.append(None)
        out = times_transpose(h, own[0])
        if self.basis and not number:
            self.columns = own[0].t().contiguous()[:, None]  # products with unit vectors
        if len(own) == 2:
            out[: self.rows].add_(own[1])
        return out

    def _activate(self, step: Step, own: Sequence[Tensor], h: Tensor) -> tuple[Tensor, Tensor]:
        """Return [s(h); s'(h) p] and the slopes s'(h)."""
        out = h.new_empty((1 + self.probes) * self.rows, h.shape[1])
        (value, p), (to, tangents) = self._split(h), (out[: self.rows], out[self.rows :])
        slope = value_and_slope(step, value, own, to)
        torch.mul(p, slope, out=tangents.view(p.shape))
        return out, slope

    # ------------------------------------------------------------------------------------------------- J' w

    def select(self, rows: Tensor) -> Callable[[Tensor], Tensor]:
        """Return w -> J' w for these samples in this order; w may have fewer rows, the first of them."""
        chosen = [None if d is None else d[rows] for d in self.slopes]

        def product(w: Tensor) -> Tensor:
            for (_, own), d in zip(reversed(self.stages), reversed(chosen), strict=True):
                w = times(w, own[0]) if d is None else w * d[: len(w)]
            return w

        return product

    def jacobian(self, rows: Tensor) -> Tensor:
        """Return J' of these samples, (samples, d, d): the entry (j, i) is dy_i / dx_j."""
        d, n = self.x.shape[1], len(rows)
        t = torch.eye(d, dtype=self.x.dtype, device=self.x.device)[:, None].expand(d, n, d)
        for number, ((_, own), slope) in enumerate(zip(self.stages, self.slopes, strict=True)):
            if slope is not None:
                t = t * slope[rows]
            elif number:
                t = times_transpose(t.reshape(d * n, -1), own[0]).view(d, n, -1)
            else:
                t = own[0].t()[:, None].expand(d, n, -1)
        return t.transpose(0, 1).contiguous()

    def forget_slopes(self) -> None:
        """Free the slopes, once no more products J' w are needed, if `backward` computes them again."""
        if self.probes > _FEW:
            self.slopes = [None] * len(self.stages)

    # ------------------------------------------------------------------------------------------------- gradients

    def backward(self, dy: Tensor, djv: Tensor, wanted: Sequence[bool]) -> tuple[Tensor, list[Tensor | None]]:
        """Return the gradients of x and of all tensors, given those of y and of J v.

        `wanted` says of which tensors; the tangents v have no gradient.
        """
        g, found, left = torch.cat([dy, djv.reshape(-1, dy.shape[1])]), list[Tensor | None](), list(wanted)
        slope: Tensor | None = None
        for number in reversed(range(len(self.stages))):
            mine = [left.pop() for _ in self.stages[number][1]][::-1]
            if self._is_linear(number):
                h, slope = self._linear_input(number)
                g, gradients = self._linear_backward(number, h, g, mine)
            else:
                g, gradients = self._activation_backward(number, slope, g, mine)
                slope = None  # it was that of this activation alone
            found = gradients + found
        return g[: self.rows], found

    def _linear_input(self, number: int) -> tuple[Tensor, Tensor | None]:
        """Return the input of a linear stage, and the slopes of the activation before it, if it is computed again."""
        kept = self.inputs[number]
        if kept is not None:
            return kept, None
        before = cast(Tensor, self.inputs[number - 1])
        return self._activate(*self.stages[number - 1], before)

    def _linear_backward(
        self, number: int, h: Tensor, g: Tensor, wanted: list[bool]
    ) -> tuple[Tensor, list[Tensor | None]]:
        weight, *_ = self.stages[number][1]
        found: list[Tensor | None] = [None]
        if wanted[0] and self.basis and not number:
            found = [gram(g[: self.rows], h) + self._split(g)[1].sum(1).t()]
        elif wanted[0]:
            found = [gram(g, h)]
        found += [g[: self.rows].sum(0) if want else None for want in wanted[1:]]
        return times(g if number else g[: self.rows], weight), found

    def _activation_backward(
        self, number: int, slope: Tensor | None, g: Tensor, wanted: list[bool]
    ) -> tuple[Tensor, list[Tensor | None]]:
        (step, own), h = self.stages[number], cast(Tensor, self.inputs[number])
        slope = self.slopes[number] if slope is None else slope
        if slope is None:  # no linear layer after it has computed it again
            _, slope = self._activate(step, own, h)
        (value, p), (dy, dt) = self._split(h), self._split(g)
        curved = (p * dt).sum(0) if self.probes > 1 else p[0] * dt[0]
        dh, gradients = activation_gradient(step, own, value, slope, dy, curved, any(wanted))
        dt.mul_(slope)
        dy.copy_(dh)
        return g, gradients


def value_and_slope(step: Step, x: Tensor, own: Sequence[Tensor], out: Tensor) -> Tensor:
    """Write the value of an activation to `out`, and return its slope."""
    record = step.activation
    if record is not None and record.fast_slope is not None:
        return record.fast_slope(x, out, *step.settings)
    y = apply_step(step, [x], list(own))
    out.copy_(y)
    return activation_slope(step, x, y, own)


def activation_gradient(
    step: Step, own: Sequence[Tensor], x: Tensor, d: Tensor, dy: Tensor, dd: Tensor, wanted: bool
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the gradients of x and of the parameters, given those of the value and of the slope d."""
    record = step.activation
    assert record is not None
    if record.curvature is not None and not own:
        return (d * dy).add_(record.curvature(x, d, dd, *step.settings)), []
    with torch.enable_grad():
        leaf, parameters = x.detach().requires_grad_(), [t.detach().requires_grad_(wanted) for t in own]
        y = apply_step(step, [leaf], parameters)
        slope = activation_slope(step, leaf, y, parameters)
        inputs = [leaf, *parameters] if wanted else [leaf]
        results = [(t, g) for t, g in ((y, dy), (slope, dd)) if t.requires_grad]
        outputs, gradients = zip(*results, strict=True)
        found = torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)
    dx = torch.zeros_like(x) if found[0] is None else found[0]
    return dx, list(found[1:]) if wanted else [None] * len(own)

"""The inverse without a gradient on a CPU: the iterations and the proof of `Transform.inverse`, in less time.

The iteration runs on constrained weights that are made once, images with their channels last. The float64 residual
that proves it convolves by matrix products where the library's own would take several times as long.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..fixed_point import Anderson, Solution
from ..fixed_point import solve as solve_fixed_point
from ..residual import ResidualBlock, full_precision
from ..snapshot import Snapshot
from ..transform import Transform, check_finite
from .branch import Form, laid_out
from .convolution import Convolution, arranged, banded, is_simple, native
from .path import path
from .reading import read, tensors


@torch.no_grad()
def unwind(transform: Transform, z: Tensor, *, tolerance: float | None = None) -> Tensor | None:
    """The x with these codes, every block's solve proven; None where one is not. `path.refusal` must say nothing."""
    check_finite(z, "z")
    stack = [z]
    with full_precision(z):
        for step in reversed(list(path(transform))):
            if isinstance(step, ResidualBlock):
                solution = _solve(step, stack.pop(), tolerance)
                if not bool(solution.converged.all()):
                    return None
                stack.append(solution.x)
            elif isinstance(step, Transform):
                stack.append(step.inverse(stack.pop()))
            else:
                step.inverse(stack)
    (x,) = stack
    return x


def _solve(block: ResidualBlock, z: Tensor, tolerance: float | None) -> Solution:
    """What `block.solve` does."""
    block._check_input(z, None, "z")
    now = block.snapshot(tuple(z.shape[1:]))
    working, exact = _forms(now, z.dtype)
    return solve_fixed_point(
        lambda x, rows: working(laid_out(x)),
        z,
        lipschitz=now.bound.value,
        tolerance=tolerance,
        solver=Anderson(),
        reference=lambda x, rows: exact(laid_out(x)),
        rounding=block.rounding(tuple(z.shape[1:])),
    )


def _forms(now: Snapshot, dtype: torch.dtype) -> tuple[Form, Form]:
    """g in this precision and in float64, with the weights it has in what is proven."""
    steps, values = read(now.g), [t.detach() for t in tensors(now.g)]
    assert steps is not None
    plain = Form(steps, [t.double() for t in values])
    ways = [_way(step.geometry is not None and is_simple(step), own) for step, _, own in plain.steps()]
    doubles = list[Tensor]()
    for way, (_, _, own) in zip(ways, plain.steps(), strict=True):
        doubles += own if way is native else [arranged(own[0]), *own[1:]]
    return Form(steps, [laid_out(t.to(dtype)) for t in values]), Form(steps, doubles, ways)


def _way(simple: bool, values: list[Tensor]) -> Convolution:
    """The library's own copies all patches of the input: too much where many channels become few."""
    if not simple or values[0].shape[2:].numel() == 1:
        return native
    outputs, inputs = values[0].shape[:2]
    return banded if inputs > outputs else native

"""From codes to samples: `choose` decides the method for every inverse that a user can call.

    Inverter     on a GPU, if a `Decoder` keeps what is prepared; a report needs codes in float64
    ordinary     otherwise: on a CPU, with gradients, a context or a given solver, or if a part is unknown

Both prove every block's solve. Codes that the `Inverter` does not prove are solved again by the ordinary method, which
reports what is missing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ..batch import check_batch
from ..compiled import empty_inverse
from ..compiler import can_read_values, is_transforming
from ..fixed_point import Anderson, Banach, ChainSolution, Newton, Solver
from ..opaque import Function, call, define, keep_track, outside_graph, tracked
from ..proof import sample_norms
from ..transform import Transform
from ..trust import NoBoundKnown, unwrap_unmodified
from . import ordinary
from .arithmetic import Arithmetic
from .inverter import Inverter
from .refusal import why_not_accelerated

#: The most codes that are solved at once if no report is requested.
MAX_BATCH = 128

NOT_ON_GPU = "the codes are not on a GPU"
ON_CPU = f"not accelerated: {NOT_ON_GPU}."


def choose(
    transform: Transform, z: Tensor, context: Tensor | None, solver: Solver | None, *, report: bool, keeps: bool
) -> str:
    """Choose the method for these codes: empty for an `Inverter`, otherwise a sentence why it is the ordinary one.

    `report`: bounds are requested beside x. `keeps`: a `Decoder` keeps what is prepared.
    """
    if not isinstance(z, Tensor):
        return ON_CPU
    obstacles = {
        "a context was given": context is not None,
        "a solver was given": solver is not None,
        "gradients are enabled": not report and torch.is_grad_enabled(),
        "the model is in training mode": not report and transform.training,
        f"codes must be float32 or float64; got {z.dtype}": z.dtype not in (torch.float32, torch.float64),
        NOT_ON_GPU: not _on_gpu(z),
        "a report needs codes in float64": report and z.dtype == torch.float32,
        "torch.compile or torch.func is tracing this call": not can_read_values(z) or is_transforming(),
        "there is no Decoder to keep the prepared inverse": not keeps,
    }
    reasons = (f"not accelerated: {reason}." for reason, applies in obstacles.items() if applies)
    return next(reasons, "") or why_not_accelerated(transform)


def invert(
    transform: Transform,
    z: Tensor,
    context: Tensor | None = None,
    *,
    tolerance: float | None = None,
    solver: Solver | None = None,
    decoder: Decoder | None = None,
    by_parts: bool = False,
) -> Tensor:
    """Return the x with these codes, in their dtype; raise `ConvergenceError` if a block's solve is not proven.

    A `decoder` keeps what is prepared. `by_parts` inverts the parts even if the class of the transform is unknown; its
    own `inverse` method sets it when it calls this.
    """
    transform = _uncompiled(transform)
    if torch.compiler.is_compiling():
        settings = {"solver": solver, "by_parts": by_parts, "decoder": None if decoder is None else id(decoder)}
        return call("inverse", transform, z, context, tolerance, None, settings)[0]
    kept = Decoder() if decoder is None else decoder
    kept.reason = choose(transform, z, context, solver, report=False, keeps=decoder is not None)
    if kept.reason == ON_CPU:
        kept.inverter = None  # prepared before the model moved to the CPU; free its GPU memory
    elif not kept.reason:
        inverter = kept.prepare(transform, z, tolerance)
        x = None if inverter.reason else _solve_rounded(inverter, z, tolerance)
        if x is not None:
            return x
    return ordinary.invert(transform, z, context, tolerance=tolerance, solver=solver, by_parts=by_parts)


def solve(
    transform: Transform,
    z: Tensor,
    context: Tensor | None = None,
    *,
    tolerance: float | None = None,
    solver: Solver | None = None,
    decoder: Decoder | None = None,
    by_parts: bool = False,
) -> ChainSolution:
    """Invert like `invert`, but report errors instead of raising; no gradient."""
    transform = _uncompiled(transform)
    if torch.compiler.is_compiling():
        options = {"tolerance": tolerance, "solver": solver, "decoder": decoder, "by_parts": by_parts}
        return outside_graph(solve, transform, z, context, **options)
    kept = Decoder() if decoder is None else decoder
    kept.reason = choose(transform, z, context, solver, report=True, keeps=decoder is not None)
    if not kept.reason:
        inverter = kept.prepare(transform, z, tolerance, report=True)
        if not inverter.reason:
            return inverter.solve(z)
    return ordinary.solve(transform, z, context, tolerance=tolerance, solver=solver, by_parts=by_parts)


class Decoder:
    """Inverts repeatedly and keeps what is prepared for it until the weights change.

    `reason` says why the last codes were not accelerated; it is empty if they were. With `graph` the work on a GPU is
    captured as a CUDA graph, which pays off from the second batch on. A copy, such as that of a model that holds it,
    has nothing prepared.

    >>> from iresnet import ResidualBlock, contractive_mlp
    >>> decoder = Decoder()
    >>> with torch.no_grad():
    ...     decoder(ResidualBlock(contractive_mlp(2)).eval(), torch.zeros(3, 2)).shape, decoder.reason
    (torch.Size([3, 2]), 'not accelerated: the codes are not on a GPU.')
    """

    def __init__(self, *, graph: bool = True) -> None:
        self.graph, self.reason = graph, ""
        self._prepared_for: tuple[Any, ...] = ()
        self._max_batch: int | None = None  # set if memory did not suffice for more codes at once
        keep_track(self)
        #: The prepared inverse, if there is one.
        self.inverter: Inverter | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Decoder:
        return Decoder(graph=self.graph)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return partial(Decoder, graph=self.graph), ()

    @property
    def seconds(self) -> float:
        """How long it took to prepare the inverse in use; 0 if there is none."""
        return 0.0 if self.reason or self.inverter is None else self.inverter.seconds

    def __call__(
        self,
        transform: Transform,
        z: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> Tensor:
        """Return the x with these codes, in their dtype; raise `ConvergenceError` if a block's solve is not proven."""
        check_batch(z, "z")
        return invert(transform, z, context, tolerance=tolerance, solver=solver, decoder=self)

    def prepare(self, transform: Transform, z: Tensor, tolerance: float | None, *, report: bool = False) -> Inverter:
        """Return the kept inverter; prepare a new one for other weights, another tolerance or a larger batch."""
        size = min(len(z), self._max_batch or (len(z) if report else MAX_BATCH))
        wanted, inverter = (z.dtype, z.device, tolerance, tuple(z.shape[1:]), report), self.inverter
        if inverter is None or wanted != self._prepared_for or inverter.shape[0] < size or not inverter.fits(transform):
            self.inverter = inverter = None  # free its memory, which the next one may need
            while inverter is None:
                if (inverter := self._try_prepare(transform, z[:size], tolerance, report)) is None:
                    size = self._max_batch = size // 2
            self.inverter, self._prepared_for = inverter, wanted
        self.reason = inverter.reason
        return inverter

    def _try_prepare(self, transform: Transform, z: Tensor, tolerance: float | None, report: bool) -> Inverter | None:
        """Prepare an inverter for such codes; return None if memory does not suffice for so many at once."""
        best = Arithmetic.on(z.device)
        # The residual of the whole code is only needed for a report.
        arithmetic = replace(best, graph=best.graph and self.graph, code=best.code if report else "none")
        try:
            return Inverter(transform, z, tolerance=tolerance, arithmetic=arithmetic)
        except torch.cuda.OutOfMemoryError:
            if len(z) == 1:
                raise
            return None


def _solve_rounded(inverter: Inverter, z: Tensor, tolerance: float | None) -> Tensor | None:
    """Return the x with these codes in their dtype, or None if not every solve is proven."""
    solution = inverter.solve(z)
    x, proven = solution.x.to(z.dtype), solution.converged
    if tolerance is not None and inverter.parts[-1].branch is not None:  # the rounding of a block's solution counts
        proven = proven & (solution.largest_block_bound + sample_norms(x.double() - solution.x) <= tolerance)
    return x if bool(proven.all()) else None


def _uncompiled(transform: Transform) -> Transform:
    """Return the transform inside `torch.compile`, whose hooks would be lost."""
    try:
        return cast(Transform, unwrap_unmodified(transform))
    except NoBoundKnown as error:
        raise NoBoundKnown(f"no inverse is known: {error}") from None


def _on_gpu(z: Tensor) -> bool:
    return z.is_cuda


def _invert(
    transform: Transform, z: Tensor, context: Tensor | None, *, generator: None, decoder: int | None, **options: Any
) -> tuple[Tensor]:
    return (invert(transform, z, context, decoder=None if decoder is None else tracked(decoder), **options),)


define("inverse", Function(_invert, empty_inverse, (Anderson, Banach, Newton)))

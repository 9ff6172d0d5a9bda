"""Codes to rows: `choose` decides how, for whoever inverts.

    Inverter     on a GPU, where a `Decoder` keeps what is prepared; for a report in float64
    ordinary     all else: a CPU, gradients, a context, a solver that is named, parts that are not known

Every block's solve is proven in each case. Codes that the first does not prove take the ordinary way, which says what
is missing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..compiler import can_read_values, is_transforming
from ..fixed_point import Solver
from ..proof import sample_norms
from ..transform import ChainSolution, Transform, check_batch
from . import ordinary
from .arithmetic import Arithmetic
from .inverter import Inverter
from .refusal import refusal

#: Codes that are solved at once where no report is asked for, at the most.
LARGEST = 128

ELSEWHERE = "the codes are not on a GPU"
ON_CPU = f"not accelerated: {ELSEWHERE}."


def choose(
    transform: Transform, z: Tensor, context: Tensor | None, solver: Solver | None, *, report: bool, keeps: bool
) -> str:
    """Why these codes take the ordinary way, in a sentence; nothing where an `Inverter` takes them.

    `report`: bounds are asked for beside x. `keeps`: there is a place for what is prepared.
    """
    if not isinstance(z, Tensor):
        return ON_CPU
    obstacles = {
        "a context was given": context is not None,
        "a solver was named": solver is not None,
        "a gradient may be asked for": not report and torch.is_grad_enabled(),
        "the model is in training": not report and transform.training,
        f"codes of {z.dtype} are no float32 or float64": z.dtype not in (torch.float32, torch.float64),
        ELSEWHERE: not _on_gpu(z),
        "a report is made in float64": report and z.dtype == torch.float32,
        "torch compiles or transforms this": not can_read_values(z) or is_transforming(),
        "nothing is kept": not keeps,
    }
    return next((f"not accelerated: {words}." for words, there in obstacles.items() if there), "") or refusal(transform)


def invert(
    transform: Transform,
    z: Tensor,
    context: Tensor | None = None,
    *,
    tolerance: float | None = None,
    solver: Solver | None = None,
    decoder: Decoder | None = None,
    own: bool = False,
) -> Tensor:
    """The x with these codes, in their precision; `ConvergenceError` where a block's solve is not proven.

    A `decoder` keeps what is prepared. `own`: it is the transform's own `inverse` that asks.
    """
    kept = Decoder() if decoder is None else decoder
    kept.reason = choose(transform, z, context, solver, report=False, keeps=decoder is not None)
    if kept.reason == ON_CPU:
        kept.inverter = None  # made before the model moved here, whose memory it holds
    elif not kept.reason:
        inverter = kept.prepared(transform, z, tolerance)
        x = None if inverter.reason else _rounded(inverter, z, tolerance)
        if x is not None:
            return x
    return ordinary.invert(transform, z, context, tolerance=tolerance, solver=solver, own=own)


def solve(
    transform: Transform,
    z: Tensor,
    context: Tensor | None = None,
    *,
    tolerance: float | None = None,
    solver: Solver | None = None,
    decoder: Decoder | None = None,
    own: bool = False,
) -> ChainSolution:
    """The inverse of these codes with a report in place of an exception; no gradient. As `invert` otherwise."""
    kept = Decoder() if decoder is None else decoder
    kept.reason = choose(transform, z, context, solver, report=True, keeps=decoder is not None)
    if not kept.reason:
        inverter = kept.prepared(transform, z, tolerance, report=True)
        if not inverter.reason:
            return inverter.solve(z)
    return ordinary.solve(transform, z, context, tolerance=tolerance, solver=solver, own=own)


class Decoder:
    """Keeps what is prepared for codes, for whoever inverts again and again, until the weights change.

    `reason` says why the last codes were not accelerated; it is empty where they were. With `graph` a GPU's work is
    captured, which pays from the second batch on. A copy, such as that of a model that holds it, has nothing prepared.

    >>> from iresnet import ResidualBlock, contractive_mlp
    >>> decoder = Decoder()
    >>> with torch.no_grad():
    ...     decoder(ResidualBlock(contractive_mlp(2)).eval(), torch.zeros(3, 2)).shape, decoder.reason
    (torch.Size([3, 2]), 'not accelerated: the codes are not on a GPU.')
    """

    def __init__(self, *, graph: bool = True) -> None:
        self.graph, self.reason = graph, ""
        self._made_for: tuple[Any, ...] = ()
        self._most: int | None = None  # codes at once, where memory did not suffice for more
        #: What is prepared, if anything is.
        self.inverter: Inverter | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Decoder:
        return Decoder(graph=self.graph)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return partial(Decoder, graph=self.graph), ()

    @property
    def seconds(self) -> float:
        """How long it took to prepare what is in use; nothing where nothing is."""
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
        """The x with these codes, in their precision; `ConvergenceError` where a block's solve is not proven."""
        check_batch(z, "z")
        return invert(transform, z, context, tolerance=tolerance, solver=solver, decoder=self)

    def prepared(self, transform: Transform, z: Tensor, tolerance: float | None, *, report: bool = False) -> Inverter:
        """What is prepared for such codes, made anew for other weights, another tolerance or more codes at once."""
        size = min(len(z), self._most or (len(z) if report else LARGEST))
        wanted, inverter = (z.dtype, z.device, tolerance, tuple(z.shape[1:]), report), self.inverter
        if inverter is None or wanted != self._made_for or inverter.shape[0] < size or not inverter.fits(transform):
            self.inverter = inverter = None  # before the next one is made, which may need its memory
            while inverter is None:
                if (inverter := self._fitting(transform, z[:size], tolerance, report)) is None:
                    size = self._most = size // 2
            self.inverter, self._made_for = inverter, wanted
        self.reason = inverter.reason
        return inverter

    def _fitting(self, transform: Transform, z: Tensor, tolerance: float | None, report: bool) -> Inverter | None:
        """An inverter for such codes; None where memory does not suffice for so many at once."""
        best = Arithmetic.on(z.device)
        # Without a report nobody reads the residual of the whole code.
        arithmetic = replace(best, graph=best.graph and self.graph, code=best.code if report else "none")
        try:
            return Inverter(transform, z, tolerance=tolerance, arithmetic=arithmetic)
        except torch.cuda.OutOfMemoryError:
            if len(z) == 1:
                raise
            return None


def _rounded(inverter: Inverter, z: Tensor, tolerance: float | None) -> Tensor | None:
    """The x with these codes in their precision, or None where not every solve is proven."""
    solution = inverter.solve(z)
    x, good = solution.x.to(z.dtype), solution.converged
    if tolerance is not None and inverter.parts[-1].branch is not None:  # a solution of a block is rounded here
        good = good & (solution.largest_block_bound + sample_norms(x.double() - solution.x) <= tolerance)
    return x if bool(good.all()) else None


def _on_gpu(z: Tensor) -> bool:
    return z.is_cuda

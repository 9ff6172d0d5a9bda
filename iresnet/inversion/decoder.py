"""Codes to rows, for whoever draws again and again: what can be prepared is prepared once, until the weights change.

On a GPU codes go through an `Inverter`, elsewhere through `unwinding`, and where neither applies through the
transform's own inverse. Every block's solve is proven in each case.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..fixed_point import Solver
from ..transform import Transform, check_batch
from .arithmetic import Arithmetic
from .inverter import Inverter
from .path import refusal
from .refinement import norms
from .unwinding import unwind

#: Codes that are solved at once, at the most.
LARGEST = 128


class Decoder:
    """Turns codes into rows. `reason` says why the last ones took the ordinary way; it is empty where they did not.

    A copy of it, and so of the model that holds it, has nothing prepared.

    >>> from iresnet import ResidualBlock, contractive_mlp
    >>> decoder = Decoder()
    >>> with torch.no_grad():
    ...     decoder(ResidualBlock(contractive_mlp(2)).eval(), torch.zeros(3, 2)).shape, decoder.reason
    (torch.Size([3, 2]), 'not accelerated: the codes are not on a GPU.')
    """

    def __init__(self) -> None:
        self.reason = ""
        self._made_for: tuple[Any, ...] = ()
        self._most = LARGEST  # codes at once, as far as memory goes
        #: What is prepared, if anything is.
        self.inverter: Inverter | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Decoder:
        return Decoder()

    def __reduce__(self) -> tuple[type[Decoder], tuple[()]]:
        return Decoder, ()

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
        self.reason = _obstacle(transform, z, context, solver)
        x = None if self.reason else self._fast(transform, z, tolerance)
        if x is not None:
            return x
        return transform.inverse(z, context, tolerance=tolerance, solver=solver)  # which names what is not proven

    def _fast(self, transform: Transform, z: Tensor, tolerance: float | None) -> Tensor | None:
        """The x with these codes, or None where not every solve is proven."""
        if not _on_gpu(z):
            self.inverter = None  # made before the model moved here, whose memory it holds
            self.reason = "not accelerated: the codes are not on a GPU."
            return unwind(transform, z, tolerance=tolerance)
        inverter = self._prepared(transform, z, tolerance)
        self.reason = inverter.reason
        if self.reason:
            return None
        solution = inverter.solve(z)
        x, good = solution.x.to(z.dtype), solution.converged
        if tolerance is not None and inverter.parts[-1].branch is not None:  # a solution of a block is rounded here
            good = good & (solution.largest_block_bound + norms(x.double() - solution.x) <= tolerance)
        return x if bool(good.all()) else None

    def _prepared(self, transform: Transform, z: Tensor, tolerance: float | None) -> Inverter:
        """What is prepared for such codes, made anew for other weights, another tolerance or more codes at once."""
        size, wanted = min(len(z), self._most), (z.dtype, z.device, tolerance, tuple(z.shape[1:]))
        inverter = self.inverter
        if inverter is not None and wanted == self._made_for and inverter.shape[0] >= size and inverter.fits(transform):
            return inverter
        self.inverter = None  # before the next one is made, which may need its memory
        while (made := _fitting(transform, z[:size], tolerance)) is None:
            size = self._most = size // 2
        self.inverter, self._made_for = made, wanted
        return made


def _fitting(transform: Transform, z: Tensor, tolerance: float | None) -> Inverter | None:
    """An inverter for such codes; None where memory does not suffice for so many at once."""
    # No residual of the whole code: nobody reads it here.
    arithmetic = replace(Arithmetic.on(z.device), code="none")
    try:
        return Inverter(transform, z, tolerance=tolerance, arithmetic=arithmetic)
    except torch.cuda.OutOfMemoryError:
        if len(z) == 1:
            raise
        return None


def _obstacle(transform: Transform, z: Tensor, context: Tensor | None, solver: Solver | None) -> str:
    """Why codes take the ordinary way, in a sentence, or nothing."""
    obstacles = {
        "a context was given": context is not None,
        "a solver was named": solver is not None,
        "a gradient may be asked for": torch.is_grad_enabled(),
        "the model is in training": transform.training,
        f"codes of {z.dtype} are no float32 or float64": z.dtype not in (torch.float32, torch.float64),
    }
    found = next((f"not accelerated: {words}." for words, there in obstacles.items() if there), "")
    return found or refusal(transform)


def _on_gpu(z: Tensor) -> bool:
    return z.is_cuda

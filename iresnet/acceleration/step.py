"""One training step, made fast: what it computes is decided by the objective, how by `Acceleration`.

eager       every operation is launched by Python; what a CPU does, and what everything else is judged against
fused       runs of residual blocks as compiled functions, g in bfloat16 (`fused`); couplings too (`couplings`)
graph       the whole step (forward, backward, clipping, optimiser) as one CUDA graph, launched at once

The first steps are eager: they initialise ActNorms, show every layer its input size and fill the optimiser's state.
Then fused steps warm the compiler up, and the graph is recorded after one more; all of them are steps of the training
like any other.
What a device, an objective or a network does not allow is left out, and `reasons` say why.

With a `RussianRoulette` a step draws one number of terms for all samples and blocks, from the seed of the generator and
the number of the step, so that a resumed run draws what it would have drawn. It is then a power series, and there is a
graph for each number of terms, recorded after its first step; the few with very many are launched operation by
operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..data.dataset import stream
from ..guard import guard_gradient, guard_loss
from ..lipschitz import nominal
from ..logdet import Estimator, FixedSeries, RussianRoulette, StoppedRoulette
from ..objective import Classification, Margin, Objective
from ..precision import chosen_convolutions, float32_sums
from ..residual import ResidualBlock
from .couplings import compiled_couplings, couplings
from .fused import fused, unfused
from .recording import Recordings

#: Loss, norm of the gradient before clipping, and the objective's figures.
Outcome: TypeAlias = tuple[Tensor, Tensor, Mapping[str, Tensor]]

CHOICES = ("auto", "on", "off")
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}

#: Steps that run eagerly, and steps that warm the fused functions up, before the first that may be recorded.
EAGER, WARM = 2, 2

#: How many numbers of terms of a roulette have a graph: the smallest, which are drawn most often.
GRAPHS = 32


@dataclass(frozen=True)
class Acceleration:
    """How a step is made fast. `graph`: as one CUDA graph; `compile`: residual blocks and couplings by torch.compile,
    once a shape; `precision`: that of g in training, float32 or bfloat16, while the state between the blocks stays in
    float32.

    "auto" takes what the device has: everything on a GPU, nothing on a CPU. A density is fused where its estimator is a
    power series or a roulette.
    """

    graph: str = "auto"
    compile: str = "auto"
    precision: str = "auto"

    def __post_init__(self) -> None:
        for name, known in (("graph", CHOICES), ("compile", CHOICES), ("precision", ("auto", *PRECISIONS))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; got {getattr(self, name)!r}.")


def _obstacle(objective: Objective) -> str | None:
    """Why the blocks of this objective's model cannot be fused, if so."""
    if isinstance(objective, Classification | Margin) or not _has_blocks(objective):
        return None
    simple = isinstance(_estimator(objective), FixedSeries | RussianRoulette)
    return None if simple else "the log-determinant is not a power series"


def _has_blocks(objective: Objective) -> bool:
    return any(isinstance(m, ResidualBlock) for m in objective.modules())


def _adaptive(objective: Objective) -> str | None:
    """Why no graph can be recorded: a solver that chooses its steps by what it reads from the device."""
    found = any(getattr(m, "adaptive", False) for m in objective.modules())
    return "an adaptive solver chooses its steps while it goes" if found else None


def _estimator(objective: Objective) -> Estimator | None:
    return getattr(objective.model, "estimator", None)


def _no_compiler() -> str | None:
    return None if find_spec("triton") is not None else "Triton is not installed"


class Stepper:
    """Takes one step of an optimiser after another. `method` says how, `reasons` why not faster."""

    def __init__(
        self,
        objective: Objective,
        optimiser: torch.optim.Optimizer,
        clip: float,
        generator: torch.Generator | None,
        acceleration: Acceleration,
    ) -> None:
        self.objective, self.optimiser, self.clip, self.generator = objective, optimiser, clip, generator
        self.parameters = list(objective.parameters())
        self.taken, self.step, self.reasons = 0, 0, list[str]()
        self._decide(acceleration)
        self._constant: float | None = None
        self._warm = 0
        self._recordings: Recordings[Outcome] | None = None
        self._inputs: tuple[Tensor, Tensor | None] | None = None

    def _decide(self, wish: Acceleration) -> None:
        device, obstacle = self.parameters[0].device, _obstacle(self.objective)
        absent = None if device.type == "cuda" else f"this device is {'a CPU' if device.type == 'cpu' else device.type}"
        self.graph = self._allow(wish.graph, "CUDA graph", absent or obstacle or _adaptive(self.objective))
        self.blocks, self.rest = _has_blocks(self.objective), bool(unfused(self.objective))
        self.couplings = bool(couplings(self.objective))
        idle = None if self.blocks or self.couplings else "there are neither residual blocks nor couplings"
        # Compiling also works on a CPU, but takes longer than it saves: only where it is asked for.
        missing = (absent or _no_compiler()) if wish.compile == "auto" else None
        self.compiled = self._allow(wish.compile, "compiled blocks", obstacle or idle or missing)
        coarse = None if absent or torch.cuda.is_bf16_supported() else "this GPU has none"
        half = wish.precision == "bfloat16" or (wish.precision == "auto" and absent is None)
        coarse = coarse or (None if self.blocks or self.rest else "there are neither residual blocks nor convolutions")
        if half and (obstacle or coarse):
            self.reasons.append(f"no bfloat16: {obstacle or coarse}")
            half = False
        self.dtype = torch.bfloat16 if half else torch.float32
        self.fuse = self.compiled or half
        if self.fuse:  # then no weight, and no gradient, is turned around on its way
            self.objective.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def _allow(self, wish: str, what: str, obstacle: str | None) -> bool:
        if wish == "off":
            return False
        if obstacle is not None:
            self.reasons.append(f"no {what}: {obstacle}")
        return obstacle is None

    @property
    def method(self) -> str:
        """How the steps are taken, in a few words."""
        parts = ["one CUDA graph" if self.graph else "operation by operation"]
        if self.fuse and self.blocks:
            parts.append("blocks compiled" if self.compiled else "blocks fused")
        if self.compiled and self.couplings:
            parts.append("couplings compiled")
        if self.fuse and (self.blocks or self.dtype != torch.float32):
            parts.append(f"{self._inside} in {str(self.dtype)[6:]}")
        return ", ".join(parts)

    @property
    def precision(self) -> str:
        """In which precision the steps compute."""
        return "float32" if self.dtype == torch.float32 else f"float32, {self._inside} in {str(self.dtype)[6:]}"

    @property
    def _inside(self) -> str:
        """What may run in another precision than the rest."""
        return "g" if self.blocks else "convolutions"

    def __str__(self) -> str:
        return f"{self.method} ({'; '.join(self.reasons)})" if self.reasons else self.method

    # ------------------------------------------------------------------ one step

    def __call__(self, x: Tensor, y: Tensor | None, step: int) -> Outcome:
        """Take step number `step` of the training, counted from 0, on a batch."""
        self.taken, self.step = self.taken + 1, step
        with self._drawn() as drawn:
            if self.taken <= EAGER or not self.graph:
                return self._take(x, y, fuse=self.fuse and self.taken > EAGER)
            if self._recordings is None or self._warm < WARM:
                return self._aside(x, y)
            key, rare = (0, False) if drawn is None else (drawn.count, drawn.count >= drawn.terms + GRAPHS)
            if rare or not self._fits(x, y):
                return self._take(x, y, fuse=self.fuse)
            return self._launch(key, x, y) if key in self._recordings else self._first(key, x, y)

    @contextmanager
    def _drawn(self) -> Iterator[StoppedRoulette | None]:
        """Within this context the number of terms of a roulette is drawn, the same for all samples and blocks."""
        roulette, model = _estimator(self.objective), self.objective.model
        if not isinstance(roulette, RussianRoulette):
            yield None
            return
        if self._constant is None:
            blocks = [m for m in model.modules() if isinstance(m, ResidualBlock)]
            self._constant = max((nominal(b.g) if b.asserted is None else b.asserted for b in blocks), default=0.0)
        seed = torch.initial_seed() if self.generator is None else self.generator.initial_seed()
        u = 1 - float(torch.rand((), dtype=torch.float64, generator=stream(seed, "terms", self.step)))
        drawn = roulette.stopped(self._constant, u)
        try:
            vars(model)["estimator"] = drawn
            yield drawn
        finally:
            vars(model)["estimator"] = roulette

    def _take(self, x: Tensor, y: Tensor | None, *, fuse: bool, guarded: bool = True) -> Outcome:
        """One step, operation by operation."""
        with chosen_convolutions() if fuse else nullcontext(), float32_sums():
            with self._fused() if fuse else self._slender():
                loss, figures = self.objective(x, y, generator=self.generator)
            if guarded:
                guard_loss(self.objective, loss, self.step, x, y, self.generator)
            self.optimiser.zero_grad(set_to_none=True)
            loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        if guarded:
            guard_gradient(self.objective, norm, self.step)
        nn.utils.clip_grads_with_norm_(self.parameters, self.clip, norm)
        self.optimiser.step()
        return loss.detach(), norm, figures

    def _slender(self) -> AbstractContextManager[Any]:
        """For the first steps: operation by operation in float32, a density in the way that keeps less for backward."""
        dense = self.fuse and isinstance(_estimator(self.objective), FixedSeries)
        return fused(self.objective, torch.float32, compiled=False) if dense else nullcontext()

    @contextmanager
    def _fused(self) -> Iterator[None]:
        """Blocks fused, and what cannot be fused in the same precision by autocast."""
        half = self.dtype != torch.float32 and self.rest
        with (
            fused(self.objective, self.dtype, compiled=self.compiled),
            compiled_couplings(self.objective) if self.compiled else nullcontext(),
            torch.autocast(self.parameters[0].device.type, self.dtype, enabled=half),
        ):
            yield

    def _aside(self, x: Tensor, y: Tensor | None) -> Outcome:
        """A step as it will be recorded, which compiles, measures and allocates what a recording cannot."""
        if self._recordings is None:
            self._recordings = Recordings(self.generator)
        self._warm += 1
        return self._recordings.aside(lambda: self._take(x, y, fuse=self.fuse))

    def _fits(self, x: Tensor, y: Tensor | None) -> bool:
        """Whether recorded steps take such a batch."""
        if self._inputs is None:
            self._inputs = x.clone(), None if y is None else y.clone()
        return x.shape == self._inputs[0].shape and (y is None) == (self._inputs[1] is None)

    def _first(self, key: int, x: Tensor, y: Tensor | None) -> Outcome:
        """The first step of a kind: taken, since what it compiles may be its own, and then recorded."""
        outcome = self._aside(x, y)
        self._record(key)
        return outcome

    def _record(self, key: int) -> None:
        """Record the step; where that fails, steps go on operation by operation, and the reason is kept."""
        assert self._recordings is not None
        assert self._inputs is not None
        inputs = self._inputs
        self.optimiser.zero_grad(set_to_none=True)  # or their memory would be kept from this recording
        reason = self._recordings.record(key, lambda: self._take(*inputs, fuse=self.fuse, guarded=False))
        if reason is not None:
            self.graph, self._recordings = False, None
            self.optimiser.zero_grad(set_to_none=True)
            self.reasons.append(f"no CUDA graph: {reason}")

    def _launch(self, key: int, x: Tensor, y: Tensor | None) -> Outcome:
        assert self._recordings is not None
        assert self._inputs is not None
        self._inputs[0].copy_(x, non_blocking=True)
        if self._inputs[1] is not None and y is not None:
            self._inputs[1].copy_(y, non_blocking=True)
        loss, norm, figures = self._recordings.launch(key)
        guard_loss(self.objective, loss, self.step, x, y, self.generator)
        guard_gradient(self.objective, norm, self.step)
        # The next launch writes over what this one returned.
        return loss.clone(), norm.clone(), {name: value.clone() for name, value in figures.items()}

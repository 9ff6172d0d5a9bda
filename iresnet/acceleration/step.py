"""One training step, made fast: what it computes is decided by the objective, how by `Acceleration`.

eager       every operation is launched by Python; what a CPU does, and what everything else is judged against
fused       runs of residual blocks as compiled functions, g in bfloat16 (`fused`)
graph       the whole step (forward, backward, clipping, optimiser) as one CUDA graph, launched at once

The first steps are eager: they initialise ActNorms, show every layer its input size and fill the optimiser's state.
Then fused steps warm the compiler up, and the graph is captured; all of them are steps of the training like any other.
What a device, an objective or a network does not allow is left out, and `reasons` say why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ..guard import guard_gradient, guard_loss
from ..objective import Classification, Margin, Objective
from ..precision import chosen_convolutions
from .fused import fused, is_fusable, unfused

#: Loss, norm of the gradient before clipping, and the objective's figures.
Outcome: TypeAlias = tuple[Tensor, Tensor, Mapping[str, Tensor]]

CHOICES = ("auto", "on", "off")
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}

#: Steps that run eagerly, and steps that warm the fused functions up, before a graph is captured.
EAGER, WARM = 2, 3


@dataclass(frozen=True)
class Acceleration:
    """How a step is made fast. `graph`: as one CUDA graph; `compile`: residual blocks by torch.compile, once a shape;
    `precision`: that of g in training, float32 or bfloat16, while the state between the blocks stays in float32.

    "auto" takes what the device has: everything on a GPU, nothing on a CPU. A density is fused where its estimator is a
    power series of one probe.
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
    if isinstance(objective, Classification | Margin):
        return None
    simple = is_fusable(getattr(objective.model, "estimator", None))
    return None if simple else "the log-determinant is not a power series of one probe"


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
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream: torch.cuda.Stream | None = None
        self._inputs: tuple[Tensor, Tensor | None] | None = None
        self._outputs: Outcome | None = None

    def _decide(self, wish: Acceleration) -> None:
        device, obstacle = self.parameters[0].device, _obstacle(self.objective)
        absent = None if device.type == "cuda" else f"this device is {'a CPU' if device.type == 'cpu' else device.type}"
        self.graph = self._allow(wish.graph, "CUDA graph", absent or obstacle)
        # Compiling also works on a CPU, but takes longer than it saves: only where it is asked for.
        missing = (absent or _no_compiler()) if wish.compile == "auto" else None
        self.compiled = self._allow(wish.compile, "compiled blocks", obstacle or missing)
        coarse = None if absent or torch.cuda.is_bf16_supported() else "this GPU has none"
        half = wish.precision == "bfloat16" or (wish.precision == "auto" and absent is None)
        if half and (obstacle or coarse):
            self.reasons.append(f"no bfloat16: {obstacle or coarse}")
            half = False
        self.dtype = torch.bfloat16 if half else torch.float32
        self.fuse = self.compiled or half
        self.rest = bool(unfused(self.objective))
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
        if self.fuse:
            parts.append(f"blocks {'compiled' if self.compiled else 'fused'}, g in {str(self.dtype)[6:]}")
        return ", ".join(parts)

    @property
    def precision(self) -> str:
        """In which precision the steps compute."""
        return "float32" if self.dtype == torch.float32 else f"float32, g in {str(self.dtype)[6:]}"

    def __str__(self) -> str:
        return f"{self.method} ({'; '.join(self.reasons)})" if self.reasons else self.method

    # ------------------------------------------------------------------ one step

    def __call__(self, x: Tensor, y: Tensor | None, step: int) -> Outcome:
        """Take step number `step` of the training, counted from 0, on a batch."""
        self.taken, self.step = self.taken + 1, step
        if self.taken <= EAGER:
            return self._take(x, y, fuse=False)
        if not self.graph:
            return self._take(x, y, fuse=self.fuse)
        if self._graph is None:
            if self.taken <= EAGER + WARM:
                return self._aside(x, y)
            self._capture(x, y)
        if self._graph is None or not self._fits(x, y):  # it could not be captured, or this batch is another
            return self._take(x, y, fuse=self.fuse)
        return self._replay(x, y)

    def _take(self, x: Tensor, y: Tensor | None, *, fuse: bool, guarded: bool = True) -> Outcome:
        """One step, operation by operation."""
        with chosen_convolutions() if fuse else nullcontext():
            with self._fused() if fuse else nullcontext():
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

    @contextmanager
    def _fused(self) -> Iterator[None]:
        """Blocks fused, and what cannot be fused in the same precision by autocast."""
        half = self.dtype != torch.float32 and self.rest
        with (
            fused(self.objective, self.dtype, compiled=self.compiled),
            torch.autocast(self.parameters[0].device.type, self.dtype, enabled=half),
        ):
            yield

    def _aside(self, x: Tensor, y: Tensor | None) -> Outcome:
        """A step on a stream of its own, as capturing needs it: what ran on the default stream cannot be captured."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = self._take(x, y, fuse=self.fuse)
        torch.cuda.current_stream().wait_stream(self._stream)
        return result

    def _capture(self, x: Tensor, y: Tensor | None) -> None:
        """Record the step; where that fails, steps go on operation by operation, and the reason is kept."""
        graph, inputs, stream = torch.cuda.CUDAGraph(), (x.clone(), None if y is None else y.clone()), self._stream
        before = torch.cuda.current_stream()
        if self.generator is not None:
            graph.register_generator_state(self.generator)
        self.optimiser.zero_grad(set_to_none=True)
        try:
            with torch.cuda.graph(graph, stream=stream):
                self._outputs = self._take(*inputs, fuse=self.fuse, guarded=False)
        except RuntimeError as error:
            torch.cuda.set_stream(before)  # a capture that fails leaves its own behind
            self.graph, cause = False, error.__context__ or error  # the first error says why, not that of its end
            self.optimiser.zero_grad(set_to_none=True)
            self.reasons.append(f"no CUDA graph: {str(cause).splitlines()[0]}")
        else:
            self._graph, self._inputs = graph, inputs

    def _fits(self, x: Tensor, y: Tensor | None) -> bool:
        assert self._inputs is not None
        return x.shape == self._inputs[0].shape and (y is None) == (self._inputs[1] is None)

    def _replay(self, x: Tensor, y: Tensor | None) -> Outcome:
        assert self._graph is not None
        assert self._inputs is not None
        assert self._outputs is not None
        self._inputs[0].copy_(x, non_blocking=True)
        if self._inputs[1] is not None and y is not None:
            self._inputs[1].copy_(y, non_blocking=True)
        self._graph.replay()
        loss, norm, figures = self._outputs
        guard_loss(self.objective, loss, self.step, x, y, self.generator)
        guard_gradient(self.objective, norm, self.step)
        # The next launch writes over what this one returned.
        return loss.clone(), norm.clone(), {name: value.clone() for name, value in figures.items()}

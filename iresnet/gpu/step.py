"""The fast step: the loop's own step, taken on a view of the objective (`planned`), and launched as a CUDA graph.

The first steps are eager: they initialise ActNorms, show every layer its input size and fill the optimiser's state.
Then fused steps warm the compiler up, and the graph is recorded after one more; all of them are steps of the training
like any other.

A step with a roulette has one number of terms for all samples and blocks. It is then a power series, and there is a
graph for each number of terms, recorded after its first step; the few with very many are launched operation by
operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ..cuda_graph import CudaGraphs
from ..logdet import StoppedRoulette
from ..precision import cudnn_benchmark
from .engine import Engine
from .plan import planned

#: Steps that run eagerly, and steps that warm the fused functions up, before the first that may be recorded.
EAGER, WARM = 2, 2

#: How many numbers of terms of a roulette have a graph: the smallest, which are drawn most often.
GRAPHS = 32


#: (x, y, generator=..., and estimator=... where a number of terms was drawn) -> (loss, figures): an objective.
Forward: TypeAlias = Callable[..., tuple[Tensor, dict[str, Tensor]]]


class StepResult(NamedTuple):
    """What a step found: its loss, the norm of the gradient before clipping, and the objective's figures."""

    loss: Tensor
    norm: Tensor
    metrics: Mapping[str, Tensor]


#: (forward, x, y, the roulette that was drawn, guarded=...) -> what the step found; and the same for a batch (x, y).
TrainingStep: TypeAlias = Callable[..., StepResult]
Step: TypeAlias = Callable[..., StepResult]


class FastStep:
    """Takes the steps of a training as its engine allows, by means of `training_step`, the plain step."""

    def __init__(
        self,
        objective: nn.Module,
        optimiser: torch.optim.Optimizer,
        generator: torch.Generator | None,
        engine: Engine,
    ) -> None:
        self.objective, self.optimiser, self.generator, self.engine = objective, optimiser, generator, engine
        self.taken = self._warm = 0
        self._graphs: CudaGraphs[StepResult] | None = None
        self._inputs: tuple[Tensor, Tensor | None] | None = None
        if engine.fuse:  # then no weight, and no gradient, is turned around on its way
            objective.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def __call__(
        self, training_step: TrainingStep, x: Tensor, y: Tensor | None, drawn: StoppedRoulette | None
    ) -> StepResult:
        """Take the next step on a batch; `drawn` is a roulette with its number of terms.

        A step that is launched as a graph has no guards in it: they are for the caller.
        """
        self.taken += 1
        step = partial(self._eager_step, training_step, drawn=drawn, fuse=self.engine.fuse)
        if self.taken <= EAGER or not self.engine.graph:
            return step(x, y, fuse=self.engine.fuse and self.taken > EAGER)
        if self._graphs is None or self._warm < WARM:
            return self._on_graph_stream(step, x, y)
        key, rare = (0, False) if drawn is None else (drawn.count, drawn.count >= drawn.terms + GRAPHS)
        if rare or not self._fits(x, y):
            return step(x, y)
        return self._launch(key, x, y) if key in self._graphs else self._step_and_capture(key, step, x, y)

    def _eager_step(
        self,
        training_step: TrainingStep,
        x: Tensor,
        y: Tensor | None,
        *,
        drawn: StoppedRoulette | None,
        fuse: bool,
        guarded: bool = True,
    ) -> StepResult:
        """One step, operation by operation: the plain one, with the view of the objective that is due."""

        def forward(*arguments: Any, **options: Any) -> Any:
            with self._fused() if fuse else self._slender() as view:
                return view(*arguments, **options)

        with cudnn_benchmark() if fuse else nullcontext():
            return training_step(forward, x, y, drawn, guarded=guarded)

    def _slender(self) -> AbstractContextManager[nn.Module]:
        """For the first steps: operation by operation in float32, a density in the way that keeps less for backward."""
        dense = self.engine.fuse and self.engine.series
        return planned(self.objective, torch.float32, compiled=False) if dense else nullcontext(self.objective)

    @contextmanager
    def _fused(self) -> Iterator[nn.Module]:
        """Blocks fused, and what cannot be fused in the same precision by autocast."""
        engine, device = self.engine, next(self.objective.parameters()).device
        half = engine.dtype != torch.float32 and engine.rest
        with (
            planned(self.objective, engine.dtype, compiled=engine.compiled) as view,
            torch.autocast(device.type, engine.dtype, enabled=half),
        ):
            yield view

    def _on_graph_stream(self, step: Step, x: Tensor, y: Tensor | None) -> StepResult:
        """A step as it will be recorded, which compiles, measures and allocates what a recording cannot."""
        if self._graphs is None:
            self._graphs = CudaGraphs(self.generator)
        self._warm += 1
        return self._graphs.run_on_stream(lambda: step(x, y))

    def _fits(self, x: Tensor, y: Tensor | None) -> bool:
        """Whether recorded steps take such a batch."""
        if self._inputs is None:
            self._inputs = x.clone(), None if y is None else y.clone()
        return x.shape == self._inputs[0].shape and (y is None) == (self._inputs[1] is None)

    def _step_and_capture(self, key: int, step: Step, x: Tensor, y: Tensor | None) -> StepResult:
        """The first step of a kind: taken, since what it compiles may be its own, and then recorded.

        Where that fails, steps go on operation by operation, and the reason is kept.
        """
        result = self._on_graph_stream(step, x, y)
        assert self._graphs is not None
        assert self._inputs is not None
        inputs = self._inputs
        self.optimiser.zero_grad(set_to_none=True)  # or their memory would be kept from this recording
        reason = self._graphs.capture(key, lambda: step(*inputs, guarded=False))
        if reason is not None:
            self.engine.graph, self._graphs = False, None
            self.optimiser.zero_grad(set_to_none=True)
            self.engine.reasons.append(f"no CUDA graph: {reason}")
        return result

    def _launch(self, key: int, x: Tensor, y: Tensor | None) -> StepResult:
        assert self._graphs is not None
        assert self._inputs is not None
        self._inputs[0].copy_(x, non_blocking=True)
        if self._inputs[1] is not None and y is not None:
            self._inputs[1].copy_(y, non_blocking=True)
        loss, norm, metrics = self._graphs.launch(key)
        # The next launch writes over what this one returned.
        return StepResult(loss.clone(), norm.clone(), {name: value.clone() for name, value in metrics.items()})

"""Fast training steps: the loop's step on a view of the objective (`planned`), launched as a CUDA graph.

The first steps run eagerly: they initialise ActNorms, record the input size of every layer and fill the optimiser's
state. Then fused steps warm up the compiler, and after one more the graph is captured. All of these are ordinary
training steps.

With a roulette, a step has one number of terms for all samples and blocks, which makes it a power series. There is one
graph per number of terms, captured after the first such step; the rare steps with very many terms run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ..cuda_graph import CudaGraphs
from ..device import device_of
from ..logdet import StoppedRoulette
from ..precision import cudnn_benchmark
from .engine import Engine
from .plan import planned

#: Number of eager steps, and of steps that warm up the fused functions, before the first capture.
EAGER, WARM = 2, 2

#: How many of a roulette's numbers of terms get a graph: the smallest, which are drawn most often.
GRAPHS = 32


#: An objective: (x, y, generator=..., estimator=... if a number of terms was drawn) -> (loss, metrics).
Forward: TypeAlias = Callable[..., tuple[Tensor, dict[str, Tensor]]]


class StepResult(NamedTuple):
    """The result of a step: its loss, the gradient norm before clipping, and the objective's metrics."""

    loss: Tensor
    norm: Tensor
    metrics: Mapping[str, Tensor]


#: (forward, x, y, drawn roulette, guarded=...) -> result; and the same with all but the batch (x, y) bound.
TrainingStep: TypeAlias = Callable[..., StepResult]
Step: TypeAlias = Callable[..., StepResult]


class FastStep:
    """Executes the loop's `training_step` as fast as the engine allows."""

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
        if engine.fuse:  # so that neither weights nor gradients are transposed
            objective.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def __call__(
        self, training_step: TrainingStep, x: Tensor, y: Tensor | None, drawn: StoppedRoulette | None
    ) -> StepResult:
        """Take the next step on a batch; `drawn` is the roulette with the number of terms drawn for this step.

        A step launched as a CUDA graph contains no guards: the caller checks the result.
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
        """Run one step eagerly, on the fused view of the objective or on a plain one."""

        def forward(*arguments: Any, **options: Any) -> Any:
            with self._fused_view() if fuse else self._eager_view() as view:
                return view(*arguments, **options)

        with cudnn_benchmark() if fuse else nullcontext():
            return training_step(forward, x, y, drawn, guarded=guarded)

    def _eager_view(self) -> AbstractContextManager[nn.Module]:
        """The objective for the first steps: in float32, not compiled; a density by a plan, which saves memory."""
        dense = self.engine.fuse and self.engine.series
        return planned(self.objective, torch.float32, compiled=False) if dense else nullcontext(self.objective)

    @contextmanager
    def _fused_view(self) -> Iterator[nn.Module]:
        """The objective with fused blocks; autocast runs everything else in the same precision."""
        engine, device = self.engine, device_of(self.objective)
        half = engine.dtype != torch.float32 and engine.rest
        with (
            planned(self.objective, engine.dtype, compiled=engine.compiled) as view,
            torch.autocast(device.type, engine.dtype, enabled=half),
        ):
            yield view

    def _on_graph_stream(self, step: Step, x: Tensor, y: Tensor | None) -> StepResult:
        """Run a step on the stream of the graphs: it compiles, measures and allocates what a capture cannot."""
        if self._graphs is None:
            self._graphs = CudaGraphs(self.generator)
        self._warm += 1
        return self._graphs.run_on_stream(lambda: step(x, y))

    def _fits(self, x: Tensor, y: Tensor | None) -> bool:
        """Whether the captured steps accept a batch of this shape."""
        if self._inputs is None:
            self._inputs = x.clone(), None if y is None else y.clone()
        return x.shape == self._inputs[0].shape and (y is None) == (self._inputs[1] is None)

    def _step_and_capture(self, key: int, step: Step, x: Tensor, y: Tensor | None) -> StepResult:
        """Take the first step with this key, which may compile functions of its own, and then capture it.

        If the capture fails, later steps run eagerly, and the engine's `reasons` says why.
        """
        result = self._on_graph_stream(step, x, y)
        assert self._graphs is not None
        assert self._inputs is not None
        inputs = self._inputs
        self.optimiser.zero_grad(set_to_none=True)  # otherwise the graph could not reuse the gradients' memory
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
        # The next launch overwrites these tensors.
        return StepResult(loss.clone(), norm.clone(), {name: value.clone() for name, value in metrics.items()})

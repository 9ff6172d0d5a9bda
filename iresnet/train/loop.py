"""One training loop for every objective, read from top to bottom.

`State` is everything that changes while training: the live weights, their average, the optimiser, the generator and the
step. A checkpoint of it, with batches that are a function of the step, continues bit for bit on the CPU.

`State.training_step` is the step: zero_grad, forward, backward, clip, optimiser. Where the device and the settings
allow it, `gpu.FastStep` takes the same step with compiled blocks, or as one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..branch import nominal_constant
from ..data.dataset import seeded_generator
from ..gpu import Acceleration, Engine, FastStep, StepResult
from ..gpu.step import Forward
from ..logdet import Estimator, RussianRoulette, StoppedRoulette
from ..precision import float32_accumulation
from ..residual import ResidualBlock
from . import restoring
from .average import Average
from .checkpoint import Checkpoint
from .guard import TrainingError, guard_gradient, guard_loss
from .objective import Objective
from .optimiser import make_optimiser, set_learning_rate
from .settings import Training

#: A batch: x, or (x, y) where there are labels.
Batch: TypeAlias = Tensor | tuple[Tensor, Tensor | None]

#: Called after every step with (steps done, steps in all, figures); reading a figure makes a GPU wait.
Report: TypeAlias = Callable[[int, int, Mapping[str, Tensor]], None]


def train(
    objective: Objective,
    batches: Iterable[Batch],
    settings: Training,
    *,
    generator: torch.Generator | None = None,
    acceleration: Acceleration | None = None,
    report: Report | None = None,
    resume: Checkpoint | None = None,
    watch: Callable[[State], bool] | None = None,
) -> nn.Module:
    """Minimise the objective over `settings.steps` batches; the model with averaged weights, in eval.

    The objective's own model is trained in place; the result is a copy whose norms were brought to convergence.
    `watch` sees the state after every step, to judge or save it, and ends the training by returning True. With
    `resume`, `batches` must start at the checkpoint's step.
    """
    state = State(objective, settings, generator, acceleration)
    if resume is not None:
        state.restore(resume)
    objective.train()
    for batch in islice(batches, max(0, settings.steps - state.step)):
        x, y = batch if isinstance(batch, tuple) else (batch, None)
        set_learning_rate(state.optimiser, settings.learning_rate_at(state.step))
        result = state.advance(x, y)
        state.update_average()
        if report is not None:
            report(state.step, settings.steps, result.metrics)
        if watch is not None and watch(state):
            break
    return state.averaged_model()


class State:
    """What training changes: live weights, averaged weights, optimiser, generator, step; and how a step is taken.

    `engine` says how fast its steps can be, and `fast` takes them, where there is something faster than the plain step.
    """

    def __init__(
        self,
        objective: Objective,
        settings: Training,
        generator: torch.Generator | None,
        acceleration: Acceleration | None = None,
    ) -> None:
        self.objective, self.settings, self.generator = objective, settings, generator
        self.parameters = list(objective.parameters())
        self.optimiser = make_optimiser(objective, settings)
        self.average: Average | None = None
        self.step = self.taken = 0
        wish = Acceleration() if acceleration is None else acceleration
        self.engine = Engine(objective, wish, needs_logdet=objective.needs_logdet, estimator=self.estimator)
        self.fast: FastStep | None = None
        if self.engine.graph or self.engine.fuse:
            self.fast = FastStep(objective, self.optimiser, generator, self.engine)

    def advance(self, x: Tensor, y: Tensor | None = None) -> StepResult:
        """Take the next step, on a batch."""
        self.taken += 1
        drawn = self.draw_terms()
        if self.fast is None:
            result = self.training_step(self.objective, x, y, drawn)
        else:
            result = self.fast(self.training_step, x, y, drawn)
            guard_loss(self.objective, result.loss, self.step, x, y, self._chance(drawn))
            guard_gradient(self.objective, result.norm, self.step)
        self.step += 1
        return result

    def training_step(
        self, forward: Forward, x: Tensor, y: Tensor | None, drawn: StoppedRoulette | None, *, guarded: bool = True
    ) -> StepResult:
        """The step itself. `forward` is the objective, or computes the same in another way."""
        chance = self._chance(drawn)
        self.optimiser.zero_grad(set_to_none=True)
        with float32_accumulation():
            loss, metrics = forward(x, y, **chance)
            if guarded:
                guard_loss(self.objective, loss, self.step, x, y, chance)
            loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        if guarded:
            guard_gradient(self.objective, norm, self.step)
        nn.utils.clip_grads_with_norm_(self.parameters, self.settings.clip, norm)
        self.optimiser.step()
        return StepResult(loss.detach(), norm, metrics)

    def _chance(self, drawn: StoppedRoulette | None) -> dict[str, Any]:
        """Where an objective's random numbers come from: the generator, and a number of terms where one is drawn."""
        return {"generator": self.generator} if drawn is None else {"generator": self.generator, "estimator": drawn}

    @property
    def estimator(self) -> Estimator | None:
        """How the model finds log-determinants, if it does."""
        return getattr(self.objective.model, "estimator", None)

    def draw_terms(self) -> StoppedRoulette | None:
        """A roulette with its number of terms for this step, the same for all samples and blocks; None for no roulette.

        It follows from the seed of the generator and the step, so that a resumed run draws what it would have drawn.
        """
        roulette = self.estimator
        if not isinstance(roulette, RussianRoulette):
            return None
        seed = torch.initial_seed() if self.generator is None else self.generator.initial_seed()
        u = 1 - float(torch.rand((), dtype=torch.float64, generator=seeded_generator(seed, "terms", self.step)))
        return roulette.stopped(self._largest_constant, u)

    @cached_property
    def _largest_constant(self) -> float:
        """The largest Lip(g) that is asked for: a roulette goes on as its block needs."""
        blocks = [m for m in self.objective.model.modules() if isinstance(m, ResidualBlock)]
        return max((nominal_constant(b.g) if b.asserted is None else b.asserted for b in blocks), default=0.0)

    def update_average(self) -> None:
        if self.average is None:  # after the first step, when data-dependent initialisation is done
            self.average = Average(self.objective.model, self.settings.average)
        self.average.update(self.objective.model)

    def averaged_model(self) -> nn.Module:
        """A copy of the model with averaged weights, in eval, its norms its own."""
        if self.average is None:
            raise TrainingError("there was no batch to train on. Give at least one.")
        return self.average.result(self.objective.model)

    def snapshot(self) -> Checkpoint:
        """All that is needed to go on as if nothing had happened."""
        tensors: dict[str, dict[str, Tensor]] = {"weights": dict(self.objective.model.state_dict())}
        state: dict[str, Any] = {"step": self.step, "optimiser": self.settings.optimiser}
        if self.average is not None:
            tensors["average"] = dict(self.average.copy.named_parameters())
            state["averaged"] = self.average.count
        tensors["optimiser"] = {
            f"{index}.{name}": value
            for index, entry in self.optimiser.state_dict()["state"].items()
            for name, value in entry.items()
            if isinstance(value, Tensor)
        }
        tensors["generator"] = {"global": torch.get_rng_state()}  # on a CPU dropout draws from it
        if self.generator is not None:
            tensors["generator"]["state"] = self.generator.get_state()
        # Copies: the next step must not change what was the state at this one.
        return Checkpoint({g: {n: t.detach().clone() for n, t in ts.items()} for g, ts in tensors.items()}, state)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go back to a snapshot of the same model and settings, before the first step is taken.

        All of it is checked first: a snapshot that does not fit leaves everything as it is.
        """
        if self.taken:
            raise ValueError("a snapshot is restored before the first step; make a new State for it.")
        model, step = self.objective.model, checkpoint.read_count("step")
        weights, average = restoring.read_weights(checkpoint, model), restoring.read_average(checkpoint, model)
        moments = restoring.read_optimiser_state(checkpoint, self.optimiser, self.settings.optimiser)
        count, noise = (
            0 if average is None else checkpoint.read_count("averaged"),
            restoring.read_generator_states(checkpoint, self.generator),
        )
        model.load_state_dict(weights)
        if average is not None:
            self.average = Average(model, self.settings.average)
            self.average.count = count
            for name, parameter in self.average.copy.named_parameters():
                parameter.data.copy_(average[name])
        self.optimiser.load_state_dict({**self.optimiser.state_dict(), "state": moments})
        for generator, state in noise:
            generator.set_state(state)
        self.step = step

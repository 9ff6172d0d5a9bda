"""The training loop, one for every objective. Read it from top to bottom: `train`, `State.advance`,
`State.training_step`.

`State` holds everything that training changes: the live weights, their average, the optimiser, the generator and the
step count. Since each batch is a function of the step, a run resumed from a checkpoint of the state continues bit for
bit on the CPU.

`State.training_step` is the step itself: zero_grad, forward, backward, clip, optimiser. Where the device and the
settings allow it, `gpu.FastStep` takes the same step with compiled blocks, or as one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..data.sampling import seeded_generator
from ..gpu import Acceleration, Engine, FastStep, StepResult
from ..gpu.step import Forward
from ..logdet import Estimator, RussianRoulette, StoppedRoulette
from ..precision import float32_accumulation
from ..residual import ResidualBlock
from . import restoring
from .average import Average
from .checkpoint import Checkpoint
from .distributed import ALONE, Group
from .guard import TrainingError, guard_gradient, guard_loss
from .objective import Objective
from .optimiser import make_optimiser, set_learning_rate
from .settings import Training

#: A batch: x, or (x, y) with labels.
Batch: TypeAlias = Tensor | tuple[Tensor, Tensor | None]

#: Called after every step with (steps done, total steps, metrics). Reading a metric makes the CPU wait for the GPU.
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
    callback: Callable[[State], bool] | None = None,
    group: Group = ALONE,
) -> nn.Module:
    """Minimise the objective over `settings.steps` batches and return the model with averaged weights, in eval mode.

    The objective's own model is trained in place; the result is a copy whose spectral norms have converged. `callback`
    sees the state after every step, to validate or save it, and stops training by returning True. With `resume`,
    `batches` must start at the checkpoint's step. The processes of `group` call this together, with the same batches.
    """
    state = State(objective, settings, generator, acceleration, group)
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
        if callback is not None and callback(state):
            break
    return state.averaged_model()


class State:
    """Everything that training changes: live weights, averaged weights, optimiser, generator and step count.

    `engine` says how the steps are taken; `fast` takes them where something faster than the eager step is available.
    """

    def __init__(
        self,
        objective: Objective,
        settings: Training,
        generator: torch.Generator | None,
        acceleration: Acceleration | None = None,
        group: Group = ALONE,
    ) -> None:
        self.objective, self.settings, self.generator, self.group = objective, settings, generator, group
        self.replica: nn.Module = objective  # what a step calls; shared with other processes from the first step on
        self.parameters = list(objective.parameters())
        self.optimiser = make_optimiser(objective, settings)
        self.average: Average[nn.Module] | None = None
        self.step = self.taken = 0
        requested = Acceleration() if acceleration is None else acceleration
        needs_logdet = objective.needs_logdet
        self.engine = Engine(
            objective, requested, needs_logdet=needs_logdet, estimator=self.estimator, ranks=group.ranks
        )
        self.fast: FastStep | None = None
        if self.engine.graph or self.engine.fuse:
            self.fast = FastStep(objective, self.optimiser, generator, self.engine)

    def advance(self, x: Tensor, y: Tensor | None = None) -> StepResult:
        """Take the next training step on a batch, by the fastest means available."""
        drawn = self.draw_terms()
        if not self.taken:
            self._replicate(x, y, drawn)
        self.taken += 1
        if self.fast is None:
            result = self.training_step(self.replica, x, y, drawn)
        else:
            result = self.fast(self.training_step, x, y, drawn)
            guard_loss(self.objective, result.loss, self.step, x, y, self._forward_options(drawn))
            guard_gradient(self.objective, result.norm, self.step)
        self.step += 1
        self.group.synchronise_(self.objective, self.step)
        return result

    def _replicate(self, x: Tensor, y: Tensor | None, drawn: StoppedRoulette | None) -> None:
        """Share the objective with the other processes, before the first step."""
        self.replica = self.group.replicate(self.objective, x, y, self._forward_options(drawn))
        if self.fast is not None:
            self.fast.objective = self.replica

    def training_step(
        self, forward: Forward, x: Tensor, y: Tensor | None, drawn: StoppedRoulette | None, *, guarded: bool = True
    ) -> StepResult:
        """One optimisation step. `forward` is the objective, or a faster function that computes the same."""
        options = self._forward_options(drawn)
        self.optimiser.zero_grad(set_to_none=True)
        with float32_accumulation():
            with self.group.sharing():
                own_loss, own_metrics = forward(x, y, **options)
            loss, metrics = self.group.average(own_loss.detach(), own_metrics)
            if guarded:
                guard_loss(self.objective, loss, self.step, x, y, options)
            own_loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        if guarded:
            guard_gradient(self.objective, norm, self.step)
        nn.utils.clip_grads_with_norm_(self.parameters, self.settings.clip, norm)
        self.optimiser.step()
        return StepResult(loss, norm, metrics)

    def _forward_options(self, drawn: StoppedRoulette | None) -> dict[str, Any]:
        """The sources of randomness for the objective: the generator, and the roulette drawn for this step, if any."""
        return {"generator": self.generator} if drawn is None else {"generator": self.generator, "estimator": drawn}

    @property
    def estimator(self) -> Estimator | None:
        """The model's estimator of log-determinants, if it has one."""
        return getattr(self.objective.model, "estimator", None)

    def draw_terms(self) -> StoppedRoulette | None:
        """Draw the number of roulette terms for this step, the same for all samples and blocks; None without roulette.

        The draw depends only on the generator's seed and the step, so a resumed run draws the same numbers.
        """
        roulette = self.estimator
        if not isinstance(roulette, RussianRoulette):
            return None
        seed = torch.initial_seed() if self.generator is None else self.generator.initial_seed()
        u = 1 - float(torch.rand((), dtype=torch.float64, generator=seeded_generator(seed, "terms", self.step)))
        return roulette.stopped(self._largest_constant, u)

    @cached_property
    def _largest_constant(self) -> float:
        """The largest requested Lip(g): it sets the continuation probability that the roulette needs."""
        blocks = [m for m in self.objective.model.modules() if isinstance(m, ResidualBlock)]
        return max((block.requested_constant() for block in blocks), default=0.0)

    def update_average(self) -> None:
        """Add the current weights to their moving average."""
        if self.average is None:  # created after the first step, when data-dependent initialisation is done
            self.average = Average(self.objective.model, self.settings.average)
        self.average.update(self.objective.model)

    def averaged_model(self) -> nn.Module:
        """Return a copy of the model with averaged weights and norms of its own, in eval mode."""
        if self.average is None:
            raise TrainingError("training needs at least one batch; got none. Give more data or more steps.")
        return self.average.result(self.objective.model)

    def snapshot(self) -> Checkpoint:
        """Return a checkpoint with everything that is needed to resume exactly here."""
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
        tensors["generator"] = {"global": torch.get_rng_state()}  # dropout on a CPU draws from it
        if self.generator is not None:
            tensors["generator"]["state"] = self.generator.get_state()
        # Copies: the next step must not change the state saved here.
        return Checkpoint({g: {n: t.detach().clone() for n, t in ts.items()} for g, ts in tensors.items()}, state)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore a snapshot of the same model and settings, before the first step is taken.

        All of it is checked first: a snapshot that does not fit changes nothing.
        """
        if self.taken:
            raise ValueError("a snapshot can only be restored before the first step. Create a new State.")
        model, step = self.objective.model, checkpoint.read_count("step")
        weights, average = restoring.read_weights(checkpoint, model), restoring.read_average(checkpoint, model)
        optimiser_state = restoring.read_optimiser_state(checkpoint, self.optimiser, self.settings.optimiser)
        count = 0 if average is None else checkpoint.read_count("averaged")
        generator_states = restoring.read_generator_states(checkpoint, self.generator)
        model.load_state_dict(weights)
        if average is not None:
            self.average = Average(model, self.settings.average)
            self.average.count = count
            for name, parameter in self.average.copy.named_parameters():
                parameter.data.copy_(average[name])
        self.optimiser.load_state_dict({**self.optimiser.state_dict(), "state": optimiser_state})
        for generator, state in generator_states:
            generator.set_state(state)
        self.step = step

"""One training loop for every objective, to be read from top to bottom.

`State` is everything that changes while training: the live weights, their average, the optimiser, the generator and the
step. A checkpoint of it, with batches that are a function of the step, continues bit for bit on the CPU.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from . import restoring
from .acceleration import Acceleration, Stepper
from .checkpoint import Checkpoint
from .guard import TrainingError
from .lipschitz import refresh_, unsettled
from .objective import Objective
from .spelling import nearest

#: A batch: x, or (x, y) where there are labels.
Batch: TypeAlias = Tensor | tuple[Tensor, Tensor | None]

#: Called after every step with (steps done, steps in all, figures); reading a figure makes a GPU wait.
Report: TypeAlias = Callable[[int, int, Mapping[str, Tensor]], None]

OPTIMISERS = ("adam", "adamax", "sgd")
SCHEDULES = ("linear", "cosine", "constant", "milestones")
SELECTIONS = ("best", "last")


@dataclass(frozen=True)
class Training:
    """How to train. The rate rises over `warmup` steps, and then follows the schedule.

    linear: flat, then straight down to zero over the last `cooldown` part; cosine: half a cosine down to zero;
    constant: flat; milestones: times `decay` after each of these parts of training. With `epochs` the number of steps
    follows from the data. `weight_decay` acts on the weights of linear layers and convolutions in residual branches
    and conditioners alone, `head_decay` on those of the head: decoupled from the gradient for adam, and as an l2
    penalty for adamax and sgd. `select` says which weights a run releases: the best on validation data, or the last.
    """

    steps: int = 1000
    epochs: int = 0
    batch: int = 256
    optimiser: str = "adam"
    learning_rate: float = 2e-3
    schedule: str = "linear"
    warmup: int = 50
    cooldown: float = 0.4
    milestones: tuple[float, ...] = (0.3, 0.6, 0.8)
    decay: float = 0.2
    clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.99)
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 0.0
    head_decay: float = 0.0
    average: float = 0.99
    select: str = "best"
    validate_every: int = 200
    save_every: int = 200

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "validate_every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}.")
        for name in ("epochs", "warmup", "weight_decay", "head_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative; got {getattr(self, name)}.")
        for name in ("learning_rate", "clip", "decay"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}.")
        if not 0 <= self.cooldown <= 1:
            raise ValueError(f"cooldown is the last part of training, in [0, 1]; got {self.cooldown}.")
        if any(not 0 < m < 1 for m in self.milestones):
            raise ValueError(f"milestones are parts of training, in (0, 1); got {list(self.milestones)}.")
        if not 0 <= self.average < 1:
            raise ValueError(f"average is the decay of the averaged weights, in [0, 1); got {self.average}.")
        for name, known in (("optimiser", OPTIMISERS), ("schedule", SCHEDULES), ("select", SELECTIONS)):
            if getattr(self, name) not in known:
                got = getattr(self, name)
                raise ValueError(f"{name} must be one of {', '.join(known)}; got {got!r}.{nearest(got, known)}")

    def for_epochs(self, per_epoch: int) -> Training:
        """The same settings with `steps` counted from `epochs`, where those are given."""
        return replace(self, steps=self.epochs * per_epoch) if self.epochs else self

    def rate(self, step: int) -> float:
        """The learning rate of step 0, 1, ...: the first is 1 / warmup of the full one, the last is above zero."""
        up = min(1.0, (step + 1) / max(1, self.warmup))
        return self.learning_rate * up * self._down(step)

    def _down(self, step: int) -> float:
        if self.schedule == "constant":
            return 1.0
        if self.schedule == "milestones":
            return math.prod(self.decay for m in self.milestones if step >= m * self.steps)
        if self.schedule == "cosine":
            done = max(0, step + 1 - self.warmup) / max(1, self.steps + 1 - self.warmup)
            return 0.5 + 0.5 * math.cos(math.pi * done)
        return min(1.0, (self.steps - step) / max(1.0, self.cooldown * self.steps))


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
        set_rate(state.optimiser, settings.rate(state.step))
        _, _, figures = state.advance(x, y, state.step)
        state.step += 1
        state.update_average()
        if report is not None:
            report(state.step, settings.steps, figures)
        if watch is not None and watch(state):
            break
    return state.averaged()


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group, where it lives: a captured step reads it from the device."""
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class State:
    """What training changes: live weights, averaged weights, optimiser, generator, step; and what takes the steps."""

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
        wish = Acceleration() if acceleration is None else acceleration
        self.advance = Stepper(objective, self.optimiser, settings.clip, generator, wish)
        self.average: Average | None = None
        self.step = 0

    def update_average(self) -> None:
        if self.average is None:  # after the first step, when data-dependent initialisation is done
            self.average = Average(self.objective.model, self.settings.average)
        self.average.update(self.objective.model)

    def averaged(self) -> nn.Module:
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
        if self.advance.taken:
            raise ValueError("a snapshot is restored before the first step; make a new State for it.")
        model, step = self.objective.model, checkpoint.whole("step")
        weights, average = restoring.weights(checkpoint, model), restoring.average(checkpoint, model)
        moments = restoring.moments(checkpoint, self.optimiser, self.settings.optimiser)
        count, noise = (
            0 if average is None else checkpoint.whole("averaged"),
            restoring.noise(checkpoint, self.generator),
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


def make_optimiser(objective: Objective, settings: Training) -> torch.optim.Optimizer:
    """The optimiser, with one group of parameters for each rate of decay; on a GPU one that a graph can capture."""
    groups, rate = parameter_groups(objective, settings), settings.learning_rate
    cuda = groups[0]["params"][0].is_cuda
    for group in groups:
        group["lr"] = torch.tensor(rate, device=groups[0]["params"][0].device) if cuda else rate
    if settings.optimiser == "sgd":
        # Fused, SGD reads the rate from the device; on a CPU it has no fused form for every processor.
        fused, nesterov = True if cuda else None, settings.nesterov and settings.momentum > 0
        return torch.optim.SGD(groups, rate, momentum=settings.momentum, nesterov=nesterov, fused=fused)
    if settings.optimiser == "adamax":
        return torch.optim.Adamax(groups, rate, betas=settings.betas, capturable=cuda)
    return torch.optim.AdamW(groups, rate, betas=settings.betas, fused=True, capturable=cuda)


def parameter_groups(objective: Objective, settings: Training) -> list[dict[str, Any]]:
    """Weights of branches and conditioners, those of the head, and the rest (biases, scales, the base), undecayed."""
    branches, head, rest = [], [], []
    for name, parameter in objective.named_parameters():
        inside = any(place in name for place in (".g.", ".conditioner.", ".lazy."))  # of blocks, couplings, zuko's
        if name.endswith(".original") or (inside and parameter.dim() > 1):
            branches.append(parameter)
        elif name.startswith("model.head.") and parameter.dim() > 1:
            head.append(parameter)
        else:
            rest.append(parameter)
    pairs = ((branches, settings.weight_decay), (head, settings.head_decay), (rest, 0.0))
    return [{"params": parameters, "weight_decay": decay} for parameters, decay in pairs if parameters]


class Average:
    """An exponential moving average of a model's parameters.

    Early on the decay is shortened to step / (step + 10), so that the start is forgotten.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.copy, self.decay, self.count = copy.deepcopy(model).requires_grad_(False), decay, 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move towards the model's present weights."""
        self.count += 1
        weight = 1 - min(self.decay, self.count / (self.count + 10))
        torch._foreach_lerp_(list(self.copy.parameters()), [p.detach() for p in model.parameters()], weight)

    def result(self, model: nn.Module) -> nn.Module:
        """A copy of the averaged model in eval, with the live model's buffers and norms of its own."""
        result = copy.deepcopy(self.copy)
        state = dict(model.state_dict())
        # A parameter that is used twice has two names, and the live value under either would undo the average.
        state.update({name: p.detach() for name, p in self.copy.named_parameters(remove_duplicate=False)})
        result.load_state_dict(state)
        refresh_(result, settle=True)  # all at once, so not one by one on the way to eval
        for mine, theirs in zip(result.parameters(), model.parameters(), strict=True):
            mine.requires_grad_(theirs.requires_grad)
        with unsettled():
            return result.eval()

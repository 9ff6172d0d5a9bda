"""The network of a case: as this library's flow, and without constraint and log-determinant."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import count
from statistics import mean
from typing import cast

import torch
from torch import Tensor, nn

from ..fixed_point import ChainSolution
from ..flow import Flow
from ..gpu import Acceleration
from ..lipschitz import refresh_
from ..logdet import Estimator, Exact, PowerSeries, RussianRoulette
from ..models import mlp_flow
from ..models.branches import alternate, linears
from ..train import MaximumLikelihood, State, Training
from .case import (
    LEARNING_RATE,
    LIPSCHITZ,
    ROULETTE_STEPS,
    SATURATION,
    TERMS,
    TRAINED_LEARNING_RATE,
    TRAINED_STEPS,
    Case,
    Method,
    Run,
    count_parameters,
)

#: Steps in float32 as of the other libraries; compiling each network would take longer than measuring it.
ACCELERATION = Acceleration(compile="off", precision="float32")

#: Calls before the first timed one on a GPU: by then every CUDA graph is captured.
WARM_UP = 6

#: Gradients are clipped to this norm, in every method.
CLIP = 1.0

#: How far the mean of the drawn numbers of terms may be from its expectation.
NEAR = 0.25


def build_flow(case: Case) -> Flow:
    """Build the flow, with every layer at its bound and the ActNorms initialised on the data, or trained on it."""
    torch.manual_seed(0)
    flow = mlp_flow(case.dimension, case.blocks, case.hidden, lipschitz=LIPSCHITZ).to(case.device)
    with torch.no_grad():
        for name, p in flow.named_parameters():
            if name.endswith("original"):
                p.mul_(SATURATION)
        refresh_(flow, settle=True)
    flow.train().transform(case.data())  # initialises the ActNorms
    return _trained(case, flow) if case.trained else flow.eval()


def _trained(case: Case, flow: Flow) -> Flow:
    state, x = training(case, flow, PowerSeries(TERMS), TRAINED_LEARNING_RATE), case.data()
    for state.step in range(TRAINED_STEPS):
        state.advance(x)
    return cast(MaximumLikelihood, state.objective).model.eval()


def constrained(case: Case, flow: Flow) -> Method:
    """Return what this library does."""
    x = case.data()
    tasks: dict[str, Callable[[], Run]] = {
        "exact": lambda: partial(training(case, flow, Exact()).advance, x),
        "series": lambda: partial(training(case, flow, PowerSeries(TERMS)).advance, x),
        "roulette": lambda: _roulette(case, flow),
        "log-prob": lambda: torch.no_grad()(partial(flow.log_prob, x)),
        "estimate": lambda: torch.no_grad()(partial(flow.log_prob, x, estimator=RussianRoulette())),
        "inverse": lambda: torch.no_grad()(partial(flow.decoder, flow.transform, code(case, flow))),
        "sample": lambda: partial(flow.sample, (case.batch,)),
    }
    tasks = {name: partial(ready, case, prepare) for name, prepare in tasks.items()}
    return Method(count_parameters(flow.parameters()), tasks, partial(_facts, case, flow))


def ready(case: Case, prepare: Callable[[], Run]) -> Run:
    """Prepare a task; on a GPU, also take the steps before a CUDA graph is captured, and prepare the inverse."""
    run = prepare()
    for _ in range(0 if case.device == "cpu" else WARM_UP):
        run()
    return run


def training(case: Case, flow: Flow, estimator: Estimator, learning_rate: float = LEARNING_RATE) -> State:
    """Return the training of a copy of the flow."""
    flow = copy.deepcopy(flow)
    flow.estimator = estimator
    generator = torch.Generator(case.device).manual_seed(0)
    settings = Training(learning_rate=learning_rate, clip=CLIP)
    return State(MaximumLikelihood(flow).train(), settings, generator, ACCELERATION)


@torch.no_grad()
def code(case: Case, flow: Flow) -> Tensor:
    """Return the code of the data, which is to be inverted."""
    z: Tensor = flow.transform(case.data())
    return z


def _roulette(case: Case, flow: Flow) -> Run:
    """Return a few training steps whose numbers of terms have the expected mean, the same steps in every call."""
    state, x = training(case, flow, RussianRoulette()), case.data()
    generator = cast(torch.Generator, state.generator)
    for seed in count():
        generator.manual_seed(seed)  # in place: CUDA graphs know this generator
        if abs(mean(_drawn(state)) - expected_terms()) < NEAR:
            break

    def run() -> None:
        for state.step in range(ROULETTE_STEPS):
            state.advance(x)

    return run


def _drawn(state: State) -> list[int]:
    counts = []
    for state.step in range(ROULETTE_STEPS):
        drawn = state.draw_terms()
        assert drawn is not None  # the estimator is a roulette
        counts.append(drawn.count)
    return counts


def expected_terms() -> float:
    """Return the mean number of terms of the roulette.

    >>> round(expected_terms(), 1)
    10.0
    """
    roulette = RussianRoulette()
    q = roulette.probability(LIPSCHITZ)
    return roulette.terms + q / (1 - q)


@torch.no_grad()
def _facts(case: Case, flow: Flow) -> dict[str, float]:
    """Invert once: evaluations of g per sample in all blocks, the proven error of a block, and the measured error."""
    solution = cast(ChainSolution, flow.transform.solve(code(case, flow)))
    return {
        "evaluations": float(solution.iterations.double().mean()),
        "proven block error": float(solution.largest_block_bound.max()),
        "measured error": largest_error(solution.x, case.data()),
    }


def largest_error(found: Tensor, x: Tensor) -> float:
    """Return the largest l2 distance of a sample from what it should be."""
    return float((found.double() - x.double()).norm(dim=1).max())


# ------------------------------------------------------------------------------------------------- without constraint


class PlainNetwork(nn.Module):
    """The same layers and affine maps without constraint: x + g(x), then a scale and a shift, block after block."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        branches = [alternate(linears(case.dimension, case.hidden), lambda _: [nn.ELU()]) for _ in range(case.blocks)]
        self.branches = nn.ModuleList(branches)
        self.scale = nn.Parameter(torch.ones(case.blocks + 1, case.dimension))
        self.shift = nn.Parameter(torch.zeros(case.blocks + 1, case.dimension))

    def forward(self, x: Tensor) -> Tensor:
        """Return the code."""
        x = x * self.scale[0] + self.shift[0]
        for i, g in enumerate(self.branches, 1):
            x = (x + g(x)) * self.scale[i] + self.shift[i]
        return x

    def loss(self, x: Tensor) -> Tensor:
        """Return the squared norm of the code: what remains of -log p(x) without the log-determinant."""
        z: Tensor = self(x)
        return z.square().sum(1).mean()


def plain(case: Case) -> Method:
    """Return the cost of the network alone: no constraint, no log-determinant, and so neither density nor inverse."""
    network, x = PlainNetwork(case).to(case.device), case.data()
    step = partial(optimisation, network, partial(network.loss, x))
    tasks: dict[str, Callable[[], Run]] = {
        "exact": step,
        "series": step,
        "roulette": lambda: repeated(step()),
        "log-prob": lambda: torch.no_grad()(partial(network.loss, x)),
    }
    return Method(count_parameters(network.parameters()), tasks)


def optimisation(model: nn.Module, loss: Callable[[], Tensor], then: Run = lambda: None) -> Run:
    """Return a training step as of this library: loss, gradient, clipping, Adam; `then` is called at its end."""
    parameters = list(model.parameters())
    optimiser = torch.optim.AdamW(parameters, LEARNING_RATE, weight_decay=0.0, fused=True)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        loss().backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimiser.step()
        then()

    return step


def repeated(step: Run) -> Run:
    """Return as many steps as one call of the roulette takes."""

    def run() -> None:
        for _ in range(ROULETTE_STEPS):
            step()

    return run

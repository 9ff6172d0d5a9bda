"""The flows of other libraries, if they are installed: normflows' residual flow, and flows of zuko.

normflows    the same network with the same weights: `InducedNormLinear` layers in `Residual` blocks, ActNorms around
             them, 5 power iterations after every step (its default). It has an exact log-determinant in 2 dimensions
             alone; its roulette has 4 terms on average where ours has 10, since it does not ask that the variance be
             finite; its inverse, which proves nothing, is iterated here until its error is about ours, in `sample` as
             far as its default says, with log p computed beside.
zuko         its neural spline flow, which is autoregressive; the same as a coupling flow; MAF. Each has the hidden
             layers of g and as many transforms as bring it closest to the number of parameters of our flow.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from ..certificate import residual_blocks
from ..flow import Flow
from .case import LIPSCHITZ, TERMS, Case, Method, Run, count_parameters
from .networks import code, largest_error, optimisation, repeated

#: The libraries that are compared with, by the name of their package.
LIBRARIES = ("normflows", "zuko")

#: The flows of zuko that are compared with: the class, and its options.
ZUKO: dict[str, tuple[str, dict[str, Any]]] = {
    "zuko spline": ("NSF", {}),
    "zuko coupling": ("NSF", {"passes": 2}),
    "zuko MAF": ("MAF", {}),
}

#: The square of the step at which an inverse of normflows stops, for an error as small as ours (default 1e-5).
STOP = 1e-10

#: Power iterations after a training step of normflows, its default, and before the first one.
ITERATIONS, FIRST_ITERATIONS = 5, 200


def missing() -> list[str]:
    """Return the libraries that are not installed."""
    return [name for name in LIBRARIES if find_spec(name) is None]


def installed() -> list[str]:
    """Return the methods of the libraries that are installed."""
    methods = {"normflows": ["normflows"], "zuko": list(ZUKO)}
    return [method for name in LIBRARIES if name not in missing() for method in methods[name]]


def others(case: Case, flow: Flow) -> dict[str, Method]:
    """Return what the installed libraries do with a case, for the network of this flow."""
    return {name: other(case, flow, name) for name in installed()}


def other(case: Case, flow: Flow, name: str) -> Method:
    """Return what one method of another library does with a case."""
    if name == "normflows":
        return normflows_residual(case, flow)
    return zuko_flow(case, name, count_parameters(flow.parameters()))


# ------------------------------------------------------------------------------------------------- normflows


def normflows_residual(case: Case, flow: Flow) -> Method:
    """Return what normflows does with the same network."""
    model = _copy_to_normflows(case, flow)
    tasks: dict[str, Callable[[], Run]] = {
        "series": lambda: _normflows_step(case, model, n_power_series=TERMS),
        "roulette": lambda: repeated(_normflows_step(case, model)),
        "log-prob": lambda: torch.no_grad()(partial(model.log_prob, case.data())),
        "inverse": lambda: torch.no_grad()(partial(_normflows_inverse, model, code(case, flow))),
        "sample": lambda: torch.no_grad()(partial(model.sample, case.batch)),
    }
    if case.dimension == 2:
        tasks["exact"] = lambda: _normflows_step(case, model, brute_force=True)
    return Method(count_parameters(model.parameters()), tasks, partial(_normflows_facts, case, model))


def _copy_to_normflows(case: Case, flow: Flow) -> Any:
    """Build the same network in normflows, with the same weights and ActNorms initialised on the data."""
    nf = import_module("normflows")
    steps = [nf.flows.ActNorm(case.dimension)]
    for _, block, _ in residual_blocks(flow, (case.dimension,)):
        steps += [nf.flows.Residual(_lipschitz_layers(nf, block.g)), nf.flows.ActNorm(case.dimension)]
    base = nf.distributions.DiagGaussian(case.dimension, trainable=False)
    model = nf.NormalizingFlow(base, steps[::-1]).to(case.device)
    nf.utils.update_lipschitz(model, FIRST_ITERATIONS)
    with torch.no_grad():
        _set(model, n_power_series=1)
        model.inverse(case.data())  # initialises the ActNorms
        _set(model, n_power_series=None)
    return model.eval()


def _lipschitz_layers(nf: Any, g: nn.Module) -> nn.Sequential:
    """Build the layers of g with the constraint of normflows, whose coefficients are per layer."""
    ours: list[Any] = [m for m in g.modules() if isinstance(m, nn.Linear)]
    coefficient, kind = LIPSCHITZ ** (1 / len(ours)), nf.nets.lipschitz.InducedNormLinear
    layers: list[nn.Module] = []
    for linear in ours:
        layer = kind(linear.in_features, linear.out_features, coeff=coefficient, n_iterations=ITERATIONS)
        with torch.no_grad():
            layer.weight.copy_(linear.parametrizations.weight.original)
            layer.bias.copy_(linear.bias)
        layers += [layer, nn.ELU()]
    return nn.Sequential(*layers[:-1])


def _set(model: Any, **options: Any) -> None:
    """Set how the log-determinant of every block is computed."""
    for step in model.flows:
        if hasattr(step, "iresblock"):
            for name, value in options.items():
                setattr(step.iresblock, name, value)


def _normflows_step(case: Case, model: Any, **options: Any) -> Run:
    update = import_module("normflows").utils.update_lipschitz
    model = copy.deepcopy(model).train()
    _set(model, **options)
    return optimisation(model, partial(model.forward_kld, case.data()), partial(update, model, ITERATIONS))


def _normflows_inverse(model: Any, z: Tensor) -> Tensor:
    """Invert without the log-determinants, which `model.forward` would compute too."""
    for step in model.flows:
        inverted = hasattr(step, "iresblock")
        z = step.iresblock._inverse_fixed_point(z, atol=STOP, rtol=0.0) if inverted else step(z)[0]
    return z


@torch.no_grad()
def _normflows_facts(case: Case, model: Any) -> dict[str, float]:
    z = case.data()
    for step in reversed(model.flows):
        z = step.iresblock(z) if hasattr(step, "iresblock") else step.inverse(z)[0]
    return {"normflows measured error": largest_error(_normflows_inverse(model, z), case.data())}


# ------------------------------------------------------------------------------------------------- zuko


def zuko_flow(case: Case, name: str, parameters: int) -> Method:
    """Return what a flow of zuko with about so many parameters does."""
    kind, options = ZUKO[name]
    make = partial(getattr(import_module("zuko.flows"), kind), case.dimension, hidden_features=case.hidden, **options)
    torch.manual_seed(0)
    transforms = max(1, round(parameters / count_parameters(make(transforms=1).parameters())))
    flow, x = make(transforms=transforms).to(case.device), case.data()
    with torch.no_grad():
        z = flow().transform(x)
    tasks: dict[str, Callable[[], Run]] = {
        "exact": lambda: optimisation(flow, lambda: -flow().log_prob(x).mean()),
        "log-prob": lambda: torch.no_grad()(lambda: flow().log_prob(x)),
        "inverse": lambda: torch.no_grad()(lambda: flow().transform.inv(z)),
        "sample": lambda: torch.no_grad()(lambda: flow().sample((case.batch,))),
    }
    return Method(count_parameters(flow.parameters()), tasks)

"""The flows of other libraries, if they are installed: normflows' residual flow, and flows of zuko.

normflows    the same network with the same weights: `InducedNormLinear` layers in `Residual` blocks, ActNorms around
             them, 5 power iterations after every step (its default). It has an exact log-determinant in 2 dimensions
             alone; its roulette has 4 terms on average where ours has 10, since it does not ask that the variance be
             finite, and in eval 20 more; its inverse, which proves nothing, is iterated here until its error is at most
             three times ours, in `sample` as far as its default says, with log p computed beside.
zuko         its neural spline flow, which is autoregressive; the same as a coupling flow; MAF. Each has the hidden
             layers of g and as many transforms as bring it closest to the number of parameters of our flow.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..chain import Chain
from ..flow import Flow
from ..transforms.elementary import ActNorm
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

#: The squares of the step at which an inverse of normflows may stop (default 1e-5): the first whose error is at most so
#: many times ours is used.
STOPS, AT_MOST = tuple(10 ** (-k / 4) for k in range(40, 57)), 3.0

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
    inverse = cache(partial(_normflows_inverse, case, flow, model))
    tasks: dict[str, Callable[[], Run]] = {
        "series": lambda: _normflows_step(case, model, n_power_series=TERMS),
        "roulette": lambda: repeated(_normflows_step(case, model)),
        "log-prob": lambda: torch.no_grad()(partial(model.log_prob, case.data())),
        "inverse": lambda: inverse()[0],
        "sample": lambda: torch.no_grad()(partial(model.sample, case.batch)),
    }
    if case.dimension == 2:  # its log-determinant is exact, in eval in any case
        tasks["exact"] = lambda: _normflows_step(case, model, brute_force=True)
    else:
        tasks["estimate"] = tasks["log-prob"]
    return Method(count_parameters(model.parameters()), tasks, lambda: {"normflows measured error": inverse()[1]})


def _copy_to_normflows(case: Case, flow: Flow) -> Any:
    """Build the same network in normflows, with the same weights."""
    nf = import_module("normflows")
    parts = cast(Chain, flow.transform)
    steps = [_act_norm(nf, part) if isinstance(part, ActNorm) else _residual(nf, part) for part in parts]
    base = nf.distributions.DiagGaussian(case.dimension, trainable=False)
    model = nf.NormalizingFlow(base, steps[::-1]).to(case.device)
    nf.utils.update_lipschitz(model, FIRST_ITERATIONS)
    return model.eval()


def _act_norm(nf: Any, ours: ActNorm) -> nn.Module:
    theirs: Any = nf.flows.ActNorm(ours.channels)
    with torch.no_grad():
        theirs.s.copy_(-ours.log_scale)
        theirs.t.copy_(-ours.shift)
        theirs.data_dep_init_done.fill_(1.0)
    return cast(nn.Module, theirs)


def _residual(nf: Any, block: Any) -> nn.Module:
    """Build the layers of g with the constraint of normflows, whose coefficients are per layer."""
    ours: list[Any] = [m for m in block.g.modules() if isinstance(m, nn.Linear)]
    coefficient, kind = LIPSCHITZ ** (1 / len(ours)), nf.nets.lipschitz.InducedNormLinear
    layers: list[nn.Module] = []
    for linear in ours:
        layer = kind(linear.in_features, linear.out_features, coeff=coefficient, n_iterations=ITERATIONS)
        with torch.no_grad():
            layer.weight.copy_(linear.parametrizations.weight.original)
            layer.bias.copy_(linear.bias)
        layers += [layer, nn.ELU()]
    return cast(nn.Module, nf.flows.Residual(nn.Sequential(*layers[:-1])))


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


@torch.no_grad()
def _normflows_inverse(case: Case, flow: Flow, model: Any) -> tuple[Run, float]:
    """Return the inverse of the code whose error is at most three times ours, if one is, and its error."""
    x, z = case.data(), code(case, flow)
    ours = largest_error(flow.decoder(flow.transform, z), x)
    theirs = _normflows_code(model, x)
    for stop in STOPS:
        run = torch.no_grad()(partial(_fixed_points, model, theirs, stop))
        if (error := largest_error(run(), x)) <= AT_MOST * ours:
            break
    return run, error


def _normflows_code(model: Any, x: Tensor) -> Tensor:
    for step in reversed(model.flows):
        x = step.iresblock(x) if hasattr(step, "iresblock") else step.inverse(x)[0]
    return x


def _fixed_points(model: Any, z: Tensor, stop: float) -> Tensor:
    """Invert without the log-determinants, which `model.forward` would compute too."""
    for step in model.flows:
        inverted = hasattr(step, "iresblock")
        z = step.iresblock._inverse_fixed_point(z, atol=stop, rtol=0.0) if inverted else step(z)[0]
    return z


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

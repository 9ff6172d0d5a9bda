"""The paper's c: every layer of every g has this norm at most, so that Lip(g) <= c^3 for three of them."""

from __future__ import annotations

from dataclasses import replace

from ..data.source import schema_of
from .experiment import Experiment

#: The smallest coefficient of a layer: of three such layers, float32 still sees g beside x.
SMALLEST = 0.01


def with_coefficient(experiment: Experiment, coefficient: str) -> Experiment:
    """The experiment with this coefficient, which its name ends in.

    >>> with_coefficient(Experiment(), "0.5").network.lipschitz  # a g of three layers
    0.125
    """
    network, c = experiment.network, float(coefficient)
    if network.family != "iresnet" or not network.constrained:
        raise ValueError(
            f"{experiment.name} has no constraint, so no coefficient either; got {coefficient}. Use {experiment.name}."
        )
    if not 0 < c < 1:
        raise ValueError(
            f"the coefficient of a layer must lie in (0, 1); got {coefficient}. Example: {experiment.name}-c0.9"
        )
    if c < SMALLEST:
        raise ValueError(
            f"a coefficient below {SMALLEST:g} leaves nothing of g; got {coefficient}. Example: {experiment.name}-c0.9"
        )
    layers = len(network.kernels) if schema_of(experiment.data.source).is_image else network.depth + 1
    if network.branch != "chain":  # W and W'; or the last layer, since those before it keep their input
        layers = 2 if network.branch == "potential" else 1
    return replace(
        experiment,
        name=f"{experiment.name}-c{coefficient}",
        about=f"{experiment.about}; here every layer below {coefficient}",
        network=replace(network, lipschitz=float(f"{c**layers:.12g}")),
    )

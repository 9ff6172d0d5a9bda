"""The paper's coefficient c: every layer of every g has norm at most c, so Lip(g) <= c^3 for a g of three layers."""

from __future__ import annotations

from dataclasses import replace

from ..data.builtin import schema_of
from .experiment import Experiment

#: The smallest coefficient of a layer: with three such layers, x + g(x) still differs from x in float32.
SMALLEST = 0.01


def with_coefficient(experiment: Experiment, coefficient: str) -> Experiment:
    """Return the experiment with this coefficient for every layer, appended to its name.

    >>> with_coefficient(Experiment(), "0.5").network.lipschitz  # a g of three layers
    0.125
    """
    network, c = experiment.network, float(coefficient)
    if network.family != "iresnet" or not network.constrained:
        raise ValueError(
            f"{experiment.name} is not constrained, so it has no coefficient; got {coefficient}. Use {experiment.name}."
        )
    if not 0 < c < 1:
        raise ValueError(
            f"the coefficient of a layer must lie in (0, 1); got {coefficient}. Example: {experiment.name}-c0.9"
        )
    if c < SMALLEST:
        raise ValueError(
            f"the coefficient of a layer must be at least {SMALLEST:g}, or g vanishes; got {coefficient}. "
            f"Example: {experiment.name}-c0.9"
        )
    layers = len(network.kernels) if schema_of(experiment.data.source).is_image else network.depth + 1
    if network.branch != "chain":  # potential: W and W'; dense: only the last layer counts, the others keep their input
        layers = 2 if network.branch == "potential" else 1
    return replace(
        experiment,
        name=f"{experiment.name}-c{coefficient}",
        about=f"{experiment.about}; here every layer below {coefficient}",
        network=replace(network, lipschitz=float(f"{c**layers:.12g}")),
    )

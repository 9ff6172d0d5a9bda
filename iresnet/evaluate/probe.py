"""Linear probe: the error of logistic regression on codes, next to that on the inputs.

The probe minimises  mean cross-entropy(W z + b) + penalty ||W||^2 / 2  over features scaled to variance 1, in float64.
The problem is convex, so the solution is unique. The penalty is chosen on a held-out part of the training samples; the
test samples are used only for the final error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data import Dataset, subsample
from ..data.sampling import seeded_generator
from ..data.units import bin_centres
from ..model import Model
from ..transform import check_eval
from .chunks import CHUNK, in_chunks
from .classes import Error, error_from_counts, labelled_samples, require_labels
from .roles import has_inverse

#: The penalties to try, strongest first; each fit starts from the previous solution.
PENALTIES = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)

#: The fraction of training samples that selects the penalty, and the L-BFGS iterations for each.
HELD_OUT, ITERATIONS = 0.2, 50


@dataclass(frozen=True)
class Probe:
    """The error of a linear probe on codes and on inputs, each with its 95 % interval, trained on `rows` samples."""

    codes: Error
    inputs: Error
    rows: int

    def __str__(self) -> str:
        return f"codes {self.codes}; inputs {self.inputs}; logistic regression on {self.rows} samples"


def probe(model: Model, train: Dataset, test: Dataset, *, rows: int = 10_000, seed: int = 0) -> Probe:
    """Fit logistic regression to codes and to inputs of at most `rows` training samples; evaluate it on test data."""
    if rows < 10:
        raise ValueError(f"rows must be at least 10, to fit the probe and to select its penalty; got {rows}.")
    check_eval(model, "a probe")
    if not has_inverse(model):
        raise ValueError(
            f"a probe needs codes; {type(model).__name__} (an ordinary ResNet) has none, since it is not invertible."
        )
    train, test = (subsample(labelled_samples(part), rows) for part in (train, test))
    if len(train) < 10:
        raise ValueError(f"a probe needs at least 10 samples with a label; got {len(train)}.")
    transform = model.transform
    codes, inputs = (_probe_error(view, train, test, seed) for view in (lambda x: transform(x), lambda x: x))
    return Probe(codes, inputs, len(train))


def _probe_error(view: Callable[[Tensor], Tensor], train: Dataset, test: Dataset, seed: int) -> Error:
    (x, y), (x_test, y_test) = ((_features(view, part), require_labels(part)) for part in (train, test))
    mean, std = x.mean(dim=0), x.std(dim=0)
    std = torch.where(std > 0, std, torch.ones_like(std))
    x, x_test = (x - mean) / std, (x_test - mean) / std
    weight = _fit(x, y, len(train.schema.classes), seed)
    return error_from_counts(int((_logits(weight, x_test).argmax(dim=1) != y_test).sum()), len(test))


@torch.no_grad()
def _features(view: Callable[[Tensor], Tensor], data: Dataset) -> Tensor:
    return in_chunks(lambda x: view(bin_centres(x, data.schema.levels)).flatten(1), data.x, CHUNK).double()


def _fit(x: Tensor, y: Tensor, classes: int, seed: int) -> Tensor:
    """Fit weights and biases (inputs + 1, classes): select the penalty on held-out samples, then refit on all."""
    order = torch.randperm(len(x), generator=seeded_generator(seed, "probe")).to(x.device)
    count = max(1, round(HELD_OUT * len(x)))
    held_out, rest = order[:count], order[count:]
    weight = x.new_zeros(x.shape[1] + 1, classes)
    fits: list[tuple[float, int, Tensor]] = []
    for position, penalty in enumerate(PENALTIES):
        weight = _minimum(x[rest], y[rest], weight, penalty)
        fits.append((float(F.cross_entropy(_logits(weight, x[held_out]), y[held_out])), position, weight))
        if position - min(fits, key=lambda f: f[:2])[1] >= 2:  # two weaker penalties in a row were worse
            break
    _, best, weight = min(fits, key=lambda f: f[:2])
    return _minimum(x, y, weight, PENALTIES[best])


def _minimum(x: Tensor, y: Tensor, weight: Tensor, penalty: float) -> Tensor:
    weight = weight.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([weight], max_iter=ITERATIONS, line_search_fn="strong_wolfe", tolerance_grad=1e-6)

    def loss() -> float:
        optimiser.zero_grad()
        value = F.cross_entropy(_logits(weight, x), y) + penalty / 2 * weight[:-1].square().sum()
        torch.autograd.backward(value)
        return cast(float, value)

    with torch.enable_grad():
        cast(Any, optimiser).step(loss)
    return weight.detach()


def _logits(weight: Tensor, x: Tensor) -> Tensor:
    return x @ weight[:-1] + weight[-1]

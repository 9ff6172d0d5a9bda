"""How linearly separable codes are: the error of logistic regression on them, beside that on the inputs themselves.

The probe minimises  mean cross-entropy(W z + b) + penalty ||W||^2 / 2  over columns scaled to variance 1, in float64,
which is convex: there is one answer. The penalty is chosen on a held-out part of the training rows; test rows judge the
result and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data import Dataset, subsample
from ..data.dataset import seeded_generator
from ..train.objective import bin_centres
from ..transform import Transform
from .chunks import in_chunks
from .classes import Error, error_of, labelled, labels
from .likelihood import CHUNK, check_eval
from .solving import has_inverse

#: Penalties that are tried, from the strongest on; each starts where the one before ended.
PENALTIES = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)

#: The part of the training rows that chooses among them, and iterations of L-BFGS for each.
HELD_OUT, ITERATIONS = 0.2, 50


@dataclass(frozen=True)
class Probe:
    """The error of a linear probe on codes and on inputs, each with its 95 % interval; it learnt from `rows` rows."""

    codes: Error
    inputs: Error
    rows: int

    def __str__(self) -> str:
        return f"codes {self.codes}; inputs {self.inputs}; logistic regression on {self.rows} rows"


def probe(model: nn.Module, train: Dataset, test: Dataset, *, rows: int = 10_000, seed: int = 0) -> Probe:
    """Logistic regression on the codes of at most `rows` training rows, judged on at most `rows` test rows."""
    if rows < 10:
        raise ValueError(f"rows must be at least 10, to learn from some and choose by others; got {rows}.")
    check_eval(model, "a probe")
    if not has_inverse(model):
        raise ValueError(
            f"a probe reads codes; {type(model).__name__} holds no invertible blocks (an ordinary ResNet), so it has "
            "none."
        )
    train, test = (subsample(labelled(part), rows) for part in (train, test))
    if len(train) < 10:
        raise ValueError(f"a probe learns from at least 10 rows with a label; got {len(train)}.")
    transform = cast(Transform, cast(Any, model).transform)
    codes, inputs = (_evaluated(view, train, test, seed) for view in (lambda x: transform(x), lambda x: x))
    return Probe(codes, inputs, len(train))


def _evaluated(view: Callable[[Tensor], Tensor], train: Dataset, test: Dataset, seed: int) -> Error:
    (x, y), (x_test, y_test) = ((_rows(view, part), labels(part)) for part in (train, test))
    mean, std = x.mean(dim=0), x.std(dim=0)
    std = torch.where(std > 0, std, torch.ones_like(std))
    x, x_test = (x - mean) / std, (x_test - mean) / std
    weight = _fit(x, y, len(train.schema.classes), seed)
    return error_of(int((_logits(weight, x_test).argmax(dim=1) != y_test).sum()), len(test))


@torch.no_grad()
def _rows(view: Callable[[Tensor], Tensor], data: Dataset) -> Tensor:
    return in_chunks(lambda x: view(bin_centres(x, data.schema.levels)).flatten(1), data.x, CHUNK).double()


def _fit(x: Tensor, y: Tensor, classes: int, seed: int) -> Tensor:
    """Weights and biases (inputs + 1, classes): the best penalty on rows held out, then all rows with it."""
    order = torch.randperm(len(x), generator=seeded_generator(seed, "probe")).to(x.device)
    chosen, rest = order[: max(1, round(HELD_OUT * len(x)))], order[max(1, round(HELD_OUT * len(x))) :]
    weight = x.new_zeros(x.shape[1] + 1, classes)
    found: list[tuple[float, int, Tensor]] = []
    for position, penalty in enumerate(PENALTIES):
        weight = _minimum(x[rest], y[rest], weight, penalty)
        found.append((float(F.cross_entropy(_logits(weight, x[chosen]), y[chosen])), position, weight))
        if position - min(found, key=lambda f: f[:2])[1] >= 2:  # two weaker ones in a row did worse
            break
    _, best, weight = min(found, key=lambda f: f[:2])
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

"""How likely rows are, in their own units, with every error kept apart; and what that says about strange ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..certificate import residual_blocks
from ..data import Dataset, subsample
from ..data.corruptions import CORRUPTIONS, corrupt
from ..flow import Flow, LogProb
from ..hybrid import Hybrid
from ..logdet import EXACT_UP_TO, CertifiedSeries, Estimator
from ..train.objective import nats_per_unit, unit_name
from ..transforms.dequantisation import dequantise_for, raw_noise
from .chunks import chunk_size, in_chunks

#: What truncating the series may cost beyond 64 dimensions, in bits per dimension: proven by Theorem 3. Of a mean over
#: rows, and of one row, whose noise is larger by far.
BIAS, ROW_BIAS = 1e-5, 1e-4

#: Rows that pass through a model at a time, where there is little memory; and how much of a GPU's is little.
CHUNK, LITTLE = 500, 8 * 2**30


@dataclass(frozen=True)
class Density:
    """-log p averaged over rows, in `unit`. Its errors are kept apart: over the rows, of the estimator, of its bias."""

    value: float
    unit: str
    rows: int
    standard_error: float
    estimator_error: float
    bias_bound: float
    draws: int

    def __str__(self) -> str:
        return f"{self.value:.3f} {self.unit} (± {self.standard_error:.3f} over {self.rows} rows)"


def has_density(model: nn.Module) -> bool:
    """Whether the model gives likelihoods."""
    return isinstance(model, Flow | Hybrid)


def as_flow(model: nn.Module, wish: str = "a likelihood") -> Flow:
    """The density of a model, or the reason why it has none."""
    if isinstance(model, Hybrid):
        return model.flow
    if isinstance(model, Flow):
        return model
    raise ValueError(
        f"{wish} needs a density; this model only classifies. Train with objective.kind=hybrid or density."
    )


@dataclass(frozen=True)
class Draws:
    """ln p of every row (second axis) for every draw of noise and probes (first axis), off by at most `bias_bound`."""

    values: Tensor
    bias_bound: float


@torch.no_grad()
def draw(
    model: nn.Module, data: Dataset, count: int = 8, *, seed: int = 0, shared: bool = False, most: float = BIAS
) -> Draws:
    """ln p in nats, in the units of the data. Real numbers of at most 64 dimensions are exact and drawn once.

    `most` is the bias that is allowed, in bits per dimension. With `shared`, all rows get the same noise and probes, so
    that a row's number does not depend on the rows beside it.
    """
    if count < 2:
        raise ValueError(f"draws must be at least 2, to know their error; got {count}.")
    check_eval(model)
    flow, shape = as_flow(model), data.schema.shape
    estimator: Estimator | None = None
    bias, dimension = 0.0, math.prod(shape)
    blocks = len(list(residual_blocks(flow, shape)))
    if dimension > EXACT_UP_TO and blocks:  # other transforms have determinants of their own
        bias = most * dimension * math.log(2)
        estimator = CertifiedSeries(bias / blocks, shared=shared)
    elif data.schema.levels is None:
        count = 1
    generators = [torch.Generator(data.x.device).manual_seed(seed + k) for k in range(count)]
    return Draws(drawn(flow, data, estimator, generators, shared=shared), bias)


def check_eval(model: nn.Module, what: str = "a likelihood") -> None:
    """Refuse a model in training."""
    if model.training:
        raise ValueError(f"{what} judges a finished model; call model.eval() first.")


def room(device: torch.device) -> int:
    """How many times more can be done at a time than with little memory: small batches leave a GPU idle."""
    if device.type != "cuda":
        return 1
    return max(1, round(torch.cuda.get_device_properties(device).total_memory / LITTLE))


def drawn(
    flow: Flow,
    data: Dataset,
    estimator: Estimator | None,
    generators: Iterable[torch.Generator],
    *,
    shared: bool = False,
) -> Tensor:
    """ln p of every row in nats, in float64, for one draw of noise and probes from each generator; see `draw`."""

    def once(generator: torch.Generator) -> Tensor:
        noise = raw_noise(flow, data.schema.shape, data.x.device, generator) if shared else None
        probes = generator.get_state()  # after the noise, so that they have nothing to do with it

        def log_prob(x: Tensor) -> Tensor:
            point, spent = dequantise_for(flow, x, data.schema.levels, generator, noise=noise)
            if shared:
                generator.set_state(probes)
            return flow.log_prob(point, estimator=estimator, generator=generator).double() - spent.double()

        return in_chunks(log_prob, data.x, chunk_size(flow, data.x, CHUNK * room(data.x.device)))

    return torch.stack([once(generator) for generator in generators])


def log_likelihood(model: nn.Module, data: Dataset, *, draws: int = 8, seed: int = 0) -> LogProb:
    """ln p of every row in nats, with its errors; a row's number does not depend on the rows beside it."""
    d = draw(model, data, draws, seed=seed, shared=True, most=ROW_BIAS)
    count, value = len(d.values), d.values.mean(0)
    spread = torch.zeros_like(value) if count == 1 else d.values.std(0) / math.sqrt(count)
    proven = as_flow(model).proof_status(data.schema.shape)[1]
    return LogProb(value, torch.full_like(value, d.bias_bound), spread, math.prod(data.schema.shape), count, proven)


def density(model: nn.Module, data: Dataset, *, draws: int = 8, seed: int = 0) -> Density:
    """The mean negative log-likelihood: bits per dimension for integers, nats otherwise."""
    if len(data) < 2:
        raise ValueError(f"a mean needs at least two rows, to know its error; got {len(data)}. Ask for scores.")
    d = draw(model, data, draws, seed=seed)
    scale, (count, n) = nats_per_unit(data.x, data.schema.levels), d.values.shape
    return Density(
        value=float(-d.values.mean()) / scale,
        unit=unit_name(data.schema.levels),
        rows=n,
        standard_error=float(d.values.mean(0).std()) / math.sqrt(n) / scale,
        estimator_error=float(d.values.mean(1).std()) / math.sqrt(count) / scale if count > 1 else 0.0,
        bias_bound=d.bias_bound / scale,
        draws=count,
    )


def anomaly(values: Tensor, reference: Tensor) -> Tensor:
    """The share of reference log-likelihoods above each value: 0 for the most likely, 1 for less likely than all.

    >>> anomaly(torch.tensor([0.5, 9.0]), torch.tensor([0.0, 1.0])).tolist()
    [0.5, 0.0]
    """
    ordered = reference.double().sort().values
    above = len(ordered) - torch.searchsorted(ordered, values.double().contiguous(), right=True)
    return above.double() / len(ordered)


def detection(normal: Tensor, strange: Tensor) -> float:
    """The area under the ROC curve: how often a strange row is less likely than a normal one, ties counted half.

    >>> detection(torch.tensor([2.0, 3.0]), torch.tensor([1.0, 2.0]))
    0.875
    """
    ordered, s = normal.double().sort().values, strange.double().contiguous()
    below, up_to = (torch.searchsorted(ordered, s, right=right).double() for right in (False, True))
    return float(1 - (below + up_to).mean() / (2 * len(ordered)))


def corrupted(model: nn.Module, data: Dataset, *, draws: int = 2, rows: int = 200) -> list[dict[str, Any]]:
    """How well the likelihood tells corrupted images from the data, on `rows` of them; one entry a corruption."""
    levels, data = data.schema.levels, subsample(data, rows)
    if levels is None or not data.schema.is_image:
        raise ValueError(f"corruptions are made of images of integers; got {data.schema}.")
    normal, entries = log_likelihood(model, data, draws=draws).value, []
    for name in CORRUPTIONS:
        strange = Dataset(corrupt(name, data.x, levels), None, data.schema)
        values = log_likelihood(model, strange, draws=draws).value
        share = float(anomaly(values, normal).median())
        entries.append({"name": name, "detection": detection(normal, values), "median_anomaly": share})
    return entries

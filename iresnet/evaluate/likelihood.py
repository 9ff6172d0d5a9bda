"""The likelihood of a dataset, in the units of the data, with its errors reported separately.

Integers x are dequantised: E ln p(x + u) over uniform u in [0, 1) (App. C.3) is a lower bound of ln P(x), estimated by
a mean over draws of u. So are the discrete columns of a table. Beyond 64 dimensions, draws of the probes of the
log-determinant are averaged too, and the bias of the truncated series is bounded by Theorem 3. The likelihood of real
numbers of up to 64 dimensions is exact. A row with a value that its column cannot have has the likelihood 0.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..certificate import residual_blocks
from ..data import Dataset, Schema
from ..flow import Flow, LogProb
from ..hybrid import Hybrid
from ..logdet import EXACT_UP_TO, CertifiedSeries, Estimator
from ..progress import each
from ..train.objective import nats_per_unit, unit_name
from ..transforms.dequantisation import dequantise_for, has_noise, raw_noise
from .chunks import CHUNK, chunk_size, in_chunks, memory_factor
from .moments import Moments

#: The allowed bias of the truncated series beyond 64 dimensions, in bits per dimension, proven by Theorem 3: of a mean
#: over samples, and of one sample, whose noise is far larger.
BIAS, ROW_BIAS = 1e-5, 1e-4


#: Draws of noise, and of probes, that a likelihood is the mean over.
DRAWS = 8


@dataclass(frozen=True)
class Density:
    """Mean of -log p over samples, in `unit`, with its errors: over samples, of the estimator, and its bias."""

    value: float
    unit: str
    rows: int
    standard_error: float
    estimator_error: float
    bias_bound: float
    draws: int

    def __str__(self) -> str:
        return f"{self.value:.3f} {self.unit} (± {self.standard_error:.3f} over {self.rows} samples)"


def has_density(model: nn.Module) -> bool:
    """Whether the model is a density."""
    return isinstance(model, Flow | Hybrid)


def as_flow(model: nn.Module, wish: str = "a likelihood") -> Flow:
    """Return the flow of a model; raise a `ValueError` if it has none."""
    if isinstance(model, Hybrid):
        return model.flow
    if isinstance(model, Flow):
        return model
    raise ValueError(
        f"{wish} needs a density; this model only classifies. Train with objective.kind=hybrid or density."
    )


@dataclass(frozen=True)
class Draws:
    """ln p of every sample (second axis) for every draw of noise and probes (first axis), with a bound of the bias."""

    values: Tensor
    bias_bound: float


def log_prob_draws(
    model: nn.Module, data: Dataset, count: int = DRAWS, *, seed: int = 0, shared: bool = False, bias: float = BIAS
) -> Draws:
    """Compute ln p of every sample in nats, in the units of the data, for `count` draws of noise and probes.

    Real numbers of at most 64 dimensions are exact and need one draw. `bias` is the allowed bias in bits per dimension.
    With `shared`, all samples get the same noise and probes, so that ln p of one does not depend on the others.
    """
    return Likelihoods(model, data.schema, data.x.device, count, seed=seed, shared=shared, bias=bias)(data)


class Likelihoods:
    """Computes `log_prob_draws` chunk by chunk: noise and probes continue, as if all samples were given at once."""

    def __init__(
        self,
        model: nn.Module,
        schema: Schema,
        device: torch.device,
        count: int = DRAWS,
        *,
        seed: int = 0,
        shared: bool = False,
        bias: float = BIAS,
    ) -> None:
        if count < 2:
            raise ValueError(f"draws must be at least 2, to estimate their error; got {count}.")
        check_eval(model)
        self.flow, self.shared, self.seed = as_flow(model), shared, seed
        self.estimator: Estimator | None = None
        self.bias_bound, dimension = 0.0, math.prod(self.flow.base.shape)
        blocks = len(list(residual_blocks(self.flow, schema.shape)))
        if dimension > EXACT_UP_TO and blocks:  # other transforms have determinants in closed form
            self.bias_bound = bias * dimension * math.log(2)
            self.estimator = CertifiedSeries(self.bias_bound / blocks, shared=shared)
        elif not has_noise(self.flow, schema.levels):
            count = 1
        self.generators = seeded_generators(device, count, seed)

    @torch.no_grad()
    def __call__(self, data: Dataset) -> Draws:
        """Compute ln p of the next samples."""
        count, inside = len(self.generators), data.schema.inside(data.x)
        values = torch.full((count, len(data)), -math.inf, dtype=torch.float64, device=data.x.device)
        if bool(inside.any()):
            rows = data if bool(inside.all()) else data.take(inside.nonzero()[:, 0])
            values[:, inside] = self._values(self.flow, rows, self.generators)
        lost = inside & ~values.isfinite().all(dim=0)
        if bool(lost.any()):  # so far out that float32 overflows
            rows, twin = data.take(lost.nonzero()[:, 0]), copy.deepcopy(self.flow).double()
            values[:, lost] = self._values(twin, rows, seeded_generators(data.x.device, count, self.seed))
        return Draws(values, self.bias_bound)

    def _values(self, flow: Flow, rows: Dataset, generators: Sequence[torch.Generator]) -> Tensor:
        return log_prob_by_generator(flow, rows, self.estimator, generators, shared=self.shared)


def seeded_generators(device: torch.device, count: int, seed: int) -> list[torch.Generator]:
    """Create the generators of noise and probes, one for each draw."""
    return [torch.Generator(device).manual_seed(seed + k) for k in range(count)]


def check_eval(model: nn.Module, what: str = "a likelihood") -> None:
    """Refuse a model in training mode."""
    if model.training:
        raise ValueError(f"{what} needs a model in eval mode; call model.eval() first.")


def check_mean(data: Dataset) -> None:
    """Refuse a dataset whose mean log-likelihood has no standard error, or is infinite."""
    check_mean_counts(len(data), int((~data.schema.inside(data.x)).sum()))


def check_mean_counts(rows: int, outside: int) -> None:
    """Refuse a mean over so many rows, of which some hold values that their columns cannot have."""
    if rows < 2:
        raise ValueError(
            f"a mean with a standard error needs at least two samples; got {rows}. Give more, or score it alone."
        )
    if outside:
        raise ValueError(
            f"{outside} of {rows} rows hold values that a column of the model cannot have, so their likelihood is "
            "0 and the mean has no finite logarithm. `iresnet score` shows which: remove them, or train with other "
            "kinds of columns."
        )


def log_prob_by_generator(
    flow: Flow,
    data: Dataset,
    estimator: Estimator | None,
    generators: Iterable[torch.Generator],
    *,
    shared: bool = False,
    baseline: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Compute ln p of every sample in nats, in float64, with one draw of noise and probes from each generator.

    `baseline` is the ln p of another density, to be computed with the same noise.
    """

    def one_draw(generator: torch.Generator) -> Tensor:
        noise = raw_noise(flow, data.schema.shape, data.x.device, generator) if shared else None
        probes = generator.get_state()  # after the noise, so that both are independent

        def log_prob(x: Tensor) -> Tensor:
            point, log_noise = dequantise_for(flow, x, data.schema.levels, generator, noise=noise)
            if shared:
                generator.set_state(probes)
            point = point.to(flow.base.mean.dtype)
            if baseline is not None:
                return baseline(point).double()
            return flow.log_prob(point, estimator=estimator, generator=generator).double() - log_noise.double()

        return in_chunks(log_prob, data.x, chunk_size(flow, data.x, CHUNK * memory_factor(data.x.device)))

    return torch.stack(each(one_draw, generators))


def log_likelihood(model: nn.Module, data: Dataset, *, draws: int = DRAWS, seed: int = 0) -> LogProb:
    """Compute ln p of every sample in nats, with its errors; the value of one sample does not depend on the others."""
    d = log_prob_draws(model, data, draws, seed=seed, shared=True, bias=ROW_BIAS)
    count, value = len(d.values), d.values.mean(0)
    spread = torch.zeros_like(value) if count == 1 else (d.values.std(0) / math.sqrt(count)).nan_to_num(0.0)
    proven = as_flow(model).proof_status(data.schema.shape)[1]
    return LogProb(value, torch.full_like(value, d.bias_bound), spread, math.prod(data.schema.shape), count, proven)


def density(model: nn.Module, data: Dataset, *, draws: int = DRAWS, seed: int = 0) -> Density:
    """Compute the mean negative log-likelihood: in bits per dimension for integers, in nats otherwise."""
    check_mean(data)
    return summarise_density(log_prob_draws(model, data, draws, seed=seed), data)


def summarise_density(d: Draws, data: Dataset) -> Density:
    """Summarise the log-likelihoods of a dataset as their mean, with its errors."""
    sums = DensitySums()
    sums.add(d)
    return sums.summarise(data)


class DensitySums:
    """Sums over the log-likelihoods of samples, chunk by chunk, that their mean and its errors follow from."""

    def __init__(self) -> None:
        self.rows, self.by_draw, self.bias_bound = Moments(), torch.zeros(1, dtype=torch.float64), 0.0

    def add(self, d: Draws) -> None:
        """Add the log-likelihoods of more samples."""
        self.rows.add(d.values.mean(0))
        self.by_draw, self.bias_bound = self.by_draw + d.values.sum(1).cpu(), d.bias_bound

    def summarise(self, like: Dataset) -> Density:
        """Return the mean over all samples, in the unit for samples like these."""
        scale, n, count = nats_per_unit(like.x, like.schema.levels), self.rows.count, len(self.by_draw)
        return Density(
            value=-self.rows.mean / scale,
            unit=unit_name(like.schema.levels),
            rows=n,
            standard_error=self.rows.standard_error / scale,
            estimator_error=float((self.by_draw / n).std()) / math.sqrt(count) / scale if count > 1 else 0.0,
            bias_bound=self.bias_bound / scale,
            draws=count,
        )

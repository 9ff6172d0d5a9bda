"""The likelihood of a dataset, in the units of the data, with its errors reported separately.

Integers x are dequantised: E ln p(x + u) over uniform u in [0, 1) (App. C.3) is a lower bound of ln P(x), estimated by
a mean over draws of u. So are the discrete columns of a table. Beyond 64 dimensions, log-determinants are estimated
without bias (`AdaptiveRoulette`), and their draws are averaged too. The likelihood of real numbers of up to 64
dimensions is exact. A row with a value that its column cannot have has the likelihood 0.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..certificate import residual_blocks
from ..data import Dataset, Schema
from ..data.units import nats_per_unit, unit_name
from ..flow import Flow, LogProb
from ..hybrid import Hybrid
from ..logdet import EXACT_UP_TO, AdaptiveRoulette, Estimator
from ..model import Model
from ..progress import each
from ..train.distributed import Group
from ..train.threads import suitable_threads
from ..transform import check_eval
from ..transforms import Imported
from ..transforms.dequantisation import dequantise_for, has_noise, raw_noise
from .chunks import CHUNK, chunk_size, in_chunks, in_parallel, memory_factor
from .moments import Moments

#: The tolerance of `AdaptiveRoulette`, in bits per dimension: its noise is far smaller than that of the probes.
ROULETTE = 1e-3

#: Draws of noise, and of probes, that a likelihood is the mean over.
DRAWS = 8

#: The fewest and the most draws of a sample if a tolerance is given.
FEWEST, MOST = 4, 16

#: The standard error of a score, as a share of the standard deviation of the reference: ranks hardly change.
SHARE = 0.025


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


@dataclass(frozen=True)
class Tolerance:
    """How large the standard error of ln p may be, in nats: `error`, or more where ln p is far from `centre`.

    `share` is that of the distance from `centre`: a sample that is a thousand nats away is not confused with others.
    """

    error: float
    share: float = 0.0
    centre: float = 0.0

    def __post_init__(self) -> None:
        if not self.error > 0:
            raise ValueError(f"tolerance must be positive, in nats; got {self.error}.")

    def at(self, values: Tensor) -> Tensor:
        """Return the largest standard error for these log-likelihoods."""
        shares = self.share * (values - self.centre).abs()  # NaN for -inf without a share
        return shares.nan_to_num(nan=0.0, posinf=math.inf).clamp_min(self.error)


def has_density(model: Model) -> bool:
    """Whether the model is a density."""
    return isinstance(model, Flow | Hybrid)


def as_flow(model: Model, wish: str = "a likelihood") -> Flow:
    """Return the flow of a model; raise a `ValueError` if it has none."""
    if isinstance(model, Hybrid):
        return model.flow
    if isinstance(model, Flow):
        return model
    raise ValueError(
        f"{wish} needs a density; this model only classifies. Train with objective.kind=hybrid or density."
    )


def log_prob_draws(
    model: Model,
    data: Dataset,
    count: int = DRAWS,
    *,
    seed: int = 0,
    shared: bool = False,
    tolerance: float | None = None,
) -> Tensor:
    """Compute ln p of every sample in nats, in the units of the data, for `count` draws of noise and probes.

    The result has shape (draws, samples). Real numbers of at most 64 dimensions are exact and need one draw. With
    `shared`, all samples get the same noise and probes, so that ln p of one does not depend on the others. `tolerance`
    is that of `AdaptiveRoulette`: the larger, the fewer terms and the more noise.
    """
    seeds = draw_seeds(model, data.schema, count, seed)
    return Likelihoods(model, data.schema, data.x.device, seeds, shared=shared, tolerance=tolerance)(data)


def shared_log_prob_draws(model: Model, data: Dataset, count: int, group: Group) -> Tensor:
    """Compute `log_prob_draws` in a group, on the same samples everywhere: rank r of n computes draws r, r + n, ..."""
    seeds = draw_seeds(model, data.schema, count)
    own = Likelihoods(model, data.schema, data.x.device, seeds[group.rank :: group.ranks])(data)
    values = own.new_empty(len(seeds), len(data))
    for rank, found in enumerate(group.gather(own.cpu())):
        values[rank :: group.ranks] = found
    return values


def draw_seeds(model: Model, schema: Schema, count: int = DRAWS, seed: int = 0) -> range:
    """Return the seeds of `count` draws; of one, if likelihoods are exact."""
    if count < 2:
        raise ValueError(f"draws must be at least 2, to estimate their error; got {count}.")
    return range(seed, seed + (count if has_errors(model, schema) else 1))


class Likelihoods:
    """Computes `log_prob_draws` chunk by chunk: noise and probes continue, as if all samples were given at once."""

    def __init__(
        self,
        model: Model,
        schema: Schema,
        device: torch.device,
        seeds: Sequence[int],
        *,
        shared: bool = False,
        tolerance: float | None = None,
    ) -> None:
        check_eval(model, "a likelihood")
        self.flow, self.shared, self.seeds = as_flow(model), shared, seeds
        self.estimator: Estimator | None = None
        if is_estimated(model, schema):
            tolerance = ROULETTE * schema.dimension * math.log(2) if tolerance is None else tolerance
            self.estimator = AdaptiveRoulette(tolerance, shared=shared)
        self.generators = seeded_generators(device, seeds)

    @torch.no_grad()
    def __call__(self, data: Dataset) -> Tensor:
        """Compute ln p of the next samples."""
        inside, device = data.schema.inside(data.x), data.x.device
        values = torch.full((len(self.seeds), len(data)), -math.inf, dtype=torch.float64, device=device)
        if self.seeds and bool(inside.any()):
            values[:, inside] = self._values(self.flow, data, inside, self.generators)
        lost = inside & ~values.isfinite().all(dim=0)
        if bool(lost.any()):  # so far out that float32 overflows
            twin = copy.deepcopy(self.flow).double()
            values[:, lost] = self._values(twin, data, lost, seeded_generators(device, self.seeds))
        return values

    def skip(self, like: Dataset, rows: int, size: int) -> None:
        """Continue as after `rows` samples like these, in chunks of `size`, without their likelihoods."""
        if self.estimator is not None:
            raise ValueError("the probes of samples that are skipped are not known. Give all samples.")
        skip_noise(self.flow, like, self.generators, rows, size)

    def _values(self, flow: Flow, data: Dataset, rows: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        chosen = data if bool(rows.all()) else data.take(rows.nonzero()[:, 0])
        return log_prob_by_generator(flow, chosen, self.estimator, generators, shared=self.shared)


def seeded_generators(device: torch.device, seeds: Iterable[int]) -> list[torch.Generator]:
    """Create the generators of noise and probes, one for each draw."""
    return [torch.Generator(device).manual_seed(seed) for seed in seeds]


def skip_noise(flow: Flow, like: Dataset, generators: Iterable[torch.Generator], rows: int, size: int) -> None:
    """Draw the noise of `rows` samples of this kind, in chunks of `size`, so that the generators continue after it."""
    first, zero = like.take([0]), flow.base.mean.new_zeros(())
    for n in (min(size, rows - start) for start in range(0, rows, size)):
        chunk = first.take([0] * n)
        log_prob_by_generator(flow, chunk, None, generators, baseline=lambda x: zero.expand(len(x)))


def is_estimated(model: Model, schema: Schema) -> bool:
    """Whether log-determinants are estimated: residual blocks beyond 64 dimensions."""
    flow = as_flow(model)
    return math.prod(flow.base.shape) > EXACT_UP_TO and any(True for _ in residual_blocks(flow, schema.shape))


def has_errors(model: Model, schema: Schema) -> bool:
    """Whether a likelihood is the mean over draws of noise or probes, not exact."""
    flow = as_flow(model)
    probed = any(isinstance(m, Imported) and m.random for m in flow.modules())
    return probed or is_estimated(model, schema) or has_noise(flow, schema.levels)


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
            point, own = point.to(flow.base.mean.dtype), generator
            if baseline is not None:
                return baseline(point).double()
            if shared:
                own = torch.Generator(data.x.device)
                own.set_state(probes)
            return flow.log_prob(point, estimator=estimator, generator=own).double() - log_noise.double()

        in_any_order = in_parallel if shared else in_chunks
        return in_any_order(log_prob, data.x, chunk_size(flow, data.x, CHUNK * memory_factor(data.x.device)))

    return torch.stack(each(one_draw, generators))


def log_likelihood(
    model: Model, data: Dataset, *, draws: int = DRAWS, tolerance: float | Tolerance | None = None, seed: int = 0
) -> LogProb:
    """Compute ln p of every sample in nats, with its errors; the value of one sample does not depend on the others.

    With a `tolerance`, in nats, every sample gets as many draws as a standard error below it needs, from 4 to 16.
    """
    with suitable_threads(0):  # first: what it proves is used by all threads
        bias, proven = bound_bias(model, data.schema)
    if tolerance is None or not has_errors(model, data.schema):
        values = log_prob_draws(model, data, draws, seed=seed, shared=True)
        value, count, spread = values.mean(0), torch.full_like(values[0], len(values)), _spread(values)
    else:
        wanted = tolerance if isinstance(tolerance, Tolerance) else Tolerance(tolerance)
        value, count, spread = _to_tolerance(model, data, wanted, seed)
    biases, passes = torch.full_like(value, bias), int(count.max()) if len(count) else 0
    return LogProb(value, biases, spread / count.sqrt(), math.prod(data.schema.shape), passes, proven)


def bound_bias(model: Model, schema: Schema) -> tuple[float, bool]:
    """Return a bound on the bias of a likelihood, and whether it is proven.

    The bias is 0 for exact and for unbiased log-determinants. It is infinite, unknown, where a part of the model is not
    known, or a roulette relies on a constant that is asserted.
    """
    known, proven = as_flow(model).proof_status(schema.shape)
    return (0.0 if known and (proven or not is_estimated(model, schema)) else math.inf), proven


def _to_tolerance(model: Model, data: Dataset, tolerance: Tolerance, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (mean, number, standard deviation) of the draws of every sample, by a two-stage rule (Stein, 1945).

    The first draws alone determine the standard deviation s, and s the number of draws n. For normal draws, n then says
    nothing of their mean, and the error of the mean over s / sqrt(n) has Student's distribution. An s of all draws
    would be too small: a sample stops early because its first draws happen to agree.
    """
    roulette = 4 * tolerance.error  # the noise that it adds is far smaller, if blocks are far from their bounds
    first = log_prob_draws(model, data, FEWEST, seed=seed, shared=True, tolerance=roulette)
    total, spread = first.sum(0), _spread(first)
    count = (spread / tolerance.at(first.mean(0))).square().ceil().clamp(FEWEST, MOST)
    for k in range(FEWEST, MOST):
        rows = (count > k).nonzero()[:, 0]
        if len(rows):
            more = Likelihoods(model, data.schema, data.x.device, [seed + k], shared=True, tolerance=roulette)
            total[rows] += more(data.take(rows))[0]
    return total / count, count, spread


def _spread(values: Tensor) -> Tensor:
    """The standard deviation over draws; 0 for one draw, and where all are -inf."""
    return torch.zeros_like(values[0]) if len(values) == 1 else values.std(0).nan_to_num(0.0)


def score_tolerance(model: Model, schema: Schema, reference: Tensor) -> Tolerance | None:
    """Return the standard error that scores need: `SHARE` of the spread of reference log-likelihoods, or of the
    distance from their mean if that is larger.

    None, for a fixed number of draws, if determinants are exact: draws are then cheap, and an exported model has them.
    """
    spread, centre = float(reference.double().std(correction=0)), float(reference.double().mean())
    return Tolerance(SHARE * spread, SHARE, centre) if is_estimated(model, schema) and spread > 0 else None


def density(model: Model, data: Dataset, *, draws: int = DRAWS, seed: int = 0) -> Density:
    """Compute the mean negative log-likelihood: in bits per dimension for integers, in nats otherwise."""
    check_mean(data)
    return summarise_density(log_prob_draws(model, data, draws, seed=seed), model, data)


def summarise_density(values: Tensor, model: Model, data: Dataset) -> Density:
    """Summarise the log-likelihoods of a dataset, (draws, samples), as their mean, with its errors."""
    sums = DensitySums()
    sums.add(values)
    return sums.summarise(model, data)


class DensitySums:
    """Sums over the log-likelihoods of samples, chunk by chunk, that their mean and its errors follow from."""

    def __init__(self) -> None:
        self.rows, self.by_draw = Moments(), torch.zeros(1, dtype=torch.float64)

    def add(self, values: Tensor) -> None:
        """Add the log-likelihoods of more samples."""
        self.rows.add(values.mean(0))
        self.by_draw = self.by_draw + values.sum(1).cpu()

    def merge(self, other: DensitySums) -> None:
        """Add the sums over other samples."""
        self.rows.merge(other.rows)
        self.by_draw = self.by_draw + other.by_draw

    def summarise(self, model: Model, like: Dataset) -> Density:
        """Return the mean over all samples, in the unit for samples like these."""
        scale, n, count = nats_per_unit(like.x.shape[1:], like.schema.levels), self.rows.count, len(self.by_draw)
        return Density(
            value=-self.rows.mean / scale,
            unit=unit_name(like.schema.levels),
            rows=n,
            standard_error=self.rows.standard_error / scale,
            estimator_error=float((self.by_draw / n).std()) / math.sqrt(count) / scale if count > 1 else 0.0,
            bias_bound=bound_bias(model, like.schema)[0],
            draws=count,
        )

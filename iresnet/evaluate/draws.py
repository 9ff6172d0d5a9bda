"""Log-likelihoods of samples, each draw with its own noise and probes.

Integers are dequantised with random noise, and so are the discrete columns of a table. Beyond 64 dimensions,
log-determinants are estimated without bias by random probes (`AdaptiveRoulette`). A likelihood is the mean over such
draws. That of real numbers of up to 64 dimensions is exact, and needs one draw. A row with a value that its column
cannot have has the likelihood 0.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..certificate import residual_blocks
from ..data import Dataset, Schema
from ..data.dataset import check_dataset
from ..flow import Flow
from ..logdet import EXACT_UP_TO, AdaptiveRoulette, Estimator
from ..model import Model
from ..progress import each
from ..train.distributed import Group
from ..transform import check_eval
from ..transforms import Imported
from ..transforms.dequantisation import dequantise_for, has_noise, raw_noise
from .chunks import CHUNK, chunk_size, in_chunks, in_parallel, memory_factor
from .roles import as_flow

#: The tolerance of `AdaptiveRoulette`, in bits per dimension: its noise is far smaller than that of the probes.
ROULETTE = 1e-3

#: Draws of noise, and of probes, that a likelihood is the mean over.
DRAWS = 8


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
    check_dataset(data)
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

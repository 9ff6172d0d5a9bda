"""Baselines of a density of rows: one Gaussian, and a mixture of Gaussians, on the same rows and in the same units.

Both are densities of what the columns become before a network, z = T(x): the noise of discrete columns is added, then
logarithm or logit at bounds, then mean 0 and variance 1. With the fitted mixture q,

    ln p(x) = ln q(z) + ln |det dz/dx|,        ln p(t | c) = ln q(z, c) - ln q(c) + ln |det dz/dt|,

the latter for a conditional density, whose given columns c are encoded as for the model. EM fits q to training rows;
validation rows choose the number of components, and the variance that is added to every direction. The evaluated rows
get the same noise as for the model, so that the difference of a row has little noise of its own, and the standard error
of the mean difference is paired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..base import FullMixture
from ..data import Dataset, Schema
from ..flow import Flow
from ..logdet import EXACT_UP_TO
from ..model import Model
from ..models import Network
from ..models.mixture import Matrix, best_mixture, mixture_parameters, random_samples
from ..models.preprocessing import preprocessing
from ..transform import Transform
from ..transforms.dequantisation import dequantise_for
from ..transforms.given import Given
from .density import check_mean
from .draws import DRAWS, log_prob_by_generator, log_prob_draws, seeded_generators, skip_noise
from .moments import Moments
from .roles import as_flow

if TYPE_CHECKING:
    from sklearn.mixture import GaussianMixture

#: The most training rows that baselines are fitted to, and validation rows that choose among them.
FIT_ROWS = 5_000

#: The numbers of components of the mixture, and the most work of an iteration of EM, as components x rows x columns^2.
COMPONENTS, WORK = (2, 3, 5, 8, 12, 20, 30), 1.5e8


@dataclass(frozen=True)
class Baseline:
    """Mean of -ln p of a baseline over rows, in nats, with its standard error; and by how much the model is better.

    `gain` is the mean difference of the log-likelihoods of a row, negative if the baseline is better, and `gain_error`
    its standard error. `fitted` is the number of training rows that the baseline was fitted to.
    """

    name: str
    components: int
    value: float
    standard_error: float
    gain: float
    gain_error: float
    fitted: int

    def __str__(self) -> str:
        return f"{self.name} {self.value:.3f} nats; {self.verdict()}"

    def verdict(self) -> str:
        """Compare the model with the baseline in words."""
        which = "better" if self.gain >= 0 else "worse"
        return f"the model is {which} by {abs(self.gain):.3f} ± {self.gain_error:.3f}"


def why_no_baselines(schema: Schema) -> str:
    """Return why there are no baselines for such samples; empty if there are some."""
    if schema.is_image:
        return "they are for densities of rows, not of images"
    if schema.dimension > EXACT_UP_TO:
        return f"they are for rows of up to {EXACT_UP_TO} columns; these have {schema.dimension}"
    return ""


@torch.no_grad()
def baselines(
    model: Model,
    data: Dataset,
    train: Dataset,
    validation: Dataset,
    *,
    draws: int = DRAWS,
    seed: int = 0,
    values: Tensor | None = None,
) -> list[Baseline]:
    """Compare a density with one Gaussian and with a mixture of Gaussians, fitted to training rows.

    `values` are the log-likelihoods of the data under the model, (draws, rows), if `log_prob_draws` has found them
    already with these draws and seed.
    """
    if why := why_no_baselines(data.schema):
        raise ValueError(f"there are no baselines: {why}.")
    check_mean(data)
    as_flow(model, "a baseline")
    values = log_prob_draws(model, data, draws, seed=seed) if values is None else values
    comparisons = BaselineSums(model, train, validation, seed=seed)
    comparisons.add(data, values)
    return [comparison.summarise() for comparison in comparisons.sums]


@dataclass
class Comparison:
    """A baseline of so many components, fitted to so many rows, and sums over the rows that it is evaluated on."""

    components: int
    fitted: int
    own: Moments = field(default_factory=Moments)
    gain: Moments = field(default_factory=Moments)

    def merge(self, other: Comparison) -> None:
        """Add the sums over other rows."""
        self.own.merge(other.own)
        self.gain.merge(other.gain)

    def summarise(self) -> Baseline:
        """Return the comparison over all rows."""
        k, own, gain = self.components, self.own, self.gain
        name = "Gaussian" if k == 1 else f"mixture of {k} Gaussians"
        return Baseline(name, k, -own.mean, own.standard_error, gain.mean, gain.standard_error, self.fitted)


class BaselineSums:
    """Baselines that are fitted to training rows, and sums over the rows, chunk by chunk, that compare them."""

    def __init__(self, model: Model, train: Dataset, validation: Dataset, *, seed: int = 0) -> None:
        self.flow, self.seed = as_flow(model, "a baseline"), seed
        self.fitted: list[MixtureOfRows] = []
        for components in ((1,), COMPONENTS):
            with torch.random.fork_rng(devices=[]):  # EM starts at random
                torch.manual_seed(seed)
                self.fitted.append(fit_baseline(self.flow, train, validation, components))
        self.sums = [Comparison(fitted.components, min(len(train), FIT_ROWS)) for fitted in self.fitted]
        self.generators: list[list[torch.Generator]] = []

    def add(self, data: Dataset, values: Tensor) -> None:
        """Add the next rows, with their log-likelihoods under the model, (draws, rows)."""
        self._draw(data.x.device, len(values))
        for fitted, generators, sums in zip(self.fitted, self.generators, self.sums, strict=True):
            with torch.random.fork_rng(devices=[]):  # a mixture is made with random numbers, which are then replaced
                own = log_prob_by_generator(self.flow, data, None, generators, baseline=fitted.log_prob).mean(0)
            sums.own.add(own)
            sums.gain.add(values.mean(0) - own)

    def skip(self, like: Dataset, draws: int, rows: int, size: int) -> None:
        """Continue as after `rows` rows like these, in chunks of `size`."""
        self._draw(like.x.device, draws)
        for generators in self.generators:
            skip_noise(self.flow, like, generators, rows, size)

    def _draw(self, device: torch.device, draws: int) -> None:
        """Seed the noise of the first rows."""
        if not self.generators:
            seeds = range(self.seed, self.seed + draws)
            self.generators = [seeded_generators(device, seeds) for _ in self.fitted]


@dataclass(frozen=True, eq=False)
class MixtureOfRows:
    """A mixture of Gaussians as a density of rows, or of their target columns given the others."""

    encoder: Encoder
    mixture: GaussianMixture

    @property
    def components(self) -> int:
        """The number of Gaussians."""
        return len(self.mixture.weights_)

    def log_prob(self, x: Tensor) -> Tensor:
        """Compute ln p of rows, with the noise of discrete columns, in nats and in the units of the data."""
        codes, logdet = self.encoder(x)
        return (self.encoder.log_prob(self.mixture, codes) + logdet).to(x.device)


@dataclass(frozen=True, eq=False)
class Encoder:
    """What a mixture is fitted to: preprocessed columns, followed by the encoded given ones of a conditional flow."""

    first: Transform
    given: Given | None
    targets: list[int]

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes of rows, and ln |det| of the map of their target columns, in float64 on the CPU."""
        z, logdet = self.first.forward_and_logdet(x[:, self.targets].double().cpu())
        if self.given is not None:
            scale = self.given.scale.mean
            z = torch.cat([z, self.given.encode(x[:, list(self.given.others)].to(scale)).double().cpu()], dim=1)
        return z, logdet

    def log_prob(self, mixture: GaussianMixture, codes: Tensor) -> Tensor:
        """Compute ln q of the codes of the targets, given the others if there are some."""
        (weights, means, covariances), d = mixture_parameters(mixture), len(self.targets)
        joint = _full_mixture(weights, means, covariances).log_prob(codes)
        if self.given is None:
            return joint
        return joint - _full_mixture(weights, means[:, d:], covariances[:, d:, d:]).log_prob(codes[:, d:])


def fit_baseline(flow: Flow, train: Dataset, validation: Dataset, components: Sequence[int]) -> MixtureOfRows:
    """Fit the mixture, of one of these numbers of components, that suits the validation rows best."""
    rows, held_out = (_with_noise(flow, part, seed) for seed, part in enumerate((train, validation)))
    encoder = _fit_encoder(flow, train.schema, rows)
    z, held_out_z = (encoder(random_samples(part, FIT_ROWS))[0] for part in (rows, held_out))

    def score(mixture: GaussianMixture, codes: Matrix) -> Matrix:
        found: Matrix = encoder.log_prob(mixture, torch.from_numpy(codes)).numpy()
        return found

    return MixtureOfRows(encoder, best_mixture(z, held_out_z, components, score=score, work=WORK))


def _fit_encoder(flow: Flow, schema: Schema, rows: Tensor) -> Encoder:
    given = flow.transform if isinstance(flow.transform, Given) else None
    targets = list(range(schema.dimension)) if given is None else list(given.targets)
    own = schema if given is None else schema.select([schema.names[i] for i in targets])
    return Encoder(preprocessing(Network(), own, "density", rows[:, targets]).double(), given, targets)


def _with_noise(flow: Flow, data: Dataset, seed: int) -> Tensor:
    """Return the rows that the density can have, as often as they count, with the noise of the flow."""
    x, device = data.repeated().x, flow.base.mean.device
    x = x[data.schema.inside(x)].to(device)
    return dequantise_for(flow, x, None, torch.Generator(device).manual_seed(seed))[0].cpu()


def _full_mixture(weights: Tensor, means: Tensor, covariances: Tensor) -> FullMixture:
    with torch.random.fork_rng(devices=[]):  # it starts at random
        made = FullMixture(means.shape[1], len(weights), learned=False).double()
    return made.set_(weights, means, covariances)

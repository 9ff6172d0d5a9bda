"""What a density of a table is fitted to before training: splines of its columns, and a base with full covariances.

EM finds a local maximum of the likelihood of the codes z at the initial weights. The number of components and the
variance that is added to every direction are those with the largest likelihood of held-out codes. For every number of
components that variance falls step by step, each fit starting at the previous one, so that a narrow component has to
develop from a wide one. One more component, with the mean of all codes and several times their spread, keeps rows that
are unlike all others from getting a likelihood of nearly zero. Training starts at this mixture.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..base import FullMixture
from ..batch import Shape
from ..data import Schema
from ..transform import Transform
from ..transforms.spline import ColumnSpline, fit_columns
from .network import Network

if TYPE_CHECKING:
    from sklearn.mixture import GaussianMixture

Matrix: TypeAlias = NDArray[np.float64]

#: From a mixture and codes, one number per code.
Score: TypeAlias = Callable[["GaussianMixture", Matrix], Matrix]

#: The numbers of components that are tried, until PATIENCE of them in a row are no better than the best.
COMPONENTS, PATIENCE = (1, 2, 3, 5, 8, 12, 20, 30, 50), 2

#: The variances that are added to every direction of the codes, and the most iterations of EM with each.
ADDED_VARIANCES, ITERATIONS = (0.3, 0.1, 0.03, 0.01, 1e-3, 1e-4, 1e-6), 15

#: The shares of the wide component that are tried, and its standard deviations relative to those of the codes.
SHARES, SPREADS = (0.001, 0.003, 0.01, 0.03, 0.1), (2.0, 5.0, 15.0)

#: The most work of an iteration, as components x codes x dimensions^2, unless there is one component: some seconds.
WORK = 3e9

#: The number of codes below which they are also held out in turn, and the number of folds.
FEW, FOLDS = 1_000, 4

#: To compare transforms by the mixtures that suit them: the most samples, and the numbers of components.
PILOT_SAMPLES, PILOT_COMPONENTS = 4_000, (1, 3, 8, 20)

#: The most rows that splines and mixtures are fitted to, and the fraction of them that is held out where there are no
#: validation rows.
FIT_ROWS, HELD_OUT = 10_000, 0.2


def column_splines(
    network: Network, schema: Schema, standardise: Transform, data: Tensor | None, validation: Tensor | None
) -> ColumnSpline:
    """Build a spline per column; the identity, where a mixture with full covariances suits plain columns better."""
    identity = ColumnSpline(schema.shape[0], network.spline_bins)
    if data is None:
        return identity
    x, held_out = map(standardise, held_out_parts(random_samples(data, FIT_ROWS), validation))
    spline = fit_columns(x, network.spline_bins, held_out)
    if network.covariance == "diagonal" or suits_better(spline, identity, x, held_out):
        return spline
    return identity


def full_mixture(
    network: Network, shape: Shape, transform: Transform, data: Tensor | None, validation: Tensor | None
) -> FullMixture:
    """Initialise the transform on the data, and fit a mixture with full covariances to the codes."""
    if data is None:
        if not network.components:
            raise ValueError("components must be at least 1 without data to choose it on; got 0.")
        return FullMixture(shape, network.components + 1, learned=network.learned_base)
    x = random_samples(data, FIT_ROWS)
    transform.train()(x)  # the first batch in training initialises ActNorms and principal axes
    with torch.no_grad():
        z = transform(x)
        held_out = None if validation is None else transform(random_samples(validation, FIT_ROWS))
    return fit_mixture(partial(FullMixture, shape, learned=network.learned_base), z, held_out, network.components)


def random_samples(data: Tensor, count: int) -> Tensor:
    """Return at most `count` samples, drawn at random, since the first ones may be of one class."""
    if len(data) <= count:
        return data
    return data[torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:count].to(data.device)]


def fit_mixture(base: Callable[[int], FullMixture], z: Tensor, held_out: Tensor | None, components: int) -> FullMixture:
    """Return a base that is set to what EM fits to the codes z; `components` of 0: as many as suit them best.

    `base` makes one of a given number of components, which is one more than EM fits: the last one is wide.
    """
    z, held_out = held_out_parts(z, held_out)
    best = best_mixture(z, held_out, (components,) if components else COMPONENTS)
    (share, spread), _ = _background(best, held_out)
    weights, means, covariances = mixture_parameters(best)
    mean, covariance = _moments(best)
    return base(best.n_components + 1).set_(
        torch.cat([(1 - share) * weights, torch.tensor([share])]),
        torch.cat([means, mean[None]]),
        torch.cat([covariances, spread**2 * covariance[None]]),
    )


def _background(mixture: GaussianMixture, held_out: Tensor) -> tuple[tuple[float, float], Tensor]:
    """Return the share and the spread of the wide component that suit held-out codes best, and their likelihoods."""
    mean, covariance = _moments(mixture)
    rows = _matrix(held_out)
    near, found = torch.from_numpy(mixture.score_samples(rows)), {}
    for share, spread in itertools.product(SHARES, SPREADS):
        wide = torch.distributions.MultivariateNormal(mean, spread**2 * covariance)
        far: Tensor = wide.log_prob(torch.from_numpy(rows))  # type: ignore[no-untyped-call]
        found[share, spread] = torch.logaddexp(near + math.log(1 - share), far + math.log(share))
    best = max(found, key=lambda key: float(found[key].mean()))
    return best, found[best]


def _moments(mixture: GaussianMixture) -> tuple[Tensor, Tensor]:
    """Return the mean and the covariance of a whole mixture."""
    weights, means, covariances = mixture_parameters(mixture)
    mean = weights @ means
    off = means - mean
    return mean, torch.einsum("k,kij->ij", weights, covariances + off[:, :, None] * off[:, None])


def mixture_parameters(mixture: GaussianMixture) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights (K), means (K, d) and covariances (K, d, d) of a fitted mixture, in float64."""
    found = (mixture.weights_, mixture.means_, mixture.covariances_)
    weights, means, covariances = (torch.from_numpy(part) for part in found)
    return weights, means, covariances


def suits_better(transform: Transform, other: Transform, x: Tensor, held_out: Tensor) -> bool:
    """Whether held-out samples are more likely by a mixture of codes of `transform`, by more than a standard error."""
    difference = mixture_log_likelihood(transform, x, held_out) - mixture_log_likelihood(other, x, held_out)
    return bool(difference.mean() > difference.std(correction=0) / math.sqrt(len(difference)))


def mixture_log_likelihood(transform: Transform, x: Tensor, held_out: Tensor) -> Tensor:
    """Return the log-likelihoods of held-out samples for the mixture that suits their codes best."""
    with torch.no_grad():
        z = transform(x[:PILOT_SAMPLES])
        held_out_z, logdet = transform.forward_and_logdet(held_out)
    best = best_mixture(z, held_out_z, PILOT_COMPONENTS)
    return _background(best, held_out_z)[1] + logdet.double().cpu()


def held_out_parts(x: Tensor, held_out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the samples to fit and those to choose by: a fifth of x, if none are given."""
    if held_out is not None:
        return x, held_out
    order = torch.randperm(len(x))
    n = max(1, round(HELD_OUT * len(x)))
    return x[order[n:]], x[order[:n]]


def best_mixture(
    z: Tensor, held_out: Tensor, components: Sequence[int], *, score: Score | None = None, work: float = WORK
) -> GaussianMixture:
    """Return the mixture with the largest likelihood of held-out codes, among these numbers of components.

    Few codes are also held out in turn, a fold at a time, since the other held-out codes are then few as well. `score`
    replaces the log-likelihood of each code; `work` is the most of one iteration.
    """
    from threadpoolctl import threadpool_limits

    # Small matrices: on a busy machine the threads of BLAS wait for each other, for minutes instead of seconds.
    with threadpool_limits(1, "blas"):
        best = _best_fit(_splits(_matrix(z), _matrix(held_out)), components, score, work)
    if best is None:
        raise ValueError(
            f"a mixture of {components[0]} normals cannot be fitted to {len(z)} samples. Use fewer components, or "
            'covariance = "diagonal".'
        )
    return best


def _best_fit(
    splits: Sequence[tuple[Matrix, Matrix]], components: Sequence[int], score: Score | None, work: float
) -> GaussianMixture | None:
    best, highest, waited = None, -math.inf, 0
    for number in components:
        waited += 1
        for mixtures in zip(*(_fits(rows, number, work) for rows, _ in splits), strict=False):
            pairs = zip(mixtures, (others for _, others in splits), strict=True)
            found = np.concatenate([score(m, others) if score else m.score_samples(others) for m, others in pairs])
            if found.mean() > highest:
                best, highest, waited = copy.deepcopy(mixtures[0]), found.mean(), 0
        if waited == PATIENCE:
            break
    return best


def _splits(rows: Matrix, held_out: Matrix) -> list[tuple[Matrix, Matrix]]:
    """Return pairs of codes to fit and to evaluate: all and the held-out ones, then folds of the former if few."""
    if not 4 * FOLDS <= len(rows) < FEW:
        return [(rows, held_out)]
    folds = np.array_split(np.random.default_rng(0).permutation(len(rows)), FOLDS)
    return [(rows, held_out), *((np.delete(rows, fold, axis=0), rows[fold]) for fold in folds)]


def _fits(rows: Matrix, number: int, work: float) -> Iterator[GaussianMixture]:
    """Fit mixtures of a number of components, each with less added variance than the one before."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    if len(rows) < 2 * number or (number > 1 and number * rows.size * rows.shape[1] > work):
        return
    seed = int(torch.randint(2**31, ()))
    mixture = GaussianMixture(number, max_iter=ITERATIONS, init_params="k-means++", warm_start=True, random_state=seed)
    for variance in ADDED_VARIANCES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            try:
                mixture.set_params(reg_covar=variance).fit(rows)
            except ValueError:  # a covariance is singular, and would stay so with less added variance
                return
        yield mixture


def _matrix(z: Tensor) -> Matrix:
    return z.detach().double().cpu().flatten(1).numpy()

"""The base of a density as a mixture of normals with full covariances, fitted to the codes before training.

EM finds a local maximum of the likelihood of the codes z at the initial weights. The number of components and the
variance that is added to every direction are those with the largest likelihood of held-out codes. For every number of
components that variance falls step by step, each fit starting at the previous one, so that a narrow component has to
develop from a wide one. Training then starts at this mixture instead of at one normal.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..base import FullMixture

if TYPE_CHECKING:
    from sklearn.mixture import GaussianMixture

#: The numbers of components that are tried, until PATIENCE of them in a row are no better than the best.
COMPONENTS, PATIENCE = (1, 2, 3, 5, 8, 12, 20, 30, 50), 2

#: The variances that are added to every direction of the codes, and the most iterations of EM with each.
ADDED_VARIANCES, ITERATIONS = (0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 1e-4, 1e-6), 20

#: The fraction of the codes that is held out if no validation codes are given.
HELD_OUT = 0.2


def fit_mixture_(base: FullMixture, z: Tensor, held_out: Tensor | None = None) -> FullMixture:
    """Set a base to the mixture of its number of components that EM fits to the codes z, and return it."""
    best = best_mixture(z, held_out, (base.components,))
    found = (torch.from_numpy(part) for part in (best.weights_, best.means_, best.covariances_))
    return base.set_(*found)


def choose_components(z: Tensor, held_out: Tensor | None = None) -> int:
    """Return the number of components with the largest likelihood of held-out codes."""
    return len(best_mixture(z, held_out, COMPONENTS).weights_)


def best_mixture(z: Tensor, held_out: Tensor | None, components: tuple[int, ...]) -> GaussianMixture:
    """Return the mixture with the largest likelihood of held-out codes, among these numbers of components."""
    z, held_out = _parts(z, held_out)
    best, score, waited = None, -float("inf"), 0
    for number in components:
        waited += 1
        for mixture in _fits(z, number):
            if (found := mixture.score(held_out.numpy())) > score:
                best, score, waited = copy.deepcopy(mixture), found, 0
        if waited == PATIENCE:
            break
    if best is None:
        raise ValueError(
            f"a mixture of {components[0]} normals cannot be fitted to {len(z)} samples. Use fewer components, or "
            'covariance = "diagonal".'
        )
    return best


def _fits(z: Tensor, number: int) -> Iterator[GaussianMixture]:
    """Fit mixtures of a number of components, each with less added variance than the one before."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    if len(z) < 2 * number:
        return
    seed = int(torch.randint(2**31, ()))
    mixture = GaussianMixture(number, max_iter=ITERATIONS, init_params="k-means++", warm_start=True, random_state=seed)
    for variance in ADDED_VARIANCES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            try:
                mixture.set_params(reg_covar=variance).fit(z.numpy())
            except ValueError:  # a covariance is singular, and would stay so with less added variance
                return
        yield mixture


def _parts(z: Tensor, held_out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the codes to fit and those to choose by, as float64 matrices."""
    if held_out is None:
        order, n = torch.randperm(len(z)), max(1, round(HELD_OUT * len(z)))
        z, held_out = z[order[n:]], z[order[:n]]
    fitted, chosen_by = (part.detach().double().cpu().flatten(1) for part in (z, held_out))
    return fitted, chosen_by

"""Density models and anomaly detectors for `tables.py`, each tuned on the validation rows.

iresnet             the library's own run: the settings of a candidate, from data to a released model
mixture             scikit-learn's mixture of normals with full covariances
kernel density      scikit-learn's, with a normal kernel
spline flow, MAF    zuko's, trained for a given time, the weights that validate best
isolation forest, local outlier factor      scikit-learn's: scores without a density

Every model sees standardised columns; likelihoods are in the units of the data.
"""

from __future__ import annotations

import copy
import math
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from table_data import Rows, Table

from iresnet.data import Dataset, Schema, Splits
from iresnet.evaluate import log_likelihood
from iresnet.presets import find, with_overrides
from iresnet.run import start

#: The most rows that a mixture or a kernel density is fitted to.
MIXTURE_ROWS, KERNEL_ROWS = 20_000, 10_000


@dataclass(frozen=True)
class Fitted:
    """A fitted model: a score per row, larger for ordinary ones, which is ln p if it `is_density`; what was chosen."""

    score: Callable[[Rows], Rows]
    is_density: bool = True
    about: dict[str, Any] = field(default_factory=dict)


class Scale:
    """Standardisation by the training rows."""

    def __init__(self, rows: Rows) -> None:
        self.mean, self.std = rows.mean(axis=0), rows.std(axis=0)
        self.logdet = -float(np.log(self.std).sum())

    def __call__(self, rows: Rows) -> Rows:
        return np.asarray((rows - self.mean) / self.std)


# --------------------------------------------------------------------------------------------------- this library


def iresnet(table: Table, seed: int, overrides: tuple[str, ...] = ()) -> Fitted:
    """Train the preset table-density, with settings replaced, as `iresnet train` does."""
    experiment = with_overrides(find("table-density"), overrides)
    schema = Schema((table.train.shape[1],))
    parts = (Dataset(_float(rows), None, schema) for rows in (table.train, table.validation, table.validation[:1]))
    with tempfile.TemporaryDirectory() as folder:
        result = start(replace(experiment, seed=seed), Path(folder) / "run", splits=Splits(*parts))
        model, best = result.run.model(), result.run.best_metrics()
        network = result.run.experiment.network
    assert result.certificate is not None
    about = {
        "steps": result.step, "best step": best["step"], "training s": round(result.seconds, 2),
        "components": network.components, "proven": result.certificate.passed,
    }  # fmt: skip
    return Fitted(
        lambda rows: log_likelihood(model, Dataset(_float(rows), None, schema)).value.double().numpy(), about=about
    )


def _float(rows: Rows) -> torch.Tensor:
    return torch.from_numpy(rows).float()


# ---------------------------------------------------------------------------------------------------- scikit-learn


def mixture(table: Table, seed: int) -> Fitted:
    """The number of components and the added variance with the largest validation likelihood."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    scale = Scale(table.train)
    x, held_out = _some(scale(table.train), MIXTURE_ROWS, seed), scale(table.validation)
    best, best_score, waited = None, -math.inf, 0
    for components in (1, 2, 3, 5, 8, 12, 20, 30, 50):
        waited += 1
        for variance in (1e-6, 1e-4, 1e-3, 1e-2, 3e-2, 1e-1, 3e-1):
            if len(x) < 2 * components:
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                found = GaussianMixture(components, reg_covar=variance, random_state=seed).fit(x)
            if (score := found.score(held_out)) > best_score:
                best, best_score, waited = found, score, 0
        if waited == 2:
            break
    assert best is not None
    return Fitted(
        lambda rows: np.asarray(best.score_samples(scale(rows)) + scale.logdet),
        about={"components": best.n_components, "added variance": best.reg_covar},
    )


def kernel_density(table: Table, seed: int) -> Fitted:
    """The bandwidth with the largest validation likelihood."""
    from sklearn.neighbors import KernelDensity

    scale = Scale(table.train)
    x, held_out = _some(scale(table.train), KERNEL_ROWS, seed), _some(scale(table.validation), 500, seed)
    models = [KernelDensity(bandwidth=h).fit(x) for h in np.geomspace(0.03, 1.5, 14)]
    best = max(models, key=lambda model: float(model.score(held_out)))
    return Fitted(
        lambda rows: np.asarray(best.score_samples(scale(rows)) + scale.logdet),
        about={"bandwidth": round(float(best.bandwidth), 4)},
    )


def isolation_forest(table: Table, seed: int) -> Fitted:
    """Scikit-learn's default settings."""
    from sklearn.ensemble import IsolationForest

    scale = Scale(table.train)
    model = IsolationForest(random_state=seed).fit(scale(table.train))
    return Fitted(lambda rows: np.asarray(model.score_samples(scale(rows))), is_density=False)


def local_outlier_factor(table: Table, seed: int) -> Fitted:
    """Scikit-learn's default settings, for new rows."""
    from sklearn.neighbors import LocalOutlierFactor

    scale = Scale(table.train)
    x = _some(scale(table.train), MIXTURE_ROWS, seed)
    model = LocalOutlierFactor(n_neighbors=min(20, len(x) - 1), novelty=True).fit(x)
    return Fitted(lambda rows: np.asarray(model.score_samples(scale(rows))), is_density=False)


def _some(rows: Rows, count: int, seed: int) -> Rows:
    return rows if len(rows) <= count else rows[np.random.default_rng((seed, 3)).permutation(len(rows))[:count]]


# ------------------------------------------------------------------------------------------------------------ zuko

#: Steps between two validations, and how many in a row without improvement end the training.
VALIDATE_EVERY, PATIENCE = 50, 40


def zuko_flow(table: Table, seed: int, *, kind: str, seconds: float) -> Fitted:
    """Train for at most `seconds` of CPU time; the weights are those with the largest validation likelihood.

    AdamW with a cosine schedule over the time; of three settings (from small and regularised to large) each gets a
    third of the time, and validation chooses.
    """
    import zuko

    scale = Scale(table.train)
    x, held_out = _float(scale(table.train)), _float(scale(table.validation))
    make = {"spline flow": zuko.flows.NSF, "MAF": zuko.flows.MAF}[kind]
    settings = [
        {"transforms": 3, "hidden": (64, 64), "rate": 2e-3, "decay": 1e-2},
        {"transforms": 2, "hidden": (32,), "rate": 2e-3, "decay": 1.0},
        {"transforms": 5, "hidden": (128, 128), "rate": 1e-3, "decay": 1e-2},
    ]
    best: tuple[float, Any, Any] = (-math.inf, None, None)
    for s in settings:
        torch.manual_seed(seed)
        flow = make(x.shape[1], transforms=s["transforms"], hidden_features=s["hidden"], randperm=True)
        found, score = _train_zuko(flow, x, held_out, seconds / len(settings), seed, s)
        if score > best[0]:
            best = (score, found, s)
    score, flow, chosen = best
    assert flow is not None

    @torch.no_grad()
    def log_density(rows: Rows) -> Rows:
        return np.asarray(flow().log_prob(_float(scale(rows))).double().numpy() + scale.logdet)

    return Fitted(log_density, about={"given s": round(seconds, 1), **{k: chosen[k] for k in ("transforms", "decay")}})


def _train_zuko(
    flow: Any, x: torch.Tensor, held_out: torch.Tensor, seconds: float, seed: int, s: dict[str, Any]
) -> tuple[Any, float]:
    optimiser = torch.optim.AdamW(flow.parameters(), s["rate"], weight_decay=s["decay"], betas=(0.9, 0.99))
    generator, size = torch.Generator().manual_seed(seed), min(256, len(x))
    best, best_score, waited, step, begin = copy.deepcopy(flow), -math.inf, 0, 0, time.process_time()
    while (done := (time.process_time() - begin) / seconds) < 1 and waited < PATIENCE:
        place = step % (len(x) // size)
        if place == 0:
            order = torch.randperm(len(x), generator=generator)
        for group in optimiser.param_groups:
            group["lr"] = s["rate"] * min(1, (step + 1) / 50) * (0.5 + 0.5 * math.cos(math.pi * done))
        loss = -flow().log_prob(x[order[place * size : (place + 1) * size]]).mean()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(flow.parameters(), 5.0)
        optimiser.step()
        step += 1
        if step % VALIDATE_EVERY == 0:
            with torch.no_grad():
                score = float(flow().log_prob(held_out[:1000]).mean())
            waited += 1
            if score > best_score:
                best, best_score, waited = copy.deepcopy(flow), score, 0
    return best, best_score


#: The methods that need no time budget.
PLAIN: dict[str, Callable[[Table, int], Fitted]] = {
    "mixture": mixture,
    "kernel density": kernel_density,
    "isolation forest": isolation_forest,
    "local outlier factor": local_outlier_factor,
}
TIMED = ("spline flow", "MAF")

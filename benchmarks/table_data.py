"""Tables for `tables.py`: scikit-learn's, and generated ones whose density is known.

A table is made for a seed: real rows are shuffled and split 60 : 20 : 20, generated rows are drawn anew. Real columns
are rounded, on which a density is unbounded, so every value gets uniform noise of one unit of rounding. Anomalies are
validation or test rows whose columns are shuffled (each value is ordinary, the combination is not), and as many uniform
draws from the box of the training rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

Rows = NDArray[np.float64]
LogDensity = Callable[[Rows], Rows]


@dataclass(frozen=True)
class Table:
    """Training, validation and test rows, and the true ln p of a row where it is known.

    Methods use the validation rows themselves, to stop and to tune. So settings are compared on other rows, `choice`:
    for a real table, which has none to spare, on a quarter of its training rows (`for_choosing`).
    """

    train: Rows
    validation: Rows
    test: Rows
    log_density: LogDensity | None = None
    choice: Rows | None = None

    def for_choosing(self) -> Table:
        """Return a table without test rows, to compare settings on `choice`."""
        n = len(self.train) * 3 // 4
        parts = (self.train[:n], self.train[n:]) if self.choice is None else (self.train, self.choice)
        return replace(self, train=parts[0], choice=parts[1], test=self.test[:0])


@dataclass(frozen=True)
class Known:
    """A distribution to draw from, with its log-density."""

    draw: Callable[[int, np.random.Generator], Rows]
    log_density: LogDensity


def anomalies(table: Table, rows: Rows, seed: int) -> Rows:
    """Half are rows with shuffled columns, half are uniform in the box of the training rows."""
    rng = np.random.default_rng((seed, 2))
    half = len(rows) // 2
    shuffled = np.stack([rng.permutation(column) for column in rows.T], axis=1)[:half]
    low, high = table.train.min(axis=0), table.train.max(axis=0)
    return np.concatenate([shuffled, rng.uniform(low, high, (len(rows) - half, rows.shape[1]))])


# ------------------------------------------------------------------------------------------------- real tables


def _real(load: Callable[[], Rows], seed: int) -> Table:
    rng = np.random.default_rng((seed, 1))
    x = np.asarray(load(), dtype=np.float64)
    for j, column in enumerate(x.T):
        unit = np.diff(np.unique(column)).min()
        x[:, j] = column + unit * rng.uniform(-0.5, 0.5, len(x))
    x = x[rng.permutation(len(x))]
    a, b = round(0.6 * len(x)), round(0.8 * len(x))
    return Table(x[:a], x[a:b], x[b:])


def _sklearn(name: str) -> Rows:
    from sklearn import datasets

    return getattr(datasets, f"load_{name}")().data.copy()


def _digits_axes(columns: int) -> Rows:
    from sklearn.decomposition import PCA

    return PCA(columns, random_state=0, svd_solver="full").fit_transform(_sklearn("digits"))


def _digits_patches() -> Rows:
    images = _sklearn("digits").reshape(-1, 8, 8)[:, 1:7, 1:7]
    patches = images.reshape(-1, 3, 2, 3, 2).transpose(0, 1, 3, 2, 4).reshape(-1, 4)
    return patches[patches.sum(axis=1) > 0]  # blank patches are a point mass


# -------------------------------------------------------------------------------------------- generated tables


def _generated(make: Callable[[], Known], rows: int, seed: int) -> Table:
    known, rng = make(), np.random.default_rng((seed, 1))
    counts = (rows, min(2000, max(30, rows // 4)), 2000)
    return Table(*(known.draw(n, rng) for n in counts), known.log_density, known.draw(2000, rng))


def _mixing(d: int, seed: int, spread: float) -> Rows:
    """A matrix with singular values from 1 to `spread`."""
    rng = np.random.default_rng(seed)
    (u, _), (v, _) = (np.linalg.qr(rng.normal(size=(d, d))) for _ in range(2))
    return u @ np.diag(np.geomspace(1, spread, d)) @ v


def gaussian(d: int, spread: float = 0.02) -> Known:
    """One normal with strongly correlated columns."""
    a = _mixing(d, 10, spread)
    normal = stats.multivariate_normal(np.zeros(d), a @ a.T)
    return Known(lambda n, rng: rng.normal(size=(n, d)) @ a.T, normal.logpdf)


def clusters(d: int, k: int) -> Known:
    """A mixture of k normals with full covariances and unequal weights."""
    rng = np.random.default_rng(20)
    means, weights = 2.5 * rng.normal(size=(k, d)), rng.dirichlet(np.full(k, 2.0))
    factors = [0.6 * _mixing(d, 21 + i, 0.15) for i in range(k)]

    def draw(n: int, rng: np.random.Generator) -> Rows:
        z, i = rng.normal(size=(n, d)), rng.choice(k, n, p=weights)
        return means[i] + np.einsum("nij,nj->ni", np.stack(factors)[i], z)

    normals = [stats.multivariate_normal(m, a @ a.T) for m, a in zip(means, factors, strict=True)]
    return Known(
        draw, lambda x: special.logsumexp([np.log(w) + p.logpdf(x) for w, p in zip(weights, normals, strict=True)], 0)
    )


def heavy_tails(d: int, freedom: float) -> Known:
    """Independent Student t, mixed linearly."""
    a = _mixing(d, 30, 0.2)
    inverse, logdet = np.linalg.inv(a), np.linalg.slogdet(a)[1]
    return Known(
        lambda n, rng: rng.standard_t(freedom, size=(n, d)) @ a.T,
        lambda x: stats.t(freedom).logpdf(x @ inverse.T).sum(1) - logdet,
    )


def student_copula(d: int, freedom: float) -> Known:
    """Arcsinh of a multivariate Student t: columns whose large values occur together."""
    a = _mixing(d, 31, 0.3)
    t = stats.multivariate_t(np.zeros(d), a @ a.T, df=freedom)

    def draw(n: int, rng: np.random.Generator) -> Rows:
        return np.asarray(np.arcsinh(t.rvs(n, random_state=rng)))

    return Known(draw, lambda x: t.logpdf(np.sinh(x)) + np.log(np.cosh(x)).sum(1))


def bounded(d: int) -> Known:
    """Beta columns in [0, 1], the shape of each set by the column before it; the first is uniform."""

    def shapes(x: Rows) -> tuple[Rows, Rows]:
        return 0.8 + 4 * x, 0.8 + 4 * (1 - x) ** 2

    def draw(n: int, rng: np.random.Generator) -> Rows:
        columns = [rng.uniform(size=n)]
        for _ in range(d - 1):
            columns.append(rng.beta(*shapes(columns[-1])))
        return np.stack(columns, 1)

    def log_density(x: Rows) -> Rows:
        return sum(stats.beta(*shapes(x[:, i])).logpdf(x[:, i + 1]) for i in range(d - 1))

    return Known(draw, log_density)


def proportions(d: int) -> Known:
    """Two Dirichlet distributions over d + 1 parts; the last part is left out."""
    alphas = (np.linspace(1, 4, d + 1), np.linspace(9, 2, d + 1))

    def draw(n: int, rng: np.random.Generator) -> Rows:
        both = np.stack([rng.dirichlet(alpha, n) for alpha in alphas])
        return both[rng.integers(2, size=n), np.arange(n), :d]

    def log_density(x: Rows) -> Rows:
        whole = np.concatenate([x, 1 - x.sum(1, keepdims=True)], 1)
        parts = [special.gammaln(a.sum()) - special.gammaln(a).sum() + (np.log(whole) * (a - 1)).sum(1) for a in alphas]
        return special.logsumexp(parts, 0) - math.log(2)

    return Known(draw, log_density)


def counts(d: int) -> Known:
    """Poisson counts with uniform noise: three kinds of rows, each with its own rates."""
    rates = np.exp(np.random.default_rng(40).uniform(0, 3.5, size=(3, d)))

    def draw(n: int, rng: np.random.Generator) -> Rows:
        return rng.poisson(rates[rng.integers(3, size=n)]) + rng.uniform(0, 1, (n, d))

    def log_density(x: Rows) -> Rows:
        parts = [stats.poisson(rate).logpmf(np.floor(x)).sum(1) for rate in rates]
        return special.logsumexp(parts, 0) - math.log(3)

    return Known(draw, log_density)


def overdispersed(d: int) -> Known:
    """Negative binomial counts with uniform noise, the mean of each column set by the column before it."""

    def probability(before: Rows) -> Rows:
        return 1 / (1.5 + 0.3 * np.floor(before))

    def draw(n: int, rng: np.random.Generator) -> Rows:
        columns = [rng.negative_binomial(4, 0.4, n) + rng.uniform(size=n)]
        for _ in range(d - 1):
            columns.append(rng.negative_binomial(3, probability(columns[-1])) + rng.uniform(size=n))
        return np.stack(columns, 1)

    def log_density(x: Rows) -> Rows:
        first = stats.nbinom(4, 0.4).logpmf(np.floor(x[:, 0]))
        return first + sum(stats.nbinom(3, probability(x[:, i])).logpmf(np.floor(x[:, i + 1])) for i in range(d - 1))

    return Known(draw, log_density)


def skewed(d: int) -> Known:
    """Log-normal columns, correlated."""
    a = 0.8 * _mixing(d, 50, 0.1)
    normal = stats.multivariate_normal(np.zeros(d), a @ a.T)
    return Known(
        lambda n, rng: np.exp(rng.normal(size=(n, d)) @ a.T), lambda x: normal.logpdf(np.log(x)) - np.log(x).sum(1)
    )


def factors(d: int, hidden: int) -> Known:
    """A few factors and noise: a normal of low effective dimension, each column then bent by sinh or arcsinh."""
    rng = np.random.default_rng(60)
    load = rng.normal(size=(d, hidden)) / math.sqrt(hidden)
    normal = stats.multivariate_normal(np.zeros(d), load @ load.T + 0.05 * np.eye(d))
    bent = np.arange(d) % 2 == 0

    def draw(n: int, rng: np.random.Generator) -> Rows:
        y = normal.rvs(n, random_state=rng)
        return np.where(bent, np.sinh(y), np.arcsinh(2 * y))

    def log_density(x: Rows) -> Rows:
        y = np.where(bent, np.arcsinh(x), np.sinh(x) / 2)
        slope = np.where(bent, -0.5 * np.log1p(x**2), np.log(np.cosh(x) / 2))
        return normal.logpdf(y) + slope.sum(1)

    return Known(draw, log_density)


def curved(d: int, frequency: float) -> Known:
    """Normal columns whose mean and scale are smooth functions of the columns before."""

    def moments(x: Rows, i: int) -> tuple[Rows, Rows]:
        before = x[:, i - 1]
        product = before * x[:, i - 2] if i > 1 else 0.0
        return np.sin(frequency * before) + 0.3 * product, 0.15 + 0.25 * np.abs(np.tanh(before))

    def draw(n: int, rng: np.random.Generator) -> Rows:
        x = rng.normal(size=(n, d))
        for i in range(1, d):
            mean, scale = moments(x, i)
            x[:, i] = mean + scale * x[:, i]
        return x

    def log_density(x: Rows) -> Rows:
        total = stats.norm.logpdf(x[:, 0])
        for i in range(1, d):
            total = total + stats.norm.logpdf(x[:, i], *moments(x, i))
        return total

    return Known(draw, log_density)


def rings(d: int) -> Known:
    """Pairs of columns, each on one of two noisy rings, at an angle that drifts from pair to pair."""

    def draw(n: int, rng: np.random.Generator) -> Rows:
        radius = rng.choice([1.0, 3.0], (n, d // 2)) + 0.15 * rng.normal(size=(n, d // 2))
        angle = np.cumsum(rng.vonmises(0, 2.0, (n, d // 2)), axis=1)
        return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 2).reshape(n, d)

    def log_density(x: Rows) -> Rows:
        a, b = x[:, ::2], x[:, 1::2]
        radius, angle = np.hypot(a, b), np.arctan2(b, a)  # a radius below zero has probability 1e-11
        density = special.logsumexp([stats.norm.logpdf(radius, r, 0.15) - math.log(2) for r in (1.0, 3.0)], 0)
        drift = stats.vonmises.logpdf(np.diff(angle, axis=1, prepend=0.0), 2.0)
        return np.asarray((density - np.log(radius) + drift).sum(1))

    return Known(draw, log_density)


#: Tables on which the default was chosen, and tables that it had not seen.
CHOOSE: dict[str, Callable[[int], Table]] = {
    "iris": partial(_real, partial(_sklearn, "iris")),
    "diabetes": partial(_real, partial(_sklearn, "diabetes")),
    "breast cancer": partial(_real, partial(_sklearn, "breast_cancer")),
    "digits, 10 axes": partial(_real, partial(_digits_axes, 10)),
    "digits, 20 axes": partial(_real, partial(_digits_axes, 20)),  # its test rows showed an error of the pilot
    "correlated": partial(_generated, partial(gaussian, 10), 5000),
    "multi-modal": partial(_generated, partial(clusters, 5, 15), 5000),
    "heavy tails": partial(_generated, partial(heavy_tails, 6, 2.5), 5000),
    "bounded": partial(_generated, partial(bounded, 5), 5000),
    "counts": partial(_generated, partial(counts, 6), 5000),
    "skewed": partial(_generated, partial(skewed, 8), 2000),
    "many columns": partial(_generated, partial(factors, 50, 8), 3000),
    "few rows": partial(_generated, partial(curved, 5, 1.5), 120),
    "curved": partial(_generated, partial(curved, 10, 2.0), 10_000),
    "many rows": partial(_generated, partial(curved, 6, 3.0), 100_000),
}
CONFIRM: dict[str, Callable[[int], Table]] = {
    "wine": partial(_real, partial(_sklearn, "wine")),
    "digits, patches": partial(_real, _digits_patches),
    "heavy tails together": partial(_generated, partial(student_copula, 8, 3.0), 5000),
    "proportions": partial(_generated, partial(proportions, 5), 5000),
    "overdispersed counts": partial(_generated, partial(overdispersed, 8), 5000),
    "rings": partial(_generated, partial(rings, 4), 5000),
    "few rows, 20 columns": partial(_generated, partial(factors, 20, 4), 200),
    "many rows, rings": partial(_generated, partial(rings, 6), 50_000),
    "100 columns": partial(_generated, partial(factors, 100, 10), 2000),
}
TABLES = CHOOSE | CONFIRM

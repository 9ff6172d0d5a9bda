"""Baselines of a density of rows: against closed forms, and against a computation in numpy, column by column."""

import json
import math
import sys

import numpy as np
import pytest
import torch

from iresnet import Chain, DiagonalNormal, Flow
from iresnet.base import FullMixture
from iresnet.data import Dataset, Schema, Splits
from iresnet.data.columns import POSITIVE, REAL, ColumnKind
from iresnet.evaluate import baselines, density, evaluate, log_prob_draws
from iresnet.evaluate.baselines import COMPONENTS, Baseline, fit_baseline
from iresnet.evaluate.draws import log_prob_by_generator
from iresnet.models import Network, build
from iresnet.models.mixture import mixture_parameters

SMALL = Network(blocks=(1,), width=4, preprocessing="standardise")
COVARIANCE = np.array([[4.0, 1.5], [1.5, 1.0]])


def rows(x, schema=None):
    return Dataset(torch.as_tensor(x).float(), None, Schema((x.shape[1],)) if schema is None else schema)


def parts(draw, schema=None, n=(1500, 400, 300)):
    """Training, validation and test rows of a distribution."""
    rng = np.random.default_rng(0)
    return tuple(rows(draw(rng, count), schema) for count in n)


def model_for(data):
    torch.manual_seed(0)
    return build(SMALL, data.schema, "density", data.x).eval()


def normal_rows(rng, n):
    return rng.multivariate_normal([10.0, -3.0], COVARIANCE, n)


def clusters(rng, n):
    return rng.normal(size=(n, 2)) + 8 * rng.integers(0, 2, (n, 1)) * np.array([1.0, -1.0])


def gaussian(x, mean, covariance):
    """ln of a normal density, by an inverse and a determinant."""
    squares = np.einsum("ni,ij,nj->n", x - mean, np.linalg.inv(covariance), x - mean)
    return -0.5 * (squares + np.linalg.slogdet(2 * np.pi * covariance)[1])


def log_mixture(z, mixture):
    parameters = zip(*(p.numpy() for p in mixture_parameters(mixture)), strict=True)
    return np.logaddexp.reduce([np.log(w) + gaussian(z, m, c) for w, m, c in parameters])


class TestKnownAnswers:
    def test_the_gaussian_is_that_of_the_training_rows(self):
        """In the units of the data: mean and covariance, with a little variance that is added to every direction."""
        train, validation, test = parts(normal_rows)
        model = model_for(train)
        found = baselines(model, test, train, validation)[0]
        fitted = fit_baseline(model, train, validation, (1,))
        _, (mean,), (covariance,) = (t.numpy() for t in mixture_parameters(fitted.mixture))
        centre, std = (t.flatten().numpy() for t in (fitted.encoder.first.mean, fitted.encoder.first.std))
        x = test.x.double().numpy()
        exact = -gaussian(x, centre + std * mean, std[:, None] * covariance * std)
        assert (found.name, found.components, found.fitted) == ("Gaussian", 1, 1500)
        assert found.value == pytest.approx(exact.mean(), abs=1e-6)
        assert found.standard_error == pytest.approx(exact.std(ddof=1) / math.sqrt(300), abs=1e-6)
        sample = train.x.double().numpy()
        assert found.value == pytest.approx(-gaussian(x, sample.mean(0), np.cov(sample.T)).mean(), abs=5e-3)
        entropy = 0.5 * np.linalg.slogdet(2 * np.pi * math.e * COVARIANCE)[1]
        assert abs(found.value - entropy) < 4 * found.standard_error

    def test_a_mixture_finds_clusters(self):
        train, validation, test = parts(clusters)
        gaussian, mixture = baselines(model_for(train), test, train, validation)
        assert mixture.components in COMPONENTS
        assert mixture.name == f"mixture of {mixture.components} Gaussians"
        assert gaussian.value - mixture.value > 1
        assert mixture.value == pytest.approx(math.log(2) + math.log(2 * math.pi * math.e), abs=0.2)

    def test_every_kind_of_column_against_numpy(self):
        """Noise, logarithm or logit at the ends of the interval, standardisation, mixture: as the kinds are defined."""
        kinds = (REAL, POSITIVE, ColumnKind("integer", lower=0.0, step=1.0), ColumnKind.category(("a", "b", "c")))
        schema = Schema((4,), columns=("r", "p", "n", "c"), kinds=kinds)

        def draw(rng, n):
            c = rng.integers(0, 3, n)
            return np.stack([rng.normal(5, 2, n) + c, rng.lognormal(3, 1, n), rng.poisson(2 + c), c], axis=1)

        train, validation, test = parts(draw, schema)
        model = model_for(train)
        fitted = fit_baseline(model, train, validation, (3,))
        first = fitted.encoder.first
        mean, std = (t.double().numpy() for t in (first.mean, first.std))
        expected = []
        for k in range(8):
            u = torch.rand(300, 4, generator=torch.Generator().manual_seed(k)).numpy().astype(np.float64)
            r, p, n, c = (test.x.numpy() + (u - 0.5).astype(np.float32) * np.float32([0, 0, 1, 1])).astype(np.float64).T
            y = np.stack([r, np.log(p), np.log(n + 0.6), np.log(c + 0.6) - np.log(2.6 - c)], axis=1)
            slopes = np.log(np.stack([1 + 0 * r, 1 / p, 1 / (n + 0.6), 3.2 / ((c + 0.6) * (2.6 - c))], axis=1) / std)
            expected.append(log_mixture((y - mean) / std, fitted.mixture) + slopes.sum(1))
        generators = [torch.Generator().manual_seed(k) for k in range(8)]
        values = log_prob_by_generator(model, test, None, generators, baseline=fitted.log_prob)
        assert values.numpy() == pytest.approx(np.stack(expected), abs=2e-4)

    def test_a_conditional_gaussian_is_a_linear_regression(self):
        schema = Schema((2,), columns=("c", "t"), targets=("t",))

        def draw(rng, n):
            c = rng.normal(3, 2, n)
            return np.stack([c, 2 * c + 1 + 0.7 * rng.normal(size=n)], axis=1)

        train, validation, test = parts(draw, schema)
        found = baselines(model_for(train), test, train, validation)
        slope, intercept = np.polyfit(*train.x.double().numpy().T, 1)
        residuals = [x[:, 1] - slope * x[:, 0] - intercept for x in (train.x.numpy(), test.x.numpy())]
        variance = (residuals[0] ** 2).mean()
        expected = 0.5 * (residuals[1] ** 2 / variance + np.log(2 * np.pi * variance))
        assert found[0].value == pytest.approx(expected.mean(), abs=2e-3)
        assert found[1].value == pytest.approx(expected.mean(), abs=0.1)

    def test_given_categories_choose_their_own_density(self):
        """Of a mixture that is conditional on a category, each category has its own part."""
        kinds = (ColumnKind.category(("a", "b")), REAL)
        schema = Schema((2,), columns=("c", "t"), kinds=kinds).given_others(["t"])

        def draw(rng, n):
            c = rng.integers(0, 2, n)
            return np.stack([c, np.where(c == 0, rng.normal(0, 1, n), rng.normal(20, 0.1, n))], axis=1)

        train, validation, test = parts(draw, schema)
        _, mixture = baselines(model_for(train), test, train, validation)
        entropies = [0.5 * math.log(2 * math.pi * math.e * s**2) for s in (1, 0.1)]
        share = float((test.x[:, 0] == 0).double().mean())
        assert mixture.value == pytest.approx(share * entropies[0] + (1 - share) * entropies[1], abs=0.15)


class TestComparison:
    def test_the_gain_is_paired_and_on_the_same_rows(self):
        train, validation, test = parts(clusters)
        model = model_for(train)
        own, found = density(model, test), baselines(model, test, train, validation)
        for baseline in found:
            assert baseline.gain == pytest.approx(baseline.value - own.value, abs=1e-5)
            assert baseline.gain_error > 0
        assert found == baselines(model, test, train, validation, values=log_prob_draws(model, test))

    def test_a_model_that_is_the_baseline_gains_nothing(self):
        train, validation, test = parts(normal_rows)
        fitted = fit_baseline(model_for(train), train, validation, (1,))
        weights, means, covariances = mixture_parameters(fitted.mixture)
        base = FullMixture(2, 1, learned=False).double().set_(weights, means, covariances)
        same = Flow(Chain(fitted.encoder.first), base).eval()
        found = baselines(same, test, train, validation)[0]
        assert abs(found.gain) < 1e-9
        assert found.gain_error < 1e-9

    def test_many_rows_are_not_all_fitted(self, monkeypatch):
        monkeypatch.setattr(sys.modules[Baseline.__module__], "FIT_ROWS", 200)
        train, validation, test = parts(normal_rows)
        assert [b.fitted for b in baselines(model_for(train), test, train, validation)] == [200, 200]

    def test_in_words(self):
        found = Baseline("Gaussian", 1, 23.41, 0.1, 0.61, 0.08, 100)
        assert str(found) == "Gaussian 23.410 nats; the model is better by 0.610 ± 0.080"
        assert "the model is worse by 0.610" in str(Baseline("Gaussian", 1, 23.41, 0.1, -0.61, 0.08, 100))

    def test_random_numbers_of_the_caller_stay(self):
        train, validation, test = parts(normal_rows, n=(60, 30, 20))
        model = model_for(train)
        torch.manual_seed(5)
        baselines(model, test, train, validation)
        after = torch.rand(3)
        torch.manual_seed(5)
        assert torch.equal(after, torch.rand(3))

    def test_evaluate_adds_them_if_there_are_rows_to_fit(self):
        train, validation, test = parts(normal_rows, n=(300, 60, 40))
        model = model_for(train)
        content = evaluate(model, test, fitting=Splits(train, validation, None))
        assert content["baselines"][0]["components"] == 1
        assert "baselines" not in evaluate(model, test)

    def test_refuses(self):
        wide = rows(np.random.default_rng(0).normal(size=(80, 65)))
        flow = Flow(Chain(), DiagonalNormal(65)).eval()
        with pytest.raises(
            ValueError, match="there are no baselines: they are for rows of up to 64 columns; these have 65."
        ):
            baselines(flow, wide, wide, wide)
        images = Dataset(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), None, Schema((1, 2, 2), 4))
        with pytest.raises(ValueError, match="there are no baselines: they are for densities of rows, not of images."):
            baselines(flow, images, images, images)


def test_the_command_shows_and_saves_them_or_says_why_not(call, tmp_path):
    path, folder = tmp_path / "a.csv", tmp_path / "run"
    np.savetxt(path, np.random.default_rng(0).normal(size=(80, 2)), delimiter=",", header="a,b", comments="")
    assert call("train", path, "--set", "training.steps=1", "--set", "network.blocks=[1]", "--out", folder)[0] == 0
    code, out = call("evaluate", folder)
    assert code == 0
    assert "\nbaseline Gaussian " in out
    assert "\nbaseline mixture of " in out
    assert "training rows, columns prepared as for the model; validation" in out
    saved = json.loads((folder / "evaluation.json").read_text())["baselines"]
    assert [baseline["components"] > 1 for baseline in saved] == [False, True]
    path.rename(tmp_path / "b.csv")
    code, out = call("evaluate", folder, "--data", tmp_path / "b.csv")
    assert code == 0
    assert "No baselines: the training rows cannot be read: " in out
    assert "\nbaseline " not in out

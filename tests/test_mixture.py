"""A base fitted by EM before training: it starts at the mixture, keeps what it was given, and is never fitted again."""

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.mixture import GaussianMixture

from iresnet import FullMixture, load
from iresnet.data import Dataset, Schema, Splits
from iresnet.models import Network, build, mixture
from iresnet.models.mixture import COMPONENTS, best_mixture, fit_mixture, suits_better
from iresnet.presets import PRESETS
from iresnet.progress import listening
from iresnet.run import Run, pilot, resume, start
from iresnet.train import checkpoint
from iresnet.transforms.preprocess import Standardise
from iresnet.transforms.spline import ColumnSpline, fit_columns

SCHEMA = Schema((3,))
NETWORK = Network(
    blocks=(2,), width=8, preprocessing="standardise", covariance="full", components=0, normalisation="none",
    last_scale=0.01,
)  # fmt: skip


def clusters(n, seed=0, d=3):
    """Two correlated clusters in units of their own."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.tensor([[1.0, 0.0, 0.0], [0.9, 0.3, 0.0], [-0.5, 0.2, 0.4]])[:d, :d]
    side = torch.randint(2, (n, 1), generator=generator) * 8.0 - 4
    return 5 + 3 * (torch.randn(n, d, generator=generator) @ a.T + side)


def nats(flow, x):
    with torch.no_grad():
        return -float(flow.eval().log_prob(x).mean())


class TestChoice:
    def test_the_number_of_clusters_is_found(self):
        assert best_mixture(clusters(600), clusters(600, seed=1), COMPONENTS).n_components == 2

    def test_more_components_than_needed_cost_little(self):
        """One normal: the entropy of the plane is ln(2 pi e)."""
        x = torch.randn(9000, 2, generator=torch.Generator().manual_seed(0)).double()
        found = best_mixture(x[:1500], x[1500:2000], COMPONENTS)
        truth = 0.5 * x[2000:].square().sum(1).mean() + np.log(2 * np.pi)
        assert -found.score(x[2000:].numpy()) < float(truth) + 0.02

    def test_a_few_rows_are_enough(self):
        assert best_mixture(clusters(3), clusters(1), COMPONENTS).n_components == 1

    def test_work_grows_with_columns_so_that_wide_tables_get_few_components(self):
        x = torch.randn(1200, 400, generator=torch.Generator().manual_seed(0))
        assert best_mixture(x[:1000], x[1000:], (1, 50)).n_components == 1

    def test_few_codes_are_held_out_in_turn(self):
        """Four held-out codes alone would accept a component for each."""
        x, few = clusters(200), clusters(4, seed=1)
        assert best_mixture(x, few, COMPONENTS).n_components <= 3

    def test_too_few_samples_are_refused(self):
        with pytest.raises(ValueError, match="a mixture of 5 normals cannot be fitted to 6 samples. Use fewer"):
            best_mixture(clusters(6), clusters(6), (5,))

    def test_splines_are_used_where_they_help(self):
        """They make bounded columns normal; of correlated clusters, which a mixture fits, they would make curves."""
        bounded = torch.rand(1500, 3, generator=torch.Generator().manual_seed(0))
        for x, expected in ((bounded, True), (clusters(1500), False)):
            x = Standardise.fit(x)(x)
            spline, identity = fit_columns(x[:1000], 16, x[1000:]), ColumnSpline(3, 16)
            assert suits_better(spline, identity, x[:1000], x[1000:]) is expected


class TestOutliers:
    """Normal columns, but of held-out rows one in fifty is six times as large."""

    def likelihoods(self, share):
        """The mean log-likelihood of test rows by a base of one normal with a wide component, and by one normal."""
        generator = torch.Generator().manual_seed(0)
        x, held_out, test = (torch.randn(1000, 2, generator=generator) for _ in range(3))
        for part in (held_out, test):
            part[: round(share * 1000)] *= 6
        base = fit_mixture(partial(FullMixture, 2, learned=False), x, held_out, 1)
        one = torch.distributions.MultivariateNormal(x.mean(0), torch.cov(x.T))
        return float(base.log_prob(test).mean()), float(one.log_prob(test).mean()), base

    def test_a_wide_component_covers_them(self):
        found, one, base = self.likelihoods(0.02)
        assert found > one + 0.3
        assert base.weight_logits.softmax(0)[-1].item() == pytest.approx(0.02, abs=0.011)

    def test_without_them_it_costs_next_to_nothing(self):
        found, one, _ = self.likelihoods(0.0)
        assert found > one - 0.005


class TestBuild:
    def test_a_model_starts_at_the_mixture(self):
        """Before its first step, the density is as good as scikit-learn's own fit, in the units of the data."""
        x, held_out, test = (clusters(500, seed) for seed in range(3))
        torch.manual_seed(0)
        flow = build(NETWORK, SCHEMA, "density", x, held_out)
        truth = GaussianMixture(2, random_state=0).fit(x.double().numpy())
        assert flow.base.components == 2 + 1  # the last one is wide
        assert nats(flow, test) == pytest.approx(-truth.score(test.double().numpy()), abs=0.02)

    def test_a_given_number_of_components_is_kept(self):
        torch.manual_seed(0)
        flow = build(replace(NETWORK, components=4), SCHEMA, "density", clusters(300))
        assert flow.base.components == 4 + 1
        assert isinstance(flow.base, FullMixture)

    def test_actnorms_are_initialised_on_the_same_rows(self):
        x, test = clusters(500), clusters(500, seed=2)
        torch.manual_seed(0)
        flow = build(replace(NETWORK, normalisation="actnorm", spline_bins=8), SCHEMA, "density", x)
        before = nats(flow, test)
        flow.train()(x[:10] * 100)  # a first batch in training would initialise them again
        assert nats(flow, test) == before

    def test_weights_are_loaded_without_data(self):
        x = clusters(300)
        torch.manual_seed(0)
        flow = build(replace(NETWORK, spline_bins=8), SCHEMA, "density", x, clusters(200, seed=1))
        again = build(replace(NETWORK, spline_bins=8, components=flow.base.components - 1), SCHEMA, "density")
        again.load_state_dict(flow.state_dict())
        assert nats(again, x) == nats(flow, x)

    def test_a_hybrid_has_it_and_a_classifier_has_none(self):
        schema = Schema((3,), classes=("a", "b"))
        assert isinstance(build(NETWORK, schema, "hybrid", clusters(100)).base, FullMixture)
        assert not hasattr(build(NETWORK, schema, "classification", clusters(100)), "base")

    def test_an_open_number_needs_data(self):
        with pytest.raises(ValueError, match="components must be at least 1 without data to choose it on; got 0"):
            build(NETWORK, SCHEMA, "density")

    def test_very_wide_tables_are_refused(self):
        with pytest.raises(ValueError, match='at most 1,000 columns; got 1,001. Use covariance = "diagonal" with'):
            build(NETWORK, Schema((1001,)), "density", torch.randn(5, 1001))

    def test_images_are_refused(self):
        with pytest.raises(ValueError, match='covariance = "full" is for tables; got images'):
            build(replace(NETWORK, components=2), Schema((1, 4, 4), levels=2), "density")


def test_standardised_codes_are_what_the_spline_sees():
    x = clusters(400)
    torch.manual_seed(0)
    flow = build(replace(NETWORK, spline_bins=8, covariance="diagonal", components=1), SCHEMA, "density", x)
    standardise, spline = flow.transform[0]
    assert isinstance(standardise, Standardise)
    assert float(spline.knots.abs().max()) < 20
    np.testing.assert_allclose(flow.transform[0](x).mean(0).numpy(), 0, atol=0.1)


@pytest.fixture(autouse=True)
def few_numbers(monkeypatch):
    """Fewer numbers of components are tried: for time."""
    monkeypatch.setattr(mixture, "COMPONENTS", (1, 2, 3))
    monkeypatch.setattr(mixture, "PILOT_COMPONENTS", (1, 2))


def splits():
    return Splits(*(Dataset(clusters(n, seed), None, SCHEMA) for seed, n in enumerate((120, 80, 10))))


def experiment(**training):
    settings = {"steps": 8, "epochs": 0, "batch": 32, "validate_every": 1, "save_every": 2, "warmup": 1} | training
    preset = PRESETS["table-density"]
    return replace(preset, network=replace(NETWORK, spline_bins=4), training=replace(preset.training, **settings))


class TestRun:
    def test_the_chosen_number_is_written_into_the_settings(self, tmp_path):
        start(experiment(), tmp_path / "run", splits=splits())
        assert Run.open(tmp_path / "run").experiment.network.components == 2
        assert isinstance(load(tmp_path / "run").base, FullMixture)

    def test_a_mixture_that_no_step_improves_is_released(self, tmp_path):
        """Large steps ruin it; what is released is the mixture itself, of step 0."""
        result = start(experiment(learning_rate=0.5, steps=4, average=0.0), tmp_path / "run", splits=splits())
        assert result.run.best_metrics()["step"] == 0
        log = result.run.log()
        assert [row["step"] for row in log] == [0, 1, 2, 3, 4]
        assert log[0]["validation nats"] == pytest.approx(result.run.best_metrics()["validation nats"])
        assert (log[0]["nats"], log[0]["learning_rate"]) == (None, None)
        torch.manual_seed(0)
        untrained = build(result.run.experiment.network, SCHEMA, "density", *(splits().train.x, splits().validation.x))
        x = splits().test.x
        assert nats(load(tmp_path / "run"), x) == pytest.approx(nats(untrained, x), abs=1e-3)

    def test_it_continues_bit_for_bit_and_is_not_fitted_again(self, tmp_path, monkeypatch):
        start(experiment(), tmp_path / "whole", splits=splits())
        calls = iter(range(100))
        start(experiment(), tmp_path / "parts", splits=splits(), stop=lambda: next(calls) == 3)
        monkeypatch.setattr(Run, "splits", lambda self: splits())
        monkeypatch.setattr(mixture, "best_mixture", lambda *_: pytest.fail("fitted again"))
        assert resume(tmp_path / "parts").finished
        for file in ("last", "best", "model"):
            whole, parts = (checkpoint.load(tmp_path / f / f"{file}.safetensors").tensors for f in ("whole", "parts"))
            assert [row["step"] for row in Run.open(tmp_path / "parts").log()] == list(range(9))
            assert all(torch.equal(whole[g][name], t) for g, named in parts.items() for name, t in named.items())


class TestPilot:
    """Which of two starts is trained: the mixture, or one normal."""

    def chosen(self, monkeypatch, losses, *, components=0, samples=100, steps=500):
        monkeypatch.setattr(pilot, "MIN_SAMPLES", samples)
        monkeypatch.setattr(pilot, "_pilot", lambda _, __, model, ___: -losses[model.base.components - 1])
        one = experiment(steps=steps)
        one = replace(one, network=replace(one.network, components=components))
        return pilot.build_start(one, splits()).base.components - 1

    @pytest.mark.slow
    def test_one_normal_is_trained_if_it_is_clearly_ahead(self, monkeypatch):
        noise = torch.randn(100, generator=torch.Generator().manual_seed(0))
        noise = (noise - noise.mean()) / noise.std()  # standard error 0.1
        mixture = torch.zeros(100)
        assert self.chosen(monkeypatch, {2: mixture, 1: noise - 0.19}) == 2
        assert self.chosen(monkeypatch, {2: mixture, 1: noise - 0.21}) == 1
        assert self.chosen(monkeypatch, {2: mixture, 1: noise + 1}) == 2

    @pytest.mark.parametrize("options", [{"components": 2}, {"samples": 121}, {"steps": 400}])
    def test_a_given_number_few_samples_or_few_steps_need_none(self, monkeypatch, options):
        assert self.chosen(monkeypatch, {}, **options) == 2

    @pytest.mark.slow
    def test_it_trains_a_copy(self, monkeypatch):
        monkeypatch.setattr(pilot, "PILOT_STEPS", 3)
        monkeypatch.setattr(pilot, "MIN_SAMPLES", 100)
        torch.manual_seed(0)
        said = list[tuple[float, str]]()
        with listening(lambda fraction, phase: said.append((fraction, phase))):
            found = pilot.build_start(experiment(steps=5), splits())
        assert list(dict.fromkeys(phase for _, phase in said)) == [
            "fitting a mixture of Gaussians", "comparing one Gaussian with a mixture",
        ]  # fmt: skip
        compared = [fraction for fraction, phase in said if phase.startswith("comparing")]
        assert compared == sorted(compared)
        assert len(set(compared)) >= 11  # nothing; of two pilots, each its start, three steps and its end
        alone = pilot._build(experiment(), splits(), found.base.components - 1)
        assert all(torch.equal(a, b) for a, b in zip(found.parameters(), alone.parameters(), strict=True))

    @pytest.mark.parametrize("learning_rate", [1e-6, 0.5])
    def test_it_returns_validation_likelihoods_of_start_or_end(self, monkeypatch, learning_rate):
        """Tiny steps leave them as they were; large ones ruin them, and the start counts."""
        monkeypatch.setattr(pilot, "PILOT_STEPS", 2)
        slow = experiment(learning_rate=learning_rate, average=0.0)
        model = pilot._build(slow, splits(), 2)
        with torch.no_grad():
            before = copy.deepcopy(model).eval().log_prob(splits().validation.x).double()
        torch.testing.assert_close(pilot._pilot(slow, splits(), model, lambda: False), before, atol=1e-2, rtol=0)

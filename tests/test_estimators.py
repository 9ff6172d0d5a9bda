"""Estimators with scikit-learn's API: what they return, what they promise, and that a run folder is the same thing."""

import copy
import csv
import io
import pickle
import subprocess
import sys
import warnings
from functools import cache

import joblib  # type: ignore[import-untyped]
import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OrdinalEncoder, StandardScaler

from iresnet import FullMixture, run
from iresnet.estimators import (
    ConditionalFlowDensity,
    FlowClassifier,
    FlowDensity,
    FlowOutlierDetector,
    FlowTransformer,
)
from iresnet.estimators.base import FlowEstimator
from iresnet.run import Run

from .runs import trained
from .zoo import constrained_layers

#: A network that starts at one normal: EM would take longer than all else.
PLAIN = {
    "covariance": "diagonal", "components": 1, "spline_bins": 0, "normalisation": "actnorm", "last_scale": 1.0,
    "activation": "elu", "validate_every": 20,
}  # fmt: skip
SMALL = {
    "blocks": 2, "width": 8, "max_steps": 30, "learning_rate": 1e-2, "random_state": 0, "settings": PLAIN,
}  # fmt: skip
TINY = {"blocks": 1, "width": 4, "max_steps": 3, "random_state": 0, "settings": PLAIN}
KINDS = [FlowDensity, FlowOutlierDetector, FlowTransformer, FlowClassifier, ConditionalFlowDensity]


def normal(n=300, d=2, seed=0):
    return np.random.default_rng(seed).normal(size=(n, d))


def skewed(n=400, seed=0):
    """Two columns, the second of which depends on the first."""
    a = normal(n, 2, seed)
    return np.column_stack([np.exp(a[:, 0] / 2), 10 + a[:, 0] ** 2 + a[:, 1]])


def target(X):
    """A number per row; or, as a column, its sign."""
    return X[:, 0] + 0.3 * np.sin(7 * X[:, -1])


def fitted(kind, X, **parameters):
    settings = {**PLAIN, **parameters.pop("settings", {})}
    model = kind(**{**SMALL, **parameters, "settings": settings})
    if kind is FlowClassifier:
        return model.fit(X, np.where(target(X) > np.median(target(X)), "high", "low"))
    return model.fit(X, target(X)) if kind is ConditionalFlowDensity else model.fit(X)


@cache
def example(kind):
    """A fitted estimator. Do not change it."""
    return fitted(kind, skewed())


def outputs(model, X):
    """What an estimator returns for rows."""
    if isinstance(model, ConditionalFlowDensity):
        return np.column_stack([model.log_prob(X, target(np.asarray(X))), model.quantiles(X)])
    if isinstance(model, FlowClassifier):
        return np.column_stack([model.predict_proba(X), model.score_samples(X)])
    return model.transform(X) if isinstance(model, FlowTransformer) else model.score_samples(X)


@pytest.mark.parametrize("kind", KINDS)
class TestEveryEstimator:
    def test_what_is_known_after_fitting(self, kind):
        model = example(kind)
        assert model.certificate_.passed
        assert model.n_features_in_ == 2
        assert model.n_steps_ == 30
        assert model.validation_scores_.shape == (2,)  # of steps 20 and 30
        assert not hasattr(model, "feature_names_in_")
        assert next(model.model_.parameters()).dtype == torch.float64

    def test_an_unfitted_one_says_so(self, kind):
        with pytest.raises(NotFittedError):
            outputs(kind(), skewed(5))
        with pytest.raises(NotFittedError):
            kind().save("nowhere")

    def test_it_has_the_parameters_of_the_base(self, kind):
        assert set(FlowEstimator().get_params()) <= set(kind().get_params())

    def test_clone_and_parameters(self, kind):
        model = clone(example(kind))
        assert model.get_params() == example(kind).get_params()
        assert model.set_params(width=16).width == 16
        assert not hasattr(model, "model_")

    @pytest.mark.parametrize("way", ["pickle", "joblib", "deepcopy"])
    def test_a_copy_is_the_same(self, kind, way):
        model, file = example(kind), io.BytesIO()
        if way == "joblib":
            joblib.dump(model, file)
            file.seek(0)
        twin = {
            "pickle": lambda: pickle.loads(pickle.dumps(model)),
            "joblib": lambda: joblib.load(file),
            "deepcopy": lambda: copy.deepcopy(model),
        }[way]()
        X = skewed(20, seed=1)
        assert np.array_equal(outputs(twin, X), outputs(model, X))
        assert str(twin.certificate_) == str(model.certificate_)

    def test_the_same_random_state_gives_the_same_model(self, kind):
        X = skewed(40)
        torch.manual_seed(3)
        before = torch.get_rng_state(), np.random.get_state()[1].tolist()
        first, again = fitted(kind, X, **TINY), fitted(kind, X, **TINY)
        other = fitted(kind, X, **{**TINY, "random_state": np.random.RandomState(1)})
        assert np.array_equal(outputs(first, X), outputs(again, X))
        assert not np.array_equal(outputs(first, X), outputs(other, X))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert np.random.get_state()[1].tolist() == before[1]

    def test_a_row_has_the_same_output_in_every_batch(self, kind):
        X = skewed(8, seed=2)
        whole, alone = outputs(example(kind), X), [outputs(example(kind), X[i : i + 1]) for i in range(8)]
        assert np.allclose(whole, np.concatenate(alone), rtol=1e-10, atol=1e-10)

    def test_equal_weights_change_nothing(self, kind):
        X, y = skewed(60), target(skewed(60)) > 0.5
        plain, equal = kind(**TINY).fit(X, y), kind(**TINY).fit(X, y, sample_weight=np.full(60, 2.5))
        assert np.array_equal(outputs(plain, X), outputs(equal, X))

    def test_rows_of_weight_zero_do_not_count(self, kind):
        X, y, kept = skewed(60), target(skewed(60)) > 0.5, np.arange(60) % 3 > 0
        X[~kept] *= 1000
        weighted = kind(**TINY).fit(X, y, sample_weight=kept.astype(int))
        assert np.array_equal(outputs(weighted, X[kept]), outputs(kind(**TINY).fit(X[kept], y[kept]), X[kept]))

    def test_a_table_of_few_rows(self, kind):
        X = skewed(10)
        model = fitted(kind, X, **TINY)
        assert [model.trained_.data[part]["rows"] for part in ("train", "validation")] == [8, 2]
        assert np.isfinite(outputs(model, X)).all()
        with pytest.raises(ValueError, match=r"4 sample\(s\).* minimum of 5 is required"):
            fitted(kind, X[:4], **TINY)
        with pytest.raises(ValueError, match="at least 5 rows must have a positive weight; got 4. Add rows."):
            kind(**TINY).fit(X, np.arange(10) % 2, sample_weight=np.arange(10) < 4)

    def test_names_of_columns(self, kind):
        X = pd.DataFrame(skewed(60), columns=["length", "mass"])
        y = (X["length"] > 1).rename("sort") if kind is FlowClassifier else X["mass"].rename("price")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = kind(**TINY).fit(X, y)
            outputs(model, X)
        assert model.feature_names_in_.tolist() == ["length", "mass"]
        assert model.trained_.schema.columns[:2] == ("length", "mass")
        with pytest.raises(ValueError, match="feature names should match"):
            outputs(model, X.rename(columns={"mass": "weight"}))


class TestTraining:
    def test_columns_without_an_upper_bound_of_the_density_are_reported(self):
        X = np.column_stack([normal(60, 1), np.round(normal(60, 1)) / 7])
        with pytest.warns(UserWarning, match=r"column 'x1' is .* so its density as real has no upper bound. Leave it"):
            FlowDensity(**TINY).fit(X)
        with pytest.warns(UserWarning, match="column 'x1' follows from 'x0' in all 51 training rows"):
            FlowDensity(**TINY).fit(np.column_stack([X[:, 0], 2 * X[:, 0]]))

    def test_patience_ends_it_early(self):
        model = fitted(FlowDensity, normal(60), max_steps=2000, patience=2, settings={"validate_every": 5})
        assert model.n_steps_ < 1000
        best = int(model.validation_scores_.argmax())
        assert len(model.validation_scores_) == best + 3

    def test_a_time_limit_ends_it_early(self):
        model = fitted(FlowDensity, normal(), max_steps=10**6, max_time=0.2)
        assert 1 <= model.n_steps_ < 1000
        assert model.certificate_.passed

    def test_rows_are_held_out(self):
        model = fitted(FlowDensity, normal(100), **TINY, validation_fraction=0.3)
        assert model.trained_.data["train"]["rows"] == 70
        assert model.trained_.data["validation"]["rows"] == 30

    def test_the_bar_is_shown_on_request(self, capsys):
        fitted(FlowDensity, normal(30), **TINY)
        assert capsys.readouterr().out == ""
        fitted(FlowDensity, normal(30), **TINY, verbose=True)
        assert "FlowDensity" in capsys.readouterr().out

    def test_threads_are_restored(self):
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            fitted(FlowDensity, normal(30), **TINY)
            assert torch.get_num_threads() == 2
        finally:
            torch.set_num_threads(before)

    @pytest.mark.parametrize(
        ("device", "sentence"),
        [
            ("cuda:99", "device 'cuda:99' is not available here. Use cpu, or auto."),
            ("mps", "device must be cpu, cuda, cuda:N or auto, since proofs need float64; got 'mps'."),
        ],
    )
    def test_a_device_that_is_not_there_is_refused(self, device, sentence):
        with pytest.raises(ValueError, match=sentence):
            fitted(FlowDensity, normal(30), **TINY, device=device)

    def test_auto_selects_a_device(self):
        chosen = "cuda" if torch.cuda.is_available() else "cpu"
        assert fitted(FlowDensity, normal(30), **TINY, device="auto").trained_.environment["device"] == chosen

    def test_a_certificate_is_that_of_the_model_as_it_is_now(self):
        model = fitted(FlowDensity, normal(30), max_steps=2)
        assert model.certificate_.passed
        for p in model.model_.transform.parameters():
            p.data.mul_(30)
        for layer in constrained_layers(model.model_):
            layer.parametrizations.weight[0].gradient.zero_()
        assert not model.certificate_.passed

    def test_settings_reach_the_network(self):
        model = fitted(FlowDensity, normal(30), max_steps=2, settings={"network.lipschitz": 0.5, "depth": 1})
        assert model.trained_.experiment.network.lipschitz == 0.5
        assert max(model.certificate_.lipschitz.values()) <= 0.5
        assert len(model.certificate_.layers) == 2 * 2  # of two blocks

    @pytest.mark.parametrize(
        ("parameters", "sentence"),
        [
            ({"preset": "tabel-density"}, "unknown preset 'tabel-density'. Did you mean 'table-density'"),
            ({"learning_rate": -1.0}, "the parameters: learning_rate must be positive; got -1.0."),
            ({"width": "wide"}, "the parameters: network.width must be an integer; got 'wide'."),
            ({"blocks": 0}, "the parameters: blocks"),
            ({"max_time": -1.0}, "the parameters: max_seconds must not be negative; got -1.0."),
            ({"validation_fraction": 1.5}, "validation must be a fraction in .0, 1. or a number of samples; got 1.5."),
            ({"settings": {"lipshitz": 0.9}}, "unknown setting 'lipshitz'. Did you mean 'lipschitz'"),
            ({"settings": ["lipschitz=0.8"]}, r"settings must be a dict, such as .*; got \['lipschitz=0.8'\]."),
            ({"settings": "lipschitz=0.8"}, r"settings must be a dict, .*; got 'lipschitz=0.8'."),
            ({"settings": {"data.drop": ["x0"]}}, "data.drop has no effect here: select the columns of X before fit."),
            ({"settings": {"context": ["x0"]}}, "data.context has no effect here: give these columns as X to a Cond"),
            ({"settings": {"data.missing": "drop"}}, "data.missing has no effect here: fill in missing cells, or"),
            ({"settings": {"data.labelled": 0.5}}, "data.labelled has no effect here: leave it out."),
        ],
    )
    def test_a_wrong_parameter_is_refused_by_fit(self, parameters, sentence):
        with pytest.raises(ValueError, match=sentence):
            FlowDensity(**{**SMALL, **parameters}).fit(normal(30))

    @pytest.mark.parametrize(
        ("X", "sentence"),
        [
            (np.ones((1, 2)), "1 sample"),
            (np.column_stack([np.arange(30.0), np.full(30, 7.0)]), "column 'x1' is 7 in all 26 training rows"),
            (np.array([[0.0, 1.0], [np.nan, 2.0]]), "NaN"),
            (1e9 + normal(30, 2), "X: column 'x0' holds numbers like 10000000.*do not fit float32. Subtract an offset"),
            (1e300 * normal(30, 2), "X: numbers must be finite and fit float32"),
        ],
    )
    def test_rows_without_a_density_are_refused(self, X, sentence):
        with pytest.raises(ValueError, match=sentence):
            FlowDensity(**SMALL).fit(X)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        ("cells", "sentence"),
        [
            (
                ["free", "pro"],
                r"column 'b' holds 'free', which is not a number. If it is a category, X\[\"b\"\].astype",
            ),
            ([None, "pro"], r'holds .pro., .* settings={"data.kinds": \["b=category"\]} says so; else leave it out'),
            (
                pd.to_datetime(["2020-01-01", "2020-01-02"]),
                "column 'b' holds '2020-01-01 00:00:00', which is not a num",
            ),
            (pd.to_datetime(["2020-01-01", None], utc=True), "Convert it to numbers, such as days, or leave it out."),
            (pd.to_timedelta([1, 2], unit="D"), "column 'b' holds '1 days 00:00:00', which is not a number."),
        ],
    )
    def test_columns_without_numbers_are_named(self, kind, cells, sentence):
        X = pd.DataFrame({"b": cells}).loc[np.arange(20) % 2]
        with pytest.raises(ValueError, match=sentence):
            kind(**TINY).fit(X, np.arange(20) % 2)
        X.insert(0, "a", 1.0)
        with pytest.raises(ValueError, match=sentence):
            kind(**TINY).fit(X, np.arange(20) % 2)

    def test_words_become_a_category_in_a_pipeline(self):
        X = pd.DataFrame({"length": normal(60, 1)[:, 0], "plan": np.tile(["free", "pro", "team"], 20)})
        encoder = make_column_transformer(
            (OrdinalEncoder(), ["plan"]), remainder="passthrough", verbose_feature_names_out=False
        )
        model = FlowDensity(**{**TINY, "settings": {**PLAIN, "data.kinds": ["plan=category"]}})
        pipeline = make_pipeline(encoder.set_output(transform="pandas"), model).fit(X)
        assert [kind.categories for kind in model.trained_.schema.kinds] == [("0", "1", "2"), ()]
        assert np.isfinite(pipeline.score(X))

    def test_numbers_of_any_type_are_taken(self):
        X = pd.DataFrame(normal(40), columns=["a", "b"])
        other = X.astype({"a": object, "b": "Float64"}).assign(b=X["b"].astype(str))
        assert np.allclose(FlowDensity(**TINY).fit(other).score(other), FlowDensity(**TINY).fit(X).score(X))
        with pytest.raises(ValueError, match="NaN"):
            FlowDensity(**TINY).fit(X.astype("Float64").mask(X["a"] > 1))

    @pytest.mark.parametrize("weights", [np.zeros(30), np.full(30, -1.0), np.ones(29)])
    def test_wrong_weights_are_refused(self, weights):
        with pytest.raises(ValueError, match="weight"):
            FlowDensity(**SMALL).fit(normal(30), sample_weight=weights)

    def test_weights_are_the_shares_of_the_rows(self):
        """Two groups, far apart; the second counts three times as much."""
        X = np.concatenate([normal(60, 1) - 4, normal(60, 1, seed=1) + 4])
        counts = np.repeat([1, 3], 60)
        settings = {**SMALL, "max_steps": 80, "learning_rate": 2e-2}
        weighted = FlowDensity(**settings).fit(X, sample_weight=counts / 7)
        repeated = FlowDensity(**settings).fit(X.repeat(counts, axis=0))
        grid = np.linspace(-15, 15, 3001)[:, None]
        shares = [np.trapezoid(np.exp(m.score_samples(grid[1500:])), grid[1500:, 0]) for m in (weighted, repeated)]
        assert shares == pytest.approx([0.75, 0.75], abs=0.06)


@cache
def lognormal():
    return fitted(FlowDensity, np.exp(normal(300, 1)), max_steps=60)


class TestPresets:
    @pytest.mark.slow
    def test_a_density_starts_at_a_mixture_of_normals(self, tmp_path):
        """`table-density` as it is: EM, splines and kinds of columns reach the estimators."""
        X = np.concatenate([normal(40) - 4, normal(40, seed=1) + 4])
        model = FlowDensity(blocks=1, width=4, max_steps=2, random_state=0).fit(X)
        base = model.model_.base
        assert isinstance(base, FullMixture)
        assert base.components == model.trained_.experiment.network.components + 1 > 2  # one is wide, for outliers
        assert model.certificate_.passed
        assert model.score(X) > stats.multivariate_normal(X.mean(0), np.cov(X.T)).logpdf(X).mean() + 0.5
        again = FlowDensity.from_run(model.save(tmp_path / "run"))
        assert np.allclose(again.score_samples(X), model.score_samples(X))


@pytest.mark.slow
def test_few_rows_are_not_learned_by_heart():
    """With the preset as it is, new rows are about as likely as by the normal distribution that has their moments."""
    for seed in range(3):
        X, new = normal(15, seed=seed), normal(2000, seed=99)
        model = FlowDensity(random_state=seed).fit(X)
        assert model.score(new) > stats.multivariate_normal(X.mean(0), np.cov(X.T)).logpdf(new).mean() - 2


class TestDensity:
    def test_it_integrates_to_one(self):
        model, grid = lognormal(), np.linspace(-20, 40, 6001)
        values = np.exp(model.score_samples(grid[:, None]))
        assert np.trapezoid(values, grid) == pytest.approx(1, abs=1e-3)

    def test_it_is_in_the_units_of_the_data(self):
        X, scale = normal(), np.array([1024.0, 2**-4])  # powers of two, which change no rounding
        plain, scaled = fitted(FlowDensity, X), fitted(FlowDensity, scale * X)
        expected = plain.score_samples(X) - np.log(scale).sum()
        assert scaled.score_samples(scale * X) == pytest.approx(expected, abs=1e-9)

    def test_it_learns_a_normal_distribution(self):
        model, new = fitted(FlowDensity, normal(1000), max_steps=60), normal(1000, seed=1)
        assert model.score(new) == pytest.approx(stats.norm.logpdf(new).sum(axis=1).mean(), abs=0.05)
        assert model.score(new) == pytest.approx(model.score_samples(new).mean())

    def test_samples_have_its_distribution(self):
        model, grid = lognormal(), np.linspace(-20, 40, 6001)
        density = np.exp(model.score_samples(grid[:, None]))
        drawn = model.sample(4000, random_state=0)[:, 0]
        mean = np.trapezoid(grid * density, grid)
        assert drawn.mean() == pytest.approx(mean, abs=4 * drawn.std() / np.sqrt(4000))
        assert np.array_equal(drawn, model.sample(4000, random_state=0)[:, 0])
        with pytest.raises(ValueError, match="n_samples must be at least 1; got 0"):
            model.sample(0)

    def test_in_a_pipeline_and_a_grid_search(self):
        X = skewed(80)
        pipeline = make_pipeline(StandardScaler(), FlowDensity(**TINY)).fit(X)
        assert np.isfinite(pipeline.score_samples(X)).all()
        search = GridSearchCV(FlowDensity(**TINY), {"width": np.array([2, 4])}, cv=2).fit(X)
        assert search.best_params_["width"] in (2, 4)
        assert search.best_estimator_.certificate_.passed

    def test_more_than_64_columns(self):
        X = normal(60, 70)
        model = FlowDensity(**{**TINY, "max_steps": 2}).fit(X)
        scores = model.score_samples(X[:4])
        assert np.allclose(scores[[2, 0]], model.score_samples(X[[2, 0]]), rtol=1e-9)


class TestOutliers:
    def test_the_rows_of_lowest_density(self):
        X = skewed()
        model = FlowOutlierDetector(**SMALL, contamination=0.1).fit(X)
        scores = model.score_samples(X)
        assert (model.predict(X) == -1).sum() == 40
        assert scores[model.predict(X) == -1].max() < scores[model.predict(X) == 1].min()
        assert np.allclose(model.decision_function(X), scores - model.offset_)
        assert model.predict([[-50.0, -50.0]]).tolist() == [-1]

    def test_the_contamination_is_a_share_of_the_weights(self):
        X, weights = skewed(), np.linspace(0, 1, 400)
        model = FlowOutlierDetector(**SMALL, contamination=0.3).fit(X, sample_weight=weights)
        share = weights[model.predict(X) == -1].sum() / weights.sum()
        assert 0.29 < share <= 0.3

    def test_auto_is_a_quantile_over_rows_that_were_held_out(self):
        model = example(FlowOutlierDetector)
        held_out = model.trained_.reference.numpy()
        assert model.offset_ == pytest.approx(np.percentile(held_out, 1))
        assert (model.predict(skewed(4000, seed=1)) == -1).mean() < 0.06  # of new rows like those in training

    def test_a_model_that_was_changed_has_no_outliers(self):
        """Its rows were compared with log-densities of the model before."""
        model, X = copy.deepcopy(example(FlowOutlierDetector)), skewed(20)
        with torch.no_grad():
            next(model.model_.parameters()).mul_(3)
        for method in (model.predict, model.decision_function, model.anomaly):
            with pytest.raises(ValueError, match="weights of model_ have changed since the fit.*Fit again"):
                method(X)
        assert np.isfinite(model.score_samples(X)).all()

    @pytest.mark.parametrize("contamination", [0, -0.1, 0.6, "often"])
    def test_it_lies_in_0_to_one_half(self, contamination):
        with pytest.raises(ValueError, match=r"contamination must be 'auto' or in \(0, 0.5\]; got"):
            FlowOutlierDetector(contamination=contamination).fit(normal(30))


class TestClassifier:
    @pytest.mark.parametrize(
        "names", [[0, 1], [False, True], ["10", "9"], ["no", "yes"], [2.0, 10.0], ["1", "1.0"], ["a", "nan"]]
    )
    def test_classes_of_every_type(self, names):
        X = np.concatenate([normal(40) - 5, normal(40, seed=1) + 5])
        y = np.array(names)[np.repeat([0, 1], 40)]
        model = FlowClassifier(**SMALL).fit(X, y)
        assert model.classes_.tolist() == np.unique(y).tolist()
        assert (model.predict(X) == y).all()
        assert model.predict(X).dtype == y.dtype
        assert model.score(X, y) == 1

    def test_probabilities_and_density(self):
        X, model = skewed(), example(FlowClassifier)
        assert np.allclose(model.predict_proba(X).sum(axis=1), 1)
        assert np.allclose(np.log(model.predict_proba(X)), model.predict_log_proba(X))
        with torch.no_grad():
            log_prob, logits = model.model_(torch.from_numpy(X.astype(np.float32)).double())
        assert np.allclose(model.score_samples(X), log_prob)
        assert np.allclose(model.predict_proba(X), logits.softmax(1))
        assert model.sample(3, random_state=0).shape == (3, 2)

    def test_a_network_that_only_classifies(self):
        model = fitted(FlowClassifier, skewed(60), **TINY, preset="table-classifier")
        assert model.predict_proba(skewed(5)).shape == (5, 2)
        assert model.validation_scores_.min() >= 0
        for method in (model.score_samples, model.sample):
            with pytest.raises(ValueError, match="this model only classifies"):
                method(*[skewed(5)] * (method == model.score_samples))

    def test_a_density_is_no_classifier(self):
        with pytest.raises(ValueError, match="FlowClassifier needs a preset with objective.kind hybrid or classificat"):
            fitted(FlowClassifier, skewed(60), preset="table-density")

    def test_steps_that_are_text_are_refused(self):
        with pytest.raises(ValueError, match="training.steps must be an integer; got '30'"):
            FlowClassifier(max_steps="30").fit(skewed(30), np.arange(30) % 2)

    def test_one_class_is_refused(self):
        with pytest.raises(ValueError, match="at least two classes; y has only 1 class"):
            FlowClassifier().fit(normal(30), np.ones(30))

    def test_a_column_with_the_name_of_the_label(self):
        X = pd.DataFrame(skewed(60), columns=["y", "class"])
        assert FlowClassifier(**TINY).fit(X, X["y"] > 1).trained_.schema.label == "label"

    @pytest.mark.parametrize("names", [[-1, 3], [False, True], ["a", "b"], [2.0, 10.0]])
    def test_classes_come_back_from_a_folder(self, names, tmp_path):
        X = np.concatenate([normal(40) - 5, normal(40, seed=1) + 5])
        model = FlowClassifier(**SMALL).fit(X, np.array(names)[np.repeat([0, 1], 40)])
        again = FlowClassifier.from_run(model.save(tmp_path / "run"))
        assert again.classes_.tolist() == names
        assert again.predict(X).tolist() == model.predict(X).tolist()


class TestTransformer:
    def test_codes_are_inverted(self):
        X, model = skewed(), example(FlowTransformer)
        codes = model.transform(X)
        assert codes.shape == X.shape
        assert np.allclose(model.inverse_transform(codes), X, rtol=1e-6)
        with pytest.raises(ValueError, match="X has 3 features, but codes of FlowTransformer have 2"):
            model.inverse_transform(np.ones((2, 3)))

    def test_it_gives_pandas_tables(self):
        X = pd.DataFrame(skewed(60), columns=["a", "b"], index=range(5, 65))
        codes = FlowTransformer(**TINY).set_output(transform="pandas").fit_transform(X)
        assert codes.columns.tolist() == ["flowtransformer0", "flowtransformer1"]
        assert codes.index.tolist() == X.index.tolist()

    def test_the_density_is_that_of_the_codes(self):
        """ln p(x) = ln p(z) + ln |det dz/dx|, by finite differences."""
        model, x, h = example(FlowTransformer), skewed(1), 1e-2
        ends = [model.transform(x + sign * h * e) for e in np.eye(2) for sign in (1, -1)]
        jacobian = np.concatenate([(ends[0] - ends[1]), (ends[2] - ends[3])]) / (2 * h)
        base = model.model_.base.log_prob(torch.from_numpy(model.transform(x))).item()
        expected = base + np.log(abs(np.linalg.det(jacobian)))
        assert model.score_samples(x)[0] == pytest.approx(expected, abs=1e-3)
        assert model.score(x) == model.score_samples(x)[0]


class TestConditional:
    def test_the_density_is_the_derivative_of_the_distribution_function(self):
        X, model, h = skewed(50), example(ConditionalFlowDensity), 1e-2
        slope = (model.cdf(X, target(X) + h) - model.cdf(X, target(X) - h)) / (2 * h)
        assert np.allclose(slope, np.exp(model.log_prob(X, target(X))), atol=2e-3)

    def test_quantiles_are_the_inverse_of_the_distribution_function(self):
        X, model = skewed(50), example(ConditionalFlowDensity)
        quantiles = model.quantiles(X, [0.01, 0.3, 0.99])
        assert (np.diff(quantiles, axis=1) > 0).all()
        for i, level in enumerate((0.01, 0.3, 0.99)):
            assert np.allclose(model.cdf(X, quantiles[:, i]), level, atol=1e-5)
        assert np.allclose(model.quantiles(X, 0.3), quantiles[:, 1])

    @pytest.mark.parametrize("settings", [{"components": 3}, {"covariance": "full", "components": 2}])
    def test_quantiles_of_a_mixture(self, settings):
        X = skewed(80)
        model = fitted(ConditionalFlowDensity, X, **{**TINY, "settings": settings})
        assert np.allclose(model.cdf(X, model.quantiles(X, 0.2)), 0.2, atol=1e-5)

    def test_a_transform_that_decreases(self):
        X, model = skewed(20), copy.deepcopy(example(ConditionalFlowDensity))
        first = model.model_.transform.transform[0]
        before, level = model.cdf(X, 2 * float(first.mean[0]) - target(X)), model.quantiles(X, 0.3)
        first.std.neg_()  # the density of the mirror image
        assert np.allclose(model.cdf(X, target(X)), 1 - before, atol=1e-6)
        assert np.allclose(model.quantiles(X, 0.7), 2 * float(first.mean[0]) - level, atol=1e-6)

    def test_samples_have_these_quantiles(self):
        model, X = example(ConditionalFlowDensity), skewed(3)
        drawn = model.sample(X, 4000, random_state=0)
        assert drawn.shape == (3, 4000)
        below = (drawn[:, :, None] < model.quantiles(X, [0.1, 0.5])[:, None, :]).mean(axis=1)
        assert np.allclose(below, [0.1, 0.5], atol=4 * 0.5 / np.sqrt(4000))

    def test_it_depends_on_the_rows(self):
        X = normal(600)
        y = 100 + 10 * (2 * X[:, 0] + np.exp(X[:, 1] / 2) * normal(600, 1, seed=5)[:, 0])
        model = ConditionalFlowDensity(**{**SMALL, "width": 16, "max_steps": 80, "learning_rate": 2e-2}).fit(X, y)
        assert np.corrcoef(model.quantiles(X, 0.5), X[:, 0])[0, 1] > 0.95
        width = np.diff(model.quantiles(X, [0.25, 0.75]))[:, 0]
        assert np.corrcoef(width, X[:, 1])[0, 1] > 0.7
        marginal = stats.norm.logpdf(y, y.mean(), y.std()).mean()
        assert model.score(X, y) > marginal + 0.3

    def test_it_predicts_the_median(self):
        X, model = skewed(60), example(ConditionalFlowDensity)
        assert np.array_equal(model.predict(X), model.quantiles(X, 0.5))
        errors = cross_val_score(
            ConditionalFlowDensity(**TINY), X, target(X), cv=2, scoring="neg_mean_absolute_error", error_score="raise"
        )
        assert (errors < 0).all()

    def test_the_score_may_have_weights(self):
        X, model, weights = skewed(6), example(ConditionalFlowDensity), [2, 0, 1, 1, 3, 1]
        repeated = X.repeat(weights, axis=0)
        expected = model.score(repeated, target(repeated))
        assert model.score(X, target(X), sample_weight=weights) == pytest.approx(expected)
        with pytest.raises(ValueError, match="weight"):
            model.score(X, target(X), sample_weight=np.zeros(6))

    def test_several_targets(self):
        X, Y = skewed(80), pd.DataFrame({"a": normal(80)[:, 0], "b": skewed(80)[:, 0]})
        model = ConditionalFlowDensity(**TINY).fit(X, Y)
        assert model.target_names_ == ("a", "b")
        assert model.log_prob(X, Y).shape == (80,)
        assert model.sample(X[:4], 3).shape == (4, 3, 2)
        assert model.quantiles(X[:4], [0.1, 0.9]).shape == (4, 2, 2)
        assert model.quantiles(X[:4], 0.5).shape == model.predict(X[:4]).shape == (4, 2)
        with pytest.raises(ValueError, match="cdf needs a y of one number"):
            model.cdf(X, Y)

    def test_a_given_column_may_be_constant_and_a_target_may_not(self):
        X = np.column_stack([normal(40, 1), np.ones(40)])
        model = ConditionalFlowDensity(**TINY).fit(X, X[:, 0])
        assert np.isfinite(model.log_prob(X, X[:, 0])).all()
        with pytest.raises(ValueError, match="column 'y' is 1 in all 34 training rows"):
            ConditionalFlowDensity(**SMALL).fit(X, X[:, 1])

    @pytest.mark.parametrize("q", [0, 1.0, [0.5, 2], [[0.5]]])
    def test_levels_lie_between_0_and_1(self, q):
        with pytest.raises(ValueError, match=r"q must be a level in \(0, 1\), or several; got"):
            example(ConditionalFlowDensity).quantiles(skewed(3), q)

    def test_the_wrong_number_of_targets_is_refused(self):
        with pytest.raises(ValueError, match=r"y must have 3 rows of 1 numbers; got \(2, 1\)"):
            example(ConditionalFlowDensity).log_prob(skewed(3), [1.0, 2.0])


def mixed(n=300, seed=0):
    """Whole numbers, positive numbers and one of two values."""
    rng = np.random.default_rng(seed)
    return np.column_stack([rng.poisson(4, n), np.exp(1.5 * rng.normal(size=n)), rng.choice([1.0, 2.5], n)])


class TestKindsOfColumns:
    def test_a_sample_has_only_values_that_its_columns_may_have(self):
        drawn = fitted(FlowDensity, mixed()).sample(200, random_state=0)
        assert (drawn[:, 0] == drawn[:, 0].round()).all()
        assert drawn[:, 0].min() >= 0
        assert drawn[:, 1].min() > 0
        assert np.unique(drawn[:, 2]).tolist() == [1.0, 2.5]

    def test_a_value_that_a_column_cannot_have_is_impossible(self):
        model, X = fitted(FlowOutlierDetector, mixed()), mixed(3)
        X[0, 1], X[1, 0], X[2, 2] = -1.0, 0.5, 2.0
        assert (model.score_samples(X) == -np.inf).all()
        assert model.predict(X).tolist() == [-1, -1, -1]

    def test_whole_numbers_have_probabilities(self):
        model = fitted(FlowDensity, mixed()[:, :1], max_steps=60)
        total = np.exp(model.score_samples(np.arange(40.0)[:, None])).sum()
        assert 0.9 < total < 1.01  # each is a lower bound

    def test_codes_of_them_are_inverted(self):
        model, X = fitted(FlowTransformer, mixed()), mixed(20, seed=1)
        again = model.inverse_transform(model.transform(X))
        assert np.array_equal(again[:, [0, 2]], X[:, [0, 2]])
        assert np.allclose(again[:, 1], X[:, 1], rtol=1e-5)

    def test_kinds_may_be_declared(self):
        model = fitted(FlowDensity, mixed()[:, :2], settings={"data.kinds": ["x0=integer:0:20"]})
        assert [str(kind) for kind in model.trained_.schema.kinds] == ["integer:0:20", "positive"]

    @pytest.mark.parametrize("kind", KINDS)
    def test_kinds_of_columns_that_are_not_there_are_refused(self, kind):
        X = pd.DataFrame(mixed(60)[:, 1:], columns=["income", "plan"])
        with pytest.raises(ValueError, match="X has no column 'plann', which data.kinds names. Did you mean 'plan'?"):
            kind(**{**TINY, "settings": {"data.kinds": ["plann=category"]}}).fit(X, np.arange(60) % 2)

    def test_kinds_of_targets_may_be_declared(self):
        X, y = normal(60), pd.Series(mixed(60)[:, 1], name="income")
        model = ConditionalFlowDensity(**{**TINY, "settings": {**PLAIN, "data.kinds": ["income=real"]}}).fit(X, y)
        assert {kind.name for kind in model.trained_.schema.column_kinds} == {"real"}

    @pytest.mark.parametrize("seed", [0, 1])
    def test_quantiles_of_whole_numbers(self, seed):
        X, y = normal(200, seed=seed), mixed(200, seed=seed)[:, 0]
        model = ConditionalFlowDensity(**SMALL).fit(X, y)
        assert [kind.name for kind in model.trained_.schema.kinds] == ["real", "real", "integer"]
        quantile = model.quantiles(X, 0.6)
        assert (quantile == quantile.round()).all()
        assert (model.cdf(X, quantile) >= 0.6 - 1e-6).all()
        below = quantile > 0
        assert (model.cdf(X[below], quantile[below] - 1) < 0.6 + 1e-6).all()

    @pytest.mark.parametrize(
        ("kind", "y", "same", "zero", "one"),
        [
            ("integer:0", lambda x: np.floor(3 * x), {2.5: 2, 0.4: 0, 0.9999: 1, 1.9: 1}, [-0.3, -1, -9], []),
            ("integer:0:2", lambda x: np.floor(3 * x), {1.5: 1}, [-0.3], [2, 2.4, 9]),
            ("rounded:0.1:0:1", lambda x: x.round(1), {0.35: 0.3, 0.1 * 3: 0.3, np.float32(0.7): 0.7}, [-0.01], [1, 7]),
            ("bounded:0:1", lambda x: x, {}, [-1e-3, -1], [1, 2, 1e6]),
            ("positive", lambda x: x, {1e-50: 1.2e-38}, [0, -1, -1e6], []),
            ("category", lambda x: np.where(x < 0.5, 1.0, 2.5), {1.2: 1, 2.4: 1}, [0.9, -3], [2.5, 3]),
        ],
    )
    def test_the_distribution_function_between_and_beyond_the_values(self, kind, y, same, zero, one):
        X, y = normal(200), y(np.random.default_rng(0).uniform(size=200))
        model = ConditionalFlowDensity(**{**TINY, "settings": {**PLAIN, "data.kinds": [f"y={kind}"]}}).fit(X, y)

        def cdf(value):
            return model.cdf(X[:3], np.full(3, value))

        for value, floor in same.items():
            if floor not in one:
                assert np.allclose(cdf(value), cdf(floor), rtol=1e-9, atol=0)
                assert ((cdf(value) >= 0) & (cdf(value) < 1)).all()
        assert all((cdf(value) == 0).all() for value in zero)
        assert all((cdf(value) == 1).all() for value in one)
        assert (np.diff([cdf(value) for value in np.linspace(-0.5, 2.5, 31)], axis=0) >= 0).all()

    def test_given_columns_may_have_any_value(self):
        X, y = mixed(200), normal(200)[:, 0]
        model = ConditionalFlowDensity(**TINY).fit(X, y)
        assert np.isfinite(model.log_prob(X - 7.3, y)).all()

    def test_a_target_of_few_values(self):
        X, y = normal(200), mixed(200)[:, 2]
        model = ConditionalFlowDensity(**TINY).fit(X, y)
        assert set(model.sample(X, 5, random_state=0).ravel().tolist()) == {1.0, 2.5}
        assert np.isfinite(model.log_prob(X, y)).all()

    @pytest.mark.parametrize("kind", [FlowTransformer, ConditionalFlowDensity])
    def test_they_come_back_from_a_folder(self, kind, tmp_path):
        X = mixed(100)
        y = mixed(100, seed=1)[:, 0] if kind is ConditionalFlowDensity else X[:, 1] > 1
        model = kind(**TINY).fit(X, y)
        again = kind.from_run(model.save(tmp_path / "run"))
        if kind is ConditionalFlowDensity:
            assert np.allclose(again.log_prob(X, y), model.log_prob(X, y))
        else:
            assert np.allclose(outputs(again, X), outputs(model, X))


class TestRunFolders:
    @pytest.mark.parametrize("kind", KINDS)
    def test_a_saved_estimator_is_opened_as_the_same(self, kind, tmp_path):
        model, X = example(kind), skewed(20, seed=4)
        again = kind.from_run(model.save(tmp_path / "run"))
        assert np.allclose(outputs(again, X), outputs(model, X), rtol=1e-12)
        assert again.certificate_.passed
        assert again.n_features_in_ == 2
        assert again.n_steps_ == model.n_steps_
        assert np.allclose(again.validation_scores_, model.validation_scores_, rtol=1e-5)
        refitted = clone(again).set_params(max_steps=2)
        assert refitted._experiment(0).network == model.trained_.experiment.network

    def test_a_folder_that_holds_a_run_is_refused(self, tmp_path):
        model = example(FlowDensity)
        model.save(tmp_path / "run")
        with pytest.raises(ValueError, match="already holds a run"):
            model.save(tmp_path / "run")
        model.save(tmp_path / "run", overwrite=True)

    def test_the_commands_take_it(self, call, tmp_path):
        X = pd.DataFrame(skewed(), columns=["length", "mass"])
        model = FlowDensity(**SMALL).fit(X)
        folder = model.save(tmp_path / "run")
        new = pd.DataFrame(skewed(30, seed=1), columns=["length", "mass"])
        new[["mass", "length"]].to_csv(tmp_path / "new.csv", index=False)
        assert call("score", folder, tmp_path / "new.csv", "--out", tmp_path / "scores.csv")[0] == 0
        with (tmp_path / "scores.csv").open() as file:
            scores = [float(row["log_likelihood"]) for row in csv.DictReader(file)]
        assert scores == pytest.approx(model.score_samples(new).tolist(), abs=1e-4)
        assert call("sample", folder, "-n", 5)[0] == 0
        assert call("certify", folder)[0] == 0
        assert call("evaluate", folder, "--data", tmp_path / "new.csv")[0] == 0
        assert call("report", folder, "--data", tmp_path / "new.csv")[0] == 0
        assert (folder / "report.html").is_file()
        code, text = call("evaluate", folder)
        assert code == 2
        assert "give your table: --data FILE" in text

    def test_classes_are_those_of_the_command(self, call, tmp_path):
        model, X = example(FlowClassifier), skewed(30, seed=1)
        folder = model.save(tmp_path / "run")
        pd.DataFrame(X, columns=["x0", "x1"]).to_csv(tmp_path / "new.csv", index=False)
        assert call("score", folder, tmp_path / "new.csv", "--out", tmp_path / "scores.csv")[0] == 0
        with (tmp_path / "scores.csv").open() as file:
            assert [row["class"] for row in csv.DictReader(file)] == model.predict(X).tolist()

    def test_anomaly_scores_are_those_of_the_command(self, call, tmp_path):
        model, X = example(FlowOutlierDetector), np.vstack([skewed(30, seed=1), [[-50.0, -50.0]]])
        folder, path = model.save(tmp_path / "run"), tmp_path / "new.csv"
        pd.DataFrame(X, columns=["x0", "x1"]).to_csv(path, index=False)
        assert call("score", folder, path, "--out", tmp_path / "scores.csv")[0] == 0
        with (tmp_path / "scores.csv").open() as file:
            scores = [float(row["anomaly"]) for row in csv.DictReader(file)]
        assert model.anomaly(X).tolist() == pytest.approx(scores, abs=1e-4)
        assert model.anomaly(X)[-1] == 1  # a negative number in a positive column

    def test_the_commands_take_a_conditional_density(self, call, tmp_path):
        model, X = example(ConditionalFlowDensity), skewed(30, seed=1)
        folder = model.save(tmp_path / "run")
        table = pd.DataFrame({"y": target(X), "x1": X[:, 1], "x0": X[:, 0]})
        table.to_csv(tmp_path / "new.csv", index=False)
        assert call("score", folder, tmp_path / "new.csv", "--out", tmp_path / "scores.csv")[0] == 0
        with (tmp_path / "scores.csv").open() as file:
            scores = [float(row["log_likelihood"]) for row in csv.DictReader(file)]
        assert scores == pytest.approx(model.log_prob(X, target(X)).tolist(), abs=1e-4)
        assert call("certify", folder)[0] == 0
        assert call("audit", folder)[0] == 0
        assert call("evaluate", folder, "--data", tmp_path / "new.csv")[0] == 0
        assert call("report", folder, "--data", tmp_path / "new.csv")[0] == 0
        code, text = call("sample", folder)
        assert code == 2
        assert "this density is conditional: it needs a table of x0, x1 with --given FILE." in text
        assert call("sample", folder, "-n", 3, "--given", tmp_path / "new.csv", "--out", "-")[0] == 0

    def test_a_run_opens_as_an_estimator(self, tmp_path):
        X = pd.DataFrame(skewed(), columns=["length", "mass"])
        X.to_csv(tmp_path / "table.csv", index=False)
        model = example(FlowDensity)
        data = run.TrainedModel.open(model.save(tmp_path / "first")).experiment.data
        assert data.source == "table.csv"  # a placeholder: the rows are not saved
        experiment = model.trained_.experiment
        settings = type(data)(source=str(tmp_path / "table.csv"))
        run.start(type(experiment)(data=settings, network=experiment.network, objective=experiment.objective,
                                   training=experiment.training), tmp_path / "second")  # fmt: skip
        opened = FlowDensity.from_run(tmp_path / "second")
        assert opened.feature_names_in_.tolist() == ["length", "mass"]
        loaded = Run.open(tmp_path / "second").model()
        with torch.no_grad():
            expected = loaded.log_prob(torch.tensor(X.to_numpy(), dtype=torch.float32))
        assert np.allclose(opened.score_samples(X), expected, atol=1e-4)
        detector = FlowOutlierDetector.from_run(tmp_path / "second", contamination=0.25)
        reference = Run.open(tmp_path / "second").reference().numpy()
        assert (reference < detector.offset_).mean() == pytest.approx(0.25, abs=1 / len(reference))

    @pytest.mark.parametrize(
        ("saved", "opened", "sentence"),
        [
            (FlowDensity, FlowClassifier, "this model only has a density"),
            (FlowDensity, ConditionalFlowDensity, "whose density is not conditional. Use FlowDensity."),
            (ConditionalFlowDensity, FlowDensity, "whose density is conditional. Use ConditionalFlowDensity."),
        ],
    )
    def test_another_kind_of_run_is_refused(self, saved, opened, sentence, tmp_path):
        folder = example(saved).save(tmp_path / "run")
        with pytest.raises(ValueError, match=sentence):
            opened.from_run(folder)

    def test_images_are_refused(self):
        with pytest.raises(ValueError, match="an estimator needs a table; .* has images of shape"):
            FlowDensity.from_run(trained())


def test_scikit_learn_is_imported_only_with_the_estimators():
    code = "import sys, iresnet, iresnet.run; assert 'sklearn' not in sys.modules; iresnet.estimators.FlowDensity()"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_a_grid_search_in_two_processes():
    search = GridSearchCV(FlowDensity(**SMALL), {"width": [4, 8], "learning_rate": [1e-3, 1e-2]}, cv=2, n_jobs=2)
    search.fit(skewed(100))
    alone = GridSearchCV(FlowDensity(**SMALL), {"width": [4, 8], "learning_rate": [1e-3, 1e-2]}, cv=2)
    alone.fit(skewed(100))
    assert np.allclose(search.cv_results_["mean_test_score"], alone.cv_results_["mean_test_score"], atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FlowDensity, FlowClassifier, ConditionalFlowDensity])
def test_a_weight_of_two_is_a_row_twice(kind):
    """The same in distribution: over seeds, the mean scores on new rows agree within four standard errors.

    One row is held out, and selects nothing: if copies of a row are in both parts, the held-out part says less.
    """
    X, new = skewed(150), skewed(500, seed=1)
    counts = np.where(X[:, 1] > np.median(X[:, 1]), 3, 1)
    settings = {**SMALL, "max_steps": 60, "batch_size": 64, "validation_fraction": 1}
    settings["settings"] = {**PLAIN, "select": "last", "patience": 0}

    def score(model, rows, weights):
        if kind is ConditionalFlowDensity:
            return model.fit(rows[:, :1], rows[:, 1], sample_weight=weights).score(new[:, :1], new[:, 1])
        return model.fit(rows, target(rows) > 1, sample_weight=weights).score_samples(new).mean()

    def scores(rows, weights):
        return np.array([score(kind(**{**settings, "random_state": seed}), rows, weights) for seed in range(12)])

    weighted, repeated = scores(X, counts), scores(X.repeat(counts, axis=0), None)
    error = np.hypot(weighted.std(ddof=1), repeated.std(ddof=1)) / np.sqrt(12)
    assert abs(weighted.mean() - repeated.mean()) < 4 * error
    assert abs(scores(X, None).mean() - repeated.mean()) > 4 * error  # without weights it is another model


@pytest.mark.slow
def test_cross_validation_prefers_the_flow_to_a_normal_distribution():
    X = skewed(600)
    model = FlowDensity(blocks=4, width=32, max_steps=300, random_state=0)
    normal_scores = [
        stats.multivariate_normal(X[i].mean(0), np.cov(X[i].T)).logpdf(X[j]).mean()
        for i, j in ((np.arange(0, 300), np.arange(300, 600)), (np.arange(300, 600), np.arange(0, 300)))
    ]
    assert cross_val_score(model, X, cv=2).mean() > np.mean(normal_scores) + 0.1

"""Estimators and data frames: columns of words, categories and truth values go in, and come back in samples."""

import csv
import pickle

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

from iresnet.estimators import (
    ConditionalFlowDensity,
    FlowClassifier,
    FlowDensity,
    FlowOutlierDetector,
    FlowTransformer,
)
from iresnet.run import Scorer

from .test_estimators import KINDS, PLAIN, TINY, outputs

SIZES = pd.CategoricalDtype([40, 38, 42], ordered=True)


def customers(n=120, seed=0):
    """A number, words, truth values, categories that are numbers, and whole numbers."""
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "income": rng.normal(30, 5, n),
            "plan": rng.choice(["free", "pro", "team"], n, p=[0.6, 0.3, 0.1]),
            "paid": rng.random(n) < 0.3,
            "size": pd.Categorical(rng.choice(SIZES.categories, n), dtype=SIZES),
            "visits": rng.poisson(4, n),
        }
    )


def fitted(kind, X):
    return refitted(kind(**TINY), X)


def refitted(model, X):
    y = X["income"]
    return model.fit(X, y > 30 if isinstance(model, FlowClassifier) else y)


def with_kinds(*kinds):
    return {"settings": {**PLAIN, "data.kinds": [*kinds]}}


def scores(model, X):
    """What an estimator returns for rows; the y of a conditional density is the income."""
    if isinstance(model, ConditionalFlowDensity):
        return np.column_stack([model.log_prob(X, X["income"]), model.quantiles(X)])
    return outputs(model, X)


@pytest.mark.parametrize("kind", KINDS)
class TestEveryEstimator:
    def test_words_categories_and_truth_values_are_taken(self, kind):
        X = customers()
        model = fitted(kind, X)
        found = {name: k.categories for name, k in zip(X, model.trained_.schema.kinds, strict=False)}
        assert found == {
            "income": (), "plan": ("free", "pro", "team"), "paid": ("0", "1"), "size": ("38", "40", "42"), "visits": (),
        }  # fmt: skip
        assert np.isfinite(scores(model, X)).all()
        assert model.feature_names_in_.tolist() == list(X)
        assert X.equals(customers())

    def test_columns_may_be_in_any_order(self, kind):
        X = customers()
        model = fitted(kind, X)
        assert np.array_equal(scores(model, X[X.columns[::-1]]), scores(model, X))
        with pytest.raises(ValueError, match="feature names should match"):
            scores(model, X.assign(age=1.0))

    def test_copies_and_folders_are_the_same(self, kind, tmp_path):
        X = customers()
        model = fitted(kind, X)
        assert np.array_equal(scores(pickle.loads(pickle.dumps(model)), X), scores(model, X))
        assert np.array_equal(scores(refitted(clone(model), X), X), scores(model, X))
        opened = kind.from_run(model.save(tmp_path / "run"))
        assert np.allclose(scores(opened, X), scores(model, X), rtol=1e-12)

    def test_an_array_has_no_words(self, kind):
        method = "predict" if kind is ConditionalFlowDensity else "score_samples"
        predict = getattr(fitted(kind, customers()), method)
        with pytest.raises(
            ValueError, match=r"X must be a data frame, since column 'plan' holds words \(category: free"
        ):
            predict(np.ones((2, 5)))

    def test_missing_cells_are_refused(self, kind):
        X = customers()
        for name in ("plan", "size"):
            with pytest.raises(ValueError, match="Input X contains NaN"):
                fitted(kind, X.assign(**{name: X[name].where(X["visits"] > 2)}))


class TestKinds:
    def test_they_are_those_of_the_command(self, call, tmp_path):
        X = customers()
        X.to_csv(tmp_path / "t.csv", index=False)
        folder = tmp_path / "run"
        steps = ("--set", "steps=2", "--set", "network.blocks=[1]", "--set", "width=4")
        assert call("train", tmp_path / "t.csv", *steps, "--kind", "size=category", "--out", folder)[0] == 0
        opened = FlowDensity.from_run(folder)
        ours = [(k.name, len(k.categories)) for k in FlowDensity(**TINY).fit(X).trained_.schema.kinds]
        assert [(k.name, len(k.categories)) for k in opened.trained_.schema.kinds] == ours
        expected = Scorer(folder)(X)["log_likelihood"]
        assert np.isfinite(expected).all()
        assert opened.score_samples(X) == pytest.approx(expected.to_numpy(), abs=1e-4)
        drawn = opened.sample(9, random_state=0)
        assert drawn["paid"].dtype == bool  # False and True in the file
        assert drawn.columns.tolist() == list(X)
        assert set(drawn["plan"]) <= {"free", "pro", "team"}
        assert (
            clone(opened).set_params(max_steps=2).fit(X).trained_.schema.kinds
            == FlowDensity(**TINY).fit(X).trained_.schema.kinds
        )

    def test_they_may_be_declared(self):
        X = customers()
        kinds = ("paid=integer", "size=integer:30", "visits=category")
        schema = FlowDensity(**{**TINY, **with_kinds(*kinds)}).fit(X).trained_.schema
        assert [k.name for k in schema.kinds] == ["real", "category", "integer", "integer", "category"]

    @pytest.mark.parametrize("dtype", [None, "category", "string", object])
    def test_few_rows_of_words_need_a_declaration(self, dtype):
        X = customers(40).astype({} if dtype is None else {"plan": dtype})
        if dtype == "category":
            assert FlowDensity(**TINY).fit(X).trained_.schema.kinds[1].name == "category"
            return
        remedy = (
            r"""If it is a category, X\["plan"\].astype\("category"\) or settings={"data.kinds": \["plan=category"\]}"""
        )
        with pytest.raises(ValueError, match=f"column 'plan' holds '[a-z]*', which is not a number. {remedy} says so"):
            FlowDensity(**TINY).fit(X)
        assert FlowDensity(**{**TINY, **with_kinds("plan=category")}).fit(X).trained_.schema.kinds[1].name == "category"

    def test_a_mark_of_missing_cells_is_named(self):
        X = customers().astype({"visits": str})
        X.loc[3, "visits"] = "?"
        sentence = r"column 'visits' holds '\?', .* missing cell, fill .*: X.replace\('\?', float\('nan'\)\).dropna"
        with pytest.raises(ValueError, match=sentence):
            FlowDensity(**TINY).fit(X)

    def test_words_that_name_the_rows_are_refused(self):
        X = customers(60).assign(plan=[f"customer {i}" for i in range(60)])
        with pytest.raises(ValueError, match="which is not a number"):
            FlowDensity(**TINY).fit(X)
        with pytest.raises(
            ValueError, match="X has 60 different values in 60 rows of column 'plan'; a category has few"
        ):
            FlowDensity(**TINY).fit(X.astype({"plan": "category"}))

    def test_one_word_is_refused(self):
        with pytest.raises(ValueError, match="column 'plan' is 'free' in all 102 training rows"):
            FlowDensity(**TINY).fit(customers().assign(plan="free"))

    def test_nullable_columns(self):
        X = customers()
        nullable = X.convert_dtypes()
        assert nullable["paid"].dtype == "boolean"
        model = FlowDensity(**TINY).fit(nullable)
        assert np.array_equal(model.score_samples(nullable), FlowDensity(**TINY).fit(X).score_samples(X))
        assert model.sample(3, random_state=0)["paid"].dtype == "boolean"

    def test_rows_of_weight_zero_do_not_count(self):
        X = customers()
        X.loc[3, "plan"] = "rare"
        model = FlowDensity(**TINY).fit(X, sample_weight=np.arange(120) != 3)
        assert model.trained_.schema.kinds[1].categories == ("free", "pro", "team")
        with pytest.warns(UserWarning, match="column 'plan' holds 'rare'"):
            assert model.score_samples(X)[3] == -np.inf


class TestOtherTables:
    """Data frames of polars, tables of pyarrow and arrays of objects are what pandas makes of them."""

    @pytest.mark.parametrize("library", ["polars", "pyarrow", "array"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_words_are_taken(self, kind, library):
        X = customers().astype({"size": float})
        model = fitted(kind, X)
        same = other_table(library, X)
        other, y = kind(**TINY), X["income"]
        other.fit(same, y > 30 if isinstance(other, FlowClassifier) else y)
        assert [k.categories for k in other.trained_.schema.kinds] == [
            k.categories for k in model.trained_.schema.kinds
        ]
        if not isinstance(other, ConditionalFlowDensity):
            assert np.array_equal(outputs(other, same), outputs(model, X))
        if isinstance(other, FlowDensity):
            assert set(other.sample(3, random_state=0).iloc[:, 1]) <= {"free", "pro", "team"}

    @pytest.mark.parametrize("library", ["polars", "pyarrow", "array"])
    def test_numbers_make_no_data_frame(self, library):
        X = customers()[["income", "visits"]]
        same = other_table(library, X)
        model = FlowDensity(**TINY).fit(same)
        assert np.array_equal(model.score_samples(same), FlowDensity(**TINY).fit(X).score_samples(X))
        assert isinstance(model.sample(3), np.ndarray)

    @pytest.mark.parametrize("library", ["polars", "pyarrow"])
    def test_categories_and_the_order_of_columns(self, library):
        X = customers(40).astype({"plan": "category"})  # too few rows to find words
        model = FlowDensity(**TINY).fit(other_table(library, X))
        assert np.array_equal(model.score_samples(other_table(library, X[X.columns[::-1]])), model.score_samples(X))

    def test_after_a_column_transformer(self):
        X = customers()[["income", "plan"]]
        columns = ColumnTransformer([("scale", StandardScaler(), ["income"])], remainder="passthrough")
        pipeline = make_pipeline(columns, FlowDensity(**TINY)).fit(X)
        assert np.isfinite(pipeline.score(X))
        assert isinstance(columns.transform(X), np.ndarray)


def other_table(library, X):
    if library == "array":
        return X.to_numpy(dtype=object)
    module = pytest.importorskip(library)
    return module.from_pandas(X) if library == "polars" else module.Table.from_pandas(X)


class TestNewRows:
    def test_an_unknown_word_has_no_density(self):
        X, new = customers(), customers(5, seed=1)
        new.loc[2, "plan"] = "gold"
        model = FlowOutlierDetector(**TINY).fit(X)
        sentence = "column 'plan' holds 'gold', not one of the .* trained on: the log-density of 1 of 5 rows is -inf."
        with pytest.warns(UserWarning, match=sentence):
            assert np.flatnonzero(model.score_samples(new) == -np.inf).tolist() == [2]
        with pytest.warns(UserWarning, match=sentence):
            assert model.predict(new)[2] == -1

    @pytest.mark.parametrize(
        ("kind", "method"),
        [(ConditionalFlowDensity, "predict"), (FlowClassifier, "predict_proba"), (FlowTransformer, "transform")],
    )
    def test_an_unknown_word_has_no_code_and_nothing_is_known_given_it(self, kind, method):
        new = customers(5)
        new.loc[2, "plan"] = "gold"
        sentence = (
            "X: column 'plan' must hold one of free, pro, team; got 'gold' in row 2, of which the model knows noth"
        )
        with pytest.raises(ValueError, match=sentence):
            getattr(fitted(kind, customers()), method)(new)

    def test_a_given_column_may_hold_one_word(self):
        X = customers().assign(plan="free")
        assert np.isfinite(fitted(ConditionalFlowDensity, X).predict(X)).all()

    def test_a_word_among_numbers_is_named(self):
        model = FlowDensity(**TINY).fit(customers())
        with pytest.raises(ValueError, match="column 'income' holds 'much', which is not a number"):
            model.score_samples(customers(5).astype({"income": object}).assign(income="much"))

    def test_names_that_are_numbers(self):
        X = customers().set_axis(range(5), axis=1)
        model = FlowDensity(**TINY).fit(X)
        assert np.isfinite(model.score_samples(X)).all()
        assert model.sample(3, random_state=0).columns.tolist() == [0, 1, 2, 3, 4]


class TestSamples:
    @pytest.mark.parametrize("kind", [FlowDensity, FlowOutlierDetector, FlowTransformer, FlowClassifier])
    def test_they_are_a_data_frame_like_the_training_rows(self, kind):
        X = customers()
        model = fitted(kind, X)
        drawn = model.sample(50, random_state=0)
        assert drawn.dtypes.equals(X.dtypes)
        assert set(drawn["plan"]) <= {"free", "pro", "team"}
        assert np.isfinite(model.score_samples(drawn)).all()

    def test_codes_of_them_are_inverted(self):
        X = customers(60)
        model = FlowTransformer(**TINY).fit(X)
        codes = model.transform(X)
        assert codes.shape == X.shape
        pd.testing.assert_frame_equal(model.inverse_transform(codes), X, rtol=1e-5)

    def test_they_are_an_array_for_numbers(self):
        X = customers()[["income", "visits"]]
        model = FlowDensity(**TINY).fit(customers()).fit(X)
        assert isinstance(model.sample(3, random_state=0), np.ndarray)

    def test_those_of_a_conditional_density_are_numbers(self, tmp_path):
        X = customers()
        model = fitted(ConditionalFlowDensity, X)
        opened = ConditionalFlowDensity.from_run(model.save(tmp_path / "run"))
        assert np.array_equal(model.sample(X, 3, random_state=0), opened.sample(X, 3, random_state=0))

    def test_intervals_and_other_objects_come_back(self):
        X = customers()
        X["band"] = pd.cut(X["income"], [-np.inf, 25, 35, np.inf])
        assert FlowDensity(**TINY).fit(X).sample(5, random_state=0)["band"].dtype == X["band"].dtype


class TestRunFolders:
    def test_the_commands_take_it(self, call, tmp_path):
        X, new = customers(), customers(20, seed=1)
        model = FlowDensity(**TINY).fit(X)
        folder = model.save(tmp_path / "run")
        new[new.columns[::-1]].to_csv(tmp_path / "new.csv", index=False)
        assert call("score", folder, tmp_path / "new.csv", "--out", tmp_path / "scores.csv")[0] == 0
        with (tmp_path / "scores.csv").open() as file:
            found = [float(row["log_likelihood"]) for row in csv.DictReader(file)]
        assert found == pytest.approx(model.score_samples(new).tolist(), abs=1e-4)

    def test_an_opened_one_draws_the_names_of_categories(self, tmp_path):
        X = customers()
        drawn = FlowDensity.from_run(FlowDensity(**TINY).fit(X).save(tmp_path / "run")).sample(50, random_state=0)
        assert set(drawn["plan"]) <= {"free", "pro", "team"}
        assert set(drawn["size"]) <= {38, 40, 42}
        assert drawn["visits"].dtype == np.int64

    def test_targets_of_words_are_for_the_commands(self, call, tmp_path):
        customers().to_csv(tmp_path / "t.csv", index=False)
        steps = ("--set", "steps=2", "--set", "network.blocks=[1]", "--set", "width=4")
        assert call("train", tmp_path / "t.csv", *steps, "--context", "income", "--out", tmp_path / "run")[0] == 0
        with pytest.raises(
            ValueError, match="y must hold numbers; .* has a category: free, pro, team. Use the commands."
        ):
            ConditionalFlowDensity.from_run(tmp_path / "run")


def test_in_a_pipeline_and_a_grid_search():
    X = customers(200)
    log = FunctionTransformer(lambda frame: frame.assign(income=np.log(frame["income"])))
    search = GridSearchCV(make_pipeline(log, FlowDensity(**TINY)), {"flowdensity__width": [2, 4]}, cv=2)
    search.fit(X)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert np.isfinite(search.score(X))

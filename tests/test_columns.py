"""Kinds of columns: what is detected, what is refused, and that densities and samples stay within them."""

import json
import math
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_wine
from torch import nn

from iresnet import ActNorm, Chain, DiagonalNormal, Flow
from iresnet.data import Dataset, DataSettings, Schema, load
from iresnet.data.columns import POSITIVE, REAL, ColumnKind, parse_kind, parse_kinds
from iresnet.data.conversion import refuse_constant_columns, refuse_degenerate_columns, training_dataset
from iresnet.data.detection import DETECT_FROM, degenerate, detect
from iresnet.data.table import Table
from iresnet.evaluate import column_gains, density, log_likelihood
from iresnet.models import Network, build
from iresnet.run import start
from iresnet.train.objective import MaximumLikelihood
from iresnet.transforms.columns import REACH, ColumnTransform
from iresnet.transforms.dequantisation import column_steps, dequantise_for, has_noise
from tests.runs import tiny

DOUBLE = torch.float64
SEEDS = range(20)
SEX = ColumnKind.category(("f", "m"))
COUNT = ColumnKind("integer", 0.0, None, 1.0)
SHARE = ColumnKind("bounded", 0.0, 1.0)
TENTHS = ColumnKind("rounded", 0.0, None, 0.1)
PIECES = ColumnKind("rounded", -5.0, 5.0, 2.5)
LARGE = ColumnKind("integer", 60_000.0, 65_000.0, 1.0)
CAPPED = ColumnKind("integer", None, 3.0, 1.0)


def draw(seed=0, n=500):
    return np.random.default_rng(seed), n


def transform_of(*kinds, x=None):
    lower, upper, margin = zip(*(kind.interval for kind in kinds), strict=True)
    made = ColumnTransform(lower, upper, margin, [kind.step for kind in kinds]).double()
    return made if x is None else made.fit(x)


class TestDetection:
    @pytest.mark.parametrize("seed", SEEDS)
    def test_real_numbers_are_left_alone(self, seed):
        rng, n = draw(seed)
        assert detect(rng.normal(size=n)) == REAL
        assert detect(rng.normal(170, 10, n)) == REAL  # positive by chance, not by nature
        assert detect(rng.uniform(3, 4, n)) == REAL
        assert detect(rng.normal(170, 10, n).round(1)) == REAL  # few ties
        assert detect(rng.integers(0, 10**9, n).astype(float)) == REAL
        assert detect(-rng.exponential(size=n)) == REAL

    @pytest.mark.parametrize("seed", SEEDS)
    def test_kinds_that_are_plain_to_see(self, seed):
        rng, n = draw(seed)
        assert detect(rng.lognormal(0, 1, n)) == POSITIVE
        assert detect(rng.exponential(3, n)) == POSITIVE
        assert detect(rng.uniform(size=n)) == SHARE
        assert detect(rng.beta(0.5, 0.5, n)) == SHARE
        assert detect(100 * rng.beta(0.5, 0.5, n)) == ColumnKind("bounded", 0.0, 100.0)
        assert detect(rng.poisson(2, n).astype(float)) == COUNT
        assert detect(rng.integers(1990, 2020, n).astype(float)) == ColumnKind("integer", step=1.0)
        assert detect(rng.integers(-3, 3, n).astype(float)) == ColumnKind("integer", step=1.0)
        assert detect(rng.integers(0, 2, n).astype(float)) is None
        assert detect(rng.choice([0.5, 7.0], n)) is None
        rain = np.where(rng.random(n) < 0.4, 0, rng.exponential(5, n).round(1))
        assert detect(rain) == TENTHS

    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("n", [60, 200, 2000])
    def test_a_long_tail_below_100_is_no_percentage(self, seed, n):
        assert detect(np.random.default_rng(seed).exponential(20, n)) in (POSITIVE, REAL)

    def test_few_rows_tell_nothing(self):
        x = np.arange(DETECT_FROM) % 2.0
        assert detect(x[:-1]) == REAL
        assert detect(x) is None
        assert detect(np.ones(1000)) == REAL  # a constant is refused elsewhere


class TestHeldOutRows:
    """Test rows do not choose the kinds of columns; else they would have a say in the density that they evaluate."""

    @pytest.fixture
    def save(self, tmp_path):
        def save(row=None, value=-3.0, **words):
            """A positive column, with another value in one row, and a column that tells the rows apart."""
            x = np.stack([np.exp(np.random.default_rng(0).normal(size=400)), np.arange(400) + 0.5], axis=1)
            if row is not None:
                x[row, 0] = value
            frame = pd.DataFrame(x, columns=["income", "number"]).assign(**words)
            frame.to_csv(tmp_path / "t.csv", index=False)
            return DataSettings(str(tmp_path / "t.csv"))

        return save

    def rows(self, part):
        return [int(number) for number in part.x[:, 1]]

    def test_they_do_not_choose(self, save):
        splits = load(save())
        assert splits.schema.kinds == (POSITIVE, REAL)
        assert load(save(self.rows(splits.test)[0])).schema.kinds == (POSITIVE, REAL)
        for part in (splits.train, splits.validation):
            assert load(save(self.rows(part)[0])).schema.kinds == ()

    def test_all_others_do_whatever_the_seed(self, save):
        settings = save(self.rows(load(save()).validation)[0])
        assert {load(replace(settings, seed=seed)).schema.kinds for seed in range(5)} == {()}

    def test_nobody_is_held_out(self, save):
        settings = save(self.rows(load(save()).test)[0])
        assert load(replace(settings, test=0)).schema.kinds == ()

    def test_names_of_categories_are_those_of_all_rows(self, save):
        """As those of classes: they say which values exist, and how frequent they are is learned."""
        row = self.rows(load(save()).test)[0]
        words = np.where(np.arange(400) == row, "rare", np.where(np.arange(400) % 2, "a", "b"))
        splits = load(save(word=words))
        assert splits.schema.kinds[2].categories == ("a", "b", "rare")
        assert (splits.test.x >= 0).all()

    def test_rows_with_missing_cells_and_labels_are_split_alike(self, save):
        """The rows that are held out are drawn from the complete ones, stratified by class."""
        labels = np.where(np.arange(400) % 3, "yes", "no")
        settings = replace(save(5, np.nan, y=labels), label="y", missing="drop")
        row = self.rows(load(settings).test)[0]
        frame = pd.read_csv(settings.source)
        frame.loc[row, "income"] = -3.0
        frame.to_csv(settings.source, index=False)
        splits = load(settings)
        assert row in self.rows(splits.test)
        assert splits.schema.kinds == (POSITIVE, REAL)

    def test_a_density_that_could_not_be_evaluated_is_refused_before_training(self, save, tmp_path):
        settings = save(self.rows(load(save()).test)[0])
        preset = tiny("table-density")
        with pytest.raises(
            ValueError,
            match=r"column 'income' is positive in the training rows, but -3 in the test data \(1 of 80 rows\), which "
            r"would have the likelihood 0. Declare its kind, e.g. --kind income=real, or remove such rows.",
        ):
            start(replace(preset, data=replace(preset.data, source=settings.source)), tmp_path / "run")
        declared = replace(preset.data, source=settings.source, kinds=("income=real",))
        start(replace(preset, data=declared), tmp_path / "run")


class TestSpelling:
    @pytest.mark.parametrize("text", ["real", "positive", "bounded:0:1", "integer", "integer:0", "integer::5",
                                      "integer:1:5", "rounded:0.1", "rounded:0.05:0", "rounded:2:-4:6"])  # fmt: skip
    def test_a_kind_is_read_and_written(self, text):
        kind = parse_kind(text)
        assert str(kind) == text
        assert parse_kind(str(kind)) == kind
        assert ColumnKind.from_dict(json.loads(json.dumps(kind.to_dict()))) == kind

    def test_assignments(self):
        found = parse_kinds(["age=integer", "a=b=category"])
        assert found == {"age": ColumnKind("integer", step=1.0), "a=b": None}
        assert ColumnKind.from_dict(SEX.to_dict()) == SEX

    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            ("age", "a kind must be given as COLUMN=KIND; got 'age'. Example: age=integer."),
            ("=real", "a kind must be given as COLUMN=KIND"),
            ("age=intger", "there is no kind 'intger'. Did you mean 'integer'?"),
            ("age=bounded", "the kind bounded is written bounded:LOWER:UPPER; got 'bounded'."),
            ("age=bounded:0:", "the kind bounded is written bounded:LOWER:UPPER"),
            ("age=bounded:1:0", "the lower bound must be below the upper one; got 1 and 0."),
            ("age=integer:x", r"the kind integer is written integer\[:LOWER\[:UPPER\]\]; got 'integer:x'."),
            ("age=integer:1:2:3", "the kind integer is written"),
            ("age=rounded", "the kind rounded is written rounded:STEP"),
            ("age=rounded:0", "a positive step belongs to integer, rounded and category"),
            ("age=rounded:inf", "the kind rounded is written"),
            ("age=real:1", "the kind real is written real; got 'real:1'."),
        ],
    )
    def test_refuses(self, text, sentence):
        with pytest.raises(ValueError, match=sentence):
            parse_kinds([text])

    @pytest.mark.parametrize(
        "content",
        [7, {}, {"name": "strange"}, {"name": "real", "other": 1}, {"name": "category", "categories": "ab"},
         {"name": "bounded", "lower": "0"}, {"name": "real", "step": 1.0}, {"name": "real", "categories": ["a"]}],
    )  # fmt: skip
    def test_refuses_a_file_that_is_none(self, content):
        with pytest.raises(ValueError, match="kind|categories|bounds|step"):
            ColumnKind.from_dict(content)

    @pytest.mark.parametrize(
        ("kind", "words"),
        [
            (SHARE, "bounded, from 0 to 1"), (COUNT, "integer, from 0 on"), (TENTHS, "multiples of 0.1, from 0 on"),
            (SEX, "category: f, m"), (POSITIVE, "positive"), (CAPPED, "integer, up to 3"),
        ],
    )  # fmt: skip
    def test_in_words(self, kind, words):
        assert kind.describe() == words


class TestValues:
    @pytest.mark.parametrize("kind", [POSITIVE, SHARE, COUNT, TENTHS, SEX, LARGE, CAPPED, PIECES], ids=str)
    def test_every_code_becomes_a_value_of_the_column(self, kind):
        codes = torch.tensor([-1e6, *torch.linspace(-30, 30, 501), 1e6])[:, None]
        x = transform_of(kind).float().undo(codes)
        assert x.isfinite().all()
        assert (x.diff(dim=0) >= 0).all()
        values = kind.restore(x[:, 0].double().numpy())
        assert kind.contains(values).all()

    @pytest.mark.parametrize("kind", [SHARE, COUNT, SEX, TENTHS, LARGE, CAPPED, PIECES], ids=str)
    def test_a_value_at_a_bound_has_a_finite_likelihood(self, kind):
        """In float32, and with the largest noise to either side."""
        ends = torch.tensor([end for end in (kind.lower, kind.upper) if end is not None])[:, None]
        transform, half = transform_of(kind).float(), (kind.step or 0) / 2
        for noise in (-half, 0.0, half):
            z, logdet = transform.forward_and_logdet(ends + noise)
            assert z.isfinite().all()
            assert logdet.isfinite().all()

    def test_values_outside(self):
        assert POSITIVE.contains(np.array([1e-30, 0.0, -1.0, math.inf])).tolist() == [True, False, False, False]
        assert SHARE.contains(np.array([0.0, 1.0, 1.00001, -0.00001])).tolist() == [True, True, False, False]
        assert ColumnKind("bounded", 0.0, 0.1).contains(np.float32([0.1]).astype(float)).all()
        assert COUNT.contains(np.array([0.0, 7.0, 7.5, -1.0])).tolist() == [True, True, False, False]
        assert SEX.contains(np.array([0.0, 1.0, -1.0, 2.0])).tolist() == [True, True, False, False]
        assert TENTHS.contains(np.float32([0.3, 1234.5, 0.25]).astype(float)).tolist() == [True, True, False]
        assert REAL.contains(np.array([-1e30, math.nan])).tolist() == [True, False]

    def test_rounding(self):
        assert COUNT.restore(np.array([-0.4, 2.6])).tolist() == [0, 3]
        assert TENTHS.restore(np.array([0.26])).tolist() == pytest.approx([0.3])
        assert SHARE.restore(np.array([-1e-4, 0.5])).tolist() == [0, 0.5]


class TestTransform:
    def test_known_answers(self):
        x = torch.tensor([[2.0, 3.0, 0.25, 1.0]], dtype=DOUBLE)
        t = ColumnTransform([None, 0.0, 0.0, None], [None, None, 1.0, 3.0], [0.0] * 4).double()
        z, logdet = t.forward_and_logdet(x)
        assert z[0].tolist() == pytest.approx([2, math.log(3), math.log(1 / 3), -math.log(2)])
        assert float(logdet) == pytest.approx(-math.log(3) - math.log(0.25 * 0.75) - math.log(2))

    def test_fitted_codes_are_standardised(self):
        rng = np.random.default_rng(0)
        x = torch.from_numpy(np.stack([rng.normal(5, 3, 900), rng.lognormal(2, 1.5, 900), rng.uniform(size=900)], 1))
        z = transform_of(REAL, POSITIVE, SHARE, x=x)(x)
        torch.testing.assert_close(z.mean(0), torch.zeros(3, dtype=DOUBLE), atol=1e-6, rtol=0)
        torch.testing.assert_close(z.std(0, correction=0), torch.ones(3, dtype=DOUBLE), atol=1e-6, rtol=0)

    def test_beyond_the_data_the_logarithm_becomes_linear_smoothly(self):
        x = torch.tensor([[1.0], [2.0]], dtype=DOUBLE)
        t = transform_of(POSITIVE, x=x)
        assert float(t.reach) == 2 * REACH
        at = torch.tensor([[0.999], [1.0], [1.001]], dtype=DOUBLE) * t.reach
        z, logdet = t.forward_and_logdet(at)
        slopes = z.diff(dim=0) / at.diff(dim=0)
        torch.testing.assert_close(slopes[0], slopes[1], rtol=2e-3, atol=0)
        torch.testing.assert_close(logdet[1:2], logdet[2:])
        torch.testing.assert_close(t.inverse(z), at)
        assert t.inverse(torch.full((1, 1), 1e30, dtype=DOUBLE)).isfinite().all()

    def test_an_interval_far_wider_than_the_data(self):
        x = torch.rand(100, 1, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
        t = transform_of(ColumnKind("bounded", 0.0, 1e6), x=x)
        far = torch.tensor([[9e5]], dtype=DOUBLE)
        torch.testing.assert_close(t.inverse(t(far)), far)

    def test_a_chain_reports_an_inverse_that_was_rounded_to_an_end(self):
        found = Chain(ColumnTransform([0.0], [1.0], [0.1])).solve(torch.tensor([[40.0]]))
        assert float(found.x) == 1
        assert math.isinf(found.code_residual)

    def test_refuses(self):
        with pytest.raises(ValueError, match="one entry per column; got 2, 1, 2 and 2"):
            ColumnTransform([0.0, None], [None], [0.0, 0.0])
        with pytest.raises(ValueError, match=r"lower must be below upper in every column; got \[1.0\] and \[0.0\]."):
            ColumnTransform([1.0], [0.0], [0.0])
        t = transform_of(REAL, POSITIVE)
        with pytest.raises(ValueError, match=r"column 1 must lie in \(0, inf\); got 0 in sample 1. The density is 0"):
            t(torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=DOUBLE))
        with pytest.raises(ValueError, match=r"x must have shape \(batch, 2\)"):
            t(torch.ones(1, 3, dtype=DOUBLE))
        with pytest.raises(ValueError, match=r"a density on a constant one is unbounded; got constant columns \[0\]"):
            t.fit(torch.tensor([[3.0, 1.0], [3.0, 2.0]], dtype=DOUBLE))


def flow_for(*kinds, x):
    return Flow(Chain(transform_of(*kinds, x=x)), DiagonalNormal((len(kinds),)).double()).eval()


class TestNoise:
    def test_only_discrete_columns_get_noise(self):
        kinds = (REAL, COUNT, POSITIVE, TENTHS, SEX)
        x = torch.tensor([[0.5, 3.0, 2.0, 0.7, 1.0]], dtype=DOUBLE).repeat(1000, 1)
        x[::2, 1:] = torch.tensor([1.0, 3.0, 0.2, 0.0], dtype=DOUBLE)
        x[::3, 0] = 2.0
        flow = flow_for(*kinds, x=x)
        assert column_steps(flow).tolist() == pytest.approx([0, 1, 0, 0.1, 1])
        noisy, log_q = dequantise_for(flow, x, None, torch.Generator().manual_seed(0))
        assert torch.equal(noisy[:, [0, 2]], x[:, [0, 2]])
        half = torch.tensor([0.5, 0.05, 0.5], dtype=DOUBLE)
        off = (noisy - x)[:, [1, 3, 4]]
        assert (off.abs() <= half * (1 + 1e-6)).all()
        assert ((off / half).std(0) - 1 / math.sqrt(3)).abs().max() < 0.05
        assert not log_q.any()
        assert has_noise(flow, None)
        assert not has_noise(nn.Identity(), None)

    @pytest.mark.parametrize("kind", [SEX, COUNT, ColumnKind("integer", step=1.0)], ids=str)
    def test_the_likelihood_of_an_integer_is_below_its_probability(self, kind):
        """exp E ln p(x + u) <= P(x), which is the integral of p over the cell; all P(x) sum to at most one."""
        x = torch.tensor([[0.0], [1.0], [0.0], [1.0]], dtype=DOUBLE)
        flow = flow_for(kind, x=x)
        values = torch.arange(2 if kind == SEX else 60, dtype=DOUBLE)[:, None] - (0 if kind.lower == 0 else 30)
        u = (torch.arange(2000, dtype=DOUBLE) + 0.5)[:, None, None] / 2000
        log_p = torch.stack([flow.log_prob(dequantise_for(flow, values, None, noise=n)[0]) for n in u])
        bound, probability = log_p.mean(0).exp(), log_p.exp().mean(0)
        assert (bound <= probability).all()
        assert 0.98 < float(probability.sum()) <= 1 + 1e-6

    def test_the_loss_of_zeros_and_ones_has_a_lower_bound(self):
        """A density that is ever narrower around 0 and 1 does not help: the mean -ln p over the cells stays above 0."""
        x = torch.tensor([[0.0], [1.0]], dtype=DOUBLE).repeat(500, 1)
        flow = flow_for(SEX, x=x)
        for scale in (0.0, -2.0, -5.0):
            flow.base.log_scale.data.fill_(scale)
            loss, metrics = MaximumLikelihood(flow)(x, generator=torch.Generator().manual_seed(0))
            assert float(loss) > 0
            assert list(metrics) == ["nats"]


class TestDegenerate:
    def test_a_copy_and_a_combination(self):
        rng, n = draw()
        a, b = rng.normal(3, 2, n), rng.normal(-1, 5, n)
        x = np.stack([a, b, 7 - 2 * a], 1).astype(np.float32).astype(float)
        words = degenerate(x, ("a", "b", "the c"), (REAL,) * 3)
        assert words == (
            "column 'the c' follows from 'a' in all 500 training rows, so the density has no upper bound. "
            "Leave it out: --drop 'the c'."
        )
        x[:, 2] = a + b
        assert "column 'c' is a linear combination of 'a', 'b' in all" in degenerate(x, "abc", (REAL,) * 3)
        x[:, 2] += 1e-3 * rng.normal(size=n)
        assert degenerate(x, "abc", (REAL,) * 3) == ""

    def test_noise_covers_discrete_columns_only(self):
        rng, n = draw()
        k, a = rng.integers(0, 5, n).astype(float), rng.normal(size=n)
        hot = np.stack([k == i for i in range(5)], 1).astype(float)
        assert degenerate(np.concatenate([hot, a[:, None]], 1), "abcdef", (SEX,) * 5 + (REAL,)) == ""
        x = np.stack([a, k, a + k], 1)
        assert "column 'c' is a linear combination of 'b', 'a'" in degenerate(x, "abc", (REAL, COUNT, REAL))

    def test_a_value_that_repeats(self):
        rng, n = draw()
        x = np.where(rng.random(n) < 0.4, 0, rng.exponential(5, n))[:, None]
        assert detect(x[:, 0]) == REAL
        words = degenerate(x, ["rain"], (REAL,))
        assert words.startswith("column 'rain' is 0 in ")
        remedy = "Say how finely it is rounded, --kind rain=rounded:STEP, or leave it out: --drop rain."
        assert words.endswith(f"has no upper bound. {remedy}")
        assert degenerate(x, ["rain"], (ColumnKind("rounded", 0.0, None, 0.01),)) == ""
        assert "--kind rain=rounded:0.1, or" in degenerate(x.round(1), ["rain"], (REAL,))

    @pytest.mark.parametrize("seed", SEEDS)
    def test_a_table_with_rounded_columns_is_accepted_whatever_the_split(self, seed, tmp_path):
        """Of scikit-learn's wine, 8 of 178 rows have the same hue, which is a larger share of some training parts."""
        wine = load_wine(as_frame=True)
        wine.frame.to_csv(tmp_path / "wine.csv", index=False)
        splits = load(DataSettings(str(tmp_path / "wine.csv"), label="target", seed=seed))
        refuse_degenerate_columns(splits.train)

    def test_ties_are_refused_sooner_where_there_is_no_step(self):
        x = np.concatenate([np.zeros(14), np.linspace(1, 2, 186) ** 3])[:, None]
        assert "column 'a' is 0 in 14 of 200 training rows" in degenerate(x, ["a"], (REAL,))
        assert degenerate(x.round(2), ["a"], (REAL,)) == ""

    @pytest.mark.parametrize("seed", SEEDS)
    def test_independent_columns_pass(self, seed):
        rng, n = draw(seed, 60)
        assert degenerate(rng.normal(size=(n, 8)), "abcdefgh", (REAL,) * 8) == ""


MIXED = Schema((5,), columns=("t", "n", "s", "r", "p"), kinds=(REAL, COUNT, SEX, SHARE, POSITIVE), id="name")


def mixed_rows(n=400, seed=0):
    rng = np.random.default_rng(seed)
    x = [rng.normal(20, 3, n), rng.poisson(2, n), rng.integers(0, 2, n), rng.uniform(size=n), rng.lognormal(3, 1, n)]
    return Dataset(torch.from_numpy(np.stack(x, 1)).float(), None, MIXED)


class TestSchema:
    def test_it_is_saved(self):
        assert Schema.from_dict(json.loads(json.dumps(MIXED.to_dict()))) == MIXED

    def test_one_without_kinds_is_written_as_before(self):
        """Fingerprints of earlier versions must stay valid."""
        assert list(Schema((2,)).to_dict()) == ["shape", "levels", "columns", "label", "classes"]

    def test_refuses(self):
        with pytest.raises(ValueError, match=r"there must be one kind per column, \(2,\); got 1 kinds."):
            Schema((2,), kinds=(REAL,))
        with pytest.raises(ValueError, match="id must be a column's name or empty; got 3."):
            Schema((2,), id=3)
        with pytest.raises(ValueError, match="a kind is one of real, positive"):
            Schema.from_dict({"shape": [1], "kinds": [{"name": "strange"}]})

    def test_indicators_are_of_given_categories(self):
        kinds = (ColumnKind.category(("x", "y")), REAL)
        schema = Schema((2,), columns=("a", "b"), kinds=kinds).given_others(["b"])
        assert (schema.targets, schema.one_hot, schema.select(["a"]).one_hot) == (("b",), ("a",), ("a",))
        with pytest.raises(ValueError, match="one_hot must be given columns that hold categories; got 'b'."):
            replace(schema, one_hot=("b",))
        with pytest.raises(ValueError, match="one_hot must be given columns that hold categories; got 'a'."):
            replace(schema, targets=("a",))

    def test_names_and_rows_follow_a_selection(self):
        data = Dataset(torch.ones(3, 1), None, Schema((1,)), ("a", "b", "c"), (0, 2, 5))
        assert (data.take([2, 0]).names, data.take([2, 0]).rows) == (("c", "a"), (5, 0))
        with pytest.raises(ValueError, match="there must be one row per sample; got 1 for 3."):
            Dataset(torch.ones(3, 1), None, Schema((1,)), rows=(1,))


class TestModel:
    @pytest.fixture
    def flow(self):
        torch.manual_seed(0)
        return build(Network(blocks=(2,), width=8), MIXED, "density", mixed_rows().x).eval()

    def test_samples_are_rows(self, flow):
        drawn = MIXED.restore(flow.sample((2000,), generator=torch.Generator().manual_seed(0)))
        assert MIXED.inside(drawn).all()
        assert MIXED.inside(mixed_rows().x).all()

    def test_a_row_outside_has_the_likelihood_zero_and_changes_no_other(self, flow):
        data = mixed_rows(6)
        before = log_likelihood(flow, data)
        x = data.x.clone()
        x[1, 4], x[3, 2], x[5, 1] = 0.0, -1.0, 2.5
        after = log_likelihood(flow, Dataset(x, None, MIXED))
        assert after.value.isinf().tolist() == [False, True, False, True, False, True]
        torch.testing.assert_close(after.value[::2], before.value[::2])
        assert after.standard_error.isfinite().all()
        assert (before.standard_error > 0).all()  # there is noise
        with pytest.raises(ValueError, match="3 of 6 rows hold values that a column of the model cannot have"):
            density(flow, Dataset(x, None, MIXED))
        everything = log_likelihood(flow, Dataset(x[1:2], None, MIXED))
        assert everything.value.tolist() == [-math.inf]

    def test_the_scale_is_that_of_the_values_with_noise(self, flow):
        """Codes of a column of zeros and ones, as the density sees it, have variance one."""
        x, _ = dequantise_for(flow, mixed_rows().x, None, torch.Generator().manual_seed(1))
        std = flow.transform[0](x).std(0)
        assert ((std - 1).abs() < 0.05).all(), std

    def test_a_classifier_takes_numbers_as_they_are(self):
        schema = Schema((1,), classes=("a", "b"), kinds=(POSITIVE,))
        model = build(Network(blocks=(1,), width=4), schema, "classification", torch.tensor([[1.0], [2.0]]))
        assert not any(isinstance(m, ColumnTransform) for m in model.modules())


class TestGains:
    def test_of_independent_normals(self):
        """ln E N(r; 0, 1) - ln N(x; 0, 1) = x^2 / 2 - ln(2) / 2 for r ~ N(0, 1)."""
        flow = Flow(Chain(ColumnTransform([None] * 2, [None] * 2, [0.0] * 2)), DiagonalNormal((2,))).eval()
        x = torch.tensor([[0.0, 3.0], [1.0, -1.0]])
        gains = column_gains(flow, Dataset(x, None, Schema((2,))), values=20_000)
        torch.testing.assert_close(gains, (x.square() / 2 - math.log(2) / 2).double(), atol=0.02, rtol=0)

    def test_it_does_not_depend_on_the_unit(self):
        x, data = mixed_rows().x[:, :1], Schema((1,))
        flows = [flow_for(REAL, x=scale * x.double()) for scale in (1, 1000)]
        small, large = (
            column_gains(f, Dataset(scale * x[:5], None, data)) for f, scale in zip(flows, (1, 1000), strict=True)
        )
        torch.testing.assert_close(small, large, atol=1e-4, rtol=1e-4)

    def test_a_value_outside(self):
        x = mixed_rows(40).x
        flow = flow_for(*MIXED.kinds, x=x.double())
        x[0, 2], x[0, 0] = 7.0, 20.0
        gains = column_gains(flow, Dataset(x[:2], None, MIXED))
        assert gains[0].tolist() == [0, 0, math.inf, 0, 0]
        assert gains[1].isfinite().all()

    def test_refuses(self):
        flow = flow_for(*MIXED.kinds, x=mixed_rows().x.double())
        with pytest.raises(ValueError, match="gains are for the columns of a table; got images"):
            column_gains(flow, Dataset(torch.zeros(1, 1, 2, 2, dtype=torch.uint8), None, Schema((1, 2, 2), 2)))
        with pytest.raises(ValueError, match="values must be at least 1; got 0."):
            column_gains(flow, mixed_rows(3), values=0)
        with pytest.raises(ValueError, match=r"the gain of a column needs a model in eval mode; call model.eval\(\)"):
            column_gains(flow.train(), mixed_rows(3))


def test_a_table_of_many_columns_is_converted_in_linear_time():
    names = tuple(f"a_long_name_of_column_{i}" for i in range(40_000))
    table = Table(Path("wide.csv"), names, np.random.default_rng(0).random((3, len(names))), "", None, str)
    begin = time.process_time()
    dataset = training_dataset(table)
    refuse_constant_columns(dataset)
    assert dataset.schema.select(names).names == names
    assert time.process_time() - begin < 5  # looking every name up in all of them takes longer


def test_an_inverse_whose_logarithm_is_a_difference_of_huge_numbers():
    """Trap: x = e^y for a y that is off by 8 is off by more than its slope times 8."""
    columns = ColumnTransform([0.0], [None], [0.0]).double()
    columns.mean.fill_(2.0**57)
    columns.std.fill_(1 / 3)
    columns.reach.fill_(1e300)
    z = -(2.0**57) * 3 + 128 * torch.arange(200, dtype=DOUBLE)[:, None]
    exact = [Fraction(v) * Fraction(float(columns.std)) + 2**57 for v in z.flatten().tolist()]
    near = [i for i, y in enumerate(exact) if abs(y) < 600]
    x = torch.tensor([math.exp(y) for y in (exact[i] for i in near)], dtype=DOUBLE)
    found = columns.solve(z[near])
    assert len(near) > 10
    assert (found.x.flatten() - x).abs().max() > 1000
    assert ((found.x.flatten() - x).abs() <= found.error_bound).all()


def test_a_density_without_intervals_is_not_known_to_be_zero_outside_of_them():
    """The kinds of columns are the data's; this flow gives an impossible row a density like any other."""
    flow, x = Flow(Chain(ActNorm(2)), DiagonalNormal(2)).eval(), torch.tensor([[-1.0, 0.0], [1.0, 0.0]])
    data = Dataset(x, None, Schema((2,), columns=("a", "b"), kinds=(POSITIVE, REAL)))
    assert flow.log_prob(x).isfinite().all()
    found = log_likelihood(flow, data)
    assert found.value.isfinite().tolist() == [False, True]
    assert found.bias_bound.tolist() == [math.inf, 0.0]

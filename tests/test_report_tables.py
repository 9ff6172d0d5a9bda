"""The report of a table: data, fit with baselines, samples column by column, unusual rows; only then the proofs."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from iresnet import evaluate
from iresnet.data import DataSettings, Schema
from iresnet.report import UnusualRows, page
from iresnet.report.document import OF_TABLES, SECTIONS
from iresnet.report.gather import gather
from iresnet.run import start
from iresnet.run.contents import check_contents
from tests.material import digits, mixed, points, table
from tests.reading import Read
from tests.runs import tiny


def text_of(material):
    return Read(page(material)).text


def sections(material):
    return re.findall(r'<section id="([a-z-]+)"', page(material))


class TestOrder:
    def test_data_fit_and_anomalies_come_before_proofs(self):
        found = sections(mixed())
        assert found == [
            "data", "test-metrics", "training", "samples", "anomalies", "reconstructions", "interpolation",
            "certificate", "singular-values", "settings",
        ]  # fmt: skip
        assert sections(points())[:4] == ["data", "test-metrics", "training", "samples"]
        assert sections(digits())[:2] == ["training", "test-metrics"]

    def test_no_section_is_forgotten(self):
        assert sorted(OF_TABLES) == sorted(SECTIONS)


class TestData:
    def test_source_rows_and_columns_with_their_kinds(self):
        text = text_of(mixed())
        assert "source customers.csv rows 3,000: 2,040 for training, 360 for validation, 600 for testing" in text
        assert "names of rows customer" in text
        for words in (
            "temperature real", "income positive (logarithm)", "utilisation bounded, from 0 to 1 (logit)",
            "visits integer, from 0 on (noise and logarithm)", "segment category of 3 (noise and logit) retail",
        ):  # fmt: skip
            assert words in text

    def test_a_conditional_density_names_what_is_given(self):
        schema = replace(mixed().schema, targets=("income",))
        found = text_of(mixed(schema=schema))
        assert "density of income, given temperature, utilisation, visits, segment" in found
        assert "income positive (logarithm)" in found
        assert "visits integer, from 0 on (given)" in found
        indicators = replace(schema, one_hot=("segment",))
        assert "segment category of 3 (given, as indicators)" in text_of(mixed(schema=indicators))

    def test_columns_that_are_left_out(self):
        assert "with the same value in every row" not in text_of(mixed())
        found = text_of(mixed(schema=replace(mixed().schema, constants=("mode",))))
        assert "left out mode, with the same value in every row" in found

    def test_a_classifier_takes_numbers_as_they_are(self):
        text = text_of(mixed(objective="classification"))
        assert "income positive " in text
        assert "(logarithm)" not in text

    def test_labels_and_unknown_sizes(self):
        m = table()
        text = text_of(replace(m, schema=replace(m.schema, label="wine")))
        assert "label wine: Barolo, Grignolino, Barbera" in text
        assert "for training" not in text


class TestFit:
    def test_baselines_stand_beside_the_model(self):
        text = text_of(mixed())
        assert "this model 20.014 Gaussian 21.400 1.386 ± 0.081 4 mixture of 5 Gaussians 20.500 0.486 ± 0.052" in text
        assert f"{math.exp(0.486):.3g}" in text
        assert "fitted to 2,040 training rows as the model sees them" in text
        assert "(20 nats, 0.49 better than a mixture of 5 Gaussians)" in text
        assert "Better than a mixture, by 0.486 nats" in text

    def test_a_model_that_is_worse_is_not_called_better(self):
        evaluation = mixed().evaluation
        worse = [b | {"gain": -0.3} for b in evaluation["baselines"]]
        text = text_of(mixed(evaluation=evaluation | {"baselines": worse}))
        assert "0.3 worse than a mixture of 5 Gaussians" in text
        assert "Worse than a mixture, by 0.300 nats" in text

    def test_the_dot_is_the_released_step(self):
        assert "The dot marks step 200, whose weights are released." in text_of(mixed())
        assert "The dot marks" not in text_of(mixed(released=None))

    def test_a_log_may_begin_with_the_validation_of_step_0(self):
        log = [{"step": 0.0, "nats": None, "learning_rate": None, "validation nats": 5.0}]
        log += [{"step": float(k), "nats": 6.0 - k, "learning_rate": 0.1, "validation nats": 4.0} for k in (1, 2)]
        content = page(mixed(log=log, released=0))
        assert "validation <b>5</b>" in content
        assert "The dot marks step 0" in content


class TestSamples:
    def test_categories_are_shares_by_name(self):
        m = mixed()
        own, drawn = (float((x[:, 4] == 0).double().mean()) for x in (m.data, m.samples))
        assert f"retail {100 * own:.0f} %, samples {100 * drawn:.0f} %" in text_of(m)

    def test_names_and_not_codes_in_every_table(self):
        m = mixed()
        name = ("retail", "business", "public")[int(m.data[1, 4])]
        assert f"1 {m.reconstruction.originals[0, 0]:.4g} 5 × 10⁶" not in text_of(m)
        assert name in text_of(mixed(samples=None, unusual=None, reconstruction=None, interpolation=None))
        assert "Columns of categories are left out." in text_of(m)

    def test_many_categories_are_summed_up(self):
        kind = mixed().schema.kinds[4]
        many = type(kind).category([f"c{i}" for i in range(12)])
        schema = Schema((1,), columns=("c",), kinds=(many,))
        x = torch.arange(12.0)[:, None].repeat(5, 1)
        m = mixed(schema=schema, data=x, samples=x, reconstruction=None, interpolation=None, unusual=None)
        assert "4 others 33 %, samples 33 %" in text_of(m)

    def test_a_whole_number_has_a_bar_of_its_own(self):
        from iresnet.report.columns import _edges

        kind, x = mixed().schema.kinds[3], np.array([0.0, 0.0, 1.0, 4.0])
        assert _edges(x, kind).tolist() == [-0.5, 0.5, 1.5, 2.5, 3.5, 4.5]


class TestUnusualRows:
    def test_rows_scores_and_columns(self):
        text = text_of(mixed())
        assert "The 3 rows with the highest scores, of 500 test rows" in text
        assert "c17 0.9980" in text
        assert "income 5.00 × 10⁶ gain 7.2 nats segment" in text
        assert "All values of these rows" in text
        assert "A high score says that a row is unlike the others, not that it is wrong." in text
        assert "10 % score above 0.9 and 1.0 % score above 0.99; 10 % and 1.0 % are expected" in text

    def test_a_value_that_a_column_cannot_have(self):
        u = mixed().unusual
        gains = torch.where(u.gains == 7.25, math.inf, u.gains)
        likelihoods = torch.tensor([-math.inf, -30.0, -20.0])
        text = text_of(mixed(unusual=replace(u, gains=gains, likelihoods=likelihoods, top=torch.ones(3))))
        assert "cannot have this value" in text
        assert "c17 1 –" in text

    def test_numbers_that_do_not_match(self):
        u = mixed().unusual
        with pytest.raises(ValueError, match=r"top must have shape \(3,\); got \(2,\)"):
            UnusualRows(u.scores, u.all_likelihoods, u.names, u.rows, u.top[:2], u.likelihoods, u.gains)
        with pytest.raises(ValueError, match=r"gains must have shape \(3, 5\); got \(3, 4\)"):
            replace(u, gains=u.gains[:, :4])

    def test_names_of_a_file_are_text(self):
        bad = replace(mixed().unusual, names=("<b>", "&amp;", "'\""))
        assert "<b> 0.9980" in text_of(mixed(unusual=bad))

    def test_they_are_the_least_likely_rows_of_the_run(self, tmp_path):
        x = np.random.default_rng(0).normal(size=(90, 2))
        np.savetxt(tmp_path / "a.csv", x, delimiter=",", header="a,b", comments="")
        settings = tiny("table-density")
        network = replace(settings.network, covariance="diagonal", components=1, spline_bins=0)  # without EM: for time
        data = DataSettings(source=str(tmp_path / "a.csv"))
        run = start(replace(settings, data=data, network=network), tmp_path / "run").run
        material, model, test = gather(run), run.model(), run.splits().test
        found, values = material.unusual, evaluate.log_likelihood(model, test).value
        places = values.argsort()[:10]
        assert found.names == tuple(str(int(i)) for i in places)
        assert torch.equal(found.rows, test.x[places])
        assert torch.equal(found.likelihoods, values[places])
        assert torch.equal(found.scores, evaluate.anomaly(values, run.reference()))
        assert torch.equal(found.gains, evaluate.column_gains(model, test.take(places)))
        assert material.source == "a.csv"
        assert material.sizes == {"train": 61, "validation": 11, "test": 18}
        assert material.released == run.best_metrics()["step"]


@pytest.mark.parametrize(
    "baseline", [{"name": "x"}, {"name": "x", "value": 1.0, "gain": {}, "gain_error": 0.1, "fitted": 3}]
)
def test_damaged_baselines_are_refused_where_they_are_read(tmp_path, baseline):
    with pytest.raises(ValueError, match=r"evaluation.json is damaged: baselines\[0\].*Evaluate again"):
        check_contents({"baselines": [baseline]}, tmp_path / "evaluation.json", "Evaluate again.")

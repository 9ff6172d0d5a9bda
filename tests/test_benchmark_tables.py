"""The tables of `benchmarks/tables.py`: their densities are densities, and nothing is chosen on test rows."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import table_data as data
import tables
from table_results import candidate_rows, density_rows, nats_behind, read_jobs, rows_file, summary_rows
from tables import publish

from iresnet.results import Results, read, write

#: Two columns of each kind, and a box that holds nearly all of their probability.
KINDS = {
    "rings": (data.rings(2), -4, 4),
    "curved": (data.curved(2, 2.0), -5, 5),
    "bounded": (data.bounded(2), 0, 1),
    "proportions": (data.proportions(2), 0, 1),
    "counts": (data.counts(2), 0, 60),
    "overdispersed": (data.overdispersed(2), 0, 60),
    "skewed": (data.skewed(2), 1e-9, 20),
    "factors": (data.factors(2, 2), -15, 15),
    "clusters": (data.clusters(2, 5), -10, 10),
    "tails": (data.heavy_tails(2, 2.5), -40, 40),
    "copula": (data.student_copula(2, 3.0), -6, 6),
    "gaussian": (data.gaussian(2, 0.5), -5, 5),
}


@pytest.mark.parametrize("kind", KINDS)
class TestKnown:
    def test_it_integrates_to_one(self, kind):
        known, low, high = KINDS[kind]
        edges = np.linspace(low, high, 901)
        centres = (edges[1:] + edges[:-1]) / 2
        x = np.stack(np.meshgrid(centres, centres), -1).reshape(-1, 2)
        x = x[x.sum(1) < 1] if kind == "proportions" else x
        assert np.exp(known.log_density(x)).sum() * (edges[1] - edges[0]) ** 2 == pytest.approx(1, abs=0.02)

    def test_it_is_the_density_of_the_draws(self, kind):
        """The share of draws in a box, against the integral of the density over it."""
        known = KINDS[kind][0]
        x = known.draw(40_000, np.random.default_rng(0))
        a, b = np.quantile(x, 0.3, axis=0), np.quantile(x, 0.8, axis=0)
        share = ((x > a) & (x < b)).all(1).mean()
        u = np.random.default_rng(1).uniform(a, b, (40_000, 2))
        u = u[u.sum(1) < 1] if kind == "proportions" else u
        p = np.exp(known.log_density(u))
        integral, error = p.sum() * np.prod(b - a) / 40_000, p.std() * np.prod(b - a) / 200
        assert abs(share - integral) < 4 * math.hypot(error, 0.5 / 200) + 1e-3


def test_settings_are_compared_without_test_rows():
    for name in ("iris", "few rows"):
        table = data.TABLES[name](0)
        part = table.for_choosing()
        assert len(part.test) == 0
        assert len(part.choice)
        seen = {tuple(row) for row in np.concatenate([part.train, part.validation, part.choice])}
        assert not seen & {tuple(row) for row in table.test}


def test_a_seed_splits_anew_and_tables_to_confirm_are_others():
    assert not np.array_equal(data.TABLES["iris"](0).test, data.TABLES["iris"](1).test)
    np.testing.assert_array_equal(data.TABLES["iris"](1).test, data.TABLES["iris"](1).test)
    assert len(data.CHOOSE) >= 12
    assert len(data.CONFIRM) >= 6
    assert not set(data.CHOOSE) & set(data.CONFIRM)


def job(method, nats, spread=0.2, table="iris", seed=0):
    """A finished job: the nats of four rows alternate around their mean; the standard error is 0.577 times `spread`."""
    rows = nats + spread * np.array([1, -1, 1, -1])
    return {"table": table, "method": method, "seed": seed, "nats": nats, "standard error": spread / math.sqrt(3),
            "rows": 9, "columns": 2, "seconds": 1.0, "steps": 5, "auroc": 0.5, "nats of rows": rows}  # fmt: skip


def write_jobs(path, jobs):
    """What a stage leaves: a line for every job, and the nats of its rows in a file."""
    path.with_suffix(".rows").mkdir(parents=True)
    for j in jobs:
        np.save(rows_file(path, j), np.float32(j["nats of rows"]))
    lines = ({key: value for key, value in j.items() if key != "nats of rows"} for j in jobs)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


class TestPaired:
    def test_the_error_is_that_of_the_differences(self):
        """Differences of 1 +- 0.1 on four rows: their deviation is 0.2 / sqrt(3), and their mean has half of that."""
        other = job("mixture", 5.0) | {"nats of rows": np.array([0.0, 10.0, 20.0, -30.0])}
        ours = job("default", 6.0) | {"nats of rows": other["nats of rows"] + [0.9, 1.1, 0.9, 1.1]}
        assert nats_behind([ours], [other]) == pytest.approx((1.0, 0.1 / math.sqrt(3)))
        assert nats_behind([other], [ours]) == pytest.approx((-1.0, 0.1 / math.sqrt(3)))

    def test_seeds_are_combined_as_independent_and_only_those_of_both_count(self):
        ours = [job("default", 1.0, 0.3, seed=s) for s in (0, 1, 2)]
        other = [job("mixture", m, seed=s) for s, m in ((0, 0.9), (2, 0.7))]
        assert nats_behind(ours, other) == pytest.approx((0.2, 0.1 / math.sqrt(3) / math.sqrt(2)))

    def test_a_loss_that_unpaired_errors_hide_is_no_tie(self):
        """Trap: rows that are hard for all methods make the error of each mean large, and say nothing about a loss."""
        rng = np.random.default_rng(0)
        hard = rng.normal(0, 3, 400)
        rows = {"default": hard + 0.05 + rng.normal(0, 0.1, 400), "spline flow": hard, "mixture": hard + 1}
        jobs = {m: [job(m, x.mean()) | {"nats of rows": x, "standard error": x.std() / 20}] for m, x in rows.items()}
        (row,) = density_rows({"iris": jobs})
        assert row["best other"] == "spline flow"
        assert 0.03 < row["behind the best"] < 0.07 < row["standard error"]
        assert row["its standard error"] == pytest.approx(0.1 / 20, rel=0.1)
        assert not row["best or within one error"]
        assert row["no worse than the mixture"]

    def test_other_rows_are_refused(self):
        short = job("mixture", 1.0) | {"nats of rows": np.zeros(3)}
        for other in (short, job("mixture", 1.0, seed=5)):
            with pytest.raises(ValueError, match="default and mixture must be evaluated on the same rows"):
                nats_behind([job("default", 1.0)], [other])


class TestRowsOfAJob:
    def test_a_job_returns_the_nats_of_the_test_rows_in_their_order(self):
        table, seed = data.TABLES["iris"](1), 1
        row, nats = tables.run_job("confirm", "iris", "mixture", seed, 1.0, math.inf)
        assert nats.dtype == np.float32
        np.testing.assert_allclose(nats, -tables.fit("mixture")(table, seed).score(table.test), rtol=1e-5)
        assert row["nats"] == pytest.approx(nats.mean(), rel=1e-5)
        json.dumps(row)

    def test_they_are_read_with_the_job(self, tmp_path):
        jobs = [job("default", 0.8), job("mixture", 1.0, table="digits, 10 axes", seed=2)]
        write_jobs(tmp_path / "confirm.jsonl", jobs)
        found = read_jobs(tmp_path / "confirm.jsonl")
        for j in jobs:
            (read_back,) = found[j["table"]][j["method"]]
            np.testing.assert_allclose(read_back["nats of rows"], j["nats of rows"], rtol=1e-6)

    def test_files_without_them_are_refused_in_one_sentence(self, tmp_path, monkeypatch):
        write_jobs(tmp_path / "confirm.jsonl", [job("default", 0.8)])
        rows_file(tmp_path / "confirm.jsonl", job("default", 0.8)).unlink()
        monkeypatch.setattr(sys, "argv", ["tables.py", "--stage", "publish", "--out", str(tmp_path)])
        with pytest.raises(
            SystemExit, match=r"without the nats of its rows, confirm.rows/iris - default - 0.npy.*again"
        ):
            tables.main()


class TestSummary:
    def jobs(self, ours):
        return {"iris": {"default": [job("default", ours, 0.3), job("default", ours, 0.3, seed=1)],
                         "mixture": [job("mixture", 1.0)], "spline flow": [job("spline flow", 0.9)]}}  # fmt: skip

    @pytest.mark.parametrize(("ours", "best", "mixture"), [(0.8, 1, 1), (0.95, 1, 1), (1.05, 0, 1), (1.1, 0, 0)])
    def test_the_goals_allow_one_paired_standard_error(self, ours, best, mixture):
        """Rows of a spread of 0.3 against 0.2 differ by 0.1, which has an error of 0.0577; ours alone has 0.122."""
        (row,) = density_rows(self.jobs(ours))
        assert row["standard error"] == pytest.approx(0.3 / math.sqrt(3) / math.sqrt(2))
        assert row["its standard error"] == pytest.approx(0.1 / math.sqrt(3))
        assert (row["best or within one error"], row["no worse than the mixture"]) == (best, mixture)
        groups = {found["tables"]: found for found in summary_rows([row])}
        assert groups["all"]["best or within one error"] == groups["to choose"]["best or within one error"] == best
        assert groups["to confirm"]["number"] == 0

    def test_what_is_published(self, tmp_path, monkeypatch):
        """The stage that the folder has replaces its rows; those of the other stage stay, with their run."""
        monkeypatch.setattr("iresnet.results.require_commit", lambda *_: None)
        old = [{"table": "nats", "data": "old", "run": 0}, {"table": "candidates", "candidate": "a", "run": 1}]
        write(Results("tables", old, [{"commit": "1"}, {"commit": "2"}]), tmp_path)
        jobs = [job("default", 0.8, seed=seed) for seed in (0, 1)] + [job("mixture", 1.0)]
        write_jobs(tmp_path / "confirm.jsonl", jobs)
        records = [{"commit": "3", "seeds": [s], "seconds": 5, "command": "c"} for s in (1, 0)]
        (tmp_path / "confirm.runs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        found = read(publish(tmp_path, tmp_path))
        assert {row["table"]: row["run"] for row in found.rows} == {"nats": 0, "goals": 0, "auroc": 0, "candidates": 1}
        assert [row["seeds"] for row in found.rows if row["table"] == "nats"] == [2]
        expected = records[1] | {"seeds": [0, 1], "seconds": 10, "earlier": records[:1]}
        assert found.runs == [expected, {"commit": "2"}]

    def test_candidates_are_compared_with_the_chosen_one_on_the_same_seeds(self):
        jobs = {
            "iris": {"a": [job("a", 1.0), job("a", 9.0, seed=1)], "b": [job("b", 1.3)]},
            "wine": {"b": [job("b", 2)]},
        }
        rows = {row["candidate"]: row for row in candidate_rows(jobs, "a")}
        assert rows["b"]["nats behind"] == pytest.approx(0.3)
        assert (rows["b"]["worse by an error"], rows["a"]["worse by an error"]) == (1, 0)

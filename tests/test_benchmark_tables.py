"""The tables of `benchmarks/tables.py`: their densities are densities, and nothing is chosen on test rows."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import table_data as data
from table_results import candidate_rows, density_rows, summary_rows
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


def job(method, nats, error=0.1, table="iris", seed=0):
    return {"table": table, "method": method, "seed": seed, "nats": nats, "standard error": error, "rows": 9,
            "columns": 2, "seconds": 1.0, "steps": 5, "auroc": 0.5}  # fmt: skip


class TestSummary:
    def jobs(self, ours):
        return {"iris": {"default": [job("default", ours), job("default", ours, seed=1)],
                         "mixture": [job("mixture", 1.0)], "spline flow": [job("spline flow", 0.9)]}}  # fmt: skip

    @pytest.mark.parametrize(("ours", "best", "mixture"), [(0.8, 1, 1), (0.96, 1, 1), (1.05, 0, 1), (1.1, 0, 0)])
    def test_the_goals_allow_one_standard_error_of_the_mean(self, ours, best, mixture):
        """Two seeds with 0.1 each have 0.0707 together."""
        (row,) = density_rows(self.jobs(ours))
        assert row["standard error"] == pytest.approx(0.1 / math.sqrt(2))
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
        (tmp_path / "confirm.jsonl").write_text("".join(json.dumps(j) + "\n" for j in jobs))
        records = [{"commit": "3", "seeds": [s], "seconds": 5, "command": "c"} for s in (1, 0)]
        (tmp_path / "confirm.runs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        found = read(publish(tmp_path, tmp_path))
        assert {row["table"]: row["run"] for row in found.rows} == {"nats": 0, "goals": 0, "auroc": 0, "candidates": 1}
        assert [row["seeds"] for row in found.rows if row["table"] == "nats"] == [2]
        expected = records[1] | {"seeds": [0, 1], "seconds": 10, "earlier": records[:1]}
        assert found.runs == [expected, {"commit": "2"}]

    def test_candidates_are_compared_with_the_chosen_one_on_the_same_seeds(self):
        jobs = {"iris": {"a": [job("a", 1.0), job("a", 9.0, seed=1)], "b": [job("b", 1.3)]}}
        rows = {row["candidate"]: row for row in candidate_rows(jobs, "a")}
        assert rows["b"]["nats behind"] == pytest.approx(0.3)
        assert (rows["b"]["worse by an error"], rows["a"]["worse by an error"]) == (1, 0)

"""`iresnet bench`: ratios and slopes on known data, what the methods compute, and the command."""

import json
import math
import time
from dataclasses import replace

import pytest
import torch

from iresnet import results
from iresnet.bench import Case, Sizes, bench, check_tasks, fit_slope, libraries, ratio, time_in_turn
from iresnet.bench.case import TIMED
from iresnet.bench.floor import estimate_products, exact_products, floor, inverse_products, training_products
from iresnet.bench.growth import resized
from iresnet.bench.memory import peak_memory
from iresnet.bench.networks import build_flow, code, constrained, expected_terms, plain
from iresnet.cli.completion import complete_task
from iresnet.plots import plot_growth, plot_ratios
from tools import speed

TINY = Case(2, 1, (4,), 8)
SIZES = Sizes(
    dimensions=(2,), blocks=(1,), hidden=(4,), batch=8, sampled=(3,), samples=4, remembered=(2,), seconds=0.01,
    rounds=2, growth={"depth": (1, 2), "terms": (1, 2)}, growth_base=(2, 1),
)  # fmt: skip


@pytest.fixture
def alone(monkeypatch):
    """No other library is installed."""
    monkeypatch.setattr(libraries, "find_spec", lambda name: None)


class TestRatios:
    def test_of_known_times(self):
        found = ratio([2.0, 4.0, 6.0, 8.0, 10.0], [1.0] * 5)
        assert (found.value, found.low, found.high) == (6.0, 4.0, 8.0)
        assert found.spread == pytest.approx(1 / 3)

    def test_are_those_of_the_same_round(self):
        assert ratio([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]).spread == 0  # the machine was slow in one round

    def test_of_one_round(self):
        found = ratio([3.0], [2.0, 9.0])
        assert (found.value, found.spread) == (1.5, None)

    def test_need_a_round(self):
        with pytest.raises(ValueError, match="rounds must be at least 1; got 0"):
            ratio([], [1.0])

    def test_every_function_is_called_in_every_round(self):
        calls: list[str] = []
        runs = {name: lambda name=name: calls.append(name) for name in "abc"}
        times = time_in_turn(runs, seconds=1.0, rounds=4)
        assert {name: len(t) for name, t in times.items()} == dict.fromkeys("abc", 4)
        assert calls[:3] == ["a", "b", "c"]  # the first calls are not counted
        assert sorted(calls[3:6]) == sorted(calls[6:9]) == ["a", "b", "c"]
        assert calls[3:6] != calls[6:9]  # another order in every round

    @pytest.mark.parametrize(("seconds", "rounds"), [(1e-3, 1), (0.015, 3), (10.0, 5)])
    def test_a_slow_function_is_called_less_often(self, monkeypatch, seconds, rounds):
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # wall time, which counts sleep
        runs = {"slow": lambda: time.sleep(0.02), "fast": lambda: None}
        times = time_in_turn(runs, seconds=seconds, rounds=5)
        assert {name: len(t) for name, t in times.items()} == {"slow": rounds, "fast": 5}


class TestSlopes:
    @pytest.mark.parametrize("slope", [-1.0, 0.0, 0.5, 2.0])
    def test_of_a_power_law(self, slope):
        sizes = [1, 3, 10, 40]
        found = fit_slope(sizes, [7 * n**slope for n in sizes])
        assert found.value == pytest.approx(slope, abs=1e-9)
        assert found.standard_error == pytest.approx(0, abs=1e-6)

    def test_has_the_standard_error_of_least_squares(self):
        # ln t = x + e at x = 0, 1, 2 with e = (1, -2, 1) c: no change of the slope, residual sum of squares 6 c^2.
        c = 0.1
        found = fit_slope([1, math.e, math.e**2], [math.exp(c), math.exp(1 - 2 * c), math.exp(2 + c)])
        assert found.value == pytest.approx(1)
        assert found.standard_error == pytest.approx(math.sqrt(6 * c**2 / 1 / 2))

    def test_two_sizes_have_no_standard_error(self):
        assert fit_slope([1, 2], [1.0, 2.0]).standard_error is None

    def test_one_size_has_no_slope(self):
        with pytest.raises(ValueError, match="sizes must be at least 2; got 1"):
            fit_slope([2, 2], [1.0, 1.0])

    @pytest.mark.parametrize(
        ("varied", "changed"),
        [("depth", {"blocks": 5}), ("width", {"hidden": (5,)}), ("batch", {"batch": 5}),
         ("dimension", {"dimension": 5}), ("terms", {})],
    )  # fmt: skip
    def test_one_size_is_varied(self, varied, changed):
        assert resized(TINY, varied, 5) == replace(TINY, **changed)


class TestFloor:
    CASE = Case(2, 3, (8,), 5)

    def operations(self, products):
        return sum(m * k * n for m, k, n, _ in products)

    def test_of_the_exact_log_determinant(self):
        forward, jacobian = 5 * (2 * 8 + 8 * 2), 5 * 2 * (8 * 2)
        assert self.operations(exact_products(self.CASE, training=False)) == forward + jacobian
        assert self.operations(exact_products(self.CASE, training=True)) == 3 * (forward + jacobian)

    def test_of_a_series(self):
        once = 5 * (2 * 8 + 8 * 2)
        assert self.operations(training_products(self.CASE, 7)) == (7 + 6) * once
        assert self.operations(estimate_products(self.CASE, 7)) == 8 * once

    def test_of_an_inverse(self):
        products = inverse_products(self.CASE, 10.0)
        assert self.operations(products) == (10 + 3) * 5 * (2 * 8 + 8 * 2)
        assert sum(dtype == torch.float64 for *_, dtype in products) == 3 * 2  # the proof of every block

    def test_every_task_has_one(self):
        assert set(floor(self.CASE, 4.0).tasks) == set(TIMED)


class TestMethods:
    def test_all_tasks_run(self):
        flow = build_flow(TINY)
        for method in (constrained(TINY, flow), plain(TINY), floor(TINY, 3.0)):
            for prepare in method.tasks.values():
                prepare()()
        assert set(constrained(TINY, flow).tasks) >= set(TIMED)

    def test_trained_weights_are_likelier(self):
        random, trained = Case(2, 2, (8, 8), 64), Case(2, 2, (8, 8), 64, trained=True)
        before, after = (build_flow(case).log_prob(case.data()).mean() for case in (random, trained))
        assert after > before + 0.2

    def test_every_layer_is_at_its_bound(self):
        flow = build_flow(Case(4, 2, (8, 8), 16))
        bounds = [block.bound((4,)).value for block in flow.transform if hasattr(block, "bound")]
        assert all(0.85 < bound <= 0.9 for bound in bounds)

    def test_the_roulette_has_its_expected_number_of_terms(self):
        q = 0.9**2 + (1 - 0.9**2) / 4
        assert expected_terms() == pytest.approx(4 + q / (1 - q))

    def test_the_inverse_is_proven(self):
        facts = constrained(TINY, build_flow(TINY)).facts()
        assert facts["measured error"] < 1e-4
        assert 0 < facts["proven block error"] < 1e-4
        assert facts["evaluations"] > 1

    def test_flows_of_zuko(self):
        pytest.importorskip("zuko")
        case = Case(3, 4, (8, 8), 16)
        flow = build_flow(case)
        for name in libraries.ZUKO:
            method = libraries.other(case, flow, name)
            assert 0.5 < method.parameters / sum(p.numel() for p in flow.parameters()) < 2
            for prepare in method.tasks.values():
                prepare()()
        assert set(constrained(TINY, flow).tasks) >= set(TIMED)

    @pytest.mark.parametrize("trained", [False, True])
    def test_normflows_computes_the_same_flow(self, trained):
        pytest.importorskip("normflows")
        case = Case(2, 2, (8, 8), 64, trained=trained)
        flow = build_flow(case)
        model = libraries._copy_to_normflows(case, flow)
        x = case.data()
        with torch.no_grad():
            assert torch.allclose(model.log_prob(x), flow.log_prob(x), atol=5e-3)  # norms: power iteration and a bound
        method = libraries.other(case, flow, "normflows")
        for prepare in method.tasks.values():
            prepare()()
        assert method.facts()["normflows measured error"] <= 3 * constrained(case, flow).facts()["measured error"]
        assert code(case, flow).shape == x.shape


def test_rows(alone):
    found = bench("tiny", list(TIMED), sizes=SIZES)
    ratios = [row for row in found.rows if row["table"] == "ratios"]
    assert [row["task"] for row in ratios] == [*list(TIMED)[:-1], "inverse", "sample", "sample", "sample"]
    assert [row["weights"] for row in ratios[-5:]] == ["random", "trained", "random", "random", "trained"]
    assert all(row["ms"] > 0 and row["floor"] > 0 and row["normflows"] is None for row in ratios)
    assert ratios[0]["plain, quartiles"][0] <= ratios[0]["plain"]
    assert (ratios[-2]["dimension"], ratios[-2]["batch"]) == (3, 4)
    networks = [row for row in found.rows if row["table"] == "networks"]
    assert networks[0]["iresnet"] == networks[0]["plain"] + 0
    assert found.runs[0]["versions"].keys() >= {"torch", "normflows", "zuko"}


@pytest.mark.slow
def test_memory_grows_with_the_batch():
    small, large = (peak_memory(Case(4, 2, (64, 64), batch), "plain", "exact") for batch in (512, 16384))
    assert small is not None
    assert large is not None
    assert large > 4  # MiB: two blocks of two layers, 64 wide, each kept for the backward pass
    assert large > small


@pytest.mark.gpu
def test_on_a_gpu():
    found = bench("tiny", sizes=replace(SIZES, dimensions=(2, 3)), device="cuda")
    assert {row["table"] for row in found.rows} == {"ratios", "networks", "memory", "growth"}
    assert all(row["MiB"] > 0 for row in found.rows if row["table"] == "memory")


@pytest.mark.slow
def test_the_whole_command(call):
    code, output = call("bench", "--quick", "--task", "log-prob", "--task", "memory", "--device", "cpu")
    assert code == 0
    assert "Peak memory" in output


class TestPlots:
    @pytest.fixture
    def measured(self, tmp_path, alone):
        found = bench("bench-cpu", ["log-prob", "sample", "growth"], sizes=SIZES)
        for folder in ("results", "docs/images"):
            (tmp_path / folder).mkdir(parents=True)
        results.write(found, tmp_path / "results")
        return found

    def test_rows_and_lines(self, measured):
        rows = speed.ratio_rows(measured)
        assert [row.name for row in rows] == [
            "log-likelihood, d = 2", "sampling, d = 2", "sampling, d = 3, 4 rows", "sampling, trained, d = 2",
        ]  # fmt: skip
        assert set(rows[0].ratios) == {"plain", "floor"}
        value, low, high = rows[0].ratios["floor"]
        assert low <= value <= high
        assert {(line.name, line.varied) for line in speed.growth_lines(measured)} >= {("step, series", "terms")}

    def test_of_every_device_that_was_measured(self, measured, tmp_path, capsys):
        speed.main(tmp_path)
        drawn = sorted((tmp_path / "docs" / "images").iterdir())
        assert [path.name for path in drawn] == ["growth-cpu.png", "speed-cpu.png"]
        assert all(path.stat().st_size > 10_000 for path in drawn)

    def test_need_something_to_plot(self, tmp_path):
        with pytest.raises(ValueError, match="rows must hold at least one task; got none"):
            plot_ratios([], tmp_path / "a.png", about="")
        with pytest.raises(ValueError, match="lines must hold at least one line; got none"):
            plot_growth([], tmp_path / "a.png", about="")


class TestCommand:
    @pytest.fixture(autouse=True)
    def _tiny(self, monkeypatch):
        import sys

        import iresnet.cli  # noqa: F401

        monkeypatch.setattr(sys.modules["iresnet.cli.bench"], "QUICK", SIZES)

    def test_json(self, capsys, tmp_path, alone):
        from iresnet import cli

        file = tmp_path / "mine.json"
        words = ["--task", "log-prob", "--task", "growth", "--quick", "--json", "--out", str(file), "--device", "cpu"]
        with pytest.raises(SystemExit) as stop:
            cli.main(["bench", *words])
        content = json.loads(capsys.readouterr().out)
        assert stop.value.code == 0
        assert {row["table"] for row in content["rows"]} == {"ratios", "networks", "growth"}
        assert json.loads(file.read_text())["name"] == "mine"
        assert content["missing"] == ["normflows", "zuko"]

    def test_tables_and_what_is_missing(self, call, alone):
        code, output = call("bench", "--quick", "--task", "sample", "--task", "growth", "--device", "cpu")
        assert code == 0
        for words in ("sampling", "floor", "above 1, iresnet is faster", "slope of ln time"):
            assert words in output
        assert "Not installed, so their columns are empty: normflows and zuko." in output
        assert "pip install normflows zuko" in output
        assert "zuko spline" not in output

    def test_an_unknown_task(self, call):
        code, output = call("bench", "--task", "samples")
        assert code == 2
        assert "--task must be one of exact, series" in output
        assert "got 'samples'. Did you mean 'sample'?" in output

    def test_a_results_file_is_json(self, call, tmp_path):
        code, output = call("bench", "--quick", "--out", tmp_path / "bench.csv")
        assert code == 2
        assert "--out must be a file that ends in .json; got " in output

    def test_the_shell_completes_tasks(self):
        assert complete_task("s") == ["series", "sample"]

    def test_a_changed_tree_is_refused_before_anything_is_measured(self, call, monkeypatch):
        monkeypatch.setattr(results, "_commit", lambda: "abc-dirty")
        code, output = call("bench", "--quick", "--out", results.ROOT / "results" / "bench-cpu.json")
        assert code == 2
        assert "a published result must come from a commit without changes; got abc-dirty." in output

    def test_no_name_is_all(self):
        assert check_tasks([]) == (*TIMED, "memory", "growth")
        assert check_tasks(["sample", "sample"]) == ("sample",)

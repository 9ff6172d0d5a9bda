"""Results files, the provenance of a run, and the tables generated from them."""

import errno
import json
import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from iresnet import results
from iresnet.results import PILOT, Results, markdown_table, provenance, read, require_commit, write
from tools import tables

ROWS = [{"dataset": "moons", "value": 1.25, "paper": None, "run": 0}, {"dataset": "board", "value": 3, "run": 0}]
TABLE = """\
| dataset | value | paper |
| :-- | --: | --: |
| moons | 1.25 | - |
| board | 3 | - |"""


@pytest.fixture
def example():
    return Results("example", rows=ROWS, runs=[provenance(seeds=[0, 1], seconds=1.5)])


# Files


def test_a_file_is_read_as_it_was_written(example, tmp_path):
    path = write(example, tmp_path / "new" / "folder")
    assert path.name == "example.json"
    assert read(path) == example
    assert list(path.parent.iterdir()) == [path]


def test_numbers_of_numpy_and_torch_and_paths_are_written_plainly(tmp_path):
    row = {"run": 0, "a": np.float32(0.5), "b": torch.tensor(2), "c": np.arange(2), "d": Path("x")}
    path = write(Results("plain", rows=[row], runs=[{}]), tmp_path)
    assert read(path).rows == [{"run": 0, "a": 0.5, "b": 2, "c": [0, 1], "d": "x"}]


def test_values_that_json_cannot_hold_are_refused_and_the_old_file_stays(example, tmp_path):
    path = write(example, tmp_path)
    with pytest.raises(ValueError, match="no NaN.*Write None"):
        write(Results("example", rows=[{"value": float("nan"), "run": 0}], runs=[{}]), tmp_path)
    with pytest.raises(TypeError, match="got object"):
        write(Results("example", runs=[{"what": object()}]), tmp_path)
    assert read(path) == example
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_file_and_raises_a_clear_error(example, tmp_path, monkeypatch):
    path = write(example, tmp_path)

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="cannot write .*example.json: No space left on device. Free disk space"):
        write(Results("example"), tmp_path)
    assert read(path) == example
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["", "a/b", None, "a\nb", "a\u202eb", "a\x00"])
def test_a_name_must_be_a_valid_file_name(name):
    with pytest.raises(ValueError, match="name must be a valid file name"):
        Results(name)


@pytest.mark.parametrize("run", [None, 1, -1, True, "0"])
def test_a_row_must_name_its_run(run):
    with pytest.raises(ValueError, match="row 0 must name its run by an index below 1.*Append provenance"):
        Results("example", rows=[{"value": 1.0, "run": run}], runs=[{}])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not a results file: Expecting"),
        ("[1, 2]", "expected an object with the keys name, rows, runs"),
        ('{"name": "bad", "rows": []}', "expected an object with the keys name, rows, runs"),
        ('{"name": "bad", "rows": {}, "runs": []}', "'rows' must be a list of objects"),
        ('{"name": "bad", "rows": [], "runs": [%s]}' % ("1, " * 99 + "1"), r"'runs' must be a list of objects.*\.\.\."),
        ('{"name": "good", "rows": [], "runs": []}', 'must be named good.json, after its "name"'),
    ],
)
def test_a_malformed_file_is_refused_with_its_path_and_the_reason(text, reason, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"bad\.json is not a results file.*{reason}|{reason}"):
        read(path)


# Commits

CLEAN, CHANGED = "0" * 40, "0" * 40 + "-dirty"
REFUSED = "a published result must come from a commit without changes; got {}. Commit the changes and run the command "


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The folder of a project's published results."""
    monkeypatch.setattr(results, "ROOT", tmp_path.resolve())
    return tmp_path / "results"


def of_runs(*runs):
    return Results("example", [{"value": i, "run": i} for i in range(len(runs))], list(runs))


@pytest.mark.parametrize("commit", [CHANGED, None])
def test_a_published_run_needs_a_commit_without_changes(own, commit):
    path = write(of_runs({"commit": CLEAN}), own)
    with pytest.raises(ValueError, match=f"^{re.escape(REFUSED.format(commit))}"):
        write(of_runs({"commit": CLEAN}, {"commit": commit}), own)
    assert read(path) == of_runs({"commit": CLEAN})


def test_runs_that_a_file_has_already_stay(own):
    before = {"commit": CHANGED, "seeds": (0, 1)}
    own.mkdir()
    (own / "example.json").write_text(json.dumps({"name": "example", "rows": [], "runs": [before]}))
    path = write(of_runs(before, {"commit": CLEAN}), own)
    assert [run["commit"] for run in read(path).runs] == [CHANGED, CLEAN]
    with pytest.raises(ValueError, match="got 0+-dirty"):
        write(of_runs({**before, "seeds": [2]}), own)


def test_a_run_whose_earlier_part_comes_from_a_changed_tree_is_refused(own):
    assert write(of_runs({"commit": CLEAN, "earlier": [{"commit": CLEAN}]}), own).is_file()
    with pytest.raises(ValueError, match="must come from a commit without changes; got 0+-dirty"):
        write(of_runs({"commit": CLEAN, "earlier": [{"commit": CLEAN}, {"commit": CHANGED}]}), own)


@pytest.mark.parametrize("more", [PILOT, {"budget": "published"}])
def test_pilots_and_values_that_others_published_need_no_commit(own, more):
    assert write(of_runs({"commit": None, **more}), own).is_file()


def test_other_folders_are_free(own, monkeypatch):
    monkeypatch.setattr(results, "_commit", lambda: CHANGED)
    for folder in (own / "more", own.parent, own.parent / "runs" / "results"):
        require_commit(folder)
        assert write(of_runs({"commit": CHANGED}), folder).is_file()


def test_the_folder_is_recognised_by_a_relative_path(own, monkeypatch):
    monkeypatch.chdir(own.parent)
    monkeypatch.setattr(results, "_commit", lambda: CHANGED)
    for folder in ("results", "./runs/../results"):
        with pytest.raises(ValueError, match="got 0+-dirty"):
            require_commit(folder)
    monkeypatch.setattr(results, "_commit", lambda: CLEAN)
    require_commit("results")


def git(folder, *words):
    identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", folder, *identity, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_commit_tells_whether_files_other_than_results_have_changed(own):
    own.mkdir()
    code, table = own.parent / "code.py", own / "table2.json"
    for file in (code, table):
        file.write_text("1")
    git(own.parent, "init", "--quiet")
    git(own.parent, "add", ".")
    git(own.parent, "commit", "--quiet", "-m", "first")
    head = git(own.parent, "rev-parse", "HEAD")
    table.write_text("2")
    assert results._commit() == head
    code.write_text("2")
    assert results._commit() == head  # the process runs the code that it began with
    results._commit_of.cache_clear()
    assert results._commit() == f"{head}-dirty"
    code.write_text("1")
    (own.parent / "notes.py").write_text("3")  # no part of the code
    results._commit_of.cache_clear()
    assert results._commit() == head
    (own.parent / "iresnet").mkdir()
    (own.parent / "iresnet" / "new.py").write_text("3")
    results._commit_of.cache_clear()
    assert results._commit() == f"{head}-dirty"


@pytest.fixture
def changed_tree(monkeypatch):
    """This project as if it had changes; what begins to measure fails."""
    monkeypatch.chdir(results.ROOT)
    monkeypatch.setattr(results, "_commit", lambda: CHANGED)
    monkeypatch.setattr(time, "perf_counter", lambda: pytest.fail("it began to measure"))


@pytest.mark.parametrize(
    "words",
    [
        "core.py",
        "demo.py",
        "toy.py",
        "flow.py --out results",
        "step.py --out results",
        "freshness.py --out results/freshness.json",
        "inverse.py --out results/inverse.json",
        "sampling.py --out results/sampling.json",
    ],
)
def test_a_benchmark_refuses_a_changed_tree_before_it_measures(words, monkeypatch, changed_tree):
    folder, argv = results.ROOT / "benchmarks", words.split()
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    with pytest.raises(ValueError, match="a published result must come from a commit"):
        runpy.run_path(str(folder / argv[0]), run_name="__main__")


def test_attacks_refuse_a_changed_tree_before_they_begin(monkeypatch, changed_tree, capsys):
    monkeypatch.setattr(sys, "argv", ["attack", "--kind", "layers", "--cases", "1", "--out", "results/attack.json"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("attack", run_name="__main__")
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(REFUSED.format(CHANGED))


# Circumstances


def test_provenance_says_how_a_number_was_computed(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/iresnet", "demo", "--seed", "1"])
    run = provenance(seeds=range(2), seconds=0.12345, precision="float64", epochs=3, parameters=10)
    assert run["command"] == "iresnet demo --seed 1"
    assert (run["seeds"], run["seconds"], run["precision"]) == ([0, 1], 0.123, "float64")
    assert (run["epochs"], run["parameters"]) == (3, 10)
    assert set(run["hardware"]) == {"cpu", "cores", "threads", "gpu"}
    assert run["hardware"]["cpu"]
    assert run["versions"]["torch"] == torch.__version__
    assert set(run["versions"]) == {"python", "torch", "iresnet"}
    assert run["date"].endswith("+00:00")
    json.dumps(run)


@pytest.mark.parametrize(
    ("program", "command"),
    [
        (results.ROOT / "iresnet" / "__main__.py", "iresnet x"),
        (results.ROOT / "benchmarks" / "core.py", "python benchmarks/core.py x"),
        ("/elsewhere/script.py", "python script.py x"),
    ],
)
def test_the_command_is_one_that_a_reader_can_type(program, command, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(program), "x"])
    assert provenance(seeds=[], seconds=0)["command"] == command


def test_a_command_can_be_given():
    assert provenance(seeds=[], seconds=0, command="make bench")["command"] == "make bench"


def test_no_commit_outside_a_checkout_or_without_git(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "ROOT", tmp_path)
    assert results._commit() is None
    (tmp_path / ".git").mkdir()
    assert results._commit() is None
    results._commit_of.cache_clear()
    monkeypatch.setenv("PATH", "")
    assert results._commit() is None


def test_the_processor_is_named_where_the_system_does_not(monkeypatch):
    def missing(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert isinstance(results._cpu_model(), str)


# Tables


def test_a_table_shows_every_column_but_the_run():
    assert markdown_table(ROWS) == TABLE


def test_a_table_shows_the_requested_columns():
    assert markdown_table(ROWS, ["value"]) == "| value |\n| --: |\n| 1.25 |\n| 3 |"


def test_text_is_aligned_left_and_cannot_break_the_table():
    assert markdown_table([{"a": "x|\ny", "b": False}]) == "| a | b |\n| :-- | :-- |\n| x\\| y | no |"


def test_an_unknown_column_is_refused():
    with pytest.raises(ValueError, match=r"Columns must be among .*'dataset'.*; got \['colour'\]"):
        markdown_table(ROWS, ["dataset", "colour"])


@pytest.fixture
def project(example, tmp_path):
    write(example, tmp_path / "results")
    (tmp_path / "docs").mkdir()
    return tmp_path


def section(inner, head="example"):
    return f"before\n\n<!-- results:{head} -->\n{inner}<!-- /results -->\n\nafter\n"


def test_pages_are_rewritten_once_and_then_are_up_to_date(project, capsys):
    readme, page = project / "README.md", project / "docs" / "page.md"
    readme.write_text(section("stale\n"))
    page.write_text(section("", 'example "dataset" paper') + section("", "absent"))
    assert tables.main(["--check"], project) == 1
    assert "README.md: out of date; run `make tables`" in capsys.readouterr().out
    assert "stale" in readme.read_text()
    assert tables.main([], project) == 0
    assert readme.read_text() == section(f"\n{TABLE}\n\n")
    assert "| moons | - |" in page.read_text()
    assert "*`results/absent.json`: not measured yet.*" in page.read_text()
    assert tables.main(["--check"], project) == 0


def test_a_section_must_be_closed(project):
    (project / "README.md").write_text("<!-- results:example -->\n" + section(""))
    with pytest.raises(ValueError, match="got 1 pairs of 2"):
        tables.main([], project)


def test_the_tables_of_this_project_are_up_to_date():
    assert tables.main(["--check"]) == 0


#: Results of networks that are not trained, of laws and attacks, and of time and memory.
UNTRAINED = (
    "attack", "bench-cpu", "bench-h200", "core", "flow", "freshness", "inverse", "large", "redesign", "sampling",
    "scores", "step", "table1", "table5",
)  # fmt: skip


def test_every_table_of_trained_networks_has_the_number_of_seeds():
    pages = [results.ROOT / "README.md", *(results.ROOT / "docs").rglob("*.md")]
    markers = [m for page in pages for m in re.findall(r"<!-- results:(\S+)( .*)? -->", page.read_text())]
    shown = [(name, words) for name, words in markers if name not in UNTRAINED and "budget=published" not in words]
    assert len(shown) > 30
    assert [name for name, words in shown if " seeds " not in f"{words} "] == []


def test_the_seeds_of_a_row_are_its_own_or_those_of_its_run(tmp_path):
    rows = [{"x": "a", "run": 0}, {"x": "b", "seeds": 3, "run": 0}, {"x": "c", "run": 1}]
    write(Results("some", rows, [{"seeds": [0]}, {"seeds": [0, 1]}]), tmp_path)
    page = "<!-- results:some x seeds -->\n<!-- /results -->"
    assert "| a | 1 |\n| b | 3 |\n| c | 2 |" in tables.render(page, tmp_path)
    assert "seeds" not in tables.render("<!-- results:some x -->\n<!-- /results -->", tmp_path).partition("-->")[2]


def test_a_marker_can_choose_rows(tmp_path):
    rows = [{"kind": "a", "good": True, "x": 1, "run": 0}, {"kind": "b c", "good": False, "x": 2, "run": 0}]
    write(Results("some", rows, [{}]), tmp_path)
    page = '<!-- results:some kind="b c" x -->\n<!-- /results -->'
    assert "| 2 |" in tables.render(page, tmp_path)
    assert "| 1 |" not in tables.render(page, tmp_path)
    assert "| 1 |" in tables.render("<!-- results:some good=yes x -->\n<!-- /results -->", tmp_path)
    others = tables.render("<!-- results:some good!=yes x -->\n<!-- /results -->", tmp_path)
    assert "| 2 |" in others
    assert "| 1 |" not in others


def test_a_table_can_leave_out_several_values_of_one_column(tmp_path):
    write(Results("some", [{"x": n, "run": 0} for n in (1, 2, 3)], [{}]), tmp_path)
    shown = tables.render("<!-- results:some x!=1 x!=3 x -->\n<!-- /results -->", tmp_path)
    assert "| 2 |" in shown
    assert "| 1 |" not in shown
    assert "| 3 |" not in shown

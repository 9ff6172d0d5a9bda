"""Published numbers come from commits of this repository: a reader can check out what made them."""

import subprocess
from pathlib import Path

import pytest

from iresnet import results

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "results").glob("*.json"))


def git(*words):
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)


@pytest.fixture(scope="module")
def history():
    """All commits of the history; there is none in a copy without git, or in a shallow clone."""
    if not (ROOT / ".git").exists() or git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("needs the whole history of the repository")
    return set(git("rev-list", "HEAD").stdout.split())


def missing(run, history):
    """What a run names that is no commit of the history. A commit that was combined with others says into which one.

    What the paper or others published has a source instead.
    """
    if run.get("budget") == "published":
        return [] if run["details"]["source"] else ["source"]
    named = [
        run.get("combined into", run["commit"]),
        *filter(None, [run.get("old commit")]),
        *results.commits_of(run)[1:],
    ]
    return [c for c in named if not any(known.startswith((c or "none").removesuffix("-dirty")) for known in history)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_run_names_a_commit_of_the_history(path, history):
    assert [missing(run, history) for run in results.read(path).runs] == [[]] * len(results.read(path).runs)


def is_pilot(run):
    return run.get("purpose") == "pilot"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_recipes_are_pilots_and_no_other_file_has_one(path):
    assert {is_pilot(run) for run in results.read(path).runs} == {path.stem.startswith("recipes-")}


def changed(runs):
    """The number of published runs without a commit, or whose working tree had changes."""
    return sum(
        any(str(commit).endswith(("-dirty", "None")) for commit in results.commits_of(run))
        for run in runs
        if results.needs_commit(run)
    )


def test_published_runs_come_from_commits_without_changes():
    assert {path.stem: changed(results.read(path).runs) for path in FILES} == {path.stem: 0 for path in FILES}


def test_changed_runs_are_counted_unless_they_are_pilots_or_published_by_others():
    dirty = {"commit": "0" * 40 + "-dirty"}
    assert changed([dirty, {"commit": None}, {}, {"commit": "0" * 40}]) == 3
    assert changed([{"commit": "0" * 40, "earlier": [dirty]}, {"commit": "0" * 40, "earlier": []}]) == 1
    assert changed([{**dirty, "purpose": "pilot"}, {"budget": "published"}]) == 0


def test_a_commit_that_is_nowhere_is_found(history):
    nowhere, somewhere = "0" * 40, next(iter(history))
    assert missing({"commit": nowhere}, history) == [nowhere]
    assert missing({"commit": f"{nowhere}-dirty"}, history) == [f"{nowhere}-dirty"]
    assert missing({"commit": nowhere, "combined into": nowhere}, history) == [nowhere]
    assert missing({"commit": nowhere, "combined into": somewhere, "old commit": nowhere}, history) == [nowhere]
    assert missing({"commit": somewhere, "earlier": [{"commit": nowhere}]}, history) == [nowhere]
    assert missing({"commit": somewhere}, history) == []
    assert missing({"commit": nowhere, "combined into": somewhere}, history) == []

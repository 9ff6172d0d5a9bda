"""Every numbered script in examples/ runs without errors or warnings."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "examples"

#: Examples that need a package which is not installed with the others.
NEEDS = {"08_score_with_ray_data": "ray"}

EXAMPLES = sorted(path for path in ROOT.glob("[0-9]*.py") if path.stem not in NEEDS)

#: Examples that run a whole training.
LONG = (
    "02_your_own_resnet",
    "04_conditional_density",
    "05_scores_for_a_table",
    "06_one_network_four_jobs",
    "07_prediction_intervals",
)


@pytest.mark.no_cover
@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=[pytest.mark.slow] * (p.stem in LONG), id=p.stem) for p in EXAMPLES]
)
def test_example_runs(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setattr("sys.argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    assert not any(tmp_path.iterdir())  # an example leaves nothing behind


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("name", NEEDS)
def test_example_that_needs_more_runs(name, tmp_path):
    """In a process of its own, since other packages may warn, or leave threads."""
    pytest.importorskip(NEEDS[name])
    path = next(p for p in ROOT.glob("*.py") if p.stem == name)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT.parent), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, path], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "68.0" in done.stdout
    assert not any(tmp_path.iterdir())


def test_examples_exist():
    assert len(EXAMPLES) >= 4

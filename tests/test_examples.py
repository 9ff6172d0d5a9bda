"""Every numbered script in examples/ runs without errors or warnings."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("[0-9]*.py"))


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


def test_examples_exist():
    assert len(EXAMPLES) >= 4

"""`benchmarks/scores.py`: the rate of image scores, with their errors and ranks."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import scores

from iresnet.evaluate import log_likelihood
from iresnet.results import read
from iresnet.run import Run


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scores")
    with pytest.MonkeyPatch.context() as patch:
        words = ["--images", "3", "--reference-draws", "2", "--threads", "1", "--out", str(folder)]
        patch.setattr(sys, "argv", ["scores.py", *words])
        scores.main()
    return read(folder / "scores.json")


@pytest.mark.slow
def test_every_tolerance_is_measured(written):
    assert [row["tolerance"] for row in written.rows] == ["default", "2 x default", "0.5 x default"]
    default, looser, tighter = written.rows
    assert looser["nats"] == 2 * default["nats"]
    assert tighter["draws per image"] >= default["draws per image"] >= looser["draws per image"] >= 4
    for row in written.rows:
        assert row["images/s"] > 0
        assert row["standard error"] <= row["largest standard error"]
        assert -1 <= row["rank correlation"] <= 1
    assert written.runs[0]["seeds"] == [0]


@pytest.mark.slow
def test_images_are_whole_grey_levels_and_scored_as_the_command_does(written):
    run = Run.open(scores.MODEL)
    model = run.model()
    data = scores.draw_images(run, model, 3)
    assert data.x.dtype == torch.uint8
    tolerance = scores.score_tolerance(model, run.schema, run.reference())
    found = log_likelihood(model, data, tolerance=tolerance).standard_error
    assert float(found.mean()) == pytest.approx(written.rows[0]["standard error"], rel=1e-3)


def test_the_rank_correlation():
    a = torch.tensor([0.3, -2.0, 5.0, 1.0])
    assert scores.rank_correlation(a, a.exp()) == 1
    assert scores.rank_correlation(a, -a) == -1

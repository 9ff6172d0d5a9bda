"""What the commands say of densities: the paper's protocol, and strange rows."""

import json
import sys

import numpy as np
import pytest

from iresnet.data.corruptions import CORRUPTIONS, SYNTHETIC
from tests.runs import copy_of, trained


@pytest.fixture
def folder(tmp_path):
    return copy_of(trained(), tmp_path / "run")


def kept(folder):
    return json.loads((folder / "evaluation.json").read_text())


def test_the_protocol_has_a_line_and_is_kept(call, folder):
    code, text = call("evaluate", folder, "--draws", 2, "--rows", 40, "--protocol", "--limit", 0.05)
    assert code == 0
    (line,) = (line for line in text.splitlines() if line.startswith("protocol "))
    for words in ("bits/dim; bias 0 (exact determinants); estimator ± ", "over 40 samples ± ", "one sample ± "):
        assert words in line
    found = kept(folder)["protocol"]
    assert f"{found['value']:.4f}" in line
    assert found["estimator_error"] <= found["limit"] == 0.05
    assert found["rows"] == 40


@pytest.mark.slow
def test_strange_rows_have_a_line_each(call, folder, monkeypatch):
    monkeypatch.setattr(sys.modules["iresnet.cli.evaluate"], "STRANGE", 60)
    code, text = call("evaluate", folder, "--draws", 2, "--rows", 40, "--ood", "corrupted", "--ood", "digits")
    assert code == 0
    lines = [line for line in text.splitlines() if line.startswith("ood ")]
    assert len(lines) == len(CORRUPTIONS) + len(SYNTHETIC) + 1
    assert lines[-1].startswith("ood      digits: AUROC by likelihood 0.")
    found = {d["name"]: d for d in kept(folder)["outside"]}
    assert abs(found["digits"]["likelihood"] - 0.5) < 0.2  # the run's own kind
    assert found["noise"]["typicality"] > 0.9


@pytest.mark.parametrize("option", [("--protocol",), ("--ood", "corrupted")])
def test_a_classifier_has_none(call, tmp_path, option):
    folder = copy_of(trained("digits-classifier"), tmp_path / "run")
    code, text = call("evaluate", folder, *option)
    assert code == 2
    assert f"{option[0]} needs a density; this model only classifies." in text


def test_mistakes(call, folder):
    code, text = call("evaluate", folder, "--protocol", "--limit", 0, "--rows", 5, "--draws", 2)
    assert (code, "bias must be positive, in bits per dimension; got 0.0." in text) == (2, True)
    code, text = call("evaluate", folder, "--ood", "nothing-like-it")
    assert code == 2
    assert "nothing-like-it" in text


class TestRefusedBeforeTheEvaluation:
    """An option that does not apply is refused before anything is computed, so nothing is saved either."""

    def test_limit_without_protocol(self, call, folder):
        code, text = call("evaluate", folder, "--limit", 0.01)
        assert (code, text) == (
            2,
            "iresnet: --limit is the target error of --protocol, which was not given; got 0.01. Add it.\n",
        )
        assert not (folder / "evaluation.json").exists()

    def test_a_limit_that_is_not_positive(self, call, folder):
        assert call("evaluate", folder, "--protocol", "--limit", -1)[0] == 2
        assert not (folder / "evaluation.json").exists()

    def test_a_radius_for_a_density(self, call, tmp_path):
        folder = copy_of(trained("digits-density"), tmp_path / "run")
        code, text = call("evaluate", folder, "--radius", 1)
        assert code == 2
        assert "--radius needs a classifier; this model only has a density." in text
        assert not (folder / "evaluation.json").exists()

    def test_a_radius_for_data_without_labels(self, call, folder, tmp_path):
        np.save(tmp_path / "x.npy", np.zeros((4, 1, 8, 8), np.uint8))
        code, text = call("evaluate", folder, "--data", tmp_path / "x.npy", "--radius", 1)
        assert code == 2
        assert "this metric needs labels" in text
        assert "density" not in text

"""What a report is made from, collected from a run folder."""

import pytest
import torch

from iresnet.report import page
from iresnet.report.gather import gather
from iresnet.run import Run
from tests.runs import copy_of, trained

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_everything_comes_back_on_the_cpu(device):
    m = gather(Run.open(trained()), device=device, seed=1)
    tensors = [m.samples, m.data, m.interpolation, *vars(m.reconstruction).values()]
    tensors += [t for a in m.anomalies for t in (a.images, a.scores)]
    assert all(t.device.type == "cpu" for t in tensors)
    assert len(m.samples) == len(m.data) == 64
    assert float(m.reconstruction.errors.max()) < 1e-5
    assert m.anomalies[0].name == "original"
    assert "Interpolation" in page(m)


def test_the_seed_chooses_rows_and_samples():
    run = Run.open(trained())
    first, again, other = (gather(run, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.samples, again.samples)
    assert torch.equal(first.data, again.data)
    assert not torch.equal(first.samples, other.samples)
    assert not torch.equal(first.data, other.data)


def test_a_table_is_interpolated_too_and_has_no_corruptions():
    m = gather(Run.open(trained("points-density")))
    assert m.interpolation.shape == (6, 9, 2)
    assert m.anomalies == []
    assert "Each line interpolates between two test points" in page(m)


def test_a_classifier_has_no_samples():
    m = gather(Run.open(trained("digits-classifier")))
    assert m.samples is None
    assert m.anomalies == []
    assert m.reconstruction is not None


def test_a_linear_layer_of_images_has_its_singular_values_too(tmp_path, call):
    """Behind Flatten it takes all the values of an image as one row."""
    folder = copy_of(trained("digits-certified"), tmp_path / "run")
    code, printed = call("report", folder, "--rows", "20")
    assert code == 0, printed
    layers = gather(Run.open(folder)).spectra
    assert layers
    assert all(max(layer.values) <= layer.bound * (1 + 1e-6) for layer in layers)

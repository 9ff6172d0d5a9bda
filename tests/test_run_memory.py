"""A training without a folder: the same model as with one, and a folder afterwards."""

from dataclasses import replace

import pytest
import torch

from iresnet import data
from iresnet.run import Run, TrainedModel, start, train_in_memory

from .runs import tiny, trained
from .zoo import constrained_layers


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The same experiment, trained in a folder and in memory."""
    experiment = tiny("points-density", steps=8)
    splits = data.load(experiment.data)
    result = start(experiment, tmp_path_factory.mktemp("runs") / "run", splits=splits)
    return result, train_in_memory(experiment, splits.train, splits.validation)


def test_it_is_the_model_of_a_run(both):
    result, found = both
    expected = result.run.model().state_dict()
    assert found.model.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.model.state_dict().items())
    assert str(found.certificate) == str(result.certificate)
    assert found.tightened == result.tightened
    assert torch.equal(found.reference, result.run.reference())


def test_its_log_is_that_of_a_run(both):
    result, found = both
    for mine, theirs in zip(found.log, result.run.log(), strict=True):
        shared = {name for name, value in theirs.items() if value is not None} - {"seconds"}
        assert {name: mine[name] for name in shared} == pytest.approx({name: theirs[name] for name in shared}, rel=1e-5)


def test_it_is_saved_as_a_run_and_opened(both, tmp_path):
    _, found = both
    run = found.save(tmp_path / "saved")
    again = TrainedModel.open(tmp_path / "saved")
    assert (again.experiment, again.schema) == (found.experiment, found.schema)
    assert str(again.certificate) == str(found.certificate)
    assert torch.equal(again.reference, found.reference)
    assert run.read_json("certificate.json")["passed"]
    assert run.read_json("environment.json")["step"] == 8
    assert sorted(p.name for p in run.folder.iterdir() if p.is_file() and p.suffix != ".lock") == [
        "certificate.json", "config.toml", "data.json", "environment.json", "log.csv", "model.safetensors",
        "schema.json",
    ]  # fmt: skip


def test_its_certificate_is_that_of_the_weights_as_they_are(both, tmp_path):
    """Trap: a model that was opened, changed and saved got the certificate of the weights before."""
    _, found = both
    changed = TrainedModel.open(found.save(tmp_path / "before").folder)
    assert changed.certificate.passed
    with torch.no_grad():
        for layer in constrained_layers(changed.model):
            layer.parametrizations.weight.original.mul_(30)
            layer.parametrizations.weight[0].gradient.zero_()
    run = changed.save(tmp_path / "after")
    assert not changed.certificate.passed
    assert run.read_current_json("certificate.json")["passed"] is False


def test_a_folder_with_a_run_is_kept(both, tmp_path):
    _, found = both
    found.save(tmp_path / "saved")
    with pytest.raises(ValueError, match="already holds a run"):
        found.save(tmp_path / "saved")
    assert found.save(tmp_path / "saved", overwrite=True).folder == tmp_path / "saved"


def test_a_classifier_has_no_reference(tmp_path):
    experiment = tiny("digits-classifier")
    splits = data.load(experiment.data)
    found = train_in_memory(experiment, splits.train, splits.validation)
    assert found.reference is None
    assert TrainedModel.open(found.save(tmp_path / "run").folder).reference is None


def test_a_run_of_before_is_opened():
    found, run = TrainedModel.open(trained()), Run.open(trained())
    assert found.log == run.log()
    assert found.environment["step"] == run.experiment.training.steps


def test_weights_are_those_of_repeated_samples():
    """Weights 0 and 1 are the same model as the samples of weight 1 alone, but for the batches."""
    experiment = tiny("points-density", steps=2)
    splits = data.load(experiment.data)
    few = splits.train.take(range(40))
    weights = (torch.arange(40) % 2).double()
    weighted = train_in_memory(experiment, replace(few, weights=weights), splits.validation)
    alone = train_in_memory(experiment, few.take(range(1, 40, 2)), splits.validation)
    mean, expected = (m.model.transform[0].mean for m in (weighted, alone))
    assert torch.allclose(mean, expected, atol=1e-2)
    assert not torch.allclose(mean, few.x.mean(0), atol=1e-2)

"""The command on networks of which nothing is proven: what came of it, and no remedy that does not help."""

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from torch import nn

from iresnet import Chain, Classifier, Standardise, __version__, certify, cli, evaluate
from iresnet.data import Dataset, DataSettings, Schema
from iresnet.evaluate import Inverse
from iresnet.fixed_point import Banach
from iresnet.models.unconstrained import UnconstrainedBlock
from iresnet.report import page
from iresnet.report.gather import gather
from iresnet.run import Run, start, weights, write_certificate
from iresnet.train import checkpoint
from tests.reading import Read
from tests.runs import copy_of, tiny

FREE = ("vanilla164", "batchnorm164")


@cache
def trained(name):
    """A finished run on digits, made once a process."""
    experiment = tiny(name)
    network = experiment.network if name == "resnet164" else replace(experiment.network, padding=1)
    folder = Path(mkdtemp()) / name
    start(replace(experiment, data=DataSettings("digits"), network=network), folder)
    return folder


def exploded(folder):
    """The same run with layers so large that the iteration overflows."""
    saved = checkpoint.load(folder / "model.safetensors")
    grown = {k: 60.0 * v if ".g." in k and v.dim() == 4 else v for k, v in saved.tensors["weights"].items()}
    checkpoint.save(
        checkpoint.Checkpoint({"weights": grown}, saved.state), folder / "model.safetensors", version=__version__
    )
    run = Run.open(folder)
    write_certificate(run, certify(run.model(), run.schema.shape), run.sha256())
    return folder


# Known answers


def test_a_block_that_triples_diverges_and_one_that_halves_is_proven():
    def inverse(a):
        g = nn.Linear(2, 2, bias=False)
        nn.init.zeros_(g.weight).fill_diagonal_(a)
        data = Dataset(torch.ones(3, 2), None, Schema((2,)))
        return evaluate.inverse(Classifier(Chain(UnconstrainedBlock(g)), nn.Identity()).eval(), data)

    with torch.no_grad():
        half, triple = inverse(0.5), inverse(3.0)
    assert half.proven == 3
    assert str(half).startswith("3 of 3 samples proven block by block, ")
    assert triple.proven == 0
    assert str(triple).startswith("0 of 3 samples proven, as not every block is proven to be a contraction; ")


@pytest.mark.parametrize(
    ("measured", "diverged", "words"),
    [
        (8.9e-11, 0, "; after 30 evaluations per sample, code residual 5.7e-11 and measured error 8.9e-11"),
        (
            9.0,
            4,
            "; the iteration diverges, after 30 evaluations per sample, code "
            "residual 5.7e-11 and measured error 9.0e+00",
        ),
        (math.inf, 1, "; the iteration diverges for 1 of 4 samples, after 30 evaluations per sample"),
        (math.inf, 0, "; the iteration diverges, after 30 evaluations per sample"),
        (math.nan, 4, "; the iteration diverges, after 30 evaluations per sample"),
    ],
)
def test_what_an_iteration_came_to_is_said_as_it_is(measured, diverged, words):
    found = Inverse(4, "float64", 0, math.inf, 5.7e-11, measured, math.inf, False, 30.2, diverged)
    assert str(found) == f"0 of 4 samples proven, as not every block is proven to be a contraction{words}"


@pytest.mark.parametrize(
    ("converged", "words"), [(3, ""), (2, " and converges for 2"), (0, " and converges for none"), (None, "")]
)
def test_samples_that_did_neither_are_not_taken_for_converged(converged, words):
    found = Inverse(4, "float64", 0, math.inf, 5.7e-11, math.inf, math.inf, False, 30.2, 1, converged)
    assert f"the iteration diverges for 1 of 4 samples{words}, after 30 evaluations per sample" in str(found)


@pytest.mark.parametrize(("a", "converged"), [(0.5, 3), (0.99, 0), (2.0, 0)])
def test_samples_whose_codes_are_reached_have_converged(a, converged):
    g = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        nn.init.zeros_(g.weight).fill_diagonal_(a)
    model = Classifier(Chain(UnconstrainedBlock(g)), nn.Identity()).eval()
    data = Dataset(torch.ones(3, 2), None, Schema((2,)))
    assert evaluate.inverse(model, data, solver=Banach(max_iterations=60)).converged == converged


@pytest.mark.parametrize(("a", "diverged"), [(0.5, False), (0.99, False), (2.0, True)])
def test_steps_that_grow_are_called_divergence_before_numbers_overflow(a, diverged):
    """The rule of Algorithm 1 in the paper's tables, in a few steps of which no number is large."""
    g = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        nn.init.zeros_(g.weight).fill_diagonal_(a)
    branch = nn.Sequential(g, nn.Softplus(), nn.BatchNorm1d(2)) if a == 0.5 else g
    chain = Chain(UnconstrainedBlock(branch))
    solution = chain.double().eval().solve(torch.ones(3, 2, dtype=torch.float64), solver=Banach(max_iterations=5))
    assert bool(solution.x.abs().max() < 100)
    assert solution.diverged.tolist() == [diverged] * 3


def test_scaled_inputs_are_no_codes():
    model = Classifier(Standardise(torch.zeros(2), torch.ones(2)), nn.Linear(2, 2)).eval()
    data = Dataset(torch.ones(3, 2), torch.zeros(3, dtype=torch.int64), Schema((2,), classes=("a", "b")))
    assert not evaluate.has_inverse(model)
    assert set(evaluate.evaluate(model, data)) == {"split", "rows", "error", "confusion"}
    sentence = r"an inverse needs invertible blocks; this model \(an ordinary ResNet\) has none. Train one with"
    for ask in (evaluate.inverse, evaluate.reconstruct, evaluate.interpolate):
        with pytest.raises(ValueError, match=sentence):
            ask(model, data)


# An ordinary ResNet


def test_a_resnet_is_judged_by_its_classes_alone(call, tmp_path):
    folder = copy_of(trained("resnet164"), tmp_path / "run")
    code, text = call("evaluate", folder)
    assert code == 0
    assert "error" in text
    assert "proven" not in text
    assert "inverse" not in json.loads((folder / "evaluation.json").read_text())


@pytest.mark.parametrize("command", ["invert", "interpolate"])
def test_a_resnet_is_not_inverted(call, tmp_path, command):
    folder = copy_of(trained("resnet164"), tmp_path / "run")
    code, text = call(command, folder)
    assert code == 2
    assert "an inverse needs invertible blocks; this model (an ordinary ResNet) has none." in text
    assert sorted(p.name for p in folder.glob("in*")) == []


def test_the_inputs_of_a_resnet_are_not_probed_as_codes(call):
    code, text = call("evaluate", trained("resnet164"), "--probe")
    assert code == 2
    assert "--probe needs an invertible model; an ordinary ResNet has no codes" in text


def test_the_report_of_a_resnet_shows_no_inverse(call, tmp_path):
    folder = copy_of(trained("resnet164"), tmp_path / "run")
    assert call("report", folder)[0] == 0
    read = Read((folder / "report.html").read_text())
    assert {"training", "test-metrics", "settings"} <= set(read.ids)
    assert not {"reconstructions", "interpolation", "certificate"} & set(read.ids)


# Without the constraint


@pytest.mark.parametrize("name", FREE)
def test_nothing_is_claimed_of_an_inverse_without_a_proof(call, tmp_path, name):
    folder = copy_of(trained(name), tmp_path / "run")
    code, text = call("evaluate", folder, "--rows", 20)
    assert code == 0
    assert "0 of 20 samples proven, as not every block is proven to be a contraction; " in text
    text = (folder / "evaluation.json").read_text()
    assert "Infinity" not in text
    assert "NaN" not in text
    assert json.loads(text)["inverse"]["largest_block_bound"] is None


@pytest.mark.parametrize("name", FREE)
@pytest.mark.parametrize("tighten", [False, True])
def test_tightening_is_not_offered_where_there_is_nothing_to_tighten(call, tmp_path, name, tighten):
    folder = copy_of(trained(name), tmp_path / "run")
    code, text = call("certify", folder, *["--tighten"] * tighten)
    assert code == 1
    assert "the certificate does not pass. None of its layers is constrained, so none can be tightened." in text
    assert "Try:" not in text
    assert ("No layer has a coefficient; the model in" in text) == tighten


@pytest.mark.parametrize("name", FREE)
def test_a_larger_tolerance_is_not_offered_where_no_tolerance_helps(call, tmp_path, name):
    folder = copy_of(trained(name), tmp_path / "run")
    code, text = call("invert", folder, "-n", 3)
    assert code == 1
    assert "this inverse is not proven, since not every block is proven to be a contraction" in text
    assert f"See: iresnet certify {folder}" in text
    assert "larger --tolerance" not in text
    assert (folder / "inverse.png").is_file()


def test_an_iteration_that_overflows_is_written_and_drawn(call, tmp_path):
    folder = exploded(copy_of(trained("vanilla164"), tmp_path / "run"))
    code, text = call("invert", folder, "-n", 3)
    assert code == 1
    assert "the iteration diverges, after" in text
    assert "inf" in (folder / "inverse-errors.csv").read_text()
    assert (folder / "inverse.png").is_file()
    assert call("report", folder, "--rows", 20)[0] == 0
    text = Read((folder / "report.html").read_text()).text
    assert "measured: the iteration diverges for the worst of 20 samples" in text
    assert "not invertible" not in text


@pytest.mark.parametrize("name", FREE)
def test_lines_between_codes_need_a_proof(call, tmp_path, name):
    folder = copy_of(trained(name), tmp_path / "run")
    code, text = call("interpolate", folder, "--pairs", 1, "--steps", 2)
    assert code == 1
    assert "interpolation needs a proven inverse, and not every block is proven to be a contr" in text
    assert f"iresnet invert {folder}" in text


@pytest.mark.parametrize("name", FREE)
def test_a_report_leaves_out_what_needs_a_proof_and_says_why(name):
    m = gather(Run.open(trained(name)))
    assert m.interpolation is None
    assert m.reconstruction is not None
    assert m.spectra == []
    text = Read(page(m)).text
    assert "Left out: interpolation needs a proven inverse" in text
    assert "Its inverse is not proven." in text


# Models that come with the library


def test_models_that_come_with_the_library_are_listed(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "WEIGHTS", tmp_path)
    shown = []
    for name in (None, "some-classifier"):
        if name:
            (tmp_path / name).mkdir()
            (tmp_path / name / "model.safetensors").touch()
        with pytest.raises(SystemExit):
            cli.main(["presets"])
        shown.append(" ".join(capsys.readouterr().out.split()))
    assert "come with the library" not in shown[0]
    assert "Trained models that come with the library" in shown[1]
    assert "some-classifier. Example: iresnet certify some-classifier" in shown[1]

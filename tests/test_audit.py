"""The audit holds for what the library makes, and names what was tampered with: files, or the library's answers."""

import hashlib
import importlib
import json
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from iresnet import CertifiedSeries, Exact, Flow, LipSwish, MaxMin, PowerSeries, ResidualBlock, Sine, spectral
from iresnet.audit import CHECKS, Finding, Subject, audit, norms, radius
from iresnet.audit.extended import evaluate_extended, to_extended
from iresnet.audit.subject import Skipped
from iresnet.evaluate import certified_radius
from iresnet.lipschitz import Concatenated, Potential
from iresnet.run import Run, start
from iresnet.transforms.dequantisation import LearnedNoise
from tests.material import normal
from tests.runs import copy_of, tiny, trained

#: Checks that are made of a tiny run of each preset; the others do not apply to it.
PROOFS = {"weights", "certificate", "norms", "contraction", "whole map", "inverse", "round trip"}
MADE = {
    "digits-hybrid": PROOFS | {"log-determinant", "likelihood"},
    "digits-certified": PROOFS | {"radius"},
    "points-density": PROOFS | {"log-determinant", "likelihood", "samples"},
    "toy-glow": {"weights", "likelihood", "samples"},
}


def findings(folder, **options) -> dict[str, Finding]:
    return {f.name: f for f in audit(Subject(Run.open(folder), **{"seconds": 0.2} | options))}


def failed(folder, **options) -> set[str]:
    return {name for name, f in findings(folder, **options).items() if f.holds is False}


@pytest.fixture
def folder(tmp_path):
    """A hybrid that may be tampered with."""
    return copy_of(trained(), tmp_path / "run")


@cache
def large() -> Path:
    """A run of more than 64 dimensions, whose likelihoods are estimates, with an asked constant that is used fully."""
    folder = Path(mkdtemp())
    np.savez(folder / "t.npz", x=np.random.default_rng(0).normal(size=(200, 66)) @ np.diag(np.linspace(1, 2, 66)))
    preset = tiny("table-density")
    settings = replace(preset.network, lipschitz=0.9, width=66, depth=1, terms=4, activation="sine", last_scale=1.0)
    start(replace(preset, data=replace(preset.data, source=str(folder / "t.npz")), network=settings), folder / "run")
    return folder / "run"


@cache
def noisy() -> Path:
    """A run that learns its noise."""
    folder, preset = Path(mkdtemp()) / "run", tiny("digits-density")
    start(replace(preset, network=replace(preset.network, dequantiser=4)), folder)
    return folder


def rewrite(folder, change, **more):
    """Change the tensors of a run's model, and leave everything else as it is, what its header says too."""
    path = folder / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        header, tensors = json.loads(file.metadata()["iresnet"]), {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    change(tensors)
    save_file(tensors, path, metadata={"iresnet": json.dumps(header | more)})
    return header, tensors


def scale(tensors, factor=1.2):
    """Let every constrained layer use its weight times a factor."""
    for name in list(tensors):
        if name.endswith(".0.gradient"):
            original = name.replace(".0.gradient", ".original")
            tensors[original] = tensors[original] * factor
            tensors[name] = tensors[name] / factor  # sigma, and so the constraint, stays


def edit(folder, name, change):
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))


# ---------------------------------------------------------------------------------------------- what holds


@pytest.mark.parametrize("preset", MADE)
def test_every_check_holds_or_says_why_it_does_not_apply(preset):
    found = findings(trained(preset))
    assert list(found) == list(CHECKS)
    assert {name for name, f in found.items() if f.holds} - {"digest"} == MADE[preset]
    assert [f for f in found.values() if f.holds is False] == []
    assert all(f.words.startswith("skipped: ") for f in found.values() if f.holds is None)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_seed_raises_a_false_alarm(seed):
    assert failed(trained("points-density"), seed=seed) == set()
    assert failed(large(), seed=seed) == set()


def test_error_bars_and_noise_are_checked_where_there_are_any():
    assert findings(large())["error bars"].holds
    assert findings(noisy())["noise"].holds


def test_a_network_without_the_constraint_claims_nothing(tmp_path):
    preset = tiny("digits-classifier")
    start(replace(preset, network=replace(preset.network, constrained=False, normalisation="batchnorm")), tmp_path)
    found = findings(tmp_path)
    assert [f for f in found.values() if f.holds is False] == []
    assert "no block is claimed to be a contraction" in found["norms"].words


# ---------------------------------------------------------------------------------------------- files that lie


def test_scaled_weights_beside_their_old_certificate(folder):
    rewrite(folder, scale)
    assert {"certificate", "norms"} <= failed(folder)


def test_weights_that_are_no_numbers(folder):
    rewrite(folder, lambda tensors: next(iter(tensors.values())).fill_(torch.nan))
    assert "weights" in failed(folder)


def test_a_certificate_that_claims_more(folder):
    def claim(content):
        for block in content["blocks"]:
            block["lipschitz"] *= 0.5
            for layer in block["layers"]:
                layer["bound"] *= 0.5

    edit(folder, "certificate.json", claim)
    assert {"certificate", "norms", "contraction"} <= failed(folder)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda c: c.update(passed=False), "certificate"),
        (lambda c: c["blocks"].pop(), "certificate"),
        (lambda c: c["blocks"][0].pop("layers"), "certificate"),
        (lambda c: c.update(blocks="none"), "certificate"),
        (lambda c: c["stretch"].update(forward=1e-3), "whole map"),
    ],
)
def test_other_edits_of_a_certificate(folder, change, line):
    edit(folder, "certificate.json", change)
    assert line in failed(folder)


def test_a_certificate_that_is_no_json(folder):
    (folder / "certificate.json").write_text("[")
    found = findings(folder)["certificate"]
    assert not found.holds
    assert "certificate.json cannot be read" in found.words


def test_a_likelihood_that_no_row_has(folder):
    (folder / "evaluation.json").write_text(json.dumps({"density": {"value": 2.5, "unit": "bits/dim"}}))
    values = Run.open(folder).reference()
    low, high = (float(v) / (-64 * np.log(2)) for v in (values.max(), values.min()))
    for value, holds in ((0.5 * (low + high), True), (low - 0.1, False)):
        edit(folder, "evaluation.json", lambda content, value=value: content["density"].update(value=value))
        assert findings(folder)["evaluation"].holds is holds


def test_files_that_name_other_weights(folder):
    header, tensors = rewrite(folder, lambda _: None)
    digest = hashlib.sha256(json.dumps(header["state"], sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode() + tensor.numpy().tobytes())
    rewrite(folder, lambda _: None, sha256=digest.hexdigest())
    edit(folder, "certificate.json", lambda content: content.update(model_sha256=digest.hexdigest()))
    assert findings(folder)["digest"].holds
    edit(folder, "certificate.json", lambda content: content.update(model_sha256="0" * 64))
    assert findings(folder)["digest"].words.startswith("certificate.json do not match the weights")
    rewrite(folder, lambda tensors: tensors["reference/log_likelihood"].add_(1e-3))
    assert "model.safetensors" in findings(folder)["digest"].words


# ---------------------------------------------------------------------------------------------- a library that lies


def test_bounds_below_the_norm(folder, monkeypatch):
    bounds = spectral.norm_bounds
    monkeypatch.setattr(spectral, "norm_bounds", lambda *args, **kwargs: 0.9 * bounds(*args, **kwargs))
    assert {"certificate", "norms"} <= failed(folder)
    (folder / "certificate.json").unlink()
    assert "norms" in failed(folder)


def test_weights_that_are_loaded_otherwise(monkeypatch):
    loaded = Run.model

    def model(self, *args, **kwargs):
        found = loaded(self, *args, **kwargs)
        with torch.no_grad():
            next(found.parameters()).mul_(1.001)
        return found

    monkeypatch.setattr(Run, "model", model)
    assert "weights" in failed(trained())


@pytest.mark.parametrize("factor", [0.0, 0.1])
def test_an_error_bound_of_the_inverse_that_is_too_small(factor, monkeypatch):
    solve = ResidualBlock.solve

    def smaller(self, *args, **kwargs):
        found = solve(self, *args, **kwargs)
        return replace(found, error_bound=factor * found.error_bound)

    monkeypatch.setattr(ResidualBlock, "solve", smaller)
    assert "inverse" in failed(trained())


def test_an_inverse_that_is_another(monkeypatch):
    solved = ResidualBlock.solve_with_snapshot

    def moved(self, *args, **kwargs):
        found, now = solved(self, *args, **kwargs)
        return replace(found, x=found.x + 0.1), now

    monkeypatch.setattr(ResidualBlock, "solve_with_snapshot", moved)
    assert {"inverse", "round trip"} <= failed(trained("points-density"))


def test_a_series_that_is_too_short(tmp_path, monkeypatch):
    def oppose(tensors):
        """g(x) close to -0.9 x."""
        *layers, last = (name for name in tensors if name.endswith(".original"))
        for name in (*layers, last):
            tensors[name] = (-0.94 if name == last else 0.94) * torch.eye(66)
            tensors[name.replace(".original", ".0.gradient")].zero_()

    def short(self, jacobian, x, *, lipschitz=None, generator=None):
        return PowerSeries(3, self.probes)(jacobian, x, generator=generator)

    folder = copy_of(large(), tmp_path / "run")
    rewrite(folder, oppose)
    assert findings(folder)["log-determinant"].holds
    monkeypatch.setattr(CertifiedSeries, "__call__", short)
    assert "log-determinant" in failed(folder)


def test_a_standard_error_that_is_too_small(monkeypatch):
    estimate = Flow.log_prob_with_error

    def surer(self, *args, **kwargs):
        found = estimate(self, *args, **kwargs)
        return replace(found, standard_error=0.4 * found.standard_error)

    monkeypatch.setattr(Flow, "log_prob_with_error", surer)
    assert failed(large()) == {"error bars"}


def test_a_bias_beyond_its_bound(monkeypatch):
    estimate = Flow.log_prob_with_error

    def biased(self, *args, **kwargs):
        found = estimate(self, *args, **kwargs)
        return replace(found, value=found.value + 2 * found.bias_bound + 0.1)

    monkeypatch.setattr(Flow, "log_prob_with_error", biased)
    assert failed(large()) == {"error bars"}
    assert failed(trained("points-density")) == {"likelihood"}


def test_a_determinant_that_is_off(monkeypatch):
    exact = Exact.__call__
    monkeypatch.setattr(Exact, "__call__", lambda self, *args, **kwargs: 1e-4 + exact(self, *args, **kwargs))
    assert failed(trained("points-density")) == {"likelihood"}


def test_samples_of_another_density(monkeypatch):
    sample = Flow.sample
    monkeypatch.setattr(Flow, "sample", lambda self, *args, **kwargs: 1.2 * sample(self, *args, **kwargs))
    assert failed(trained("points-density")) == {"samples"}


def test_noise_of_another_density(monkeypatch):
    forward = LearnedNoise.forward

    def other(self, x, e):
        u, log_q = forward(self, x, e)
        return u, log_q + 1e-3

    monkeypatch.setattr(LearnedNoise, "forward", other)
    assert "noise" in failed(noisy())


def test_a_radius_that_is_too_large(monkeypatch):
    monkeypatch.setattr(radius, "certified_radius", lambda *args: 3 * certified_radius(*args))
    assert failed(trained("digits-certified")) == {"radius"}


# ---------------------------------------------------------------------------------------------- the other algorithms


@pytest.mark.parametrize(
    ("g", "shape"),
    [
        (nn.Sequential(nn.Linear(6, 9), nn.ELU(), nn.Linear(9, 6, bias=False), nn.Tanh()), (6,)),
        (nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), MaxMin(), nn.Conv2d(6, 2, 1), Sine(2.0)), (2, 4, 5)),
        (Potential(nn.Conv2d(2, 3, (5, 3), padding=(2, 1)), nn.ReLU()), (2, 4, 5)),
        (nn.Sequential(nn.Flatten(), Potential(nn.Linear(8, 5), nn.ELU()), nn.Unflatten(1, (2, 4))), (2, 4)),
        (nn.Sequential(Concatenated(nn.Sequential(nn.Linear(4, 3), LipSwish())), nn.Linear(7, 4)), (4,)),
    ],
)
def test_extended_precision_agrees_with_the_modules(g, shape):
    x = normal(3, *shape)
    expected = g.double()(x).detach()
    assert np.abs(evaluate_extended(g, to_extended(x)) - expected.numpy()).max() < 1e-14


@pytest.mark.parametrize("layer", [nn.GELU(), nn.Conv2d(1, 1, 3, stride=2), nn.Conv2d(1, 1, 3, padding="same")])
def test_a_layer_without_an_implementation_in_extended_precision_is_named(layer):
    with pytest.raises(Skipped, match="has no implementation in extended precision"):
        evaluate_extended(layer.double(), to_extended(normal(1, 1, 4, 4)))


def test_norms_from_below_are_the_norms(monkeypatch):
    conv, generator = nn.Conv2d(3, 5, 3, padding=1).double(), torch.Generator().manual_seed(0)
    dense = norms.norm_from_below(conv, (3, 6, 6), generator)
    monkeypatch.setattr(norms, "DENSE", 0)
    assert (1 - 1e-2) * dense < norms.norm_from_below(conv, (3, 6, 6), generator) <= dense * (1 + 1e-12)
    assert norms.norm_from_below(nn.Identity(), (4,), generator) == pytest.approx(1)


# ---------------------------------------------------------------------------------------------- the command


def test_the_command_prints_a_line_a_check_and_a_verdict(call):
    code, text = call("audit", trained("points-density"), "--seconds", 0.2)
    assert code == 0
    lines = text.splitlines()
    assert [line[:17].strip() for line in lines[:-1]] == list(CHECKS)
    assert lines[-1].startswith("PASSED: ")


def test_the_command_fails_with_the_names_of_what_fails(call, folder):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    rewrite(folder, scale)
    code, text = call("audit", folder, "--seconds", 0.2)
    assert code == 1
    assert "norms            FAILED" in text
    assert text.splitlines()[-1].startswith("iresnet: ")
    assert {path for path in folder.rglob("*") if before.get(path) != path.stat().st_mtime_ns} == {
        folder / "model.safetensors"
    }


def test_mistakes_get_a_sentence(call, folder):
    assert call("audit", folder / "none")[0] == 2
    for seconds in ("0", "-1", "inf", "nan"):
        code, text = call("audit", folder, "--seconds", seconds)
        assert (code, "--seconds must be positive" in text) == (2, True)
    (folder / "model.safetensors").write_bytes(b"no weights")
    assert "is damaged" in call("audit", folder)[1]
    (folder / "model.safetensors").unlink()
    code, text = call("audit", folder)
    assert (code, "has no trained model yet" in text) == (2, True)


def test_only_an_exact_wider_type_counts_as_unchanged():
    values = torch.tensor([1.0, 0.1])
    same = importlib.import_module("iresnet.audit.files")._same_values
    assert same(values, values.clone())
    assert same(values.half().float(), values.half())
    assert not same(values, values.half())  # 0.1 was rounded in the file alone
    assert not same(values.half(), values.half().float())
    assert not same(values.double(), values)


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("name", "seconds"), [("mnist-classifier", 2), pytest.param("mnist-flow-noise", 8, marks=pytest.mark.slow)]
)
def test_models_that_come_with_the_library_hold_within_twenty_seconds(name, seconds, call):
    begin = time.process_time()
    code, text = call("audit", name, "--seconds", seconds)
    assert code == 0, text
    assert time.process_time() - begin < 20

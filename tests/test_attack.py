"""A small part of `make attack`, and tests that each attack can find a violation."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import attack
from attack import KINDS, Violation, branches, chains, count, layers, logdets, models, radii, run, shrinking
from attack.reference import Composed, Residual, dense, invert, lengths, long, maps, spectral_norm
from iresnet import ResidualBlock, fingerprint, spectral, trust
from iresnet.results import read

attack.load()

pytestmark = [pytest.mark.no_cover, pytest.mark.filterwarnings("ignore")]

#: The number of cases of each kind here; each kind takes less than a second.
FEW = {
    "layers": 60, "sizes": 3, "constraints": 4, "inverses": 40, "chains": 20, "inverters": 15, "branches": 40,
    "mutations": 25, "models": 15, "truncations": 60, "determinants": 20, "likelihoods": 1, "radii": 15, "threads": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", FEW)
def test_no_violation(name):
    counted = run.run_block(run.Block(name, 0, 0, FEW[name]))
    assert counted.cases == FEW[name]
    assert not counted.violations, "\n".join(counted.violations)


@settings(max_examples=15, deadline=None)
@given(st.randoms(use_true_random=False))
def test_hypothesis_draws_layers(r):
    assert KINDS["layers"].attack(r)


def test_full_run_has_a_hundred_thousand_cases():
    assert sum(KINDS[name].cases for name in FEW) >= 100_000


# ------------------------------------------------------------------------------------------------- attacks can fail


def violations(name, cases):
    """The violations of the first case that has one."""
    found = (run.run_block(run.Block(name, 0, n, n + 1)).violations for n in range(cases))
    return next(filter(None, found), [])


def smaller(solve):
    """A solve whose bound is a millionth of the proven one."""

    def wrong(self, *args, **kwargs):
        s = solve(self, *args, **kwargs)
        field = "composed_bound" if hasattr(s, "composed_bound") else "error_bound"
        return dataclasses.replace(s, **{field: 1e-6 * s.error_bound})

    return wrong


def test_a_bound_below_the_norm_is_found(monkeypatch):
    bound = spectral.norm_bound
    monkeypatch.setattr(layers.spectral, "norm_bound", lambda *args: 0.99 * bound(*args))
    assert violations("layers", 20)


def test_an_error_beyond_its_bound_is_found(monkeypatch):
    monkeypatch.setattr(ResidualBlock, "solve", smaller(ResidualBlock.solve))
    assert violations("inverses", 10)


def test_a_composed_bound_that_is_too_small_is_found(monkeypatch):
    monkeypatch.setattr(chains.Chain, "solve", smaller(chains.Chain.solve))
    assert violations("chains", 10)


def test_trusting_every_module_is_found(monkeypatch):
    monkeypatch.setattr(trust, "why_modified", lambda module: None)
    assert violations("branches", 100)


def test_a_stale_proof_is_found(monkeypatch):
    monkeypatch.setattr(fingerprint.Fingerprint, "matches", lambda self, module: True)
    assert violations("mutations", 30)


def test_a_hidden_block_is_found(monkeypatch):
    monkeypatch.setattr("iresnet.certificate.unlisted_blocks", lambda model: [])
    monkeypatch.setattr("iresnet.certificate.unknown_parts", lambda transform: [])
    assert violations("models", 40)


def test_a_truncation_error_beyond_theorem_3_is_found(monkeypatch):
    bound = logdets.truncation_bound
    monkeypatch.setattr(logdets, "truncation_bound", lambda *args: 0.9 * bound(*args))
    assert violations("truncations", 100)


def test_a_wrong_determinant_is_found(monkeypatch):
    forward = ResidualBlock.forward_and_logdet
    monkeypatch.setattr(
        ResidualBlock, "forward_and_logdet", lambda *a, **k: (forward(*a, **k)[0], 1.1 * forward(*a, **k)[1])
    )
    assert violations("determinants", 10)


def test_a_radius_that_is_too_large_is_found(monkeypatch):
    radius = radii.certified_radius
    monkeypatch.setattr(radii, "certified_radius", lambda model, data: 20 * radius(model, data))
    assert violations("radii", 20)


def test_an_unproven_likelihood_called_proven_is_found(monkeypatch):
    original = models.Flow.log_prob_with_error
    monkeypatch.setattr(
        models.Flow,
        "log_prob_with_error",
        lambda *a, **k: dataclasses.replace(
            found := original(*a, **k), proven=True, bias_bound=torch.zeros_like(found.bias_bound)
        ),
    )
    assert violations("models", 40)


def test_an_exception_of_solve_is_a_violation(monkeypatch):
    def refuse(self, *args, **kwargs):
        raise RuntimeError("mixed dtypes")

    monkeypatch.setattr(ResidualBlock, "solve", refuse)
    assert "solve raises RuntimeError: mixed dtypes" in violations("branches", 20)[0]


# ------------------------------------------------------------------------------------------------- references


def test_newton_finds_a_known_root():
    g = nn.Sequential(nn.Linear(2, 2)).double()
    with torch.no_grad():
        g[0].weight.copy_(0.5 * torch.eye(2))
        g[0].bias.fill_(1.0)
    z = torch.tensor([[4.0, 1.0]], dtype=torch.float64)
    x, error = invert(Residual(Composed(maps(g, (2,))[0])), long(z), long(z))
    assert lengths(x - long(torch.tensor([[2.0, 0.0]])))[0] <= error < 1e-17


def test_the_dense_matrix_is_the_layer():
    layer = nn.Conv2d(2, 3, (3, 2), stride=2, padding=1, dilation=(1, 2), padding_mode="circular", bias=False).double()
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    assert torch.allclose(torch.from_numpy(dense(layer, (2, 5, 4))) @ x.flatten(), layer(x).flatten())


def test_norms_neither_underflow_nor_overflow():
    eye = torch.eye(3, dtype=torch.float64).numpy()
    assert spectral_norm(1e-250 * eye) == 1e-250
    assert spectral_norm(1e250 * eye) == 1e250


# ------------------------------------------------------------------------------------------------- counting


def test_counts_are_merged_by_kind(tmp_path):
    path = tmp_path / "attack.json"
    first, again, other = (count.Count(kind, 0, cases=n) for kind, n in (("a", 1), ("a", 5), ("b", 2)))
    again.add_violation(3, "two\nlines")
    count.merge([first, other], {"command": "one"}, path)
    count.merge([again], {"command": "two"}, path)
    found = read(path)
    assert [(row["kind"], row["cases"], found.runs[row["run"]]["command"]) for row in found.rows] == [
        ("a", 5, "two"),
        ("all", 7, "two"),
        ("b", 2, "one"),
    ]
    assert [row["violations"] for row in found.rows] == [1, 1, 0]
    assert found.rows[0]["reproductions"] == ["--kind a --seed 0 --case 3: two lines"]


def test_a_case_is_reproducible():
    kind = KINDS["selftest"]
    outcomes = [run.run_block(run.Block("selftest", 0, 1, 2)).violations for _ in range(2)]
    assert outcomes[0] == outcomes[1]
    with pytest.raises(ZeroDivisionError):
        run.run_case(kind, 0, 1)


def test_a_kind_is_registered_once():
    with pytest.raises(ValueError, match="registered once; got 'layers' again"):
        attack.kind("layers", cases=1)(lambda r: "")


def test_hypothesis_shrinks_a_violation(monkeypatch):
    def large(r):
        if (n := r.randrange(1000)) > 10:
            raise Violation(f"{n} is large")
        return "small"

    assert str(shrinking.find_smallest(attack.Kind("large", large, 1, 1.0), 50)) == "11 is large"
    assert shrinking.find_smallest(attack.Kind("small", lambda r: "", 1, 1.0), 5) is None


@pytest.mark.slow
def test_a_run_survives_hanging_and_dying_cases():
    total = count.Count("selftest", 0)
    for part in run.run_blocks(list(run.split_cases(KINDS["selftest"], 40, 0)), workers=2):
        total.add(part)
    assert (total.cases, len(total.violations)) == (40, 10)
    text = "\n".join(total.violations)
    assert all(word in text for word in ("hung", "ended the process with 7", "ZeroDivisionError", "on purpose"))


def test_an_unchanged_block_is_proven():
    r, block = attack.case_random("branches", 0, 0), ResidualBlock(nn.Sequential(nn.Linear(2, 2)))
    with torch.no_grad():
        block.g[0].weight.copy_(0.5 * torch.eye(2))
    assert branches.verify(r, block.double().eval(), torch.randn(3, 2, dtype=torch.float64), "harmless") == "proven"
    assert math.isclose(branches.claimed(block, torch.zeros(1, 2), ""), 0.5, rel_tol=1e-6)

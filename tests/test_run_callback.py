"""The validation likelihood during training: the true one, whatever the truncation of training's series."""

import math

import pytest
import torch
from torch import nn

from iresnet import Flow, PowerSeries, ResidualBlock, RussianRoulette
from iresnet.base import DiagonalNormal
from iresnet.chain import Chain
from iresnet.data import Dataset, Schema
from iresnet.lipschitz import PowerIteration, constrain_
from iresnet.logdet import AdaptiveSeries
from iresnet.models.unconstrained import UnconstrainedBlock
from iresnet.reproduce import cells, job
from iresnet.run import TRUNCATION, FitResult, Run, truncation_warning, validate
from iresnet.run.callback import BIAS, TRUNCATION_WARNED
from iresnet.train import checkpoint
from iresnet.train.checkpoint import Checkpoint
from iresnet.train.objective import ObjectiveSettings
from tests.runs import copy_of, trained

D = 72
DENSITY = ObjectiveSettings(kind="density")


def scaled(factor):
    """g(x) = factor x, with norms asked for that allow 0.9."""
    g = nn.Sequential(nn.Linear(D, D, bias=False))
    with torch.no_grad():
        g[0].weight.copy_(factor * torch.eye(D))
    return constrain_(g, lipschitz=0.9, norm=PowerIteration())  # which leaves a weight at its bound unchanged


def contraction(factor, estimator, blocks=1):
    chain = Chain(*(ResidualBlock(scaled(factor)) for _ in range(blocks)))
    return Flow(chain, DiagonalNormal(D), estimator=estimator, event_shape=(D,)).eval()


def points(rows=20):
    return Dataset(torch.randn(rows, D, generator=torch.Generator().manual_seed(0)), None, Schema((D,)))


def truth(factor, x, blocks=1):
    """-log p in nats of z = (1 + factor)^blocks x, z normal."""
    scale = (1 + factor) ** blocks
    return 0.5 * D * math.log(2 * math.pi) + 0.5 * float((scale * x).square().sum(1).mean()) - D * math.log(scale)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("estimator", [PowerSeries(2), PowerSeries(200), RussianRoulette(2)], ids=str)
def test_the_validation_likelihood_is_the_true_one_for_any_training_estimator(estimator, blocks):
    """A contraction by 0.1 is where a short series errs most: it sees -0.9 - 0.405 of ln 0.1 = -2.303."""
    rows = points()
    metrics, criterion = validate(contraction(-0.9, estimator, blocks), rows, DENSITY)
    expected, unit = truth(-0.9, rows.x, blocks), D * math.log(2)
    assert metrics["validation nats"] == pytest.approx(expected, abs=BIAS * unit)
    assert criterion == pytest.approx(expected / unit, abs=BIAS)
    assert abs(metrics["validation nats"] - expected) > 1e-6  # beyond 64 dimensions it is no determinant


@pytest.mark.parametrize(("factor", "terms", "known"), [
    (-0.9, 2, (-0.9 - 0.405 - math.log(0.1)) / math.log(2)),
    (-0.9, 200, 0.0),
    (-0.2, 4, (-0.2 - 0.02 - 0.008 / 3 - 0.0004 - math.log(0.8)) / math.log(2)),
    (0.5, 1, (0.5 - math.log(1.5)) / math.log(2)),
    (0.5, 2, 0.0),  # it errs to the other side: nothing to be gained by it
])  # fmt: skip
def test_the_truncation_error_of_training_is_reported(factor, terms, known):
    metrics, _ = validate(contraction(factor, PowerSeries(terms)), points(), DENSITY)
    assert metrics[TRUNCATION] == pytest.approx(known, abs=BIAS)


def plane(j, estimator):
    g = constrain_(nn.Sequential(nn.Linear(4, 4, bias=False)), lipschitz=0.9, norm=PowerIteration())
    with torch.no_grad():
        g[0].parametrizations.weight.original.copy_(j)
    return Flow(ResidualBlock(g), DiagonalNormal(4), estimator=estimator, event_shape=(4,)).eval()


def test_few_dimensions_are_exact_and_report_the_truncation_too():
    metrics, _ = validate(
        plane(-0.9 * torch.eye(4), PowerSeries(2)), Dataset(torch.zeros(5, 4), None, Schema((4,))), DENSITY
    )
    assert metrics["validation nats"] == pytest.approx(2 * math.log(2 * math.pi) - 4 * math.log(0.1), rel=1e-4)
    assert metrics[TRUNCATION] == pytest.approx((-1.305 - math.log(0.1)) / math.log(2), rel=1e-3)


def test_noise_is_not_taken_for_truncation_error():
    """tr J = 0 for an exchange of neighbours, while v' J v is 2, 0 or -2: nothing but noise."""
    flow, raw = plane(-0.5 * torch.eye(4)[[1, 0, 3, 2]], PowerSeries(16)), []
    for rows in (20, 40):
        x, generator = torch.zeros(rows, 4), torch.Generator().manual_seed(0)
        assert validate(flow, Dataset(x, None, Schema((4,))), DENSITY)[0][TRUNCATION] == 0
        with torch.no_grad():
            estimated = flow.log_prob(x, estimator=flow.estimator, generator=generator)
            raw.append(float((estimated - flow.log_prob(x)).mean()) / (4 * math.log(2)))
    assert max(raw) > 10 * TRUNCATION_WARNED  # the mean alone would be


@pytest.mark.parametrize(("estimator", "terms"), [(RussianRoulette(2), 20), (PowerSeries(15), 30)], ids=str)
def test_without_a_known_constant_the_series_is_long(estimator, terms, monkeypatch):
    seen, free = [], UnconstrainedBlock(nn.Linear(D, D, bias=False))
    asserted = ResidualBlock(nn.Linear(D, D, bias=False), lipschitz=0.5)
    monkeypatch.setattr(Flow, "log_prob", lambda _, x, **options: seen.append(options["estimator"]) or x.sum(1))
    with torch.no_grad():
        free.g.weight.copy_(2 * torch.eye(D))
    for blocks in ((asserted, free), (asserted,)):
        validate(Flow(Chain(*blocks), DiagonalNormal(D), estimator=estimator).eval(), points(2), DENSITY)
    assert [e for e in seen if e != estimator] == [PowerSeries(terms), AdaptiveSeries(0.5, BIAS * D * math.log(2))]


def kept(folder, truncation):
    """A finished run whose best weights have this truncation error."""
    run = Run.open(folder)
    best = checkpoint.load(folder / "best.safetensors")
    checkpoint.save(
        Checkpoint(best.tensors, {**best.state, TRUNCATION: truncation}), folder / "best.safetensors", version="0"
    )
    return run


def test_the_command_warns_once_that_the_network_exploits_the_truncation(call, tmp_path):
    folder = copy_of(trained(), tmp_path / "run")
    sentence = (
        "Training's series of 2 terms overestimates likelihoods by at least 0.09 bits/dim: the network has learned to "
        "exploit the truncation. Use more terms, a smaller lipschitz, or estimator=roulette.\n"
    )
    assert truncation_warning(kept(folder, 0.0099)) == ""
    code, text = call("train", "--resume", "--out", folder)
    assert (code, "overestimates" in text) == (0, False)
    assert TRUNCATION not in text
    kept(folder, 0.09)
    code, text = call("train", "--resume", "--out", folder)
    assert (code, text.count(sentence)) == (0, 1)


def test_the_log_has_the_truncation_error_if_a_series_trains():
    assert all(row[TRUNCATION] is not None for row in Run.open(trained()).log())
    assert TRUNCATION not in Run.open(trained("digits-classifier")).log()[0]


def test_a_reproduction_job_warns_about_the_cell_it_trained(tmp_path, monkeypatch):
    run, said = kept(copy_of(trained(), tmp_path / "run"), 0.2), []
    monkeypatch.setattr(job, "start", lambda *_, **__: FitResult(run, 6, True, 0.0))
    assert job.Work(job.Job(out=tmp_path), say=said.append).get_run(cells.find_cell("digits", "c=0.9"), 0) == run
    assert [line.partition(" bits/dim")[0] for line in said] == [
        "digits c=0.9: Training's series of 2 terms overestimates likelihoods by at least 0.20"
    ]


def test_the_best_hybrid_is_that_of_the_objective_it_is_trained_for():
    run = Run.open(trained())
    model, data = run.model(), run.splits().validation

    def criterion(**settings):
        return validate(model, data, ObjectiveSettings("hybrid", **settings))[1]

    bits, loss = criterion(weight=0.0), criterion(density=0.0)
    assert bits > 0
    assert loss > 0
    assert criterion(weight=3.0) == pytest.approx(bits + 3 * loss)
    assert criterion(weight=3.0, density=0.5) == pytest.approx(bits / 2 + 3 * loss)

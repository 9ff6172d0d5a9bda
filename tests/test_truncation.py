"""What a power series is off by: against eigenvalues, against draws of the estimator, and never beyond Theorem 3."""

import math

import pytest
import torch
from torch import nn

from iresnet import Chain, Classifier, DiagonalNormal, Flow, PowerSeries
from iresnet.evaluate import Truncation, truncation
from tests.test_evaluate import image_hybrid, images, pixel_flow, table, table_flow
from tests.test_protocol import BIT, linear


def partial_sum(a, n):
    """The trace of the first n terms, from eigenvalues, and ln det(I + A)."""
    e = torch.linalg.eigvals(a.double())
    traces = [(e**k).sum().real for k in range(1, n + 1)]
    return float(sum((-1) ** (k + 1) * t / k for k, t in enumerate(traces, 1))), float((1 + e).log().sum().real)


@pytest.mark.parametrize("n", [1, 2, 5, 20])
def test_the_bias_of_linear_blocks_is_that_of_their_eigenvalues(n):
    (flow, matrices), data = linear(12, 0.9, 0.5), table(6, 12)
    got = truncation(flow, data)
    sums = [partial_sum(a, n) for a in matrices]
    expected = sum(s - exact for s, exact in sums) / (12 * BIT)
    assert got.bias[n - 1] == pytest.approx(expected, abs=1e-12)
    assert got.bias_spread[n - 1] == pytest.approx(0, abs=1e-12)  # all rows have the same Jacobian
    assert got.largest_bias[n - 1] == pytest.approx(abs(expected), abs=1e-12)
    assert (got.rows, got.dimension, got.blocks, got.terms) == (6, 12, 2, tuple(range(1, 21)))


@pytest.mark.parametrize(("probe", "field"), [("rademacher", "deviation"), ("gaussian", "gaussian_deviation")])
@pytest.mark.parametrize("n", [1, 3])
def test_the_deviation_is_that_of_the_estimator(probe, field, n):
    (flow, _), rows = linear(6, 0.8, 0.6), 6000
    got = getattr(truncation(flow, table(4, 6), terms=n), field)[n - 1]
    x = torch.zeros(rows, 6)  # so that only the probes differ
    with torch.no_grad():
        drawn = flow.log_prob(
            x, estimator=PowerSeries(n, probe=probe), generator=torch.Generator().manual_seed(0)
        ).double()
    assert float(drawn.std()) / (6 * BIT) == pytest.approx(got, rel=4 / math.sqrt(rows))


@pytest.mark.parametrize("case", ["table", "image"])
def test_no_bias_exceeds_the_bound_of_theorem_3(case):
    model, data = (table_flow(10), table(20, 10)) if case == "table" else (image_hybrid(), images(20))
    got = truncation(model, data, terms=12)
    assert all(b <= bound for b, bound in zip(got.largest_bias, got.bound, strict=True))
    assert all(abs(b) <= w for b, w in zip(got.bias, got.largest_bias, strict=True))
    assert got.bound[11] < got.bound[5] < got.bound[0]
    assert got.bias_spread[0] > 0


def test_the_bound_is_reached_where_all_terms_have_one_sign():
    flow = Flow(Chain(*[linear(1, 0.5)[0].transform[0]]), DiagonalNormal(1)).eval()
    with torch.no_grad():
        flow.transform[0].g[0].weight.fill_(-0.5)
    got = truncation(flow, table(3, 1), terms=4)
    assert got.largest_bias == pytest.approx(got.bound, rel=1e-6)


def test_rows_may_come_in_parts(monkeypatch):
    model, data = image_hybrid(), images(11)
    whole = truncation(model, data, terms=3)
    monkeypatch.setitem(truncation.__wrapped__.__globals__, "ENTRIES", 4 * 16**2)
    parts = truncation(model, data, terms=3)
    assert parts.bias == pytest.approx(whole.bias, rel=1e-9)
    assert parts.deviation == pytest.approx(whole.deviation, rel=1e-9)
    assert parts.bound == whole.bound


def test_the_model_stays_as_it_is():
    model = image_hybrid()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    truncation(model, images(3), terms=2)
    assert all(v.dtype == before[n].dtype and torch.equal(v, before[n]) for n, v in model.state_dict().items())


def test_terms_are_enough_from_where_the_bias_stays_small():
    bias = (0.5, -1e-9, 0.02, -0.005, 0.001)
    got = Truncation(2, 2, 1, (1, 2, 3, 4, 5), bias, bias, bias, bias, bias, bias)
    assert [got.first_below(limit) for limit in (1, 0.1, 0.01, 0.002, 1e-6)] == [1, 2, 4, 5, None]


def test_what_is_refused():
    flow, _ = linear(3, 0.5)
    with pytest.raises(ValueError, match="terms must be at least 1; got 0."):
        truncation(flow, table(3, 3), terms=0)
    with pytest.raises(ValueError, match="a mean with a standard error needs at least two samples; got 1."):
        truncation(flow, table(1, 3))
    with pytest.raises(ValueError, match="a power series needs residual blocks; this model has none."):
        truncation(pixel_flow(), images(3, (1, 1, 2), 4))
    with pytest.raises(ValueError, match="needs a density; this model only classifies."):
        truncation(Classifier(Chain(), nn.Identity()).eval(), table(3, 3))
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        truncation(pixel_flow().train(), images(3, (1, 1, 2), 4))

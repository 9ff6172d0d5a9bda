"""What a report says: known numbers beside their error bars, images with known pixels, honest axes."""

import base64
import io
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

from iresnet import certify, mlp_flow
from iresnet.report import Anomaly, Reconstruction, chart, curves, page, proofs, words
from iresnet.report.masthead import summary
from tests import material
from tests.material import digits, points, table
from tests.reading import Read


@pytest.fixture(scope="module")
def digits_page():
    return page(digits())


# Known answers


def test_the_summaries():
    assert summary(digits()) == (
        "One invertible residual network of 8 blocks and 412,330 parameters that classifies 8 × 8 grey images into 10 "
        "classes (6 of 360 wrong), gives their likelihood (2.05 bits/dim), generates new ones and is inverted, with a "
        "proof for every block."
    )
    assert summary(points()) == (
        "One invertible residual network of 24 blocks and 69,664 parameters that gives the likelihood of points in the "
        "plane (2.39 nats), generates new ones and is inverted, with a proof for every block."
    )
    bare = digits(objective="classification", evaluation={}, certificate={}, samples=None)
    assert summary(bare) == (
        "One invertible residual network of 412,330 parameters that classifies 8 × 8 grey images into 10 classes and "
        "is inverted."
    )


def test_the_numbers_stand_beside_their_error_bars(digits_page):
    text = Read(digits_page).text
    for part in [
        "1.67 %", "0.77 to 3.59 %", "6 samples wrong; 95 % Wilson interval, 360 samples",
        "2.051 bits/dim", "± 0.012", "one standard error over test data", "± 9.3 × 10⁻⁴", "8 draws per sample",
        "no bias", "0 of 360 samples", "3 layers scaled down",
    ]:  # fmt: skip
        assert part in text
    assert "bar: one standard error over test data" in text


def test_the_three_numbers_of_an_inverse_are_never_merged(digits_page):
    text = Read(digits_page).text
    for part in [
        "Largest block bound ≤ 9.4 × 10⁻¹³ proven", "Code residual 3.1 × 10⁻¹³ computed",
        "Measured error 4.2 × 10⁻¹³ measured", "Composed bound ≤ 7.3 × 10⁻⁶ proven",
        "360 samples inverted in float64 with 41.3 evaluations of g per sample on average",
    ]:  # fmt: skip
        assert part in text
    assert "not informative" not in text
    assert (
        "≤ 4.1 × 10¹² proven: the block bounds carried through all later inverses; not informative"
        in Read(page(points())).text
    )


def test_an_unbounded_truncation_and_an_unknown_error_bar():
    density = {"value": 3.4, "unit": "bits/dim", "standard_error": float("inf"), "bias_bound": 1e-5}
    text = Read(page(digits(evaluation={"density": density}))).text
    assert "bias ≤ 1.0 × 10⁻⁵ proven bound on the truncation error of the series" in text
    assert "3.40 bits/dim no error bar is known" in text


def test_the_confusion_matrix(digits_page):
    body = re.search(r'<table class="confusion">.*?</table>', digits_page).group()
    rows = re.findall(r"<tr><th scope=\"row\">(.*?)</th>(.*?)</tr>", body)
    counts = [[int(c) if c != "·" else 0 for c in re.findall(r">([\d·]+)</td>", cells)] for _, cells in rows]
    assert counts == digits().evaluation["confusion"]
    assert [name for name, _ in rows] == list("0123456789")


def test_many_classes_get_a_list_of_confusions():
    counts = np.diag([5] * 30).tolist()
    counts[7][9] = 4
    text = page(digits(evaluation={"confusion": counts}))
    assert '<tr><th scope="row">7</th><td>9</td><td>4</td></tr>' in text
    assert "The most frequent confusions of 30 classes" in text


def test_a_certificate_as_certify_makes_it():
    made = certify(mlp_flow(2, blocks=3, hidden=(8,)))
    text = Read(page(points(certificate=json.loads(made.to_json())))).text
    assert "Invertible: proven. 3 of 3 blocks proven to be contractions." in text
    for block in made.blocks:
        assert (
            f"{block.name} 2 {words.at_most(block.lipschitz, 4)} {words.at_most(1 / (1 - block.lipschitz), 2)} proven"
            in text
        )
        layers = [part for part in block.layers if part.estimate is not None]
        assert all(f"{part.estimate:.4f} {words.at_most(part.bound, 4)}" in text for part in layers)
    assert "Every layer of every block (6)" in text


def test_a_certificate_that_does_not_pass():
    text = Read(page(digits(certificate=material.certificate(passed=False)))).text
    assert "Invertible: not proven. 6 of 8 blocks proven to be contractions." in text
    assert "asserted" in text
    assert "no bound known The forward of Mine cannot be read." in text
    assert "NOT proven for all: largest Lip(g); 6 of 8 blocks below 1" in text
    assert "with a proof for every block" not in text


def test_what_a_certificate_leaves_out_is_said(digits_page):
    assert all(sentence in Read(digits_page).text for sentence in proofs.COVERS + proofs.LEAVES_OUT)


def test_images_are_the_pixels_of_the_rows():
    m = digits()
    grids = re.findall(r'<div class="grid" role="img" aria-label="64 images: (.*?)".*?</div>', page(m))
    assert grids == ["samples", "test data"]
    body = re.search(r'aria-label="64 images: test data".*?</div>', page(m)).group()
    uris = re.findall(r"base64,([A-Za-z0-9+/=]+)", body)
    first = np.asarray(Image.open(io.BytesIO(base64.b64decode(uris[0]))))
    assert first.tolist() == [[255 - round(255 * v / 16) for v in row] for row in m.data[0, 0].tolist()]
    assert len(uris) == 64


def test_reconstructions_and_anomalies_show_their_numbers(digits_page):
    text, m = Read(digits_page).text, digits()
    assert "difference, magnified: its full scale is" in text
    assert f"{30 + 9} eval." in text
    assert f"{30 + 10} eval." not in text  # ten are shown
    assert digits_page.count('alt="rebuilt') == 10
    for anomaly in m.anomalies:
        assert f"{float(anomaly.scores[3]):.3f}" in text
        assert anomaly.note in text


def test_a_perfect_reconstruction():
    x = torch.zeros(2, 1, 8, 8)
    exact = Reconstruction(x, x, torch.zeros(2), torch.ones(2), torch.zeros(2))
    assert "the difference, which is zero everywhere." in Read(page(digits(reconstruction=exact))).text


def test_columns_are_shown_in_their_units_and_rows_as_numbers():
    m = table()
    text = Read(page(m)).text
    assert "Pairs of the first 6 of 7 columns" in text
    assert f"{float(m.data[:, 0].double().quantile(0.5)):.3g}" in text
    assert "Samples reconstructed from their codes, first 6 of 7 columns" in text
    assert f"{float(m.reconstruction.originals[0, 0]):.3g}" in text


@pytest.mark.parametrize(("shape", "reduced"), [((3, 32, 32), ""), ((3, 96, 96), "Shown at 1/2"), ((4, 8, 8), "")])
def test_images_of_other_sizes_and_channels(shape, reduced):
    x = (255 * torch.rand(20, *shape)).to(torch.uint8)
    rebuilt = Reconstruction(x, x.double() + 1e-9, torch.ones(20), torch.ones(20), torch.ones(20))
    m = digits(schema=material.Rows(shape, 256), samples=x, data=x, reconstruction=rebuilt, interpolation=None,
               anomalies=[Anomaly("a", x, torch.rand(20))], evaluation={})  # fmt: skip
    assert reduced in Read(page(m)).text


# Curves


def test_figures_are_named_once_with_or_without_a_loss():
    """A density logs no loss, and its truncation on held-out rows alone."""
    rows = [{"step": s, "bits/dim": 2.0 / s, "validation truncation bits/dim": 1e-3} for s in (1.0, 2.0)]
    assert curves._metrics(rows) == ["bits/dim", "truncation bits/dim"]
    assert curves._metrics([{**row, "loss": row["bits/dim"]} for row in rows]) == ["bits/dim", "truncation bits/dim"]
    assert "loss" in curves._metrics([{**row, "loss": 1.0} for row in rows])


def test_curves_are_thinned_and_it_is_said():
    log = material.log(40_000, 10)
    text = page(digits(log=log))
    assert "mean of 8 of the 4,000 logged values" in text
    drawn = re.findall(r'class="line train"', text)
    assert len(drawn) == 4
    assert max(d.count("L") for d in re.findall(r'<path d="([^"]*)" class="line train"', text)) < 500


def test_what_the_axis_cuts_off_is_said(digits_page):
    assert "Cut off at the top, at the start of training: bits per dimension (up to 5.9" in digits_page
    flat = [{"step": float(s), "loss": 2.0 - s / 100} for s in range(10)]
    assert "Cut off" not in page(digits(log=flat))


def test_axes_of_errors_start_at_zero_and_contain_the_end_of_every_curve():
    for zero in (True, False):
        values = [(s, 3.0 + 90 / (1 + s)) for s in range(100)]
        y, highest = curves._y_axis(values, zero=zero)
        assert highest == 93.0
        assert (y.low == 0) is zero
        assert y.low < values[-1][1] < y.high < highest


def test_a_loss_that_is_the_likelihood_is_shown_once():
    assert ">loss<" in page(digits())
    assert ">loss<" not in page(points())


def test_gaps_and_infinities_in_a_log():
    log = [{"step": 1.0, "loss": float("nan"), "nats": None}, {"step": 2.0, "loss": 1.0, "nats": None}]
    assert curves.series(log, "loss") == [(2.0, 1.0)]
    assert ">nats" not in page(digits(log=log))


def test_ticks_are_round_and_inside():
    for low, high in [(0, 1), (-3.2, 7.1), (2.01, 2.04), (0, 12_345), (1e-9, 5e-9), (5, 5)]:
        a = chart.axis(low, high)
        assert 2 <= len(a.ticks) <= 6
        assert all(a.low - 1e-12 <= t <= a.high + 1e-12 for t in a.ticks)
        assert len({text for _, text in chart._texts(a)}) == len(a.ticks)


def test_dots_outside_the_axes_are_left_out():
    a = chart.Axis(0, 1)
    assert chart.dots(a, a, [(0.5, 0.25), (2.0, 0.5)], "").d == "M500 750h0"
    assert chart.line(a, a, [(0.0, 0.0), (1.0, 1.0)], "").d == "M0 1000L1000 0"

"""What a report claims, and does not: inverses without a proof, certified robustness, a linear probe."""

import math
from dataclasses import replace

import pytest
import torch

from iresnet.models import ORIGINS
from iresnet.report import Reconstruction, page
from iresnet.report.masthead import summary
from tests import material
from tests.material import digits
from tests.reading import Read

# Networks of which nothing is proven


def test_an_inverse_without_a_proof_is_shown_as_it_is():
    m = digits(
        evaluation=digits().evaluation | {"inverse": material.FREE},
        certificate=material.free_certificate(),
        interpolation=None,
        samples=None,
    )
    text = Read(page(m)).text
    assert summary(m).startswith("One residual network of 8 blocks and 412,330 parameters that classifies")
    assert summary(m).endswith("gives their likelihood (2.05 bits/dim). Its inverse is not proven.")
    for part in [
        "Largest block bound ∞ nothing is proven, for 360 samples: not every block is proven to be a contraction",
        "Measured error 4.2 × 10⁻¹³ measured", "The errors are those of the iteration, without a proof.",
        "Inverse, bound per block ∞ no bound: not every block is proven to be a contraction; 0 of 360 samples proven",
        "Left out: interpolation needs a proven inverse, and not every block is proven to be a contraction.",
    ]:  # fmt: skip
        assert part in text
    assert "Composed bound" not in text
    assert "diverges" not in text
    assert "invertible" not in text


def test_an_iteration_that_diverges_is_not_called_the_lack_of_an_inverse():
    x = digits().data[:4].double()
    lost = torch.stack([x[0], x[1] * math.nan, x[2] + math.inf, x[3] - 1e300])
    errors = torch.tensor([2.5, math.inf, math.inf, 8e300]).double()
    evaluation = digits().evaluation
    for found in (material.DIVERGED, {k: math.inf if v is None else v for k, v in material.DIVERGED.items()}):
        m = digits(
            evaluation=evaluation | {"inverse": found},
            certificate=material.free_certificate(),
            reconstruction=Reconstruction(x, lost, errors, torch.full((4,), 200), torch.full((4,), math.inf)),
        )
        text = Read(page(m)).text
        for part in [
            "Error of the inverse ∞ measured: the iteration diverges for the worst of 360 samples", "Code residual ∞",
            "The iteration diverges, for the worst sample at least; that does not say that there is no inverse.",
            "What is far from all levels, or no number, is drawn as a level near them",
        ]:  # fmt: skip
            assert part in text
        assert "not invertible" not in text


def test_a_network_without_an_inverse_claims_none():
    evaluation = {k: v for k, v in digits().evaluation.items() if k in ("split", "rows", "error")}
    m = digits(
        objective="classification", evaluation=evaluation, certificate={}, reconstruction=None, interpolation=None,
        samples=None, spectra=[], anomalies=[],
    )  # fmt: skip
    assert summary(m) == (
        "One residual network of 412,330 parameters that classifies 8 × 8 grey images into 10 classes (6 of 360 wrong)."
    )
    assert "inver" not in Read(page(m)).text.replace("Invertible Residual Networks", "").replace("inverted", "")
    assert "<title>digits-hybrid: a residual network</title>" in page(m)
    assert "<title>digits-hybrid: an invertible residual network</title>" in page(digits())


# Uses


def test_certified_robustness_stands_between_an_attack_and_nothing():
    wide = material.ROBUST | {"radius": 4.0, "pixel_radius": 0.25, "value": 41.39, "low": 36.41, "high": 46.55}
    text = Read(page(digits(evaluation=digits().evaluation | {"robustness": [material.ROBUST, wide]}))).text
    for part in [
        "Classes that are right and stay so, in percent of 360 samples", "for pixels in [0, 1]",
        "2 0.125 83.06 78.84 to 86.57 90.28 97.50", "4 0.25 41.39 36.41 to 46.55 90.28 97.50",
        "Lip(F) ≤ 11.6; the median certified radius is 3.41 grey levels.",
    ]:  # fmt: skip
        assert part in text


def test_robustness_that_cannot_be_certified_says_why():
    text = Read(page(digits(evaluation={"robustness": [material.VACUOUS, material.VACUOUS | {"radius": 4.0}]}))).text
    assert text.count("No bound is known: A block has no Lipschitz bound; `certify` says why.") == 1
    assert "median certified radius" not in text


def test_a_bound_without_a_margin_has_no_radius():
    found = material.VACUOUS | {"lipschitz": 2.4e9, "median": None, "remark": "the head is not linear."}
    text = Read(page(digits(evaluation={"robustness": [found]}))).text
    assert "Lip(F) ≤ 2.4" in text
    assert "The head is not linear." in text
    assert "median certified radius" not in text


def test_the_rows_for_which_an_iteration_diverges_are_counted():
    text = Read(page(digits(evaluation={"inverse": material.FREE | {"diverged": 7}}))).text
    assert "The iteration diverges for 7 of 360 samples; that does not say that there is no inverse." in text
    text = Read(page(digits(evaluation={"inverse": material.FREE | {"diverged": 7, "converged": 40}}))).text
    assert "The iteration diverges for 7 of 360 samples and converges for 40; that does not say" in text


def test_robustness_of_a_table_has_no_pixels():
    text = Read(page(material.table(evaluation={"robustness": [material.ROBUST | {"pixel_radius": None}]}))).text
    assert "pixels" not in text
    assert "2 83.06 78.84 to 86.57 90.28 97.50" in text
    assert "median certified radius is 3.41." in text


def test_a_linear_probe_stands_beside_one_on_the_inputs():
    text = Read(page(digits(evaluation=digits().evaluation | {"probe": material.PROBE}))).text
    why = "95 % Wilson interval, 360 samples; fitted to 1,221 training samples"
    assert f"error of a linear probe on codes 1.94 % 0.95 to 3.96 % {why}" in text
    assert f"error of a linear probe on inputs 3.89 % 2.33 to 6.42 % {why}" in text


# Other families


@pytest.mark.parametrize("family", list(ORIGINS))
def test_another_family_is_called_by_its_name_and_cited(family):
    m = digits(family=family, certificate={})
    name, source = ORIGINS[family]
    text = Read(page(m)).text
    assert summary(m).startswith(f"One {name} of 412,330 parameters that classifies")
    assert f"Method: {source}. Compared with in Behrmann" in text
    assert "residual network" not in text
    assert f"<title>digits-hybrid: {'an' if name[0] in 'ai' else 'a'} {name}</title>" in page(m)


@pytest.mark.parametrize("bound", [1e-12, math.inf])
@pytest.mark.parametrize("image", [True, False])
def test_beneath_what_a_formula_rebuilt_stands_what_is_known(bound, image):
    whole = digits() if image else material.table()
    x = whole.data[:4].double()
    zero, bounds = torch.zeros(4, dtype=torch.long), torch.full((4,), bound)
    m = replace(whole, reconstruction=Reconstruction(x, x, torch.full((4,), 3e-14).double(), zero, bounds))
    text = Read(page(m)).text
    assert "measured error" in text
    assert ("proven block bound" in text) == math.isfinite(bound)
    assert "evaluations of g. " not in text
    assert "proven block bound evaluations of g" not in text
    assert " eval." not in text


def test_an_integral_is_not_called_exact():
    text = Read(page(digits(family="ffjord"))).text
    assert "the integral of a trace, within the tolerances of its solver" in text
    assert "truncating the series" not in text

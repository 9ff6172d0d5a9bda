"""The toy densities: samples, log-density and entropy are made in three ways and must agree."""

import math

import pytest
import torch

from iresnet.data import toy

DOUBLE = torch.float64


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", toy.names())
class TestEveryDensity:
    def test_samples_are_float32_points_whatever_the_default_type(self, name):
        before = torch.get_default_dtype()
        torch.set_default_dtype(DOUBLE)
        try:
            x = toy.sample(name, 7, seeded())
        finally:
            torch.set_default_dtype(before)
        assert x.shape == (7, 2)
        assert x.dtype == torch.float32
        assert torch.equal(x, toy.sample(name, 7, seeded()))

    def test_the_seed_decides(self, name):
        assert not torch.equal(toy.sample(name, 7, seeded(1)), toy.sample(name, 7, seeded(2)))

    def test_without_a_generator_and_one_point(self, name):
        assert toy.sample(name, 1).shape == (1, 2)

    def test_the_density_integrates_to_one(self, name):
        axis = torch.arange(-6, 6, 1 / 8, dtype=DOUBLE)
        total = toy.log_density(name, torch.cartesian_prod(axis, axis)).exp().sum() / 64
        assert total.item() == pytest.approx(1, abs=2e-5)

    def test_entropy_is_the_mean_surprise_of_samples(self, name):
        surprise = -toy.log_density(name, toy.sample(name, 10_000, seeded()))
        standard_error = surprise.std().item() / math.sqrt(len(surprise))
        assert abs(surprise.mean().item() - toy.entropy(name)) < 4 * standard_error + 1e-12

    def test_the_samples_fall_where_the_density_says(self, name):
        # Chi-square over the cells of a 6 x 6 board: cells expecting fewer than five points are pooled.
        n, edge = 20_000, 4.5
        axis = torch.arange(-edge + 1 / 32, edge, 1 / 16, dtype=DOUBLE)
        p = toy.log_density(name, torch.cartesian_prod(axis, axis)).exp().view(6, 24, 6, 24).sum((1, 3)) / 256
        x = toy.sample(name, n, seeded(3)).double()
        x = x[(x.abs() < edge).all(dim=1)]
        cell = ((x + edge) / 1.5).long().clamp(0, 5)
        seen = torch.bincount(6 * cell[:, 0] + cell[:, 1], minlength=36).double()
        expected = (n * p).flatten()
        often = expected >= 5
        chi2 = ((seen - expected)[often] ** 2 / expected[often]).sum().item()
        # The statistic has mean and variance about k and 2k.
        assert chi2 < often.sum() + 5 * math.sqrt(2 * often.sum())
        assert seen[~often].sum() <= expected[~often].sum() + 5 * math.sqrt(expected[~often].sum()) + 5


def test_names():
    assert toy.names() == [
        "moons",
        "circles",
        "rings",
        "eight_gaussians",
        "pinwheel",
        "spirals",
        "swiss_roll",
        "checkerboard",
    ]


def test_entropy_of_the_checkerboard_is_ln_32():
    assert toy.entropy("checkerboard") == pytest.approx(math.log(32), abs=1e-12)


def test_checkerboard_fills_its_squares_and_no_others():
    x = toy.sample("checkerboard", 10_000, seeded())
    square = ((x + 4) / 2).floor().long().clamp(0, 3)
    counts = torch.bincount(4 * square[:, 0] + square[:, 1], minlength=16).view(4, 4)
    black = torch.tensor([[(i + j) % 2 == 0 for j in range(4)] for i in range(4)])
    assert x.abs().max() <= 4
    assert counts[~black].sum() == 0
    assert (counts[black] - 1250).abs().max() < 4 * math.sqrt(1250)


def test_entropy_of_far_gaussians_is_almost_that_of_one_plus_ln_8():
    # Were the eight Gaussians disjoint, H would be ln 8 + ln(2 pi e sigma^2); overlap can only lower it.
    disjoint = math.log(8) + math.log(2 * math.pi * math.e / 8)
    assert disjoint - 0.1 < toy.entropy("eight_gaussians") < disjoint


def test_density_of_circles_is_that_of_rice():
    # A circle of radius r blurred by sigma: exp(-(rho - r)^2 / 2 sigma^2) I_0e(rho r / sigma^2) / (2 pi sigma^2).
    sigma, x = 0.24, 2 * torch.randn(500, 2, dtype=DOUBLE, generator=seeded())
    rho, p = x.norm(dim=1), torch.zeros(500, dtype=DOUBLE)
    for r in (1.5, 3.0):
        bump = (-((rho - r) ** 2) / (2 * sigma**2)).exp() * torch.special.i0e(rho * r / sigma**2)
        p += 0.5 * bump / (2 * math.pi * sigma**2)
    torch.testing.assert_close(toy.log_density("circles", x), p.log(), atol=1e-9, rtol=0)


def test_finer_grids_do_not_change_the_entropy_of_the_moons():
    axis = torch.arange(-5, 5, 0.04, dtype=DOUBLE)
    p = toy.log_density("moons", torch.cartesian_prod(axis, axis)).exp()
    assert float(-torch.special.xlogy(p, p).sum() * 0.04**2) == pytest.approx(toy.entropy("moons"), abs=1e-6)


def test_moons_are_symmetric_and_of_the_size_documented():
    x = toy.sample("moons", 20_000, seeded())
    assert x.mean(0).abs().max() < 4 * 1.8 / math.sqrt(20_000)
    centre = torch.tensor([[-1.0, -0.5]])
    outer = x[x[:, 0] < -1.5]  # only the upper moon reaches this far to the left
    assert abs((outer - centre).norm(dim=1).mean().item() - 2) < 0.05


def test_spirals_reach_radius_pi_and_spread_their_mass_over_the_area():
    radius = toy.sample("spirals", 20_000, seeded()).norm(dim=1)
    assert abs(radius.max().item() - math.pi) < 5 * 0.1
    # The angle is 3 pi sqrt(u), so a quarter of the mass lies within half the radius.
    assert abs((radius < math.pi / 2).float().mean().item() - 0.25) < 0.02


@pytest.mark.parametrize(
    ("wrong", "right"), [("moon", "moons"), ("8gaussians", "eight_gaussians"), ("swissroll", "swiss_roll")]
)
def test_a_misspelt_name_gets_the_nearest_one(wrong, right):
    with pytest.raises(ValueError, match=f"got '{wrong}'. Did you mean '{right}'?"):
        toy.sample(wrong, 3)


def test_bad_input_gets_a_sentence():
    with pytest.raises(ValueError, match="toy density; got 'zzz'. Use one of moons, circles"):
        toy.entropy("zzz")
    with pytest.raises(ValueError, match="n must be at least 1; got 0"):
        toy.sample("moons", 0)
    with pytest.raises(ValueError, match=r"x must have shape \(n, 2\); got \(3,\)"):
        toy.log_density("moons", torch.zeros(3))

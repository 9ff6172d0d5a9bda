"""ColumnSpline: known values, inverse and slope against autograd, what a fit does to columns, and what it refuses."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from iresnet.transforms.spline import STEEPEST, ColumnSpline, fit_columns

DOUBLE = torch.float64
SQUARE = ([[0.0, 1.0, 2.0]], [[0.0, 1.0, 4.0]], [[0.5, 2.0, 4.0]])  # values and slopes of x^2, but for the first slope


def spline(knots, codes, slopes):
    given = [torch.tensor(part, dtype=DOUBLE) for part in (knots, codes, slopes)]
    return ColumnSpline(len(knots), len(knots[0]) - 1).double().set_(*given)


def rows(n, seed=0):
    """A uniform, a log-normal, a normal and a column of five integers, each of mean 0 and variance 1."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(n, 1, generator=generator, dtype=DOUBLE)
    z = torch.randn(n, 2, generator=generator, dtype=DOUBLE)
    k = torch.randint(5, (n, 1), generator=generator).to(DOUBLE)
    log_normal = (z[:, :1].exp() - math.exp(0.5)) / math.sqrt(math.e * (math.e - 1))
    return torch.cat([(u - 0.5) * math.sqrt(12), log_normal, z[:, 1:], (k - 2) / math.sqrt(2)], 1)


class TestMap:
    def test_it_passes_through_its_knots_with_their_slopes(self):
        h = spline(*SQUARE)
        x = torch.tensor([[0.0], [1.0], [2.0]], dtype=DOUBLE)
        z, logdet = h.forward_and_logdet(x)
        torch.testing.assert_close(z[:, 0], torch.tensor([0.0, 1.0, 4.0], dtype=DOUBLE))
        torch.testing.assert_close(logdet.exp(), torch.tensor([0.5, 2.0, 4.0], dtype=DOUBLE))

    def test_a_known_value_inside_a_piece(self):
        # On [1, 2]: s = 3, slopes 2 and 4, t = 1/2, so q = 3 + (6 - 6) / 4 = 3, z = 1 + 3 (3 / 4 + 2 / 4) / 3 = 1.5^2.
        assert spline(*SQUARE)(torch.tensor([[1.5]], dtype=DOUBLE)).item() == pytest.approx(2.25)

    def test_it_is_linear_outside(self):
        h = spline(*SQUARE)
        z, logdet = h.forward_and_logdet(torch.tensor([[-2.0], [5.0]], dtype=DOUBLE))
        assert z[:, 0].tolist() == pytest.approx([-1.0, 16.0])
        assert logdet.tolist() == pytest.approx([math.log(0.5), math.log(4.0)])

    def test_it_starts_as_the_identity(self):
        x = torch.randn(20, 3) * 4
        z, logdet = ColumnSpline(3, 8).forward_and_logdet(x)
        torch.testing.assert_close(z, x)
        torch.testing.assert_close(logdet, torch.zeros(20), atol=1e-6, rtol=0)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.floats(0.01, 30), min_size=7, max_size=7), st.integers(0, 1000))
    def test_inverse_slope_and_bounds_hold_for_any_knots(self, numbers, seed):
        widths, heights = torch.tensor([numbers[:2], numbers[2:4]], dtype=DOUBLE)
        knots, codes = (torch.cat([torch.zeros(1, dtype=DOUBLE), t.cumsum(0)]) - 1 for t in (widths, heights))
        h = spline([knots.tolist()], [codes.tolist()], [numbers[4:]])
        x = 40 * torch.rand(50, 1, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE) - 10
        x.requires_grad_()
        z, logdet = h.forward_and_logdet(x)
        (slope,) = torch.autograd.grad(z.sum(), x)
        torch.testing.assert_close(logdet.detach(), slope[:, 0].log())
        stretch = h.stretch((1,))
        error = float((h.undo(z.detach()) - x).detach().abs().max())
        assert error < 1e-13 * stretch.inverse * (1 + float(z.detach().abs().max()))
        assert float(slope.max()) <= stretch.forward * (1 + 1e-12)
        assert float(1 / slope.min()) <= stretch.inverse * (1 + 1e-12)

    @pytest.mark.parametrize("part", range(3))
    def test_knots_that_do_not_increase_are_refused(self, part):
        wrong = [list(map(list, p)) for p in SQUARE]
        wrong[part][0][1] = -1.0
        with pytest.raises(ValueError, match="must increase and slopes must be positive"):
            spline(*wrong)


class TestFit:
    def test_columns_become_nearly_normal(self):
        h = fit_columns(rows(4000), 32, rows(2000, seed=1)).double()
        z = h(rows(4000, seed=2))[:, :2]
        quantiles = torch.quantile(z, torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=DOUBLE), dim=0)
        normal = torch.special.ndtri(torch.tensor([[0.05], [0.25], [0.5], [0.75], [0.95]], dtype=DOUBLE))
        assert float((quantiles - normal).abs().max()) < 0.12

    def test_held_out_rows_are_more_likely_and_come_near_the_entropy(self):
        """A uniform column of variance 1 has the entropy ln sqrt(12)."""
        h, test = fit_columns(rows(4000), 32, rows(2000, seed=1)).double(), rows(4000, seed=2)
        first = ColumnSpline(1, 32).double().set_(*(t[:1] for t in (h.knots, h.codes, h.slopes)))
        z, logdet = first.forward_and_logdet(test[:, :1])
        nats = -(logdet - 0.5 * z[:, 0].square() - 0.5 * math.log(2 * math.pi)).mean()
        normal = 0.5 * math.log(2 * math.pi * math.e)
        assert math.log(12) / 2 - 0.02 < float(nats) < math.log(12) / 2 + 0.05 < normal - 0.1

    def test_a_normal_column_keeps_its_values(self):
        h = fit_columns(rows(500), 32, rows(500, seed=1))
        assert torch.equal(h.slopes[2], torch.ones(33))

    def test_few_rows_get_no_spline(self):
        h = fit_columns(rows(20), 16, rows(20, seed=1))
        assert torch.equal(h.slopes, torch.ones(4, 17))

    def test_values_that_repeat_do_not_make_it_steep(self):
        x = rows(3000)
        x[:1500, 1] = x[0, 1]  # half of a column is one value
        h = fit_columns(x, 32, x[:1000])
        assert float((h.codes.diff(dim=1) / h.knots.diff(dim=1)).max()) <= STEEPEST * (1 + 1e-5)

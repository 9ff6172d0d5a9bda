"""Typicality beside likelihood: known distributions, the failure that is known, and what is refused."""

import math

import pytest
import torch

from iresnet import Chain, DiagonalNormal, Flow, Logit
from iresnet.data import Dataset, Schema
from iresnet.data.corruptions import CORRUPTIONS, SYNTHETIC
from iresnet.evaluate import (
    atypicality,
    auroc,
    below_chance,
    corrupted_datasets,
    log_likelihood,
    ood_detection,
    typicality,
)
from tests.test_evaluate import images, pixel_flow, table
from tests.zoo import normal

D = 60


def gauss():
    return Flow(Chain(), DiagonalNormal(D)).eval()


def rows(scale, n=300, seed=0, shift=0.0):
    return Dataset((scale * normal(n, D, seed=seed) + shift).float(), None, Schema((D,)))


def reference(model, seed=9):
    return log_likelihood(model, rows(1.0, seed=seed)).value


class TestScores:
    def test_it_is_the_distance_from_the_entropy(self):
        values, held = torch.tensor([-5.0, -3.0, 1.0]), torch.tensor([-2.0, -4.0])
        assert typicality(values, held).tolist() == [2.0, 0.0, 4.0]

    def test_of_batches_it_is_that_of_their_means(self):
        values, held = torch.tensor([-5.0, -1.0, 1.0, 3.0, 100.0]), torch.tensor([-3.0])
        assert typicality(values, held, 2).tolist() == [0.0, 5.0]  # the fifth fills no batch
        assert typicality(values, held, 5).tolist() == [pytest.approx(22.6)]

    @pytest.mark.parametrize("batch", [0, 4])
    def test_batches_that_cannot_be(self, batch):
        with pytest.raises(ValueError, match=f"batch must lie between 1 and the number of samples, 3; got {batch}."):
            typicality(torch.zeros(3), torch.zeros(3), batch)

    def test_the_share_is_that_of_closer_rows(self):
        held = torch.tensor([-1.0, 0.0, 0.0, 1.0])
        assert atypicality(torch.tensor([0.0, 0.5, 1.0, -1.0]), held).tolist() == pytest.approx([0.4, 0.5, 0.8, 0.8])
        low, far, high = atypicality(torch.tensor([-2.0, -9.0, 2.0]), held).tolist()
        assert 0.8 < low == high < far < 1

    def test_it_is_spread_evenly_over_rows_like_the_reference(self):
        shares = atypicality(normal(2000, seed=1), normal(2000, seed=2))
        assert abs(float(shares.mean()) - 0.5) < 4 * math.sqrt(1 / 12 / 2000 * 2)

    def test_an_area_is_below_chance_beyond_what_the_choice_of_rows_explains(self):
        draws = [auroc(normal(50, seed=2 * i), normal(50, seed=2 * i + 1)) for i in range(400)]
        below = sum(below_chance(a, 50) for a in draws) / 400
        assert below == pytest.approx(0.0228, abs=4 * math.sqrt(0.0228 / 400))  # two standard errors, on one side
        assert below_chance(0.3, 50)


class TestOutside:
    def test_rows_that_are_too_likely_fool_the_likelihood_alone(self):
        """The known failure: rows near the mode are the most likely of all, and no row of the data lies there."""
        model = gauss()
        (found,) = ood_detection(model, rows(1.0), {"small": rows(0.3, seed=1)}, reference(model))
        assert found.value < found.data
        assert found.likelihood < 0.001
        assert found.typicality > 0.999
        assert found.batches == 1.0
        assert "more likely than the data" in str(found)

    def test_rows_that_are_unlikely_are_found_by_both(self):
        model = gauss()
        (found,) = ood_detection(model, rows(1.0), {"large": rows(2.0, seed=1)}, reference(model))
        assert min(found.likelihood, found.typicality, found.batches) > 0.999
        assert "less likely than the data" in str(found)

    def test_rows_of_the_same_kind_are_found_by_chance(self):
        model = gauss()
        (found,) = ood_detection(model, rows(1.0), {"same": rows(1.0, seed=1)}, reference(model))
        for area in (found.likelihood, found.typicality):
            assert abs(area - 0.5) < 4 * math.sqrt(2 / (12 * 300))
        assert abs(found.batches - 0.5) < 4 * math.sqrt(2 / (12 * 30))

    def test_a_batch_shows_what_one_row_hides(self):
        model = gauss()
        (found,) = ood_detection(model, rows(1.0), {"a little": rows(0.9, seed=1)}, reference(model))
        assert found.batches > found.typicality + 0.1

    def test_the_value_is_in_the_unit_of_the_data(self):
        model, data = pixel_flow(), images(40, (1, 1, 2), 4)
        held = log_likelihood(model, images(40, (1, 1, 2), 4, seed=1)).value
        (found,) = ood_detection(model, data, {"same": data}, held)
        assert (
            found.data
            == found.value
            == pytest.approx(-float(log_likelihood(model, data).value.mean()) / (2 * math.log(2)))
        )

    def test_so_many_rows_are_enough(self):
        model = gauss()
        (found,) = ood_detection(model, rows(1.0), {"small": rows(0.3)}, reference(model), rows=20)
        assert found.rows == 20

    def test_too_few_rows(self):
        model = gauss()
        for data, other, name in ((rows(1.0, 9), rows(1.0), "the data"), (rows(1.0), rows(1.0, 9), "few")):
            with pytest.raises(ValueError, match=f"a batch needs 10 samples; got 9 of {name}."):
                ood_detection(model, data, {"few": other}, reference(model))


class TestStrange:
    def test_corrupted_ones_and_invented_ones(self):
        data = images(50, levels=7, seed=5)
        made = corrupted_datasets(data)
        assert list(made) == [*CORRUPTIONS, *SYNTHETIC]
        for other in made.values():
            assert other.schema == data.schema
            assert other.x.shape == data.x.shape
            assert int(other.x.max()) < 7
            assert not torch.equal(other.x, data.x)

    def test_they_are_the_same_every_time(self):
        data = images(12)
        first, again = corrupted_datasets(data), corrupted_datasets(data)
        assert all(torch.equal(first[name].x, again[name].x) for name in first)

    def test_a_density_of_dark_images_takes_blank_ones_for_ordinary_and_typicality_does_not(self):
        base = DiagonalNormal((1, 4, 4))
        base.mean.fill_(-3.0)
        model = Flow(Logit(16), base).eval()
        generator = torch.Generator().manual_seed(0)
        x = model.sample((600,), generator=generator).clamp(0, 15.99).to(torch.uint8)
        data, held = (Dataset(part, None, Schema((1, 4, 4), 16)) for part in (x[:300], x[300:]))
        found = {
            d.name: d for d in ood_detection(model, data, corrupted_datasets(data), log_likelihood(model, held).value)
        }
        assert found["blank"].likelihood < 0.2
        assert found["blank"].batches > 0.9
        assert found["noise"].likelihood > 0.99

    def test_images_of_one_grey_are_too_likely_by_half_a_nat_a_pixel(self):
        """Pixels of N(128, 20^2): the entropy is ln(20 sqrt(2 pi e)), and -ln p at the mean is 1/2 less, by algebra."""
        base = DiagonalNormal((1, 8, 8))
        base.mean.fill_(128.5)
        base.log_scale.fill_(math.log(20.0))
        model, schema = Flow(Chain(), base).eval(), Schema((1, 8, 8), 256)
        parts = (128 + 20 * normal(2, 400, 1, 8, 8, seed=3)).round().clamp(0, 255).to(torch.uint8)
        data, held = (Dataset(part, None, schema) for part in parts)
        grey = Dataset(torch.full_like(data.x, 128), None, schema)
        (found,) = ood_detection(model, data, {"grey": grey}, log_likelihood(model, held).value)
        entropy = math.log2(20 * math.sqrt(2 * math.pi * math.e))
        assert found.data == pytest.approx(entropy, abs=4 * math.sqrt(0.5 / 64 / 400) / math.log(2))
        assert found.value == pytest.approx(entropy - 0.5 / math.log(2), abs=1e-3)
        assert (found.likelihood, found.typicality, found.batches) == (0.0, 1.0, 1.0)
        assert below_chance(found.likelihood, found.rows)
        assert found.error < 1e-3

    def test_tables_have_none(self):
        with pytest.raises(ValueError, match="corruptions need images of integers; got rows of 3 numbers. Give"):
            corrupted_datasets(table(3, 3))

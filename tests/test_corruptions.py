"""Corruptions: what they do to a tiny image is known pixel by pixel."""

import pytest
import torch

from iresnet.data import corruptions
from iresnet.data.corruptions import AVERAGED, CORRUPTIONS, SYNTHETIC, corrupt

RANDOM = {"pixel noise", "shuffled", *SYNTHETIC} - {"blank"}
IMAGE = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 8]], dtype=torch.uint8).reshape(1, 1, 3, 3)


def images(rows=6, shape=(2, 4, 5), levels=17, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(levels, (rows, *shape), generator=generator).to(torch.uint8)


class TestKnownAnswers:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("inverted", [[16, 15, 14], [13, 12, 11], [10, 9, 8]]),
            ("turned", [[2, 5, 8], [1, 4, 7], [0, 3, 6]]),
            ("half missing", [[0, 1, 2], [0, 0, 0], [0, 0, 0]]),
            # mirrored at the border: the corner is (4*0 + 2*1 + 2*3 + 4) / 9 = 4/3, and so on
            ("blurred", [[1, 2, 3], [3, 4, 5], [5, 6, 7]]),
        ],
    )
    def test_of_nine_pixels(self, name, expected):
        assert corrupt(name, IMAGE, 17)[0, 0].tolist() == expected

    def test_the_lower_half_of_an_even_image(self):
        x = 1 + torch.zeros(1, 1, 4, 2, dtype=torch.uint8)
        assert corrupt("half missing", x, 17)[0, 0].tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]

    def test_an_image_that_is_not_square_is_turned_upside_down(self):
        x = torch.arange(6, dtype=torch.uint8).reshape(1, 1, 2, 3)
        assert corrupt("turned", x, 17)[0, 0].tolist() == [[5, 4, 3], [2, 1, 0]]

    def test_inverted_twice_is_the_image(self):
        x = images(levels=256)
        assert torch.equal(corrupt("inverted", corrupt("inverted", x, 256), 256), x)
        assert corrupt("inverted", torch.zeros(1, 1, 1, 1, dtype=torch.uint8), 256).item() == 255

    def test_a_blur_leaves_a_flat_image(self):
        x = torch.full((1, 2, 4, 4), 7, dtype=torch.uint8)
        assert torch.equal(corrupt("blurred", x, 17), x)

    def test_shuffling_is_one_permutation_for_all_images_and_channels(self):
        places = torch.arange(20, dtype=torch.uint8).reshape(1, 1, 4, 5)
        order = corrupt("shuffled", places, 20).flatten().long()
        assert sorted(order.tolist()) == list(range(20))
        assert order.tolist() != list(range(20))
        x = images()
        assert torch.equal(corrupt("shuffled", x, 17).flatten(2), x.flatten(2)[..., order])

    def test_noise_replaces_one_pixel_in_five(self):
        x = torch.full((50, 1, 20, 20), 200, dtype=torch.uint8)  # no level that noise can draw
        noisy = corrupt("pixel noise", x, 16)
        hit = noisy != 200
        assert float(hit.double().mean()) == pytest.approx(0.2, abs=4 * (0.16 / 20_000) ** 0.5)
        counts = torch.bincount(noisy[hit].long(), minlength=16)
        assert len(counts) == 16
        assert counts.min() > 0.7 * counts.float().mean()


class TestInvented:
    def test_blank_and_one_colour(self):
        assert not corrupt("blank", images(), 17).any()
        one = corrupt("one colour", images(200, (3, 4, 5)), 17).flatten(2)
        assert torch.equal(one, one[..., :1].expand_as(one))
        assert len(one[:, 0, 0].unique()) == 17  # every level of 0 .. 16, and channels by themselves
        assert not torch.equal(one[:, 0], one[:, 1])

    def test_a_gradient_is_even_along_a_line_and_spans_its_two_colours(self):
        x = corrupt("gradient", images(100, (1, 9, 9), 256), 256)[:, 0].double()
        for steps in (x.diff(dim=1), x.diff(dim=2)):  # the same step everywhere, up to rounding
            assert (steps - steps.mean((1, 2), keepdim=True)).abs().max() <= 1.01
        corners = x[:, [0, 0, -1, -1], [0, -1, 0, -1]]
        assert torch.equal(corners.amax(1), x.amax((1, 2)))
        assert torch.equal(corners.amin(1), x.amin((1, 2)))
        assert (corners.amax(1) - corners.amin(1)).mean() > 50  # 85 for two levels of 256 drawn at random

    def test_a_checkerboard_has_two_colours_by_turns(self):
        x = corrupt("checkerboard", images(60, (1, 8, 8), 256), 256)[:, 0]
        assert all(len(board.unique()) <= 2 for board in x)
        fine = x[:, 0, 0] != x[:, 0, 1]  # squares of one pixel; the others are two wide, a quarter of eight
        assert 10 < int(fine.sum()) < 50
        assert torch.equal(x[fine][:, 2:, :], x[fine][:, :-2, :])
        assert torch.equal(x[~fine][:, 4:, :], x[~fine][:, :-4, :])
        assert torch.equal(x[~fine][:, ::2], x[~fine][:, 1::2])

    def test_the_mean_of_many_is_close_to_the_mean_of_all(self):
        x = images(300, (1, 6, 6), 256)
        mean, all_of_them = corrupt("mean image", x, 256).double(), x.double().mean(0)
        deviation = float((mean - all_of_them).std())
        assert deviation == pytest.approx(float(x.double().std(0).mean()) / AVERAGED**0.5, rel=0.1)
        assert len(mean.flatten(1).unique(dim=0)) > 290

    def test_the_shares_of_many_images_are_not_held_at_once(self, monkeypatch):
        x = images(300, (1, 6, 6), 256)
        whole = corrupt("mean image", x, 256)
        monkeypatch.setattr(corruptions, "WEIGHTS", 300 * 7)
        assert (corrupt("mean image", x, 256).int() - whole.int()).abs().max() <= 1  # a half may be rounded either way

    def test_noise_has_every_level_equally_often(self):
        counts = torch.bincount(corrupt("noise", images(500), 17).flatten().long())
        assert len(counts) == 17
        assert float((counts / counts.sum() - 1 / 17).abs().max()) < 4 * (16 / 17**2 / 20_000) ** 0.5


@pytest.mark.parametrize("name", [*CORRUPTIONS, *SYNTHETIC])
class TestEvery:
    def test_type_shape_and_range_are_kept(self, name):
        for levels, shape in ((2, (1, 4, 4)), (17, (2, 4, 5)), (256, (3, 6, 6))):
            x = images(shape=shape, levels=levels)
            got = corrupt(name, x, levels)
            assert (got.dtype, got.shape, got.device) == (x.dtype, x.shape, x.device)
            assert int(got.max()) < levels
            assert got.is_contiguous()

    def test_the_images_given_stay_as_they_are(self, name):
        x = images(seed=5)
        before = x.clone()
        assert not torch.equal(corrupt(name, x, 17), before)
        assert torch.equal(x, before)

    def test_the_seed_decides(self, name):
        x, state = images(), torch.get_rng_state()
        first, again, other = (corrupt(name, x, 17, seed) for seed in (1, 1, 2))
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(first, again)
        assert torch.equal(first, other) == (name not in RANDOM)

"""Corruptions: what they do to a tiny image is known pixel by pixel."""

import pytest
import torch

from iresnet.data.corruptions import CORRUPTIONS, corrupt

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


@pytest.mark.parametrize("name", CORRUPTIONS)
class TestEvery:
    def test_type_shape_and_range_are_kept(self, name):
        for levels, shape in ((2, (1, 4, 4)), (17, (2, 4, 5)), (256, (3, 6, 6))):
            x = images(shape=shape, levels=levels)
            got = corrupt(name, x, levels)
            assert (got.dtype, got.shape, got.device) == (x.dtype, x.shape, x.device)
            assert int(got.max()) < levels
            assert got.is_contiguous()

    def test_the_images_given_stay_as_they_are(self, name):
        x = images()
        before = x.clone()
        assert not torch.equal(corrupt(name, x, 17), before)
        assert torch.equal(x, before)

    def test_the_seed_decides(self, name):
        x, state = images(), torch.get_rng_state()
        first, again, other = (corrupt(name, x, 17, seed) for seed in (1, 1, 2))
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(first, again)
        assert torch.equal(first, other) == (name not in ("pixel noise", "shuffled"))

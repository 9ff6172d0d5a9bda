"""Real images of another kind: the pixels of a recast image are known, and scikit-learn's own have the right form."""

import pytest
import torch

from iresnet.data import Schema
from iresnet.data.ood_images import convert_images, handwriting, photographs

COLOUR, GREY, SMALL = Schema((3, 32, 32), 256), Schema((1, 28, 28), 256), Schema((1, 8, 8), 17)


def test_levels_and_size_change_together():
    x = torch.tensor([[0, 1], [2, 3]]).reshape(1, 1, 2, 2)
    assert convert_images(x, 4, Schema((1, 2, 2), 256)).x.flatten().tolist() == [0, 85, 170, 255]
    assert convert_images(x, 4, Schema((1, 1, 1), 4)).x.item() == 2  # the mean, 1.5, rounded to the even level
    larger = convert_images(x, 4, Schema((1, 4, 4), 4)).x[0, 0]
    assert larger[[0, 0, -1, -1], [0, -1, 0, -1]].tolist() == [0, 1, 2, 3]


def test_images_of_the_same_form_stay_as_they_are():
    x = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(convert_images(x, 256, COLOUR).x, x)


def test_colours_become_their_mean():
    x = torch.tensor([30, 60, 120], dtype=torch.uint8).reshape(1, 3, 1, 1)
    assert convert_images(x, 256, Schema((1, 1, 1), 256)).x.item() == 70


def test_drawings_get_an_ink_and_a_ground_of_random_colours():
    x = torch.tensor([0, 255, 51], dtype=torch.uint8).expand(50, 1, 1, 3)
    got = convert_images(x, 256, Schema((3, 1, 3), 256)).x[:, :, 0].double()
    ground, ink, between = got.unbind(-1)
    assert (between - (ground + (ink - ground) / 5)).abs().max() <= 0.6
    assert len(ground.unique(dim=0)) == len(ink.unique(dim=0)) == 50
    assert torch.equal(convert_images(x, 256, COLOUR, seed=1).x, convert_images(x, 256, COLOUR, seed=1).x)
    assert not torch.equal(convert_images(x, 256, COLOUR, seed=1).x, convert_images(x, 256, COLOUR, seed=2).x)


@pytest.mark.parametrize("schema", [COLOUR, GREY, SMALL])
@pytest.mark.parametrize("source", [handwriting, photographs])
def test_images_inside_scikit_learn(source, schema):
    made = source(20, schema)
    assert (made.schema, len(made), made.y) == (schema, 20, None)
    assert len(made.x.flatten(1).unique(dim=0)) == 20
    assert schema.levels // 2 < int(made.x.max()) < schema.levels
    assert torch.equal(source(20, schema).x, made.x)


def test_handwriting_is_that_of_the_digits():
    from sklearn.datasets import load_digits

    known = {tuple(row) for row in load_digits(return_X_y=True)[0].astype(int).tolist()}
    assert all(tuple(row) in known for row in handwriting(30, SMALL).x.flatten(1).tolist())
    assert len(handwriting(5000, SMALL)) == 1797


def test_tables_are_refused():
    with pytest.raises(
        ValueError, match="images can only be converted to images of integers; got rows of 3 numbers. Give"
    ):
        convert_images(torch.zeros(1, 1, 2, 2), 4, Schema((3,)))

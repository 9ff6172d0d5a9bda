"""Image grids, points and columns: known pixels, whole files, and errors."""

import io

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image

from iresnet.plots import (
    plot_columns,
    plot_image_grid,
    plot_interpolations,
    plot_points,
    plot_reconstructions,
    raster,
    scatter,
)

RAMP = torch.arange(17).reshape(1, 1, 1, 17)


def opened(path):
    with Image.open(path) as image:
        return np.asarray(image)


def pairs(n=3):
    x = 16 * torch.rand(n, 1, 8, 8, dtype=torch.float64)
    y = x + 1e-9 * torch.randn(n, 1, 8, 8, dtype=torch.float64)
    return x, y, (x - y).flatten(1).norm(dim=1)


# Values of pixels


def test_an_integer_and_the_middle_of_its_bin_have_the_same_brightness():
    expected = [round(255 * v / 16) for v in range(17)]
    assert raster.pixels(RAMP, 17).flatten().tolist() == expected
    assert raster.pixels(RAMP + 0.5, 17).flatten().tolist() == expected
    assert raster.pixels(RAMP, 17, ink=True).flatten().tolist() == [255 - v for v in expected]


def test_values_outside_are_clipped():
    assert raster.pixels(torch.tensor([-3.0, 400.0]).reshape(1, 1, 1, 2)).flatten().tolist() == [0, 255]


def test_handwriting_is_recognised_and_photographs_are_not():
    digit = torch.zeros(1, 1, 8, 8)
    digit[..., 3:5] = 16
    assert raster.looks_handwritten(digit, 17)
    assert not raster.looks_handwritten(16 - digit, 17)
    assert not raster.looks_handwritten(digit.expand(1, 3, 8, 8), 17)


def test_differences_are_averaged_over_channels_and_scaled_by_the_largest():
    x = torch.zeros(2, 3, 1, 1, dtype=torch.float64)
    y = x.clone()
    y[0, :, 0, 0] = torch.tensor([0.3, 0.0, -0.3])
    y[1, 1, 0, 0] = 0.3
    d, largest = raster.differences(x, y)
    assert largest == pytest.approx(0.2)
    assert d.flatten().tolist() == pytest.approx([1.0, 0.5])
    assert raster.differences(x, x)[1] == 0


def test_a_png_preserves_its_pixels():
    colour = (255 * torch.rand(1, 3, 4, 5)).to(torch.uint8)
    content = raster.png(raster.pixels(colour)[0])
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(content))), colour[0].permute(1, 2, 0).numpy())


def test_tiles_are_in_rows_with_a_gap_around_each():
    tiles = raster.pixels(torch.zeros(3, 1, 1, 1, dtype=torch.int64))
    g = raster.GROUND
    full, half, empty = [g, 0, 0, g, 0, 0, g], [g, 0, 0, g, g, g, g], [g] * 7
    assert raster.tile(tiles, 2, factor=2, gap=1)[:, :, 0].tolist() == [empty, full, full, empty, half, half, empty]


# Files


def test_a_grid_is_enlarged_by_an_integer_factor(tmp_path):
    images = (16 * torch.rand(10, 1, 8, 8)).floor()
    path = plot_image_grid(images + 0.5, tmp_path / "new" / "grid.png", columns=5, levels=17, ink=False)
    picture = opened(path)
    factor, gap = 960 // 40, 960 // 40 * 8 // 20
    assert picture.shape == (2 * 8 * factor + 3 * gap, 5 * 8 * factor + 6 * gap)
    second = picture[gap : gap + 8 * factor : factor, 8 * factor + 2 * gap : 16 * factor + 2 * gap : factor]
    assert second.tolist() == [[round(255 * v / 16) for v in row] for row in images[1, 0].tolist()]
    assert list(path.parent.iterdir()) == [path]


def test_a_grid_in_colour_and_about_square(tmp_path):
    assert opened(plot_image_grid(255 * torch.rand(7, 3, 32, 32), tmp_path / "a.png")).shape == (1024, 1024, 3)


def test_interpolations_have_one_row_per_pair(tmp_path):
    picture = opened(plot_interpolations(torch.rand(2, 6, 1, 4, 4), tmp_path / "a.png", levels=2))
    assert picture.shape[1] / picture.shape[0] == pytest.approx(3, rel=0.05)


def test_reconstructions_are_three_rows(tmp_path):
    path = plot_reconstructions(*pairs(), tmp_path / "a.png", levels=17, dpi=50)
    assert opened(path).shape[:2] == (int(2.69 * 50), round((1.72 + 3 * 0.75 + 0.09) * 50))
    many = plot_reconstructions(*pairs(40), tmp_path / "b.png", levels=17, dpi=20)
    assert opened(many).shape[1] == round((1.72 + 12 * 0.75 + 0.09) * 20)


def test_points_and_columns(tmp_path):
    x = torch.randn(300, 8)
    x[:, 3] = 2.0  # a column that says nothing
    names = ["$a$", "b" * 40, *"cdefgh"]
    assert opened(plot_points(x[:, :2], x[:50, :2], tmp_path / "points.png", dpi=40)).shape[:2] == (176, 332)
    square = opened(plot_columns(x, x[:50], names, tmp_path / "columns.png", dpi=40))
    assert square.shape[0] - square.shape[1] == 20
    assert opened(plot_columns(x[:, :1], x[:9, :1], ["a"], tmp_path / "one.png", dpi=40)).size > 0


def test_matplotlib_settings_are_unchanged(tmp_path):
    with matplotlib.rc_context({"axes.facecolor": "red"}):
        before = dict(matplotlib.rcParams)
        plot_points(torch.rand(9, 2), torch.rand(9, 2), tmp_path / "a.png", dpi=20)
        assert dict(matplotlib.rcParams) == before


def test_a_failing_write_keeps_the_old_file(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    path = tmp_path / "a.png"
    path.write_bytes(b"old")
    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space left on device"):
        plot_image_grid(torch.rand(1, 1, 2, 2), path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_png_is_reduced_in_width_and_colours(tmp_path):
    noise = (255 * torch.rand(1, 3, 60, 80)).to(torch.uint8)
    path = plot_image_grid(noise, tmp_path / "a.png")
    content, size = raster.shrink_png(path, width=40)
    assert size == Image.open(io.BytesIO(content)).size == (40, 31)
    assert len(content) < path.stat().st_size / 4


# Windows and histograms


def test_a_histogram_holds_the_share_of_the_rows():
    column = np.array([0.0, 0.1, 0.9, 5.0])
    assert scatter.histogram(column, 0, 1).sum() == pytest.approx(0.75)


def test_a_window_of_one_value_has_a_width_and_a_square_window_is_square():
    assert scatter.window(np.full(4, 3.0)) == (1.5, 4.5)
    (left, right), (bottom, top) = scatter.square_window(np.array([[0.0, 0.0], [10.0, 1.0]]))
    assert right - left == pytest.approx(top - bottom)
    assert (bottom + top) / 2 == pytest.approx(0.5)


# What is refused


@pytest.mark.parametrize("shape", [(4, 8, 8), (0, 1, 8, 8), (2, 2, 8, 8), (2, 1, 0, 8)])
def test_images_of_another_shape_raise(tmp_path, shape):
    with pytest.raises(ValueError, match=r"images must have shape \(N, C, H, W\) .* got \(.*\). Choose channels"):
        plot_image_grid(torch.zeros(shape), tmp_path / "a.png")


def test_images_that_are_not_finite_raise(tmp_path):
    with pytest.raises(ValueError, match="images must be finite; got NaN or infinity. Leave such images out."):
        plot_image_grid(torch.full((1, 1, 2, 2), torch.nan), tmp_path / "a.png")


def test_too_few_levels_or_columns_raise(tmp_path):
    with pytest.raises(ValueError, match="levels must be at least 2; got 1."):
        plot_image_grid(torch.zeros(1, 1, 2, 2), tmp_path / "a.png", levels=1)
    with pytest.raises(ValueError, match="columns must be at least 1; got 0."):
        plot_image_grid(torch.zeros(1, 1, 2, 2), tmp_path / "a.png", columns=0)


def test_a_path_without_png_raises():
    with pytest.raises(ValueError, match=r"path must end in .png; got 'a.gif'."):
        plot_image_grid(torch.zeros(1, 1, 2, 2), "a.gif")


def test_interpolations_that_are_not_stacked_raise(tmp_path):
    with pytest.raises(ValueError, match=r"images must have shape \(pairs, steps, C, H, W\); got \(6, 1, 4, 4\)."):
        plot_interpolations(torch.rand(6, 1, 4, 4), tmp_path / "a.png")


def test_reconstructions_that_do_not_match_raise(tmp_path):
    x, y, errors = pairs()
    with pytest.raises(ValueError, match="originals and rebuilt must have the same shape"):
        plot_reconstructions(x, y[:, :, :4], errors, tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"errors must hold one number per image, 3; got shape \(2,\)."):
        plot_reconstructions(x, y, errors[:2], tmp_path / "a.png")


def test_tables_that_do_not_match_raise(tmp_path):
    x, path = torch.rand(5, 3), tmp_path / "a.png"
    with pytest.raises(ValueError, match=r"shapes \(N, D\) and \(M, D\).* got \(5, 3\) and \(5, 2\)."):
        plot_columns(x, x[:, :2], "abc", path)
    with pytest.raises(ValueError, match="samples must be finite; got NaN or infinity. Leave such rows out."):
        plot_columns(x, x / 0 * 0, "abc", path)
    with pytest.raises(ValueError, match="columns must name every column of data, 3; got 2 names."):
        plot_columns(x, x, "ab", path)
    with pytest.raises(ValueError, match="data must have 2 columns; got 3. Draw more of them with plot_columns."):
        plot_points(x, x, path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_image_raises(tmp_path):
    path = tmp_path / "a.png"
    path.write_text("not a picture")
    with pytest.raises(ValueError, match="a.png must be an image file; it cannot be read. Write it again."):
        raster.shrink_png(path)
    with pytest.raises(FileNotFoundError):
        raster.shrink_png(tmp_path / "missing.png")

"""The plot of flows in the plane: its size, its square panels, and that files are written whole."""

import struct

import matplotlib
import pytest
import torch

from iresnet import mlp_flow
from iresnet.data import toy
from iresnet.plots import ToyPanel, plot_toy_flows
from iresnet.plots import toy as planes
from iresnet.plots.toy import COLUMNS, SIDE

SMALL = {"dpi": 40, "resolution": 12, "points": 50}


def panel(name="Two moons", **changes):
    torch.manual_seed(0)
    content = {
        "name": name,
        "flow": mlp_flow(2, blocks=2, hidden=(8,)),
        "data": toy.sample("moons", 60, torch.Generator().manual_seed(0)),
        "nats": 3.518,
        "floor": 3.4657,
        "certificate_line": "Invertible: proven. 2 of 2 blocks proven contractive.",
    }
    return ToyPanel(**content | changes)


def png_size(path):
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:])


class Broken(torch.nn.Module):
    """A part of a flow that fails."""

    shape, mean = (2,), torch.zeros(2)

    def forward(self, *_, **__):
        raise RuntimeError("no solution")

    log_prob = rsample = inverse = forward_and_logdet = forward


# The file


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_png_of_the_expected_size_and_nothing_else(tmp_path, rows):
    path = plot_toy_flows([panel()] * rows, tmp_path / "new" / "toy.png", **SMALL)
    width, height = png_size(path)
    assert width == 13 * 40
    assert height == int((0.79 + 3.06 * rows) * 40)
    assert list(path.parent.iterdir()) == [path]


def test_the_same_seed_gives_the_same_file_and_another_one_does_not(tmp_path):
    a, b, c = (
        plot_toy_flows([panel()], str(tmp_path / f"{name}.png"), seed=seed, **SMALL).read_bytes()
        for name, seed in [("a", 0), ("b", 0), ("c", 1)]
    )
    assert a == b
    assert a != c


@pytest.mark.parametrize("part", ["transform", "base"])
def test_a_failing_flow_keeps_the_old_file_and_leaves_no_other(tmp_path, part):
    path = tmp_path / "toy.png"
    path.write_bytes(b"old")
    bad = panel()
    setattr(bad.flow, part, Broken())
    with pytest.raises(RuntimeError, match="no solution"):
        plot_toy_flows([panel(), bad], path, **SMALL)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failing_write_keeps_the_old_file_and_leaves_no_other(tmp_path, monkeypatch):
    def fail(figure, file, **_):
        file.write_bytes(b"a part")
        raise OSError("disk full")

    path = tmp_path / "toy.png"
    path.write_bytes(b"old")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        plot_toy_flows([panel()], path, **SMALL)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_flow_and_matplotlib_are_unchanged_and_a_users_style_has_no_effect(tmp_path):
    one = panel()
    before = {name: t.clone() for name, t in one.flow.state_dict().items()}
    plain = plot_toy_flows([one], tmp_path / "plain.png", **SMALL).read_bytes()
    with matplotlib.rc_context({"savefig.bbox": "tight", "axes.facecolor": "red", "font.family": "serif"}):
        settings = dict(matplotlib.rcParams)
        assert plot_toy_flows([one], tmp_path / "styled.png", **SMALL).read_bytes() == plain
        assert dict(matplotlib.rcParams) == settings
    assert one.flow.training
    assert all(torch.equal(t, before[name]) for name, t in one.flow.state_dict().items())


def test_float64_flows_and_constant_data_can_be_plotted(tmp_path):
    flow = mlp_flow(2, blocks=1, hidden=(8,)).double()
    size = png_size(plot_toy_flows([panel(flow=flow, data=torch.ones(3, 2))], tmp_path / "toy.png", **SMALL))
    assert min(size) > 0


# The figure


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_every_row_has_four_square_aligned_panels_with_one_window(figures, rows):
    plot_toy_flows([panel()] * rows, "unwritten.png", **SMALL)
    axes = figures[0].axes
    assert len(axes) == 4 * rows
    size = figures[0].get_size_inches()
    for i in range(rows):
        row = [a.get_position() for a in axes[4 * i : 4 * i + 4]]
        assert len({round(box.y0, 9) for box in row}) == 1
        assert [box.width * size[0] for box in row] == pytest.approx([SIDE] * 4)
        assert [box.height * size[1] for box in row] == pytest.approx([SIDE] * 4)
        assert len({(*a.get_xlim(), *a.get_ylim()) for a in axes[4 * i : 4 * i + 4]}) == 1
    assert all(a.get_xlim()[1] - a.get_xlim()[0] == pytest.approx(a.get_ylim()[1] - a.get_ylim()[0]) for a in axes)


def test_texts_are_shown_verbatim_inside_the_canvas(figures):
    name, line = "A rather long $name$ of a density", "Lip(F) <= 3, $" + 60 * "words " + "end"
    plot_toy_flows([panel(), panel(name, floor=None, certificate_line=line)], "unwritten.png", **SMALL)
    figure = figures[0]
    texts = [t.get_text() for t in figure.texts]
    assert {*COLUMNS, "Two moons", "3.52 nats; floor 3.47", "3.52 nats"} <= set(texts)
    assert "A rather long\n$name$ of a\ndensity" in texts
    boxes = [t.get_window_extent() for t in figure.texts]
    assert all(figure.bbox.contains(*corner) for box in boxes for corner in (box.min, box.max))
    squares = [a.get_window_extent() for a in figure.axes]
    assert not any(box.overlaps(square) for box in boxes for square in squares)


def test_the_density_and_the_grid_are_those_of_the_flow():
    one = panel()
    row = planes._compute(one, resolution=10, points=50, seed=0)
    flow, (left, right, bottom, top) = one.flow.eval(), row.window
    # The pixel in the third row from the bottom, second column, by hand.
    x = torch.tensor([[left + 0.15 * (right - left), bottom + 0.25 * (top - bottom)]])
    assert row.density[2, 1] == pytest.approx(flow.log_prob(x).exp().item(), rel=1e-4)
    assert row.data.shape == row.samples.shape == (50, 2)
    codes = flow.transform(torch.tensor(row.lines, dtype=torch.float32).reshape(-1, 2))
    assert torch.allclose(codes, planes._grid_lines(20).reshape(-1, 2), atol=1e-4)
    assert row.lines.shape == (42, 20, 2)


# What is refused


def test_empty_panels_raise():
    with pytest.raises(ValueError, match="panels must hold at least one ToyPanel; got none. Pass one"):
        plot_toy_flows([], "toy.png")


@pytest.mark.parametrize("shape", [(5,), (5, 3), (1, 2), (0, 2), (2, 5, 2)])
def test_data_of_another_shape_raise(shape):
    with pytest.raises(ValueError, match=r"data must have shape \(n, 2\) with n at least 2; got .* Pass points"):
        panel(data=torch.zeros(shape))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_data_that_are_not_finite_raise(bad):
    with pytest.raises(ValueError, match="data must be finite; that of 'Two moons' .* Leave such points out."):
        panel(data=torch.tensor([[0.0, 1.0], [bad, 0.0]]))


def test_a_flow_in_three_dimensions_raises():
    with pytest.raises(ValueError, match=r"codes of shape \(2,\); got \(3,\). Only a plane is drawn."):
        panel(flow=mlp_flow(3, blocks=1, hidden=(8,)))


def test_a_path_without_png_raises():
    with pytest.raises(ValueError, match=r"path must end in .png; got 'toy.pdf'. No other format"):
        plot_toy_flows([panel()], "toy.pdf")


@pytest.mark.parametrize("name", ["dpi", "resolution", "points"])
def test_sizes_below_two_raise(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 2; got 1."):
        plot_toy_flows([panel()], "toy.png", **{name: 1})


def test_a_density_that_is_not_finite_raises(tmp_path):
    bad = panel()
    bad.flow.base.mean.fill_(torch.nan)
    with pytest.raises(ValueError, match="'Two moons' has NaN or infinity near its data. Train the flow again."):
        plot_toy_flows([bad], tmp_path / "toy.png", **SMALL)
    assert list(tmp_path.iterdir()) == []

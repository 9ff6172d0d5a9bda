"""A linear probe: no error where a plane separates the codes, chance where labels have nothing to do with x."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from iresnet import Chain, Classifier, DiagonalNormal, Flow, Logit, ResidualBlock, cli, contractive_convnet
from iresnet.data import Dataset, Schema
from iresnet.data.labels import MISSING
from iresnet.evaluate import probe
from iresnet.evaluate.probe import _fit, _logits, _minimum
from iresnet.transform import ISOMETRY, Transform
from tests.runs import copy_of, trained
from tests.zoo import linear_block, normal


class Radius(Transform):
    """x -> (x, |x|) with the last column in the place of the first: circles become a threshold."""

    def forward(self, x, context=None):
        return torch.cat([x.norm(dim=1, keepdim=True), x[:, 1:]], dim=1)

    def forward_and_logdet(self, x, context=None, **_):
        raise NotImplementedError

    def inverse(self, z, context=None, **_):
        raise NotImplementedError

    def stretch(self, input_shape=None):
        return ISOMETRY


def rings(rows, seed):
    angle = torch.rand(rows, generator=torch.Generator().manual_seed(seed)) * 2 * math.pi
    y = torch.arange(rows) % 3
    x = (1 + y)[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
    return Dataset(x.float(), y, Schema((2,), classes=("a", "b", "c")))


def coins(rows, seed, classes=4):
    y = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(seed + 50))
    return Dataset(normal(rows, 5, seed=seed, dtype=torch.float32), y, Schema((5,), classes=tuple("abcd")))


def flow(d=5):
    return Flow(linear_block(torch.zeros(d, d), lipschitz=0.9), DiagonalNormal(d)).eval()


def ringed():
    return Classifier(Chain(linear_block(torch.zeros(2, 2), lipschitz=0.9), Radius()), nn.Linear(2, 3)).eval()


class TestKnownAnswers:
    def test_codes_that_a_plane_separates(self):
        """Rings are no linear matter; their radii are."""
        found = probe(ringed(), rings(300, 0), rings(200, 1))
        assert found.codes.value == 0
        assert found.inputs.value > 40
        assert (found.rows, found.codes.rows) == (300, 200)

    def test_labels_that_have_nothing_to_do_with_x(self):
        found = probe(flow(), coins(400, 0), coins(800, 1))
        for error in (found.codes, found.inputs):
            assert abs(error.value / 100 - 0.75) < 4 * math.sqrt(0.75 * 0.25 / 800)
            assert error.low < error.value < error.high

    def test_the_minimum_is_scikit_learns(self):
        from sklearn.linear_model import LogisticRegression

        x, y, penalty = normal(60, 3), torch.arange(60) % 3, 0.05
        x = x + torch.nn.functional.one_hot(y)
        ours = _minimum(x, y, x.new_zeros(4, 3), penalty)
        # scikit-learn minimises the sum of cross-entropies times C.
        theirs = LogisticRegression(C=1 / (penalty * 60), tol=1e-8, max_iter=1000).fit(x.numpy(), y.numpy())
        np.testing.assert_allclose(ours[:-1].T.numpy(), theirs.coef_, atol=1e-3)
        assert torch.equal(_logits(ours, x).argmax(1), torch.from_numpy(theirs.predict(x.numpy())))

    def test_noise_asks_for_a_strong_penalty(self):
        data, signal = coins(200, 0), rings(200, 0)
        weak = _fit(Radius()(signal.x).double(), signal.y, 3, 0)
        strong = _fit(data.x.double(), data.y, 4, 0)
        assert strong[:-1].norm() < 0.5 < weak[:-1].norm()


class TestWhatItSees:
    def test_the_same_twice_and_rows_at_most(self):
        first, again = (probe(flow(), coins(100, 0), coins(50, 1), rows=40) for _ in range(2))
        assert first == again
        assert (first.rows, first.codes.rows) == (40, 40)

    def test_rows_without_a_label_are_left_out(self):
        train, test = coins(60, 0), coins(60, 1)
        train.y[::2], test.y[10:] = MISSING, MISSING
        found = probe(flow(), train, test)
        assert (found.rows, found.codes.rows) == (30, 10)

    def test_test_labels_change_nothing_but_the_count(self):
        train, test = rings(200, 0), rings(100, 1)
        model = ringed()
        other = Dataset(test.x, (test.y + 1) % 3, test.schema)
        assert probe(model, train, test).codes.wrong == 0
        assert probe(model, train, other).codes.wrong == 100

    def test_images_at_the_middle_of_their_bins_and_pixels_that_never_vary(self):
        x = torch.randint(4, (80, 1, 4, 4), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
        x[:, :, 0] = 0
        y = (x[:, 0, 1, 1] >= 2).long()
        data = Dataset(x, y, Schema((1, 4, 4), 4, classes=("dark", "bright")))
        block = ResidualBlock(contractive_convnet(1, 2, kernels=(3, 3)))
        found = probe(Flow(Chain(Logit(4), block), DiagonalNormal((1, 4, 4))).eval(), data, data)
        assert found.inputs.value == found.codes.value == 0

    def test_it_says_all_in_a_line(self):
        text = str(probe(ringed(), rings(300, 0), rings(200, 1)))
        assert text.startswith("codes 0.00 % (0 of 200; 95 % interval 0.00 to 1.88 %); inputs ")
        assert text.endswith("; logistic regression on 300 samples")


def test_refuses():
    data = coins(40, 0)
    with pytest.raises(
        ValueError, match="rows must be at least 10, to fit the probe and to select its penalty; got 9."
    ):
        probe(flow(), data, data, rows=9)
    with pytest.raises(ValueError, match="a probe needs at least 10 samples with a label; got 5."):
        probe(flow(), coins(5, 0), data)
    with pytest.raises(ValueError, match="a probe needs a model in eval mode; call model.eval\\(\\) first."):
        probe(flow().train(), data, data)
    sentence = r"a probe needs codes; Classifier \(an ordinary ResNet\) has none, since it is not invertible."
    with pytest.raises(ValueError, match=sentence):
        probe(Classifier(Chain(), nn.Linear(5, 4)).eval(), data, data)
    with pytest.raises(ValueError, match="this metric needs labels; the dataset has none."):
        probe(flow(), Dataset(data.x, None, Schema((5,))), data)


def test_the_command_prints_and_keeps_it(tmp_path, capsys):
    folder = copy_of(trained(), tmp_path / "run")
    with pytest.raises(SystemExit) as stop:
        cli.main(["evaluate", str(folder), "--probe", "--rows", "30", "--draws", "2"])
    assert stop.value.code == 0
    kept = json.loads((folder / "evaluation.json").read_text())["probe"]
    assert f"probe    codes {kept['codes']['value']:.2f} % (" in capsys.readouterr().out
    assert (kept["rows"], kept["codes"]["rows"]) == (1389, 30)
    assert kept["inputs"]["value"] < 10

"""Certified radii: exact for a linear classifier, never beaten by an attack, zero with a reason where none is known."""

import importlib
import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from iresnet import (
    ActNorm,
    Chain,
    Classifier,
    DiagonalNormal,
    Flow,
    Hybrid,
    LipschitzLinear,
    MaxMin,
    NoBoundKnown,
    NormalMixture,
    Posterior,
    ResidualBlock,
    Squeeze,
    Standardise,
    cli,
    contractive_convnet,
    contractive_mlp,
    tighten_,
)
from iresnet.data import Dataset, Schema
from iresnet.data.labels import MISSING
from iresnet.evaluate import certified_radius, robustness, survives_attack
from iresnet.evaluate.radius import forward_with_error
from iresnet.models import Network, build
from iresnet.spelling import round_down
from iresnet.transforms import Logit
from iresnet.transforms.columns import ColumnTransform
from iresnet.transforms.given import Given
from tests.runs import copy_of, trained
from tests.zoo import UserNet, linear_block, normal, rouse_

FLOAT = torch.float32


def table(x, y, classes=3):
    return Dataset(x.to(FLOAT), y, Schema((x.shape[1],), classes=tuple("abcdefghij"[:classes])))


def linear(scale=1.0, d=4, classes=3, seed=0):
    """A linear classifier of x / scale, and rows that it gets right."""
    torch.manual_seed(seed)
    model = Classifier(Standardise(torch.zeros(d), torch.full((d,), scale)), nn.Linear(d, classes)).eval()
    x = 3 * scale * normal(40, d, seed=seed + 1, dtype=FLOAT)
    return model, table(x, model(x).argmax(dim=1).detach(), classes)


def distances(model, data, scale):
    """To the nearest plane between the class of a row and another, one pair of classes at a time."""
    w, b = model.head.weight.double(), model.head.bias.double()
    rows = []
    for x, y in zip(data.x.double() / scale, data.y, strict=True):
        others = [j for j in range(len(w)) if j != y]
        rows.append(scale * min(((w[y] - w[j]) @ x + b[y] - b[j]) / (w[y] - w[j]).norm() for j in others))
    return torch.stack(rows).detach()


def image_net(blocks=2, pool=False, classes=3, levels=9):
    torch.manual_seed(0)
    chain = [Standardise([4.0], [2.0]), Squeeze()]
    chain += [ResidualBlock(contractive_convnet(4, 6, kernels=(3, 3), lipschitz=0.8, activation=MaxMin))] * blocks
    head = nn.Sequential(nn.Flatten(), LipschitzLinear(16, classes, coefficient=0.9))
    model = rouse_(Classifier(Chain(*chain), head)).eval()
    tighten_(model, (1, 4, 4))
    x = torch.randint(levels, (60, 1, 4, 4), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    y = model(x + 0.5).argmax(dim=1).detach()
    return model, Dataset(x, y, Schema((1, 4, 4), levels, classes=tuple("abc")))


class TestRadius:
    @pytest.mark.parametrize("scale", [1.0, 5.0])
    def test_of_a_linear_classifier_it_is_the_distance_to_the_plane(self, scale):
        model, data = linear(scale)
        r = certified_radius(model, data)
        assert r.dtype == torch.float64
        exact = distances(model, data, scale)
        torch.testing.assert_close(r, exact, rtol=1e-6, atol=0)
        assert bool((r < exact).all())  # never above

    def test_a_block_divides_it_by_what_it_can_stretch(self):
        """x -> 1.5 x has Lip(F) = 1.5, proven, and scales the margin by as much: the radius stays."""
        torch.manual_seed(0)
        head, x = nn.Linear(3, 3), normal(20, 3, dtype=FLOAT)
        plain = Classifier(Chain(), head).eval()
        stretched = Classifier(linear_block(0.5 * torch.eye(3)), head).eval()
        head.bias.data.zero_()
        data = table(x, plain(x).argmax(dim=1).detach())
        torch.testing.assert_close(
            certified_radius(stretched, data), certified_radius(plain, data), rtol=1e-5, atol=1e-9
        )

    def test_wrong_and_unlabelled_rows_have_none(self):
        model, data = linear()
        y = data.y.clone()
        y[0], y[1] = (y[0] + 1) % 3, MISSING
        r = certified_radius(model, Dataset(data.x, y, data.schema))
        assert r[0] == r[1] == 0
        assert bool((r[2:] > 0).all())

    @pytest.mark.parametrize("pool", [False, True])
    def test_pooling_counts_with_its_norm(self, pool):
        """Against the matrix from the whole code to the logits, column by column."""
        torch.manual_seed(0)
        schema = Schema((1, 4, 4), 9, classes=tuple("abc"))
        network = Network(blocks=(1,), width=4, kernels=(3, 3), pool=pool, preprocessing="standardise")
        model = build(network, schema, "classification").eval()
        x = torch.randint(9, (10, 1, 4, 4), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
        data = Dataset(x, model(x + 0.5).argmax(dim=1).detach(), schema)
        shape = model.transform.output_shape((1, 4, 4))
        w = (model.head(torch.eye(16).view(16, *shape)) - model.head(torch.zeros(1, *shape))).T.double()
        logits = model(x + 0.5).double().detach()
        expected = []
        for f, y in zip(logits, data.y, strict=True):
            expected.append(min((f[y] - f[j]) / (w[y] - w[j]).norm() for j in range(3) if j != y))
        constant = model.transform.stretch((1, 4, 4)).forward
        torch.testing.assert_close(
            certified_radius(model, data), torch.stack(expected).detach() / constant, rtol=1e-4, atol=1e-6
        )

    def test_a_sample_closer_to_an_end_than_the_data_has_none(self):
        """Trap: the slope there exceeds the bound, which is one on the data."""
        head = nn.Linear(1, 2)
        with torch.no_grad():
            head.weight.copy_(torch.tensor([[1.0], [-1.0]]))
            head.bias.copy_(torch.tensor([10.0, 0.0]))
        model = Classifier(Chain(ColumnTransform(lower=[0.0], upper=[1.0], margin=[0.1])), head).eval()
        x = torch.tensor([[0.01], [0.5]])
        assert model(x - torch.tensor([[0.004], [0.0]])).argmax(1).tolist() == [1, 0]
        radii = certified_radius(model, Dataset(x, torch.zeros(2).long(), Schema((1,), classes=("a", "b"))))
        assert radii[0] == 0 < radii[1]

    def test_classes_that_never_part_are_no_threat(self):
        """Two equal rows of W: their order depends on the biases alone."""
        model, data = linear()
        with torch.no_grad():
            model.head.weight[2] = model.head.weight[0]
            model.head.bias.copy_(torch.tensor([1.0, 0.0, 0.0]))
        x = data.x[model(data.x).argmax(dim=1) == 0]
        r = certified_radius(model, table(x, torch.zeros(len(x), dtype=torch.int64)))
        w, b = model.head.weight.double(), model.head.bias.double()
        expected = ((x.double() @ (w[0] - w[1])) + b[0] - b[1]) / (w[0] - w[1]).norm()
        torch.testing.assert_close(r, expected.detach(), rtol=1e-6, atol=0)


class TestAttack:
    def test_against_a_linear_classifier_it_is_exact(self):
        """The gradient points straight at the nearest plane."""
        model, data = linear()
        exact = distances(model, data, 1.0)
        radius = float(exact.median())
        clear = (exact - radius).abs() > 0.02 * radius
        held = survives_attack(model, data, radius, steps=40)
        assert torch.equal(held[clear], (exact > radius)[clear])
        assert 0 < int(held.sum()) < len(held)

    def test_far_from_zero_its_steps_are_not_lost(self):
        """Trap: at 1e6 the neighbours of a float32 are 0.06 apart, and everything survived."""
        model, data = linear(d=50)
        far = table(data.x + 1e6, data.y)
        model.transform.mean.fill_(1e6)
        near = table(far.x - 1e6, model(far.x).argmax(dim=1))
        radius = float(distances(model, near, 1.0).median())
        held = survives_attack(model, table(far.x, near.y), radius, steps=200, restarts=1)
        assert 0.4 <= float(held.double().mean()) <= 0.6

    @pytest.mark.parametrize("radius", [0.1, 0.5, 2.0])
    def test_it_never_touches_what_is_certified(self, radius):
        model, data = image_net()
        certified = certified_radius(model, data) >= radius
        held = survives_attack(model, data, radius)
        assert bool(held[certified].all())

    def test_the_bound_bites(self):
        """Both sides of the last test are there: rows certified, and rows that fall."""
        model, data = image_net()
        assert int((certified_radius(model, data) >= 0.1).sum()) > 0
        assert int(survives_attack(model, data, 4.0).sum()) < len(data)

    def test_it_stays_in_the_ball_and_in_the_range_of_the_data(self):
        model, data = image_net()
        seen = []
        handle = model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach()))
        survives_attack(model, data.take(range(8)), 3.0, steps=5, restarts=2)
        handle.remove()
        points = [p for p in seen[1:] if len(p) == 8]
        x = data.x[:8] + 0.5
        assert max(float((p - x).flatten(1).norm(dim=1).max()) for p in points) <= 3
        assert min(float(p.min()) for p in points) >= 0.5
        assert max(float(p.max()) for p in points) <= 8.5
        assert len(points) > 5

    def test_wrong_rows_do_not_withstand(self):
        model, data = linear()
        wrong = Dataset(data.x, (data.y + 1) % 3, data.schema)
        assert not bool(survives_attack(model, wrong, 1e-3).any())


class TestRobustness:
    def test_the_three_accuracies_are_ordered_and_counted(self):
        model, data = image_net()
        y = data.y.clone()
        y[:6] = (y[:6] + 1) % 3
        found = robustness(model, Dataset(data.x, y, data.schema), 0.1)
        r = certified_radius(model, Dataset(data.x, y, data.schema))
        assert found.value == pytest.approx(100 * float((r >= 0.1).double().mean()))
        assert 0 < found.value <= found.attacked <= found.clean == 90
        assert found.low < found.value < found.high
        assert found.median == float(r.median())
        assert found.lipschitz == model.transform.stretch((1, 4, 4)).forward
        assert found.remark == ""

    def test_units(self):
        """36 grey levels of 256 are 36/255 for pixels in [0, 1]; a table has no such unit."""
        model, data = image_net(levels=256)
        found = robustness(model, data, 36.0, steps=1, restarts=1)
        assert found.pixel_radius == pytest.approx(36 / 255)
        assert "within 36 (0.1412 for pixels in [0, 1])" in str(found)
        model, data = linear()
        found = robustness(model, data, 0.5, steps=1, restarts=1)
        assert found.pixel_radius is None
        assert "certified within 0.5 (95 % interval" in str(found)

    def test_missing_labels_do_not_count(self):
        model, data = linear()
        y = data.y.clone()
        y[:30] = MISSING
        found = robustness(model, Dataset(data.x, y, data.schema), 0.01)
        assert (found.rows, found.clean) == (10, 100)

    def test_the_radius_of_fifty_blocks_is_reported_as_vacuous(self):
        model, data = image_net(blocks=54)
        found = robustness(model, data, 1.0, steps=2, restarts=1)
        assert found.value == 0
        assert found.clean == 100
        assert found.lipschitz > 1e6
        assert (
            "the certified radius is vacuous: Lip(F) <= 3.9e+06, a product of "
            "54 factors, one per block, is far above" in str(found)
        )

    @pytest.mark.parametrize(("blocks", "radius"), [(2, 3.4), (54, 1e3)])
    def test_a_radius_beyond_all_is_no_fault_of_the_bound(self, blocks, radius):
        """With few factors, or where an attack leaves nothing that could have been certified."""
        model, data = image_net(blocks=blocks)
        found = robustness(model, data, radius, steps=5, restarts=2)
        assert found.value == 0
        assert (found.attacked == 0) == (blocks == 54)
        largest = float(certified_radius(model, data).max())
        assert found.remark == f"the largest certified radius is {round_down(largest, '.3g')}"

    def test_a_hybrid_with_a_linear_head_has_one(self):
        torch.manual_seed(0)
        block = ResidualBlock(contractive_mlp(4, hidden=(8,)))
        model = Hybrid(Chain(ActNorm(4), block), DiagonalNormal(4), nn.Linear(4, 3)).eval()
        x = normal(10, 4, dtype=FLOAT)
        data = table(x, model.logits(x).argmax(dim=1).detach())
        assert bool((certified_radius(model, data) > 0).all())


class TestNoBound:
    def model(self, transform, head):
        return Classifier(transform, head).eval(), table(normal(6, 3, dtype=FLOAT), torch.arange(6) % 3)

    def test_a_head_that_is_not_linear(self):
        model, data = self.model(Chain(), nn.Sequential(nn.Linear(3, 8), nn.ELU(), nn.Linear(8, 3)))
        with pytest.raises(NoBoundKnown, match=r"A margin needs a linear head; this one has ELU \(1\)."):
            certified_radius(model, data)
        found = robustness(model, data, 0.1)
        assert (found.value, found.median, found.lipschitz) == (0, None, 1)
        assert found.remark == (
            "the head (ELU) is not linear, so it has no margin. Train with network.head=[], and without network.bayes."
        )
        assert found.attacked <= found.clean
        assert "no radius, Lip(F) <= 1; the head" in str(found)

    @pytest.mark.no_cover
    @pytest.mark.slow
    def test_the_papers_head_and_depth(self):
        """App. C.2's head gives no margin, and the bound of its 54 blocks would be vacuous: both are said."""
        torch.manual_seed(0)
        schema = Schema((1, 4, 4), 9, classes=tuple("abc"))
        network = Network(blocks=(54,), width=2, readout="batchnorm", pool=True, preprocessing="standardise")
        model = build(network, schema, "classification").eval()
        data = Dataset(torch.zeros(3, 1, 4, 4, dtype=torch.uint8), torch.arange(3), schema)
        found = robustness(model, data, 1.0, steps=1, restarts=1)
        assert found.lipschitz > 1e5
        assert str(found).endswith(
            f"no radius, Lip(F) <= {found.lipschitz:.3g}; the head (BatchNorm and ELU) is not linear, so it has no "
            f"margin; Lip(F) <= {found.lipschitz:.2g} would make a radius vacuous anyway. Train with "
            "network.readout=lipschitz."
        )

    def test_a_posterior(self):
        base = NormalMixture((3,), 3)
        model = Hybrid(ResidualBlock(contractive_mlp(3, hidden=(4,))), base, Posterior(base)).eval()
        with pytest.raises(NoBoundKnown, match="A margin needs a linear head; this one has Posterior"):
            certified_radius(model, table(normal(6, 3, dtype=FLOAT), torch.arange(6) % 3))

    def test_an_asserted_constant(self):
        model = Classifier(ResidualBlock(UserNet(), lipschitz=0.7), nn.Linear(4, 3)).eval()
        sentence = (
            "A constant was asserted, or a transform is unknown; a certified radius needs a proof for all of them."
        )
        with pytest.raises(NoBoundKnown, match=sentence):
            certified_radius(model, table(normal(6, 4, dtype=FLOAT), torch.arange(6) % 3))

    def test_a_block_without_a_bound(self):
        torch.manual_seed(0)
        schema = Schema((1, 4, 4), 9, classes=tuple("abc"))
        settings = {"normalisation": "batchnorm", "constrained": False, "preprocessing": "standardise"}
        network = Network(blocks=(1,), width=4, **settings)
        model = build(network, schema, "classification").eval()
        data = Dataset(torch.zeros(3, 1, 4, 4, dtype=torch.uint8), torch.arange(3), schema)
        with pytest.raises(NoBoundKnown, match="A block has no Lipschitz bound; `certify` says which and why."):
            certified_radius(model, data)

    def test_refuses(self):
        model, data = linear()
        for radius in (0.0, -1.0, math.inf):
            sentence = f"radius must be positive and finite, in the units of the data; got {radius}."
            for function in (robustness, survives_attack):
                with pytest.raises(ValueError, match=sentence):
                    function(model, data, radius)
        for name in ("steps", "restarts"):
            with pytest.raises(ValueError, match=f"an attack needs {name} of at least 1; got 0."):
                robustness(model, data, 1.0, **{name: 0})
        other = table(normal(6, 7, dtype=FLOAT), torch.arange(6) % 3)
        with pytest.raises(ValueError, match=r"the model does not accept samples of shape \(7,\): "):
            robustness(model, other, 1.0)
        with pytest.raises(ValueError, match="robustness needs a model in eval mode; call model.eval\\(\\) first."):
            certified_radius(model.train(), data)
        flow = Flow(Chain(), DiagonalNormal(4)).eval()
        with pytest.raises(ValueError, match="robustness needs a classifier; this model only has a density."):
            certified_radius(flow, data)
        with pytest.raises(ValueError, match="this metric needs labels; the dataset has none."):
            robustness(model.eval(), Dataset(data.x, None, Schema((4,))), 1.0)


class TestCommand:
    def run(self, tmp_path, capsys, *words, name="digits-classifier"):
        folder = copy_of(trained(name), tmp_path / "run")
        with pytest.raises(SystemExit) as stop:
            cli.main(["evaluate", str(folder), "--rows", "20", "--draws", "2", *words])
        printed = capsys.readouterr()
        kept = folder / "evaluation.json"
        return stop.value.code, printed.out + printed.err, json.loads(kept.read_text()) if kept.exists() else {}

    def test_it_prints_and_keeps_every_radius(self, tmp_path, capsys):
        code, text, kept = self.run(tmp_path, capsys, "--radius", "0.5", "--radius", "2")
        assert code == 0
        assert "% certified within 2 (0.125 for pixels in [0, 1])" in text
        assert [entry["radius"] for entry in kept["robustness"]] == [0.5, 2]
        assert all(entry["rows"] == 20 for entry in kept["robustness"])
        assert all(entry["value"] <= entry["attacked"] <= entry["clean"] for entry in kept["robustness"])

    def test_what_is_not_known_becomes_null(self, tmp_path, capsys):
        code, text, kept = self.run(tmp_path, capsys, "--radius", "1", name="digits-hybrid")
        assert code == 0
        assert "the head (Posterior) is not linear, so it has no margin" in text
        assert kept["robustness"][0]["median"] is None

    @pytest.mark.parametrize("word", ["36/255", "far"])
    def test_a_radius_that_is_no_number(self, tmp_path, capsys, word):
        code, text, kept = self.run(tmp_path, capsys, "--radius", word)
        assert (code, kept) == (2, {})
        assert f"--radius must be one number, in the units of the data; got {word!r}. For 36/255 of pixels" in text

    def test_figures_are_kept_before_an_attack_that_fails(self, tmp_path, capsys, monkeypatch):
        def fails(*_, **__):
            raise RuntimeError("the lights went out.")

        monkeypatch.setattr(importlib.import_module("iresnet.cli.evaluate"), "robustness", fails)
        code, text, kept = self.run(tmp_path, capsys, "--radius", "1")
        assert code == 1
        assert "the lights went out." in text
        assert kept["rows"] == 20
        assert "robustness" not in kept

    def test_what_was_known_of_other_rows_is_dropped(self, tmp_path, capsys):
        folder = copy_of(trained("digits-classifier"), tmp_path / "other")
        known = {"rows": 30, "robustness": [], "probe": {}, "anomalies": []}
        (folder / "evaluation.json").write_text(json.dumps(known))
        for rows, names in ((30, {"robustness", "probe", "anomalies"}), (20, {"anomalies"})):
            with pytest.raises(SystemExit):
                cli.main(["evaluate", str(folder), "--rows", str(rows), "--draws", "2"])
            kept = json.loads((folder / "evaluation.json").read_text())
            assert names == kept.keys() & {"robustness", "probe", "anomalies"}
        capsys.readouterr()

    def test_a_radius_that_is_none(self, tmp_path, capsys):
        code, text, kept = self.run(tmp_path, capsys, "--radius", "-1")
        assert (code, kept) == (2, {})  # before anything is judged
        assert "radius must be positive and finite, in the units of the data; got -1.0." in text


def test_rounding_of_codes_is_counted_with_large_numbers_that_cancel():
    """x + W2 (W1 x + b1) + b2 with b2 = -W2 b1: exact arithmetic by fractions."""
    generator = torch.Generator().manual_seed(0)
    w1, w2 = (0.3 * torch.randn(3, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    first, second = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
    with torch.no_grad():
        first.weight.copy_(w1)
        first.bias.fill_(1e8)
        second.weight.copy_(w2)
        second.bias.copy_(-(w2 @ first.bias))
    chain = Chain(ResidualBlock(nn.Sequential(first, second)))
    x = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    z, error = forward_with_error(chain, x)

    def fractions(t):
        return np.vectorize(Fraction, otypes=[object])(t.detach().numpy())

    def exact(layer, h):
        return h @ fractions(layer.weight).T + fractions(layer.bias)

    rows = fractions(x)
    off = (rows + exact(second, exact(first, rows)) - fractions(z)).astype(float)
    distance = torch.from_numpy(np.linalg.norm(off, axis=1))
    assert distance.max() > 1e-10  # far more than rounding of x and z
    assert (distance <= error).all()


def of_class(model, x):
    x = torch.tensor(x, dtype=FLOAT)
    return Dataset(x, model(x.double()).argmax(dim=1), Schema((x.shape[1],), classes=("a", "b")))


def binary(weight, bias):
    head = nn.Linear(len(weight), 2).double()
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[0.0] * len(weight), weight], dtype=torch.float64))
        head.bias.copy_(torch.tensor([0.0, bias]))
    return head


class TestWhereBoundsHold:
    """Bounds of logits and logarithms hold for a part of their inputs; radii were up to eight times too long."""

    def test_a_sample_outside_of_the_range_of_a_logit_has_none(self):
        model = Classifier(Chain(Logit(levels=1)), binary([1.0], 4.2)).double().eval()
        assert model(torch.tensor([[-0.039]]).double()).argmax() == 1  # within .015 of a sample of class 0
        assert certified_radius(model, of_class(model, [[-0.054]])).tolist() == [0.0]
        assert certified_radius(model, of_class(model, [[0.0], [0.5], [1.0]])).gt(0).all()

    @pytest.mark.parametrize("limited", [Logit(levels=1), ColumnTransform([0.0], [1.0], [0.01])])
    def test_there_is_none_if_another_transform_comes_before(self, limited):
        model = Classifier(Chain(ActNorm(1), Chain(limited)), binary([1.0], 4.0)).float().eval()
        data = table(torch.tensor([[0.5]]), torch.tensor([1]), 2)
        with pytest.raises(NoBoundKnown, match="holds for a part of its inputs only.* Let it be the first"):
            certified_radius(model, data)
        assert "Let it be the first" in robustness(model, data, 0.1).remark

    def test_there_is_none_for_a_map_with_a_context(self):
        """Its bound is that of a map of the targets; the given columns are perturbed too."""
        block = ResidualBlock(contractive_mlp(1, hidden=(16,), context=1, lipschitz=0.5))
        model = Classifier(Given(block, Standardise([0.0], [1.0]), [1]), nn.Linear(1, 2)).eval()
        with pytest.raises(NoBoundKnown, match="holds for one context, and not where that changes too"):
            certified_radius(model, table(torch.zeros(1, 2), torch.tensor([0]), 2))


class TestTinyMargins:
    def test_weights_whose_squares_underflow(self):
        model = Classifier(ActNorm(2), binary([-1e-170, 1e-170], -1.0)).double().eval()
        assert 0 < certified_radius(model, of_class(model, [[0.0, 0.0]])) < 1e170

    def test_classes_that_differ_by_no_more_than_rounding(self):
        """Class vectors of two layers are products, in which numbers cancel; radii were too long or infinite."""
        first, second = nn.Linear(1, 2, bias=False).double(), binary([3e8, -1e8], -1.0)
        model = Classifier(ActNorm(1), nn.Sequential(first, second)).double().eval()
        for i in range(100):
            with torch.no_grad():
                first.weight[0] = 0.1 + i / 1000
                first.weight[1] = 3 * first.weight[0]
            pairs = zip((3e8, -1e8), first.weight[:, 0].tolist(), strict=True)
            exact = abs(sum(Fraction(w) * Fraction(v) for w, v in pairs))
            if exact:
                assert Fraction(float(certified_radius(model, of_class(model, [[0.0]])))) < 1 / exact


def test_a_bound_that_underflows_is_rounded_up():
    shrink, grow = ActNorm(1).double(), ActNorm(1).double()
    with torch.no_grad():
        shrink.log_scale.fill_(-760)
        grow.log_scale.fill_(700)
    assert Chain(shrink, grow).stretch((1,)).forward >= math.exp(-60)
    assert Chain(grow, shrink).stretch((1,)).forward >= math.exp(-60)

"""Objectives: the loss has its stated value, and a sample without a label contributes only to the density."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from iresnet import (
    ActNorm,
    Chain,
    Classifier,
    DiagonalNormal,
    Flow,
    Hybrid,
    LipschitzLinear,
    Logit,
    Multiscale,
    NoBoundKnown,
    ResidualBlock,
    Squeeze,
    Standardise,
    contractive_convnet,
    contractive_mlp,
    tighten_,
)
from iresnet.data import Augment, Dataset, Schema
from iresnet.data.labels import MISSING
from iresnet.data.units import bin_centres, nats_per_unit, unit_name
from iresnet.evaluate import certified_radius
from iresnet.models import Network, Readout
from iresnet.train.margin import class_vectors, pairwise_distances, requested_lipschitz
from iresnet.train.objective import (
    OBJECTIVE_KINDS,
    SHARPNESS,
    Classification,
    Joint,
    Margin,
    MaximumLikelihood,
    ObjectiveSettings,
    cross_entropy,
)
from iresnet.transforms.dequantisation import dequantise_for
from iresnet.transforms.preprocess import dequantise
from tests.zoo import contraction, linear_block, normal


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def number(loss):
    return float(loss.detach())


def numbers(rows=6, d=3, seed=0):
    return normal(rows, d, seed=seed, dtype=torch.float32)


def identity_like(d=3, norm=0.0):
    """x + A x; with norm 0 the identity, so that the density is the base."""
    return linear_block(contraction(d, norm, dtype=torch.float32) if norm else torch.zeros(d, d), lipschitz=0.9)


def hybrid(d=3, classes=4, norm=0.5):
    torch.manual_seed(0)
    return Hybrid(identity_like(d, norm), DiagonalNormal(d), nn.Linear(d, classes))


def pixels(rows=6, levels=4, seed=0):
    return torch.randint(levels, (rows, 1, 4, 4), generator=seeded(seed)).to(torch.uint8)


def pixel_hybrid(levels=4, classes=3):
    torch.manual_seed(0)
    head = nn.Sequential(nn.Flatten(), nn.Linear(16, classes))
    return Hybrid(Logit(levels), DiagonalNormal((1, 4, 4)), head)


class TestDensity:
    def test_nats_of_a_normal_distribution(self):
        """-ln p = d/2 ln 2 pi + |x|^2 / 2 for the identity with a standard normal base."""
        x = numbers()
        loss, metrics = MaximumLikelihood(Flow(identity_like(), DiagonalNormal(3)).eval())(x)
        expected = 1.5 * math.log(2 * math.pi) + 0.5 * float(x.square().sum(1).mean())
        assert number(loss) == pytest.approx(expected, rel=1e-6)
        assert {name: float(value) for name, value in metrics.items()} == {"nats": number(loss)}

    def test_bits_per_dimension_of_a_known_density(self):
        """A base far wider than the data is flat over them: -log2 p is log2(scale) + log2(2 pi) / 2 a dimension."""
        base, scale = DiagonalNormal((1, 2, 2)), 1e4
        base.log_scale.fill_(math.log(scale))
        flow = Flow(Chain(), base).eval()
        x = pixels(levels=256)[:, :, :2, :2]
        loss, metrics = MaximumLikelihood(flow, levels=256)(x, generator=seeded())
        assert number(loss) == pytest.approx(math.log2(scale) + 0.5 * math.log2(2 * math.pi), abs=1e-3)
        assert list(metrics) == ["bits/dim"]
        assert float(metrics["bits/dim"]) == number(loss)

    def test_uniform_pixels_have_the_bits_of_their_levels(self):
        """A logistic density of the logit with alpha -> 0 is the uniform one: log2(levels) bits a pixel."""
        x, levels = pixels(400, levels=16), 16
        flow = Flow(Logit(levels, alpha=1e-4), Logistic((1, 4, 4))).eval()
        loss, _ = MaximumLikelihood(flow, levels)(x, generator=seeded())
        assert number(loss) == pytest.approx(4, abs=0.01)

    def test_the_noise_is_the_generators(self):
        flow, x = Flow(Logit(4), DiagonalNormal((1, 4, 4))).eval(), pixels()
        first, again, other = (number(MaximumLikelihood(flow, 4)(x, generator=seeded(s))[0]) for s in (1, 1, 2))
        assert first == again != other

    def test_labels_are_ignored(self):
        objective, x = MaximumLikelihood(Flow(identity_like(), DiagonalNormal(3)).eval()), numbers()
        assert number(objective(x, torch.zeros(6, dtype=torch.int64))[0]) == number(objective(x)[0])


class Logistic(DiagonalNormal):
    def log_prob(self, z):
        return (-z - 2 * F.softplus(-z)).flatten(1).sum(1)


class TestCrossEntropy:
    @pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
    def test_it_equals_torchs_cross_entropy(self, smoothing):
        logits, y = normal(8, 5), torch.arange(8) % 5
        loss, metrics = cross_entropy(logits, y, smoothing)
        torch.testing.assert_close(loss, F.cross_entropy(logits, y, label_smoothing=smoothing))
        torch.testing.assert_close(metrics["cross-entropy"], loss)

    def test_smoothing_by_hand(self):
        """(1 - s) of the label's loss + s of the mean loss over all classes."""
        logits, y = normal(4, 3), torch.tensor([0, 1, 2, 0])
        nll = -logits.log_softmax(1)
        expected = 0.8 * nll[torch.arange(4), y].mean() + 0.2 * nll.mean()
        torch.testing.assert_close(cross_entropy(logits, y, 0.2)[0], expected)

    def test_the_error_counts(self):
        logits = torch.eye(4)[torch.tensor([0, 1, 2, 3, 0, 0, 0, 0])]
        y = torch.tensor([0, 1, 2, 3, 1, 2, 0, 3])
        assert float(cross_entropy(logits, y)[1]["error %"]) == 37.5

    @pytest.mark.parametrize("smoothing", [0.0, 0.3])
    def test_samples_without_a_label_are_ignored(self, smoothing):
        logits = normal(7, 4).requires_grad_()
        y = torch.tensor([1, MISSING, 0, MISSING, MISSING, 3, 2])
        loss, metrics = cross_entropy(logits, y, smoothing)
        alone, its_figures = cross_entropy(logits[y != MISSING], y[y != MISSING], smoothing)
        torch.testing.assert_close(loss, alone)
        torch.testing.assert_close(metrics, its_figures)
        (gradient,) = torch.autograd.grad(loss, logits)
        assert (gradient[y == MISSING] == 0).all()
        assert (gradient[y != MISSING].abs().sum(1) > 0).all()

    @pytest.mark.parametrize("smoothing", [0.0, 0.3])
    def test_a_batch_without_labels_has_zero_loss(self, smoothing):
        """The mean over no rows is 0 / 0: it must not reach the weights."""
        logits = normal(3, 4).requires_grad_()
        loss, metrics = cross_entropy(logits, torch.full((3,), MISSING), smoothing)
        assert number(loss) == float(metrics["error %"]) == 0
        (gradient,) = torch.autograd.grad(loss, logits)
        assert (gradient == 0).all()

    def test_metrics_are_detached(self):
        _, metrics = cross_entropy(normal(3, 4).requires_grad_(), torch.arange(3))
        assert not any(value.requires_grad for value in metrics.values())

    def test_data_without_labels_raise(self):
        sentence = "this objective needs labels; the data have none. Use objective.kind = 'density'."
        for objective in (Classification(Classifier(identity_like(), nn.Linear(3, 4)).eval()), Joint(hybrid().eval())):
            with pytest.raises(ValueError, match=sentence):
                objective(numbers())


class TestClassification:
    def test_it_sees_the_centres_of_the_bins(self):
        x, seen = pixels(), []
        model = Classifier(Logit(4), nn.Sequential(nn.Flatten(), nn.Linear(16, 3))).eval()
        model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        loss, metrics = Classification(model, levels=4)(x, torch.arange(6) % 3)
        assert torch.equal(seen[0], x.float() + 0.5)
        torch.testing.assert_close(loss, F.cross_entropy(model(x + 0.5), torch.arange(6) % 3))
        assert set(metrics) == {"cross-entropy", "error %"}

    def test_real_numbers_are_unchanged(self):
        x, y = numbers(), torch.arange(6) % 4
        model = Classifier(identity_like(), nn.Linear(3, 4)).eval()
        loss, _ = Classification(model, label_smoothing=0.2)(x, y)
        torch.testing.assert_close(loss, F.cross_entropy(model(x), y, label_smoothing=0.2))


def margin_model(seed=0):
    torch.manual_seed(seed)
    block = ResidualBlock(contractive_mlp(3, hidden=(6,), lipschitz=0.8))
    model = Classifier(Chain(Standardise([0.0] * 3, [2.0] * 3), block), nn.Linear(3, 4)).eval()
    tighten_(model, (3,))
    return model


class TestMargin:
    def test_the_other_logits_are_raised_by_what_the_radius_allows(self):
        """By hand: K = (1 + 0.8) / 2, and logits in units of radius K / SHARPNESS."""
        model, x, y, radius = margin_model(), numbers(), torch.arange(6) % 4, 0.3
        loss, metrics = Margin(model, radius=radius, label_smoothing=0.1)(x, y)
        one, w = radius * 1.8 / 2, model.head.weight
        raised = model(x).clone()
        for row in range(6):
            for j in range(4):
                raised[row, j] += one * (w[y[row]] - w[j]).norm()
        expected = F.cross_entropy(raised * SHARPNESS / one, y, label_smoothing=0.1)
        torch.testing.assert_close(loss, expected)
        assert float(metrics["loss"]) == number(loss)
        assert float(metrics["cross-entropy"]) == pytest.approx(number(F.cross_entropy(model(x), y)))
        assert set(metrics) == {"loss", "cross-entropy", "error %", "certified %"}

    def test_certified_samples_agree_with_the_certificate(self):
        """A released model keeps the coefficients asked for: rows that count as certified are."""
        model, x = margin_model(), numbers(200)
        y = model(x).argmax(dim=1).detach()
        y[:20] = (y[:20] + 1) % 4
        r = certified_radius(model, Dataset(x, y, Schema((3,), classes=tuple("abcd"))))
        radius = float(r[r > 0].median())
        metrics = Margin(model, radius=radius)(x, y)[1]
        assert float(metrics["error %"]) == 10
        assert float(metrics["certified %"]) <= 100 * float((r >= radius).double().mean()) + 1e-4
        assert float(metrics["certified %"]) > 20

    def test_it_has_gradients_for_block_and_head(self):
        model = margin_model().train()
        loss, _ = Margin(model, radius=0.5)(numbers(), torch.arange(6) % 4)
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad.isfinite().all()
        assert model.head.weight.grad.abs().sum() > 0

    def test_samples_without_a_label_are_ignored(self):
        objective, x = Margin(margin_model(), radius=0.3), numbers()
        y = torch.tensor([0, MISSING, 2, MISSING, MISSING, 1])
        (loss, metrics), (alone, same) = objective(x, y), objective(x[y >= 0], y[y >= 0])
        torch.testing.assert_close(loss, alone)
        torch.testing.assert_close(metrics, same)

    def test_a_head_that_is_not_linear_is_refused(self):
        model = Classifier(identity_like(), nn.Sequential(nn.Linear(3, 5), nn.ELU(), nn.Linear(5, 4)))
        sentence = r"radius = 2 needs a bound for the whole network. A margin needs a linear head; this one has ELU"
        with pytest.raises(ValueError, match=sentence):
            Margin(model, radius=2.0)
        free = nn.Sequential(nn.Linear(3, 3))
        nn.init.constant_(free[0].weight, 0.1)
        with pytest.raises(ValueError, match="A layer of a block is not constrained, so its norm has no limit."):
            Margin(Classifier(ResidualBlock(free), nn.Linear(3, 4)), radius=2.0)
        with pytest.raises(NoBoundKnown, match="A margin needs a linear head; Flatten has no linear layer."):
            class_vectors(nn.Flatten())

    @pytest.mark.parametrize("pool", [False, True])
    @pytest.mark.parametrize("shapes", [[(4, 2, 2)], [(2, 4, 4), (8, 1, 2)]])
    def test_class_vectors_have_the_distances_of_the_full_head(self, shapes, pool):
        torch.manual_seed(0)
        head, size = Readout(shapes, 3, Network(pool=pool)), sum(math.prod(s) for s in shapes)
        w = (head(torch.eye(size)) - head(torch.zeros(1, size))).T
        torch.testing.assert_close(pairwise_distances(class_vectors(head)), torch.cdist(w, w), rtol=1e-4, atol=1e-5)

    def test_consecutive_linear_layers_are_multiplied(self):
        torch.manual_seed(0)
        head = nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.Identity(), LipschitzLinear(5, 3)).eval()
        torch.testing.assert_close(class_vectors(head), head[3].weight @ head[1].weight)

    def test_the_requested_constant_equals_the_certified_one_if_coefficients_are_met(self):
        torch.manual_seed(0)
        norm = ActNorm(4)
        norm.log_scale.data.copy_(torch.tensor([0.3, -1.0, 0.1, 0.0]))
        block = ResidualBlock(contractive_convnet(4, 3, kernels=(3, 1), lipschitz=0.6))
        whole = Chain(Standardise([1.0], [4.0]), Squeeze(), norm, block).eval()
        assert number(torch.as_tensor(requested_lipschitz(whole))) == pytest.approx(1.6 * math.exp(0.3) / 4, rel=1e-6)
        assert number(torch.as_tensor(requested_lipschitz(whole))) >= whole.stretch((1, 4, 4)).forward * (1 - 1e-5)

    def test_channels_that_are_factored_out_are_not_contracted(self):
        shrink, first = ActNorm(2), ActNorm(4)
        shrink.log_scale.data.fill_(-1.0)
        first.log_scale.data.fill_(-0.5)
        whole = Multiscale([Chain(Squeeze(), first), shrink], (1, 4, 4))
        assert number(torch.as_tensor(requested_lipschitz(whole))) == pytest.approx(math.exp(-0.5))
        assert number(torch.as_tensor(requested_lipschitz(whole))) == pytest.approx(whole.stretch((1, 4, 4)).forward)


class TestJoint:
    @pytest.mark.parametrize("weight", [0.0, 1.0, 2.5])
    def test_it_is_bits_and_weighted_cross_entropy(self, weight):
        model, x, y = hybrid().eval(), numbers(), torch.arange(6) % 4
        loss, metrics = Joint(model, weight=weight)(x, y)
        nats, ce = -model.log_prob(x).mean(), F.cross_entropy(model.logits(x), y)
        torch.testing.assert_close(loss, nats / (3 * math.log(2)) + weight * ce)
        assert float(metrics["nats"]) == pytest.approx(number(nats))
        assert float(metrics["cross-entropy"]) == pytest.approx(number(ce))
        assert float(metrics["loss"]) == pytest.approx(number(loss))
        assert set(metrics) == {"loss", "nats", "cross-entropy", "error %"}

    def test_of_integers_in_bits_per_dimension(self):
        model, x, y = pixel_hybrid().eval(), pixels(), torch.arange(6) % 3
        loss, metrics = Joint(model, levels=4)(x, y, generator=seeded())
        point = dequantise(x, 4, seeded())
        bits = -model.log_prob(point).mean() / (16 * math.log(2))
        torch.testing.assert_close(loss, bits + F.cross_entropy(model.logits(point), y))
        assert float(metrics["bits/dim"]) == pytest.approx(number(bits))

    def test_samples_without_a_label_count_for_the_density(self):
        model, x = hybrid(), numbers()
        y = torch.tensor([0, MISSING, 2, MISSING, MISSING, 1])
        loss, _ = Joint(model.eval(), weight=2.0)(x, y)
        ce = F.cross_entropy(model.logits(x[y >= 0]), y[y >= 0])
        torch.testing.assert_close(loss, -model.log_prob(x).mean() / (3 * math.log(2)) + 2 * ce)
        nothing, _ = Joint(model)(x, torch.full((6,), MISSING))
        nothing.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        assert (model.head.weight.grad == 0).all()

    def test_the_last_samples_can_be_for_the_classes_and_the_others_for_the_density(self):
        model, x, y = pixel_hybrid().eval(), pixels(), torch.tensor([2, MISSING, MISSING, MISSING, 0, 1])
        loss, metrics = Joint(model, levels=4, weight=3.0, labelled=2)(x, y, generator=seeded())
        generator = seeded()
        bits = -model.log_prob(dequantise(x[:4], 4, generator)).mean() / (16 * math.log(2))
        ce = F.cross_entropy(model.logits(dequantise(x[4:], 4, generator)), y[4:])
        torch.testing.assert_close(loss, bits + 3 * ce)
        assert float(metrics["bits/dim"]) == pytest.approx(number(bits))
        assert float(metrics["cross-entropy"]) == pytest.approx(number(ce))

    def test_without_the_density_no_likelihood_is_computed(self, monkeypatch):
        model, x, y = hybrid().eval(), numbers(), torch.arange(6) % 4
        monkeypatch.setattr(type(model), "forward", None)
        objective = Joint(model, weight=2.0, density=0.0, labelled=2)
        loss, metrics = objective(x, y)
        torch.testing.assert_close(loss, 2 * F.cross_entropy(model.logits(x[4:]), y[4:]))
        assert set(metrics) == {"loss", "cross-entropy", "error %"}
        assert (objective.needs_logdet, Joint(model).needs_logdet) == (False, True)

    def test_augmentation_applies_only_to_the_cross_entropy(self):
        model, x, y = pixel_hybrid().eval(), pixels(), torch.arange(6) % 3
        plain, augmented = Joint(model, levels=4), Joint(model, levels=4, augment=Augment(shift=2))
        (_, before), (loss, after) = (o(x, y, generator=seeded()) for o in (plain, augmented))
        assert float(after["bits/dim"]) == float(before["bits/dim"])
        assert float(after["cross-entropy"]) != float(before["cross-entropy"])
        generator = seeded()
        dequantise(x, 4, generator)  # the density's noise comes first
        shifted = Augment(shift=2)(x, generator)
        ce = F.cross_entropy(model.logits(dequantise(shifted, 4, generator)), y)
        torch.testing.assert_close(after["cross-entropy"], ce.detach())
        torch.testing.assert_close(loss, before["bits/dim"] + ce)

    def test_augmentation_without_a_generator_uses_the_global_one(self):
        objective, x, y = (
            Joint(pixel_hybrid().eval(), levels=4, augment=Augment(shift=2)),
            pixels(),
            torch.arange(6) % 3,
        )
        values = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            values.append(number(objective(x, y)[0]))
        assert values[0] == values[1] != values[2]


class TestUnits:
    def test_integers_get_noise_or_the_centres_of_their_bins(self):
        x = pixels()
        noisy = dequantise(x, 4, seeded())
        assert torch.equal(noisy.floor(), x.float())
        assert not torch.equal(noisy, x.float())
        assert torch.equal(bin_centres(x, 4), x.float() + 0.5)

    def test_real_numbers_are_unchanged(self):
        x = normal(2, 3)
        assert dequantise_for(nn.Identity(), x, None)[0] is x
        assert bin_centres(x, None) is x

    def test_names_and_sizes(self):
        assert (unit_name(None), unit_name(256)) == ("nats", "bits/dim")
        assert nats_per_unit((2, 3), None) == 1
        assert nats_per_unit((2, 3), 256) == pytest.approx(6 * math.log(2))


class TestAim:
    @pytest.mark.parametrize(
        ("kind", "objective"),
        [
            ("density", MaximumLikelihood),
            ("classification", Classification),
            ("hybrid", Joint),
            ("semi-supervised", Joint),
        ],
    )
    def test_each_kind_builds_its_objective(self, kind, objective):
        assert kind in OBJECTIVE_KINDS
        model = nn.Identity()
        made = ObjectiveSettings(kind, weight=2.0, label_smoothing=0.1, shifted=0.5).build_objective(
            model, 17, Augment(shift=3, shifted=0.1)
        )
        assert type(made) is objective
        assert made.model is model
        assert made.levels == 17
        if kind != "density":
            assert made.label_smoothing == 0.1
        if objective is Joint:
            assert (made.weight, made.augment) == (2.0, Augment(shift=3, shifted=0.5))

    def test_a_radius_builds_a_margin_objective(self):
        settings = ObjectiveSettings("classification", label_smoothing=0.1, radius=1.5)
        made = settings.build_objective(margin_model(), None)
        assert type(made) is Margin
        assert (made.radius, made.label_smoothing) == (1.5, 0.1)

    def test_nothing_is_augmented_by_default(self):
        assert ObjectiveSettings("hybrid").build_objective(nn.Identity(), 17, Augment(shift=3)).augment is None
        assert ObjectiveSettings("hybrid", shifted=0.5).build_objective(nn.Identity(), 17).augment is None

    @pytest.mark.parametrize(
        ("wrong", "sentence"),
        [
            (
                {"kind": "regression"},
                r"kind must be one of density, classification, hybrid, semi-supervised; got 'regression'.",
            ),
            ({"weight": -1.0}, "weight must not be negative; got -1.0."),
            ({"density": -1.0}, "density must be finite and not negative; got -1.0."),
            ({"density": math.inf}, "density must be finite and not negative; got inf."),
            (
                {"kind": "density", "density": 0.5},
                "density is for hybrids; got 0.5 for kind = 'density'. Set density = 1.",
            ),
            ({"weight": 0.0, "density": 0.0}, "weight and density must not both be 0, which trains for nothing. Raise"),
            ({"shifted": -0.1}, r"shifted is the fraction of the images that is shifted, in \[0, 1\]; got -0.1."),
            ({"shifted": 1.1}, r"shifted is the fraction of the images that is shifted, in \[0, 1\]; got 1.1."),
            ({"label_smoothing": 1.0}, r"label_smoothing must lie in \[0, 1\); got 1.0."),
            ({"radius": -1.0}, "radius must be finite and not negative; got -1.0."),
            ({"radius": math.inf}, "radius must be finite and not negative; got inf."),
            ({"radius": 1.0}, "radius is for kind = 'classification'; got 1.0 for 'hybrid'. Set radius = 0."),
            ({"label_smoothing": -0.1}, r"label_smoothing must lie in \[0, 1\); got -0.1."),
        ],
    )
    def test_invalid_settings_raise_a_clear_error(self, wrong, sentence):
        with pytest.raises(ValueError, match=sentence):
            ObjectiveSettings(**wrong)

"""g = -W' s(W x + b): symmetric, never stretching, and a block like any other."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

from iresnet import (
    Chain,
    Classifier,
    MaxMin,
    NoBoundKnown,
    PowerSeries,
    ResidualBlock,
    Sine,
    Squeeze,
    Standardise,
    certify,
    constrain_,
    tighten_,
)
from iresnet.branch import lipschitz_bound, requested_bound, requested_constant, try_parse, unconstrained_copy
from iresnet.data import Batches, Dataset, Schema
from iresnet.evaluate import certified_radius, robustness, survives_attack
from iresnet.lipschitz import LipSwish, Potential, cap_of, is_monotone, lipschitz_constant
from iresnet.models import Network, build
from iresnet.presets import find
from iresnet.train import Training, train
from iresnet.train.margin import requested_lipschitz
from iresnet.train.objective import ObjectiveSettings
from tests.zoo import ACTIVATIONS, dense_jacobian, normal, rouse_

MONOTONE = [name for name in ACTIVATIONS if name not in ("lipswish", "lipswish-sharp", "sine", "sine-fast", "maxmin")]
IMAGE = (2, 4, 3)


def orthogonal(d, seed=0):
    return torch.linalg.qr(normal(d, d, seed=seed)).Q


def with_matrix(matrix, activation):
    """-W' s(W x) for this W."""
    layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, dtype=matrix.dtype)
    with torch.no_grad():
        layer.weight.copy_(matrix)
    return Potential(layer, activation)


def block(shape=(4,), width=7, activation=None, lipschitz=0.9, seed=0):
    torch.manual_seed(seed)
    layer = nn.Linear(shape[0], width) if len(shape) == 1 else nn.Conv2d(shape[0], width, 3, padding=1)
    g = constrain_(Potential(layer, activation or nn.ELU()), lipschitz=lipschitz).double()
    return rouse_(ResidualBlock(g), seed).eval()


class TestKnownAnswers:
    def test_an_orthogonal_matrix_and_no_nonlinearity(self):
        """W = sqrt(c) Q: g(x) = -c x, F(x) = (1 - c) x."""
        b = ResidualBlock(with_matrix(0.9**0.5 * orthogonal(5), nn.Identity())).eval()
        x = normal(3, 5, seed=1)
        torch.testing.assert_close(b.g(x), -0.9 * x)
        torch.testing.assert_close(b.forward_and_logdet(x)[1], torch.full((3,), 5 * math.log(0.1), dtype=x.dtype))
        torch.testing.assert_close(b.inverse(x), x / 0.1, rtol=1e-6, atol=1e-6)
        s = b.stretch((5,))
        assert s.forward == 1
        assert s.inverse == pytest.approx(10, rel=1e-6)
        assert s.logdet == (pytest.approx(5 * math.log(0.1), rel=1e-6), 0)

    def test_relu_takes_off_what_is_positive_along_the_rows(self):
        """Rows e_i with ReLU: every positive coordinate is multiplied by 1 - c, the others stay."""
        b = ResidualBlock(with_matrix(0.5**0.5 * torch.eye(4, dtype=torch.float64), nn.ReLU())).eval()
        x = normal(6, 4)
        torch.testing.assert_close(b(x), torch.where(x > 0, 0.5 * x, x))
        expected = (x > 0).sum(dim=1) * math.log(0.5)
        torch.testing.assert_close(b.forward_and_logdet(x)[1], expected.double())

    def test_eigenvalues_are_those_of_the_gram_matrix(self):
        w = normal(7, 4) * 0.2
        j = dense_jacobian(with_matrix(w, nn.Identity()), normal(1, 4))[0]
        torch.testing.assert_close(torch.linalg.eigvalsh(j), -torch.linalg.eigvalsh(w.T @ w).flip(0))

    def test_the_slope_counts_once_and_the_norm_twice(self):
        g = with_matrix(0.8 * orthogonal(3), nn.Sigmoid())
        assert lipschitz_bound(g).value == pytest.approx(0.64 * 0.25, rel=1e-6)
        assert requested_constant(g) == pytest.approx(0.64 * 0.25, rel=1e-6)

    def test_beyond_two_it_stretches(self):
        """Eigenvalues of x + g(x) in [1 - L, 1]: for L = 3 the largest modulus is 2."""
        found = lipschitz_bound(with_matrix(3**0.5 * orthogonal(3), nn.ReLU()))
        assert found.block_lipschitz == pytest.approx(2, rel=1e-6)


class TestProven:
    @pytest.mark.parametrize("name", MONOTONE)
    @pytest.mark.parametrize("shape", [(4,), IMAGE], ids=["rows", "images"])
    def test_the_jacobian_is_symmetric_with_eigenvalues_in_the_range(self, name, shape):
        b = block(shape, activation=ACTIVATIONS[name](), lipschitz=0.95)
        constant = b.bound(shape).value
        j = dense_jacobian(b.g, 2 * normal(4, *shape, seed=1))
        torch.testing.assert_close(j, j.mT, atol=1e-12, rtol=0)
        values = torch.linalg.eigvalsh(j)
        assert values.max() <= 1e-12
        assert values.min() >= -constant - 1e-12
        assert values.min() < -0.01  # it does something

    @pytest.mark.parametrize("shape", [(4,), IMAGE], ids=["rows", "images"])
    def test_distances_never_grow_and_shrink_no_further_than_proven(self, shape):
        b = block(shape, activation=nn.ReLU(), lipschitz=0.9)
        x, y = 3 * normal(400, *shape, seed=1), 3 * normal(400, *shape, seed=2)
        for scale in (1.0, 1e-3):
            near = x + scale * (y - x)
            ratio = (b(x) - b(near)).flatten(1).norm(dim=1) / (x - near).flatten(1).norm(dim=1)
            assert ratio.max() <= 1 + 1e-9
            assert ratio.min() >= 1 / b.stretch(shape).inverse - 1e-9
            back = b.inverse(x) - b.inverse(near)
            assert (back.flatten(1).norm(dim=1) / (x - near).flatten(1).norm(dim=1)).max() <= 10 * (1 + 1e-6)

    @pytest.mark.parametrize("shape", [(4,), IMAGE], ids=["rows", "images"])
    def test_the_determinant_lies_in_its_range(self, shape):
        b = block(shape)
        low, high = b.stretch(shape).logdet
        logdet = b.forward_and_logdet(normal(20, *shape))[1]
        assert high == 0
        assert low <= logdet.min() < logdet.max() <= 0

    @pytest.mark.no_cover
    def test_a_chain_of_any_depth_does_not_stretch(self):
        chain = Chain(Standardise([0.0], [0.5]), Squeeze(), *[block((4, 2, 2), seed=i) for i in range(30)]).double()
        assert chain.stretch((1, 4, 4)).forward == pytest.approx(2)
        assert float(requested_lipschitz(chain)) == pytest.approx(2)
        x, y = normal(50, 1, 4, 4, seed=1), normal(50, 1, 4, 4, seed=2)
        ratio = (chain(x) - chain(y)).flatten(1).norm(dim=1) / (x - y).flatten(1).norm(dim=1)
        assert ratio.max() <= 2

    def test_between_reshapings_it_is_the_same(self):
        torch.manual_seed(0)
        dense = constrain_(Potential(nn.Linear(24, 6), nn.ReLU()), lipschitz=0.9)
        g = nn.Sequential(nn.Flatten(), dense, nn.Unflatten(1, IMAGE))
        assert ResidualBlock(g).eval().stretch(IMAGE).forward == 1

    def test_behind_another_layer_nothing_is_known_but_the_constant(self):
        g = constrain_(nn.Sequential(nn.Linear(4, 4), Potential(nn.Linear(4, 4), nn.ELU())), lipschitz=0.9)
        assert requested_constant(g) == pytest.approx(0.9)
        assert requested_bound(g).block_lipschitz == pytest.approx(1.9)
        two = constrain_(nn.Sequential(*[Potential(nn.Linear(4, 4), nn.ELU()) for _ in range(2)]), lipschitz=0.9)
        assert requested_constant(two) == pytest.approx(0.9)
        assert not requested_bound(two).negative_semidefinite  # a composition is no gradient


class TestAsAnyBranch:
    def test_constrained_to_the_root(self):
        g = constrain_(Potential(nn.Conv2d(2, 5, 3, padding=1), nn.ELU()), lipschitz=0.81)
        assert cap_of(g.layer).coefficient == pytest.approx(0.9)
        assert requested_constant(g) == pytest.approx(0.81)
        assert requested_constant(constrain_(g, 0.5)) == 0.25

    def test_its_certificate_names_the_layer(self):
        b = block()
        certificate = certify(b, (4,))
        assert certificate.passed
        assert [(p.name, p.kind, p.coefficient) for p in certificate.layers] == [
            ("layer", "Linear", pytest.approx(0.9**0.5))
        ]
        assert certificate.lipschitz["block"] == pytest.approx(certificate.layers[0].bound ** 2)
        assert "Lip(F) <= 1, Lip(F^-1) <= 10; ln det in [-9.21, 0]" in certificate.summary()

    def test_shapes_of_its_parts(self):
        layer, activation = lipschitz_bound(block(IMAGE).g, IMAGE).parts
        assert (layer.input_shape, activation.input_shape) == (IMAGE, (7, 4, 3))
        after = nn.Sequential(block(IMAGE).g, nn.Flatten(), nn.Linear(24, 24).double())
        assert lipschitz_bound(after, IMAGE).parts[-1].input_shape == (24,)

    def test_tightened_where_it_exceeds(self):
        b = block()
        with torch.no_grad():
            b.g.layer.parametrizations.weight.original.mul_(3)  # behind the back of the estimate
            b.g.layer.parametrizations.weight[0].gradient.mul_(0.3)
        assert not certify(b, (4,)).passed
        assert tighten_(b, (4,)) == ["block.g.layer"]
        assert certify(b, (4,)).passed
        assert b.bound((4,)).value <= 0.9

    def test_plain_is_the_same_function(self):
        g, x = block(IMAGE).g, normal(3, *IMAGE)
        copied = unconstrained_copy(g)
        assert cap_of(copied.layer) is None
        torch.testing.assert_close(copied(x), g(x))
        assert torch.equal(copy.deepcopy(g)(x), g(x))

    def test_the_series_has_the_determinant_for_its_mean(self):
        """Through the general way, torch.func.vjp: 3,000 seeded draws at one point, within four standard errors."""
        b, x = block(lipschitz=0.6), normal(1, 4)
        many = x.expand(3000, 4)
        draws = b.forward_and_logdet(many, estimator=PowerSeries(terms=60), generator=torch.Generator().manual_seed(0))[
            1
        ]
        error = draws.std() / len(draws) ** 0.5
        assert error < 0.05
        assert abs(draws.mean() - b.forward_and_logdet(x)[1]) < 4 * error

    def test_in_training_the_norm_follows_the_weight(self):
        b = block(lipschitz=0.9).train()
        for _ in range(30):
            with torch.no_grad():
                b.g.layer.parametrizations.weight.original.mul_(1.1)
            b(normal(3, 4))
        assert b.eval().bound((4,)).value < 0.91

    def test_alone_it_looks_after_its_layer_too(self):
        """Without a block around it: the size is seen and, in training, the norm follows."""
        g = block(IMAGE).g.train()
        for _ in range(30):
            with torch.no_grad():
                g.layer.parametrizations.weight.original.mul_(1.1)
            g(normal(3, 2, 6, 5))
        assert cap_of(g.layer).seen == (6, 5)
        assert lipschitz_bound(g, (2, 6, 5)).value < 0.95

    def test_a_wrong_shape_gets_a_sentence(self):
        with pytest.raises(ValueError, match=r"x must have shape \(batch, ..., 4\) for this block; got \(2, 5\)"):
            block()(normal(2, 5))

    def test_its_program_goes_back_by_the_transpose(self):
        assert [step.kind for step in try_parse(block().g).program.steps][-1] == "descent"


def test_torch_fx_traces_a_potential_of_images():
    g, x = Potential(nn.Conv2d(2, 7, 3, padding=1), nn.ELU()), normal(3, *IMAGE, dtype=torch.float32)
    assert torch.equal(torch.fx.symbolic_trace(g)(x), g(x))


class TestBadInput:
    @pytest.mark.parametrize("make", [MaxMin, Sine, LipSwish, nn.SiLU, partial(nn.ELU, alpha=-0.5), nn.Flatten])
    def test_an_activation_that_falls(self, make):
        sentence = "the activation of a Potential must be elementwise and never decrease; got .*Use ELU, ReLU, Softplus"
        with pytest.raises(NoBoundKnown, match=sentence):
            Potential(nn.Linear(4, 4), make())

    def test_one_that_was_put_there_later(self):
        g = block().g
        g.activation = Sine()
        with pytest.raises(NoBoundKnown, match="must be elementwise and never decrease; got Sine"):
            lipschitz_bound(g)

    def test_a_hook_on_it(self):
        g = block().g
        g.activation.register_forward_hook(lambda *_: None)
        with pytest.raises(NoBoundKnown, match=r"ELU \(activation\) has forward hooks"):
            lipschitz_bound(g)

    @pytest.mark.parametrize(
        "options", [{"stride": 2, "padding": 1}, {"padding": 1, "padding_mode": "circular"}], ids=["stride", "circular"]
    )
    def test_a_layer_whose_transpose_is_another(self, options):
        with pytest.raises(NoBoundKnown, match="must have stride 1 and equal zero padding on both sides; got Conv2d"):
            Potential(nn.Conv2d(2, 2, 3, **options), nn.ELU())

    def test_an_even_kernel_with_uneven_padding(self):
        with pytest.raises(NoBoundKnown, match="Use an odd kernel with padding=kernel // 2"):
            Potential(nn.Conv2d(2, 2, 2, padding="same"), nn.ELU())

    def test_a_layer_that_is_none(self):
        with pytest.raises(NoBoundKnown, match="no norm bound is known for Bilinear"):
            Potential(nn.Bilinear(2, 2, 2), nn.ELU())

    def test_a_subclass_with_a_forward_of_its_own_is_not_trusted(self):
        class Other(Potential):
            def forward(self, x):
                return -2 * super().forward(x)

        with pytest.raises(NoBoundKnown, match="no Lipschitz bound is known for Other"):
            lipschitz_bound(Other(nn.Linear(2, 2), nn.ELU()))

    def test_no_contraction(self):
        with pytest.raises(ValueError, match="g must be a contraction; its layers allow a Lipschitz constant of 4"):
            ResidualBlock(with_matrix(2 * orthogonal(3), nn.ELU()))

    def test_a_layer_without_constraint_promises_nothing(self):
        with pytest.raises(NoBoundKnown, match="A layer of a block is not constrained"):
            requested_bound(with_matrix(0.5 * orthogonal(3), nn.ELU()))


def test_monotone_is_what_never_falls():
    x = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    for name, make in ACTIVATIONS.items():
        if name != "maxmin":
            falls = bool((make().double()(x).diff() < 0).any())
            assert is_monotone(make()) == (not falls) == (name in MONOTONE), name
    assert not is_monotone(nn.ELU(-1.0))
    assert not is_monotone(nn.LeakyReLU(-0.1))


# ---------------------------------------------------------------------------------------------- as settings

SETTINGS = {
    "branch": "potential", "kernels": (3,), "activation": "relu", "normalisation": "none",
    "preprocessing": "standardise", "readout": "lipschitz",
}  # fmt: skip
SCHEMA = Schema((1, 8, 8), 17, classes=("a", "b", "c"))


class TestNetwork:
    @pytest.mark.parametrize("kernel", [0, 1, 3, 5])
    def test_a_classifier_of_images_that_does_not_stretch(self, kernel):
        torch.manual_seed(0)
        network = Network(**{**SETTINGS, "kernels": (kernel,), "blocks": (2, 3), "width": 6})
        model = build(network, SCHEMA, "classification").eval()
        assert certify(model, SCHEMA.shape).passed
        assert model.transform.stretch(SCHEMA.shape).forward == pytest.approx(1)
        assert float(requested_lipschitz(model.transform)) == pytest.approx(1)
        assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 3)

    def test_a_density_of_a_table(self):
        torch.manual_seed(0)
        network = Network(branch="potential", blocks=(2,), width=6, lipschitz=0.5)
        flow = build(network, Schema((3,), columns=("a", "b", "c")), "density").eval()
        assert torch.isfinite(flow(torch.randn(4, 3))).all()
        rouse_(flow)
        assert [round(b.lipschitz, 4) for b in certify(flow).blocks] == [0.5, 0.5]

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            (
                {"activation": "sine"},
                "branch 'potential' needs a monotone activation, elu, relu, softplus or tanh; got 'sine'.",
            ),
            ({"preactivation": True}, "branch 'potential' needs preactivation = false; got true."),
            ({"constrained": False}, "branch 'potential' needs constrained = true; got false."),
            ({"branch": "gradient"}, "branch must be one of chain, potential, dense; got 'gradient'."),
        ],
    )
    def test_settings_that_contradict_it(self, changes, sentence):
        with pytest.raises(ValueError, match="branch") as caught:
            Network(**{**SETTINGS, **changes})
        assert str(caught.value) == sentence

    def test_every_scale_may_have_its_own_kernel(self):
        model = build(Network(**{**SETTINGS, "kernels": (3, 0), "blocks": (1, 2)}), SCHEMA, "classification")
        layers = [m.layer for m in model.modules() if isinstance(m, Potential)]
        assert [type(layer).__name__ for layer in layers] == [
            "ParametrizedConv2d", "ParametrizedLinear", "ParametrizedLinear"
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("kernels", "sentence"),
        [
            (
                (3, 1, 3),
                "kernels must have one entry for a potential, which has one layer, or one for each of 2 scales; "
                "got [3, 1, 3]. Use kernels = [3].",
            ),
            ((2,), "kernels must be odd, to keep the size of the image, or 0 for a dense layer; got 2."),
        ],
    )
    def test_other_kernels_get_a_sentence(self, kernels, sentence):
        with pytest.raises(ValueError, match="kernels") as caught:
            build(Network(**{**SETTINGS, "kernels": kernels}), SCHEMA, "classification")
        assert str(caught.value) == sentence


class TestPresets:
    @pytest.mark.parametrize("name", ["digits-certified", "mnist-certified", "cifar10-certified"])
    def test_certified_ones_are_trained_for_a_radius_and_end_as_they_are(self, name):
        experiment = find(name)
        assert experiment.network.branch == "potential"
        assert experiment.network.normalisation == "none"
        assert experiment.objective.radius > 0
        assert experiment.training.select == "last"

    def test_the_coefficient_counts_twice(self):
        """The layer and its transpose, whatever the number of kernels."""
        assert find("digits-certified-c0.5").network.lipschitz == 0.25
        assert find("cifar10-certified-c0.5").network.lipschitz == 0.25


@pytest.fixture(scope="module")
def trained():
    """Three kinds of squares, told apart by a small network that was trained for a radius of 4."""
    torch.manual_seed(0)
    y = torch.arange(300) % 3
    x = torch.randint(0, 9, (300, 1, 8, 8))
    for k, (rows, columns) in enumerate([((0, 4), (0, 4)), ((4, 8), (0, 4)), ((2, 6), (4, 8))]):
        x[y == k, :, rows[0] : rows[1], columns[0] : columns[1]] += 4
    data = Dataset(x.to(torch.uint8), y, SCHEMA)
    model = build(Network(**SETTINGS, blocks=(2, 2), width=8), SCHEMA, "classification", data.x)
    objective = ObjectiveSettings(kind="classification", radius=4.0).build_objective(model, SCHEMA.levels)
    model = train(objective, Batches(data, 100).starting_at(0), Training(steps=60, learning_rate=1e-2))
    tighten_(model, SCHEMA.shape)
    return model, data


@pytest.mark.no_cover
def test_certified_radii_withstand_the_attack(trained):
    model, data = trained
    radii = certified_radius(model, data)
    radius = float(radii.median())
    held = survives_attack(model, data, radius)
    assert radius > 1
    assert bool(held[radii >= radius].all())
    assert not bool(survives_attack(model, data, 6 * radius).all())


def test_lip_of_the_map_is_that_of_the_scaling(trained):
    model, data = trained
    found = robustness(model, data, 2.0, steps=5, restarts=1)
    assert found.lipschitz == pytest.approx(1 / float(model.transform[0].std.min()), rel=1e-6)
    assert found.lipschitz == pytest.approx(float(requested_lipschitz(model.transform)), rel=1e-6)
    assert 50 < found.value <= found.attacked <= found.clean


def test_a_classifier_made_by_hand_trains_for_a_radius():
    model = Classifier(Chain(block().float(), block(seed=1).float()), nn.Linear(4, 3))
    objective = ObjectiveSettings(kind="classification", radius=0.1).build_objective(model, None)
    loss, metrics = objective(normal(9, 4, dtype=torch.float32), torch.arange(9) % 3)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert 0 <= float(metrics["certified %"]) <= 100


def test_a_celu_that_grows_without_bound_has_no_constant():
    """Slope exp(x / alpha) for x < 0."""
    assert lipschitz_constant(nn.CELU(2.0)) == 1
    assert lipschitz_constant(nn.CELU(-1.0)) is None
    assert not is_monotone(nn.CELU(-1.0))

"""Builders of networks: contractive by construction; what they refuse."""

import copy
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import nn

from iresnet import (
    Classifier,
    Exact,
    Flow,
    Hybrid,
    LipSwish,
    MaxMin,
    Multiscale,
    NormalMixture,
    PowerSeries,
    ResidualBlock,
    RussianRoulette,
    Sine,
    certify,
    contractive_convnet,
    contractive_mlp,
    mlp_flow,
    tighten_,
)
from iresnet.branch import lipschitz_bound
from iresnet.data import Schema
from iresnet.lipschitz import GramIteration, PowerIteration, cap_of, constrain_
from iresnet.logdet import Estimator
from iresnet.models import ACTIVATIONS, PREPROCESSING, READOUTS, Network, build
from iresnet.models.resnet import PlainResNet, PreActResNet
from iresnet.spectral import singular_values
from tests.zoo import normal


def coefficients(g):
    return [cap_of(m).coefficient for m in g.modules() if cap_of(m) is not None]


def test_lipschitz_is_shared_among_the_layers():
    assert coefficients(contractive_mlp(3, (8, 8), lipschitz=0.5)) == pytest.approx([0.5 ** (1 / 3)] * 3)


def test_a_layer_without_weights_keeps_them_at_any_initial_norm():
    layer = nn.Linear(3, 3)
    nn.init.zeros_(layer.weight)
    constrain_(nn.Sequential(layer), 0.5, initial_norm=1.0)
    assert not layer.weight.any()
    with pytest.raises(ValueError, match=r"initial_norm must lie in \[0, 1\]; got 2"):
        constrain_(nn.Sequential(nn.Linear(3, 3)), 0.5, initial_norm=2)


def test_weights_are_not_scaled_before_all_arguments_are_checked():
    layers = [nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)]
    before = [layer.weight.clone() for layer in layers]
    for wrong, sentence in (
        ({"coefficient": -0.5}, r"coefficient must lie in \(0, 1\); got -0.5"),
        ({"coefficient": 0.5, "input_size": (8,)}, r"input_size must have a number for each of 2 axes; got \(8,\)"),
    ):
        with pytest.raises(ValueError, match=sentence):
            constrain_(nn.Sequential(*layers), **wrong, initial_norm=1.0)
        assert all(torch.equal(layer.weight, b) for layer, b in zip(layers, before, strict=True))


def test_coefficient_is_per_layer():
    assert coefficients(contractive_convnet(3, 8, coefficient=0.7)) == [0.7] * 3


def test_the_convolutional_branch_is_the_papers():
    g = contractive_convnet(3, 8, preactivation=True)
    kernels = [m.kernel_size for m in g if isinstance(m, nn.Conv2d)]
    assert kernels == [(3, 3), (1, 1), (3, 3)]
    assert isinstance(g[0], nn.ELU)
    assert g(torch.zeros(2, 3, 5, 6)).shape == (2, 3, 5, 6)


@pytest.mark.parametrize("activation", [nn.ELU, nn.Tanh, partial(nn.Softplus, threshold=40), nn.ReLU, LipSwish])
def test_every_builder_passes_certify(activation):
    assert certify(ResidualBlock(contractive_mlp(3, (8,), activation=activation))).passed
    assert certify(ResidualBlock(contractive_convnet(2, 4, activation=activation)), (2, 6, 6)).passed
    assert certify(mlp_flow(2, blocks=2, hidden=(8,), activation=activation, context=3)).passed


def test_a_context_changes_the_output_but_not_the_constant():
    torch.manual_seed(0)
    g = contractive_mlp(2, (16,), context=3)
    x, far = torch.randn(50, 2), 100 * torch.randn(50, 3)
    assert not torch.allclose(g(x, far), g(x, torch.zeros(50, 3)))
    y = x + 1e-2 * torch.randn(50, 2)
    ratio = (g(x, far) - g(y, far)).norm(dim=1) / (x - y).norm(dim=1)
    assert float(ratio.detach().max()) < 0.9001


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: contractive_mlp(0), "must be positive; got 0"),
        (lambda: contractive_mlp(2, ()), "must be positive"),
        (lambda: contractive_mlp(2, activation=nn.SiLU), "LipSwish is its contractive form"),
        (lambda: contractive_mlp(2, coefficient=1.5), r"coefficient must lie in \(0, 1\); got 1.5"),
        (lambda: contractive_mlp(2, lipschitz=1.0), r"lipschitz must lie in \(0, 1\); got 1.0"),
        (lambda: contractive_mlp(2, coefficient=0.5, lipschitz=0.5), "either coefficient"),
        (lambda: contractive_convnet(0), "channels must be at least 1; got 0"),
        (lambda: contractive_convnet(2, kernels=(2,)), "kernels must be odd"),
        (lambda: mlp_flow(2, blocks=0), "blocks must be at least 1; got 0"),
        (lambda: mlp_flow(3, hidden=64), r"hidden must list the widths .*; got 64. Use hidden=\(64,\)."),  # type: ignore[arg-type]
        (
            lambda: mlp_flow(3, activation=nn.ReLU()),
            r"activation must be a class, .*; got ReLU\(\). Use activation=nn.R",
        ),
        (
            lambda: contractive_convnet(3, activation="relu"),  # type: ignore[arg-type]
            "activation must be a class, .*; got 'relu'. Use activation",
        ),
    ],
)
def test_wrong_arguments_are_refused(build, sentence):
    with pytest.raises(ValueError, match=sentence):
        build()


IMAGES = Schema((1, 8, 8), levels=17, classes=("a", "b", "c"))
TABLE = Schema((5,), columns=tuple("abcde"), label="kind", classes=("u", "v"))
POINTS = Schema((2,))

SMALL = Network(blocks=(1, 1), width=6, kernels=(1, 1), terms=3)
FLAT = Network(blocks=(2,), width=6, depth=1, terms=3)


def pixels(schema=IMAGES, rows=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(schema.levels, (rows, *schema.shape), generator=generator).to(torch.uint8)


def made(network, schema, purpose, data=None):
    torch.manual_seed(0)
    return build(network, schema, purpose, data)


def kinds(transform):
    return [type(t).__name__ for t in transform]


CASES = {
    "images": (replace(SMALL, kernels=(3, 1)), IMAGES),
    "images-standardised": (replace(SMALL, preprocessing="standardise"), IMAGES),
    "images-factored": (replace(SMALL, factor_out=True), IMAGES),
    "images-pooled": (replace(SMALL, pool=True, head=(7,)), IMAGES),
    "images-factored-pooled": (replace(SMALL, factor_out=True, pool=True), IMAGES),
    "images-one-scale": (replace(SMALL, blocks=(2,), factor_out=True), IMAGES),
    "images-wide-and-flat": (SMALL, replace(IMAGES, shape=(3, 4, 8))),
    "images-centred-mixed": (replace(SMALL, preprocessing="centre", mixing=True, last_scale=0.5), IMAGES),
    "images-tailed": (replace(SMALL, tail=2, tail_width=5), IMAGES),
    "images-factored-tailed": (replace(SMALL, factor_out=True, tail=1, tail_width=5, mixing=True), IMAGES),
    "table-mixed-tailed": (replace(FLAT, mixing=True, tail=1), TABLE),
    "table": (FLAT, TABLE),
    "table-deep-head": (replace(FLAT, head=(4, 3), dropout=0.5, pool=True), TABLE),
}
every_case = pytest.mark.parametrize("case", CASES)


@cache
def _prototype(case, purpose):
    return made(*CASES[case], purpose)


def built(case, purpose):
    return copy.deepcopy(_prototype(case, purpose)), CASES[case][1], torch.rand(4, *CASES[case][1].shape)


class TestBuild:
    @every_case
    def test_the_objective_density_builds_a_flow(self, case):
        model, schema, x = built(case, "density")
        assert type(model) is Flow
        assert model(x).shape == (4,)
        assert model.eval().sample((2,)).shape == (2, *schema.shape)
        assert model.event_shape == schema.shape

    @pytest.mark.parametrize("case", ["images", "images-factored-pooled", "table-deep-head"])
    def test_a_classifier_has_a_logit_for_every_class(self, case):
        model, schema, x = built(case, "classification")
        assert type(model) is Classifier
        assert model(x).shape == (4, len(schema.classes))

    @every_case
    def test_a_hybrid_is_both(self, case):
        model, schema, x = built(case, "hybrid")
        assert type(model) is Hybrid
        log_prob, logits = model(x)
        assert (log_prob.shape, logits.shape) == ((4,), (4, len(schema.classes)))
        model.eval()
        torch.testing.assert_close(model.decode(model.encode(x)), x, atol=2e-3, rtol=0)

    def test_semi_supervised_is_a_hybrid_too(self):
        assert type(made(FLAT, TABLE, "semi-supervised")) is Hybrid

    @every_case
    def test_what_is_built_is_proven(self, case):
        network = CASES[case][0]
        model, schema, x = built(case, "density")
        model(x)
        model.eval()
        certificate = certify(model, schema.shape)
        assert certificate.passed
        assert len(certificate.blocks) == sum(network.blocks) + network.tail
        assert max(certificate.lipschitz.values()) <= network.lipschitz * (1 + 1e-4)
        assert certificate.stretch.proven

    def test_the_order_for_images(self):
        """Preprocessing; for every scale a squeeze, then ActNorm and block by turns; an ActNorm last (App. C.3)."""
        model = made(replace(SMALL, blocks=(2, 1)), IMAGES, "density")
        pair = ["ActNorm", "ResidualBlock"]
        assert kinds(model.transform) == ["Logit", "Squeeze", *pair, *pair, "Squeeze", *pair, "ActNorm"]
        assert model.base.shape == (16, 2, 2)

    def test_the_order_for_tables(self):
        model = made(FLAT, TABLE, "density")
        assert kinds(model.transform) == ["Standardise", *["ActNorm", "ResidualBlock"] * 2, "ActNorm"]
        assert [layer.out_features for layer in model.transform[2].g if isinstance(layer, nn.Linear)] == [6, 5]

    def test_factored_out_codes_go_to_the_base_and_to_the_head(self):
        model = made(replace(SMALL, factor_out=True, pool=True), IMAGES, "hybrid")
        assert isinstance(model.transform, Multiscale)
        assert model.transform.code_shapes == ((2, 4, 4), (8, 2, 2))
        assert model.base.shape == (64,)
        assert model.head.layers[0].in_features == 10

    def test_pooling_is_the_mean_over_positions_scale_by_scale(self):
        model = made(replace(SMALL, factor_out=True, pool=True), IMAGES, "classification").eval()
        z = normal(3, 64, dtype=torch.float32)
        fine, coarse = model.transform.unflatten(z)
        means = torch.cat([fine.mean((2, 3)), coarse.mean((2, 3))], dim=1)
        torch.testing.assert_close(model.head(z), model.head.layers(means))

    @pytest.mark.parametrize(
        ("settings", "rule"),
        [
            ({"norm": "power-iteration"}, PowerIteration(1)),
            ({"norm": "power-iteration", "norm_iterations": 5}, PowerIteration(5)),
            ({"norm": "gram-iteration"}, GramIteration(6)),
            ({"norm": "gram-iteration", "norm_iterations": 3}, GramIteration(3)),
        ],
    )
    def test_the_norm_rule_is_a_setting(self, settings, rule):
        for network, schema in ((SMALL, IMAGES), (FLAT, TABLE)):
            model = made(replace(network, **settings), schema, "density")
            assert {cap.norm for m in model.modules() if (cap := cap_of(m)) is not None} == {rule}

    def test_by_default_convolutions_have_another_norm_rule_than_linear_layers(self):
        for network, schema, rule in ((SMALL, IMAGES, PowerIteration()), (FLAT, TABLE, GramIteration(8))):
            model = made(network, schema, "density")
            assert {cap.norm for m in model.modules() if (cap := cap_of(m)) is not None} == {rule}
        with pytest.raises(ValueError, match="norm_iterations needs a norm that it counts, .* got 5 with 'auto'"):
            replace(SMALL, norm_iterations=5)

    @pytest.mark.parametrize("branch", ["chain", "dense", "potential"])
    def test_layers_start_at_their_initial_norm(self, branch):
        kernels, images = (3,) if branch == "potential" else (3, 1, 3), replace(IMAGES, shape=(IMAGES.shape[0], 8, 8))
        for network, schema in ((replace(SMALL, kernels=kernels), images), (FLAT, TABLE)):
            wide = replace(network, branch=branch, width=24, initial_norm=1.0)
            norms = _layer_norms(made(wide, schema, "density"), schema)
            assert all(0.98 * c < norm < 1.001 * c for norm, c in norms)
            half = _layer_norms(made(replace(wide, initial_norm=0.5), schema, "density"), schema)
            assert all(0.49 * c < norm < 0.51 * c for norm, c in half)

    def test_the_last_layer_is_scaled_down_after_its_norm_is_raised(self):
        for last, factor in ((1.0, 1.0), (0.1, 0.1)):
            model = made(replace(FLAT, width=64, initial_norm=1.0, last_scale=last), TABLE, "density")
            norms = _layer_norms(model, TABLE)
            per_block = FLAT.depth + 1
            assert all(norm == pytest.approx(factor * c, rel=0.1) for norm, c in norms[per_block - 1 :: per_block])

    def test_padding_is_for_classifiers(self):
        model = made(replace(SMALL, padding=3), IMAGES, "classification")
        assert kinds(model.transform)[:3] == ["Logit", "InjectivePad", "Squeeze"]
        assert model.transform.output_shape(IMAGES.shape) == (64, 2, 2)
        x = 17 * torch.rand(3, *IMAGES.shape)
        model.eval()
        torch.testing.assert_close(model.decode(model.encode(x)), x, atol=1e-3, rtol=0)
        assert made(replace(FLAT, padding=3), TABLE, "classification")(torch.rand(3, 5)).shape == (3, 2)

    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("elu", nn.ELU), ("lipswish", LipSwish), ("maxmin", MaxMin), ("sine", Sine), ("softplus", nn.Softplus),
            ("tanh", nn.Tanh),
        ],
    )  # fmt: skip
    def test_every_activation(self, name, kind):
        assert name in ACTIVATIONS
        for network, schema in ((SMALL, IMAGES), (replace(FLAT, depth=3), TABLE)):
            model = made(replace(network, activation=name, frequency=3.0), schema, "density")
            found = [
                m for m in model.modules() if isinstance(m, nn.ELU | LipSwish | MaxMin | Sine | nn.Softplus | nn.Tanh)
            ]
            depth = len(network.kernels) - 1 if schema.is_image else 3
            assert len(found) == depth * sum(network.blocks)
            assert all(type(m) is kind for m in found)
            assert all(m.frequency == 3.0 for m in found if isinstance(m, Sine))
            assert certify(model, schema.shape).passed

    @pytest.mark.parametrize(
        ("network", "schema", "expected"),
        [
            (replace(FLAT, estimator="series", terms=3), TABLE, PowerSeries(terms=3)),
            (
                replace(FLAT, estimator="series", probe="gaussian"),
                TABLE,
                PowerSeries(terms=FLAT.terms, probe="gaussian"),
            ),
            (
                replace(SMALL, estimator="roulette", probe="gaussian"),
                IMAGES,
                RussianRoulette(terms=SMALL.terms, probe="gaussian"),
            ),
            (replace(SMALL, terms=3), IMAGES, PowerSeries(terms=3)),
            (replace(FLAT, estimator="roulette", terms=5), TABLE, RussianRoulette(terms=5)),
            (replace(FLAT, estimator="exact"), TABLE, Exact()),
            (FLAT, TABLE, Exact()),
        ],
        ids=lambda value: str(value) if isinstance(value, Estimator) else "",
    )
    def test_the_estimator_of_training(self, network, schema, expected):
        model = made(network, schema, "density")
        assert model.estimator == expected
        x = normal(6, *schema.shape, dtype=torch.float32)
        assert model(x.sigmoid() * (schema.levels or 1)).isfinite().all()

    def test_the_base_is_learned_or_not(self):
        for learned in (True, False):
            model = made(replace(FLAT, learned_base=learned), TABLE, "density")
            assert len(list(model.base.parameters())) == 2 * learned

    def test_more_components_make_the_base_a_mixture(self):
        model = made(replace(FLAT, components=3), TABLE, "hybrid")
        assert isinstance(model.base, NormalMixture)
        assert model.base.mean.shape == (3, 5)
        assert model(normal(6, 5, dtype=torch.float32)).log_prob.shape == (6,)

    def test_the_head(self):
        model = made(replace(FLAT, head=(4, 3), dropout=0.25), TABLE, "classification")
        kinds_of_layers = [type(m).__name__ for m in model.head.layers]
        assert kinds_of_layers == ["Linear", "ELU", "Dropout", "Linear", "ELU", "Dropout", "Linear"]
        assert [m.p for m in model.head.layers if isinstance(m, nn.Dropout)] == [0.25, 0.25]
        widths = [(m.in_features, m.out_features) for m in model.head.layers if isinstance(m, nn.Linear)]
        assert widths == [(5, 4), (4, 3), (3, 2)]
        assert [type(m).__name__ for m in made(FLAT, TABLE, "classification").head.layers] == ["Linear"]


class TestScaling:
    def test_a_table_comes_out_with_mean_zero_and_variance_one(self):
        rows = normal(200, 5, dtype=torch.float32) * torch.tensor([1.0, 1e3, 1e-3, 5.0, 2.0]) + 7
        first = made(FLAT, TABLE, "density", rows).transform[0]
        z = first(rows).double()
        torch.testing.assert_close(z.mean(0), torch.zeros(5).double(), atol=1e-3, rtol=0)
        torch.testing.assert_close(z.std(0, correction=0), torch.ones(5).double(), atol=1e-3, rtol=0)

    def test_pixels_are_centred_where_dequantisation_puts_them(self):
        """The mean of x + u is that of x and one half; every channel has its own."""
        schema = replace(IMAGES, shape=(2, 8, 8))
        x = pixels(schema, 300)
        x[:, 1] = x[:, 1] // 4
        first = made(replace(SMALL, preprocessing="standardise"), schema, "density", x).transform[0]
        noisy = x.double() + torch.rand(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        z = first(noisy)
        assert (z.mean((0, 2, 3)).abs() < 4 * z.std((0, 2, 3)) / (300 * 64) ** 0.5).all()
        torch.testing.assert_close(z.std((0, 2, 3)), torch.ones(2).double(), atol=0.05, rtol=0)

    @pytest.mark.parametrize("preprocessing", PREPROCESSING)
    def test_a_model_that_is_loaded_needs_no_data(self, preprocessing):
        for network, schema, x in (
            (SMALL, IMAGES, pixels()), (FLAT, TABLE, normal(20, 5, dtype=torch.float32) * 3 + 1)
        ):  # fmt: skip
            model = made(replace(network, preprocessing=preprocessing), schema, "hybrid", x)
            model(x.float())  # ActNorm sees a first batch
            model.eval()
            torch.manual_seed(5)
            blank = build(replace(network, preprocessing=preprocessing), schema, "hybrid").eval()
            blank.load_state_dict(model.state_dict())
            for got, expected in zip(blank(x.float()), model(x.float()), strict=True):
                assert torch.equal(got, expected)

    def test_a_column_that_does_not_vary(self):
        rows = normal(20, 5, dtype=torch.float32)
        rows[:, 2] = 4
        with pytest.raises(ValueError, match=r"every column must vary, .*got constant columns \[2\]"):
            made(FLAT, TABLE, "density", rows)


def _layer_norms(model, schema):
    """(largest singular value, coefficient) of every constrained layer, from dense matrices."""
    model.train().transform(torch.full((2, *schema.shape), 0.5))  # shows every layer its input size
    model.eval()
    layers = [(m, cap) for m in model.modules() if (cap := cap_of(m)) is not None]
    shapes = [(m.in_features,) if isinstance(m, nn.Linear) else (m.in_channels, *cap.seen) for m, cap in layers]
    return [
        (float(singular_values(m, shape).max()), cap.coefficient)
        for (m, cap), shape in zip(layers, shapes, strict=True)
    ]


class TestNetwork:
    @pytest.mark.parametrize(
        ("wrong", "sentence"),
        [
            ({"blocks": ()}, r"blocks must list at least one block for every scale; got \[\]."),
            ({"blocks": (2, 0)}, r"blocks must list at least one block for every scale; got \[2, 0\]."),
            ({"width": -1}, "width must be at least 1, or 0 for that of the scale; got -1."),
            ({"depth": 0}, "depth must be at least 1; got 0."),
            ({"terms": 0}, "terms must be at least 1; got 0."),
            ({"components": -1}, "components must not be negative; got -1."),
            ({"components": 0}, 'components must be at least 1 unless covariance = "full"; got 0.'),
            ({"lipschitz": 1.0}, r"lipschitz must lie in \(0, 1\); got 1.0. A block with 1 has no inverse."),
            ({"lipschitz": 0.0}, r"lipschitz must lie in \(0, 1\); got 0.0."),
            ({"dropout": 1.0}, r"dropout must lie in \[0, 1\); got 1.0."),
            ({"padding": -1}, "padding must not be negative; got -1."),
            ({"tail": -1}, "tail must not be negative; got -1."),
            ({"tail_width": 0}, "tail_width must be at least 1; got 0."),
            (
                {"tail": 2, "pool": True},
                "pool needs tail = 0: a tail leaves no positions to pool; got 2.",
            ),
            ({"last_scale": 0.0}, r"last_scale must lie in \(0, 1\]; got 0.0. At 0 no gradient passes it."),
            ({"last_scale": 1.5}, r"last_scale must lie in \(0, 1\]; got 1.5."),
            ({"branch": "potential", "last_scale": 0.1}, "branch 'potential' needs last_scale = 1.0; got 0.1."),
            ({"head": (8, 0)}, r"head must list widths of at least 1; got \[8, 0\]."),
            (
                {"activation": "gelu"},
                "activation must be one of elu, lipswish, maxmin, sine, relu, softplus, tanh; got 'gelu'.",
            ),
            ({"estimator": "magic"}, "estimator must be one of auto, series, roulette, exact; got 'magic'."),
            ({"preprocessing": "none"}, "preprocessing must be one of logit, standardise, centre; got 'none'."),
            ({"normalisation": "layer"}, "normalisation must be one of actnorm, batchnorm, none; got 'layer'."),
            ({"readout": "mlp"}, "readout must be one of linear, batchnorm, lipschitz; got 'mlp'."),
            (
                {"family": "glov"},
                "family must be one of iresnet, resnet, resnet-plain, glow, glow-additive, realnvp, nice, irevnet, "
                "made, maf, ffjord; got 'glov'.",
            ),
            (
                {"normalisation": "batchnorm"},
                "normalisation 'batchnorm' has no Lipschitz bound, so it needs constrained = false; got true.",
            ),
            ({"readout": "lipschitz", "dropout": 0.1}, "readout 'lipschitz' needs dropout = 0, .*; got 0.1."),
            ({"blocks": (1, 10**9)}, "blocks must be at most 1,000; got 1000000000. Lower it."),
            ({"blocks": (1,) * 17}, "blocks must have at most 16 entries; got 17."),
            ({"kernels": (3,) * 101}, "kernels must have at most 100 entries; got 101."),
            ({"kernels": (3, 101)}, "kernels must be at most 99; got 101."),
            ({"head": (8,) * 101}, "head must have at most 100 entries; got 101."),
            ({"head": (8, 2**40)}, "head must be at most 65,536; got 1099511627776."),
            (
                {"norm": "gram-iteration", "norm_iterations": 1},
                "norm_iterations of at least 2, or 0 for its default; got 1",
            ),
            ({"norm_iterations": -1}, "norm_iterations must not be negative; got -1."),
            ({"initial_norm": 1.5}, r"initial_norm must lie in \[0, 1\]; got 1.5."),
            (
                {"initial_norm": 0.5, "constrained": False},
                "initial_norm is .*, so it needs constrained = true .*; got 0.5",
            ),
            ({"initial_norm": 0.5, "family": "glow"}, 'initial_norm is .*family = "iresnet"; got 0.5'),
            ({"probe": "normal"}, "probe must be one of rademacher, gaussian; got 'normal'."),
            ({"frequency": float("nan")}, "frequency must be at most 1,000; got nan."),
            ({"frequency": float("inf")}, "frequency must be at most 1,000; got inf."),
            *(
                ({name: 2**70}, f"{name} must be at most [0-9,]+; got 1180591620717411303424. Lower it.")
                for name in ("width", "depth", "padding", "tail", "tail_width", "components", "terms", "dequantiser")
            ),
        ],
    )
    def test_wrong_settings_are_refused(self, wrong, sentence):
        with pytest.raises(ValueError, match=sentence):
            Network(**wrong)

    @pytest.mark.parametrize(
        ("network", "schema", "purpose", "sentence"),
        [
            (
                replace(SMALL, padding=2),
                IMAGES,
                "hybrid",
                "padding must be 0 for a density, which is unbounded on constant channels; got 2.",
            ),
            (replace(SMALL, padding=2), IMAGES, "density", "padding must be 0 for a density"),
            (
                FLAT,
                replace(TABLE, classes=("one",)),
                "hybrid",
                r"hybrid needs at least two classes; got 1. Name the label column \(--label COLUMN, the .*\), or use",
            ),
            (FLAT, replace(TABLE, classes=()), "classification", "classification needs at least two classes; got 0"),
            (
                SMALL,
                replace(IMAGES, classes=()),
                "classification",
                "got 0. Put the images of every class in a sub-folder of their own, or use the objective 'density'.",
            ),
            (
                replace(SMALL, blocks=(1, 1, 1, 1)),
                IMAGES,
                "density",
                "every entry of blocks halves the image, .* of 16; got 8 x 8. .* data.size=16, or give blocks few",
            ),
            (SMALL, replace(IMAGES, shape=(1, 6, 8)), "density", "multiples of 4; got 6 x 8. .* data.size=4 or 8,"),
            (
                SMALL,
                replace(IMAGES, shape=(1, 49, 49)),
                "density",
                "multiples of 4; got 49 x 49. .* data.size=48 or 52,",
            ),
            (SMALL, TABLE, "density", r"blocks must have one entry for a table, which has one scale; got \[1, 1\]."),
            (replace(SMALL, alpha=0.5), IMAGES, "density", r"alpha must lie in \(0, 0.5\); got 0.5."),
            (replace(SMALL, kernels=(2,)), IMAGES, "density", r"kernels must be odd, .*got \(2,\)"),
            (
                replace(SMALL, blocks=(1,) * 5, squeeze_first=False),
                IMAGES,
                "density",
                "every entry of blocks but the first halves the image, .* multiples of 16; got 8 x 8.",
            ),
            (
                replace(SMALL, factor_out=True, squeeze_first=False),
                IMAGES,
                "density",
                "factor_out needs an even number of channels in every scale but the last; got 1 at 8 x 8. Use squeeze",
            ),
            (
                replace(SMALL, constrained=False),
                IMAGES,
                "hybrid",
                "constrained must be true for a density, whose determinant needs a contraction; got false for hybrid.",
            ),
            (
                replace(SMALL, family="resnet"),
                IMAGES,
                "density",
                'the family resnet classifies images and has no inverse; got density. Use family = "iresnet".',
            ),
            (replace(FLAT, family="resnet"), TABLE, "classification", "classifies images .*; got a table."),
        ],
        ids=[
            "padding-hybrid",
            "padding",
            "one-class",
            "no-class",
            "no-sub-folder",
            "squeezes",
            "odd",
            "odd-near",
            "table",
            "alpha",
            "kernels",
            "squeezes-later",
            "odd-channels",
            "free-density",
            "resnet-density",
            "resnet-table",
        ],
    )
    def test_settings_that_cannot_be_built_are_refused(self, network, schema, purpose, sentence):
        with pytest.raises(ValueError, match=sentence):
            build(network, schema, purpose)

    def test_a_density_needs_no_classes(self):
        assert isinstance(made(FLAT, replace(TABLE, classes=()), "density"), Flow)


PAPER = Network(
    blocks=(1, 2, 1), squeeze_first=False, width=0, lipschitz=0.729, preactivation=True, preprocessing="standardise",
    padding=1, readout="batchnorm", pool=True,
)  # fmt: skip


class TestThePapersClassifiers:
    """App. C.2: padding, scales of [ActNorm, block], squeezes between them, and BatchNorm, ELU, pooling, linear."""

    @pytest.mark.parametrize(
        ("shape", "padding", "codes"),
        [
            ((3, 32, 32), 13, [(16, 32, 32), (64, 16, 16), (256, 8, 8)]),
            ((1, 28, 28), 15, [(16, 28, 28), (64, 14, 14), (256, 7, 7)]),
        ],
        ids=["CIFAR", "MNIST"],
    )
    def test_the_scales_have_the_papers_shapes(self, shape, padding, codes):
        """The constraint changes no shape, and without it a network of this size is made at once."""
        network = replace(PAPER, padding=padding, constrained=False)
        model = made(network, Schema(shape, levels=256, classes=tuple("abc")), "classification")
        blocks = [at for _, part, at in model.transform.parts(shape) if isinstance(part, ResidualBlock)]
        assert blocks == [codes[0], codes[1], codes[1], codes[2]]
        widths = {part.g[1].out_channels for part in model.transform if isinstance(part, ResidualBlock)}
        assert widths == {16, 64, 256}

    def test_the_order(self):
        model = made(PAPER, IMAGES, "classification")
        pair = ["ActNorm", "ResidualBlock"]
        first = ["Standardise", "InjectivePad"]
        assert kinds(model.transform) == [*first, *pair, "Squeeze", *pair, *pair, "Squeeze", *pair]
        steps = ["ELU", "ParametrizedConv2d"] * 3
        assert [type(m).__name__ for m in model.transform[3].g] == steps

    @pytest.mark.parametrize("c", [0.9, 0.5])
    def test_c_is_the_coefficient_of_every_layer(self, c):
        model = made(replace(PAPER, lipschitz=c**3), IMAGES, "classification")
        asked = coefficients(model.transform)
        assert len(asked) == 3 * sum(PAPER.blocks)
        assert asked == pytest.approx([c] * len(asked))
        model(normal(4, 1, 8, 8, dtype=torch.float32)).sum().backward()
        model.eval()
        tighten_(model, IMAGES.shape)
        certificate = certify(model, IMAGES.shape)
        assert certificate.passed
        assert max(part.bound for part in certificate.layers) <= c

    def test_a_density_ends_in_an_actnorm_whatever_its_readout(self):
        density = made(replace(SMALL, readout="batchnorm"), IMAGES, "density")
        classifier = made(replace(SMALL, readout="batchnorm"), IMAGES, "classification")
        assert kinds(density.transform) == [*kinds(classifier.transform), "ActNorm"]

    def test_preactivation_in_a_table(self):
        g = made(replace(FLAT, preactivation=True), TABLE, "classification").transform[2].g
        assert [type(m).__name__ for m in g] == ["ELU", "ParametrizedLinear"] * 2

    def test_without_normalisation(self):
        model = made(replace(SMALL, normalisation="none"), IMAGES, "density")
        assert kinds(model.transform) == ["Logit", "Squeeze", "ResidualBlock", "Squeeze", "ResidualBlock"]

    def test_the_same_weights_with_and_without_the_constraint(self):
        sizes = [
            sum(p.numel() for p in made(replace(PAPER, constrained=free), IMAGES, "classification").parameters())
            for free in (True, False)
        ]
        assert sizes[0] == sizes[1]


class TestReadouts:
    def test_batchnorm_elu_mean_linear(self):
        model = made(PAPER, IMAGES, "classification")
        z = normal(7, 32, 2, 2, dtype=torch.float32)
        logits = model.head(z)
        mean, var = z.mean((0, 2, 3), keepdim=True), z.var((0, 2, 3), keepdim=True, correction=0)
        pooled = nn.functional.elu((z - mean) / (var + 1e-5).sqrt()).mean((2, 3))
        torch.testing.assert_close(logits, model.head.layers(pooled))

    @pytest.mark.parametrize("pool", [True, False])
    @pytest.mark.parametrize("readout", READOUTS)
    def test_codes_of_several_scales_and_rows_of_a_table(self, readout, pool):
        for network, schema in ((replace(SMALL, factor_out=True), IMAGES), (FLAT, TABLE)):
            model = made(replace(network, readout=readout, pool=pool, head=(4,)), schema, "classification")
            assert model(torch.rand(3, *schema.shape)).shape == (3, len(schema.classes))

    @pytest.mark.parametrize("hidden", [(), (6,)])
    def test_logits_of_a_lipschitz_head_change_less_than_the_code(self, hidden):
        model = made(replace(SMALL, readout="lipschitz", head=hidden), IMAGES, "classification")
        with torch.no_grad():
            model.head.layers[0].parametrizations.weight.original.mul_(50)
        model(torch.rand(3, *IMAGES.shape))
        model.eval()
        assert lipschitz_bound(model.head.layers).value < 1
        a, b = normal(2, 40, 64, dtype=torch.float32)
        moved = (model.head(a) - model.head(b)).norm(dim=1) / (a - b).norm(dim=1)
        assert 0.05 < float(moved.detach().max()) < 1


class TestFamilies:
    def test_vanilla_networks_have_unconstrained_blocks(self):
        model = made(replace(PAPER, constrained=False), IMAGES, "classification")
        assert kinds(model.transform).count("UnconstrainedBlock") == sum(PAPER.blocks)
        assert coefficients(model) == []

    def test_batchnorm_comes_before_every_activation_and_replaces_actnorm(self):
        network = replace(PAPER, constrained=False, normalisation="batchnorm")
        model = made(network, IMAGES, "classification")
        assert [type(m).__name__ for m in model.transform[2].g] == ["BatchNorm2d", "ELU", "Conv2d"] * 3
        assert "ActNorm" not in kinds(model.transform)
        table = made(replace(FLAT, constrained=False, normalisation="batchnorm"), TABLE, "classification")
        assert [type(m).__name__ for m in table.transform[1].g] == ["Linear", "BatchNorm1d", "ELU", "Linear"]

    @pytest.mark.parametrize("network", [replace(PAPER, constrained=False, normalisation="batchnorm"), PAPER])
    def test_in_eval_a_sample_does_not_depend_on_the_others(self, network):
        model, x = made(network, IMAGES, "classification"), pixels(rows=9).float()
        model(x)
        model.eval()
        torch.testing.assert_close(model(x[:1]), model(x)[:1])
        assert torch.equal(model(x), model(x))

    @pytest.mark.parametrize(("width", "first"), [(0, 16), (4, 4)])
    def test_a_plain_resnet_is_one_too(self, width, first):
        network = Network(family="resnet-plain", blocks=(1, 1), width=width, preprocessing="standardise")
        model = made(network, IMAGES, "classification", pixels())
        assert type(model.head) is PlainResNet
        assert model.head.first[0].out_channels == first

    @pytest.mark.parametrize(("width", "first"), [(0, 16), (4, 4)])
    def test_a_resnet_sees_the_scaled_image(self, width, first):
        network = Network(family="resnet", blocks=(1, 1), width=width, preprocessing="standardise")
        model, x = made(network, IMAGES, "classification", pixels()), pixels().float()
        assert type(model.head) is PreActResNet
        assert model.head.first.out_channels == first
        torch.testing.assert_close(model(x), model.head(model.transform(x)))

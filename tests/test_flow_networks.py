"""Flows of images: the settings they need, the shapes of App. C.3 and of the released script, and the presets."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from iresnet import ActNorm, Chain, Exact, Multiscale, PowerSeries, ResidualBlock, Standardise, certify, tighten_
from iresnet.certificate import residual_blocks
from iresnet.data import Batches, Dataset, Schema
from iresnet.data.builtin import schema_of
from iresnet.lipschitz import cap_of
from iresnet.models import Network, build
from iresnet.presets import PRESETS
from iresnet.presets.reading import GROUPS
from iresnet.train import train
from iresnet.train.objective import ObjectiveSettings
from iresnet.transforms.elementary import Flatten
from iresnet.transforms.mixing import InvertibleConv1x1
from tests.zoo import DOUBLE, dense_jacobian, normal

NAMES = [name for name in GROUPS["flows"] if name in PRESETS]
DIGITS = Schema((1, 8, 8), levels=17)
SMALL = Network(blocks=(1, 1), width=6, kernels=(1, 1), terms=3)


def made(network, schema=DIGITS):
    torch.manual_seed(0)
    return build(network, schema, "density")


def kinds(transform):
    return [type(t).__name__ for t in transform]


def tiny(name, blocks=1):
    """The preset with narrow blocks, few of them; the shapes are the same."""
    network = PRESETS[name].network
    return replace(network, blocks=(blocks,) * len(network.blocks), width=4, tail=min(network.tail, 1), tail_width=4)


def digits(rows=24):
    x = torch.randint(17, (rows, 1, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    return Dataset(x, None, DIGITS)


class TestCentre:
    def test_pixels_divided_by_the_levels_less_one_half(self):
        """As in the released script: no logit, nothing fitted, and the change of volume counted."""
        schema = Schema((3, 8, 8), levels=256)
        first = made(replace(SMALL, preprocessing="centre"), schema).transform[0]
        assert type(first) is Standardise
        x = 256 * torch.rand(4, 3, 8, 8, dtype=DOUBLE)
        z, logdet = first.forward_and_logdet(x)
        torch.testing.assert_close(z, x / 256 - 0.5)
        torch.testing.assert_close(logdet, torch.full((4,), -192 * math.log(256), dtype=DOUBLE))

    def test_it_does_not_depend_on_the_data(self):
        x = digits().x
        network = replace(SMALL, preprocessing="centre")
        with_data = build(network, DIGITS, "density", x).transform[0]
        assert torch.equal(with_data.mean, made(network).transform[0].mean)
        assert torch.equal(with_data.std, torch.tensor([17.0]))


class TestMixing:
    def test_one_for_every_scale_before_its_blocks(self):
        model = made(replace(SMALL, mixing=True))
        pair = ["ActNorm", "ResidualBlock"]
        scale = ["Squeeze", "InvertibleConv1x1", *pair]
        assert kinds(model.transform) == ["Logit", *scale, *scale, "ActNorm"]
        found = [m.channels for m in model.modules() if isinstance(m, InvertibleConv1x1)]
        assert found == [4, 16]

    def test_within_stages(self):
        model = made(replace(SMALL, mixing=True, factor_out=True))
        assert [kinds(stage).count("InvertibleConv1x1") for stage in model.transform] == [1, 1]


class TestTail:
    def test_blocks_on_all_of_the_code(self):
        model = made(replace(SMALL, tail=2, tail_width=5, depth=1))
        assert kinds(model.transform)[-5:] == ["ResidualBlock", "ActNorm", "Flatten", "ResidualBlock", "ResidualBlock"]
        assert kinds(model.transform).count("Flatten") == 1
        g = model.transform[-2].g
        assert [(m.in_features, m.out_features) for m in g if isinstance(m, nn.Linear)] == [(64, 5), (5, 64)]
        assert model.base.shape == (64,)

    def test_a_pixel_that_was_blank_in_the_first_batch_is_not_impossible_later(self):
        """An ActNorm for every number of the code would divide by the spread of its noise."""
        model = made(replace(SMALL, tail=1, preprocessing="centre"), Schema((1, 8, 8), levels=256))
        x = 128 + 60 * torch.rand(32, 1, 8, 8)
        x[:, :, 0, 0] = torch.rand(32, 1)  # blank but for the noise of dequantisation
        model(x)
        model.eval()
        ordinary, bright = x[:1].clone(), x[:1].clone()
        bright[:, :, 0, 0] = 200.0
        nats = (model.log_prob(ordinary) - model.log_prob(bright)).item()
        assert abs(nats) < 100

    def test_after_splits_the_code_is_already_flat(self):
        model = made(replace(SMALL, tail=1, factor_out=True))
        assert type(model.transform) is Chain
        assert kinds(model.transform) == ["Multiscale", "ResidualBlock"]
        assert type(list(model.transform[0])[-1][-1]) is ActNorm  # the last one comes before the tail

    def test_a_table_needs_no_flattening(self):
        model = made(replace(SMALL, blocks=(1,), tail=1), Schema((5,), columns=tuple("abcde")))
        assert "Flatten" not in kinds(model.transform)

    def test_without_a_tail_nothing_is_flattened(self):
        assert not [m for m in made(SMALL).modules() if isinstance(m, Flatten)]

    def test_the_heads_of_a_classifier_and_a_hybrid_take_the_flat_code(self):
        schema = replace(DIGITS, classes=("a", "b"))
        for purpose in ("classification", "hybrid"):
            model = build(replace(SMALL, tail=1, factor_out=True), schema, purpose)
            assert model.head.layers[0].in_features == 64


class TestLastScale:
    @pytest.mark.parametrize("network", [replace(SMALL, blocks=(1,)), replace(SMALL, blocks=(1,), tail=1)])
    def test_last_scale_multiplies_the_initial_g(self, network):
        full, small = made(network), made(replace(network, last_scale=0.1))
        for a, b in zip(full.modules(), small.modules(), strict=True):
            if isinstance(a, ResidualBlock):
                layers = [[m for m in block.g if cap_of(m) is not None] for block in (a, b)]
                raw = [[m.parametrizations.weight.original for m in own] for own in layers]
                torch.testing.assert_close(raw[1][-1], 0.1 * raw[0][-1])
                torch.testing.assert_close(layers[1][-1].bias, 0.1 * layers[0][-1].bias)
                assert all(torch.equal(x, y) for x, y in zip(raw[0][:-1], raw[1][:-1], strict=True))

    def test_g_itself_where_nothing_bites(self):
        """Layers within their norm are not scaled by the constraint, so that g(x) is a tenth of what it was."""
        network = replace(SMALL, blocks=(1,), lipschitz=0.99)
        blocks = [
            next(m for m in made(n).modules() if isinstance(m, ResidualBlock)).eval()
            for n in (network, replace(network, last_scale=0.1))
        ]
        x = normal(3, 4, 4, 4, dtype=torch.float32)
        torch.testing.assert_close(blocks[1].g(x), 0.1 * blocks[0].g(x))


SHAPES = {
    "cifar10-flow": [(12, 16, 16), (24, 8, 8), (48, 4, 4)],
    "cifar10-flow-appendix": [(3, 32, 32), (12, 16, 16), (48, 8, 8)],
    "cifar10-flow-modern": [(3, 32, 32), (12, 16, 16), (48, 8, 8), (3072,)],
    "cifar10-flow-principal": [(12, 16, 16), (48, 8, 8), (192, 4, 4)],
    "mnist-flow": [(1, 28, 28), (4, 14, 14), (16, 7, 7)],
    "mnist-flow-released": [(4, 14, 14), (8, 7, 7)],
    "mnist-flow-small": [(4, 14, 14), (16, 7, 7), (784,)],
    "cifar10-flow-noise": [(12, 16, 16), (48, 8, 8), (192, 4, 4)],
    "mnist-flow-noise": [(4, 14, 14), (16, 7, 7), (784,)],
}


@cache
def shaped(name):
    schema = schema_of(PRESETS[name].data.source)
    return made(tiny(name), schema), schema


@pytest.mark.parametrize("name", NAMES)
class TestPresets:
    def test_the_blocks_act_on_the_shapes_of_the_paper(self, name):
        model, schema = shaped(name)
        assert [at for _, _, at in residual_blocks(model, schema.shape)] == SHAPES[name]

    def test_an_actnorm_before_every_block_but_those_of_the_tail_and_one_more(self, name):
        model, _ = shaped(name)
        blocks = [m for m in model.modules() if isinstance(m, ResidualBlock)]
        tail = min(1, PRESETS[name].network.tail)
        assert sum(isinstance(m, ActNorm) for m in model.modules()) == len(blocks) - tail + 1

    def test_the_base_is_a_learned_normal_or_a_mixture_of_them(self, name):
        model, schema = shaped(name)
        sizes, components = [p.numel() for p in model.base.parameters()], PRESETS[name].network.components
        dimension = schema.shape[0] * schema.shape[1] * schema.shape[2]
        assert sorted(sizes) == [
            *([components] if components > 1 else []),
            components * dimension,
            components * dimension,
        ]
        assert components == (10 if name == "mnist-flow-noise" else 1)

    def test_nothing_but_flips_is_changed_in_the_data(self, name):
        data = PRESETS[name].data
        assert (data.shift, data.cutout) == (0, 0)
        assert data.flip == (data.source == "cifar10")

    @pytest.mark.no_cover
    def test_three_steps_on_digits_and_then_everything_holds(self, name):
        """Trained on 64 dimensions, where the determinant is linear algebra: likelihood, proof and inverse."""
        experiment = PRESETS[name]
        model = made(tiny(name))
        before = [p.detach().clone() for p in model.parameters()]
        objective = ObjectiveSettings("density").build_objective(model, DIGITS.levels)
        settings = replace(experiment.training, steps=3, epochs=0, batch=8)
        metrics = []
        trained = train(
            objective, Batches(digits(), 8).starting_at(0), settings, generator=torch.Generator().manual_seed(0),
            report=lambda *a: metrics.append(float(a[2]["bits/dim"])),
        )  # fmt: skip
        assert len(metrics) == 3
        assert all(0 < f < 20 for f in metrics)
        assert all(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))

        flow = trained.double().eval()
        tighten_(flow, DIGITS.shape)
        assert certify(flow, DIGITS.shape).passed
        x = digits(2).x.double() + 0.5
        j = dense_jacobian(flow.transform, x)
        expected = flow.base.log_prob(flow.transform(x)) + torch.linalg.slogdet(j).logabsdet
        exact = flow.log_prob(x, estimator=Exact())
        torch.testing.assert_close(exact, expected, atol=1e-8, rtol=1e-10)
        generator = torch.Generator().manual_seed(1)
        drawn = torch.stack(
            [flow.log_prob(x, estimator=PowerSeries(terms=24), generator=generator) for _ in range(9)]
        ).detach()
        assert ((drawn.mean(0) - exact).abs() < 6 * drawn.std(0) / 3 + 1e-3).all()
        torch.testing.assert_close(flow.transform.inverse(flow.transform(x)), x, atol=1e-6, rtol=0)


def test_blocks_and_coefficients():
    networks = {name: PRESETS[name].network for name in NAMES}
    assert {name: (n.blocks, n.width, n.terms) for name, n in networks.items()} == {
        "cifar10-flow": ((16, 16, 16), 512, 5),
        "cifar10-flow-appendix": ((32, 32, 32), 512, 5),
        "cifar10-flow-modern": ((16, 16, 16), 128, 2),
        "cifar10-flow-principal": ((28, 8, 4), 512, 4),
        "mnist-flow": ((32, 32, 32), 32, 10),
        "mnist-flow-released": ((16, 16), 32, 10),
        "mnist-flow-small": ((24, 8), 128, 4),
        "cifar10-flow-noise": ((28, 8, 4), 512, 4),
        "mnist-flow-noise": ((28, 4), 256, 4),
    }
    principal, noisy = networks["cifar10-flow-principal"], networks["cifar10-flow-noise"]
    assert noisy.dequantiser > 0
    assert replace(noisy, dequantiser=0) == principal
    assert networks["mnist-flow-noise"].dequantiser > 0
    assert networks["mnist-flow-noise"].alpha < 1e-3 / 256, "a blank pixel's noise must be free to be log-normal"
    paper = ("cifar10-flow", "cifar10-flow-appendix", "mnist-flow", "mnist-flow-released")
    assert all(networks[name].lipschitz == pytest.approx(0.9**3) for name in paper)
    assert all((networks[name].activation, networks[name].kernels) == ("elu", (3, 1, 3)) for name in paper)
    modern = networks["cifar10-flow-modern"]
    assert (modern.branch, modern.kernels, modern.lipschitz) == ("dense", (3, 3, 3, 1), 0.98)
    assert (modern.activation, modern.estimator, modern.tail) == ("lipswish", "roulette", 4)
    assert PRESETS["cifar10-flow-modern"].training.average == 0.999


@pytest.mark.no_cover
@pytest.mark.slow
def test_every_layer_of_the_modern_one_has_the_norm_098():
    model, _ = shaped("cifar10-flow-modern")
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert {cap_of(m).coefficient for m in convolutions} == {0.98}
    assert all(block.bound(at).value <= 0.98 for _, block, at in residual_blocks(model, (3, 32, 32)))


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("cifar10-flow", ((6, 16, 16), (12, 8, 8), (48, 4, 4))),
        ("mnist-flow-released", ((2, 14, 14), (8, 7, 7))),
    ],
)
def test_half_of_the_channels_leaves_after_each_scale_of_the_released_shape(name, codes):
    model, _ = shaped(name)
    assert isinstance(model.transform, Multiscale)
    assert model.transform.code_shapes == codes


def test_digits_have_no_third_scale_of_the_released_shape():
    network = tiny("mnist-flow-released")
    with pytest.raises(ValueError, match="must be multiples of 8; got 28 x 28"):
        made(replace(network, blocks=(1, 1, 1)), schema_of("mnist"))
    flow = made(network, schema_of("mnist")).double().eval()
    x = 256 * torch.rand(2, 1, 28, 28, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(flow.transform.inverse(flow.transform(x)), x, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_the_flow_that_ships_is_small():
    """Weights, and what power iteration keeps beside them."""
    model = made(PRESETS["mnist-flow-small"].network, schema_of("mnist"))
    model(256 * torch.rand(2, 1, 28, 28)).sum().backward()  # every layer has met its size
    assert sum(t.numel() * t.element_size() for t in model.state_dict().values()) < 12 * 2**20

"""tr J in closed form: that of the dense Jacobian, and what it takes off the noise of a certified log-determinant."""

import math

import pytest
import torch
from torch import nn

from iresnet import (
    CertifiedSeries,
    Chain,
    Exact,
    LipSwish,
    MaxMin,
    PowerSeries,
    ResidualBlock,
    Sine,
    contractive_convnet,
    contractive_mlp,
)
from iresnet.branch import linearise
from iresnet.lipschitz import Concatenated
from iresnet.logdet import Jacobian
from tests.zoo import DOUBLE, UserNet, contraction, dense_jacobian, normal, rouse_

ACTIVATIONS = {
    "elu": nn.ELU,
    "elu 0.4": lambda: nn.ELU(0.4),
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "softplus": lambda: nn.Softplus(2.0, 40),
    "sine": lambda: Sine(2.5),
    "lipswish": lambda: LipSwish(1.7),
    "none": nn.Identity,
}


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def network(*layers):
    torch.manual_seed(0)
    return nn.Sequential(*layers).double()


def conv(a, b, kernel, **options):
    return nn.Conv2d(a, b, kernel, **{"padding": kernel // 2, **options})


def two(kernels, activation=nn.ELU):
    return network(conv(2, 5, kernels[0]), activation(), conv(5, 2, kernels[1]))


def assert_trace(g, x, *context):
    """Within 1e-12 of the sum over the diagonal of the dense Jacobian."""
    with torch.no_grad():
        got = linearise(g, x, *context)[1].trace()
    expected = torch.stack(
        [dense_jacobian(lambda y, c=c: g(y, *c), row[None])[0].trace() for row, *c in one(x, *context)]
    )
    assert got.shape == (len(x),)
    assert expected.abs().min() > 1e-5
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def one(x, *context):
    """Every sample, with its context as a batch of one."""
    return [(x[i], *(c[i : i + 1] for c in context)) for i in range(len(x))]


class TestTheTraceIsThatOfTheDenseJacobian:
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    @pytest.mark.parametrize("kind", ["linear", "conv"])
    def test_with_every_elementwise_activation(self, kind, activation):
        make = ACTIVATIONS[activation]
        g = two((3, 3), make) if kind == "conv" else network(nn.Linear(4, 7), make(), nn.Linear(7, 4, bias=False))
        assert_trace(g, normal(3, *((2, 4, 5) if kind == "conv" else (4,)), seed=1))

    @pytest.mark.parametrize("size", [(1, 1), (2, 3), (1, 6), (6, 5)])
    @pytest.mark.parametrize("kernels", [(3, 3), (5, 3), (1, 3), (3, 5), (3, 1), (1, 1)])
    def test_with_every_pair_of_kernels_and_at_every_border(self, kernels, size):
        assert_trace(two(kernels), normal(2, 2, *size, seed=1))

    @pytest.mark.parametrize(
        "g",
        [
            lambda: network(conv(2, 3, 3, padding=2), nn.ELU(), conv(3, 2, 3, padding=0)),
            lambda: network(conv(2, 3, 2, padding=1), nn.ELU(), conv(3, 2, 2, padding=0)),
            lambda: network(nn.Conv2d(2, 3, (3, 1), padding=(1, 0)), nn.ELU(), nn.Conv2d(3, 2, (1, 5), padding=(0, 2))),
        ],
        ids=["wider inside", "even kernels", "oblong kernels"],
    )
    def test_whatever_the_size_of_the_hidden_map(self, g):
        assert_trace(g(), normal(2, 2, 3, 4, seed=1))

    def test_in_one_and_in_three_dimensions(self):
        line = network(nn.Conv1d(2, 3, 3, padding=1), nn.ELU(), nn.Conv1d(3, 2, 5, padding=2))
        assert_trace(line, normal(2, 2, 4, seed=1))
        volume = network(nn.Conv3d(1, 2, 3, padding=1), nn.ELU(), nn.Conv3d(2, 1, 3, padding=1))
        assert_trace(volume, normal(2, 1, 2, 3, 2, seed=1))

    def test_with_activations_at_the_ends(self):
        ends = network(nn.ELU(), conv(2, 5, 3), nn.Tanh(), Sine(2.0), conv(5, 2, 3), LipSwish())
        assert_trace(ends, normal(3, 2, 3, 4, seed=1))
        assert_trace(network(nn.ELU(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)), normal(3, 4, seed=1))

    def test_without_activations(self):
        assert_trace(network(conv(2, 5, 3), conv(5, 2, 3)), normal(3, 2, 3, 4, seed=1))
        assert_trace(network(nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(3, 4)), normal(3, 4, seed=1))

    def test_of_three_linear_layers(self):
        layers = nn.Linear(4, 6), nn.ELU(), nn.Linear(6, 5), Sine(2.0), nn.Linear(5, 4)
        assert_trace(network(*layers), normal(3, 4, seed=1))

    @pytest.mark.parametrize("size", [(1, 1), (2, 3), (1, 6), (6, 5)])
    @pytest.mark.parametrize("kernels", [(3, 3), (5, 3), (1, 3), (3, 1), (1, 1)])
    def test_of_three_convolutions_the_middle_one_pointwise(self, kernels, size):
        first, last = kernels
        g = network(conv(2, 5, first), nn.ELU(), conv(5, 4, 1), Sine(2.0), conv(4, 2, last))
        assert_trace(g, normal(3, 2, *size, seed=1))

    @pytest.mark.parametrize("inside", [(), (nn.Tanh(), nn.ELU())], ids=["no activation", "two activations"])
    def test_of_three_convolutions_with_other_activations(self, inside):
        layers = conv(2, 5, 3, padding=2), *inside, conv(5, 4, 1), nn.ELU(), conv(4, 2, 3, padding=0)
        assert_trace(network(*layers), normal(3, 2, 4, 3, seed=1))
        assert_trace(network(conv(2, 5, 3), *inside, conv(5, 4, 1), conv(4, 2, 3)), normal(3, 2, 4, 3, seed=1))
        line = network(nn.Conv1d(2, 3, 3, padding=1), nn.ELU(), nn.Conv1d(3, 4, 1), nn.Conv1d(4, 2, 5, padding=2))
        assert_trace(line, normal(2, 2, 4, seed=1))

    def test_of_constrained_layers_it_has_the_weights_that_the_forward_pass_has(self):
        g = rouse_(contractive_convnet(2, 6, kernels=(3, 3), lipschitz=0.8)).double().eval()
        assert_trace(g, normal(3, 2, 4, 4, seed=1))
        g = rouse_(contractive_mlp(5, (7, 6), context=2)).double().eval()
        assert_trace(g, normal(3, 5, seed=1), normal(3, 2, seed=2))

    def test_in_float32_and_with_channels_last(self):
        g, x = two((3, 3)), normal(3, 2, 6, 5, seed=1)
        with torch.no_grad():
            expected = linearise(g, x)[1].trace()
            last = linearise(g, x.contiguous(memory_format=torch.channels_last))[1].trace()
            single = linearise(g.float(), x.float())[1].trace()
        torch.testing.assert_close(last, expected, rtol=1e-12, atol=1e-12)
        assert single.dtype == torch.float32
        torch.testing.assert_close(single.double(), expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize(
        ("g", "shape"),
        [
            (lambda: network(conv(2, 4, 3), MaxMin(), conv(4, 2, 3)), (2, 3, 3)),
            (lambda: network(conv(2, 4, 3), nn.ELU(), conv(4, 4, 3), nn.ELU(), conv(4, 2, 3)), (2, 3, 3)),
            (lambda: network(nn.ELU(), conv(2, 4, 3), nn.ELU(), conv(4, 4, 1), nn.ELU(), conv(4, 2, 3)), (2, 3, 3)),
            (lambda: network(conv(2, 4, 3, padding=0), conv(4, 4, 1, padding=1), conv(4, 2, 3)), (2, 3, 3)),
            (lambda: network(conv(2, 4, 3, groups=2), nn.ELU(), conv(4, 2, 3)), (2, 3, 3)),
            (lambda: network(conv(2, 4, 3, dilation=2, padding=2), nn.ELU(), conv(4, 2, 3)), (2, 3, 3)),
            (lambda: network(nn.ELU(), nn.Linear(4, 6), nn.ELU(), nn.Linear(6, 5), nn.ELU(), nn.Linear(5, 4)), (4,)),
            (lambda: network(Concatenated(nn.Linear(4, 6)), nn.ELU(), nn.Linear(10, 4)), (4,)),
            (lambda: UserNet(4).double(), (4,)),
        ],
        ids=[
            "maxmin",
            "three 3 x 3",
            "end of three convolutions",
            "padding inside",
            "groups",
            "dilation",
            "end of three",
            "dense",
            "free-form",
        ],
    )
    def test_elsewhere_none_is_known(self, g, shape):
        assert linearise(g(), normal(2, *shape))[1].trace is None


class TestACertifiedSeries:
    def test_takes_the_trace_for_its_first_term_alone(self):
        a, x = contraction(6, 0.6), normal(5, 6)
        known = Jacobian(lambda v: v @ a, trace=lambda: torch.full((5,), 7.0, dtype=DOUBLE))
        with torch.no_grad():
            got, plain = (CertifiedSeries(1e-6)(j, x, lipschitz=0.6, generator=seeded(0)) for j in (known, linear(a)))
            one = PowerSeries(1)(linear(a), x, generator=seeded(0))
        torch.testing.assert_close(got - plain, 7.0 - one)

    def test_leaves_training_and_named_series_as_they_are(self):
        block, x = small(), normal(3, 2, 4, 4, seed=1)
        with torch.no_grad():
            known = linearise(block.g, x)[1]
            plain = Jacobian(known.vjp)
            pair = [PowerSeries(5)(j, x, generator=seeded(0)) for j in (known, plain)]
            assert torch.equal(*pair)
        pair = [CertifiedSeries(1e-3)(j, x, lipschitz=0.9, generator=seeded(0)) for j in (known, plain)]
        assert torch.equal(*pair)

    @pytest.mark.no_cover
    @pytest.mark.parametrize("shared", [False, True])
    @torch.no_grad()
    def test_spreads_less_about_the_same_mean(self, shared):
        block, x = small(), normal(2, 2, 4, 4, seed=1)
        jacobian, truth = linearise(block.g, x)[1], block.forward_and_logdet(x, estimator=Exact())[1]
        drawn = {}
        for name, j in (("exact", jacobian), ("probes", Jacobian(jacobian.vjp))):
            series, generator = CertifiedSeries(1e-9, shared=shared), seeded(0)
            drawn[name] = torch.stack([series(j, x, lipschitz=0.5, generator=generator) for _ in range(400)])
            error = drawn[name].std(0) / math.sqrt(400)
            assert ((drawn[name].mean(0) - truth).abs() <= 4 * error).all()
        assert (drawn["exact"].std(0) < drawn["probes"].std(0) / 3).all()

    @torch.no_grad()
    def test_gives_a_row_the_same_number_alone_and_among_others(self):
        chain, x = Chain(small(), small(1)).eval(), normal(3, 2, 7, 5, seed=1)
        x = x * torch.tensor([0.1, 1.0, 5.0], dtype=DOUBLE).reshape(3, 1, 1, 1)
        _, together = chain.forward_and_logdet(x)
        assert together.unique().numel() == 3
        for i in range(3):
            _, alone = chain.forward_and_logdet(x[i : i + 1])
            torch.testing.assert_close(alone[0], together[i], rtol=1e-12, atol=1e-12)


def linear(a):
    return Jacobian(lambda v: v @ a)


def small(seed=0):
    """A block whose Jacobians are far smaller than one, as they are in trained flows: the first term dominates."""
    block = rouse_(ResidualBlock(contractive_convnet(2, 8, kernels=(3, 3), lipschitz=0.5, activation=Sine)), seed)
    return block.double().eval()

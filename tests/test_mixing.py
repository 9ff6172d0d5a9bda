"""InvertibleConv1x1 and Flatten against linear algebra; the laws of all transforms are in test_laws.py."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from iresnet.data.builtin import schema_of
from iresnet.models import Network, build
from iresnet.train.objective import MaximumLikelihood
from iresnet.transform import ISOMETRY
from iresnet.transforms.elementary import Flatten
from iresnet.transforms.mixing import InvertibleConv1x1, PrincipalAxes
from tests.zoo import DOUBLE, normal

SHAPES = [(3,), (3, 5), (3, 2, 4), (3, 2, 2, 2)]


def mixing(channels=3, seed=0, scale=0.3):
    torch.manual_seed(seed)
    mix = InvertibleConv1x1(channels).double()
    with torch.no_grad():
        mix.factors.add_(scale * normal(channels, channels, seed=seed))
    return mix.requires_grad_(False)


class TestStart:
    @pytest.mark.parametrize("channels", [1, 2, 7, 48])
    def test_it_is_a_rotation(self, channels):
        w = InvertibleConv1x1(channels).weight.detach().double()
        torch.testing.assert_close(w @ w.T, torch.eye(channels, dtype=DOUBLE), atol=1e-5, rtol=0)
        assert float(torch.linalg.det(w)) == pytest.approx(1, abs=1e-4)
        assert channels == 1 or float((w - torch.eye(channels)).abs().max()) > 0.1

    def test_it_follows_the_global_generator(self):
        a, b = mixing(scale=0), mixing(scale=0)
        assert torch.equal(a.weight, b.weight)
        assert not torch.allclose(InvertibleConv1x1(3).double().weight.detach(), a.weight)

    def test_initial_rotations_are_uniformly_distributed(self):
        """The mean of every entry is zero: QR alone would favour a sign."""
        torch.manual_seed(0)
        w = torch.stack([InvertibleConv1x1(3).weight.detach() for _ in range(400)])
        assert float(w.mean(0).abs().max()) < 4 * (1 / 3) ** 0.5 / 20

    def test_nothing_of_the_matrix_is_stored_twice(self):
        assert [p.shape for p in InvertibleConv1x1(5).parameters()] == [(5, 5)]


class TestMap:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_every_position_is_multiplied_by_the_weight(self, shape):
        mix, x = mixing(), normal(4, *shape)
        expected = torch.einsum("ij,bj...->bi...", mix.weight, x)
        torch.testing.assert_close(mix(x), expected)

    def test_it_is_a_convolution(self):
        mix, x = mixing(), normal(4, 3, 5, 5).contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(mix(x), F.conv2d(x, mix.weight[:, :, None, None]))

    @pytest.mark.parametrize("shape", SHAPES)
    def test_the_determinant_counts_every_position(self, shape):
        mix, x = mixing(), normal(4, *shape)
        positions = math.prod(shape[1:])
        _, logdet = mix.forward_and_logdet(x)
        expected = positions * torch.linalg.slogdet(mix.weight).logabsdet
        torch.testing.assert_close(logdet, expected.expand(4))
        assert abs(float(expected)) > 1e-2

    @pytest.mark.parametrize("shape", SHAPES)
    def test_the_inverse_is_that_of_the_matrix(self, shape):
        mix, z = mixing(), normal(4, *shape)
        expected = torch.einsum("ij,bj...->bi...", torch.linalg.inv(mix.weight), z)
        torch.testing.assert_close(mix.inverse(z), expected)

    def test_float64_data_get_float64_arithmetic_from_float32_weights(self):
        mix, x = mixing(16).float(), normal(4, 16, 3, 3)
        torch.testing.assert_close(mix.inverse(mix(x)), x, atol=1e-13, rtol=0)
        assert mix(x).dtype == DOUBLE

    def test_autocast_does_not_change_the_result(self):
        """The log-determinant is that of the stored weight, so the map must be too."""
        mix, x = mixing().float(), normal(4, 3, 5, 5, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            z = mix(x)
            back = mix.inverse(z)
        assert torch.equal(z, mix(x))
        torch.testing.assert_close(back, x, atol=1e-5, rtol=0)

    def test_any_values_of_the_parameters_leave_it_invertible(self):
        mix = mixing(scale=3.0)
        x = normal(4, 3)
        torch.testing.assert_close(mix.inverse(mix(x)), x, atol=1e-9, rtol=1e-9)

    def test_the_state_dict_holds_the_whole_map(self):
        mix, other = mixing(5), mixing(5, seed=9)
        x = normal(2, 5)
        assert not torch.allclose(other(x), mix(x))
        other.load_state_dict(copy.deepcopy(mix.state_dict()))
        assert torch.equal(other(x), mix(x))


class TestStretch:
    def test_the_singular_values_of_the_weight(self):
        mix = mixing(6)
        sigma, s = torch.linalg.svdvals(mix.weight), mix.stretch((6, 2, 2))
        assert s.forward == pytest.approx(float(sigma.max()), rel=1e-6)
        assert s.inverse == pytest.approx(1 / float(sigma.min()), rel=1e-6)
        assert s.forward > float(sigma.max())
        assert s.inverse > 1 / float(sigma.min())
        assert s.logdet == pytest.approx((4 * float(mix.log_s.sum()),) * 2)
        assert s.proven

    def test_without_a_shape_there_is_no_range_of_the_determinant(self):
        assert mixing().stretch().logdet == (-math.inf, math.inf)

    def test_a_matrix_that_is_singular_in_float64_has_no_bound(self):
        mix = mixing()
        with torch.no_grad():
            mix.factors.diagonal()[0] = -40.0
        assert mix.stretch().inverse == math.inf


class TestFlatten:
    def test_flatten_and_its_inverse(self):
        flat, x = Flatten((2, 3, 2)), normal(4, 2, 3, 2)
        z, logdet = flat.forward_and_logdet(x)
        assert torch.equal(z, x.reshape(4, 12))
        assert torch.equal(flat.inverse(z), x)
        assert torch.equal(logdet, torch.zeros(4, dtype=DOUBLE))
        assert flat.stretch((2, 3, 2)) == ISOMETRY

    def test_it_prints_its_shape(self):
        assert repr(Flatten((2, 3))) == "Flatten((2, 3))"
        assert repr(InvertibleConv1x1(4)) == "InvertibleConv1x1(4)"


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (lambda: InvertibleConv1x1(0), "channels must be at least 1; got 0. Give the size of dimension 1 of the input"),
        (
            lambda: mixing()(normal(2, 4, 5, 5)),
            r"x must have shape \(batch, 3, ...\) for InvertibleConv1x1\(3\); got \(2, 4, 5, 5\). Build Inv",
        ),
        (lambda: mixing().inverse(normal(2, 4)), r"z must have shape \(batch, 3, ...\) .*; got \(2, 4\)."),
        (lambda: mixing()(torch.ones(2, 3).long()), "x must be a floating-point tensor; got torch.int64."),
        (lambda: Flatten(()), r"shape must list positive sizes; got \(\). Give the shape of one sample."),
        (lambda: Flatten((2, 0)), r"shape must list positive sizes; got \(2, 0\)."),
        (lambda: Flatten((2, 3))(normal(4, 3, 2)), r"x must have shape \(batch, 2, 3\); got \(4, 3, 2\)."),
        (lambda: Flatten((2, 3)).inverse(normal(4, 5)), r"z must have shape \(batch, 6\); got \(4, 5\)."),
        (
            lambda: Flatten((2, 3)).output_shape((3, 2)),
            r"input_shape must be \(2, 3\) for this Flatten; got \(3, 2\).",
        ),
    ],
)
def test_wrong_input_is_refused(act, sentence):
    with pytest.raises(ValueError, match=sentence):
        act()


class TestPrincipalAxes:
    def test_the_first_batch_is_decorrelated_with_the_smallest_variance_first(self):
        x = torch.einsum(
            "ij,bjhw->bihw", torch.tensor([[3.0, 0, 0], [2, 1, 0], [1, 1, 0.1]], dtype=DOUBLE), normal(64, 3, 4, 4)
        )
        axes = PrincipalAxes(3).double()
        z = axes(x).detach()
        covariance = torch.cov(z.transpose(0, 1).flatten(1))
        expected = torch.linalg.eigvalsh(torch.cov(x.transpose(0, 1).flatten(1)))
        torch.testing.assert_close(covariance, expected.diag(), atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(axes.weight @ axes.weight.T, torch.eye(3, dtype=DOUBLE), atol=1e-9, rtol=0)

    def test_only_the_first_training_batch_initialises_the_axes(self):
        axes = PrincipalAxes(3).double()
        before = axes.weight.detach().clone()
        axes.eval()(normal(16, 3))
        assert axes.awaits_data is False
        assert torch.equal(axes.weight, before)
        axes.train()(normal(16, 3, seed=1))
        once = axes.weight.detach().clone()
        axes(normal(8, 3, seed=2))
        assert not torch.allclose(once, before)
        assert torch.equal(axes.weight, once)

    def test_a_batch_that_is_too_small_leaves_the_rotation(self):
        """The axes of 7 rows in 8 directions include one of no width at all."""
        axes = PrincipalAxes(8).double()
        before = axes.weight.detach().clone()
        axes(normal(7, 8))
        assert torch.equal(axes.weight, before)
        assert not axes.awaits_data

    def test_a_loaded_transform_is_not_initialised_again(self):
        axes, other = PrincipalAxes(4).double(), PrincipalAxes(4).double()
        axes(normal(16, 4))
        other.load_state_dict(axes.state_dict())
        other(normal(16, 4, seed=5))
        assert torch.equal(other.weight, axes.weight)

    def test_a_network_starts_from_a_model_of_its_linear_part(self):
        """On smooth images, the density at the start is that of a Gaussian of patches, not of independent pixels."""
        x = (128 + 20 * normal(64, 3, 1, 1).cumsum(1) + 3 * normal(64, 3, 8, 8)).clamp(0, 255).to(torch.uint8)
        schema = replace(schema_of("cifar10"), shape=(3, 8, 8))
        bits = []
        for principal in (False, True):
            torch.manual_seed(0)
            network = Network(
                blocks=(1, 1), width=8, last_scale=0.1, preprocessing="centre", mixing=True, principal=principal
            )
            objective = MaximumLikelihood(build(network, schema, "density", x), schema.levels)
            bits.append(float(objective(x, None, generator=torch.Generator().manual_seed(0))[0].detach()))
        assert bits[1] < bits[0] - 0.5

    def test_it_is_an_option_of_mixing(self):
        with pytest.raises(ValueError, match="needs mixing = true"):
            Network(principal=True)

"""Norms of layers against the singular values of their dense matrices."""

import itertools
import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from iresnet import LipschitzConv2d, LipschitzLinear, PowerIteration, spectral
from iresnet.lipschitz import release_
from iresnet.spectral import Geometry, NoBoundKnown, fourier, operator
from iresnet.spectral.fourier import largest_singular_values, sample_symbols, symbols, to_stride_one
from tests.zoo import DOUBLE, contraction, normal

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def dense(layer, shape):
    """The layer's matrix, column by column, from nothing but its forward pass."""
    n = math.prod(shape)
    layer = layer.double()
    zero = layer(torch.zeros(1, *shape, dtype=DOUBLE))
    return (layer(torch.eye(n, dtype=DOUBLE).reshape(n, *shape)) - zero).flatten(1).T.detach()


def true_norm(layer, shape):
    return torch.linalg.matrix_norm(dense(layer, shape), 2).item()


def pick(random, *choices):
    return choices[int(torch.randint(len(choices), (), generator=random))]


def conv(random, axes, *, same=False, stride=False, dilation=False, groups=False, circular=False, tiny=False):
    """A random convolution and an input shape that it accepts."""
    while True:
        kernel = tuple(pick(random, 1, 2, 3, 3, 4, 5) for _ in range(axes))
        d = tuple(pick(random, 1, 2, 3) if dilation else 1 for _ in range(axes))
        s = tuple(pick(random, 1, 2, 3) if stride else 1 for _ in range(axes))
        largest = {1: 16, 2: 9, 3: 4}[axes]
        size = tuple(int(torch.randint(1, 4 if tiny else largest + 1, (), generator=random)) for _ in range(axes))
        padding = "same" if same else tuple(pick(random, 0, 1, k // 2, k - 1, k) for k in kernel)
        g = pick(random, 1, 2) if groups else 1
        mode = "circular" if circular else "zeros"
        reach = [e * (k - 1) for e, k in zip(d, kernel, strict=True)]
        pads = [(r // 2, r - r // 2) for r in reach] if same else [(p, p) for p in padding]
        if any(n + sum(p) <= r for n, p, r in zip(size, pads, reach, strict=True)):
            continue
        if circular and any(max(p) > n for n, p in zip(size, pads, strict=True)):
            continue
        torch.manual_seed(int(torch.randint(1 << 30, (), generator=random)))
        inputs, outputs = g * pick(random, 1, 2, 3), g * pick(random, 1, 2, 3)
        layer = CONVOLUTIONS[axes](inputs, outputs, kernel, s, padding, d, g, padding_mode=mode)
        if pick(random, True, False):  # smooth kernels come closest to their bounds
            with torch.no_grad():
                layer.weight.abs_()
        return layer, (inputs, *size)


KINDS = {
    "conv1d": {"axes": 1},
    "conv2d": {"axes": 2},
    "conv3d": {"axes": 3},
    "same": {"axes": 2, "same": True},
    "stride-1d": {"axes": 1, "stride": True},
    "stride": {"axes": 2, "stride": True},
    "dilation": {"axes": 2, "dilation": True},
    "stride-dilation": {"axes": 2, "stride": True, "dilation": True},
    "groups": {"axes": 2, "groups": True, "stride": True},
    "circular-1d": {"axes": 1, "circular": True, "stride": True, "dilation": True},
    "circular": {"axes": 2, "circular": True},
    "circular-stride-dilation": {"axes": 2, "circular": True, "stride": True, "dilation": True},
    "circular-same": {"axes": 2, "circular": True, "same": True},
    "tiny": {"axes": 2, "tiny": True, "stride": True, "dilation": True},
    "everything": {"axes": 2, "stride": True, "dilation": True, "groups": True},
}


CONV = Geometry((1, 1), (1, 1), (1, 1), (1, 1))
#: (geometry, shape of the weight, size of the input), one for every way to a bound.
EXTREMES = {
    "vector": (Geometry(), (1, 5), ()),
    "linear": (Geometry(), (33, 34), ()),
    "dense": (CONV, (2, 2, 3, 3), (4, 4)),
    "fourier": (CONV, (2, 2, 3, 3), None),
    "wide": (CONV, (32, 33, 3, 3), (5, 5)),
    "circular": (Geometry((1, 1), (1, 1), (1, 1), (1, 1), circular=True), (2, 2, 3, 3), (20, 20)),
}


def times_two_to(x, power):
    """In two steps: torch's ldexp knows no factor of 2^1060."""
    return torch.ldexp(torch.ldexp(x, torch.tensor(power // 2)), torch.tensor(power - power // 2))


def layers_of(kind, count, seed=0):
    random = torch.Generator().manual_seed(seed)
    return [conv(random, **KINDS[kind]) for _ in range(count)]


def parts(layer):
    return Geometry.of(layer), layer.weight.detach().double()[None]


class TestOperator:
    @pytest.mark.parametrize("kind", KINDS)
    def test_apply_is_the_layer_without_its_bias(self, kind):
        for layer, shape in layers_of(kind, 6):
            geometry, weight = parts(layer.double())
            x = normal(1, *shape)
            expected = layer(x) - layer.bias.view(-1, *(1,) * geometry.axes)
            torch.testing.assert_close(spectral.apply_operator(weight, geometry, x), expected.detach())

    @pytest.mark.parametrize("multiplies", [False, True])
    @pytest.mark.parametrize("last", [False, True])
    @pytest.mark.parametrize("kind", KINDS)
    def test_adjoint_and_derivative_are_those_of_autograd(self, kind, last, multiplies, monkeypatch):
        """By convolutions, and where stacks of them are slow (on a GPU) by products of matrices."""
        for layer, shape in layers_of(kind, 6):
            geometry, weight = parts(layer)
            monkeypatch.setattr(operator, "_grouped_conv_is_slow", lambda _: False)
            x = normal(1, *shape).requires_grad_()
            w = weight.clone().requires_grad_()
            y = spectral.apply_operator(w, geometry, x)
            u = normal(*y.shape, seed=1)
            expected = torch.autograd.grad((y * u).sum(), (x, w))
            monkeypatch.setattr(operator, "_grouped_conv_is_slow", lambda _: multiplies)
            if last and weight.dim() > 3:  # channels last in memory
                weight = weight.movedim(2, -1).contiguous().movedim(-1, 2)
                w = weight.clone().requires_grad_()
            torch.testing.assert_close(spectral.apply_operator(w, geometry, x), y)
            torch.testing.assert_close(spectral.apply_adjoint(weight, geometry, u, shape[1:]), expected[0])
            torch.testing.assert_close(spectral.weight_gradient(weight, geometry, x.detach(), u), expected[1])

    @pytest.mark.parametrize("kind", KINDS)
    def test_dense_matrix_is_the_operator(self, kind):
        for layer, shape in layers_of(kind, 6):
            geometry, weight = parts(layer)
            torch.testing.assert_close(spectral.dense_matrix(weight[0], geometry, shape[1:]), dense(layer, shape))

    def test_a_stack_is_its_layers(self):
        stack, geometry = normal(4, 3, 2, 3, 3), Geometry((2, 1), (1, 0), (1, 0), (1, 2))
        x = normal(4, 2, 6, 7, seed=1)
        y = spectral.apply_operator(stack, geometry, x)
        back = spectral.apply_adjoint(stack, geometry, y, (6, 7))
        gradient = spectral.weight_gradient(stack, geometry, x, y)
        for i in range(4):
            torch.testing.assert_close(spectral.apply_operator(stack[i : i + 1], geometry, x[i : i + 1])[0], y[i])
            one = slice(i, i + 1)
            torch.testing.assert_close(spectral.apply_adjoint(stack[one], geometry, y[one], (6, 7))[0], back[i])
            torch.testing.assert_close(spectral.weight_gradient(stack[one], geometry, x[one], y[one])[0], gradient[i])

    def test_a_linear_layer_is_its_matrix(self):
        w, x, y = normal(2, 3, 4), normal(2, 4, seed=1), normal(2, 3, seed=2)
        torch.testing.assert_close(spectral.apply_operator(w, Geometry(), x), (w @ x[..., None])[..., 0])
        torch.testing.assert_close(spectral.apply_adjoint(w, Geometry(), y, ()), (w.mT @ y[..., None])[..., 0])
        torch.testing.assert_close(spectral.weight_gradient(w, Geometry(), x, y), y[:, :, None] * x[:, None])


class TestPowerIteration:
    @pytest.mark.no_cover
    @pytest.mark.parametrize("kind", KINDS)
    def test_converges_to_the_largest_singular_value_from_below(self, kind):
        for layer, shape in layers_of(kind, 4):
            truth, estimate = true_norm(layer, shape), spectral.norm_estimate(layer, shape, iterations=2000)
            assert estimate <= truth * (1 + 1e-12)
            assert estimate >= truth * (1 - 1e-3)

    def test_one_step_underestimates(self):
        """Why an estimate is no certificate: cold, one iteration misses by tens of percent."""
        w = normal(1, 64, 64)
        truth = torch.linalg.matrix_norm(w, 2).item()
        sigma, _, _ = spectral.power_iteration(w, Geometry(), spectral.start_vector(w, Geometry(), ()), 1)
        assert sigma.item() < 0.9 * truth
        assert spectral.norm_bounds(w, Geometry(), None).item() >= truth

    def test_g_is_the_gradient_of_sigma(self):
        w = normal(1, 5, 4).requires_grad_()
        sigma, _, g = spectral.power_iteration(w.detach(), Geometry(), spectral.start_vector(w, Geometry(), ()), 500)
        (expected,) = torch.autograd.grad(torch.linalg.matrix_norm(w, 2).sum(), w)
        torch.testing.assert_close(g, expected, atol=1e-9, rtol=0)
        torch.testing.assert_close((w * g).sum(), sigma[0])

    def test_a_zero_operator_keeps_its_start_and_recovers(self):
        zero = torch.zeros(1, 3, 3, dtype=DOUBLE)
        start = spectral.start_vector(zero, Geometry(), ())
        sigma, v, g = spectral.power_iteration(zero, Geometry(), start, 5)
        assert sigma.item() == 0
        assert torch.equal(v, start)
        assert torch.isfinite(g).all()
        assert spectral.power_iteration(torch.eye(3, dtype=DOUBLE)[None], Geometry(), v, 5)[0].item() == pytest.approx(
            1
        )

    def test_settling_stops_by_the_relative_change_of_sigma_in_a_large_space(self):
        """A rule by the change per element would stop at once where there are thousands of elements."""
        layer = nn.Conv2d(4, 4, 3, padding=1)
        estimate = spectral.norm_estimate(layer, (4, 40, 40))
        truth = spectral.norm_estimate(layer, (4, 40, 40), iterations=4000)
        assert estimate > 0.995 * truth

    @pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e10])
    def test_no_epsilon_spoils_a_small_norm(self, scale):
        w = scale * contraction(6, 1.0)[None]
        sigma, _, _ = spectral.converged_power_iteration(w, Geometry(), spectral.start_vector(w, Geometry(), ()))
        assert sigma.item() == pytest.approx(scale, rel=1e-2)
        assert scale <= spectral.norm_bounds(w, Geometry(), None).item() <= scale * (1 + 1e-8)


class TestBound:
    @pytest.mark.parametrize("kind", KINDS)
    def test_never_below_the_true_norm(self, kind):
        for layer, shape in layers_of(kind, 16):
            geometry, weight = parts(layer)
            truth = true_norm(layer, shape)
            assert spectral.norm_bound(layer, shape) >= truth
            assert spectral.fourier_bound(weight, geometry, shape[1:]).item() >= truth * (1 - 1e-12), layer
            assert spectral.cheap_norm_bounds(weight, geometry, shape[1:], 5).item() >= truth * (1 - 1e-12), layer

    @pytest.mark.parametrize("kind", KINDS)
    def test_without_a_size_it_holds_for_every_size(self, kind):
        for layer, shape in layers_of(kind, 2 if kind == "conv3d" else 4, seed=1):
            geometry, weight = parts(layer)
            bound = spectral.norm_bound(layer)
            cheap = spectral.cheap_norm_bounds(weight, geometry, None, 5).item()
            for grow in range(3 if geometry.axes == 3 else 5):
                truth = true_norm(layer, (shape[0], *(n + grow for n in shape[1:])))
                assert truth <= min(bound, cheap * (1 + 1e-12)), (layer, shape, grow)

    @pytest.mark.parametrize("kind", [kind for kind in KINDS if "circular" not in kind])
    def test_under_zero_padding_no_smaller_input_has_a_larger_norm(self, kind):
        """Which lets a layer remember the largest size of each axis, even if they never came together."""
        for layer, shape in layers_of(kind, 3, seed=2):
            norms = {}
            for grow in itertools.product(range(3), repeat=len(shape) - 1):
                size = tuple(n + m for n, m in zip(shape[1:], grow, strict=True))
                norms[grow] = true_norm(layer, (shape[0], *size))
            for small, large in itertools.product(norms, repeat=2):
                if all(a <= b for a, b in zip(small, large, strict=True)):
                    assert norms[small] <= norms[large] * (1 + 1e-12), (layer, shape, small, large)

    def test_without_a_size_it_is_the_supremum(self):
        """|a| + |b| + |c| is approached, never reached, as a line grows."""
        layer = nn.Conv1d(1, 1, 3, padding=1, bias=False)
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([[[0.25, 0.5, 0.25]]]))
        assert true_norm(layer, (1, 60)) < 1 <= spectral.norm_bound(layer) < 1.01

    def test_a_maximum_between_the_points_of_a_coarse_grid_is_covered(self):
        """A kernel tuned to a frequency halfway between two of the 32 points: samples alone would fall short."""
        layer = nn.Conv1d(1, 2, 5, padding=2, bias=False, dtype=DOUBLE)
        phase = 2 * math.pi * 5.5 / 32 * torch.arange(5, dtype=DOUBLE)
        with torch.no_grad():
            layer.weight.copy_(torch.stack([phase.cos(), phase.sin()])[:, None])
        geometry, weight = parts(layer)
        truth = true_norm(layer, (1, 400))
        s, _, size_free = sample_symbols(weight, geometry, (400,), largest=40, coarse=32)
        assert size_free
        assert largest_singular_values(s).max() < 0.998 * truth
        assert truth <= spectral.norm_bound(layer) <= 1.03 * truth

    @pytest.mark.parametrize("kind", ["dilation", "stride-dilation", "circular-stride-dilation", "everything"])
    def test_long_axes_are_sampled_soundly(self, kind):
        """Beyond 40 points the grid is coarse, and a dilation must not fold it onto fewer points."""
        for layer, shape in layers_of(kind, 5, seed=2):
            long = (shape[0], 61, *shape[2:])
            assert spectral.norm_bound(layer, long) >= spectral.norm_estimate(layer, long, iterations=1000)

    @pytest.mark.parametrize("dilation", [2, 3, 4, 6, 8, 12, 16])
    def test_a_dilation_that_divides_the_grid_changes_nothing(self, dilation):
        """Both bounds once sampled a dilated kernel on a grid of which it saw only every d-th point."""
        layer = nn.Conv2d(1, 1, (3, 2), dilation=(dilation, 1), stride=(1, 2))
        plain = nn.Conv2d(1, 1, (3, 2), stride=(1, 2))
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([[[[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]]]]))
            plain.weight.copy_(layer.weight)
        assert spectral.norm_bound(layer) == pytest.approx(spectral.norm_bound(plain))
        truth = spectral.norm_estimate(layer, (1, 30 * dilation, 4), iterations=2000)
        geometry, weight = parts(layer)
        assert truth <= spectral.norm_bound(layer)
        assert truth <= spectral.cheap_norm_bounds(weight, geometry, None, 6).item()

    def test_the_grid_of_the_input_itself_is_not_enough(self):
        """Fourier values on the n x n grid are no bound under zero padding; ours is one for the same kernels."""
        violations = 0
        for seed in range(60):
            torch.manual_seed(seed)
            layer, shape = nn.Conv2d(2, 2, 3, padding=1), (2, 3, 3)
            geometry, weight = parts(layer)
            naive = (
                largest_singular_values(symbols(to_stride_one(weight, geometry, (1, 1), (1, 1)), (3, 3))).max().item()
            )
            truth = true_norm(layer, shape)
            violations += naive < truth * (1 - 1e-6)
            assert spectral.fourier_bound(weight, geometry, shape[1:]).item() >= truth
        assert violations > 0

    @pytest.mark.parametrize(
        ("axes", "kernel", "sizes"), [(1, 3, (8, 17, 32)), (2, 3, (8, 10)), (2, 5, (12, 16)), (2, (1, 3), (8, 10))]
    )
    def test_median_overshoot_is_below_five_percent_for_same_padding(self, axes, kernel, sizes):
        overshoot = []
        for seed in range(12):
            torch.manual_seed(seed)
            channels, n = 2 + seed % 3, sizes[seed % len(sizes)]
            layer = CONVOLUTIONS[axes](channels, channels, kernel, padding="same")
            geometry, weight = parts(layer)
            bound = spectral.fourier_bound(weight, geometry, (n,) * axes).item()
            overshoot.append(bound / true_norm(layer, (channels, *(n,) * axes)) - 1)
        assert min(overshoot) >= -1e-12
        assert statistics.median(overshoot) < 0.05

    def test_known_answers(self):
        identity = nn.Conv2d(3, 3, 1, bias=False)
        with torch.no_grad():
            identity.weight.copy_(2 * torch.eye(3)[..., None, None])
        assert spectral.norm_bound(identity) == pytest.approx(2)
        mean = nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular", bias=False)
        nn.init.constant_(mean.weight, 1 / 9)
        assert spectral.norm_bound(mean, (1, 6, 6)) == pytest.approx(1)
        patches = nn.Conv2d(1, 4, 2, stride=2, bias=False)
        with torch.no_grad():
            patches.weight.copy_(0.5 * torch.eye(4).reshape(4, 1, 2, 2))
        assert spectral.norm_bound(patches, (1, 32, 32)) == pytest.approx(0.5)

    def test_a_stack_is_its_layers(self):
        stack, geometry = normal(3, 2, 2, 3, 3), Geometry((1, 1), (1, 1), (1, 1), (1, 1))
        for size in ((3, 3), (30, 30), None):
            together = spectral.norm_bounds(stack, geometry, size)
            apart = torch.cat([spectral.norm_bounds(w[None], geometry, size) for w in stack])
            torch.testing.assert_close(together, apart)

    @pytest.mark.parametrize("kind", ["linear", "conv"])
    def test_where_products_are_fast_the_bound_is_a_schatten_norm_and_as_good(self, kind, monkeypatch):
        layer, shape = (nn.Linear(40, 33), (40,)) if kind == "linear" else (nn.Conv2d(33, 34, 3, padding=1), (33, 5, 5))
        exact = spectral.norm_bound(layer, shape)
        monkeypatch.setattr(fourier, "_prefers_matmul", lambda _: True)
        assert exact * (1 - 1e-9) <= spectral.norm_bound(layer, shape) <= exact * (1 + 1e-6)

    @pytest.mark.parametrize("scale", [1e-30, 1e18, 1e30])
    def test_no_size_of_a_wide_weight_overflows(self, scale):
        weight, geometry = normal(1, 32, 32, 3, 3), Geometry((1, 1), (1, 1), (1, 1), (1, 1))
        expected = scale * spectral.norm_bounds(weight, geometry, (8, 8))
        torch.testing.assert_close(spectral.norm_bounds(scale * weight, geometry, (8, 8)), expected, rtol=1e-8, atol=0)

    @pytest.mark.parametrize("power", [-1060, -565, 531, 1000])
    @pytest.mark.parametrize("kind", [*EXTREMES, "fast"])
    def test_no_weight_is_too_small_or_too_large(self, kind, power, monkeypatch):
        """Trap: the Gram matrix of weights of 1e-170 is zero in float64, and that of 1e160 infinite."""
        monkeypatch.setattr(fourier, "_prefers_matmul", lambda _: kind == "fast")
        geometry, shape, size = EXTREMES["linear" if kind == "fast" else kind]
        weight = times_two_to(normal(2, *shape), power)
        near = times_two_to(weight, -power)
        for bounds in (spectral.norm_bounds, lambda *a: spectral.cheap_norm_bounds(*a, 6)):
            found = bounds(weight, geometry, size)
            expected = times_two_to(bounds(near, geometry, size), power)
            assert (found >= expected * (1 - 1e-12)).all()
            assert (found <= expected * (1 + 1e-12)).all() or power == -1060
        v = spectral.start_vector(near, geometry, size or (5, 5) if geometry.axes else ())
        sigma, _, g = spectral.power_iteration(weight, geometry, v, 3)
        expected, _, h = spectral.power_iteration(near, geometry, v, 3)
        assert torch.equal(g, h)
        assert torch.equal(sigma, times_two_to(expected, power))

    def test_the_margin_for_rounding_grows_with_the_matrix(self):
        ones = nn.Linear(500, 600, dtype=DOUBLE)
        nn.init.ones_(ones.weight)
        assert spectral.norm_bound(ones) >= math.sqrt(500 * 600)
        assert (
            spectral.rounding_margin(64, 576) == spectral.ROUNDING_MARGIN < spectral.rounding_margin(4096, 4096) < 1e-8
        )

    def test_dropping_hopeless_frequencies_drops_no_winner(self):
        torch.manual_seed(0)
        layer = nn.Conv2d(34, 33, 3, padding=1)
        geometry, weight = parts(layer)
        s, factor, _ = sample_symbols(weight, geometry, (8, 8), largest=40, coarse=32)
        expected = torch.linalg.svdvals(s[0]).max() * factor
        assert spectral.fourier_bound(weight, geometry, (8, 8)).item() <= expected * (1 + 1e-12)
        assert spectral.fourier_bound(weight, geometry, (8, 8)).item() >= 0.98 * expected

    @given(rows=st.integers(1, 12), columns=st.integers(1, 12), iterations=st.integers(2, 7), seed=st.integers(0, 1000))
    def test_gram_iteration_is_the_schatten_norm_that_it_claims(self, rows, columns, iterations, seed):
        m = normal(rows, columns, seed=seed)
        sigma, p = torch.linalg.svdvals(m), 2 ** (iterations + 1)
        expected = sigma.max() * ((sigma / sigma.max()) ** p).sum() ** (1 / p)
        torch.testing.assert_close(spectral.gram_bound(m[None], iterations)[0], expected)
        assert expected <= sigma.max() * min(rows, columns) ** (1 / p) * (1 + 1e-12)

    def test_gram_iteration_of_zero_is_finite_and_of_a_tiny_matrix_relative(self):
        assert 0 <= spectral.gram_bound(torch.zeros(1, 3, 3, dtype=DOUBLE), 6).item() < 1e-100
        tiny = 1e-20 * contraction(3, 1.0)[None]
        assert 1e-20 <= spectral.gram_bound(tiny, 6).item() * (1 + 1e-12) < 1.02e-20

    @pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
    @pytest.mark.parametrize("shape", [(2, 64), (64, 2), (64, 64), (1, 1), (128, 100)])
    @pytest.mark.parametrize("scale", [1.0, 2.0**-70, 2.0**100])
    def test_bounds_of_matrices_with_a_gradient(self, shape, dtype, scale):
        weight = torch.stack([normal(*shape, seed=seed) for seed in range(20)]).to(dtype) * scale
        sigma, v, gradient = spectral.matrix_norm_bounds(weight, 8)
        exact = weight.double()
        above = sigma.double() / torch.linalg.matrix_norm(exact, 2)
        assert above.min() >= 1
        assert above.max() <= min(shape) ** (1 / 512) * (1 + 5 * math.prod(shape) * torch.finfo(dtype).eps + 1e-6)
        torch.testing.assert_close((weight * gradient).sum((1, 2)), sigma)
        stretch = torch.linalg.vector_norm(exact @ v.double()[..., None], dim=1)[:, 0]
        torch.testing.assert_close(stretch, torch.linalg.matrix_norm(exact, 2), rtol=0.01, atol=0)

    def test_of_equal_singular_values_the_bound_is_largest(self):
        sigma, _, _ = spectral.matrix_norm_bounds(torch.eye(64)[None], 8)
        assert sigma.item() == pytest.approx(64 ** (1 / 512), rel=2e-3)

    @pytest.mark.parametrize("dtype", [torch.float32, DOUBLE, torch.complex64, torch.complex128])
    def test_a_scale_is_the_power_of_two_of_the_largest_entry(self, dtype):
        x = normal(5, 3, 4).to(dtype)
        x = torch.complex(x.real, 9 * normal(5, 3, 4, seed=1).to(x.real.dtype)) if dtype.is_complex else x
        x = x * torch.tensor([1.0, 2.0**-90, 2.0**90, 0.0, 1e-40]).to(x.real.dtype)[:, None, None]
        scaled, s = operator.rescale(x, (1, 2))
        parts = torch.view_as_real(x) if dtype.is_complex else x
        largest = torch.linalg.vector_norm(parts, math.inf, dim=tuple(range(1, parts.dim())))
        assert torch.equal(s.flatten(), (2.0 ** largest.log2().floor()).clamp_min(torch.finfo(s.dtype).tiny))
        assert torch.equal(scaled * s, x)

    @pytest.mark.parametrize("entry", [math.nan, math.inf, -math.inf])
    def test_a_weight_that_is_not_finite_has_no_finite_bound(self, entry):
        weight = normal(2, 3, 3).float()
        weight[1, 2, 0] = entry
        sigma = spectral.matrix_norm_bounds(weight, 8)[0]
        assert torch.isfinite(sigma).tolist() == [True, False]

    def test_a_zero_matrix_has_no_direction_and_no_gradient(self):
        sigma, v, gradient = spectral.matrix_norm_bounds(torch.zeros(1, 3, 4), 8)
        assert 0 <= sigma.item() < 1e-20
        assert not v.any()
        assert not gradient.any()


class TestCircular:
    @pytest.mark.parametrize(
        ("layer", "shape"),
        [
            (nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), (2, 7)),
            (nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), (2, 4, 5)),
            (nn.Conv2d(2, 3, (2, 4), padding="same", padding_mode="circular"), (2, 5, 6)),
            (nn.Conv2d(4, 2, 3, padding=2, dilation=2, groups=2, padding_mode="circular"), (4, 5, 4)),
            (nn.Conv2d(1, 1, 5, padding=2, padding_mode="circular"), (1, 2, 3)),
            (nn.Conv3d(1, 2, 3, padding=1, padding_mode="circular"), (1, 2, 3, 4)),
        ],
        ids=["1d", "2d", "even", "dilated-grouped", "wraps-around", "3d"],
    )
    def test_fourier_gives_all_singular_values(self, layer, shape):
        got = spectral.circular_singular_values(layer, shape)
        expected = torch.linalg.svdvals(dense(layer, shape))
        torch.testing.assert_close(got, expected[: len(got)], atol=1e-6, rtol=1e-6)
        assert expected[len(got) :].abs().max() < 1e-6 if len(expected) > len(got) else True
        assert spectral.norm_bound(layer, shape) == pytest.approx(expected[0].item(), rel=1e-6)

    @pytest.mark.parametrize(
        "layer",
        [
            nn.Conv2d(1, 1, 3, padding=1),
            nn.Conv2d(1, 1, 3, padding=1, stride=2, padding_mode="circular"),
            nn.Conv2d(1, 1, 3, padding_mode="circular"),
        ],
        ids=["zeros", "stride", "valid"],
    )
    def test_other_convolutions_are_refused(self, layer):
        with pytest.raises(ValueError, match=r"padding_mode='circular', stride 1 .*Use norm_bound"):
            spectral.circular_singular_values(layer, (1, 4, 4))


class TestAllSingularValues:
    @pytest.mark.parametrize("kind", KINDS)
    def test_they_are_numpys_of_the_dense_matrix(self, kind):
        for layer, shape in layers_of(kind, 4, seed=3):
            got = spectral.singular_values(layer, shape)
            expected = np.linalg.svd(dense(layer, shape).numpy(), compute_uv=False)
            assert got.dtype == DOUBLE
            assert got.shape == expected.shape
            np.testing.assert_allclose(got.numpy(), expected, atol=1e-10 * max(1.0, expected[0]))

    @pytest.mark.parametrize(("rows", "columns"), [(3, 3), (2, 5), (5, 2), (1, 1)])
    def test_of_a_linear_layer(self, rows, columns):
        layer = nn.Linear(columns, rows)
        got = spectral.singular_values(layer, (columns,))
        expected = np.linalg.svd(layer.weight.detach().double().numpy(), compute_uv=False)
        np.testing.assert_allclose(got.numpy(), expected, atol=1e-12)
        assert got.tolist() == sorted(got.tolist(), reverse=True)
        assert not got.requires_grad

    def test_known_answers(self):
        layer = nn.Linear(3, 3, bias=False)
        with torch.no_grad():
            layer.weight.copy_(torch.diag(torch.tensor([-3.0, 0.0, 2.0])))
        assert spectral.singular_values(layer, (3,)).tolist() == pytest.approx([3, 2, 0])
        # The 1-D kernel (1, 0, 0) is a shift that drops one number: n - 1 ones and a zero.
        shift = nn.Conv1d(1, 1, 3, padding=1, bias=False)
        with torch.no_grad():
            shift.weight.copy_(torch.tensor([[[1.0, 0.0, 0.0]]]))
        assert spectral.singular_values(shift, (1, 4)).tolist() == pytest.approx([1, 1, 1, 0])

    def test_the_largest_is_the_norm(self):
        layer, shape = LipschitzConv2d(2, 3, 3, padding=1).eval(), (2, 5, 4)
        got = spectral.singular_values(layer, shape)
        assert len(got) == 40
        assert float(got[0]) <= spectral.norm_bound(layer, shape) <= float(got[0]) * (1 + 1e-8)
        assert spectral.norm_estimate(layer, shape) == pytest.approx(float(got[0]), rel=1e-6)

    def test_a_constrained_layer_has_those_of_its_constrained_weight(self):
        layer = LipschitzLinear(4, 4, coefficient=0.5, norm=PowerIteration()).eval()
        with torch.no_grad():
            layer.weight = 10 * torch.eye(4)
        assert spectral.singular_values(layer, (4,)).tolist() == pytest.approx([0.5] * 4, rel=1e-5)

    def test_of_a_circular_convolution_they_are_fouriers(self):
        layer, shape = nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), (2, 4, 6)
        fourier = spectral.circular_singular_values(layer, shape)
        torch.testing.assert_close(spectral.singular_values(layer, shape), fourier, atol=1e-10, rtol=0)

    @pytest.mark.parametrize(
        ("layer", "shape", "sentence"),
        [
            (nn.Linear(3, 3), (2,), r"the layer takes 3 features; got an input of shape \(2,\)"),
            (nn.Conv2d(3, 3, 3), (3, 8), r"inputs of shape \(3, n, n\); got input_shape=\(3, 8\)"),
            (nn.Conv2d(1, 1, 5), (1, 3, 3), r"not be smaller than the kernel \(5, 5\); got input size \(3, 3\)"),
            (nn.BatchNorm2d(1), (1, 4, 4), "no norm bound is known for BatchNorm2d"),
        ],
        ids=["features", "axes", "kernel", "another layer"],
    )
    def test_what_does_not_fit_gets_a_sentence(self, layer, shape, sentence):
        with pytest.raises(ValueError, match=sentence):
            spectral.singular_values(layer, shape)


class Doubled(nn.Conv2d):
    def forward(self, x):
        return 2 * super().forward(x)


class TestRefusals:
    @pytest.mark.parametrize(
        ("layer", "sentence"),
        [
            (
                nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"),
                "padding_mode='reflect'; use 'zeros' or 'circular'",
            ),
            (nn.Conv2d(1, 1, 3, padding=1, padding_mode="replicate"), "padding_mode='replicate'"),
            (nn.ConvTranspose2d(1, 1, 3), "no norm bound is known for ConvTranspose2d; Linear, Conv1d"),
            (nn.BatchNorm2d(1), "no norm bound is known for BatchNorm2d"),
            (nn.Bilinear(1, 1, 1), "no norm bound is known for Bilinear"),
            (Doubled(1, 1, 3), "no norm bound is known for Doubled"),
        ],
        ids=lambda value: value.split(";")[0] if isinstance(value, str) else type(value).__name__,
    )
    def test_what_has_no_bound_is_refused(self, layer, sentence):
        with pytest.raises(NoBoundKnown, match=sentence):
            spectral.norm_bound(layer, (1, 4, 4))

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    @pytest.mark.parametrize("layer", [nn.Linear(2, 2), nn.Conv2d(1, 1, 3)], ids=["linear", "conv"])
    def test_weights_that_are_not_finite_are_refused(self, layer, bad):
        with torch.no_grad():
            layer.weight.view(-1)[0] = bad
        with pytest.raises(ValueError, match="a weight must be finite; got NaN or infinity. Restore"):
            spectral.norm_bound(layer)

    @pytest.mark.parametrize(
        ("layer", "shape", "sentence"),
        [
            (nn.Linear(3, 3), (2,), r"the layer takes 3 features; got an input of shape \(2,\)"),
            (nn.Conv2d(3, 3, 3), (2, 8, 8), r"inputs of shape \(3, n, n\); got input_shape=\(2, 8, 8\)"),
            (nn.Conv2d(3, 3, 3), (3, 8), r"inputs of shape \(3, n, n\); got input_shape=\(3, 8\)"),
            (nn.Conv2d(1, 1, 5), (1, 3, 3), r"not be smaller than the kernel \(5, 5\); got input size \(3, 3\)"),
        ],
        ids=["features", "channels", "axes", "kernel"],
    )
    def test_a_shape_that_does_not_fit_gets_a_sentence(self, layer, shape, sentence):
        with pytest.raises(ValueError, match=sentence):
            spectral.norm_bound(layer, shape)

    @pytest.mark.parametrize("padding", [1, 2, (0, 3)])
    def test_circular_padding_wider_than_the_kernel_repeats_outputs(self, padding):
        """No input is smaller than its padding, which torch lets wrap around once: each counts three times at most."""
        layer = nn.Conv2d(1, 1, 1, padding=padding, padding_mode="circular")
        bound, least = spectral.norm_bound(layer), padding if isinstance(padding, int) else padding[1]
        norms = {n: true_norm(layer, (1, least, n)) for n in range(least, least + 5)}
        assert max(norms.values()) <= bound * (1 + 1e-12)
        assert bound <= norms[least] * (1 + 1e-6)
        assert norms[least + 4] <= spectral.norm_bound(layer, (1, least, least + 4))

    def test_a_constrained_layer_has_a_bound_like_any_other(self):
        layer = LipschitzConv2d(2, 2, 3, padding=1).eval()
        bound = spectral.norm_bound(layer, (2, 4, 4))
        truth = true_norm(release_(layer), (2, 4, 4))
        assert truth <= bound <= truth * (1 + 1e-8)


def test_a_padding_that_is_negative_has_no_bound():
    """Torch crops the input by it, before or after it wraps around; the true norm was up to three times the bound."""
    layer = nn.Conv1d(2, 3, 2, padding=2, padding_mode="circular", bias=False)
    assert spectral.norm_bound(layer, (2, 3)) > 0
    layer._reversed_padding_repeated_twice = [2, -1]
    with pytest.raises(NoBoundKnown, match=r"padding must be integers of at least 0; got \(2,\) before and \(-1,\)"):
        spectral.norm_bound(layer, (2, 3))

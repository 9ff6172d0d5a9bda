"""dequantise, Logit and Standardise: data units, exact inverses, dense Jacobians; what they refuse."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from iresnet.chain import Chain
from iresnet.transforms.preprocess import Logit, Standardise, dequantise

DOUBLE = torch.float64


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def uniform(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def dense_logdet(transform, x):
    """ln |det| of the dense Jacobian, sample by sample."""

    def one(sample):
        jacobian = torch.autograd.functional.jacobian(lambda y: transform(y[None])[0].flatten(), sample)
        return torch.linalg.slogdet(jacobian.reshape(sample.numel(), sample.numel())).logabsdet

    return torch.stack([one(sample) for sample in x])


class TestDequantise:
    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.float16, torch.float64])
    @pytest.mark.parametrize("levels", [2, 32, 256])
    def test_rounding_down_gives_the_integers_back(self, dtype, levels):
        x = torch.arange(levels).repeat(200).to(dtype)
        y = dequantise(x, levels, torch.Generator().manual_seed(0))
        assert y.dtype == (DOUBLE if dtype == DOUBLE else torch.float32)
        assert torch.equal(y.floor(), x.to(y.dtype))
        assert 0 <= y.min() <= y.max() < levels

    def test_the_largest_noise_stays_below_the_next_integer(self, monkeypatch):
        monkeypatch.setattr(torch, "rand", lambda *_, dtype, **__: torch.full((1,), 1 - 2**-24, dtype=dtype))
        assert dequantise(torch.tensor([255])).item() < 256

    def test_noise_is_uniform_and_differs_by_element(self):
        u = dequantise(torch.zeros(40_000, dtype=torch.uint8), generator=torch.Generator().manual_seed(0))
        # The mean of n uniforms has standard error 1 / sqrt(12 n).
        assert abs(u.mean().item() - 0.5) < 4 / math.sqrt(12 * 40_000)
        assert abs(u.var().item() - 1 / 12) < 4 * math.sqrt(1 / 180 / 40_000)

    def test_the_generator_determines_the_noise(self):
        x = torch.zeros(10, dtype=torch.uint8)
        first, again, other = (dequantise(x, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    def test_booleans_and_sixteen_bits(self):
        assert dequantise(torch.tensor([True, False]), levels=2).floor().tolist() == [1, 0]
        x = torch.tensor([0, 65535], dtype=torch.int32)
        assert dequantise(x, levels=2**16).floor().tolist() == [0, 65535]

    @pytest.mark.parametrize(
        ("x", "levels", "sentence"),
        [
            (torch.tensor([0, 256]), 256, r"x must lie in 0 .. 255; got 0 to 256. Set levels to that"),
            (torch.tensor([-1, 3]), 256, r"x must lie in 0 .. 255; got -1 to 3"),
            (torch.tensor([0, 2]), 2, r"x must lie in 0 .. 1; got 0 to 2"),
            (
                torch.tensor([0.0, 0.5]),
                256,
                r"x must hold integers; got 0.5. Undo a scaling such as x / 255",
            ),
            (torch.tensor([math.nan]), 256, "integers; got nan"),
            (torch.tensor([math.inf]), 256, "integers; got inf"),
            (torch.zeros(0), 256, "at least one element"),
            (torch.zeros(1), 1, r"levels must lie in 2 .. 65536; got 1"),
            (torch.zeros(1), 2**20, "without dequantisation"),
        ],
    )
    def test_bad_input_is_refused(self, x, levels, sentence):
        with pytest.raises(ValueError, match=sentence):
            dequantise(x, levels)


class TestLogit:
    def test_known_values(self):
        z, logdet = Logit(levels=256, alpha=0.05).forward_and_logdet(torch.tensor([[0.0, 128.0, 256.0]], dtype=DOUBLE))
        m = math.log(0.95 / 0.05)
        torch.testing.assert_close(z, torch.tensor([[-m, 0.0, m]], dtype=DOUBLE), atol=1e-14, rtol=1e-14)
        slope = 0.9 / 256
        expected = math.log(slope / 0.25) + 2 * math.log(slope / (0.05 * 0.95))
        assert logdet.item() == pytest.approx(expected)

    @pytest.mark.parametrize("shape", [(3,), (2, 2, 2)])
    @pytest.mark.parametrize(("levels", "alpha"), [(256, 0.05), (1, 1e-6), (2, 0.4)])
    def test_logdet_is_that_of_the_dense_jacobian(self, shape, levels, alpha):
        logit, x = Logit(levels, alpha), levels * uniform(3, *shape)
        z, logdet = logit.forward_and_logdet(x)
        assert logdet.shape == (3,)
        torch.testing.assert_close(logdet, dense_logdet(logit, x))
        torch.testing.assert_close(z, logit(x))

    def test_a_uniform_density_has_the_entropy_of_its_units(self):
        # If x is uniform on [0, 256)^d, the density of x recovered through the map must be -d ln 256 in data units.
        logit, d = Logit(256), 3
        x = 256 * uniform(5, d)
        _, logdet = logit.forward_and_logdet(x)
        s = logit.alpha + (1 - 2 * logit.alpha) * x / 256
        density_of_z = (s * (1 - s) / (1 - 2 * logit.alpha)).log().sum(1)
        torch.testing.assert_close(density_of_z + logdet, torch.full((5,), -d * math.log(256), dtype=DOUBLE))

    @given(fraction=st.floats(0, 1), alpha=st.floats(1e-6, 0.49))
    @settings(max_examples=100, deadline=None)
    def test_inverse_undoes_the_map(self, fraction, alpha):
        logit, x = Logit(256, alpha), torch.tensor([[256 * fraction]], dtype=DOUBLE)
        assert abs(logit.inverse(logit(x)) - x).item() < 1e-10 / (1 - 2 * alpha)

    def test_the_map_undoes_the_inverse_beyond_the_data(self):
        logit, z = Logit(256), 3 * normal(50, 2)
        x = logit.inverse(z)
        assert x.min() < 0
        torch.testing.assert_close(logit(x), z, atol=1e-10, rtol=0)

    def test_no_digits_are_lost_at_the_upper_end_in_float32(self):
        logit, x = Logit(1.0, alpha=1e-6), torch.tensor([[1.0]])
        assert logit(x).item() == pytest.approx(math.log((1 - 1e-6) / 1e-6), rel=1e-6)
        torch.testing.assert_close(logit(x), -logit(1 - x))

    def test_solve_reports_what_float32_lost_instead_of_raising(self):
        s = Chain(Logit(256)).solve(torch.tensor([[1.0], [200.0]]))
        assert s.code_residual[0] < 1e-5
        assert s.code_residual[1] == math.inf

    def test_stretch_bounds_slopes_and_logdet(self):
        logit = Logit(256, alpha=0.05)
        s = logit.stretch((2,))
        x = torch.linspace(0, 256, 1001, dtype=DOUBLE).repeat(2, 1).T.requires_grad_()
        z, logdet = logit.forward_and_logdet(x)
        (slope,) = torch.autograd.grad(z.sum(), x)
        assert slope.max().item() == pytest.approx(s.forward)
        assert 1 / slope.min().item() == pytest.approx(s.inverse)
        assert (logdet.min().item(), logdet.max().item()) == pytest.approx(s.logdet)
        assert logit.stretch().logdet == (-math.inf, math.inf)

    def test_gradient_of_value_and_logdet(self):
        x = 10 + 200 * uniform(3, 2)
        assert torch.autograd.gradcheck(Logit().forward_and_logdet, x.requires_grad_())

    def test_compiles_to_one_graph(self):
        logit, x = Logit(), 256 * uniform(3, 2)
        compiled = torch.compile(logit.forward_and_logdet, backend="eager", fullgraph=True)
        for got, expected in zip(compiled(x), logit.forward_and_logdet(x), strict=True):
            torch.testing.assert_close(got, expected)

    @pytest.mark.parametrize(
        ("x", "sentence"),
        [
            (torch.tensor([[-20.0, 3.0]]), r"x must lie in \[0, 256\] .*; got values from -20 to 3. Set levels"),
            (torch.tensor([[3.0, 300.0]]), r"x must lie in \[0, 256\] .*; got values from 3 to 300"),
            (torch.tensor([[math.nan]]), r"x must lie in \[0, 256\]"),
            (torch.tensor([[3]]), "floating-point"),
            (torch.zeros(0, 2), "at least one sample"),
        ],
    )
    def test_bad_input_is_refused(self, x, sentence):
        with pytest.raises(ValueError, match=sentence):
            Logit()(x)
        with pytest.raises(ValueError, match=sentence):
            Logit().forward_and_logdet(x)

    def test_bad_settings_are_refused(self):
        for alpha in (0.0, 0.5, math.nan):
            with pytest.raises(ValueError, match=r"alpha must lie in \(0, 0.5\); got"):
                Logit(alpha=alpha)
        for levels in (0, -1, math.inf):
            with pytest.raises(ValueError, match="levels must be positive and finite; got"):
                Logit(levels=levels)


class TestStandardise:
    def test_known_values(self):
        z, logdet = Standardise([1.0, 2.0], [2.0, 4.0]).forward_and_logdet(torch.tensor([[3.0, 2.0]]))
        assert z.tolist() == [[1.0, 0.0]]
        torch.testing.assert_close(logdet, torch.tensor([-math.log(8)]))

    @pytest.mark.parametrize("shape", [(3,), (2, 3, 3)])
    def test_fit_gives_mean_zero_and_variance_one_and_the_dense_logdet(self, shape):
        x = 5 + 3 * normal(50, *shape)
        standardise = Standardise.fit(x)
        rows = standardise(x).transpose(0, 1).flatten(1)
        torch.testing.assert_close(rows.mean(1), torch.zeros(shape[0], dtype=DOUBLE), atol=1e-12, rtol=0)
        torch.testing.assert_close(rows.std(1, correction=0), torch.ones(shape[0], dtype=DOUBLE))
        torch.testing.assert_close(standardise.forward_and_logdet(x[:2])[1], dense_logdet(standardise, x[:2]))

    @given(st.floats(-1e3, 1e3), st.floats(1e-3, 1e3), st.integers(0, 100))
    @settings(max_examples=50, deadline=None)
    def test_inverse_undoes_the_map(self, mean, std, seed):
        standardise, x = Standardise(torch.tensor([mean], dtype=DOUBLE), [std]), normal(5, 1, seed=seed)
        assert (standardise.inverse(standardise(x)) - x).abs().max() < 1e-12 * (1 + abs(mean))

    def test_the_code_keeps_the_dtype_of_the_data(self):
        standardise = Standardise.fit(normal(50, 2))
        for dtype in (torch.float32, DOUBLE):
            z, logdet = standardise.forward_and_logdet(normal(3, 2).to(dtype))
            assert z.dtype == logdet.dtype == standardise.inverse(z).dtype == dtype

    def test_large_offsets_keep_their_digits(self):
        # 1.7e9 is a time in seconds: its float32 neighbours are 128 seconds apart.
        x = 1.7e9 + normal(1000, 1)
        assert abs(Standardise.fit(x)(x).mean().item()) < 1e-6

    def test_stretch_is_exact(self):
        s = Standardise([0.0, 0.0], [0.5, 4.0]).stretch((2, 3, 3))
        assert (s.forward, s.inverse) == (2.0, 4.0)
        assert s.logdet == pytest.approx((-9 * math.log(2),) * 2)
        assert Standardise([0.0], [1.0]).stretch().logdet == (-math.inf, math.inf)

    def test_state_and_copy_keep_the_map(self):
        fitted, x = Standardise.fit(5 + normal(50, 2)), normal(3, 2)
        loaded = Standardise([0.0, 0.0], [1.0, 1.0]).double()
        loaded.load_state_dict(fitted.state_dict())
        assert torch.equal(loaded(x), fitted(x))
        assert torch.equal(copy.deepcopy(fitted)(x), fitted(x))
        assert not list(fitted.parameters())

    def test_the_given_vectors_are_not_shared(self):
        mean = torch.zeros(1)
        standardise = Standardise(mean, [1.0])
        mean.add_(1)
        assert standardise.mean.item() == 0

    @pytest.mark.parametrize("x", [torch.tensor([[1.0, 0.1], [2.0, 0.1], [3.0, 0.1]]), torch.tensor([[1.0, 2.0]])])
    def test_constant_columns_are_refused(self, x):
        with pytest.raises(ValueError, match=r"unbounded; got constant columns \[.*1\]. Drop them"):
            Standardise.fit(x)

    @pytest.mark.parametrize(
        ("mean", "std", "sentence"),
        [
            ([0.0], [1.0, 1.0], r"vectors of the same length.*got shapes \(1,\) and \(2,\)"),
            ([], [], "one number per column"),
            (torch.zeros(1, 2), torch.ones(1, 2), "vectors of the same length"),
            ([0.0], [0.0], "std positive; got"),
            ([0], [-1], "std positive; got"),
            ([math.nan], [1.0], "mean must be finite"),
        ],
    )
    def test_bad_settings_are_refused(self, mean, std, sentence):
        with pytest.raises(ValueError, match=sentence):
            Standardise(mean, std)

    def test_bad_input_is_refused(self):
        standardise = Standardise([0.0, 0.0], [1.0, 1.0])
        with pytest.raises(ValueError, match=r"x must have shape \(batch, 2, ...\) .*; got \(4, 3\)"):
            standardise(torch.zeros(4, 3))
        with pytest.raises(ValueError, match=r"z must have shape \(batch, 2, ...\)"):
            standardise.inverse(torch.zeros(4, 3))
        with pytest.raises(ValueError, match="finite"):
            Standardise.fit(torch.tensor([[math.nan], [1.0]]))
        with pytest.raises(ValueError, match="floating-point"):
            Standardise.fit(torch.tensor([[1], [2]]))


def test_representations_show_the_settings():
    assert repr(Logit(2, 0.1)) == "Logit(levels=2, alpha=0.1)"
    assert repr(Standardise([0.0, 0.0], [1.0, 1.0])) == "Standardise(2)"

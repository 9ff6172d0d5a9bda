"""ln det(I + J): exact values, Theorem 3, unbiased estimates with unbiased gradients, and the memory they take."""

import math
import weakref

import mpmath  # type: ignore[import-untyped]
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from iresnet import (
    CertifiedSeries,
    Exact,
    PowerSeries,
    ResidualBlock,
    RussianRoulette,
    contractive_convnet,
    contractive_mlp,
    terms_needed,
    truncation_bound,
)
from iresnet.logdet import (
    AdaptiveRoulette,
    Estimator,
    Jacobian,
    StoppedRoulette,
    adaptive_series,
    draw_probes,
    power_series,
    roulette_weights,
    series_weights,
)
from tests.zoo import DOUBLE, UserNet, contraction, dense_jacobian, linear_block, normal, rouse_

PROBES = ["rademacher", "gaussian"]


def linear(a, x):
    """The Jacobian of x -> A x at a batch."""
    return Jacobian(lambda v: v @ a)


def block_of(kind, lipschitz=0.6):
    torch.manual_seed(0)
    if kind == "mlp":
        return rouse_(ResidualBlock(contractive_mlp(3, (6,), lipschitz=lipschitz))).double().eval(), (3,)
    if kind == "user":
        return ResidualBlock(UserNet(3), lipschitz=0.7).double().eval(), (3,)
    return rouse_(ResidualBlock(contractive_convnet(1, 3, kernels=(3, 1), lipschitz=lipschitz))).double().eval(), (
        1,
        2,
        2,
    )


def gradient(loss, parameters):
    """Zero for the last bias, which moves no determinant."""
    return torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)


def assert_mean(samples, truth, *, sharp):
    """The mean of many draws lies within four standard errors of the truth, which are small enough to say something."""
    error = samples.std(0) / math.sqrt(len(samples))
    assert ((samples.mean(0) - truth).abs() <= 4 * error + 1e-12).all()
    assert error.norm() <= sharp * truth.norm()


class TestExact:
    @pytest.mark.parametrize("d", [1, 2, 3, 7])
    def test_it_is_the_logarithm_of_the_determinant(self, d):
        a, x = contraction(d, 0.9), normal(4, d)
        expected = torch.linalg.slogdet(torch.eye(d, dtype=DOUBLE) + a).logabsdet
        torch.testing.assert_close(Exact()(linear(a, x), x), expected.expand(4))

    @pytest.mark.parametrize("d", [2, 3])
    def test_a_negative_determinant_is_refused_not_hidden_by_its_absolute_value(self, d):
        """Lemma 6, and the trap: |det| hides that g is no contraction."""
        a, x = torch.diag(torch.tensor([-3.0] + [0.0] * (d - 1), dtype=DOUBLE)), normal(4, d)
        with pytest.raises(
            ValueError, match=r"det\(I \+ J\) must be positive; got .* g is not a contraction here: constrain"
        ):
            Exact()(linear(a, x), x)

    @pytest.mark.parametrize("kind", ["mlp", "conv", "user"])
    def test_its_gradient_is_that_of_the_dense_determinant(self, kind):
        block, shape = block_of(kind)
        x, params = normal(3, *shape, seed=1), list(block.parameters())
        weight = torch.tensor([1.0, -2.0, 0.5], dtype=DOUBLE)
        got = gradient((block.forward_and_logdet(x)[1] * weight).sum(), params)
        dense = torch.stack(
            [torch.autograd.functional.jacobian(lambda y: block(y[None])[0], s, create_graph=True) for s in x]
        )
        d = math.prod(shape)
        expected = gradient((torch.linalg.slogdet(dense.reshape(3, d, d)).logabsdet * weight).sum(), params)
        torch.testing.assert_close(got, expected, atol=1e-9, rtol=1e-7)

    def test_it_can_be_differentiated_twice_unlike_the_series(self):
        block, _ = block_of("mlp")
        x = normal(2, 3).requires_grad_()
        assert torch.autograd.gradgradcheck(lambda t: block.forward_and_logdet(t)[1], (x,))


def test_an_estimator_without_an_estimate_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        Estimator()


class TestTheorem3:
    @pytest.mark.parametrize("lipschitz", [0.3, 0.7, 0.9, 0.97])
    @pytest.mark.parametrize("kind", ["random", "worst"])
    def test_truncation_costs_at_most_the_bound_for_every_number_of_terms(self, kind, lipschitz):
        d = 5
        a = contraction(d, lipschitz) if kind == "random" else -lipschitz * torch.eye(d, dtype=DOUBLE)
        truth = torch.linalg.slogdet(torch.eye(d, dtype=DOUBLE) + a).logabsdet.item()
        total, power = 0.0, torch.eye(d, dtype=DOUBLE)
        for n in range(1, 31):
            power = power @ a
            total += (-1) ** (n + 1) * power.trace().item() / n
            bound = truncation_bound(lipschitz, d, n)
            assert abs(truth - total) <= bound * (1 + 1e-9) + 1e-13
            if kind == "worst":  # where all eigenvalues are -L the theorem is an equality
                assert abs(truth - total) >= bound * (1 - 1e-9) - 1e-13

    @pytest.mark.parametrize("kind", ["mlp", "conv"])
    def test_it_holds_for_networks_with_exact_traces(self, kind):
        block, shape = block_of(kind, lipschitz=0.9)
        x, d = normal(4, *shape, seed=1), math.prod(shape)
        j = dense_jacobian(block.g, x)
        truth, bound = block.forward_and_logdet(x)[1], block.bound(shape).value
        total, power = torch.zeros(4, dtype=DOUBLE), torch.eye(d, dtype=DOUBLE).expand_as(j)
        for n in range(1, 31):
            power = power @ j
            total = total + (-1) ** (n + 1) * power.diagonal(dim1=1, dim2=2).sum(1) / n
            assert ((total - truth).abs() <= truncation_bound(bound, d, n) + 1e-13).all()

    @given(lipschitz=st.floats(0.01, 0.995), dimension=st.integers(1, 10_000), terms=st.integers(0, 400))
    def test_the_bound_is_the_closed_form_to_all_digits(self, lipschitz, dimension, terms):
        """-d (ln(1 - L) + sum L^k / k), which in floating point cancels to nothing for a small tail."""
        with mpmath.workdps(350):
            c = mpmath.mpf(lipschitz)
            exact = -dimension * (mpmath.log1p(-c) + mpmath.fsum(c**k / k for k in range(1, terms + 1)))
            got = truncation_bound(lipschitz, dimension, terms)
            if exact < 1e-300:  # where floats lose digits whatever one does
                assert got < 1e-299
                return
            assert exact * (1 - mpmath.mpf("1e-9")) <= got <= exact * (1 + mpmath.mpf("1e-9"))

    def test_no_digits_cancel(self):
        assert truncation_bound(0.5, 1, 200) == pytest.approx(0.5**201 / 201 * 2, rel=0.01)
        assert truncation_bound(0.0, 5, 3) == 0

    @given(
        lipschitz=st.floats(0.0, 0.99),
        dimension=st.integers(1, 5000),
        tolerance=st.floats(1e-12, 10.0, exclude_min=True),
    )
    def test_terms_needed_is_the_smallest_number(self, lipschitz, dimension, tolerance):
        n = terms_needed(lipschitz, dimension, tolerance)
        assert truncation_bound(lipschitz, dimension, n) <= tolerance
        assert n == 1 or truncation_bound(lipschitz, dimension, n - 1) > tolerance

    @pytest.mark.parametrize(("c", "terms"), [(0.5, 5), (0.7, 11), (0.9, 37), (0.98, 192)])
    def test_worst_case_terms_for_96_blocks(self, c, terms):
        """Bias below 1e-4 bits/dim over 96 blocks with Lip(g) = c^3."""
        assert terms_needed(c**3, 1, 1e-4 * math.log(2) / 96) == terms

    @pytest.mark.parametrize(
        ("call", "sentence"),
        [
            (
                lambda: truncation_bound(1.0, 2, 3),
                r"lipschitz must lie in \[0, 1\); got 1.0. The series converges only",
            ),
            (lambda: truncation_bound(-0.1, 2, 3), r"lipschitz must lie in \[0, 1\); got -0.1"),
            (lambda: truncation_bound(math.nan, 2, 3), r"lipschitz must lie in \[0, 1\); got nan"),
            (lambda: truncation_bound(0.5, 0, 3), "dimension must be at least 1 and terms at least 0; got 0 and 3"),
            (lambda: truncation_bound(0.5, 1, -1), "dimension must be at least 1 and terms at least 0; got 1 and -1"),
            (lambda: terms_needed(0.5, 1, 0.0), "tolerance must be positive; got 0.0"),
            (lambda: terms_needed(1.5, 1, 0.1), r"lipschitz must lie in \[0, 1\); got 1.5"),
        ],
    )
    def test_bad_arguments_get_a_sentence(self, call, sentence):
        with pytest.raises(ValueError, match=sentence):
            call()


class TestSeries:
    @pytest.mark.parametrize("terms", [1, 2, 5, 8])
    def test_the_value_is_the_sum_for_its_probe_and_not_a_surrogate(self, terms):
        """Trap: a logged number that is the loss's surrogate and no likelihood."""
        a, x, v = contraction(4, 0.8), normal(3, 4), normal(3, 4, seed=2)
        got = power_series(linear(a, x), v, *series_weights(terms, x))
        expected = sum(
            (-1) ** (k + 1) / k * ((v @ torch.linalg.matrix_power(a, k)) * v).sum(1) for k in range(1, terms + 1)
        )
        torch.testing.assert_close(got, expected)

    def test_the_gradient_is_the_neumann_series_for_its_probe(self):
        a = contraction(4, 0.8).requires_grad_()
        x, v = normal(3, 4), normal(3, 4, seed=2)
        (got,) = torch.autograd.grad(power_series(linear(a, x), v, *series_weights(6, x)).sum(), a)
        s = sum((-1) ** k * v @ torch.linalg.matrix_power(a.detach(), k) for k in range(6))
        torch.testing.assert_close(got, torch.einsum("bi,bj->ij", s, v))

    @pytest.mark.no_cover
    @pytest.mark.parametrize("probe", PROBES)
    @pytest.mark.parametrize("kind", ["mlp", "conv"])
    @pytest.mark.parametrize("estimator", ["series", "roulette"])
    def test_value_and_gradient_are_unbiased(self, kind, estimator, probe):
        """Theorem 4's series with enough terms, and the roulette; with weights per sample in the loss."""
        block, shape = block_of(kind, lipschitz=0.6)
        base, params = normal(2, *shape, seed=1), list(block.parameters())
        weight = torch.tensor([1.0, -2.0], dtype=DOUBLE)
        exact = block.forward_and_logdet(base)[1]
        expected = gradient((exact * weight).sum(), params)
        chosen = PowerSeries(30, probe=probe) if estimator == "series" else RussianRoulette(terms=2, probe=probe)
        generator, x = seeded(1), base.repeat(40, *(1,) * len(shape))
        values, gradients = [], []
        for _ in range(100):  # the mean of a group of draws is as good as a draw
            drawn = block.forward_and_logdet(x, estimator=chosen, generator=generator)[1].reshape(40, 2)
            values.append(drawn.detach())
            gradients.append(gradient((drawn.mean(0) * weight).sum(), params))
        assert_mean(torch.cat(values), exact.detach(), sharp=0.2)
        for got, truth in zip(zip(*gradients, strict=True), expected, strict=True):
            assert_mean(torch.stack(got), truth, sharp=0.5)

    @pytest.mark.parametrize("probes", [1, 4])
    def test_more_probes_less_spread(self, probes):
        a, x = contraction(6, 0.7), normal(1, 6).expand(4000, 6)
        drawn = PowerSeries(20, probes)(linear(a, x), x, generator=torch.Generator().manual_seed(0))
        exact = torch.linalg.slogdet(torch.eye(6, dtype=DOUBLE) + a).logabsdet
        assert_mean(drawn, exact, sharp=0.1)
        one = PowerSeries(20, 1)(linear(a, x), x, generator=torch.Generator().manual_seed(9))
        assert drawn.var().item() == pytest.approx(one.var().item() / probes, rel=0.15)

    def test_shared_probes_are_the_same_for_every_sample_and_unbiased(self):
        a, x = contraction(4, 0.7), normal(3, 4)
        drawn = [PowerSeries(30, shared=True)(linear(a, x), x, generator=seeded(s)) for s in range(400)]
        assert all(torch.allclose(one, one[0].expand(3)) for one in drawn)
        exact = torch.linalg.slogdet(torch.eye(4, dtype=DOUBLE) + a).logabsdet
        assert_mean(torch.stack([one[0] for one in drawn]), exact, sharp=0.2)
        certified = CertifiedSeries(1e-3, shared=True)(linear(a, x), x, lipschitz=0.7, generator=seeded(0))
        torch.testing.assert_close(certified, certified[:1].expand(3))

    @pytest.mark.parametrize("probe", PROBES)
    def test_probes_have_mean_zero_and_unit_covariance(self, probe):
        v = draw_probes(torch.zeros(20_000, 3, dtype=DOUBLE), probe, torch.Generator().manual_seed(0))
        assert v.mean(0).abs().max() < 4 / math.sqrt(20_000)
        covariance = v.T @ v / len(v)
        assert (covariance - torch.eye(3)).abs().max() < 4 * math.sqrt(2 / 20_000)
        if probe == "rademacher":
            assert set(v.unique().tolist()) == {-1.0, 1.0}

    @pytest.mark.parametrize(
        "estimator", [PowerSeries(5), RussianRoulette(), Exact()], ids=["series", "roulette", "exact"]
    )
    @pytest.mark.parametrize("kind", ["mlp", "conv", "user"])
    def test_the_determinant_pulls_at_the_parameters(self, kind, estimator):
        """Trap: without a graph through the vector-Jacobian product maximum likelihood ignores the determinant."""
        block, shape = block_of(kind)
        x = normal(2, *shape).requires_grad_()
        _, logdet = block.forward_and_logdet(x, estimator=estimator)
        gradients = torch.autograd.grad(logdet.sum(), [x, *block.parameters()], allow_unused=True)
        weights = [g for g, p in zip(gradients[1:], block.parameters(), strict=True) if p.dim() > 1]
        assert all(g is not None and g.abs().max() > 0 for g in weights)
        assert gradients[0].abs().max() > 0

    @pytest.mark.parametrize("estimator", [PowerSeries(5), RussianRoulette()], ids=["series", "roulette"])
    def test_differentiating_twice_raises(self, estimator):
        block, _ = block_of("mlp")
        x = normal(2, 3).requires_grad_()
        for loss in (
            torch.square,
            lambda t: t,
        ):  # a linear loss sends back a constant, which hides the second derivative
            logdet = block.forward_and_logdet(x, estimator=estimator)[1]
            with pytest.raises(RuntimeError, match="differentiate twice"):
                torch.autograd.grad(loss(logdet).sum(), x, create_graph=True)

    def test_without_gradients_no_graph_and_the_same_value(self):
        block, _ = block_of("mlp")
        x, values = normal(4, 3), []
        for context in (torch.enable_grad, torch.no_grad):
            with context():
                values.append(block.forward_and_logdet(x, estimator=PowerSeries(5), generator=seeded(3))[1])
        assert values[0].requires_grad
        assert not values[1].requires_grad
        assert torch.equal(values[0], values[1])

    def test_a_batch_of_one_keeps_its_dimension(self):
        x = normal(1, 3)
        for estimator in (Exact(), PowerSeries(3), RussianRoulette(), CertifiedSeries()):
            assert estimator(linear(contraction(3, 0.5), x), x, lipschitz=0.5).shape == (1,)

    @pytest.mark.parametrize("probe", PROBES)
    @pytest.mark.parametrize("tolerance", [1e-1, 1e-3, 1e-6])
    def test_a_certified_series_stops_as_soon_as_the_rest_is_small_for_certain(self, tolerance, probe):
        """The rest of a probe's series is within the tolerance, and J that is smaller than its bound needs less."""
        a, x, products = contraction(6, 0.4), normal(50, 6), []
        jacobian = Jacobian(lambda v: products.append(1) or v @ a)
        with torch.no_grad():
            got = CertifiedSeries(tolerance, probe=probe)(jacobian, x, lipschitz=0.9, generator=seeded(0))
        whole = PowerSeries(200, probe=probe)(linear(a, x), x, generator=seeded(0))
        assert 0 < (got - whole).abs().max() <= tolerance
        assert len(products) < terms_needed(0.9, 6, tolerance) / 2

    def test_the_rest_of_a_certified_series_is_bounded_where_it_is_largest(self):
        """J = -L I: every bound is an equality but the last, and a looser rule would stop too early."""
        x, bound = normal(3, 4), 0.9
        with torch.no_grad():
            for tolerance in (1.0, 1e-2, 1e-4):
                series = CertifiedSeries(tolerance)
                got = series(linear(-bound * torch.eye(4, dtype=DOUBLE), x), x, lipschitz=bound, generator=seeded(0))
                rest = (got - 4 * math.log(1 - bound)).abs()
                assert rest.max() <= tolerance
                assert rest.max() > tolerance / 10

    def test_a_certified_sum_has_nothing_to_do_with_the_samples_beside_it(self):
        """Samples whose Jacobians differ stop at their own terms: alone, and among others that take longer."""
        scale = torch.tensor([0.01, 0.3, 0.9], dtype=DOUBLE)[:, None]
        a, x = contraction(5, 1.0), normal(3, 5)
        series = CertifiedSeries(1e-2, shared=True)
        with torch.no_grad():
            together = series(Jacobian(lambda v: scale * (v @ a)), x, lipschitz=0.9, generator=seeded(0))
            for i in range(3):
                one = scale[i : i + 1]
                alone = series(
                    Jacobian(lambda v, one=one: one * (v @ a)), x[i : i + 1], lipschitz=0.9, generator=seeded(0)
                )
                torch.testing.assert_close(alone[0], together[i], rtol=1e-12, atol=1e-12)

    @pytest.mark.no_cover
    def test_gaussian_probes_have_no_larger_bias_than_the_tolerance(self):
        """Trap: if short probes stop early, the long ones that go on do not average out; the bias was 1.16 times it."""
        constant, tolerance, v = 0.9, 0.002810075, normal(100_000, 4)
        jacobian = Jacobian(lambda w: -constant * w)
        with torch.no_grad():
            estimator = CertifiedSeries(tolerance, probe="gaussian")
            found = estimator(jacobian, v, lipschitz=constant, generator=seeded(0))
            probes = draw_probes(v, "gaussian", seeded(0))
        bias = found - probes.square().sum(1) * math.log(1 - constant)  # against the whole series of the same probes
        error = float(bias.std()) / math.sqrt(len(v))
        assert error < 0.01 * tolerance
        assert abs(float(bias.mean())) < tolerance + 4 * error

    def test_with_a_graph_a_certified_series_takes_its_terms_from_the_bound(self):
        a, x = contraction(3, 0.8), normal(2, 3)
        n = terms_needed(0.8, 3, 1e-4)
        got = CertifiedSeries(1e-4)(linear(a, x), x, lipschitz=0.8, generator=seeded(0))
        assert torch.equal(got, PowerSeries(n)(linear(a, x), x, generator=seeded(0)))
        for bad in (None, 1.0, 1.5):
            with pytest.raises(ValueError, match=r"CertifiedSeries needs a proven contraction; got Lip\(g\) <="):
                CertifiedSeries()(linear(a, x), x, lipschitz=bad)

    @pytest.mark.parametrize(
        ("make", "sentence"),
        [
            (lambda: PowerSeries(0), "terms must be at least 1; got 0"),
            (lambda: PowerSeries(3, probes=0), "probes must be at least 1; got 0"),
            (lambda: PowerSeries(3, probe="uniform"), "probe must be 'rademacher' or 'gaussian'; got 'uniform'"),  # type: ignore[arg-type]
            (lambda: RussianRoulette(terms=0), "terms must be at least 1; got 0"),
            (lambda: RussianRoulette(continuation=1.0), r"continuation must lie in \(0, 1\); got 1.0"),
            (lambda: RussianRoulette(continuation=0.0), r"continuation must lie in \(0, 1\); got 0.0"),
        ],
    )
    def test_bad_settings_get_a_sentence(self, make, sentence):
        with pytest.raises(ValueError, match=sentence):
            make()


def seeded(seed):
    return torch.Generator().manual_seed(seed)


class TestRoulette:
    def test_weights_are_those_of_the_formula(self):
        """Value (-1)^(k+1) / (k P(N >= k)), gradient (-1)^k / P(N >= k+1); P(N >= k) = q^(k - n) beyond n terms."""
        terms, q, x = 3, 0.7, torch.zeros(500, 1, dtype=DOUBLE)
        value, gradient = roulette_weights(terms, q, x, seeded(0))
        drawn = (value != 0).sum(0)
        assert drawn.min() == terms
        assert drawn.max() == len(value)
        for i in (int(drawn.argmax()), int(drawn.argmin()), 7):
            for k in range(1, len(value) + 1):
                survival = q ** max(0, k - terms)
                expected = (-1) ** (k + 1) / survival if k <= drawn[i] else 0.0
                assert gradient[k - 1, i].item() == pytest.approx(expected)
                assert value[k - 1, i].item() == pytest.approx(expected / k)

    def test_the_number_of_terms_has_the_distribution_it_claims(self):
        value, _ = roulette_weights(2, 0.6, torch.zeros(20_000, 1, dtype=DOUBLE), seeded(0))
        drawn = (value != 0).sum(0)
        for k in range(1, 8):
            p = 0.6 ** max(0, k - 2)
            assert abs((drawn >= k).double().mean() - p) <= 4 * math.sqrt(p * (1 - p) / 20_000) + 1e-12

    def test_tail_probabilities_keep_their_digits(self, monkeypatch):
        """Trap: 1 - cdf is zero after 16 digits; a power is not."""
        monkeypatch.setattr(torch, "rand", lambda *_, dtype, **__: torch.tensor([1e-200], dtype=dtype))
        _, gradient = roulette_weights(1, 0.5, torch.zeros(1, 1, dtype=DOUBLE), None)
        k = len(gradient)
        assert k > 600
        assert gradient[-1, 0].item() == pytest.approx((-1) ** (k - 1) * 2.0 ** (k - 1))

    def test_every_sample_draws_its_own_number_of_terms(self):
        """Trap: one draw for the whole batch."""
        value, _ = roulette_weights(2, 0.8, torch.zeros(50, 1), seeded(0))
        assert len((value != 0).sum(0).unique()) > 3

    @pytest.mark.parametrize("estimator", [PowerSeries(4), RussianRoulette()], ids=["series", "roulette"])
    @pytest.mark.parametrize("probe", PROBES)
    def test_randomness_comes_from_the_generator_and_from_nowhere_else(self, estimator, probe):
        """Trap: a global generator, so that seeds do not hold and ranks of a distributed run differ."""
        estimator = type(estimator)(estimator.terms, probe=probe)
        a, x = contraction(3, 0.7), normal(20, 3)

        def run(seed):
            return estimator(linear(a, x), x, lipschitz=0.7, generator=seeded(seed))

        state = torch.get_rng_state()
        first, again, other = run(1), run(1), run(2)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    def test_continuation_is_chosen_from_the_bound(self):
        assert RussianRoulette().probability(0.8) == pytest.approx(0.64 + 0.36 / 4)
        assert RussianRoulette(continuation=0.7).probability(0.8) == 0.7

    @pytest.mark.parametrize("q", [0.64, 0.5])
    def test_a_continuation_with_unbounded_variance_is_refused(self, q):
        """Trap: with q <= L^2 a standard error means nothing."""
        with pytest.raises(
            ValueError, match=r"continuation must exceed L\^2 = 0.6400, or the variance has no bound; got"
        ):
            RussianRoulette(continuation=q).probability(0.8)

    @pytest.mark.parametrize("lipschitz", [None, 1.0, 1.2])
    def test_without_a_contraction_it_is_refused(self, lipschitz):
        a, x = contraction(3, 0.7), normal(2, 3)
        with pytest.raises(ValueError, match="RussianRoulette needs a Lipschitz bound below 1 .* got .* Constrain g"):
            RussianRoulette()(linear(a, x), x, lipschitz=lipschitz)

    @pytest.mark.parametrize("lipschitz", [0.5, 0.9])
    def test_its_variance_is_finite_in_the_worst_case(self, lipschitz):
        """All eigenvalues at -L: the spread is that of a bounded series, not of a lottery."""
        d = 3
        a, x = -lipschitz * torch.eye(d, dtype=DOUBLE), torch.zeros(20_000, d, dtype=DOUBLE)
        drawn = RussianRoulette(terms=2)(linear(a, x), x, lipschitz=lipschitz, generator=seeded(0))
        truth = torch.tensor(d * math.log(1 - lipschitz), dtype=DOUBLE)
        assert_mean(drawn, truth, sharp=0.05)


class TestAdaptiveRoulette:
    @pytest.fixture(autouse=True)
    def without_gradients(self):
        with torch.no_grad():
            yield

    @pytest.mark.parametrize("tolerance", [0.01, 1.0, 30.0])
    def test_its_mean_is_the_logarithm_of_the_determinant(self, tolerance):
        a, x = contraction(6, 0.6), normal(1, 6).expand(20_000, 6)
        drawn = AdaptiveRoulette(tolerance)(linear(a, x), x, lipschitz=0.7, generator=seeded(0))
        assert_mean(drawn, torch.linalg.slogdet(torch.eye(6, dtype=DOUBLE) + a).logabsdet, sharp=0.1)

    @pytest.mark.parametrize("lipschitz", [0.3, 0.9])
    def test_at_its_worst_it_spreads_by_less_than_its_tolerance(self, lipschitz):
        """J = -L I: probes are exact, and the remainder is as large as its bound. A truncated series would be off."""
        d, tolerance = 4, 0.5
        a, x = -lipschitz * torch.eye(d, dtype=DOUBLE), torch.zeros(20_000, d, dtype=DOUBLE)
        drawn = AdaptiveRoulette(tolerance)(linear(a, x), x, lipschitz=lipschitz, generator=seeded(0))
        assert_mean(drawn, torch.tensor(d * math.log(1 - lipschitz), dtype=DOUBLE), sharp=0.01)
        assert 0.01 * tolerance < drawn.std() < tolerance
        assert (drawn - drawn.mean()).abs().max() < 10 * tolerance

    def test_every_term_is_divided_by_the_probability_of_reaching_it(self):
        """J = L I in one dimension: after n terms the bound of the remainder is L^(n+1) / ((n + 1) (1 - L))."""
        bound, tolerance = 0.5, 1.0
        v = torch.ones(1, 1, dtype=DOUBLE)
        reached = [1.0, *(min(1.0, bound ** (n + 1) / (n + 1) / (1 - bound) / tolerance) for n in range(1, 6))]
        for n in range(1, 6):
            u = torch.tensor([(reached[n - 1] + reached[n]) / 2], dtype=DOUBLE)  # below: goes on; above: stops
            got = adaptive_series(Jacobian(lambda w: bound * w), v, 50, bound, tolerance, u=u)
            expected = sum((-1) ** (k + 1) * bound**k / k / reached[k - 1] for k in range(1, n + 1))
            assert float(got) == pytest.approx(expected, rel=1e-12)

    def test_it_takes_fewer_terms_than_a_series_of_the_same_error(self):
        a, x, products = contraction(100, 0.3), normal(20, 100), []
        jacobian = Jacobian(lambda v: products.append(1) or v @ a)
        counts, errors = [], []
        whole = CertifiedSeries(1e-12)
        for estimator in (AdaptiveRoulette(1.0), CertifiedSeries(1e-3)):
            products.clear()
            drawn = [estimator(jacobian, x, lipschitz=0.9, generator=seeded(s)) for s in range(20)]
            counts.append(len(products) / 20)
            errors.append(torch.stack(drawn).std(0).mean())
        exact = torch.stack([whole(linear(a, x), x, lipschitz=0.9, generator=seeded(s)) for s in range(20)])
        assert counts[0] < 0.75 * counts[1]
        assert errors[0] < 1.2 * exact.std(0).mean()

    def test_the_trace_replaces_the_first_term(self):
        a, x = contraction(6, 0.6), normal(5, 6)
        known = Jacobian(lambda v: v @ a, trace=lambda: torch.full((5,), 7.0, dtype=DOUBLE))
        got, plain = (AdaptiveRoulette()(j, x, lipschitz=0.6, generator=seeded(0)) for j in (known, linear(a, x)))
        spread = [AdaptiveRoulette()(known, x, lipschitz=0.6, generator=seeded(s)) - 7 for s in range(2)]
        assert (got != plain).all()
        assert all((s.abs() < 7).all() for s in spread)

    def test_shared_it_has_nothing_to_do_with_the_samples_beside_it(self):
        scale = torch.tensor([0.01, 0.3, 0.9], dtype=DOUBLE)[:, None]
        a, x, series = contraction(5, 1.0), normal(3, 5), AdaptiveRoulette(1e-1, shared=True)
        together = series(Jacobian(lambda v: scale * (v @ a)), x, lipschitz=0.9, generator=seeded(0))
        for i, one in enumerate(scale):
            alone = series(Jacobian(lambda v, one=one: one * (v @ a)), x[:1], lipschitz=0.9, generator=seeded(0))
            torch.testing.assert_close(alone[0], together[i], rtol=1e-12, atol=1e-12)

    def test_randomness_comes_from_the_generator_alone(self):
        a, x, state = contraction(3, 0.7), normal(20, 3), torch.get_rng_state()
        first, again, other = (
            AdaptiveRoulette()(linear(a, x), x, lipschitz=0.7, generator=seeded(s)) for s in (1, 1, 2)
        )
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    @torch.enable_grad()
    def test_with_gradients_it_is_a_roulette(self):
        a, x = contraction(3, 0.7), normal(20, 3)
        got = AdaptiveRoulette()(linear(a, x), x, lipschitz=0.7, generator=seeded(0))
        assert torch.equal(got, RussianRoulette()(linear(a, x), x, lipschitz=0.7, generator=seeded(0)))

    @pytest.mark.parametrize("lipschitz", [None, 1.0])
    def test_without_a_contraction_it_is_refused(self, lipschitz):
        a, x = contraction(3, 0.7), normal(2, 3)
        with pytest.raises(ValueError, match=r"AdaptiveRoulette needs a proven contraction; got Lip\(g\) <="):
            AdaptiveRoulette()(linear(a, x), x, lipschitz=lipschitz)

    def test_without_a_jacobian_there_is_nothing_to_add(self):
        x = normal(3, 4)
        assert AdaptiveRoulette()(Jacobian(lambda v: 0 * v), x, lipschitz=0.0).tolist() == [0.0] * 3
        assert AdaptiveRoulette()(Jacobian(lambda v: 0 * v), x, lipschitz=0.9).tolist() == [0.0] * 3

    def test_a_tolerance_that_is_not_positive_is_refused(self):
        with pytest.raises(ValueError, match="tolerance must be positive; got 0"):
            AdaptiveRoulette(0.0)


class TestOneDrawForAll:
    """`StoppedRoulette`: the number of terms of a training step, the same for all samples and blocks."""

    def test_counts_have_the_distribution_of_the_roulette(self):
        """N >= k exactly for u <= q^(k - terms)."""
        roulette = RussianRoulette(terms=2, continuation=0.6)
        for k in range(2, 12):
            p = 0.6 ** (k - 2)
            assert roulette.stopped(0.7, u=p * (1 - 1e-9)).count >= k
            assert k == 2 or roulette.stopped(0.7, u=min(1.0, p * (1 + 1e-9))).count < k

    def test_weights_are_those_of_a_sample_that_drew_this_count(self):
        x = torch.zeros(200, 1, dtype=DOUBLE)
        value, gradient = roulette_weights(3, 0.7, x, seeded(0))
        i = int((value != 0).sum(0).argmax())
        stopped = StoppedRoulette(len(value), 3, 0.7)
        for got, expected in zip(stopped.weights(x), (value, gradient), strict=True):
            torch.testing.assert_close(got[:, 0], expected[:, i])

    @pytest.mark.no_cover
    @pytest.mark.parametrize("kind", ["mlp", "conv"])
    def test_value_and_gradient_are_unbiased(self, kind):
        """Groups of samples share a draw: the mean of a group is one draw of the estimate."""
        block, shape = block_of(kind, lipschitz=0.6)
        base, params = normal(2, *shape, seed=1), list(block.parameters())
        weight = torch.tensor([1.0, -2.0], dtype=DOUBLE)
        exact = block.forward_and_logdet(base)[1]
        expected = gradient((exact * weight).sum(), params)
        generator, x, roulette = seeded(2), base.repeat(30, *(1,) * len(shape)), RussianRoulette(terms=1)
        values, gradients, counts = [], [], set()
        for _ in range(250):
            stopped = roulette.stopped(0.6, 1 - torch.rand((), dtype=DOUBLE, generator=generator).item())
            counts.add(stopped.count)
            drawn = block.forward_and_logdet(x, estimator=stopped, generator=generator)[1].reshape(30, 2).mean(0)
            values.append(drawn.detach())
            gradients.append(gradient((drawn * weight).sum(), params))
        assert len(counts) > 4
        assert_mean(torch.stack(values), exact.detach(), sharp=0.2)
        for got, truth in zip(zip(*gradients, strict=True), expected, strict=True):
            assert_mean(torch.stack(got), truth, sharp=0.5)

    @pytest.mark.parametrize("u", [0.0, -0.5, 1.5, math.nan])
    def test_a_number_outside_of_the_unit_interval_is_refused(self, u):
        with pytest.raises(ValueError, match=r"u must lie in \(0, 1\]; got .*\. Draw it as 1 - torch.rand"):
            RussianRoulette().stopped(0.5, u)

    def test_a_bound_above_one_is_refused(self):
        with pytest.raises(ValueError, match="RussianRoulette needs a Lipschitz bound below 1"):
            RussianRoulette().stopped(1.2, 0.5)


class TestDefaults:
    def test_up_to_64_dimensions_the_determinant_is_exact(self):
        block = linear_block(contraction(64, 0.5))
        x = normal(2, 64)
        expected = torch.linalg.slogdet(torch.eye(64, dtype=DOUBLE) + block.g[0].weight).logabsdet
        for mode in (True, False):
            torch.testing.assert_close(block.train(mode).forward_and_logdet(x)[1], expected.expand(2))

    def test_beyond_that_training_needs_a_named_estimator(self):
        block = linear_block(contraction(65, 0.5)).train()
        with pytest.raises(
            ValueError, match=r"training in 65 dimensions needs an estimator; pass estimator=PowerSeries"
        ):
            block.forward_and_logdet(normal(2, 65))
        block.forward_and_logdet(normal(2, 65), estimator=PowerSeries(5))

    def test_beyond_that_eval_gives_the_same_number_twice_close_to_the_truth(self):
        a = contraction(70, 0.5)
        block, x = linear_block(a), normal(5, 70)
        first, again = (block.forward_and_logdet(x)[1] for _ in range(2))
        assert torch.equal(first, again)
        truth = torch.linalg.slogdet(torch.eye(70, dtype=DOUBLE) + a).logabsdet
        spread = math.sqrt(2 * (a.square().sum() - a.diagonal().square().sum()).item() / 4)
        assert (first - truth).abs().max() < 5 * spread

    def test_a_generator_changes_the_probes(self):
        block, x = linear_block(contraction(70, 0.5)), normal(5, 70)
        first, other = (block.forward_and_logdet(x, generator=seeded(s))[1] for s in (1, 2))
        assert not torch.equal(first, other)

    def test_in_eval_the_terms_follow_from_what_is_proven_not_from_what_was_asked(self):
        block = rouse_(ResidualBlock(contractive_mlp(70, (8,), lipschitz=0.5))).eval()
        with torch.no_grad():  # behind the back of the constraint: what was asked is still 0.5
            for p in block.parameters():
                p.add_(0.5 * normal(*p.shape, seed=3).float())
        assert block.bound((70,)).value > 1
        with pytest.raises(ValueError, match=r"needs a proven contraction; got Lip\(g\) <= "):
            block.forward_and_logdet(normal(2, 70).float())

    def test_an_expanding_block_cannot_choose_its_terms(self):
        block = linear_block(contraction(70, 0.5))
        with torch.no_grad():
            block.g[0].weight.mul_(3)
        with pytest.raises(ValueError, match="tighten_.model. repairs it. Or pass estimator=PowerSeries"):
            block.forward_and_logdet(normal(2, 70))


class Meter(TorchDispatchMode):
    """Bytes of all tensors alive, and their peak: exact, unlike what an allocator reports."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.known = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.meet(leaf.untyped_storage())
        return out

    def meet(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.forget, key, size)

    def forget(self, key, size):
        self.known.discard(key)
        self.live -= size


class TestMemory:
    @staticmethod
    def peak(block, x, estimator):
        params = list(block.parameters())
        with Meter() as meter:
            z, logdet = block.forward_and_logdet(x, estimator=estimator, generator=seeded(0))
            torch.autograd.grad(z.square().sum() - logdet.sum(), params)
        return meter.peak

    @pytest.mark.parametrize("kind", ["mlp", "conv", "user"])
    def test_forty_terms_take_no_more_memory_than_five(self, kind):
        torch.manual_seed(0)
        if kind == "mlp":
            block, x = ResidualBlock(contractive_mlp(32, (64, 64))), normal(64, 32, dtype=torch.float32)
        elif kind == "conv":
            block, x = ResidualBlock(contractive_convnet(3, 16)), normal(8, 3, 12, 12, dtype=torch.float32)
        else:
            block, x = ResidualBlock(UserNet(32), lipschitz=0.7), normal(64, 32, dtype=torch.float32)
        block(x)
        few, many = (self.peak(block, x, PowerSeries(terms)) for terms in (5, 40))
        assert few > x.nelement() * x.element_size()
        assert many <= 1.1 * few

    def test_the_meter_notices_a_series_that_keeps_its_graph(self):
        """The measurement can fail: the naive estimator, with a graph through all of its terms, needs far more."""
        torch.manual_seed(0)
        g, x = contractive_mlp(32, (64, 64)).eval(), normal(64, 32, dtype=torch.float32)

        def naive(terms):
            with Meter() as meter:
                y, pull = torch.func.vjp(g, x)
                v = w = torch.ones_like(x)
                total = torch.zeros(len(x))
                for k in range(1, terms + 1):
                    w = pull(w)[0]
                    total = total + (-1) ** (k + 1) / k * (w * v).sum(1)
                torch.autograd.grad(total.sum() + y.sum(), list(g.parameters()))
            return meter.peak

        assert naive(40) > 3 * naive(5)


def test_the_trace_of_a_network_without_parameters_to_train():
    """Frozen parameters: the gradient goes to x alone."""
    g = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double().requires_grad_(False)
    with torch.no_grad():
        g[0].weight.copy_(contraction(3, 0.8))
    x = normal(2, 3).requires_grad_()
    block = ResidualBlock(g)
    for estimator in (Exact(), PowerSeries(5)):
        (got,) = torch.autograd.grad(block.forward_and_logdet(x, estimator=estimator)[1].sum(), x)
        assert got.abs().max() > 0

"""A transform as one of `torch.distributions`: torch's own rules hold for it, in both directions."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributions import (
    AffineTransform,
    ComposeTransform,
    Independent,
    MultivariateNormal,
    Normal,
    SigmoidTransform,
    TransformedDistribution,
    constraints,
)

from iresnet import (
    Bijector,
    Chain,
    DiagonalNormal,
    Flatten,
    Flow,
    InjectivePad,
    NormalMixture,
    PowerSeries,
    ResidualBlock,
    Squeeze,
    contractive_convnet,
    contractive_mlp,
    mlp_flow,
    tighten_,
)
from iresnet.transforms import AffineCoupling
from tests.zoo import DOUBLE, contraction, linear_block, normal, rouse_


def flow_of(d=2, **options):
    torch.manual_seed(0)
    flow = rouse_(mlp_flow(d, blocks=2, hidden=(8,), **options)).to(DOUBLE).eval()
    tighten_(flow)
    return flow


def image_flow():
    """Images (1, 4, 4) whose codes are vectors of 16 numbers."""
    torch.manual_seed(0)
    chain = Chain(Squeeze(), ResidualBlock(contractive_convnet(4, hidden=3, kernels=(3, 1))), Flatten((4, 2, 2)))
    return Flow(rouse_(chain), DiagonalNormal(16), event_shape=(1, 4, 4)).to(DOUBLE).eval()


def standard_normal(*shape):
    return Independent(Normal(torch.zeros(shape, dtype=DOUBLE), 1.0), len(shape))


def pushed(flow, context=None):
    """The density of a flow as torch users write it: its base, pushed from codes to data."""
    return TransformedDistribution(standard_normal(*flow.base.shape), [flow.bijector(context).inv])


class TestKnownAnswers:
    """x + A x, of which linear algebra knows everything."""

    a = contraction(3, 0.7)
    matrix = torch.eye(3, dtype=DOUBLE) + a

    def test_the_map_its_inverse_and_the_log_determinants(self):
        t, x = Bijector(linear_block(self.a), 3), normal(5, 3)
        z = t(x)
        logdet = torch.linalg.slogdet(self.matrix).logabsdet
        torch.testing.assert_close(z, x @ self.matrix.T)
        torch.testing.assert_close(t.inv(z), x)
        torch.testing.assert_close(t.log_abs_det_jacobian(x, z), logdet.expand(5))
        torch.testing.assert_close(t.inv.log_abs_det_jacobian(z, x), -logdet.expand(5))

    def test_a_base_pushed_to_the_data_is_the_known_normal(self):
        law = TransformedDistribution(standard_normal(3), [Bijector(linear_block(self.a), 3).inv])
        inverse = torch.linalg.inv(self.matrix)
        truth = MultivariateNormal(torch.zeros(3, dtype=DOUBLE), inverse @ inverse.T)
        x = normal(5, 3)
        torch.testing.assert_close(law.log_prob(x), truth.log_prob(x))
        torch.manual_seed(0)
        z = standard_normal(3).sample((7,))
        torch.manual_seed(0)
        torch.testing.assert_close(law.sample((7,)), z @ inverse.T)

    def test_a_base_pushed_to_the_codes_is_the_known_normal(self):
        law = TransformedDistribution(standard_normal(3), [Bijector(linear_block(self.a), 3)])
        truth = MultivariateNormal(torch.zeros(3, dtype=DOUBLE), self.matrix @ self.matrix.T)
        z = normal(5, 3)
        torch.testing.assert_close(law.log_prob(z), truth.log_prob(z))


class TestAgreementWithTheFlow:
    @pytest.mark.parametrize("make", [flow_of, image_flow])
    def test_density_and_samples_are_those_of_the_flow(self, make):
        flow = make()
        law, data = pushed(flow), flow.event_shape or (2,)
        assert (law.batch_shape, law.event_shape) == ((), data)
        x = normal(5, *data)
        torch.testing.assert_close(law.log_prob(x), flow.log_prob(x))
        for lead in [(), (4,), (2, 3)]:
            assert law.sample(lead).shape == (*lead, *data)
            assert law.log_prob(law.sample(lead)).shape == lead
        torch.manual_seed(0)
        x = law.sample((6,))
        torch.manual_seed(0)
        torch.testing.assert_close(x, flow.sample((6,)))

    def test_beyond_64_dimensions_it_is_the_same_number_twice(self):
        """The estimates use the probes of the flow, from a fixed seed."""
        flow, x = flow_of(80), normal(3, 80)
        with torch.no_grad():
            assert torch.equal(pushed(flow).log_prob(x), flow.log_prob(x))

    def test_training_uses_the_estimator_of_the_flow(self):
        flow = flow_of(80, estimator=PowerSeries(terms=2)).train()
        flow(normal(9, 80))
        assert pushed(flow).log_prob(normal(3, 80)).requires_grad
        with pytest.raises(ValueError, match="training in 80 dimensions needs an estimator"):
            pushed(flow_of(80).train()).log_prob(normal(3, 80))

    def test_norms_are_refreshed_once_for_value_and_log_determinant(self):
        """Trap: a step of power iteration between both would give the code of one network, and ln det of another."""
        flow = flow_of(3).train()
        with torch.no_grad():
            for p in flow.parameters():
                p.mul_(3)  # far from the norms of the last step
        twin, x = copy.deepcopy(flow), normal(9, 3)
        torch.testing.assert_close(pushed(flow).log_prob(x), twin(x), rtol=1e-12, atol=1e-12)

    def test_it_follows_the_weights(self):
        flow, x = flow_of(), normal(5, 2)
        law = pushed(flow)
        before = law.log_prob(x)
        with torch.no_grad():
            for p in flow.parameters():
                p.mul_(0.9)
        torch.testing.assert_close(law.log_prob(x), flow.log_prob(x))
        assert not torch.allclose(law.log_prob(x), before)

    def test_samples_before_the_first_batch_are_refused(self):
        law = pushed(mlp_flow(2, blocks=1, hidden=(4,)).double())
        with pytest.raises(
            ValueError, match=r"the first batch in training initialises ActNorms.*call the flow on data"
        ):
            law.rsample((3,))


class TestContexts:
    def test_the_density_is_that_of_the_flow_for_every_context(self):
        flow, c = flow_of(context=3), normal(4, 3, seed=5)
        law, x = pushed(flow, c), normal(6, 4, 2, seed=6)
        assert (law.batch_shape, law.event_shape) == ((4,), (2,))
        for value in (x, x[0], x[:, :1], x[0, 0]):
            torch.testing.assert_close(law.log_prob(value), flow.given(c).log_prob(value))
        assert law.sample((7,)).shape == (7, 4, 2)
        assert law.expand((5, 4)).log_prob(x[:5]).shape == (5, 4)

    def test_a_single_context_has_no_batch(self):
        flow, c = flow_of(context=3), normal(3, seed=5)
        law, x = pushed(flow, c), normal(6, 2)
        assert law.batch_shape == ()
        torch.testing.assert_close(law.log_prob(x), flow.log_prob(x, c))

    def test_given_replaces_the_context(self):
        flow, c, x = flow_of(context=3), normal(4, 3, seed=5), normal(4, 2)
        t = flow.bijector()
        torch.testing.assert_close(t.given(c)(x), flow.encode(x, c))
        torch.testing.assert_close(t.given(c).given(2 * c)(x), flow.encode(x, 2 * c))
        with pytest.raises(ValueError, match="this network is conditional; pass context"):
            t(x)

    def test_shapes_are_broadcast_with_the_contexts(self):
        t = flow_of(context=3).bijector(normal(4, 3))
        assert t.forward_shape((2,)) == t.inverse_shape((1, 2)) == (4, 2)
        assert t.forward_shape((5, 1, 2)) == (5, 4, 2)
        with pytest.raises(
            ValueError, match=r"x must have shape \(..., 2\), where ... is broadcast with the 4 contexts"
        ):
            t(normal(3, 2))

    def test_a_context_that_nobody_takes_is_refused(self):
        with pytest.raises(ValueError, match="context must be None for a Chain that takes no context"):
            flow_of().bijector(normal(4, 3))


class TestTorchsRules:
    """What every transform of torch promises."""

    @pytest.mark.parametrize("make", [flow_of, image_flow])
    @pytest.mark.parametrize("cache_size", [0, 1])
    def test_the_inverse_undoes_the_map(self, make, cache_size):
        t, flow = make().bijector().with_cache(cache_size), make()
        x = normal(5, *(flow.event_shape or (2,)))
        z = t(x)
        assert t.inv.inv is t
        assert t.bijective
        torch.testing.assert_close(t.inv(z), x)
        torch.testing.assert_close(t(t.inv(z.clone())), z)

    @pytest.mark.parametrize("make", [flow_of, image_flow])
    def test_log_determinants_are_those_of_the_jacobian(self, make):
        t, flow = make().bijector(), make()
        x = normal(*(flow.event_shape or (2,)))
        d = x.numel()
        jacobian = torch.autograd.functional.jacobian(t, x).reshape(d, d)
        torch.testing.assert_close(t.log_abs_det_jacobian(x, t(x)), torch.linalg.slogdet(jacobian).logabsdet)
        z = t(x)
        jacobian = torch.autograd.functional.jacobian(t.inv, z).reshape(d, d)
        torch.testing.assert_close(t.inv.log_abs_det_jacobian(z, x), torch.linalg.slogdet(jacobian).logabsdet)

    def test_domain_codomain_and_shapes(self):
        t = image_flow().bijector()
        assert (t.domain.event_dim, t.codomain.event_dim) == (3, 1)
        assert t.domain.check(torch.zeros(2, 1, 4, 4)).tolist() == [True, True]
        assert t.forward_shape((5, 1, 4, 4)) == (5, 16)
        assert t.inv.forward_shape((5, 16)) == t.inverse_shape((5, 16)) == (5, 1, 4, 4)
        assert flow_of().bijector().event_dim == 1
        assert isinstance(flow_of().bijector().codomain, type(constraints.real_vector))

    def test_a_sign_is_not_defined(self):
        for t in (flow_of().bijector(), flow_of().bijector().inv):
            with pytest.raises(NotImplementedError, match="a sign is defined for maps of single numbers; got vectors"):
                _ = t.sign

    def test_it_composes_with_torchs_transforms(self):
        flow, x = flow_of(), normal(5, 2)
        shift = AffineTransform(torch.tensor([1.0, -2.0], dtype=DOUBLE), 3.0, event_dim=1)
        for parts in ([shift, flow.bijector()], [flow.bijector().inv, shift], [flow.bijector(), SigmoidTransform()]):
            t = ComposeTransform(parts)
            y = t(x)
            torch.testing.assert_close(t.inv(y), x)
            jacobians = torch.stack([torch.autograd.functional.jacobian(t, row) for row in x])
            torch.testing.assert_close(t.log_abs_det_jacobian(x, y), torch.linalg.slogdet(jacobians).logabsdet)

    def test_a_density_on_an_interval(self):
        """Data in (0, 1), by torch's own sigmoid behind the flow."""
        law = TransformedDistribution(standard_normal(2), [flow_of().bijector().inv, SigmoidTransform()])
        axis = torch.linspace(0.0005, 0.9995, 1000, dtype=DOUBLE)
        with torch.no_grad():
            total = law.log_prob(torch.cartesian_prod(axis, axis)).exp().mean()
        assert total.item() == pytest.approx(1, abs=2e-2)
        x = law.sample((50,))
        assert ((x > 0) & (x < 1)).all()

    def test_values_are_validated(self):
        # torch.compile, in an earlier test, turns the default off.
        law = TransformedDistribution(standard_normal(2), [flow_of().bijector().inv], validate_args=True)
        with pytest.raises(ValueError, match="within the support"):
            law.log_prob(torch.tensor([float("nan"), 0.0], dtype=DOUBLE))

    def test_copies_and_pickles(self):
        t, x = flow_of().bijector().with_cache(), normal(5, 2)
        z = t(x)  # the cache holds a graph, which cannot be copied
        for twin in (copy.deepcopy(t), pickle.loads(pickle.dumps(t))):
            assert torch.equal(twin(x), z)
            assert twin.transform is not t.transform

    def test_it_says_what_it_is(self):
        assert repr(flow_of().bijector()) == "Bijector(Chain, event_shape=(2,))"
        assert repr(flow_of(context=3).bijector(normal(4, 3))) == "Bijector(Chain, event_shape=(2,), context=(4, 3))"


class TestGradients:
    def test_of_the_density(self):
        flow, x = flow_of(), normal(5, 2)
        parameters = list(flow.transform.parameters())
        expected = torch.autograd.grad(flow(x).sum(), parameters)
        got = torch.autograd.grad(pushed(flow).log_prob(x).sum(), parameters)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)

    @pytest.mark.parametrize("cache_size", [0, 1])
    def test_of_samples_and_their_density(self, cache_size):
        """E_q[ln q(x)], as in variational inference, is differentiated through samples and density."""
        flow = flow_of()
        parameters = list(flow.transform.parameters())
        x, log_q = flow.rsample_and_log_prob((20,), generator=torch.Generator().manual_seed(0))
        expected = torch.autograd.grad((log_q + x.square().sum(-1)).mean(), parameters)
        z = flow.base.rsample(20, torch.Generator().manual_seed(0))
        t = flow.bijector().with_cache(cache_size).inv
        x = t(z)
        log_q = standard_normal(2).log_prob(t.inv(x)) - t.log_abs_det_jacobian(z, x)
        got = torch.autograd.grad((log_q + x.square().sum(-1)).mean(), parameters)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-6)

    @pytest.mark.parametrize("inverse", [False, True])
    def test_of_both_directions_by_finite_differences(self, inverse):
        t = flow_of().bijector()
        t = t.inv if inverse else t
        x = normal(3, 2).requires_grad_()
        assert torch.autograd.gradcheck(t, x, atol=1e-6)
        assert torch.autograd.gradcheck(lambda x: t.log_abs_det_jacobian(x, t(x)), x, atol=1e-6)


class TestCache:
    @pytest.fixture
    def t(self):
        return flow_of().bijector().with_cache()

    def test_a_pair_is_kept(self, t):
        x = normal(5, 2)
        z = t(x)
        assert t(x) is z
        assert t.inv(z) is x
        assert t.with_cache() is t
        assert t.with_cache(0)._cache_size == 0

    def test_not_for_other_weights(self, t):
        """Trap: torch keeps the pair; in a loop over one batch, every step after the first would see the old codes."""
        x = normal(5, 2)
        before = t(x)
        with torch.no_grad():
            next(t.transform.parameters()).mul_(0.5)
        assert not torch.allclose(t(x), before)
        torch.testing.assert_close(t(x), t.transform(x))

    def test_not_without_its_graph(self, t):
        """Trap: the density of a sample drawn without gradients would have lost those of the base."""
        with torch.no_grad():
            x = t.inv(normal(5, 2))
        assert t(x).requires_grad

    @pytest.mark.parametrize("which", ["x", "z"])
    def test_not_after_a_change_in_place(self, t, which):
        with torch.no_grad():
            x = normal(5, 2)
            z = t(x)
            (x if which == "x" else z).add_(1)
            torch.testing.assert_close(t(x), t.transform(x))
            z = t(x)
            (x if which == "x" else z).add_(1)
            torch.testing.assert_close(t.transform(t.inv(z)), z)

    def test_not_in_another_mode(self):
        conditioner = nn.Sequential(nn.Linear(1, 8), nn.Dropout(), nn.Linear(8, 2)).double()
        t = Bijector(AffineCoupling(conditioner).train(), 2).with_cache()
        x = normal(5, 2)
        z = t(x)
        t.transform.eval()
        torch.testing.assert_close(t.transform(t.inv(z)), z)

    def test_not_without_the_gradient_of_x(self, t):
        x = normal(5, 2)
        t.transform.requires_grad_(False)
        assert not t(x).requires_grad
        assert t(x.requires_grad_()).requires_grad
        (gradient,) = torch.autograd.grad(t(x).sum(), x)
        assert gradient.shape == x.shape
        t.transform.requires_grad_(True)
        assert all(p.requires_grad for p in t.transform.parameters())
        t(x).sum().backward()
        assert any(p.grad is not None for p in t.transform.parameters())

    def test_not_of_a_value_that_is_broadcast(self):
        t, x = flow_of(context=3).bijector(normal(4, 3)).with_cache(), normal(2)
        z = t(x)
        assert t.inv(z).shape == z.shape == (4, 2)
        torch.testing.assert_close(t.inv(z), x.expand(4, 2))
        assert t(t.inv(x)).shape == (4, 2)

    def test_only_sizes_0_and_1(self):
        with pytest.raises(ValueError, match="cache_size must be 0 or 1"):
            flow_of().bijector().with_cache(2)


class TestRefused:
    def test_what_is_no_bijection(self):
        with pytest.raises(ValueError, match=r"must keep the dimension; got 3 numbers, whose codes have 5"):
            Bijector(InjectivePad(2), 3)

    def test_what_is_no_transform(self):
        with pytest.raises(ValueError, match=r"must be a Transform; got Flow.*flow.bijector\(\)"):
            Bijector(flow_of(), 2)
        with pytest.raises(ValueError, match="the transform must be a Transform; got Linear"):
            Bijector(nn.Linear(2, 2), 2)

    @pytest.mark.parametrize("shape", [(), 0, (2, -1), 2.5, "2"], ids=repr)
    def test_event_shapes_that_are_none(self, shape):
        with pytest.raises(ValueError, match="event_shape must be the shape of one sample"):
            Bijector(ResidualBlock(contractive_mlp(2)), shape)

    def test_values_of_another_shape(self):
        t = flow_of().bijector()
        with pytest.raises(ValueError, match=r"x must have shape \(..., 2\); got \(5, 3\)"):
            t(normal(5, 3))
        with pytest.raises(ValueError, match=r"z must have shape \(..., 2\); got \(3,\)"):
            t.inv(normal(3))
        with pytest.raises(ValueError, match=r"z must have shape \(..., 2\); got \(3,\)"):
            TransformedDistribution(standard_normal(3), [t.inv])
        with pytest.raises(ValueError, match="x must be a tensor; got list"):
            t([1.0, 2.0])

    def test_numbers_that_are_not_finite(self):
        t, bad = flow_of().bijector(), torch.full((3, 2), torch.nan, dtype=DOUBLE)
        with pytest.raises(ValueError, match="x must be finite"):
            t(bad)
        with pytest.raises(ValueError, match="z must be finite"):
            t.inv(bad)


def test_a_flow_with_another_base_gives_its_transform():
    """The base belongs to the flow; a bijector is the transform alone."""
    flow = Flow(ResidualBlock(contractive_mlp(2)), NormalMixture(2, components=3)).double().eval()
    law = pushed(flow)
    x = normal(5, 2)
    z, logdet = flow.transform.forward_and_logdet(x)
    torch.testing.assert_close(law.log_prob(x), standard_normal(2).log_prob(z) + logdet)

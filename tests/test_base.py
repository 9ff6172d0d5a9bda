"""Base distributions against torch.distributions, and what they refuse."""

import pytest
import torch
from torch import distributions as D

from iresnet import ActNorm, Chain, DiagonalNormal, Flow, FullMixture, NormalMixture, Posterior
from iresnet.data import Schema
from iresnet.models import Network, build


def mixture(shape=(2, 3), components=4):
    torch.manual_seed(1)
    base = NormalMixture(shape, components)
    with torch.no_grad():
        base.mean.normal_(0, 3)
        base.log_scale.normal_(0, 0.3)
        base.weight_logits.normal_()
    return base.double()


def reference(base):
    weights = D.Categorical(logits=base.weight_logits)
    parts = D.Independent(D.Normal(base.mean, base.log_scale.exp()), len(base.shape))
    return D.MixtureSameFamily(weights, parts)


class TestMixture:
    @pytest.mark.parametrize("shape", [(3,), (2, 3), (4, 2, 2)])
    def test_density_is_that_of_torch(self, shape):
        base = mixture(shape)
        z = torch.randn(7, *shape, dtype=torch.float64) * 3
        assert torch.allclose(base.log_prob(z), reference(base).log_prob(z))
        assert base.log_prob(z.expand(5, *z.shape)).shape == (5, 7)

    def test_samples_have_its_mean_and_variance(self):
        base = mixture((3,))
        z = base.rsample(40_000, torch.Generator().manual_seed(0)).detach()
        truth = reference(base)
        error = truth.variance.sqrt() / 200
        assert bool(((z.mean(0) - truth.mean).abs() < 4 * error).all())
        assert torch.allclose(z.var(0), truth.variance, rtol=0.05)

    def test_at_temperature_zero_samples_are_the_means(self):
        base = mixture((3,))
        z = base.rsample(200, torch.Generator().manual_seed(0), temperature=0.0)
        nearest = (z[:, None] - base.mean).abs().sum(-1).min(1).values
        assert float(nearest.detach().max()) == 0.0

    def test_means_start_apart(self):
        base = NormalMixture(8, 5)
        assert float(torch.pdist(base.mean.detach()).min()) > 0

    def test_one_component_is_refused(self):
        with pytest.raises(ValueError, match="components must be at least 2; got 1. Use DiagonalNormal"):
            NormalMixture(3, 1)

    def test_its_samples_cannot_be_differentiated(self):
        flow = Flow(Chain(ActNorm(3)), NormalMixture(3, 2)).eval()
        with pytest.raises(ValueError, match="need a reparametrised base; got a NormalMixture"):
            flow.rsample_and_log_prob(4)
        assert flow.sample(4).shape == (4, 3)

    def test_a_mixture_separates_clusters_that_one_normal_cannot(self):
        """Two clusters far apart: the mixture reaches their entropy, one normal must cover the gap."""
        torch.manual_seed(0)
        x = torch.randn(2_000, 1) * 0.1 + torch.tensor([-3.0, 3.0])[torch.randint(2, (2_000, 1))]
        losses = []
        for base in (DiagonalNormal(1, learned=True), NormalMixture(1, 2)):
            optimiser = torch.optim.Adam(base.parameters(), 0.05)
            for _ in range(300):
                loss = -base.log_prob(x).mean()
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            losses.append(float(loss.detach()))
        entropy = 0.5 * torch.log(torch.tensor(2 * torch.pi * torch.e * 0.01)) + torch.log(torch.tensor(2.0))
        assert losses[1] < float(entropy) + 0.05
        assert losses[0] > losses[1] + 1.0


class TestPosterior:
    def test_is_bayes_rule(self):
        base = mixture((3,))
        z = torch.randn(6, 3, dtype=torch.float64)
        p = Posterior(base)(z).softmax(-1)
        parts = D.Independent(D.Normal(base.mean, base.log_scale.exp()), 1).log_prob(z[:, None]).exp()
        weights = base.weight_logits.softmax(0)
        assert torch.allclose(p, weights * parts / (weights * parts).sum(-1, keepdim=True))

    def test_classes_of_a_hybrid_follow_from_its_density(self):
        """ln p(x) = logsumexp of ln p(x, y) over the classes: one number, two readings."""
        schema = Schema((2,), classes=("a", "b", "c"))
        model = build(Network(blocks=(1,), width=4, preprocessing="standardise", bayes=True), schema, "hybrid")
        x = torch.randn(5, 2)
        model(x)
        log_prob, logits = model.eval()(x)
        _, logdet = model.transform.forward_and_logdet(x)
        assert torch.allclose(log_prob, logits.logsumexp(1) + logdet, atol=1e-5)
        assert sum(p.numel() for p in model.head.parameters()) == 3 * (2 + 2 + 1)
        assert model.head.base is model.base

    def test_samples_of_one_component_can_be_drawn(self):
        base = mixture((3,))
        z = base.rsample(50, torch.Generator().manual_seed(0), temperature=0.0, component=2)
        assert torch.equal(z, base.mean[2].expand(50, 3))


def test_normal_at_a_temperature():
    base = DiagonalNormal((2,), learned=True)
    z = base.rsample(10_000, torch.Generator().manual_seed(0), temperature=0.5).detach()
    assert torch.allclose(z.std(0), torch.tensor([0.5, 0.5]), rtol=0.05)


def test_components_of_a_network_make_the_base():
    network = Network(blocks=(1,), width=4, preprocessing="standardise", components=3)
    flow = build(network, Schema((2,)), "density")
    assert isinstance(flow.base, NormalMixture)
    assert flow.base.mean.shape == (3, 2)


def full_mixture(d=3, components=2, **options):
    """A mixture with random covariances, and the same by torch."""
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(components, d, d, generator=generator, dtype=torch.float64)
    means = 2 * torch.randn(components, d, generator=generator, dtype=torch.float64)
    weights = torch.rand(components, generator=generator, dtype=torch.float64) + 0.2
    covariances = a @ a.mT + 0.1 * torch.eye(d, dtype=torch.float64)
    base = FullMixture(d, components, **options).double().set_(weights / weights.sum(), means, covariances)
    parts = D.MultivariateNormal(means, covariances)
    return base, D.MixtureSameFamily(D.Categorical(weights), parts)


class TestFullMixture:
    @pytest.mark.parametrize("components", [1, 2, 5])
    def test_density_is_that_of_torch(self, components):
        base, truth = full_mixture(components=components)
        z = 3 * torch.randn(7, 3, dtype=torch.float64)
        assert torch.allclose(base.log_prob(z), truth.log_prob(z))
        assert base.log_prob(z.expand(5, *z.shape)).shape == (5, 7)
        assert base.components == components

    def test_samples_have_its_mean_and_covariance(self):
        base, truth = full_mixture()
        z = base.rsample(40_000, torch.Generator().manual_seed(0)).detach()
        assert bool(((z.mean(0) - truth.mean).abs() < 4 * truth.variance.sqrt() / 200).all())
        one = base.rsample(40_000, torch.Generator().manual_seed(0), component=1).detach()
        covariance = truth.component_distribution.covariance_matrix[1]
        assert torch.allclose(torch.cov(one.T), covariance, atol=0.05 * float(covariance.abs().max()))

    def test_at_temperature_zero_samples_are_the_means(self):
        base, _ = full_mixture()
        z = base.rsample(50, torch.Generator().manual_seed(0), temperature=0.0)
        assert float((z[:, None] - base.mean).abs().sum(-1).min(1).values.detach().max()) == 0.0

    def test_codes_of_any_shape_are_flattened(self):
        base = FullMixture((2, 2), 3)
        z = torch.randn(5, 2, 2)
        assert torch.allclose(
            base.log_prob(z),
            D.MixtureSameFamily(
                D.Categorical(torch.ones(3)), D.MultivariateNormal(base.mean, torch.eye(4).expand(3, 4, 4))
            ).log_prob(z.flatten(1)),
        )
        assert base.rsample(6).shape == (6, 2, 2)

    def test_it_is_learned_or_fixed(self):
        assert len(list(full_mixture()[0].parameters())) == 3
        fixed, truth = full_mixture(learned=False)
        assert not list(fixed.parameters())
        z = torch.randn(4, 3, dtype=torch.float64)
        assert torch.allclose(fixed.log_prob(z), truth.log_prob(z))

    def test_no_component_is_refused(self):
        with pytest.raises(ValueError, match="components must be at least 1; got 0"):
            FullMixture(3, 0)


@pytest.mark.parametrize("base", [NormalMixture(2, 5), FullMixture(2, 3)], ids=["diagonal", "full"])
def test_nothing_is_proven_of_a_mixture_whose_weights_do_not_sum_to_one(base):
    """Trap: a single logit is a weight of one for every component."""
    flow = Flow(Chain(ActNorm(2)), base).eval()
    assert flow.log_prob_with_error(torch.zeros(1, 2)).proven
    base.weight_logits = torch.nn.Parameter(torch.zeros(1))
    found = flow.log_prob_with_error(torch.zeros(1, 2))
    assert not found.proven
    assert torch.isinf(found.bias_bound).all()
    assert "must have one weight per component; got 1" in base.why_unknown()

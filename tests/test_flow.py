"""Flows: densities integrate to one, samples follow them, and the reported errors hold."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import (
    Categorical,
    Distribution,
    Independent,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    TransformedDistribution,
)
from torch.optim.swa_utils import AveragedModel

from iresnet import (
    ActNorm,
    Banach,
    Bijector,
    CertifiedSeries,
    Chain,
    Classifier,
    Conditioned,
    ConvergenceError,
    DiagonalNormal,
    Exact,
    Flow,
    Hybrid,
    InjectivePad,
    Logit,
    Multiscale,
    PowerSeries,
    ResidualBlock,
    RussianRoulette,
    Squeeze,
    Standardise,
    contractive_convnet,
    contractive_mlp,
    mlp_flow,
    tighten_,
)
from iresnet.inverse import decoder
from iresnet.transforms import AffineCoupling
from iresnet.trust import NoBoundKnown
from tests.zoo import DOUBLE, contraction, linear_block, normal, rouse_


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def flow_of(d=2, blocks=3, dtype=DOUBLE, **options):
    torch.manual_seed(0)
    flow = rouse_(mlp_flow(d, blocks=blocks, **{"hidden": (8,), **options})).to(dtype).eval()
    tighten_(flow)
    return flow


def affine(d=3):
    """A flow whose density is a normal distribution that linear algebra knows."""
    norm = ActNorm(d).double()
    with torch.no_grad():
        norm.shift.copy_(normal(d, seed=1))
        norm.log_scale.copy_(0.3 * normal(d, seed=2))
    a = contraction(d, 0.7, seed=3)
    flow = Flow(Chain(norm, linear_block(a)), DiagonalNormal(d).double()).eval()
    matrix = (torch.eye(d, dtype=DOUBLE) + a) @ torch.diag(norm.log_scale.exp()).detach()
    inverse = torch.linalg.inv(matrix)
    return flow, MultivariateNormal(-norm.shift.detach(), inverse @ inverse.T)


class TestDensity:
    @pytest.mark.parametrize("estimator", [None, PowerSeries(40, probes=8)], ids=["exact", "series"])
    def test_it_integrates_to_one(self, estimator):
        flow = flow_of()
        axis = torch.linspace(-12, 12, 121 if estimator else 241, dtype=DOUBLE)
        grid = torch.cartesian_prod(axis, axis)
        with torch.no_grad():
            total = flow.log_prob(grid, estimator=estimator, generator=seeded()).exp().sum() * (axis[1] - axis[0]) ** 2
        assert total.item() == pytest.approx(1, abs=1e-4 if estimator is None else 0.05)

    def test_likelihoods_are_in_data_units(self):
        """Logit and Standardise belong to the model: the density on [0, 1] integrates to one in the data's own unit."""
        torch.manual_seed(0)
        block = ResidualBlock(contractive_mlp(1, (8,)))
        chain = Chain(Logit(levels=1), Standardise([0.1], [1.5]), rouse_(block)).double().eval()
        flow = Flow(chain, DiagonalNormal(1).double()).eval()
        edge = 0.05 / 0.9 - 1e-9  # Logit is defined a little beyond the interval
        x = torch.linspace(-edge, 1 + edge, 400_001, dtype=DOUBLE)[:, None]
        with torch.no_grad():
            p = flow(x).exp()
        assert torch.trapezoid(p, x[:, 0]).item() == pytest.approx(1, abs=1e-3)

    def test_an_affine_flow_is_a_normal_distribution(self):
        flow, truth = affine()
        x = 2 * normal(50, 3, seed=5)
        torch.testing.assert_close(flow(x), truth.log_prob(x))

    def test_samples_of_an_affine_flow_have_its_moments(self):
        flow, truth = affine()
        x, n = flow.sample((20_000,), generator=seeded()), 20_000
        error = (truth.variance / n).sqrt()
        assert ((x.mean(0) - truth.mean).abs() <= 4 * error).all()
        covariance, expected = torch.cov(x.T), truth.covariance_matrix
        # Var of a sample covariance of normals: (s_ii s_jj + s_ij^2) / n
        spread = ((torch.outer(truth.variance, truth.variance) + expected.square()) / n).sqrt()
        assert ((covariance - expected).abs() <= 4 * spread).all()

    def test_samples_follow_the_density(self):
        """E[f(x)] over samples equals the integral of f p, for a nonlinear flow."""
        flow = flow_of()
        axis = torch.linspace(-12, 12, 241, dtype=DOUBLE)
        grid = torch.cartesian_prod(axis, axis)
        with torch.no_grad():
            p = flow(grid).exp() * (axis[1] - axis[0]) ** 2
        x = flow.sample((4000,), generator=seeded())
        for f in (lambda t: t[:, 0], lambda t: t[:, 1].square(), lambda t: (t[:, 0] > t[:, 1]).double(), torch.sin):
            values = f(x).reshape(4000, -1)
            truth = (p[:, None] * f(grid).reshape(len(grid), -1)).sum(0)
            error = values.std(0) / math.sqrt(4000)
            assert ((values.mean(0) - truth).abs() <= 4 * error).all()

    def test_forward_is_log_prob_and_everything_that_wraps_forward_wraps_it(self):
        """Trap: under DDP only `forward` synchronises gradients; a log_prob beside it trains each rank alone."""
        flow, x, seen = flow_of(), normal(3, 2), []
        flow.register_forward_hook(lambda *_: seen.append(1))
        assert torch.equal(flow.log_prob(x), flow(x))
        assert len(seen) == 2

    def test_the_base_is_a_normal_distribution_of_its_shape(self):
        base = DiagonalNormal((2, 3), learned=True).double()
        with torch.no_grad():
            base.mean.copy_(normal(2, 3))
            base.log_scale.copy_(0.2 * normal(2, 3, seed=1))
        z = normal(4, 5, 2, 3, seed=2)
        truth = Normal(base.mean, base.log_scale.exp())
        torch.testing.assert_close(base.log_prob(z), truth.log_prob(z).sum((-2, -1)))
        drawn = base.rsample(20_000, seeded())
        assert ((drawn.mean(0) - base.mean).abs() <= 4 * base.log_scale.exp() / math.sqrt(20_000)).all()
        assert {name for name, _ in base.named_parameters()} == {"mean", "log_scale"}
        assert list(DiagonalNormal(2).parameters()) == []

    def test_a_learned_base_and_a_multiscale_transform(self):
        stages = [
            Chain(Squeeze(), ResidualBlock(contractive_convnet(4, 4, kernels=(3, 1)))),
            ResidualBlock(contractive_convnet(2, 4, kernels=(3, 1))),
        ]
        flow = Flow(Multiscale(stages, input_shape=(1, 4, 4)), DiagonalNormal(16, learned=True)).double()
        rouse_(flow).eval()
        x = normal(3, 1, 4, 4)
        z, logdet = flow.transform.forward_and_logdet(x)
        torch.testing.assert_close(flow(x), flow.base.log_prob(z) + logdet)
        assert flow.sample((2,)).shape == (2, 1, 4, 4)
        flow(x).sum().backward()
        assert flow.base.mean.grad.abs().max() > 0


class TestCodes:
    def test_a_flow_encodes_and_decodes(self):
        flow = flow_of().eval()
        x = normal(5, 2)
        assert torch.equal(flow.encode(x), flow.transform(x))
        torch.testing.assert_close(flow.decode(flow.encode(x)), x, atol=1e-9, rtol=0)

    def test_decode_passes_tolerance_and_solver_on(self):
        flow = flow_of().eval()
        with pytest.raises(ConvergenceError):
            flow.decode(flow.encode(normal(1, 2)), tolerance=1e-12, solver=Banach(max_iterations=1))

    def test_a_context_that_nobody_takes_is_refused(self):
        flow = flow_of().eval()
        for function in (flow.encode, flow.decode):
            with pytest.raises(ValueError, match="context must be None"):
                function(normal(1, 2), normal(1, 3))


class TestSampling:
    def test_a_sample_and_its_density_belong_together(self):
        """Trap: the log-determinant of the inverse must be taken at x, not at the code."""
        flow = flow_of()
        x, log_prob = flow.rsample_and_log_prob((50,), generator=seeded())
        torch.testing.assert_close(log_prob, flow.log_prob(x), atol=1e-8, rtol=1e-8)
        z = flow.base.rsample(50, seeded())
        at_z = flow.base.log_prob(z) + flow.transform.forward_and_logdet(z)[1]
        assert (log_prob - at_z).abs().max() > 0.1

    def test_the_gradient_of_a_sample_is_the_reparametrised_one(self):
        flow, truth = affine()
        x, _ = flow.rsample_and_log_prob((6,), generator=seeded())
        (got,) = torch.autograd.grad(x.sum(), flow.transform[0].shift)
        torch.testing.assert_close(got, torch.full((3,), -6.0, dtype=DOUBLE))  # the mean is -shift
        assert truth.mean.shape == got.shape

    def test_the_gradient_of_the_entropy(self):
        """d E[-log p(x)] / d log_scale = -1 for an affine map, path and density together."""
        flow, _ = affine()
        _, log_prob = flow.rsample_and_log_prob((200,), generator=seeded())
        (got,) = torch.autograd.grad(-log_prob.mean(), flow.transform[0].log_scale)
        torch.testing.assert_close(got, -torch.ones(3, dtype=DOUBLE))

    @pytest.mark.parametrize("shape", [(), 4, (4,), (2, 3)])
    def test_shapes(self, shape):
        flow = flow_of()
        lead = (shape,) if isinstance(shape, int) else shape
        assert flow.sample(shape).shape == (*lead, 2)
        x, log_prob = flow.rsample_and_log_prob(shape)
        assert (x.shape, log_prob.shape) == ((*lead, 2), lead)

    def test_the_generator_determines_the_samples(self):
        flow = flow_of()
        state = torch.get_rng_state()
        first, again, other = (flow.sample((5,), generator=seeded(s)) for s in (1, 1, 2))
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    def test_a_sample_that_cannot_be_proven_raises(self):
        with pytest.raises(ConvergenceError, match="transform 5 of 7"):
            flow_of().sample((3,), tolerance=1e-9, solver=Banach(max_iterations=1))

    def test_samples_are_codes_inverted(self):
        flow = flow_of()
        z = flow.base.rsample(7, seeded(3))
        torch.testing.assert_close(flow.transform(flow.sample((7,), generator=seeded(3))), z, atol=1e-8, rtol=0)

    def test_in_training_a_sample_and_its_density_belong_together_too(self):
        flow = flow_of(dtype=torch.float32).train()
        flow(normal(30, 2, dtype=torch.float32))
        x, log_prob = flow.rsample_and_log_prob((20,), generator=seeded())
        torch.testing.assert_close(flow.eval()(x), log_prob, atol=1e-3, rtol=1e-3)

    def test_in_training_not_before_any_data(self):
        """ActNorm would take the samples for its first batch of data, after they were made."""
        flow = flow_of(dtype=torch.float32).train()
        with pytest.raises(ValueError, match=r"call the flow on data first, or flow.eval.*on noise first"):
            flow.rsample_and_log_prob((20,), generator=seeded())


class TestConditional:
    @pytest.fixture
    def flow(self):
        return flow_of(context=3)

    def test_given_is_a_distribution(self, flow):
        c = normal(4, 3, seed=5)
        p = flow.given(c)
        assert isinstance(p, Distribution)
        assert (p.batch_shape, p.event_shape) == ((4,), (2,))
        assert p.has_rsample
        assert p.sample().shape == (4, 2)
        assert p.sample((7,)).shape == (7, 4, 2)
        assert p.sample((7, 5)).shape == (7, 5, 4, 2)
        assert p.rsample((7,)).requires_grad
        assert p.log_prob(p.sample((7, 5))).shape == (7, 5, 4)

    def test_its_density_is_that_of_the_flow_for_every_context(self, flow):
        c, x = normal(4, 3, seed=5), normal(6, 4, 2, seed=6)
        got = flow.given(c).log_prob(x)
        for i in range(6):
            torch.testing.assert_close(got[i], flow.log_prob(x[i], c))
        torch.testing.assert_close(flow.given(c).log_prob(x[0, 0]), flow.log_prob(x[0, :1].expand(4, 2), c))
        torch.testing.assert_close(flow.given(c).log_prob(x[:, :1])[2], flow.log_prob(x[2, :1].expand(4, 2), c))

    def test_samples_depend_on_their_own_context(self, flow):
        c = normal(2, 3, seed=5)
        x = flow.sample((3,), c, generator=seeded())
        both = flow.base.rsample(6, seeded()).reshape(3, 2, 2)
        for i in range(2):
            torch.testing.assert_close(flow.transform(x[:, i], c[i].expand(3, 3)), both[:, i], atol=1e-8, rtol=0)

    def test_each_conditional_density_integrates_to_one(self, flow):
        axis = torch.linspace(-40, 40, 401, dtype=DOUBLE)
        grid = torch.cartesian_prod(axis, axis)
        for c in normal(2, 3, seed=8):
            with torch.no_grad():
                total = flow(grid, c.expand(len(grid), 3)).exp().sum() * (axis[1] - axis[0]) ** 2
            assert total.item() == pytest.approx(1, abs=1e-3)

    def test_it_expands_as_torchs_distributions_do(self, flow):
        c, x = normal(4, 3, seed=5), normal(6, 4, 2, seed=6)
        law = flow.given(c)
        wide = law.expand((6, 4))
        assert (wide.batch_shape, wide.event_shape) == ((6, 4), (2,))
        torch.testing.assert_close(wide.log_prob(x), law.log_prob(x))
        torch.testing.assert_close(wide.log_prob(x[0]), law.log_prob(x[0]).expand(6, 4))
        assert flow.given(c[:1]).expand((4,)).log_prob(x).shape == (6, 4)
        assert wide.expand((5, 6, 4)).batch_shape == (5, 6, 4)
        for draw in (wide.sample, wide.rsample):
            assert draw().shape == (6, 4, 2)
            assert draw((7, 2)).shape == (7, 2, 6, 4, 2)
        torch.manual_seed(0)
        drawn = wide.sample()
        torch.manual_seed(0)
        torch.testing.assert_close(drawn, law.sample((6,)))  # every context keeps its place
        assert Independent(wide, 1).log_prob(x).shape == (6,)
        with pytest.raises(RuntimeError, match="expanded size"):
            law.expand((6, 5))

    def test_bad_contexts_are_refused(self, flow):
        with pytest.raises(ValueError, match=r"context must have shape \(batch, 3\); got \(2, 4\)"):
            flow.given(torch.zeros(4, dtype=DOUBLE)).log_prob(normal(2, 2))
        with pytest.raises(ValueError, match=r"embed must return one number per channel.*; got \(2, 5, 8\)"):
            flow.given(torch.zeros(2, 5, 3, dtype=DOUBLE)).log_prob(normal(2, 2))
        with pytest.raises(ValueError, match="this network is conditional; pass context"):
            flow(normal(2, 2))
        for c in (torch.zeros(0, 3, dtype=DOUBLE), torch.zeros(0, dtype=torch.long)):
            with pytest.raises(ValueError, match="context must hold at least one sample"):
                flow.sample((2,), c)
        with pytest.raises(ValueError, match="context must be a floating-point tensor; got list"):
            flow.given([1.0, 2.0, 3.0])

    @pytest.mark.parametrize("lead", [(), (4,), (6, 4)], ids=str)
    def test_a_single_context_has_no_batch(self, flow, lead):
        """One observation, as in simulation-based inference."""
        c, x = normal(3, seed=5), normal(*lead, 2, seed=6)
        p = flow.given(c)
        assert (p.batch_shape, p.sample(lead).shape, p.rsample(lead).shape) == ((), (*lead, 2), (*lead, 2))
        expected = flow.log_prob(x.reshape(-1, 2), c.expand(math.prod(lead), 3)).reshape(lead)
        for got in (p.log_prob(x), flow.log_prob(x, c), flow.log_prob(x, c[None]).reshape(lead)):
            torch.testing.assert_close(got, expected)
        assert p.expand((5,)).log_prob(normal(5, 2)).shape == (5,)
        if lead:
            drawn, log_prob = flow.rsample_and_log_prob(lead, c, generator=seeded())
            torch.testing.assert_close(flow.sample(lead, c, generator=seeded()), drawn)
            torch.testing.assert_close(flow.log_prob(drawn, c), log_prob)

    def test_a_context_without_a_batch_is_not_one_number_per_sample(self):
        """Trap: as wide as the batch and the hidden layer, it was broadcast the wrong way, without a word."""
        flow = flow_of(hidden=(4, 4), context=4)
        c, x = normal(4), normal(4, 2, seed=1)
        right = flow(x, c.expand(4, 4))
        torch.testing.assert_close(flow.log_prob(x, c), right)
        torch.testing.assert_close(flow.log_prob_with_error(x, c).value, right)
        chain = flow.transform
        with pytest.raises(ValueError, match="context must have a batch dimension"):
            flow.log_prob(x, c[0])
        for call in (flow, chain, chain.solve, chain.inverse, chain[1], chain[1].g):
            with pytest.raises(ValueError, match="context must have a batch dimension"):
                call(x, c)

    @pytest.mark.parametrize("shape", [(), (4,), (2, 3)], ids=str)
    def test_without_a_context_it_is_a_torch_distribution_too(self, shape):
        flow = flow_of()
        p, x = flow.given(), flow.sample(shape)
        expected = flow(x.reshape(-1, 2)).reshape(shape)
        torch.testing.assert_close(p.log_prob(x), expected)
        torch.testing.assert_close(flow.log_prob(x), expected)
        assert p.rsample(shape).shape == p.sample(shape).shape == (*shape, 2)
        assert p.expand((5,)).sample(shape).shape == (*shape, 5, 2)
        with pytest.raises(ValueError, match=r"x must have shape \(..., 2\); got \(4, 3, 5\)"):
            p.log_prob(normal(4, 3, 5))

    def test_it_is_a_component_of_torchs_mixtures(self, flow):
        """Trap: without a support, torch's mixtures and transformed distributions warn, or refuse to validate."""
        mixture = MixtureSameFamily(Categorical(torch.ones(4, dtype=DOUBLE)), flow.given(normal(4, 3)))
        assert mixture.support.event_dim == 1
        assert mixture.log_prob(mixture.sample((5,))).shape == (5,)

    @pytest.mark.parametrize("contexts", [1, 4])
    @pytest.mark.parametrize("lead", [(), (1,), (4,), (1, 1), (6, 1), (6, 4), (2, 6, 4)], ids=str)
    def test_values_are_broadcast_as_by_torchs_distributions(self, flow, contexts, lead):
        c, x = normal(contexts, 3, seed=5), normal(*lead, 2, seed=6)
        like = Independent(Normal(torch.zeros(contexts, 2, dtype=DOUBLE), 1), 1)
        p = flow.given(c)
        assert p.log_prob(x).shape == like.log_prob(x).shape
        assert p.sample(lead).shape == like.sample(lead).shape
        shape = like.log_prob(x).shape
        rows, contexts = x.broadcast_to((*shape, 2)).reshape(-1, 2), c.broadcast_to((*shape, 3)).reshape(-1, 3)
        torch.testing.assert_close(p.log_prob(x).flatten(), flow.log_prob(rows, contexts))

    @pytest.mark.parametrize("shape", [(3,), (4, 3), (), (2, 5, 2)], ids=str)
    def test_a_value_of_another_shape_is_refused(self, flow, shape):
        with pytest.raises(ValueError, match=r"x must have shape \(..., 2\), where ... is broadcast with the 4 con"):
            flow.given(normal(4, 3)).log_prob(torch.zeros(shape, dtype=DOUBLE))


def _net():
    return nn.Linear(1, 2)


class Labelled(nn.Module):
    """A network of classes for a coupling."""

    def __init__(self):
        super().__init__()
        self.embed, self.net = nn.Embedding(5, 4), nn.Linear(1, 2)

    def forward(self, x, context):
        return self.net(x) + self.embed(context)[:, :2]


def _embedding(shape=()):
    """A flow whose context is a class, or so many of them."""
    torch.manual_seed(0)
    g = contractive_mlp(2, hidden=(8,))
    embed = nn.Sequential(nn.Embedding(5, 8), nn.Flatten(1), nn.Linear(8 * math.prod(shape), 8))
    block = ResidualBlock(Conditioned(g[:1], embed if shape else nn.Embedding(5, 8), g[1:]))
    return Flow(Chain(ActNorm(2), block, AffineCoupling(Labelled()) if not shape else ActNorm(2)), DiagonalNormal(2))


class TestClasses:
    @pytest.mark.parametrize("shape", [(), (3,)], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
    def test_integers_may_be_contexts(self, shape, dtype):
        flow = rouse_(_embedding(shape)).to(dtype).eval()
        c = torch.arange(4 * math.prod(shape)).remainder(5).reshape(4, *shape)
        p, x = flow.given(c), normal(4, 2, dtype=dtype)
        assert torch.equal(p.log_prob(x), flow.log_prob(x, c))
        assert not torch.allclose(p.log_prob(x), flow.log_prob(x, (c + 1) % 5))
        drawn = p.sample((3,))
        assert drawn.shape == (3, 4, 2)
        assert p.rsample((3,)).requires_grad
        solution = flow.transform.solve(flow.transform(x, c), c)
        assert solution.proven is bool(shape)  # of the coupling's own network nothing is known
        torch.testing.assert_close(solution.x, x, atol=1e-4, rtol=0)

    def test_a_context_without_a_batch_is_refused(self):
        with pytest.raises(ValueError, match="context must have a batch dimension"):
            _embedding().given(torch.tensor(3))


REFUSED = r"context must be None for a {} that takes no context; got shape \(4, 3\). Leave it out"


class TestAContextThatNobodyTakes:
    def models(self):
        block = ResidualBlock(contractive_mlp(2, hidden=(4,)))
        parts = [ActNorm(2), block, Chain(ActNorm(2), block), Multiscale([Chain(block)], (2,)), AffineCoupling(_net())]
        return [part.eval() for part in parts]

    def test_is_refused_by_every_model(self):
        x, c = normal(4, 2, dtype=torch.float32), normal(4, 3, dtype=torch.float32)
        for transform in self.models():
            flow = Flow(transform, DiagonalNormal(2)).eval()
            hybrid = Hybrid(transform, DiagonalNormal(2), nn.Linear(2, 3)).eval()
            classifier = Classifier(transform, nn.Linear(2, 3)).eval()
            calls = [flow, flow.log_prob, flow.log_prob_with_error, hybrid, hybrid.log_prob, hybrid.log_prob_with_error]
            calls += [hybrid.logits, hybrid.encode, hybrid.decode, classifier, classifier.encode, classifier.decode]
            calls += [lambda x, c, f=flow: f.sample((2,), c), lambda x, c, f=flow: f.rsample_and_log_prob((2,), c)]
            calls += [lambda x, c, f=flow: f.given(c), lambda x, c, h=hybrid: h.sample((2,), c)]
            for call in calls:
                with pytest.raises(ValueError, match=REFUSED.format(type(transform).__name__)):
                    call(x, c)

    def test_is_refused_by_compositions(self):
        x, c = normal(4, 2, dtype=torch.float32), normal(4, 3, dtype=torch.float32)
        for transform in self.models()[1:]:
            calls = [transform, transform.forward_and_logdet, transform.inverse, transform.solve]
            if hasattr(transform, "trajectory"):
                calls.append(lambda x, c, t=transform: t.trajectory(x, context=c))
            for call in calls:
                with pytest.raises(ValueError, match=REFUSED.format(type(transform).__name__)):
                    call(x, c)

    def test_parts_with_and_without_a_context_can_be_combined(self):
        block, free = ResidualBlock(contractive_mlp(2, (4,), context=3)), ResidualBlock(contractive_mlp(2, (4,)))
        chain = Chain(ActNorm(2), Chain(free), Multiscale([Chain(block, free)], (2,))).eval()
        x, c = normal(4, 2, dtype=torch.float32), normal(4, 3, dtype=torch.float32)
        assert chain.takes_context
        assert not chain[1].takes_context
        z, _ = chain.forward_and_logdet(x, c)
        assert torch.equal(z, chain(x, c))
        torch.testing.assert_close(chain.inverse(z, c), x, atol=1e-5, rtol=0)
        assert chain.solve(z, c).proven
        torch.testing.assert_close(chain.trajectory(x, 2, c)[-1], z)


@pytest.fixture(scope="module")
def wide():
    """80 dimensions, where nothing is exact by default."""
    torch.manual_seed(0)
    flow = rouse_(mlp_flow(80, blocks=2, hidden=(24,), lipschitz=0.7)).double().eval()
    tighten_(flow)
    return flow


class TestErrorBars:
    def test_autocast_does_not_spoil_what_is_called_proven(self):
        torch.manual_seed(0)
        flow, x = rouse_(mlp_flow(8, blocks=4, hidden=(16,))).eval(), normal(6, 8).float()
        expected = flow.log_prob_with_error(x)
        with torch.autocast("cpu", torch.bfloat16):
            found = flow.log_prob_with_error(x)
        assert torch.equal(found.value, expected.value)

    def test_half_precision_is_refused(self):
        flow = mlp_flow(3, blocks=1).bfloat16().eval()
        with pytest.raises(ValueError, match="needs float32 or float64; got torch.bfloat16"):
            flow.log_prob_with_error(normal(2, 3).bfloat16())

    @pytest.mark.parametrize("d", [3, 70])
    def test_of_numbers_that_overflow_nothing_is_known(self, d):
        flow, x = mlp_flow(d, blocks=1, hidden=(8,)).eval(), normal(2, d).float()
        x[0] = 1e30
        found = flow.log_prob_with_error(x, tolerance=1.0)
        assert found.bias_bound[0] == math.inf
        assert found.bias_bound[1] <= 0.5

    def test_the_truth_lies_where_it_says(self, wide):
        x = normal(4, 80, seed=3)
        truth = wide.log_prob(x, estimator=Exact()).detach()
        e = wide.log_prob_with_error(x, tolerance=0.4)
        assert ((e.value - truth).abs() <= e.bias_bound + 5 * e.standard_error).all()
        assert (e.bias_bound <= 0.2).all()
        assert (e.standard_error <= 0.2).all()
        assert e.passes >= 16
        assert e.dimension == 80

    @pytest.mark.no_cover
    @pytest.mark.slow
    def test_its_errors_are_standard_errors(self, wide):
        """Trap: stopping when the error looks small enough biases the interval. Fresh probes after a pilot do not."""
        x = normal(2, 80, seed=3)
        truth = wide.log_prob(x, estimator=Exact()).detach()
        scores = []
        for seed in range(25):
            e = wide.log_prob_with_error(x, tolerance=2.0, generator=seeded(seed))
            scores.append((e.value - truth) / e.standard_error)
        scores = torch.stack(scores)
        assert scores.mean().abs() <= 4 / math.sqrt(scores.numel())
        assert 0.7 < scores.std() < 1.5

    def test_a_smaller_tolerance_takes_more_passes(self, wide):
        x = normal(2, 80, seed=3)
        coarse, fine = (wide.log_prob_with_error(x, tolerance=t) for t in (0.08, 0.04))
        assert fine.passes > coarse.passes
        assert (fine.bias_bound < coarse.bias_bound).all()

    @pytest.mark.parametrize("tolerance", [1.0, 1e-3])
    def test_the_bias_bound_covers_the_truncation(self, tolerance):
        """For J = -L I every probe gives the exact trace: what remains is the truncation, at its worst."""
        flow = Flow(
            Chain(*(linear_block(-0.8 * torch.eye(70, dtype=DOUBLE)) for _ in range(2))), DiagonalNormal(70).double()
        ).eval()
        x = normal(3, 70, seed=3)
        e = flow.log_prob_with_error(x, tolerance=tolerance)
        error = e.value - flow.log_prob(x, estimator=Exact())
        assert (e.standard_error < 1e-12).all()
        assert ((error > 0.5 * e.bias_bound) & (error <= e.bias_bound)).all()
        assert (e.bias_bound <= tolerance / 2).all()

    def test_up_to_64_dimensions_it_is_exact(self):
        flow, x = flow_of(), normal(3, 2)
        e = flow.log_prob_with_error(x)
        assert torch.equal(e.value, flow(x).detach())
        assert (e.bias_bound.tolist(), e.standard_error.tolist(), e.passes) == ([0.0] * 3, [0.0] * 3, 1)

    def test_bits_per_dimension(self):
        """-log2 p / d, the errors in the same unit."""
        flow, _ = affine()
        e = flow.log_prob_with_error(normal(3, 3))
        bits = e.bits_per_dim()
        torch.testing.assert_close(bits.value, -e.value / 3 / math.log(2))
        torch.testing.assert_close(bits.standard_error, e.standard_error / 3 / math.log(2))

    def test_in_eval_log_prob_is_deterministic(self, wide):
        x = normal(3, 80, seed=3)
        assert torch.equal(wide(x), wide(x))
        spread = (wide(x) - wide.log_prob(x, estimator=Exact())).abs().max()
        assert 0 < spread < 10

    def test_in_eval_a_number_does_not_depend_on_the_rest_of_the_batch(self, wide):
        x = normal(5, 80, seed=3)
        torch.testing.assert_close(wide(x[3:]), wide(x)[3:], atol=1e-10, rtol=1e-10)

    def test_a_limit_on_the_passes_is_warned_about(self, wide, monkeypatch):
        monkeypatch.setattr("iresnet.flow.MAX_PASSES", 20)
        with pytest.warns(
            UserWarning, match="a standard error of 5.0e-03 would take .* passes; the limit is 20. Use a larger"
        ):
            e = wide.log_prob_with_error(normal(2, 80, seed=3))
        assert e.passes == 20
        assert e.standard_error.max() > 0.005

    def test_bad_calls_are_refused(self, wide):
        with pytest.raises(ValueError, match="tolerance must be positive; got 0"):
            wide.log_prob_with_error(normal(2, 80), tolerance=0)
        with pytest.raises(ValueError, match=r"needs a model in eval mode; call model.eval\(\) first"):
            flow_of().train().log_prob_with_error(normal(2, 2))
        partly = flow_of()
        partly.transform[0].train()
        with pytest.raises(ValueError, match="needs a model in eval mode"):
            partly.log_prob_with_error(normal(2, 2))


class TestTraining:
    def test_training_beyond_64_dimensions_needs_an_estimator(self):
        flow, x = mlp_flow(70, blocks=1, hidden=(8,)), normal(4, 70, dtype=torch.float32)
        with pytest.raises(ValueError, match="training in 70 dimensions needs an estimator"):
            flow(x)
        for estimator in (PowerSeries(5), RussianRoulette(), CertifiedSeries(0.1)):
            assert flow(x, estimator=estimator).shape == (4,)
        named = mlp_flow(70, blocks=1, hidden=(8,), estimator=PowerSeries(5))
        assert named(x).shape == (4,)

    def test_the_named_estimator_is_for_training_only(self):
        flow = mlp_flow(2, blocks=1, hidden=(8,), estimator=PowerSeries(1)).double()
        rouse_(flow)
        x = normal(4, 2)
        flow.eval()
        torch.testing.assert_close(flow(x), flow(x, estimator=Exact()))
        flow.train()
        assert not torch.allclose(flow(x, generator=seeded()), flow(x, estimator=Exact()))

    def test_maximum_likelihood_finds_the_scale(self):
        """A flow trained on a normal distribution comes within reach of its entropy."""
        torch.manual_seed(0)
        flow = mlp_flow(2, blocks=2, hidden=(16,))
        adam, generator = torch.optim.Adam(flow.parameters(), lr=1e-2), seeded()
        scale = torch.tensor([0.2, 3.0])
        for _ in range(60):
            adam.zero_grad()
            (-flow(scale * torch.randn(128, 2, generator=generator)).mean()).backward()
            adam.step()
        x = scale * torch.randn(4000, 2, generator=generator)
        with torch.no_grad():
            loss = -flow.eval()(x).mean().item()
        entropy = math.log(2 * math.pi * math.e) + scale.log().sum().item()
        assert entropy - 0.1 < loss < entropy + 0.1

    def test_every_parameter_gets_a_gradient(self):
        flow = flow_of(dtype=torch.float32).train()
        (-flow(normal(8, 2, dtype=torch.float32)).mean()).backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in flow.parameters())


class TestRefusals:
    def test_padding_has_no_density(self):
        """Trap: log p is unbounded on constant channels."""
        chain = Chain(InjectivePad(1), ResidualBlock(contractive_mlp(3, (8,))))
        with pytest.raises(
            ValueError, match=r"a density needs a transform that keeps the dimension; .* or use Classifier"
        ):
            Flow(chain, DiagonalNormal(3))
        with pytest.raises(ValueError, match="keeps the dimension"):
            Flow(Chain(Chain(Chain(InjectivePad(1)))), DiagonalNormal(3))

    @pytest.mark.parametrize("transform", [nn.Sequential(ActNorm(2)), nn.Linear(2, 2), None])
    def test_what_is_no_transform_is_refused_when_the_model_is_built(self, transform):
        sentence = f"the transform must be a Transform; got {type(transform).__name__}. Wrap a network g as Resid"
        for build in (
            lambda: Flow(transform, DiagonalNormal(2)),
            lambda: Hybrid(transform, DiagonalNormal(2), nn.Linear(2, 3)),
            lambda: Classifier(transform, nn.Linear(2, 3)),
        ):
            with pytest.raises(ValueError, match=sentence):
                build()

    def test_a_compiled_transform_is_one(self):
        chain, x = Chain(ActNorm(2)).eval(), normal(3, 2)
        flow = Flow(torch.compile(chain, backend="eager"), DiagonalNormal(2)).eval()
        assert torch.equal(flow(x.float()), Flow(chain, DiagonalNormal(2)).eval()(x.float()))

    def test_a_compiled_transform_is_inverted(self, monkeypatch):
        chain = rouse_(Chain(ActNorm(2), ResidualBlock(contractive_mlp(2, (8,))))).eval()
        compiled = torch.compile(chain, backend="eager")
        flow, plain = Flow(compiled, DiagonalNormal(2)).eval(), Flow(chain, DiagonalNormal(2)).eval()
        assert torch.equal(flow.sample((3,), generator=seeded()), plain.sample((3,), generator=seeded()))
        for got, expected in zip(
            flow.rsample_and_log_prob((3,), generator=seeded()),
            plain.rsample_and_log_prob((3,), generator=seeded()),
            strict=True,
        ):
            torch.testing.assert_close(got, expected)
        model, z = Classifier(compiled, nn.Linear(2, 3)).eval(), normal(3, 2).float()
        assert torch.equal(model.decode(z), chain.inverse(z))
        assert decoder.solve(compiled, z).proven
        monkeypatch.setattr(decoder, "_on_gpu", lambda z: True)
        assert torch.equal(model.decode(z), chain.inverse(z))

    def test_a_hook_on_a_compiled_transform_has_no_known_inverse(self):
        compiled = torch.compile(Chain(ActNorm(2)).eval(), backend="eager")
        compiled.register_forward_hook(lambda module, inputs, z: 2 * z)
        with pytest.raises(NoBoundKnown, match="no inverse is known: OptimizedModule has forward hooks"):
            Flow(compiled, DiagonalNormal(2)).eval().sample((3,))

    def test_a_wrapper_that_hides_the_log_determinant_is_refused(self):
        with pytest.raises(ValueError, match="got AveragedModel. Wrap or compile the whole model, not a part of it"):
            Flow(AveragedModel(ActNorm(2)), DiagonalNormal(2))

    @pytest.mark.parametrize("shape", [-1, 2.5, 0, "3", (2, -1), (2.5,), (2, 0)])
    def test_a_number_of_samples_is_a_positive_whole_number(self, shape):
        for draw in (flow_of().sample, flow_of().rsample_and_log_prob):
            with pytest.raises(ValueError, match=r"shape must be a number of samples, at least 1, .* Use flow.sample"):
                draw(shape)

    def test_a_seed_is_no_generator(self):
        flow = flow_of()
        series = {"estimator": PowerSeries(5), "generator": 0}
        for draw in (lambda: flow.sample((3,), generator=0), lambda: flow(normal(4, 2), **series)):
            with pytest.raises(
                ValueError, match=r"must be a torch.Generator; got 0. Use torch.Generator\(\).manual_see"
            ):
                draw()

    def test_at_a_temperature_of_zero_samples_are_decoded_means(self):
        flow, head = flow_of(), nn.Linear(2, 3).double()
        at_mean = flow.transform.inverse(flow.base.mean[None])
        for model in (flow, Hybrid(flow.transform, flow.base, head).eval()):
            torch.testing.assert_close(model.sample((3,), temperature=0.0), at_mean.expand(3, -1))
            wide = model.sample((500,), generator=seeded())
            assert model.sample((500,), generator=seeded(), temperature=0.5).std() < wide.std()
            for bad in (-1.0, math.inf, math.nan):
                with pytest.raises(ValueError, match="temperature must be finite and at least 0; got"):
                    model.sample((3,), temperature=bad)

    def test_what_is_no_base_is_refused_when_the_model_is_built(self):
        base = MultivariateNormal(torch.zeros(2), torch.eye(2))
        for build in (lambda: Flow(ActNorm(2), base), lambda: Hybrid(ActNorm(2), base, nn.Linear(2, 3))):
            with pytest.raises(ValueError, match="the base must be a Base; got MultivariateNormal. Use DiagonalNormal"):
                build()
        law = TransformedDistribution(base, [Bijector(ActNorm(2).eval(), 2).inv])  # as the message says
        torch.testing.assert_close(law.log_prob(torch.ones(2)), base.log_prob(torch.ones(2)))

    def test_a_base_of_the_wrong_shape_is_refused(self):
        flow = Flow(Squeeze(), DiagonalNormal((1, 4, 4)))
        with pytest.raises(
            ValueError, match=r"the base must have the shape of the codes, \(4, 2, 2\); got \(1, 4, 4\)"
        ):
            flow(torch.zeros(1, 1, 4, 4))

    @pytest.mark.parametrize(
        ("x", "sentence"),
        [
            (torch.zeros(4, 3), r"x must have shape \(batch, 2\); got \(4, 3\)"),
            (torch.zeros(4, 2, 1), r"x must have shape \(batch, 2\); got \(4, 2, 1\)"),
            (torch.zeros(2), "x must have a batch dimension"),
            (
                torch.zeros(5, 4, 2),
                r"x must have shape \(batch, 2\); got \(5, 4, 2\). .*s: x.flatten\(0, 1\)",
            ),
            (
                [torch.zeros(4, 2)],
                r"x must be one tensor; got 1 in a list, as a DataLoader .* or for \(x,\) in",
            ),
            (torch.zeros(0, 2), "x must hold at least one sample"),
            (torch.zeros(4, 2, dtype=torch.int32), "x must be a floating-point tensor; got torch.int32"),
            (torch.tensor([[0.0, 0.0], [math.nan, 0.0]]), "x must be finite; sample 1 of 2"),
        ],
    )
    @pytest.mark.parametrize("training", [True, False])
    def test_bad_input_is_refused(self, x, sentence, training):
        flow = mlp_flow(2, blocks=1, hidden=(8,)).train(training)
        with pytest.raises(ValueError, match=sentence):
            flow(x)
        if not training:
            with pytest.raises(ValueError, match=sentence):
                flow.log_prob_with_error(x)

    def test_a_transform_that_is_no_chain_works_too(self):
        flow = Flow(linear_block(contraction(3, 0.5)), DiagonalNormal(3).double()).eval()
        assert flow(normal(2, 3)).shape == (2,)
        assert isinstance(flow.transform.g, nn.Sequential)

"""The hybrid: one pass gives what the flow and the classifier with the same weights give."""

import copy
import math

import pytest
import torch
from torch import nn

from iresnet import (
    ActNorm,
    Banach,
    Chain,
    Classifier,
    ConvergenceError,
    DiagonalNormal,
    Exact,
    Flow,
    Hybrid,
    InjectivePad,
    Logit,
    Multiscale,
    NormalMixture,
    PowerSeries,
    ResidualBlock,
    Squeeze,
    certify,
    contractive_convnet,
    contractive_mlp,
    tighten_,
)
from iresnet.lipschitz import refresh as refresh_module
from tests.zoo import DOUBLE, contraction, dense_jacobian, linear_block, normal, rouse_


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def table(d=4, base=None, **options):
    torch.manual_seed(0)
    blocks = [t for _ in range(2) for t in (ActNorm(d), ResidualBlock(contractive_mlp(d, (8,), lipschitz=0.7)))]
    base = DiagonalNormal(d, learned=True) if base is None else base
    model = Hybrid(Chain(*blocks), base, nn.Linear(d, 3), event_shape=(d,), **options)
    tighten_(rouse_(model).double().eval())
    return model


def image():
    torch.manual_seed(0)
    first = Chain(Logit(levels=4), Squeeze(), ResidualBlock(contractive_convnet(4, 4, kernels=(3, 1))))
    last = ResidualBlock(contractive_convnet(2, 4, kernels=(3, 1)))
    transform = Multiscale([first, last], input_shape=(1, 4, 4))
    return rouse_(Hybrid(transform, DiagonalNormal(16, learned=True), nn.Linear(16, 3))).double().eval()


MODELS = {
    "table": (table, lambda: normal(5, 4, seed=1)),
    "mixture": (lambda: table(base=NormalMixture(4, 3)), lambda: normal(5, 4, seed=1)),
    "image": (image, lambda: 4 * torch.rand(5, 1, 4, 4, generator=seeded(1), dtype=DOUBLE)),
}


@pytest.fixture(params=MODELS)
def pair(request):
    model, x = MODELS[request.param]
    return model(), x()


@pytest.fixture(scope="module")
def wide():
    """80 dimensions, where nothing is exact by default."""
    return table(80, estimator=PowerSeries(4))


class TestBoth:
    def test_an_affine_hybrid_is_linear_algebra(self):
        a, w = contraction(3, 0.6), nn.Linear(3, 2).double()
        model = Hybrid(linear_block(a), DiagonalNormal(3).double(), w).eval()
        x = normal(6, 3, seed=2)
        z = x + x @ a.T
        log_prob = -0.5 * z.square().sum(1) - 1.5 * math.log(2 * math.pi)
        log_prob += torch.linalg.slogdet(torch.eye(3, dtype=DOUBLE) + a).logabsdet
        both = model(x)
        torch.testing.assert_close(both.log_prob, log_prob)
        torch.testing.assert_close(both.logits, z @ w.weight.T + w.bias)

    def test_likelihood_is_that_of_the_dense_jacobian(self, pair):
        model, x = pair
        log_prob, _ = model(x)
        expected = model.base.log_prob(model.transform(x))
        expected = expected + torch.linalg.slogdet(dense_jacobian(model.transform, x)).logabsdet
        torch.testing.assert_close(log_prob, expected, atol=1e-9, rtol=1e-9)

    def test_it_is_the_flow_and_the_classifier_of_the_same_weights(self, pair):
        model, x = pair
        flow, classifier = Flow(model.transform, model.base).eval(), Classifier(model.transform, model.head).eval()
        log_prob, logits = model(x)
        for got in (model.log_prob(x), model.flow(x), flow(x)):
            assert torch.equal(got, log_prob)
        for got in (model.logits(x), model.classifier(x), classifier(x)):
            assert torch.equal(got, logits)
        assert (log_prob.shape, logits.shape) == ((5,), (5, 3))

    def test_the_views_are_views(self, pair):
        model, x = pair
        assert isinstance(model.flow, Flow)
        assert isinstance(model.classifier, Classifier)
        assert model.flow.transform is model.classifier.transform is model.transform
        before = model.flow(x)
        with torch.no_grad():
            model.base.mean.add_(1)
            model.head.bias.add_(1)
        assert not torch.equal(model.flow(x), before)
        torch.testing.assert_close(model.classifier(x), model(x).logits)
        model.zero_grad()
        model.flow(x).sum().backward()
        assert model.base.mean.grad.abs().max() > 0
        assert model.head.weight.grad is None
        model.classifier(x).square().sum().backward()
        assert model.head.weight.grad.abs().max() > 0

    def test_one_loss_reaches_every_parameter(self, pair):
        model, x = pair
        model.train()
        log_prob, logits = model(x, estimator=Exact())
        (nn.functional.cross_entropy(logits, torch.arange(5) % 3) - log_prob.mean()).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None, name
            assert p.grad.isfinite().all(), name
            assert p.grad.abs().max() > 0, name

    def test_a_state_has_every_weight_once(self, pair):
        """The views must not become submodules, or a file would hold the network three times."""
        model, x = pair
        _ = model.flow, model.classifier
        assert {name.split(".")[0] for name in model.state_dict()} == {"transform", "base", "head"}
        assert len(list(model.parameters())) == len(list(model.named_parameters(remove_duplicate=False)))
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for p in twin.parameters():
                p.add_(0.01)
        other = twin(x).log_prob
        assert not torch.equal(other, model(x).log_prob)
        twin.load_state_dict(model.state_dict())
        assert torch.equal(twin(x).log_prob, model(x).log_prob)
        assert torch.equal(twin(x).logits, model(x).logits)

    def test_a_training_step_refreshes_each_layer_once(self, pair, monkeypatch):
        model, x = pair
        calls, plain = [], refresh_module.refresh_group
        monkeypatch.setattr(
            refresh_module,
            "refresh_group",
            lambda group, *, settle: calls.append(len(group)) or plain(group, settle=settle),
        )
        model.train()(x, estimator=Exact())
        assert sum(calls) == sum(refresh_module.cap_of(m) is not None for m in model.modules()) > 0

    def test_a_hybrid_can_be_certified(self):
        certificate = certify(table())
        assert certificate.passed
        assert certificate.input_shape == (4,)
        assert set(certificate.lipschitz) == {"transform.1", "transform.3"}

    def test_a_context_reaches_the_blocks(self):
        block = rouse_(ResidualBlock(contractive_mlp(3, (8,), context=2)))
        model = Hybrid(block, DiagonalNormal(3), nn.Linear(3, 2)).double().eval()
        x, c = normal(5, 3), normal(5, 2, seed=1)
        for got, other in zip(model(x, c), model(x, -c), strict=True):
            assert not torch.equal(got, other)
        torch.testing.assert_close(model.decode(model.encode(x, c), c), x, atol=1e-8, rtol=0)
        torch.testing.assert_close(model.logits(x, c), model(x, c).logits)
        torch.testing.assert_close(model.log_prob(x, c), model(x, c).log_prob)
        assert model.sample((4,), c).shape == (4, 5, 3)


class TestModes:
    def test_in_eval_beyond_64_dimensions_the_likelihood_is_deterministic(self, wide):
        x = normal(3, 80, seed=3)
        log_prob, logits = wide(x)
        assert torch.equal(wide(x).log_prob, log_prob)
        assert torch.equal(wide.flow(x), log_prob)
        assert torch.equal(wide(x).logits, logits)
        spread = (log_prob - wide.log_prob(x, estimator=Exact())).abs().max()
        assert 0 < spread < 10
        torch.testing.assert_close(wide(x[1:]).log_prob, log_prob[1:], atol=1e-9, rtol=1e-9)

    def test_in_eval_no_number_is_drawn_from_the_global_generator(self, wide):
        state = torch.get_rng_state()
        wide(normal(2, 80))
        assert torch.equal(torch.get_rng_state(), state)

    def test_the_estimator_is_used_in_training_only(self, wide):
        model, x = copy.deepcopy(wide).train(), normal(3, 80, seed=3)
        first, again, other = (model(x, generator=seeded(s)).log_prob for s in (1, 1, 2))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        unnamed = Hybrid(model.transform, model.base, model.head)
        with pytest.raises(ValueError, match="training in 80 dimensions needs an estimator"):
            unnamed(x)

    @pytest.mark.parametrize("training", [True, False])
    def test_the_views_have_the_mode_of_the_hybrid(self, training):
        model = table().train(training)
        assert model.flow.training is model.classifier.training is training
        assert model.transform.training is training  # and asking for a view changes nothing
        assert model.training is training

    def test_the_error_is_that_of_the_flow(self, wide):
        x = normal(2, 80, seed=3)
        ours, theirs = (m.log_prob_with_error(x, tolerance=2.0) for m in (wide, wide.flow))
        assert torch.equal(ours.value, theirs.value)
        assert torch.equal(ours.standard_error, theirs.standard_error)
        truth = wide.log_prob(x, estimator=Exact()).detach()
        assert ((ours.value - truth).abs() <= ours.bias_bound + 5 * ours.standard_error).all()
        with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
            copy.deepcopy(wide).train().log_prob_with_error(x)


class TestInverse:
    def test_decode_undoes_encode(self, pair):
        model, x = pair
        z = model.encode(x)
        assert torch.equal(z, model.transform(x))
        torch.testing.assert_close(model.decode(z), x, atol=1e-8, rtol=0)

    def test_samples_are_codes_of_the_base_decoded(self, pair):
        model, x = pair
        samples = model.sample((7,), generator=seeded(3))
        assert samples.shape == (7, *x.shape[1:])
        assert torch.equal(samples, model.flow.sample((7,), generator=seeded(3)))
        torch.testing.assert_close(model.encode(samples), model.base.rsample(7, seeded(3)), atol=1e-8, rtol=0)

    def test_settings_of_the_solve_are_passed_on(self):
        model = table()
        z = model.encode(normal(2, 4))
        with pytest.raises(ConvergenceError, match="transform 3 of 4"):
            model.decode(z, tolerance=1e-9, solver=Banach(max_iterations=1))
        with pytest.raises(ConvergenceError, match="transform 3 of 4"):
            model.sample((2,), tolerance=1e-9, solver=Banach(max_iterations=1))


class TestRefusals:
    def test_padding_has_no_density(self):
        chain = Chain(InjectivePad(1), ResidualBlock(contractive_mlp(3, (8,))))
        with pytest.raises(ValueError, match=r"a density needs a transform that keeps the dimension; .*use Classifier"):
            Hybrid(chain, DiagonalNormal(3), nn.Linear(3, 2))

    def test_a_base_of_the_wrong_shape(self):
        """Broadcasting would make a number of it."""
        model = Hybrid(Squeeze(), DiagonalNormal(2), nn.Sequential(nn.Flatten(), nn.Linear(16, 2)))
        with pytest.raises(ValueError, match=r"the base must have the shape of the codes, \(4, 2, 2\); got \(2,\)"):
            model(torch.zeros(1, 1, 4, 4))

    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize(
        ("x", "sentence"),
        [
            (torch.zeros(2, 3, dtype=DOUBLE), r"x must have shape \(batch, 4\); got \(2, 3\)"),
            (torch.zeros(0, 4, dtype=DOUBLE), "x must hold at least one sample"),
            (torch.zeros(2, 4, dtype=torch.uint8), "x must be a floating-point tensor; got torch.uint8"),
            (torch.full((1, 4), math.nan, dtype=DOUBLE), "x must be finite; sample 0 of 1"),
        ],
    )
    def test_bad_input(self, training, x, sentence):
        with pytest.raises(ValueError, match=sentence):
            table().train(training)(x)

"""torch.func over blocks, flows and constrained layers: the same numbers as by torch.autograd and by loops."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, stack_module_state, vmap

from iresnet import (
    ActNorm,
    Chain,
    Classifier,
    Exact,
    LipschitzConv2d,
    LipschitzLinear,
    Logit,
    MaxMin,
    PowerSeries,
    ResidualBlock,
    contractive_convnet,
    contractive_mlp,
    mlp_flow,
)
from iresnet.compiler import can_read_values, is_batched, is_transforming

from .zoo import DOUBLE, dense_jacobian, normal, rouse_

pytestmark = [
    # Where a batching rule is missing, torch loops and says so.
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
    # torch's own decompositions for forward mode.
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
]


def _block(**options):
    return ResidualBlock(contractive_mlp(3, **{"hidden": (5,), **options}))


def _flow():
    flow = mlp_flow(3, blocks=2, hidden=(5,))
    flow(normal(9, 3, dtype=torch.float32))
    return flow


MODELS = {
    "linear": (lambda: LipschitzLinear(3, 3, coefficient=0.5), (3,)),
    "convolution": (lambda: LipschitzConv2d(2, 2, 3, padding=1, coefficient=0.5), (2, 3, 3)),
    "block": (_block, (3,)),
    "maxmin": (lambda: _block(activation=MaxMin, hidden=(6,)), (3,)),
    "images": (lambda: ResidualBlock(contractive_convnet(2, hidden=3)), (2, 3, 3)),
    "logit": (lambda: Chain(Logit(levels=1), ActNorm(3).initialise_(torch.eye(3)), _block()), (3,)),
    "classifier": (lambda: Classifier(_block(), nn.Linear(3, 2)), (3,)),
    "flow": (_flow, (3,)),
}

every = pytest.mark.parametrize("name", MODELS)
modes = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])


def made(name, training=False, seed=0):
    torch.manual_seed(seed)
    make, shape = MODELS[name]
    model = rouse_(make(), seed).double().train(training)
    x = torch.rand(4, *shape, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    model(x)  # which has seen the size
    return model, x


def one(model):
    return lambda x: model(x[None])[0]


def assert_plain(model):
    """No tensor of torch.func is left in a model: its state can be copied and read."""
    assert all(torch.isfinite(t).all() for t in copy.deepcopy(model).state_dict().values())


@every
@modes
class TestInputs:
    def test_vmap_is_the_batch(self, name, training):
        model, x = made(name, training)
        twin = copy.deepcopy(model)
        torch.testing.assert_close(vmap(one(model))(x), twin(x))
        assert_plain(model)

    def test_jacobians_are_those_of_autograd(self, name, training):
        model, x = made(name, training)
        expected = dense_jacobian(lambda t: copy.deepcopy(model)(t).reshape(len(t), -1), x)
        for transform in (jacrev, jacfwd):
            found = vmap(transform(one(copy.deepcopy(model))))(x)
            torch.testing.assert_close(found.reshape(expected.shape), expected)

    def test_a_transform_leaves_the_state_of_an_ordinary_pass(self, name, training):
        model, x = made(name, training)
        twin = copy.deepcopy(model)
        twin(x)
        jacrev(model)(x)
        assert_plain(model)
        for key, t in twin.state_dict().items():
            torch.testing.assert_close(model.state_dict()[key], t)


@every
@modes
def test_gradients_of_the_weights_are_those_of_autograd(name, training):
    model, x = made(name, training)
    twin = copy.deepcopy(model)
    twin(x).square().sum().backward()
    expected = {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in twin.named_parameters()}
    weights = {key: p.detach() for key, p in model.named_parameters()}

    def loss(weights, x):
        return functional_call(model, weights, (x,)).square().sum()

    before = copy.deepcopy(model.state_dict())
    found = grad(loss)(weights, x)
    assert_plain(model)
    model.load_state_dict(before)
    single = vmap(grad(lambda weights, x: loss(weights, x[None])), in_dims=(None, 0))(weights, x)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value)
        torch.testing.assert_close(single[key].sum(0), value)
    assert_plain(model)


def ensemble(name, training=False):
    """(members, what computes all of them at once, rows)."""
    members = [made(name, training, seed)[0] for seed in range(3)]
    if name in ("linear", "convolution"):  # torch gives every parametrized module a class of its own
        members = [nn.Sequential(member) for member in members]
    x, base = made(name)[1], copy.deepcopy(members[0])
    weights, buffers = stack_module_state(members)
    return members, x, vmap(lambda w, b, x: functional_call(base, (w, b), (x,)), (0, 0, None)), weights, buffers


@every
def test_an_ensemble_is_its_members(name):
    members, x, together, weights, buffers = ensemble(name)
    torch.testing.assert_close(together(weights, buffers, x), torch.stack([member(x) for member in members]))


def test_the_weights_of_an_ensemble_get_the_gradients_of_its_members():
    members, x, together, weights, buffers = ensemble("flow")
    together(weights, buffers, x).sum().backward()
    for i, member in enumerate(members):
        member(x).sum().backward()
        for key, p in member.named_parameters():
            torch.testing.assert_close(weights[key].grad[i], p.grad)


@every
def test_an_ensemble_in_training_gets_a_sentence(name):
    """Its norms could not be kept, and its constraint would lag behind without a word."""
    _, x, together, weights, buffers = ensemble(name, training=True)
    with pytest.raises(
        RuntimeError, match="stores its norm, which is not possible under vmap over weights. Call model.eval()"
    ):
        together(weights, buffers, x)


def test_second_derivatives_of_an_exact_likelihood():
    flow, x = made("flow")
    expected = torch.stack([torch.autograd.functional.hessian(lambda t: flow(t[None]).sum(), row) for row in x])
    torch.testing.assert_close(vmap(hessian(one(flow)))(x), expected)


class TestLogDeterminants:
    def test_an_exact_one_is_transformed(self):
        block, x = made("images")
        _, expected = block.forward_and_logdet(x, estimator=Exact())
        found = vmap(lambda t: block.forward_and_logdet(t[None], estimator=Exact())[1][0])(x)
        torch.testing.assert_close(found, expected)

    def test_the_sign_of_a_determinant_is_known_by_its_factors(self):
        """Here det(I + J) < 0, which |det| would hide."""
        block = ResidualBlock(nn.Linear(3, 3, bias=False).double(), lipschitz=0.9).eval()
        x, swap = normal(2, 3), torch.tensor([[0.0, 1, 0], [1, 0, 0], [0, 0, 1]], dtype=DOUBLE)
        for matrix, sign in ((swap, -1), (torch.diag(torch.tensor([-2.0, 1, 1])), -1), (2 * torch.eye(3), 1)):
            block.g.weight.data.copy_(matrix - torch.eye(3))
            if sign > 0:
                assert grad(lambda t: block.forward_and_logdet(t)[1].sum())(x).abs().max() == 0
                continue
            with pytest.raises(ValueError, match=r"det\(I \+ J\) must be positive; got -1"):
                grad(lambda t: block.forward_and_logdet(t)[1].sum())(x)

    def test_beyond_64_dimensions(self):
        """In eval terms follow from the proven bound, which is found outside of the transform, and kept."""
        flow = rouse_(mlp_flow(65, blocks=1, hidden=(8,))).eval()
        x = normal(3, 65, dtype=torch.float32)
        with pytest.raises(RuntimeError, match="randomness"):
            vmap(lambda t: flow(t[None])[0])(x)
        found = vmap(lambda t: flow(t[None])[0], randomness="same")(x)
        torch.testing.assert_close(found, flow(x))
        assert_plain(flow)
        assert torch.equal(flow(x), copy.deepcopy(flow)(x))

    def test_an_estimate_is_drawn_for_every_sample_and_has_no_gradient_there(self):
        block, x = made("block")

        def estimate(t):
            return block.forward_and_logdet(t[None], estimator=PowerSeries(4))[1][0]

        assert vmap(estimate, randomness="different")(x).shape == (4,)
        with pytest.raises(RuntimeError, match="torch.func.grad always creates a graph, torch.autograd.grad does not"):
            grad(estimate)(x[0])


def test_an_inverse_gets_a_sentence():
    block, x = made("block")
    for transform in (vmap(lambda z: block.inverse(z[None])[0]), jacrev(block.inverse)):
        with pytest.raises(RuntimeError, match="torch.func cannot transform an inverse, which iterates until"):
            transform(x)
    for model in (block, block.float()):
        z = x.to(next(model.parameters()).dtype)
        with (
            forward_ad.dual_level(),
            pytest.raises(RuntimeError, match="forward-mode AD cannot differentiate it"),
        ):
            model.inverse(forward_ad.make_dual(z, z))


class TestChecks:
    def test_they_speak_where_values_can_be_read(self):
        (block, x), (logit, _) = made("block"), made("logit")
        bad = x.clone()
        bad[2, 1] = torch.nan
        with pytest.raises(ValueError, match="x must be finite; sample 2 of 4"):
            grad(lambda t: block(t).sum())(bad)
        assert vmap(one(block))(bad).isnan().any(1).tolist() == [False, False, True, False]
        with pytest.raises(ValueError, match="x must lie in"):
            grad(lambda t: logit(t).sum())(x + 9)

    def test_what_is_known_inside_of_transforms(self):
        seen = []

        def note(t):
            seen.append((is_batched(t), can_read_values(t), is_transforming()))
            return t.sum()

        x = torch.ones(2, 3)
        for call in (note, vmap(note), grad(note), vmap(grad(note)), grad(lambda t: vmap(note)(t).sum())):
            call(x)
        many, plain = (True, False, True), (False, True, True)
        assert seen == [(False, True, False), many, plain, many, many]


def test_an_ensemble_of_weights_is_refused_where_a_bound_is_needed():
    torch.manual_seed(0)
    flows = [mlp_flow(70, blocks=1, hidden=(8,)).eval() for _ in range(2)]
    states = stack_module_state(flows)
    with pytest.raises(RuntimeError, match="a block whose weights are a batch"):
        vmap(lambda *state: functional_call(flows[0], state, (torch.ones(3, 70),)))(*states)

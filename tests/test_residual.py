"""The residual block: its inverse with gradient, what it refuses, and what it remembers of its weights."""

import copy
import math
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from iresnet import (
    ActNorm,
    Anderson,
    Banach,
    Chain,
    Conditioned,
    ConvergenceError,
    DiagonalNormal,
    Exact,
    Flatten,
    Flow,
    InjectivePad,
    LipschitzConv2d,
    LipschitzLinear,
    Multiscale,
    Newton,
    PowerSeries,
    ResidualBlock,
    Squeeze,
    contractive_convnet,
    contractive_mlp,
)
from iresnet.lipschitz import cap_of, constrain_, refresh_
from tests.zoo import DOUBLE, UserNet, constrained_layers, contraction, dense_jacobian, linear_block, normal, rouse_

SOLVERS = {"banach": Banach(), "anderson": Anderson(), "newton": Newton()}

solvers = pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)


def mlp(d=3, dtype=DOUBLE, **options):
    return rouse_(ResidualBlock(contractive_mlp(d, (8,), **options))).to(dtype).eval()


def originals(module):
    return [layer.parametrizations.weight.original for layer in constrained_layers(module)]


class TestForward:
    def test_it_is_x_plus_g(self):
        block, x = mlp(), normal(4, 3)
        torch.testing.assert_close(block(x), x + block.g(x))

    def test_linear_algebra_is_exact(self):
        a, x = contraction(5, 0.9), normal(4, 5)
        block = linear_block(a)
        z, logdet = block.forward_and_logdet(x)
        torch.testing.assert_close(z, x + x @ a.T)
        torch.testing.assert_close(logdet, torch.linalg.slogdet(torch.eye(5, dtype=DOUBLE) + a).logabsdet.expand(4))
        torch.testing.assert_close(block.inverse(z), x, atol=1e-9, rtol=0)

    def test_the_stretch_of_a_linear_block(self):
        s = linear_block(0.5 * torch.eye(3, dtype=DOUBLE)).stretch((3,))
        assert s.forward == pytest.approx(1.5)
        assert s.inverse == pytest.approx(2)
        assert s.logdet == pytest.approx((3 * math.log(0.5), 3 * math.log(1.5)))
        assert s.proven

    def test_without_a_shape_the_determinant_has_no_range(self):
        assert mlp().stretch().logdet == (-math.inf, math.inf)

    def test_the_trajectory_goes_straight_and_every_state_is_a_bijection(self):
        """Section 4.2: x + tau g(x) for tau = 0, 1/4, ..., 1."""
        block, x = mlp(), normal(6, 3)
        states = block.trajectory(x, steps=4)
        assert len(states) == 5
        assert torch.equal(states[0], x)
        torch.testing.assert_close(states[4], block(x))
        torch.testing.assert_close(states[1], x + 0.25 * block.g(x))
        for tau in (0.25, 0.5, 0.75):
            j = dense_jacobian(lambda t, tau=tau: t + tau * block.g(t), x)
            assert (torch.linalg.det(j) > 0).all()

    def test_the_trajectory_of_a_chain_visits_every_block(self):
        chain, x = Chain(ActNorm(3), mlp(), Chain(mlp(), ActNorm(3))).double().eval(), normal(2, 3)
        states = chain.trajectory(x, steps=3)
        assert len(states) == 1 + 1 + 3 + 3 + 1
        assert torch.equal(states[0], x)
        torch.testing.assert_close(states[-1], chain(x))
        for maker in (chain, mlp()):
            with pytest.raises(ValueError, match="steps must be at least 1; got 0"):
                maker.trajectory(x, steps=0)

    @pytest.mark.parametrize("model", [mlp(), Chain(ActNorm(3).double(), mlp()).eval()], ids=["block", "chain"])
    def test_a_trajectory_checks_its_input_like_a_forward_pass(self, model):
        with pytest.raises(ValueError, match="x must be finite; sample 1 of 2"):
            model.trajectory(torch.tensor([[0.0, 0.0, 0.0], [math.nan, 0.0, 0.0]], dtype=DOUBLE))
        with pytest.raises(ValueError, match="x must hold at least one sample"):
            model.trajectory(normal(0, 3))


class TestGradientOfTheInverse:
    @solvers
    @pytest.mark.parametrize("size", [1e-38, 1e-23, 1.0, 1e20, 1e37])
    def test_an_incoming_gradient_may_have_any_size(self, solver, size):
        """Trap: norms of float32 under- and overflow, and the adjoint was not solved at all."""
        a, z = contraction(5, 0.95), normal(4, 5).float().requires_grad_()
        block, v = linear_block(a).float(), size * normal(4, 5, seed=1).float()
        (found,) = torch.autograd.grad(block.inverse(z, solver=solver), z, v)
        expected = torch.linalg.solve((torch.eye(5, dtype=DOUBLE) + a).T, v.double().T).T
        torch.testing.assert_close(found.double() / size, expected / size, atol=1e-4, rtol=0)

    @pytest.mark.no_cover
    @solvers
    @pytest.mark.parametrize("kind", ["mlp", "conv", "user", "conditional"])
    def test_gradcheck_in_z_parameters_and_context(self, kind, solver):
        torch.manual_seed(3)
        c, shape = None, (3,)
        match kind:
            case "mlp":
                block = rouse_(ResidualBlock(contractive_mlp(3, (4,), lipschitz=0.8)))
            case "conv":
                block, shape = rouse_(ResidualBlock(contractive_convnet(1, 2, kernels=(3,), lipschitz=0.7))), (1, 2, 2)
            case "user":
                block = ResidualBlock(UserNet(3), lipschitz=0.7)
            case "conditional":
                g = Conditioned(LipschitzLinear(3, 4), nn.Linear(2, 4), nn.Sequential(nn.ELU(), LipschitzLinear(4, 3)))
                block, c = rouse_(ResidualBlock(g)), normal(2, 2, seed=5).requires_grad_()
        block.double().eval()
        z = normal(2, *shape, seed=4).requires_grad_()
        inputs = (z, *([] if c is None else [c]), *block.parameters())

        def inverse(z, *others):
            return block.inverse(z, None if c is None else others[0], solver=solver, tolerance=1e-12)

        assert torch.autograd.gradcheck(inverse, inputs, eps=1e-6, atol=1e-5, rtol=1e-4)

    def test_it_equals_the_gradient_of_the_unrolled_iteration(self):
        block, z = mlp(lipschitz=0.7), normal(5, 3, seed=1)
        z.requires_grad_()
        x = z
        for _ in range(200):
            x = z - block.g(x)
        inputs, v = [z, *block.parameters()], normal(5, 3, seed=2)
        expected = torch.autograd.grad(x, inputs, v)
        torch.testing.assert_close(torch.autograd.grad(block.inverse(z), inputs, v), expected, atol=1e-9, rtol=1e-9)

    def test_through_a_chain_and_back_it_is_the_identity(self):
        chain = Chain(mlp(), ActNorm(3).double(), mlp(lipschitz=0.6)).eval()
        x = normal(4, 3).requires_grad_()
        back = chain.inverse(chain(x))
        v = normal(4, 3, seed=2)
        torch.testing.assert_close(torch.autograd.grad(back, x, v)[0], v, atol=1e-8, rtol=0)

    def test_the_gradient_has_weights_per_sample(self):
        """Trap: one sample's gradient used for the whole batch."""
        block, z = mlp(), normal(4, 3)
        weight = torch.tensor([1.0, 0.0, -3.0, 10.0], dtype=DOUBLE)
        params = list(block.parameters())
        got = torch.autograd.grad((block.inverse(z).sum(1) * weight).sum(), params)
        each = [torch.autograd.grad(block.inverse(z[i : i + 1]).sum(), params) for i in range(4)]
        expected = [sum(w * g for w, g in zip(weight, gradients, strict=True)) for gradients in zip(*each, strict=True)]
        torch.testing.assert_close(list(got), expected, atol=1e-8, rtol=1e-8)

    @pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
    @solvers
    def test_a_slow_adjoint_is_solved_to_the_end(self, solver, dtype):
        """Lip(g) = .995: thousands of plain steps, and the gradient 1 / (1 - L) = 200 is right all the same."""
        block = linear_block(torch.tensor([[-0.995]], dtype=dtype))
        z = torch.ones(1, 1, dtype=dtype, requires_grad=True)
        (got,) = torch.autograd.grad(block.inverse(z, tolerance=1.0, solver=solver).sum(), z)
        assert got.item() == pytest.approx(200, rel=2e-2 if dtype == torch.float32 else 1e-6)

    def test_the_adjoint_does_not_iterate_below_the_floor_of_its_type(self):
        calls = []

        class Counting(Banach):
            def run(self, *args):
                x, count = super().run(*args)
                calls.append(int(count.max()))
                return x, count

        block = linear_block(contraction(64, 0.99, dtype=torch.float32))
        z = normal(8, 64, dtype=torch.float32).requires_grad_()
        block.inverse(z, solver=Counting()).sum().backward()
        assert calls[-1] < 100

    def test_differentiating_twice_raises(self):
        block, z = mlp(), normal(2, 3).requires_grad_()
        for loss in (torch.square, lambda t: t):
            with pytest.raises(RuntimeError, match="differentiate twice"):
                torch.autograd.grad(loss(block.inverse(z)).sum(), z, create_graph=True)

    @pytest.mark.parametrize("dtype", [DOUBLE, torch.float16], ids=str)
    def test_codes_may_have_another_dtype_than_the_weights(self, dtype):
        block, z = mlp(dtype=torch.float32), normal(4, 3).to(dtype).requires_grad_()
        x = block.inverse(z)
        x.sum().backward()
        exact, reference = copy.deepcopy(block).double(), z.detach().double().requires_grad_()
        exact.inverse(reference).sum().backward()
        assert x.dtype == z.grad.dtype == dtype
        torch.testing.assert_close(z.grad.double(), reference.grad, atol=2e-3, rtol=2e-3)

    def test_without_gradients_there_is_no_graph(self):
        block = mlp()
        with torch.no_grad():
            assert not block.inverse(normal(2, 3)).requires_grad
        assert not block.requires_grad_(False).inverse(normal(2, 3)).requires_grad

    def test_the_value_is_that_of_the_solve(self):
        block, z = mlp(), normal(2, 3).requires_grad_()
        assert torch.equal(block.inverse(z), block.solve(z).x)


class TestPrecision:
    @pytest.mark.parametrize("kind", ["mlp", "conv"])
    def test_autocast_around_a_solve_does_not_spoil_it(self, kind):
        """Trap: half precision stalls near 1e-3."""
        if kind == "mlp":
            block, z = mlp(dtype=torch.float32), normal(20, 3, dtype=torch.float32)
        else:
            block = rouse_(ResidualBlock(contractive_convnet(2, 4))).eval()
            z = normal(20, 2, 4, 4, dtype=torch.float32)
        expected = block.solve(z)
        with torch.autocast("cpu", torch.bfloat16):
            assert (block.g(z) - (block(z) - z)).abs().max() < 0.1  # autocast is at work outside of the solve ...
            assert block.g(z).dtype == torch.bfloat16
            found = block.solve(z)
            x = block.inverse(z.clone().requires_grad_())
            x.sum().backward()
        assert found.converged.all()
        assert torch.equal(found.x, expected.x)  # ... and not inside
        assert torch.equal(x, expected.x)

    def test_a_float32_block_is_judged_with_its_stored_weights(self):
        """The reference materialises the constrained float32 weight before it widens it."""
        block, x = mlp(dtype=torch.float32), normal(4, 3, dtype=torch.float32)
        first, last = block.g[0], block.g[2]
        h = nn.functional.elu(x.double() @ first.weight.double().T + first.bias.double())
        expected = x.double() + h @ last.weight.double().T + last.bias.double()
        torch.testing.assert_close(block.reference(x), expected, atol=1e-15, rtol=1e-14)


class TestMemory:
    """The proven bound and the float64 copy are kept, and never outlive the weights they belong to."""

    @pytest.mark.parametrize("how", ["in place", "data", "fused", "load", "settle", "permute", "bias"])
    def test_a_change_of_weights_is_seen(self, how):
        """Trap: fused optimisers leave the version counter of a weight unchanged."""
        torch.manual_seed(0)
        block, x = mlp(d=4, dtype=torch.float32), normal(3, 4, dtype=torch.float32)
        before, bound = block.reference(x), block.bound((4,)).value
        weights = originals(block)
        with torch.no_grad():
            match how:
                case "in place":
                    weights[0].mul_(0.1)
                case "data":
                    weights[0].data = weights[0].data * 0.1
                case "fused":
                    optimiser = torch.optim.Adam(block.parameters(), lr=0.1, fused=True)
                    for p in block.parameters():
                        p.grad = torch.ones_like(p)
                    optimiser.step()
                case "load":
                    other = mlp(d=4, dtype=torch.float32, lipschitz=0.9)
                    rouse_(other, seed=5, weight=0.2)
                    block.load_state_dict(other.state_dict())
                case "settle":
                    weights[0].add_(1.0)
                    block.reference(x)
                    refresh_(block, settle=True)
                case "permute":  # every sum over the entries stays the same
                    weights[0].copy_(weights[0].flip(0))
                case "bias":
                    block.g[0].bias.add_(1.0)
        assert (block.reference(x) - block(x)).abs().max() < 1e-5
        assert (block.reference(x) - before).abs().max() > 1e-3
        if how in ("in place", "data", "load"):
            assert block.bound((4,)).value < bound

    @pytest.mark.parametrize("how", ["activation", "slope", "coefficient"])
    def test_a_change_of_layers_is_seen(self, how):
        """Else a solve would be proven for a function that is no more."""
        block = rouse_(mlp(d=4, dtype=torch.float32, lipschitz=0.5), weight=8.0)
        z = normal(3, 4, dtype=torch.float32)
        block.solve(z)
        if how == "activation":
            block.g[1] = nn.Tanh()
        elif how == "slope":
            block.g[1].alpha = 0.1
        else:
            for layer in (block.g[0], block.g[2]):
                cap_of(layer).coefficient = 0.9
            assert block.bound((4,)).value == pytest.approx(0.81, rel=0.02)
        solution = block.solve(z)
        error = (block(solution.x) - z).norm(dim=1) / (1 + block.bound((4,)).value)
        assert bool((error <= solution.error_bound + 1e-6).all())

    def test_nothing_is_computed_twice_for_the_same_weights(self, monkeypatch):
        from iresnet.branch import snapshot

        calls, plain = [], snapshot.lipschitz_bound
        monkeypatch.setattr(snapshot, "lipschitz_bound", lambda *a, **k: calls.append(a) or plain(*a, **k))
        block, x = mlp(), normal(3, 3)
        for _ in range(3):
            block.inverse(block(x))
            block.bound((3,))
        assert len(calls) == 1

    def test_a_size_met_later_counts(self):
        block = rouse_(ResidualBlock(contractive_convnet(2, 4))).eval()
        block(torch.zeros(1, 2, 3, 3))
        small = block.bound().value
        block(torch.zeros(1, 2, 9, 9))
        assert block.bound().value > small

    def test_an_asserted_constant_is_never_proven(self):
        bound = ResidualBlock(UserNet(), lipschitz=0.7).bound((4,))
        assert (bound.value, bound.proven, bound.parts) == (0.7, False, ())
        assert not ResidualBlock(UserNet(), lipschitz=0.7).stretch((4,)).proven

    def test_a_solve_says_when_its_bound_rests_on_an_assertion(self):
        block, z = ResidualBlock(UserNet(3), lipschitz=0.7).double().eval(), normal(2, 3)
        assert not block.solve(z).proven
        assert "2 of 2 samples solved, if the asserted constant holds" in str(block.solve(z))
        assert not Chain(mlp(), block).solve(z).proven
        assert "solved, if the asserted constant holds" in str(Chain(mlp(), block).solve(z))
        assert Chain(mlp()).solve(z).proven

    def test_the_copy_is_not_saved(self):
        block = mlp()
        before = set(block.state_dict())
        block.inverse(normal(2, 3))
        assert set(block.state_dict()) == before
        assert len(list(block.modules())) == len(list(copy.deepcopy(block).modules()))


class TestConditional:
    def test_the_context_matters_and_is_cut_with_the_rows(self):
        block = mlp(context=2)
        x, c = normal(6, 3) * torch.logspace(-2, 2, 6, dtype=DOUBLE)[:, None], normal(6, 2, seed=1)
        z = block(x, c)
        assert (block(x, -c) - z).abs().max() > 1e-2
        torch.testing.assert_close(block.inverse(z, c), x, atol=1e-8, rtol=1e-9)

    def test_a_conditional_image_network_shifts_channels(self):
        g = Conditioned(LipschitzConv2d(2, 3, 3, padding=1), nn.Linear(4, 3), LipschitzConv2d(3, 2, 1))
        block = ResidualBlock(g).eval()
        x, c = normal(2, 2, 4, 4, dtype=torch.float32), normal(2, 4, seed=1, dtype=torch.float32)
        expected = x + g.rest(g.first(x) + g.embed(c)[:, :, None, None])
        torch.testing.assert_close(block(x, c), expected)

    def test_blocks_without_a_context_refuse_one(self):
        block, x, c = mlp(), normal(2, 3), normal(2, 7)
        calls = (block, block.forward_and_logdet, block.inverse, block.solve, block.reference)
        for call in (*calls, lambda x, c: block.trajectory(x, context=c)):
            with pytest.raises(ValueError, match=r"for a ResidualBlock that takes no context; got shape \(2, 7\)"):
                call(x, c)

    def test_a_missing_or_misshapen_context_gets_a_sentence(self):
        block, x = mlp(context=2), normal(4, 3)
        for call in (block, block.inverse, block.forward_and_logdet):
            with pytest.raises(ValueError, match="this network is conditional; pass context"):
                call(x)
            with pytest.raises(ValueError, match="context must have one row per sample; got 1 for 4. Repeat it"):
                call(x, normal(1, 2))
            with pytest.raises(ValueError, match=r"context must have shape \(batch, 2\); got \(4, 5\)"):
                call(x, normal(4, 5))

    def test_an_embedding_must_not_broadcast_what_it_is_added_to(self):
        """(2, 1) + (2, 64) would be 64 copies of a feature: a constant that is 8 times as large."""
        block = ResidualBlock(
            constrain_(Conditioned(nn.Linear(2, 1), nn.Linear(3, 64), nn.Linear(64, 2)), coefficient=0.9)
        ).eval()
        with pytest.raises(ValueError, match=r"what it is added to, \(4, 1\); got \(4, 64\)"):
            block(normal(4, 2).float(), normal(4, 3).float())

    @pytest.mark.parametrize("of", ["block", "chain"])
    def test_a_context_is_cast_to_the_dtype_of_the_weights(self, of):
        block = mlp(context=2, dtype=torch.float32)
        model = block if of == "block" else Chain(block)
        x, c = normal(4, 3).float(), normal(4, 2)
        assert torch.equal(model(x, c), model(x, c.float()))
        assert torch.equal(model.inverse(x, c), model.inverse(x, c.float()))


class ShapeChanging(nn.Module):
    def forward(self, x):
        return x[:, :2]


class TestRefusals:
    @pytest.mark.parametrize(
        ("make", "sentence"),
        [
            (lambda: nn.Sequential(nn.Linear(2, 2)), None),
            (lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "its bound is not known. Remove it"),
            (
                lambda: nn.Sequential(LipschitzLinear(2, 2), nn.Dropout()),
                "a different function at every call. Remove it",
            ),
            (
                UserNet,
                "it has a custom forward.* A constant that you know can be asserted: ResidualBlock",
            ),
            (lambda: nn.ConvTranspose2d(1, 1, 1), "no norm bound is known for ConvTranspose2d"),
            (
                lambda: nn.Sequential(LipschitzLinear(2, 2), nn.Softmax(1)),
                "Softmax .*: its slope is not known. Use ELU",
            ),
        ],
        ids=["large", "batchnorm", "dropout", "user", "transpose", "softmax"],
    )
    def test_a_g_that_is_no_proven_contraction_is_refused(self, make, sentence):
        g = make()
        if sentence is None:
            nn.init.constant_(g[0].weight, 1.0)
            sentence = (
                r"g must be a contraction; its layers allow a Lipschitz constant of 2. Use iresnet.lipschitz.constrain_"
            )
        with pytest.raises(ValueError, match=sentence):
            ResidualBlock(g)

    @pytest.mark.parametrize("value", [1.0, 1.2, -0.1, math.nan])
    def test_an_asserted_constant_must_lie_below_one(self, value):
        with pytest.raises(ValueError, match=r"lipschitz must lie in \[0, 1\); got .* has no inverse"):
            ResidualBlock(UserNet(), lipschitz=value)

    @pytest.mark.parametrize("g", [torch.tanh, lambda x: 0.5 * x, "tanh"])
    def test_a_function_is_no_module(self, g):
        with pytest.raises(ValueError, match="g must be an nn.Module; got .*Call a function in a module's forward"):
            ResidualBlock(g)

    def test_an_activation_that_overwrites_the_input_is_refused(self):
        """x + g(x) would become g's first activation plus g(x)."""
        with pytest.raises(
            ValueError, match=r"g must not modify x; its first layer, ELU.* works in place. Use inplace"
        ):
            ResidualBlock(nn.Sequential(nn.ELU(inplace=True), LipschitzLinear(2, 2)))

    def test_an_activation_that_overwrites_a_hidden_layer_is_fine(self):
        g = nn.Sequential(LipschitzLinear(3, 4), nn.ELU(inplace=True), LipschitzLinear(4, 3)).double()
        block, x = rouse_(ResidualBlock(g)).eval(), normal(4, 3)
        z, logdet = block.forward_and_logdet(x)
        torch.testing.assert_close(block.inverse(z), x, atol=1e-8, rtol=0)
        torch.testing.assert_close(logdet, torch.linalg.slogdet(dense_jacobian(block, x)).logabsdet)

    @pytest.mark.parametrize("call", ["forward", "forward_and_logdet", "inverse"])
    def test_a_g_that_changes_the_shape_is_refused(self, call):
        block = ResidualBlock(ShapeChanging(), lipschitz=0.5)
        with pytest.raises(
            ValueError, match=r"g must keep the shape of its input; got \(4, 2\) for \(4, 3\). Let its last"
        ):
            getattr(block, call)(normal(4, 3))

    def test_a_stride_is_refused_with_what_to_use_instead(self):
        block = ResidualBlock(constrain_(nn.Sequential(nn.Conv2d(2, 2, 3, stride=2, padding=1)), lipschitz=0.9))
        with pytest.raises(ValueError, match=r"got \(1, 2, 2, 2\) .* Use stride 1 .* Squeeze\(\) before"):
            block(torch.zeros(1, 2, 4, 4))

    BAD: ClassVar = {
        "integers": (
            torch.zeros(4, 3, dtype=torch.long),
            r"{} must be a floating-point tensor; got torch.int64. Convert it with {}.float\(\) first",
        ),
        "one sample": (
            torch.zeros(3),
            r"{} must have a batch dimension, shape \(batch, ...\); got \(3,\). Use {}\[None\]",
        ),
        "empty": (torch.zeros(0, 3), r"{} must hold at least one sample; got an empty batch of shape \(0, 3\)"),
        "nan": (torch.tensor([[0.0] * 3, [math.nan] * 3]), "{} must be finite; sample 1 of 2 holds NaN or infinity"),
        "infinite": (torch.full((2, 3), math.inf), "{} must be finite; sample 0 of 2"),
        "a list": (
            [[1.0, 2.0, 3.0]],
            r"{} must be a floating-point tensor; got list. Convert it with torch.as_tensor\({}\)",
        ),
        "an array": (np.zeros((4, 3)), r"{} must be a floating-point tensor; got ndarray. Convert it with torch.as_t"),
        "features": (torch.zeros(4, 5), r"{} must have shape \(batch, ..., 3\) for this block; got \(4, 5\)"),
    }

    @pytest.mark.parametrize("bad", BAD)
    @pytest.mark.parametrize("call", ["forward", "forward_and_logdet", "inverse", "solve"])
    @pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
    def test_bad_input_gets_a_sentence(self, bad, call, training):
        value, sentence = self.BAD[bad]
        name = "x" if call.startswith("forward") else "z"
        block = mlp(dtype=torch.float32).train(training)
        with pytest.raises(ValueError, match=sentence.format(name, name)):
            getattr(block, call)(value)

    @pytest.mark.parametrize("images", [False, True], ids=["vectors", "images"])
    @pytest.mark.parametrize("weights", [torch.float32, DOUBLE], ids=str)
    @pytest.mark.parametrize("part", ["block", "chain", "flow"])
    @pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
    def test_an_x_of_another_dtype_gets_a_sentence(self, images, weights, part, training):
        block = ResidualBlock(contractive_convnet(2, 4)).to(weights) if images else mlp(dtype=weights)
        other = torch.float32 if weights == DOUBLE else DOUBLE
        x = normal(*((2, 2, 5, 5) if images else (2, 3)), dtype=other)
        flow = Flow(Chain(block), DiagonalNormal(x[0].shape).to(weights))
        model = {"block": block, "chain": Chain(block), "flow": flow}[part]
        sentence = rf"x must have the dtype of the weights, {weights}; got {other}. Convert x with x.to\({weights}\)"
        with pytest.raises(ValueError, match=sentence):
            model.train(training)(x)

    @pytest.mark.parametrize("shape", [(3, 5, 8, 8), (2, 8, 8), (3, 2, 8)])
    def test_images_of_the_wrong_shape_get_a_sentence(self, shape):
        block = ResidualBlock(contractive_convnet(2, 4, preactivation=True))
        with pytest.raises(ValueError, match=r"x must have shape \(batch, 2, n, n\) for this block; got"):
            block(torch.zeros(shape))

    @pytest.mark.parametrize("tolerance", [0.0, -1e-6, math.nan])
    def test_a_tolerance_must_be_positive(self, tolerance):
        for call in ("inverse", "solve"):
            with pytest.raises(ValueError, match="tolerance must be positive; got"):
                getattr(mlp(), call)(normal(2, 3), tolerance=tolerance)

    @pytest.mark.parametrize("solver", ["anderson", Anderson])
    def test_a_solver_must_be_an_object(self, solver):
        for model in (mlp(), Chain(mlp())):
            for call in (model.inverse, model.solve):
                with pytest.raises(ValueError, match=r"solver must be a Solver, such as Anderson\(\).*; got .*nderson"):
                    call(normal(2, 3), solver=solver)

    @pytest.mark.parametrize("estimator", ["exact", Exact])
    def test_an_estimator_must_be_an_object(self, estimator):
        for model in (mlp(), Chain(mlp())):
            with pytest.raises(ValueError, match=r"estimator must be an Estimator, such as Exact\(\).*; got .*xact"):
                model.forward_and_logdet(normal(2, 3), estimator=estimator)

    def test_a_chain_takes_transforms_only(self):
        with pytest.raises(ValueError, match="must be a Transform; got Linear. Wrap a network g as ResidualBlock"):
            Chain(nn.Linear(2, 2))
        for model in (torch.compile(mlp(2)), AveragedModel(mlp(2))):
            with pytest.raises(ValueError, match="Wrap or compile the whole model, not a part of it"):
                Chain(model)


class TestChains:
    def test_a_slice_is_a_chain_of_the_same_transforms(self):
        chain, x = Chain(ActNorm(2).double(), mlp(2), mlp(2)).eval(), normal(4, 2)
        first, rest = chain[:2], chain[2:]
        assert type(first) is Chain
        assert (len(first), first[1], first.training) == (2, chain[1], False)
        assert torch.equal(rest(first(x)), chain(x))

    def test_an_inverse_that_fails_names_the_block_in_its_nest(self):
        slow = linear_block(0.95 * torch.eye(2, dtype=DOUBLE))
        chain = Chain(ActNorm(2).double(), Chain(mlp(2), slow, ActNorm(2).double())).eval()
        with pytest.raises(
            ConvergenceError,
            match=r"the inverse of transform 1 of 2, transform 1 of 3 is not proven to 1.0e-09 for 2 of 2",
        ):
            chain.inverse(normal(2, 2), tolerance=1e-9, solver=Banach(max_iterations=3))

    def test_a_stage_is_named_too(self):
        stages = [Chain(Squeeze(), ActNorm(4).double()), linear_conv(0.95)]
        model = Multiscale(stages, input_shape=(1, 2, 2)).eval()
        with pytest.raises(ConvergenceError, match="the inverse of stage 1 of 2 is not proven"):
            model.inverse(normal(2, 4), tolerance=1e-9, solver=Banach(max_iterations=2))

    def test_a_chain_reports_three_numbers_and_never_merges_them(self):
        """Trap: a block's bound passed off as one for the whole net."""
        chain, x = Chain(*(mlp(lipschitz=0.9) for _ in range(6))), normal(5, 3)
        found = chain.solve(chain(x), tolerance=1e-9)
        error = found.measured_error(x)
        assert found.converged.all()
        assert (found.largest_block_bound <= 1e-9).all()
        assert (found.composed_bound > found.largest_block_bound).all()
        assert (error <= found.composed_bound).all()
        assert torch.equal(found.error_bound, found.composed_bound)
        torch.testing.assert_close(found.code_residual, (chain(found.x) - chain(x)).norm(dim=1), atol=1e-14, rtol=1e-2)
        assert (found.iterations >= 6).all()

    def test_the_composed_bound_says_where_it_is_not_informative(self):
        deep = Chain(*(linear_block(0.9 * torch.eye(1, dtype=DOUBLE)) for _ in range(20)))
        found = deep.solve(normal(3, 1), tolerance=1e-4)
        assert "not informative" in str(found)
        assert "not informative" not in str(Chain(mlp()).solve(normal(3, 3)))
        assert str(Chain(mlp()).solve(normal(3, 3))).startswith(
            "3 of 3 samples proven, block by block; largest block bound"
        )

    def test_one_block_that_fails_makes_the_whole_unproven_without_an_exception(self):
        chain = Chain(mlp(2), linear_block(0.95 * torch.eye(2, dtype=DOUBLE)))
        found = chain.solve(normal(3, 2), tolerance=1e-9, solver=Banach(max_iterations=3))
        assert not found.converged.any()
        assert torch.isfinite(found.x).all()

    @pytest.mark.parametrize("kind", [Chain, Multiscale])
    def test_a_sample_that_an_asserted_block_loses_is_reported_and_the_others_are_solved(self, kind):
        """x + 1e3 x^3 is no contraction, so the iteration overflows where x is large and not where it is 0."""

        class Cube(nn.Module):
            def forward(self, x):
                return 1e3 * x**3

        stages = [linear_block(contraction(2, 0.5)), ResidualBlock(Cube(), lipschitz=0.9)]
        chain = Chain(*stages) if kind is Chain else Multiscale([stages[0], Chain(Flatten((1,)), stages[1])], (2,))
        solution = chain.eval().solve(torch.tensor([[9.0, 9.0], [0.0, 0.0]], dtype=DOUBLE))
        assert solution.x[0].isnan().all()
        torch.testing.assert_close(solution.x[1], torch.zeros(2, dtype=DOUBLE), atol=1e-30, rtol=0)
        assert solution.diverged.tolist() == [True, False]
        assert solution.converged.tolist() == [False, True]
        for bound in (solution.largest_block_bound, solution.code_residual, solution.composed_bound):
            assert torch.isinf(bound).tolist() == [True, False]
        assert not solution.proven

    def test_codes_that_are_no_numbers_are_refused_by_every_chain(self):
        with pytest.raises(ValueError, match="z must be finite; sample 1 of 2"):
            Chain(ActNorm(2)).eval().solve(torch.tensor([[0.0, 0.0], [math.nan, 0.0]]))

    def test_padding_is_undone_exactly(self):
        chain, x = Chain(InjectivePad(2), mlp(5)).eval(), normal(4, 3)
        found = chain.solve(chain(x))
        assert (found.measured_error(x) <= found.composed_bound).all()
        assert found.code_residual.max() < 1e-9

    def test_training_moves_the_norm_once_a_forward_and_the_inverse_still_fits(self):
        block, x = ResidualBlock(contractive_mlp(3, (8,))), normal(4, 3, dtype=torch.float32)
        z = block(x)
        torch.testing.assert_close(block.inverse(z), x, atol=1e-4, rtol=0)


def linear_conv(c):
    layer = nn.Conv2d(2, 2, 1, bias=False, dtype=DOUBLE)
    with torch.no_grad():
        layer.weight.copy_(c * torch.eye(2)[..., None, None])
    return ResidualBlock(nn.Sequential(layer)).eval()


def test_an_estimator_may_be_named_at_any_dimension():
    block, x = mlp(), normal(200, 3)
    exact = block.forward_and_logdet(x, estimator=Exact())[1]
    torch.testing.assert_close(block.forward_and_logdet(x)[1], exact)
    many = PowerSeries(60, probes=200)
    estimate = block.forward_and_logdet(x[:2], estimator=many, generator=torch.Generator().manual_seed(0))[1]
    torch.testing.assert_close(estimate, exact[:2], atol=0.2, rtol=0)


def test_a_block_shows_what_was_asserted():
    assert "lipschitz=0.7 (asserted)" in repr(ResidualBlock(UserNet(), lipschitz=0.7))
    assert "asserted" not in repr(mlp())


def test_a_block_in_half_precision_can_be_inverted():
    block = mlp().bfloat16()
    z = normal(4, 3).bfloat16()
    found = block.solve(z, tolerance=0.1)
    assert found.x.dtype == torch.bfloat16
    assert found.converged.all()
    assert (block.reference(found.x) - z.double()).norm(dim=1).max() < 0.1


def test_the_exact_determinant_survives_autocast():
    block, x = mlp().float(), normal(4, 3).float()
    plain = block.forward_and_logdet(x)[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = block.forward_and_logdet(x)[1]
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, plain, atol=0.05, rtol=0.05)

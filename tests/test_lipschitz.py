"""Constrained layers: what Eq. (2) promises, when the norm is refreshed, and what is proven of the whole."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from iresnet import (
    Conditioned,
    Exact,
    GramIteration,
    LipschitzConv2d,
    LipschitzLinear,
    LipSwish,
    MaxMin,
    PowerIteration,
    PowerSeries,
    ResidualBlock,
    Sine,
    certify,
    constrain_,
    contractive_convnet,
    contractive_mlp,
    mlp_flow,
    spectral,
    tighten_,
)
from iresnet.branch import linearise, lipschitz_bound, requested_constant, tighten_layers_, try_parse
from iresnet.branch.derivative import activation_slope
from iresnet.lipschitz import cap_of, check_contractive, freeze_norms, lipschitz_constant, refresh_, release_
from iresnet.lipschitz import refresh as refresh_module
from iresnet.logdet import Jacobian
from iresnet.spectral import Geometry, NoBoundKnown
from tests.zoo import ACTIVATIONS, DOUBLE, UserNet, constrained_layers, contraction, dense_jacobian, normal, rouse_

OPTIMISERS = {
    "sgd": partial(torch.optim.SGD, lr=0.003, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.001),
    "fused-adam": partial(torch.optim.Adam, lr=0.001, fused=True),
}

RULES = {"power": PowerIteration(), "strict": GramIteration()}


def norm(layer, size=None):
    """The true norm of the constrained operator, by SVD."""
    weight, geometry = layer.weight.detach().double(), Geometry.of(layer)
    return torch.linalg.matrix_norm(spectral.dense_matrix(weight, geometry, size or ()), 2).item()


def original(layer):
    return layer.parametrizations.weight.original


def scale_(layer, factor):
    with torch.no_grad():
        original(layer).mul_(factor)


def count_refreshes(monkeypatch):
    """A list that grows by the number of layers at every refresh."""
    calls, plain = [], refresh_module.refresh_group

    def counting(group, *, settle):
        calls.append(len(group))
        return plain(group, settle=settle)

    monkeypatch.setattr(refresh_module, "refresh_group", counting)
    return calls


def expansive(kind, rule):
    """A block, data and the size its norms are taken at."""
    torch.manual_seed(0)
    if kind == "linear":
        g, x, size = contractive_mlp(6, (16,), coefficient=0.8, norm=rule), normal(32, 6), None
    else:
        g, x, size = contractive_convnet(2, 4, coefficient=0.8, norm=rule), normal(32, 2, 5, 5), (5, 5)
    return rouse_(ResidualBlock(g)), x.float(), size


def train(block, x, optimiser, size, steps=25):
    """Make the block as expansive as it can get; the largest norm of a layer at every step."""
    used = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = -block(x).square().mean()
        used.append(max(norm(layer, size) for layer in constrained_layers(block)))
        loss.backward()
        optimiser.step()
    return used


class TestEquation2:
    @pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
    def test_a_small_weight_is_left_alone(self, rule):
        layer = LipschitzLinear(5, 4, coefficient=0.9, norm=rule)
        scale_(layer, 0.1 / norm(layer))
        refresh_(layer, settle=True)
        assert torch.equal(layer.weight, original(layer))

    def test_a_large_weight_is_scaled_to_the_coefficient_and_keeps_its_direction(self):
        layer = LipschitzLinear(5, 4, coefficient=0.7)
        scale_(layer, 10)
        refresh_(layer, settle=True)
        assert norm(layer) == pytest.approx(0.7, rel=1e-4)
        ratio = layer.weight / original(layer)
        torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio))

    @pytest.mark.parametrize("padding_mode", ["zeros", "circular"])
    def test_the_norm_is_that_of_the_convolution_not_of_the_reshaped_kernel(self, padding_mode):
        layer = LipschitzConv2d(3, 3, 3, padding=1, coefficient=0.7, padding_mode=padding_mode)
        scale_(layer, 10)
        layer(torch.zeros(1, 3, 6, 6))
        refresh_(layer, settle=True)
        assert norm(layer, (6, 6)) == pytest.approx(0.7, rel=1e-3)
        assert abs(torch.linalg.matrix_norm(layer.weight.flatten(1), 2) - 0.7) > 0.1

    @pytest.mark.parametrize(
        "make",
        [
            partial(nn.Conv1d, 2, 3, 3, padding=1),
            partial(nn.Conv2d, 2, 4, (2, 3), stride=(2, 1), groups=2),
            partial(nn.Conv2d, 2, 3, 3, padding=2, dilation=2),
            partial(nn.Conv2d, 2, 3, 4, padding="same"),
            partial(nn.Conv3d, 2, 3, 3, padding=1),
        ],
        ids=["1d", "strided-grouped", "dilated", "even", "3d"],
    )
    @pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
    def test_every_kind_of_convolution_is_constrained(self, make, rule):
        layer = make()
        with torch.no_grad():
            layer.weight.mul_(10)
        constrain_(layer, 0.8, norm=rule)
        axes = layer.weight.dim() - 2
        layer(torch.zeros(1, 2, *(5,) * axes))
        layer.eval()
        got = norm(layer, (5,) * axes)
        assert got <= (0.801 if rule == PowerIteration() else 0.8)
        assert got >= (0.79 if rule == PowerIteration() else 0.5)

    @pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
    def test_device_and_type_arguments_reach_the_layer(self, dtype):
        assert LipschitzLinear(2, 3, bias=False, dtype=dtype).weight.dtype == dtype
        layer = LipschitzConv2d(2, 3, 3, 2, padding=1, bias=False, dtype=dtype)
        assert layer(torch.zeros(1, 2, 8, 8, dtype=dtype)).shape == (1, 3, 4, 4)
        assert layer.bias is None

    def test_constraining_again_replaces_the_coefficient(self):
        layer = LipschitzLinear(3, 3, coefficient=0.9)
        scale_(layer, 10)
        constrain_(layer, 0.5)
        assert len(layer.parametrizations.weight) == 1
        assert norm(layer) == pytest.approx(0.5, rel=1e-4)

    def test_an_assigned_weight_is_constrained_at_once(self):
        layer = LipschitzLinear(3, 3, coefficient=0.5, norm=PowerIteration())
        layer.weight = 5 * torch.eye(3)
        torch.testing.assert_close(layer.weight, 0.5 * torch.eye(3))
        strict = LipschitzLinear(3, 3, coefficient=0.5)
        strict.weight = 5 * torch.eye(3)  # the bound of three equal singular values is 3^(1/512) times too large
        assert pytest.approx(strict.weight[0, 0].item(), rel=1e-4) == 0.5 * 3 ** (-1 / 512)

    def test_half_precision_weights_are_constrained_in_single(self):
        layer = LipschitzLinear(16, 16, coefficient=0.9).bfloat16()
        scale_(layer, 10)
        layer(torch.zeros(1, 16, dtype=torch.bfloat16))
        assert layer.weight.dtype == torch.bfloat16
        assert norm(layer) == pytest.approx(0.9, rel=0.02)


class TestTraining:
    @pytest.mark.no_cover
    @pytest.mark.parametrize("optimiser", OPTIMISERS.values(), ids=OPTIMISERS)
    @pytest.mark.parametrize("kind", ["linear", "conv"])
    def test_the_constraint_holds_while_training(self, optimiser, kind):
        """To a few percent under power iteration, to its convergence in eval: nobody has to call anything."""
        block, x, size = expansive(kind, PowerIteration())
        used = train(block, x, optimiser(block.parameters()), size)
        layers = constrained_layers(block)
        assert max(used) <= 0.8 * 1.05
        assert max(torch.linalg.vector_norm(original(layer) - layer.weight) for layer in layers) > 0.1
        block.eval()
        assert max(norm(layer, size) for layer in layers) <= 0.8 * (1 + 1e-3)

    @pytest.mark.no_cover
    @pytest.mark.parametrize("kind", ["linear", "conv"])
    def test_the_strict_rule_holds_at_every_step_where_power_iteration_is_outrun(self, kind):
        """Trap: an optimiser that moves fast finds the directions that power iteration has not seen yet."""
        worst = {}
        for rule in (PowerIteration(), GramIteration()):
            block, x, size = expansive(kind, rule)
            worst[rule] = max(train(block, x, torch.optim.Adam(block.parameters(), lr=0.03), size))
            block.eval()
            assert max(norm(layer, size) for layer in constrained_layers(block)) <= 0.8 * 1.01
        assert worst[PowerIteration()] > 0.9
        assert worst[GramIteration()] <= 0.8

    @pytest.mark.no_cover
    @pytest.mark.parametrize("optimiser", OPTIMISERS.values(), ids=OPTIMISERS)
    @pytest.mark.parametrize("kind", ["linear", "conv"])
    def test_the_strict_rule_holds_at_every_step(self, optimiser, kind):
        block, x, size = expansive(kind, GramIteration())
        used = train(block, x, optimiser(block.parameters()), size)
        assert 0.6 < max(used) <= 0.8
        block.eval()
        assert max(norm(layer, size) for layer in constrained_layers(block)) <= 0.8

    @pytest.mark.no_cover
    def test_a_flow_in_a_plain_training_loop_stays_within_its_constant(self):
        """Trap: a conditional flow with a constant of 0.97 met det(I + J) < 0 after some hundred steps of Adam."""

        def largest_excess(**settings):
            torch.manual_seed(0)
            flow = mlp_flow(2, 2, (64, 64), lipschitz=0.97, activation=Sine, context=2, **settings)
            optimiser, worst = torch.optim.Adam(flow.parameters(), 3e-3), 0.0
            for step in range(40):
                c = normal(256, 2, seed=step, dtype=torch.float32)
                optimiser.zero_grad()
                (-flow(c.sin() + c, context=c).mean()).backward()
                layers = constrained_layers(flow)
                worst = max(worst, *(norm(layer) / cap_of(layer).coefficient for layer in layers))
                optimiser.step()
            return worst

        assert largest_excess() <= 1 < largest_excess(norm=PowerIteration())

    def test_in_eval_the_norm_is_that_of_all_invariant_parts(self):
        """Trap: power iteration that has converged to one part sees nothing of another, only a little larger."""
        layer = LipschitzLinear(40, 40, coefficient=0.5, bias=False).double()
        original(layer).data.copy_(torch.diag(torch.linspace(1.0, 0.1, 40, dtype=DOUBLE)))
        refresh_(layer, settle=True)
        original(layer).data[39, 39] = 1.04
        layer.eval()(torch.zeros(1, 40, dtype=DOUBLE))
        refresh_(layer, settle=True)
        assert norm(layer) == pytest.approx(0.5, rel=1e-3)

    def test_the_strict_rule_holds_in_a_model_from_the_first_batch_on(self):
        """Before a size is met the bound holds for all sizes."""
        g = rouse_(constrain_(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1)), 0.9, norm=GramIteration()))
        block = ResidualBlock(g)
        block(normal(1, 2, 16, 16, dtype=torch.float32))
        assert norm(g[0], (16, 16)) <= 0.9

    @pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
    @pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e25), (DOUBLE, 1e170)], ids=["float32", "float64"])
    def test_huge_weights_are_constrained_too(self, rule, dtype, size):
        """Trap: the squares of 1e170 are infinite, and a norm that is not known constrains nothing."""
        layer = LipschitzLinear(4, 3, coefficient=0.5, norm=rule).to(dtype)
        with torch.no_grad():
            original(layer).mul_(size)
        layer.train()(torch.zeros(1, 4, dtype=dtype))
        assert 0.2 < norm(layer) <= 0.5 * 1.2
        assert 0.4 < norm(layer.eval()) <= 0.5 * (1 + 1e-5)

    def test_gradients_are_those_of_the_scaled_weight(self):
        layer = rouse_(LipschitzLinear(4, 3, coefficient=0.5).double())
        w, g = original(layer), cap_of(layer).gradient.clone()
        x = normal(7, 4)
        with freeze_norms(layer):
            (got,) = torch.autograd.grad(layer(x).square().sum(), w)
        expected_w = w.detach().clone().requires_grad_()
        y = x @ (expected_w * 0.5 / (expected_w * g).sum()).T + layer.bias
        (expected,) = torch.autograd.grad(y.square().sum(), expected_w)
        torch.testing.assert_close(got, expected)

    def test_gradient_through_sigma_has_no_part_along_the_weight_and_the_alternative_has(self):
        """A saturated layer can only turn; `differentiate=False` lets its weight shrink again."""
        x, parts = normal(9, 4), {}
        for differentiate in (True, False):
            torch.manual_seed(0)
            layer = LipschitzLinear(4, 4, coefficient=0.5, norm=PowerIteration(differentiate=differentiate)).double()
            scale_(layer, 10)
            refresh_(layer, settle=True)
            with freeze_norms(layer):
                layer(x).square().sum().backward()
            w = original(layer)
            parts[differentiate] = ((w.grad * w).sum() / w.grad.norm() / w.norm()).item()
        assert abs(parts[True]) < 1e-6
        assert parts[False] > 0.1

    def test_a_zero_initialised_layer_gives_no_nan_and_recovers(self):
        for rule in RULES.values():
            layer = nn.Linear(4, 4)
            nn.init.zeros_(layer.weight)
            constrain_(layer, 0.5, norm=rule)
            step = torch.optim.SGD(layer.parameters(), lr=100.0)
            for i in range(3):
                step.zero_grad()
                y = layer(normal(8, 4, seed=i, dtype=torch.float32))
                assert torch.isfinite(y).all()
                (y - 1).square().sum().backward()
                assert torch.isfinite(original(layer).grad).all()
                step.step()
            layer.eval()
            assert norm(layer) == pytest.approx(0.5, rel=0.1)

    def test_two_forwards_before_one_backward(self):
        layer = rouse_(LipschitzLinear(3, 3, coefficient=0.5))
        first = layer(normal(4, 3, dtype=torch.float32))
        second = layer(normal(4, 3, seed=1, dtype=torch.float32))
        (first.sum() + second.sum()).backward()
        assert torch.isfinite(original(layer).grad).all()

    def test_gradient_checkpointing_gives_the_same_gradient(self):
        """The recomputation must meet the weight of the first pass."""
        block = rouse_(ResidualBlock(contractive_mlp(3, (8,)))).train()
        x = normal(4, 3, dtype=torch.float32)
        refresh_(block, settle=True)
        y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        with freeze_norms(block):
            expected = torch.autograd.grad(block(x).square().sum(), list(block.parameters()))
        state = copy.deepcopy(block.state_dict())
        got = torch.autograd.grad(y.square().sum(), list(block.parameters()))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        assert all(torch.equal(value, state[name]) for name, value in block.state_dict().items())


class TestRefresh:
    def test_a_model_refreshes_each_layer_once_per_training_forward_in_batches_of_one_shape(self, monkeypatch):
        flow = mlp_flow(2, blocks=3, hidden=(8, 8))
        flow(normal(4, 2, dtype=torch.float32))
        calls = count_refreshes(monkeypatch)
        flow(normal(4, 2, dtype=torch.float32)).sum().backward()
        assert sorted(calls) == [3, 3, 3]

    @pytest.mark.parametrize("estimator", [Exact(), PowerSeries(5)], ids=["exact", "series"])
    def test_a_block_refreshes_once_for_value_and_logdet(self, monkeypatch, estimator):
        block = ResidualBlock(contractive_mlp(3, (8,)))
        calls = count_refreshes(monkeypatch)
        _, logdet = block.forward_and_logdet(normal(4, 3, dtype=torch.float32), estimator=estimator)
        logdet.sum().backward()
        assert sum(calls) == 2

    def test_a_lone_layer_looks_after_itself(self, monkeypatch):
        layer, x = LipschitzLinear(3, 3), normal(4, 3, dtype=torch.float32)
        calls = count_refreshes(monkeypatch)
        layer(x)
        layer(x)
        with torch.no_grad():
            layer(x)
        assert calls == [1, 1]
        layer.eval()
        calls.clear()
        layer(x)
        assert calls == []

    @pytest.mark.parametrize("kind", ["mlp", "conv", "user"])
    def test_never_in_eval_without_gradients_or_in_a_solve(self, monkeypatch, kind):
        """The function must not change while it is evaluated or inverted."""
        if kind == "user":
            block, x = ResidualBlock(constrain_(UserNet(), 0.5), lipschitz=0.9), normal(4, 4, dtype=torch.float32)
        elif kind == "mlp":
            block, x = ResidualBlock(contractive_mlp(4, (8,))), normal(4, 4, dtype=torch.float32)
        else:
            block, x = ResidualBlock(contractive_convnet(1, 3)), normal(4, 1, 4, 4, dtype=torch.float32)
        block(x)
        calls = count_refreshes(monkeypatch)
        state = copy.deepcopy(block.state_dict())
        with torch.no_grad():
            block(x)
            block.forward_and_logdet(x, estimator=PowerSeries(4))
        block.solve(x)
        block.inverse(x.clone().requires_grad_()).sum().backward()
        with freeze_norms(block):
            block(x)
        assert calls == []
        assert all(torch.equal(value, state[name]) for name, value in block.state_dict().items())
        block.eval()
        calls.clear()
        block(x)
        block.forward_and_logdet(x)
        block.solve(x)
        block.inverse(x.clone().requires_grad_()).sum().backward()
        assert calls == []

    def test_a_part_in_eval_stands_still_while_the_rest_trains(self):
        flow = rouse_(mlp_flow(2, blocks=2, hidden=(8,)))
        resting, x = flow.transform[1].eval(), normal(6, 2, dtype=torch.float32)
        with torch.no_grad():
            for p in flow.parameters():
                p.add_(0.1)
        before = resting(x)
        flow(x)
        assert torch.equal(resting(x), before)

    def test_on_the_way_to_eval_the_norm_converges(self):
        layer = LipschitzLinear(30, 30, coefficient=0.9)
        with torch.no_grad():
            original(layer).copy_(normal(30, 30, seed=3))
        layer.eval()
        assert norm(layer) == pytest.approx(0.9, rel=1e-3)
        before = layer.weight.clone()
        layer.eval()
        layer.train()
        assert torch.equal(layer.weight, before)

    def test_in_batches_or_one_by_one_is_the_same(self):
        g = nn.Sequential(*(LipschitzConv2d(2, 2, 3, padding=1) for _ in range(4)))
        rouse_(g, weight=7.0)
        twin = copy.deepcopy(g)
        for _ in range(3):
            refresh_(g)
            for layer in twin:
                refresh_(layer)
        for a, b in zip(g, twin, strict=True):
            torch.testing.assert_close(a.weight, b.weight)
            torch.testing.assert_close(cap_of(a).direction, cap_of(b).direction)

    def test_layers_of_different_size_settings_and_type_are_not_mixed(self, monkeypatch):
        layers = [LipschitzConv2d(2, 2, 3, padding=p) for p in (0, 1, 1, 1)]
        layers[2](torch.zeros(1, 2, 20, 20))
        layers[3].double()
        layers.append(LipschitzConv2d(2, 2, 3, padding=1, norm=GramIteration()))
        calls = count_refreshes(monkeypatch)
        refresh_(nn.ModuleList(layers), settle=True)
        assert calls == [1] * 5

    def test_an_exception_lets_go(self):
        layer = rouse_(LipschitzLinear(3, 3))
        with pytest.raises(KeyError), freeze_norms(layer):
            raise KeyError
        assert not cap_of(layer)._frozen

    def test_an_average_of_weights_gets_its_norm_by_settling(self):
        """An EMA copy carries the live net's u and v, which are wrong for it."""
        layer = LipschitzLinear(20, 20, coefficient=0.9)
        average = copy.deepcopy(layer)
        with torch.no_grad():
            original(average).copy_(normal(20, 20, seed=5))
        assert norm(average) > 1.2
        refresh_(average, settle=True)
        assert norm(average) == pytest.approx(0.9, rel=1e-3)


class TestSizes:
    def test_a_larger_input_later_counts(self):
        """The norm grows with the input: the one of the first size would be too small."""
        layer = LipschitzConv2d(1, 1, 3, padding=1, coefficient=0.9)
        nn.init.constant_(original(layer), 1.0)
        layer(torch.zeros(1, 1, 3, 3))
        refresh_(layer, settle=True)
        assert norm(layer, (3, 3)) == pytest.approx(0.9, rel=1e-3)
        assert norm(layer, (12, 12)) > 1.2
        layer(torch.zeros(1, 1, 12, 12))
        assert norm(layer, (12, 12)) == pytest.approx(0.9, rel=0.05)
        layer.eval()
        assert norm(layer, (12, 12)) == pytest.approx(0.9, rel=1e-3)

    def test_the_largest_size_is_kept_axis_by_axis(self):
        layer = LipschitzConv2d(1, 1, 3, padding=1)
        for size in ((4, 9), (7, 3), (5, 5)):
            layer(torch.zeros(1, 1, *size))
        assert cap_of(layer).seen == (7, 9)

    @pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
    def test_of_a_circular_convolution_the_bound_is_one_for_all_sizes(self, rule):
        """Trap: the norm of (-1, 0, 1) is the largest 2 sin(2 pi f / n): 1.73 for an input of 6, but 2 for one of 4."""
        g = nn.Sequential(nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular", bias=False))
        with torch.no_grad():
            g[0].weight.copy_(torch.tensor([[[-1.0, 0.0, 1.0]]]))
        constrain_(g, 0.9, norm=rule)
        g(torch.zeros(1, 1, 6))
        g.eval()
        norms = [norm(g[0], (n,)) for n in range(1, 12)]
        assert lipschitz_bound(g).value >= max(norms)
        assert lipschitz_bound(g).parts[0].input_shape is None
        assert lipschitz_bound(g, (1, 6)).value == pytest.approx(norms[5])
        if rule is RULES["strict"]:
            assert max(norms) <= 0.9
        else:
            assert norms[3] > 1.03 > 0.91 > norms[5]

    def test_the_size_survives_a_state_dict_and_a_copy(self):
        layer, fresh = (LipschitzConv2d(1, 1, 3, padding=1) for _ in range(2))
        layer(torch.zeros(1, 1, 6, 9))
        fresh.load_state_dict(layer.state_dict())
        assert cap_of(fresh).seen == (6, 9)
        assert cap_of(copy.deepcopy(layer)).seen == (6, 9)
        assert torch.equal(fresh.weight, layer.weight)
        assert fresh(torch.zeros(1, 1, 6, 9)).shape == (1, 1, 6, 9)

    def test_a_net_that_met_nothing_yet_loads_as_such(self):
        layer, fresh = (LipschitzConv2d(1, 1, 3, padding=1) for _ in range(2))
        fresh(torch.zeros(1, 1, 6, 9))
        fresh.load_state_dict(layer.state_dict())
        assert cap_of(fresh).seen == ()

    def test_after_a_squeeze_the_size_is_the_squeezed_one(self):
        """Norms are taken at the size a layer meets, not at that of the image."""
        from iresnet import Chain, Squeeze

        chain = Chain(Squeeze(), ResidualBlock(contractive_convnet(4, 4)))
        chain(normal(1, 1, 12, 8, dtype=torch.float32))
        assert all(cap_of(layer).seen == (6, 4) for layer in constrained_layers(chain))

    def test_the_first_input_may_come_by_way_of_a_vector_jacobian_product(self):
        """A circular convolution takes the general way, inside which no buffer may be written."""
        g = constrain_(nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular")), 0.5)
        block = ResidualBlock(g)
        block.forward_and_logdet(normal(2, 1, 4, 4, dtype=torch.float32))
        assert cap_of(g[0]).seen == (4, 4)
        assert block.state_dict()["g.0.parametrizations.weight.0.size"].tolist() == [4, 4]


class TestRelease:
    @pytest.mark.parametrize("how", ["release_", "torch"])
    @pytest.mark.parametrize("with_copy", [False, True])
    def test_a_plain_layer_with_the_same_function_remains(self, how, with_copy):
        layer, x = rouse_(LipschitzLinear(4, 4, coefficient=0.5)).eval(), normal(3, 4, dtype=torch.float32)
        expected, twin = layer(x), copy.deepcopy(layer) if with_copy else None
        if how == "release_":
            assert release_(layer) is layer
            assert not layer._forward_pre_hooks
        else:
            parametrize.remove_parametrizations(layer, "weight")
        assert type(layer) is LipschitzLinear
        assert sorted(layer.state_dict()) == ["bias", "weight"]
        assert isinstance(layer.weight, nn.Parameter)
        assert torch.equal(layer.train()(x), expected)
        if twin is not None:
            assert torch.equal(twin(x), expected)
            assert torch.equal(copy.deepcopy(twin)(x), expected)
            assert torch.equal(release_(twin)(x), expected)

    def test_a_whole_network_is_released(self):
        g, x = rouse_(contractive_convnet(2, 4)).eval(), normal(2, 2, 5, 5, dtype=torch.float32)
        expected = g(x)
        assert torch.equal(release_(g)(x), expected)
        assert constrained_layers(g) == []
        assert release_(g) is g

    def test_a_released_layer_can_be_constrained_again(self):
        layer = release_(rouse_(LipschitzLinear(4, 4, coefficient=0.5)))
        assert norm(constrain_(layer, 0.2)) == pytest.approx(0.2, rel=1e-4)

    def test_a_copy_trains_on_its_own(self):
        layer = rouse_(LipschitzLinear(4, 4, coefficient=0.5))
        twin = copy.deepcopy(layer)
        scale_(twin, 0.0)
        twin(normal(2, 4, dtype=torch.float32))
        assert norm(layer) == pytest.approx(0.5, rel=1e-4)
        assert norm(twin) == 0


SMALL, LARGE = (2, 2, 4, 4), (2, 2, 9, 9)


def _meets_larger(layer):
    layer(normal(*LARGE, dtype=torch.float32))


def _leaves_training(layer):
    _meets_larger(layer)
    layer.eval()


def _loads(layer):
    other = copy.deepcopy(layer).train()
    other.load_state_dict({key: t.clone() for key, t in layer.state_dict().items()})
    cap_of(other).record_size((9, 9))
    refresh_(other, settle=True)
    layer.load_state_dict(other.state_dict())


def _settles(layer):
    _meets_larger(layer)
    refresh_(layer, settle=True)


class TestInferenceMode:
    """What is made inside of it is never kept where training writes."""

    @pytest.mark.parametrize("does", [_meets_larger, _leaves_training, _loads, _settles])
    @pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
    def test_training_goes_on_after_it(self, does, rule):
        torch.manual_seed(0)
        layer = LipschitzConv2d(2, 2, 3, padding=1, coefficient=0.5, norm=rule)
        layer(normal(*SMALL, dtype=torch.float32))
        scale_(layer, 5.0)
        with torch.inference_mode():
            does(layer)
        assert not any(t.is_inference() for t in (*layer.parameters(), *layer.buffers()))
        for size in (SMALL, LARGE):
            layer.train()(normal(*size, dtype=torch.float32)).sum().backward()
        assert norm(layer.eval(), (9, 9)) <= 0.5 * (1 + 1e-4)

    def test_a_layer_is_constrained_inside_of_it(self):
        g = nn.Sequential(nn.Linear(3, 3))
        with torch.inference_mode():
            constrain_(g, 0.5)
        g(normal(2, 3, dtype=torch.float32)).sum().backward()
        assert norm(g[0]) <= 0.5 * (1 + 1e-4)

    def test_a_model_trains_after_samples_and_proofs_inside_of_it(self):
        flow, x = mlp_flow(2, blocks=2, hidden=(6,)), normal(8, 2, dtype=torch.float32)
        flow(x)
        with torch.inference_mode():
            flow.eval()
            flow.sample((3,))
            certify(flow)
        flow.train()(x).sum().backward()
        samples, _ = flow.eval().rsample_and_log_prob((3,))
        samples.sum().backward()


def _linear(rule):
    return constrain_(nn.Sequential(nn.Linear(64, 64)), 0.9, norm=rule)


def _two_linear(rule):
    return ResidualBlock(constrain_(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), 0.9, norm=rule))


def _convolution(rule):
    return nn.Sequential(LipschitzConv2d(2, 2, 3, padding=1, coefficient=0.9, norm=rule))


def _dilated(rule):
    """Not computed as a matrix product."""
    return nn.Sequential(LipschitzConv2d(2, 2, 3, padding=2, dilation=2, coefficient=0.9, norm=rule))


def _trains(g, x):
    g.train()(x).square().sum().backward()


def _trains_with_frozen_norms(g, x):
    with freeze_norms(g):
        _trains(g, x)


def _is_assigned(g, x):
    for layer in constrained_layers(g):
        layer.weight = original(layer).detach() * 2


def _is_settled(g, x):
    refresh_(g, settle=True)


def _is_constrained(g, x):
    constrain_(release_(g), 0.5, initial_norm=1.0)


class TestAutocast:
    """Trap: Gram iteration in bfloat16 is no upper bound, and a norm that is too small constrains too little."""

    @pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
    @pytest.mark.parametrize(
        ("make", "shape"),
        [(_linear, (4, 64)), (_two_linear, (4, 16)), (_convolution, (2, 2, 5, 5)), (_dilated, (2, 2, 5, 5))],
    )
    @pytest.mark.parametrize("does", [_trains, _trains_with_frozen_norms, _is_assigned, _is_settled, _is_constrained])
    def test_the_constraint_is_that_without_it(self, does, make, shape, rule):
        torch.manual_seed(0)
        x = normal(*shape, dtype=torch.float32)
        g = make(rule)
        g(x)
        for layer in constrained_layers(g):
            scale_(layer, 20.0)
        twin = copy.deepcopy(g)
        does(g, x)
        with torch.autocast("cpu", torch.bfloat16):
            does(twin, x)
        for layer, other in zip(constrained_layers(g), constrained_layers(twin), strict=True):
            for name in ("gradient", "direction"):
                assert torch.equal(getattr(cap_of(layer), name), getattr(cap_of(other), name))
            assert torch.equal(layer.weight, other.weight)

    def test_the_strict_rule_holds_inside_of_it(self):
        torch.manual_seed(0)
        g = _linear(GramIteration(8))
        scale_(g[0], 5.0)
        for step in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                _trains(g, normal(4, 64, seed=step, dtype=torch.float32))
            assert 0.85 < norm(g[0]) <= 0.9

    def test_a_tightened_layer_is_the_same(self):
        torch.manual_seed(0)
        block = ResidualBlock(_linear(PowerIteration())).eval()
        scale_(block.g[0], 5.0)
        twin = copy.deepcopy(block)
        tighten_(block)
        with torch.autocast("cpu", torch.bfloat16):
            tighten_(twin)
        assert torch.equal(block.g[0].weight, twin.g[0].weight)
        assert certify(twin).passed


class TestTorchsCache:
    """Within `parametrize.cached()` torch returns what an earlier pass made; the weight of a constrained layer is made
    anew."""

    @pytest.mark.parametrize("training", [False, True])
    def test_gradients_stay(self, training):
        flow, x = mlp_flow(2, blocks=2, hidden=(6,)), normal(8, 2, dtype=torch.float32)
        flow(x)
        flow.train(training)
        twin = copy.deepcopy(flow)
        twin(x).sum().backward()
        with parametrize.cached():
            with torch.no_grad():
                flow(x)
            flow(x).sum().backward()
        for ours, theirs in zip(flow.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)

    def test_weights_that_change_inside_of_it_count(self):
        layer = LipschitzLinear(3, 3, coefficient=0.5).eval()
        block = ResidualBlock(nn.Sequential(layer)).eval()
        z = normal(4, 3, dtype=torch.float32)
        with parametrize.cached(), torch.no_grad():
            for seed in range(3):
                layer.weight = normal(3, 3, seed=seed, dtype=torch.float32)
                assert norm(layer) == pytest.approx(0.5, rel=1e-4)
                solution = block.solve(z)
                y = nn.functional.linear(solution.x, layer.parametrizations.weight(), layer.bias)
                torch.testing.assert_close(solution.x + y, z, atol=1e-5, rtol=0)
                torch.testing.assert_close(block(solution.x), z, atol=1e-5, rtol=0)


FOREIGN = {
    "weight_norm": (parametrizations.weight_norm, "_WeightNorm"),
    "spectral_norm": (parametrizations.spectral_norm, "_SpectralNorm"),
    "orthogonal": (parametrizations.orthogonal, "_Orthogonal"),
    "pruning": (partial(prune.l1_unstructured, name="weight", amount=0.5), "a hook"),
    "older spectral_norm": (nn.utils.spectral_norm, "a hook"),
}


class TestForeignWeights:
    @pytest.mark.parametrize(("change", "name"), FOREIGN.values(), ids=FOREIGN)
    def test_get_a_sentence_before_anything_is_changed(self, change, name):
        g = nn.Sequential(nn.Linear(3, 3), nn.ELU(), change(nn.Linear(3, 3)))
        keys = list(g.state_dict())
        with pytest.raises(
            ValueError, match=f"must be a plain parameter; that of Linear is computed by {name}. Remove that first"
        ):
            constrain_(g, 0.5)
        assert list(g.state_dict()) == keys

    def test_the_remedy_works(self):
        layer = parametrizations.weight_norm(nn.Linear(3, 3))
        parametrize.remove_parametrizations(layer, "weight")
        assert norm(constrain_(layer, 0.2)) <= 0.2 * (1 + 1e-4)

    def test_a_weight_without_a_shape_gets_a_sentence(self):
        with pytest.raises(ValueError, match="a weight with a shape; that of LazyLinear is lazy. Pass a bat"):
            constrain_(nn.LazyLinear(3), 0.5)


class TestConstrain:
    @pytest.mark.parametrize(
        ("module", "sentence"),
        [
            (nn.BatchNorm1d(2), "BatchNorm1d inside g has no Lipschitz bound; remove it, or use ActNorm"),
            (nn.LayerNorm(2), "LayerNorm inside g has no Lipschitz bound"),
            (nn.GroupNorm(1, 2), "GroupNorm inside g"),
            (nn.InstanceNorm1d(2), "InstanceNorm1d inside g"),
            (nn.Dropout(), "g must be the same function at every call; got Dropout. Remove it"),
            (nn.Dropout2d(), "got Dropout2d"),
            (nn.SiLU(), "a slope of at most 1; SiLU.. reaches 1.1. LipSwish is its contractive form"),
            (nn.GELU(), "a slope of at most 1; GELU.* reaches 1.13. Use ELU or LipSwish"),
            (nn.ELU(alpha=1.5), r"a slope of at most 1; ELU\(alpha=1.5\) reaches 1.5"),
            (nn.LeakyReLU(2.0), "reaches 2"),
            (nn.ConvTranspose1d(2, 2, 1), "no Lipschitz bound is known for ConvTranspose1d; use Linear or Conv"),
            (nn.MultiheadAttention(2, 1), "no Lipschitz bound is known for MultiheadAttention"),
            (nn.GRU(2, 2), "no Lipschitz bound is known for GRU"),
        ],
        ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
    )
    @pytest.mark.parametrize("argument", ["coefficient", "lipschitz"])
    def test_what_breaks_the_promise_is_refused_and_nothing_is_touched(self, module, sentence, argument):
        g = nn.Sequential(nn.Linear(2, 2), module)
        with pytest.raises(ValueError, match=sentence):
            constrain_(g, **{argument: 0.9})
        assert constrained_layers(g) == []

    @pytest.mark.parametrize("value", [0.0, 1.0, 1.5, -0.5, math.nan])
    def test_coefficients_outside_the_open_interval_are_refused(self, value):
        with pytest.raises(ValueError, match=r"coefficient must lie in \(0, 1\); got .* The paper uses 0.5 to 0.9"):
            constrain_(nn.Linear(2, 2), value)
        with pytest.raises(ValueError, match=r"lipschitz must lie in \(0, 1\); got"):
            constrain_(nn.Linear(2, 2), lipschitz=value)
        with pytest.raises(ValueError, match=r"coefficient must lie in \(0, 1\)"):
            LipschitzLinear(2, 2, coefficient=value)
        with pytest.raises(ValueError, match=r"coefficient must lie in \(0, 1\)"):
            LipschitzConv2d(2, 2, 3, coefficient=value)

    @pytest.mark.parametrize("arguments", [{}, {"coefficient": 0.9, "lipschitz": 0.9}])
    def test_one_of_two_arguments(self, arguments):
        with pytest.raises(ValueError, match="either coefficient .* or lipschitz .*, not both or none"):
            constrain_(nn.Linear(2, 2), **arguments)

    def test_nothing_to_constrain(self):
        with pytest.raises(ValueError, match="must have a Linear or Conv layer; Sequential has none"):
            constrain_(nn.Sequential(nn.ELU()), 0.9)

    def test_a_constant_for_the_whole_needs_a_sequence(self):
        with pytest.raises(ValueError, match=r"lipschitz= needs an nn.Sequential .* got UserNet. Use coefficient="):
            constrain_(UserNet(), lipschitz=0.9)
        constrain_(UserNet(), 0.9)

    def test_layers_share_the_constant_of_the_whole(self):
        g = rouse_(
            constrain_(
                nn.Sequential(nn.Linear(2, 4), nn.ELU(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))), lipschitz=0.8
            )
        )
        assert [cap_of(layer).coefficient for layer in constrained_layers(g)] == pytest.approx([0.8 ** (1 / 3)] * 3)
        assert requested_constant(g) == pytest.approx(0.8)
        assert lipschitz_bound(g).value == pytest.approx(0.8, rel=1e-3)

    @pytest.mark.parametrize("iterations", [0, -1])
    def test_bad_rules_get_a_sentence(self, iterations):
        with pytest.raises(ValueError, match="iterations must be at least 1; got"):
            PowerIteration(iterations)
        with pytest.raises(ValueError, match="iterations must be at least 2; got"):
            GramIteration(iterations)

    def test_the_setting_is_shown(self):
        assert "coefficient=0.9, norm=GramIteration(iterations=8" in repr(LipschitzLinear(2, 2))
        assert "coefficient=0.9, norm=PowerIteration(iterations=1" in repr(LipschitzConv2d(2, 2, 3))

    def test_the_strict_rule_is_the_default_of_small_linear_layers(self):
        g = constrain_(nn.Sequential(nn.Linear(500, 128), nn.ELU(), nn.Linear(128, 129), nn.Linear(129, 500)), 0.9)
        rules = [cap_of(layer).norm for layer in g if isinstance(layer, nn.Linear)]
        assert rules == [GramIteration(8), GramIteration(8), PowerIteration()]
        assert {type(cap_of(layer).norm) for layer in constrain_(nn.Sequential(nn.Conv2d(2, 2, 1)), 0.9)} == {
            PowerIteration
        }


class TestBound:
    def test_constants_multiply(self):
        g = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 3)).double()
        a, b = (torch.linalg.matrix_norm(layer.weight, 2).item() for layer in (g[0], g[2]))
        assert lipschitz_bound(g).value == pytest.approx(a * b / 4)
        assert [part.name for part in lipschitz_bound(g).parts] == ["0", "1", "2"]
        assert lipschitz_bound(g, estimate=True).parts[0].estimate == pytest.approx(a)

    def test_it_bounds_the_dense_jacobian_of_a_network(self):
        g = rouse_(contractive_convnet(2, 4, kernels=(3, 1, 3))).double().eval()
        x = normal(4, 2, 4, 4)
        sigma = torch.linalg.matrix_norm(dense_jacobian(g, x), 2).max().item()
        assert sigma <= lipschitz_bound(g, (2, 4, 4)).value

    def test_sizes_are_followed_through_the_network(self):
        g = nn.Sequential(nn.Conv2d(1, 2, 3, stride=2), nn.ELU(), nn.Flatten(), nn.Linear(18, 4))
        shapes = [part.input_shape for part in lipschitz_bound(g, (1, 7, 7)).parts]
        assert shapes == [(1, 7, 7), (2, 3, 3), (2, 3, 3), (18,)]

    def test_without_a_shape_the_recorded_size_counts_else_all_sizes(self):
        layer = LipschitzConv2d(1, 1, 3, padding=1, coefficient=0.9).eval()
        free = lipschitz_bound(nn.Sequential(layer)).value
        layer(torch.zeros(1, 1, 3, 3))
        assert lipschitz_bound(nn.Sequential(layer)).value == pytest.approx(norm(layer, (3, 3)), rel=1e-6)
        assert lipschitz_bound(nn.Sequential(layer)).value < free

    def test_a_layer_used_twice_counts_twice(self):
        """Trap: a product over the distinct layers is no bound."""
        layer = nn.Linear(3, 3)
        with torch.no_grad():
            layer.weight.copy_(2 * torch.eye(3))
        g = nn.Sequential(layer, nn.Identity(), layer)
        assert lipschitz_bound(g).value == pytest.approx(4)
        assert requested_constant(g) == pytest.approx(4)
        with pytest.raises(ValueError, match="g must be a contraction; its layers allow a Lipschitz constant of 4"):
            ResidualBlock(g)

    def test_a_layer_used_twice_is_tightened_once(self):
        layer = LipschitzLinear(3, 3, coefficient=0.9, norm=PowerIteration())
        with torch.no_grad():
            original(layer).copy_(normal(3, 3, seed=2))  # sigma is now stale
        assert norm(layer) > 1
        assert tighten_layers_(nn.Sequential(layer, nn.ELU(), layer)) == ["0"]
        assert norm(layer) == pytest.approx(0.9, rel=1e-5)

    @pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook"])
    @pytest.mark.parametrize("where", ["inside", "outside"])
    def test_hooks_are_refused(self, hook, where):
        g = nn.Sequential(nn.Linear(2, 2), nn.ELU())
        getattr(g[0] if where == "inside" else g, hook)(lambda *_: None)
        with pytest.raises(NoBoundKnown, match="has forward hooks, which may change its function; remove them"):
            lipschitz_bound(g)

    def test_a_forward_that_was_replaced_is_refused(self):
        g = nn.Sequential(nn.Linear(2, 2), nn.ELU())
        g[1].forward = lambda x: 10 * x
        with pytest.raises(
            NoBoundKnown, match=r"ELU \(1\) had its forward replaced, which may change its function; restore"
        ):
            lipschitz_bound(g)
        block = ResidualBlock(g, lipschitz=0.5)
        torch.testing.assert_close(block(torch.ones(1, 2)), 1 + 10 * g[0](torch.ones(1, 2)))

    def test_a_forward_of_the_users_own_is_refused(self):
        with pytest.raises(NoBoundKnown, match="UserNet: it has a custom forward. Write g as"):
            lipschitz_bound(UserNet())

    def test_subclasses_with_a_forward_of_their_own_are_refused(self):
        class Skipping(nn.Sequential):
            def forward(self, x):
                return x + super().forward(x)

        class Steep(nn.ELU):
            def forward(self, x):
                return 10 * super().forward(x)

        class Doubled(nn.Linear):
            def forward(self, x):
                return 2 * super().forward(x)

        for g in (Skipping(nn.Linear(2, 2)), nn.Sequential(Steep()), nn.Sequential(Doubled(2, 2))):
            with pytest.raises(NoBoundKnown, match="no Lipschitz bound is known for"):
                lipschitz_bound(g)

    def test_what_depends_on_the_batch_or_chance_is_refused(self):
        reasons = {
            nn.BatchNorm1d(2): "its bound is not known. Remove it from g; use ActNorm",
            nn.Dropout(): "at every call",
        }
        for bad, reason in reasons.items():
            with pytest.raises(NoBoundKnown, match=reason):
                lipschitz_bound(nn.Sequential(nn.Linear(2, 2), bad))

    def test_only_x_counts_in_a_conditioned_network(self):
        first, embed, rest = nn.Linear(2, 3), nn.Linear(5, 3), nn.Sequential(nn.ELU(), nn.Linear(3, 2))
        nn.init.constant_(embed.weight, 100.0)
        g = Conditioned(first, embed, rest)
        assert lipschitz_bound(g).value == pytest.approx(norm(first) * norm(rest[1]))
        assert [part.name for part in lipschitz_bound(g).parts] == ["first", "rest.0", "rest.1"]
        with pytest.raises(ValueError, match="this network is conditional; pass context"):
            g(torch.zeros(1, 2))

    def test_no_product_of_constants_underflows(self):
        """Trap: 1e-170 twice is zero, and stays zero times 1e300 twice, whose product is 1e260."""
        g = nn.Sequential(*(nn.Linear(2, 2, bias=False, dtype=DOUBLE) for _ in range(4)))
        with torch.no_grad():
            for layer, size in zip(g, (1e-170, 1e-170, 1e300, 1e300), strict=True):
                layer.weight.copy_(size * torch.eye(2, dtype=DOUBLE))
        assert lipschitz_bound(g).value >= 1e260


class TestTighten:
    def test_only_what_exceeds_is_rescaled_and_a_second_call_does_nothing(self):
        g = rouse_(contractive_mlp(4, (16, 16), coefficient=0.9)).eval()
        with torch.no_grad():
            original(g[2]).add_(normal(16, 16, seed=3, dtype=torch.float32))  # sigma is now stale, hence too small
        before = [layer.weight.clone() for layer in constrained_layers(g)]
        exceeding = [
            part.name for part in lipschitz_bound(g).parts if part.coefficient and part.bound > part.coefficient
        ]
        assert "2" in exceeding
        assert tighten_layers_(g) == exceeding
        assert lipschitz_bound(g).value <= 0.9**3
        for name, layer, weight in zip(["0", "2", "4"], constrained_layers(g), before, strict=True):
            assert torch.equal(layer.weight, weight) == (name not in exceeding)
        after = [layer.weight.clone() for layer in constrained_layers(g)]
        assert tighten_layers_(g) == []
        assert all(torch.equal(a, layer.weight) for a, layer in zip(after, constrained_layers(g), strict=True))

    def test_refreshing_after_it_changes_nothing(self):
        g = rouse_(contractive_convnet(2, 4, coefficient=0.9)).eval()
        g(torch.zeros(1, 2, 6, 6))
        with torch.no_grad():
            for p in g.parameters():
                p.add_(normal(*p.shape, seed=4, dtype=torch.float32))
        assert tighten_layers_(g, (2, 6, 6))
        before = [layer.weight.clone() for layer in constrained_layers(g)]
        refresh_(g, settle=True)
        assert all(torch.equal(a, layer.weight) for a, layer in zip(before, constrained_layers(g), strict=True))
        assert all(part.bound <= 0.9 for part in lipschitz_bound(g, (2, 6, 6)).parts if part.coefficient)


@pytest.mark.parametrize("name", ACTIVATIONS)
class TestActivations:
    def test_no_slope_exceeds_the_constant_on_record_and_some_slope_reaches_it(self, name):
        activation = ACTIVATIONS[name]().double()
        constant = lipschitz_constant(activation)
        if name == "maxmin":
            j = dense_jacobian(activation, normal(50, 6))
            slopes = torch.linalg.matrix_norm(j, 2)
        else:
            x = torch.linspace(-30, 30, 200_001, dtype=DOUBLE, requires_grad=True)
            slopes = torch.autograd.grad(activation(x).sum(), x)[0].abs()
        assert slopes.max() <= constant * (1 + 1e-12)
        assert slopes.max() >= constant * 0.999
        assert check_contractive(activation) is activation

    def test_the_slope_is_that_of_autograd_with_its_gradient(self, name):
        activation = ACTIVATIONS[name]().double()
        found = try_parse(activation).program
        (step,) = found.steps
        if not found.has_slopes:
            with pytest.raises(ValueError, match="has no closed form"):
                activation_slope(step, torch.zeros(1, 2), torch.zeros(1, 2), [])
            return
        x = normal(40, 3).mul(3).requires_grad_()
        expected = torch.autograd.grad(activation(x).sum(), x, create_graph=True)[0]
        got = activation_slope(step, x, activation(x), list(activation.parameters()))
        torch.testing.assert_close(got, expected, atol=1e-9, rtol=1e-9)
        if expected.requires_grad and got.requires_grad:
            inputs = [x, *activation.parameters()]
            a = torch.autograd.grad(got.sum(), inputs, allow_unused=True, materialize_grads=True)
            b = torch.autograd.grad(expected.sum(), inputs, allow_unused=True, materialize_grads=True)
            torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-8)

    def test_secants_do_not_exceed_the_constant_in_single_precision(self, name):
        activation = ACTIVATIONS[name]()
        a, b = (3 * normal(2000, 4, seed=s, dtype=torch.float32) for s in (0, 1))
        apart, mapped = (a - b).norm(dim=1), (activation(a) - activation(b)).norm(dim=1)
        assert (mapped <= lipschitz_constant(activation) * apart * (1 + 1e-5)).all()


class TestActivationTraps:
    def test_swish_expands_and_lipswish_does_not(self):
        x = torch.linspace(-10, 10, 100_001, dtype=DOUBLE, requires_grad=True)
        steepest = torch.autograd.grad(nn.SiLU()(x).sum(), x)[0].max().item()
        assert 1.0998 < steepest <= lipschitz_constant(nn.SiLU())
        assert lipschitz_constant(LipSwish()) <= 1

    @pytest.mark.parametrize("beta", [1e-3, 0.5, 1.0, 30.0, 200.0])
    def test_lipswish_starts_with_the_beta_asked_for(self, beta):
        activation = LipSwish(beta)
        assert nn.functional.softplus(activation.raw_beta).item() == pytest.approx(beta, rel=1e-4)
        assert torch.isfinite(activation(torch.linspace(-3, 3, 7))).all()

    def test_a_learned_beta_stays_within_the_constant(self):
        activation = LipSwish().double()
        for raw in (-20.0, -1.0, 5.0, 50.0):
            with torch.no_grad():
                activation.raw_beta.fill_(raw)
            x = torch.linspace(-20, 20, 100_001, dtype=DOUBLE, requires_grad=True)
            assert torch.autograd.grad(activation(x).sum(), x)[0].abs().max() <= lipschitz_constant(activation)

    def test_a_softplus_that_jumps_is_not_on_record(self):
        """Trap: torch replaces softplus by the identity beyond `threshold`, at 20 a step of 2e-9 and of any slope."""
        default = nn.Softplus()
        below = torch.tensor([20.0], dtype=DOUBLE)
        above = torch.nextafter(below, below + 1)
        assert abs(default(above) - default(below)) > 1e5 * (above - below)
        assert lipschitz_constant(default) is None
        with pytest.raises(ValueError, match=r"Softplus: torch's softplus jumps .* Use nn.Softplus\(threshold=40\)"):
            check_contractive(default)
        with pytest.raises(NoBoundKnown, match=r"Softplus \(1\): .*jumps .* Use nn.Softplus\(threshold=40\)"):
            lipschitz_bound(nn.Sequential(nn.Linear(2, 2), default))

    @pytest.mark.parametrize("beta", [0.01, 1.0, 7.0, -2.0])
    def test_a_softplus_with_a_large_threshold_does_not_jump(self, beta):
        activation = nn.Softplus(beta, 40.0)
        x = torch.tensor([40.0 / beta], dtype=DOUBLE)
        for _ in range(4):  # the numbers around the threshold, one by one
            following = torch.nextafter(x, x + 1)
            assert abs(activation(following) - activation(x)) <= (following - x) + 2**-52 * x.abs()
            x = following
        assert lipschitz_constant(activation) == 1

    def test_a_negative_alpha_has_its_own_slope(self):
        activation = nn.ELU(alpha=-0.5).double()
        x = normal(9, 2).requires_grad_()
        expected = torch.autograd.grad(activation(x).sum(), x)[0]
        (step,) = try_parse(activation).program.steps
        torch.testing.assert_close(activation_slope(step, x, activation(x), []), expected)

    def test_maxmin_keeps_norms_and_needs_pairs(self):
        x = normal(3, 4, 2, 2)
        y = MaxMin()(x)
        torch.testing.assert_close(y.flatten(1).norm(dim=1), x.flatten(1).norm(dim=1))
        assert MaxMin()(torch.tensor([[1.0, 2.0, 4.0, 3.0]])).tolist() == [[2.0, 1.0, 4.0, 3.0]]
        with pytest.raises(ValueError, match="sorts channels in pairs; got 3 channels. Use an even number"):
            MaxMin()(torch.zeros(1, 3))

    def test_bad_settings_get_a_sentence(self):
        with pytest.raises(ValueError, match="beta must be positive; got 0"):
            LipSwish(0)
        with pytest.raises(ValueError, match="frequency must be positive; got -1"):
            Sine(-1)
        with pytest.raises(ValueError, match="is known for PReLU: its slope is not known. Use ELU"):
            check_contractive(nn.PReLU())


class Opaque(nn.Module):
    """Hides what g is made of, so that its Jacobian takes the general way."""

    def __init__(self, g):
        super().__init__()
        self.g = g

    def forward(self, x, context=None):
        return self.g(x) if context is None else self.g(x, context)


SHAPES = {
    "mlp": (lambda: contractive_mlp(4, (6, 5)), (4,), None),
    "lipswish": (lambda: contractive_mlp(4, (6,), activation=LipSwish), (4,), None),
    "conditional": (lambda: contractive_mlp(4, (6,), context=3), (4,), 3),
    "conv": (lambda: contractive_convnet(2, 3), (2, 4, 3), None),
    "strided": (
        lambda: constrain_(nn.Sequential(nn.Conv2d(1, 1, (2, 3), stride=(2, 3), padding=(1, 2), dilation=2)), 0.7),
        (1, 6, 8),
        None,
    ),
    "grouped": (
        lambda: constrain_(nn.Sequential(nn.Conv1d(4, 4, 3, padding=1, groups=2), nn.Tanh()), 0.7),
        (4, 5),
        None,
    ),
}


def network(kind):
    make, shape, width = SHAPES[kind]
    g = rouse_(make()).double().eval()
    return g, normal(3, *shape, seed=1), None if width is None else normal(3, width, seed=2)


class TestLinearise:
    @pytest.mark.parametrize("kind", SHAPES)
    def test_the_explicit_way_is_the_general_way(self, kind):
        g, x, c = network(kind)
        (y, fast), (general, slow) = linearise(g, x, c), linearise(Opaque(g), x, c)
        v = normal(*y.shape, seed=3)
        torch.testing.assert_close(y, general)
        torch.testing.assert_close(fast(v), slow(v))

    @pytest.mark.parametrize("kind", [kind for kind in SHAPES if kind != "strided"])
    @pytest.mark.parametrize("estimator", [Exact(), PowerSeries(6)], ids=["exact", "series"])
    def test_losses_and_their_gradients_agree(self, kind, estimator):
        g, x, c = network(kind)
        results = []
        for module in (g, Opaque(g)):
            x = x.detach().requires_grad_()
            y, jacobian = linearise(module, x, c)
            logdet = estimator(jacobian, x, lipschitz=0.9, generator=torch.Generator().manual_seed(0))
            loss = (logdet * torch.tensor([1.0, -2.0, 0.5])).sum() + y.square().sum()
            results.append((loss, *torch.autograd.grad(loss, [x, *g.parameters()])))
        torch.testing.assert_close(results[0], results[1])

    @pytest.mark.parametrize("kind", [kind for kind in SHAPES if kind != "strided"])
    def test_the_dense_jacobian_is_that_of_autograd(self, kind):
        g, x, c = network(kind)
        for module in (g, Opaque(g)):
            _, jacobian = linearise(module, x, c)
            for i in range(3):
                expected = dense_jacobian(lambda t, i=i: g(t) if c is None else g(t, c[i : i + 1]), x[i : i + 1])
                torch.testing.assert_close(jacobian.matrix(x)[i], expected[0])


def test_hooks_send_the_jacobian_the_general_way():
    g = nn.Sequential(nn.Linear(2, 2)).double()
    g[0].register_forward_hook(lambda module, inputs, output: 3 * output)
    x = normal(2, 2)
    _, jacobian = linearise(g, x)
    torch.testing.assert_close(jacobian.matrix(x)[0], 3 * g[0].weight)


def test_a_jacobian_of_many_columns_is_made_in_pieces(monkeypatch):
    monkeypatch.setattr("iresnet.logdet.jacobian._CHUNK", 7)
    a, x = contraction(6, 0.5), normal(2, 6)
    jacobian = Jacobian(torch.func.vjp(lambda t: t @ a.T, x)[1])
    wrapped = Jacobian(lambda v: jacobian(v)[0])
    torch.testing.assert_close(wrapped.matrix(x), a.expand(2, 6, 6))


def test_constrain_leaves_the_embedding_of_a_context_free():
    """Only x counts for invertibility: the context's own network may have any activation and any norm."""
    embed = nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 4))
    g = constrain_(Conditioned(nn.Linear(2, 4), embed, nn.Sequential(nn.ELU(), nn.Linear(4, 2))), lipschitz=0.5)
    assert cap_of(g.first).coefficient == pytest.approx(0.5**0.5)
    assert cap_of(embed[0]) is None
    assert lipschitz_bound(g).value <= 0.5 * (1 + 1e-4)

"""Proofs cannot be fooled by honest PyTorch: subclasses, hooks, parametrizations, attributes, threads and mutations."""

from __future__ import annotations

import copy
import math
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from iresnet import (
    ActNorm,
    Chain,
    Classifier,
    Conditioned,
    ConvergenceError,
    DiagonalNormal,
    Exact,
    Flow,
    LipschitzLinear,
    LipSwish,
    Logit,
    NoBoundKnown,
    PowerIteration,
    PowerSeries,
    ResidualBlock,
    Standardise,
    certify,
    constrain_,
    contractive_mlp,
    fingerprint,
    mlp_flow,
    trust,
)
from iresnet.inverse import Inverter
from iresnet.lipschitz import refresh_
from iresnet.spectral import norm_bound
from iresnet.train.margin import class_vectors
from iresnet.transform import UNKNOWN, Stretch, Transform, stretch_of, why_unproven
from iresnet.transforms import AffineCoupling
from iresnet.transforms.columns import ColumnTransform
from iresnet.transforms.given import Given
from iresnet.transforms.mixing import InvertibleConv1x1, PrincipalAxes
from iresnet.transforms.spline import ColumnSpline
from tests.zoo import normal, rouse_


def linear(matrix, **options):
    layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False).double()
    layer.weight.data.copy_(matrix)
    return ResidualBlock(layer, **options)


def network(d=3, constant=0.8):
    torch.manual_seed(0)
    return constrain_(nn.Sequential(nn.Linear(d, 8), nn.ELU(), nn.Linear(8, d)), lipschitz=constant).eval()


# ---------------------------------------------------------------------------------------------- what is known


class Doubled(nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


class Padded(nn.Conv1d):
    def _conv_forward(self, x, weight, bias):
        return 4 * super()._conv_forward(x, weight, bias)


class Called(nn.Sequential):
    def __call__(self, x):
        return 3 * super().__call__(x)


class Steep(nn.ELU):
    def forward(self, x):
        return 5 * super().forward(x)


class Property(nn.Linear):
    @property
    def training(self):
        return True

    @training.setter
    def training(self, mode):
        pass


class Mixin(nn.Module):
    def __call__(self, x):
        return 3 * super().__call__(x)


class Mixed(nn.Tanh, Mixin):
    pass


class Named(nn.Sequential):
    """A constructor of one's own is harmless."""

    def __init__(self, d):
        super().__init__(nn.Linear(d, d), nn.ELU())


class Weight(torch.Tensor):
    pass


class Shared(nn.Linear):
    def __deepcopy__(self, memo):
        return self


class Tripled(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return 3 * result if function is nn.functional.linear else result


class Rounded(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result.bfloat16().to(result.dtype) if function is torch.ops.aten.addmm.default else result


class Coarse(torch.Tensor):
    """Rounds products, and takes every norm for zero."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        if function is torch.linalg.vector_norm:
            return 0 * result
        return result.bfloat16().to(result.dtype) if function is nn.functional.linear else result


class Solving(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, z):
        return self.block.solve(z)


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, w):
        return self.factor * w


def hooked(g, register, where=0):
    getattr(g[where] if where is not None else g, register)(lambda *a: None)
    return g


def with_instance_method(g, name):
    setattr(g[1], name, lambda *a: 30 * a[0])
    return g


def with_subclass_weight(g):
    layer = nn.Linear(3, 3)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Weight))
    return nn.Sequential(layer, nn.ELU())


def compiled(g):
    return torch.compile(g, backend="eager")


def compiled_with_forward(g, forward):
    wrapper = compiled(g)
    wrapper.forward = forward
    return wrapper


def with_broadcast_beta():
    activation = LipSwish()
    activation.raw_beta = nn.Parameter(torch.zeros(64))
    return nn.Sequential(nn.Linear(3, 1), activation, nn.Linear(64, 3))


FOREIGN = {
    "linear with its own forward": lambda: nn.Sequential(Doubled(3, 3)),
    "sequential with its own call": lambda: Called(nn.Linear(3, 3)),
    "activation with its own forward": lambda: nn.Sequential(nn.Linear(3, 3), Steep()),
    "a property": lambda: nn.Sequential(Property(3, 3)),
    "second parent": lambda: nn.Sequential(nn.Linear(3, 3), Mixed()),
    "forward hook": lambda: hooked(network(), "register_forward_hook"),
    "forward pre-hook": lambda: hooked(network(), "register_forward_pre_hook"),
    "hook on the whole": lambda: hooked(network(), "register_forward_hook", None),
    "forward replaced": lambda: with_instance_method(network(), "forward"),
    "call replaced": lambda: with_instance_method(network(), "_call_impl"),
    "compiled call replaced": lambda: with_instance_method(network(), "_compiled_call_impl"),
    "tensor subclass": lambda: with_subclass_weight(network()),
    "weight_norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)), nn.ELU()),
    "spectral_norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 3)), nn.ELU()),
    "orthogonal": lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(3, 3)), nn.ELU()),
    "pruned": lambda: nn.Sequential(prune.l1_unstructured(nn.Linear(3, 3), "weight", 0.5), nn.ELU()),
    "in place behind a view": lambda: nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(3, 3)),
    "in place behind nothing": lambda: nn.Sequential(nn.Sequential(), nn.Identity(), nn.ReLU(inplace=True)),
    "compiled, forward replaced": lambda: compiled_with_forward(network(), lambda x: 30 * x),
    "compiled, forward of another": lambda: compiled_with_forward(network(), compiled(network()).forward),
    "compiled activation, forward replaced": lambda: nn.Sequential(
        nn.Linear(3, 3), compiled_with_forward(nn.Tanh(), lambda x: 30 * x)
    ),
    "copy replaced": lambda: with_instance_method(network(), "__deepcopy__"),
    "reduction replaced": lambda: with_instance_method(network(), "__reduce_ex__"),
    "hook on a wrapper in a wrapper": lambda: AveragedModel(
        hooked(AveragedModel(network()), "register_forward_hook", None)
    ),
    "beta that broadcasts": with_broadcast_beta,
    "samples joined": lambda: nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (-1, 3)), nn.Linear(3, 3)),
}


def partly_compiled(g):
    return nn.Sequential(nn.Identity(), torch.compile(g, backend="eager"))


def scaled(g):
    for p in g.parameters():
        p.data.mul_(0.2)
    return g


class TestClosedWorld:
    @pytest.mark.parametrize("name", FOREIGN)
    def test_what_is_not_known_is_refused_and_no_certificate_passes(self, name):
        with pytest.raises(ValueError, match="A constant that you know can be asserted"):
            ResidualBlock(scaled(FOREIGN[name]()))
        block = ResidualBlock(scaled(FOREIGN[name]()), lipschitz=0.9)
        assert not certify(block).passed
        assert not block.bound().proven

    @pytest.mark.parametrize("name", FOREIGN)
    def test_what_becomes_foreign_later_works_and_nothing_is_proven_of_it(self, name):
        block, x = ResidualBlock(network()), normal(4, 3, dtype=torch.float32)
        block.g = scaled(FOREIGN[name]())
        z = block(x.clone()).detach()
        if "in place" not in name:  # torch itself refuses a gradient there
            block.forward_and_logdet(x.clone(), estimator=PowerSeries(2))
        certificate, found = certify(block), block.solve(z)
        assert not certificate.passed
        assert "no bound known" in str(certificate)
        assert certificate.blocks[0].remark
        assert not found.proven
        assert found.reason
        assert not found.converged.any()
        with pytest.raises(ConvergenceError, match="not proven: "):
            block.inverse(z)

    def test_training_goes_on_with_hooks(self):
        block = ResidualBlock(contractive_mlp(3, (8,)))
        block.g[0].register_forward_hook(lambda *_: None)
        z, logdet = block.forward_and_logdet(normal(4, 3, dtype=torch.float32), estimator=PowerSeries(4))
        (z.sum() + logdet.sum()).backward()
        assert all(p.grad is not None for p in block.parameters())

    def test_a_convolution_with_its_own_inner_method(self):
        layer = Padded(2, 2, 3, padding=1)
        with pytest.raises(NoBoundKnown, match="Padded is a Conv1d with its own _conv_forward, which may change"):
            ResidualBlock(layer, lipschitz=0.5) and trust.known_type(layer)
        with pytest.raises(ValueError, match="Padded is a Conv1d with its own _conv_forward"):
            ResidualBlock(nn.Sequential(layer))

    def test_a_constructor_of_its_own_is_harmless(self):
        assert certify(ResidualBlock(constrain_(Named(3), lipschitz=0.5))).passed

    def test_settings_are_read_as_they_are_now(self):
        """A padding that was changed after construction is what forward uses."""
        layer = nn.Conv1d(1, 1, 3, padding=0, bias=False)
        layer.weight.data.fill_(0.3)
        layer.padding = (1,)
        matrix = torch.stack([layer(row.view(1, 1, 5)).detach().flatten() for row in torch.eye(5)], 1)
        assert certify(ResidualBlock(layer), (1, 5)).lipschitz["block"] >= float(torch.linalg.matrix_norm(matrix, 2))

    def test_a_hook_of_all_modules(self):
        before = ResidualBlock(network())
        before.solve(normal(2, 3).float())
        handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
        try:
            block = ResidualBlock(network())  # which a profiler must not hinder
            assert "global forward hooks" in certify(block).blocks[0].remark
            assert not before.solve(normal(2, 3).float()).proven
            closed = Chain(ActNorm(3), AffineCoupling(nn.Linear(2, 2))).eval()
            assert not closed.solve(normal(2, 3).float()).proven
            found = Flow(closed, DiagonalNormal(3)).eval().log_prob_with_error(normal(2, 3).float())
            assert not found.proven
            assert found.bias_bound.isinf().all()
        finally:
            handle.remove()
        assert certify(block).passed

    @pytest.mark.parametrize("mode", [Tripled, Rounded])
    def test_a_mode_that_may_change_every_operation(self, mode):
        chain, z = Chain(ActNorm(3), ResidualBlock(network())).eval(), normal(2, 3)
        chain.solve(z)
        with mode(), torch.no_grad():
            assert f"the mode {mode.__name__} is active" in certify(chain).blocks[0].remark
            found, log_prob = chain.solve(z), Flow(chain, DiagonalNormal(3)).eval().log_prob_with_error(z.float())
        assert not found.proven
        assert not found.converged.any()
        assert not log_prob.proven
        assert log_prob.bias_bound.isinf().all()
        with torch.device("cpu"), FlopCounterMode(display=False):
            assert chain.solve(z).proven

    def test_a_backward_hook_changes_no_function(self):
        block = ResidualBlock(network())
        block.g[0].register_full_backward_hook(lambda *_: None)
        assert certify(block).passed
        block.forward_and_logdet(normal(2, 3).float(), estimator=PowerSeries(2))

    def test_a_second_parametrization_on_top(self):
        g = network()
        parametrize.register_parametrization(g[0], "weight", Times(30.0))
        block = ResidualBlock(network())
        block.g = g
        assert "parametrization of another library" in certify(block).blocks[0].remark

    def test_a_parametrized_activation(self):
        g = network()
        from iresnet import LipSwish

        g[1] = LipSwish()
        block = ResidualBlock(g)
        parametrize.register_parametrization(g[1], "raw_beta", Times(-30.0))
        assert not certify(block).passed

    @pytest.mark.parametrize(
        "wrap",
        [
            lambda g: torch.compile(g, backend="eager"),
            torch.compiler.disable,
            AveragedModel,
            partly_compiled,
        ],
        ids=["compile", "disable", "average", "compiled part"],
    )
    def test_wrappers_are_looked_through(self, wrap):
        expected = certify(ResidualBlock(network())).lipschitz
        block = ResidualBlock(wrap(network()))
        assert certify(block).passed
        assert certify(block).lipschitz == expected
        z = normal(4, 3, dtype=torch.float32)
        assert block.solve(z).proven

    def test_a_model_in_a_wrapper(self):
        flow = mlp_flow(2, blocks=2, hidden=(8,)).eval()
        assert certify(AveragedModel(flow)).passed
        assert certify(torch.compile(flow, backend="eager")).passed

    @pytest.mark.parametrize("wrap", [compiled, AveragedModel])
    def test_a_hook_on_a_wrapper_of_a_transform(self, wrap):
        chain = Chain(ResidualBlock(network()))
        model, outer = wrap(chain), Classifier(chain, nn.Linear(3, 2))
        outer.transform = model
        assert certify(model).passed
        model.register_forward_hook(lambda m, a, z: 0 * z)
        for found in (certify(model), certify(outer)):
            assert not found.passed
            assert found.stretch is None
            assert "has forward hooks" in found.summary()

    def test_a_wrapper_that_holds_another_module_than_it_calls(self):
        wrapper = torch.compile(network(), backend="eager")
        block = ResidualBlock(wrapper)
        assert certify(block).passed
        wrapper._orig_mod = network(constant=0.5)
        assert "forward replaced" in certify(block).blocks[0].remark

    def test_compiling_in_place_changes_nothing(self):
        block = ResidualBlock(network())
        block.g.compile(backend="eager")
        assert certify(block).passed

    @pytest.mark.parametrize("in_place", [True, False])
    def test_a_backend_of_a_users_own_may_compute_anything(self, in_place):
        """Nothing of it shows in the module that was compiled, and inverses were proven that were off by 5."""

        def tripled(graph, inputs):
            return lambda *x: tuple(3 * y for y in graph(*x))

        block = ResidualBlock(network()).eval()
        if in_place:
            block.g.compile(backend=tripled)
        else:
            block.g = torch.compile(block.g, backend=tripled)
        z = normal(4, 3, dtype=torch.float32)
        with torch.no_grad():
            assert (block(z) - z).norm() > 2 * (ResidualBlock(network()).eval()(z) - z).norm()
        found = block.solve(z)
        assert not found.proven
        assert torch.isinf(found.error_bound).all()
        assert not certify(block).passed
        assert "replaced" in certify(block).blocks[0].remark

    def test_a_backend_that_torch_is_told_to_use_for_everything(self):
        block = ResidualBlock(torch.compile(network(), backend="eager")).eval()
        assert certify(block).passed
        with torch.compiler.set_stance("default", force_backend=lambda graph, x: graph):
            assert not certify(block).passed

    def test_code_that_the_compiler_of_torch_is_told_to_run(self):
        block = ResidualBlock(torch.compile(network())).eval()
        assert block.bound().proven
        with torch._inductor.config.patch(post_grad_custom_post_pass=lambda graph: None):
            assert not block.bound().proven
        assert block.bound().proven

    def test_an_option_of_a_backend_that_is_code(self):
        def fuse(graph):
            return graph

        block = ResidualBlock(torch.compile(network(), options={"max_autotune": True})).eval()
        assert certify(block).passed
        block.g = torch.compile(network(), options={"post_grad_custom_post_pass": fuse})
        assert not certify(block).passed

    @pytest.mark.parametrize("name", ["forward", "_call_impl"])
    def test_a_wrapper_with_its_own_method(self, name):
        wrapper = AveragedModel(network())
        setattr(wrapper, name, lambda x: 30 * wrapper.module(x))
        block = ResidualBlock(network())
        block.g = wrapper
        assert "replaced" in certify(block).blocks[0].remark

    def test_a_sparse_weight(self):
        layer = nn.Linear(3, 3)
        layer.weight = nn.Parameter(0.1 * layer.weight.detach().to_sparse())
        block = ResidualBlock(network())
        block.g = nn.Sequential(layer)
        assert "tensor" in certify(block).blocks[0].remark

    @pytest.mark.parametrize("where", ["bias", "raw_beta", "angle"])
    def test_numbers_that_are_none(self, where):
        from iresnet import LipSwish
        from iresnet.lipschitz import Concatenated

        g = constrain_(nn.Sequential(Concatenated(nn.Linear(3, 2)), LipSwish(), nn.Linear(5, 3)), lipschitz=0.8).eval()
        block = ResidualBlock(g)
        {"bias": g[2].bias, "raw_beta": g[1].raw_beta, "angle": g[0].angle}[where].data.fill_(torch.nan)
        with pytest.raises(ValueError, match=f"{where} of .* holds NaN or infinity; no bound exists"):
            certify(block)

    def test_weights_that_torch_caches_are_not_proven(self):
        block, x = ResidualBlock(network()), normal(3, 3).float()
        block.solve(x)
        with parametrize.cached():
            assert "parametrize.cached() is active" in block.solve(x).reason
        assert block.solve(x).proven

    def test_a_potential_with_a_foreign_layer_still_computes(self):
        from iresnet.lipschitz import Potential

        g = Potential(nn.Conv1d(1, 2, 3, padding=1), nn.ELU())
        parametrize.register_parametrization(g.layer, "weight", Times(0.1))
        block = ResidualBlock(g, lipschitz=0.9)
        assert block(normal(2, 1, 5).float()).shape == (2, 1, 5)
        assert not certify(block).passed

    def test_a_weight_that_is_a_plain_tensor(self):
        layer = nn.Linear(3, 3, bias=False)
        weight = 0.2 * layer.weight.detach()
        del layer.weight
        layer.weight = weight
        found = ResidualBlock(layer, lipschitz=0.9).solve(normal(2, 3).float())
        assert not found.proven

    def test_a_g_that_closes_over_its_own_weights_is_solved_as_it_is(self):
        g = nn.Sequential(nn.Linear(3, 3))
        g[0].weight.data.mul_(0.3)
        layer = g[0]
        g.forward = lambda x: torch.tanh(nn.functional.linear(x, layer.weight))
        block, z = ResidualBlock(g, lipschitz=0.9), normal(4, 3).float()
        found = block.solve(z)
        with torch.no_grad():
            assert ((block(found.x) - z).norm(dim=1) < 1e-5).all()
        assert not found.proven


def test_power_iteration_leaves_an_invariant_part():
    """The largest of a diagonal's entries changes places: the norm must follow."""
    net = constrain_(nn.Sequential(nn.Linear(2, 2, bias=False)), 0.9)
    weight = net[0].parametrizations.weight.original
    for diagonal in ([5.0, 1.0], [1.0, 5.0]):
        weight.data.copy_(torch.diag(torch.tensor(diagonal)))
        net.train()
        for _ in range(20):
            net(normal(4, 2).float())
    assert float(torch.linalg.matrix_norm(net.eval()[0].weight.detach(), 2)) == pytest.approx(0.9, rel=1e-3)


# ---------------------------------------------------------------------------------------------- the whole model


class Hiding(Transform):
    """A user's transform that holds a block without listing it."""

    def __init__(self, block, scale=1.0):
        super().__init__()
        self.inside, self.scale = block, scale

    def forward(self, x, context=None):
        return self.inside(x)

    def forward_and_logdet(self, x, context=None, *, estimator=None, generator=None):
        z, logdet = self.inside.forward_and_logdet(x, estimator=estimator, generator=generator)
        return z, 0 * logdet

    def inverse(self, z, context=None, *, tolerance=None, solver=None):
        return z / 2

    def stretch(self, input_shape=None):
        return Stretch(1.0, 1.0, (0.0, 0.0))


class Moved(ResidualBlock):
    def forward(self, x, context=None):
        return 3 * super().forward(x, context)


class TestModels:
    def test_a_block_that_no_part_accounts_for_is_listed_and_fails(self):
        large = linear(torch.eye(3) * 20, lipschitz=0.5).float()
        chain = Chain(ResidualBlock(network()), Hiding(large))
        certificate = certify(chain)
        assert not certificate.passed
        assert "transforms.1.inside" in certificate.lipschitz
        assert "does not list it in parts()" in str(certificate)
        assert any("Hiding" in reason for reason in certificate.unknown)

    def test_a_users_transform_is_shown_as_not_known(self):
        class Mine(ActNorm):
            def forward(self, x, context=None):
                return 2 * super().forward(x, context)

        certificate = certify(Chain(ResidualBlock(network()), Mine(3)))
        assert not certificate.passed
        assert certificate.stretch is None
        assert "Invertible: not proven. 1 of 1 blocks proven contractive" in certificate.summary()
        assert "unknown: Mine is a ActNorm with its own forward" in certificate.summary()

    @pytest.mark.parametrize("kind", ["block hook", "chain hook", "subclass", "forward replaced"])
    def test_what_surrounds_g_counts(self, kind):
        block = ResidualBlock(network())
        if kind == "subclass":
            block = Moved(network())
        if kind == "forward replaced":
            block.forward = lambda x, context=None: 3 * x
        chain = Chain(block)
        if "hook" in kind:
            (block if kind == "block hook" else chain).register_forward_hook(lambda m, a, y: 3 * y)
        assert not certify(chain).passed
        found = chain.solve(normal(4, 3, dtype=torch.float32))
        assert not found.proven
        assert found.reason
        with pytest.raises((ConvergenceError, NoBoundKnown)):
            chain.inverse(normal(4, 3, dtype=torch.float32))

    def test_a_solve_says_what_rests_on_a_users_word(self):
        found = Chain(ResidualBlock(network()), Hiding(ResidualBlock(network()))).solve(normal(2, 3).float())
        assert not found.proven
        closed = Hiding(ResidualBlock(network())).solve(normal(2, 3).float())
        assert not closed.proven

    def test_a_likelihood_says_whether_it_is_proven(self):
        def flow(transform):
            return Flow(transform, DiagonalNormal(3)).eval()

        x = normal(4, 3, dtype=torch.float32)
        proven = flow(Chain(ResidualBlock(network()), ActNorm(3))).log_prob_with_error(x)
        assert proven.proven
        assert float(proven.bias_bound.max()) == 0
        assert proven.bits_per_dim().proven
        asserted = flow(ResidualBlock(Doubled(3, 3), lipschitz=0.9)).log_prob_with_error(x)
        assert not asserted.proven
        hidden = flow(Chain(Hiding(ResidualBlock(network())))).log_prob_with_error(x)
        assert not hidden.proven
        assert torch.isinf(hidden.bias_bound).all()

    def test_a_likelihood_by_an_ode_solver_has_no_bound(self):
        pytest.importorskip("zuko")
        from iresnet.transforms import ffjord

        flow = Flow(Chain(*ffjord(2, 1, (8,))), DiagonalNormal(2)).eval()
        found = flow.log_prob_with_error(normal(3, 2, dtype=torch.float32))
        assert not found.proven
        assert torch.isinf(found.bias_bound).all()

    def test_a_head_of_a_users_own_has_no_margin(self):
        class Scaled(nn.Linear):
            def forward(self, z):
                return super().forward(100 * z)

        with pytest.raises(NoBoundKnown, match="A margin needs a linear head; this one has Scaled"):
            class_vectors(Scaled(3, 2))
        head = nn.Linear(3, 2)
        head.register_forward_hook(lambda m, a, y: -y)
        with pytest.raises(NoBoundKnown, match="has forward hooks"):
            class_vectors(head)

    def test_a_head_whose_compiled_call_is_another_function(self):
        """Which a copy of the head has lost."""
        from iresnet.data import Dataset, Schema
        from iresnet.evaluate import certified_radius

        head = nn.Linear(3, 2)
        head._compiled_call_impl = lambda z: torch.sin(20 * head.forward(z))
        model = Classifier(ResidualBlock(network()), head).eval()
        data = Dataset(normal(2, 3).float(), torch.tensor([0, 1]), Schema((3,), classes=("a", "b")))
        with pytest.raises(NoBoundKnown, match="had its _compiled_call_impl replaced"):
            certified_radius(model, data)

    def test_a_subclassed_activation_is_not_taken_for_its_parent(self):
        """Also where the constant is asserted: value, determinant and samples are those of the live g."""
        g = nn.Sequential(nn.Linear(3, 3), Steep(), nn.Linear(3, 3)).double()
        for p in g.parameters():
            p.data.mul_(0.2)
        block, x = ResidualBlock(g, lipschitz=0.9).eval(), normal(4, 3)
        z, logdet = block.forward_and_logdet(x, estimator=Exact())
        jacobian = torch.stack([torch.autograd.functional.jacobian(lambda t: block(t[None])[0], row) for row in x])
        torch.testing.assert_close(z, block(x))
        torch.testing.assert_close(logdet, torch.linalg.slogdet(jacobian)[1])
        torch.testing.assert_close(block.inverse(z), x)


# ---------------------------------------------------------------------------------------------- what stays the same


def negate(block):
    block.g.weight.data.neg_()


def swap(block):
    w = block.g.weight.data
    w.copy_(w.flip(0).flip(1))


def replace_forward(block):
    block.g.forward = lambda x: 0.5 * x


MUTATIONS = {"negated": negate, "permuted": swap, "forward": replace_forward}


def _averaged(mix):
    """Torch's average of integers truncates them: 7 * 0.9 + 7 * 0.1 may be a little less than 7."""
    average = AveragedModel(mix, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for _ in range(20):
        average.update_parameters(mix)
    mix.permutation.copy_(average.module.permutation)


def _mixing():
    mix = InvertibleConv1x1(8)
    mix.permutation.copy_(torch.tensor([2, 4, 7, 3, 6, 5, 0, 1]))
    return mix


def _flatten(spline):
    """The bound of the least slope is a product that is rounded to zero."""
    spline.slopes.copy_(torch.tensor([5e-324, 1e3, 1.0, 1.0, 1.0], dtype=torch.float64))


def _columns():
    return ColumnTransform([0.0, 0.0], [1.0, None], [0.1, 0.1])


#: Values that a constructor refuses or never makes, by what the reason must name: (transform, size, change).
INVALID = {
    "permutation of InvertibleConv1x1 must be a permutation": (_mixing, 8, _averaged),
    "permutation of InvertibleConv1x1": (_mixing, 8, lambda t: t.permutation.zero_()),
    "sign of InvertibleConv1x1 must be 1 or -1": (_mixing, 8, lambda t: t.sign.mul_(0.5)),
    "sign of PrincipalAxes": (lambda: PrincipalAxes(3), 3, lambda t: t.sign.zero_()),
    "slopes of ColumnSpline must be positive": (lambda: ColumnSpline(2, 4), 2, lambda t: t.slopes.neg_()),
    "slopes of ColumnSpline": (lambda: ColumnSpline(2, 4), 2, lambda t: t.slopes[0, 2].fill_(math.nan)),
    "codes of ColumnSpline must increase": (lambda: ColumnSpline(2, 4), 2, lambda t: t.codes.neg_()),
    "knots of ColumnSpline must increase": (lambda: ColumnSpline(2, 4), 2, lambda t: t.knots[1].zero_()),
    "a slope too close to zero": (lambda: ColumnSpline(2, 4).double(), 2, _flatten),
    "reach of ColumnTransform must be at least": (_columns, 2, lambda t: t.reach.fill_(0.1)),
    "reach of ColumnTransform must be positive": (_columns, 2, lambda t: t.reach[1].neg_()),
    "std of ColumnTransform must be positive": (_columns, 2, lambda t: t.std.neg_()),
    "std of Standardise must be positive": (lambda: Standardise([0.0], [1.0]), 1, lambda t: t.std.neg_()),
    "std of Standardise must": (lambda: Standardise([0.0], [1.0]), 1, lambda t: t.std.fill_(math.inf)),
    "Logit must have": (lambda: Logit(1), 2, lambda t: setattr(t, "alpha", 0.7)),
    "Logit must have 0 < levels": (lambda: Logit(1), 2, lambda t: setattr(t, "levels", -1.0)),
}  # fmt: skip


class Random(nn.Linear):
    def forward(self, x):
        return torch.nn.functional.dropout(super().forward(x))


class Off(ResidualBlock):
    def forward_and_logdet(self, *inputs, **options):
        z, logdet = super().forward_and_logdet(*inputs, **options)
        return z, logdet + 100


class TestValues:
    """A class is known by its name, but not what its buffers hold after an average or a careless assignment."""

    @pytest.mark.parametrize("reason", INVALID)
    def test_nothing_is_proven_with_invalid_values(self, reason):
        make, d, change = INVALID[reason]
        torch.manual_seed(0)
        t, z = make(), normal(3, d, dtype=torch.float32)
        flow = Flow(Chain(t, ResidualBlock(contractive_mlp(d, (4,)))), DiagonalNormal(d)).eval()
        assert certify(flow).passed
        assert flow.proof_status((d,)) == (True, True)
        assert t.solve(z).proven
        assert stretch_of(t, (d,)).proven
        with torch.no_grad():
            change(t)
        certificate = certify(flow)
        assert not certificate.passed
        assert [reason in found for found in certificate.unknown] == [True]
        assert flow.proof_status((d,)) == (False, False)
        for found in (t.solve(z), flow.transform.solve(z), Inverter(flow.transform, (3, d)).solve(z)):
            assert not found.proven
            assert reason in found.reason
            assert torch.isinf(found.error_bound).all()
            assert not found.converged.any()
        assert stretch_of(t, (d,)) == UNKNOWN
        assert not stretch_of(flow.transform, (d,)).proven

    def test_a_likelihood_with_a_wrong_determinant_is_not_proven(self):
        flow = Flow(_mixing(), DiagonalNormal(8)).eval()
        assert flow.log_prob_with_error(normal(2, 8).float()).proven
        _averaged(flow.transform)
        found = flow.log_prob_with_error(normal(2, 8).float())
        assert not found.proven
        assert torch.isinf(found.bias_bound).all()

    def test_a_likelihood_that_changes_at_every_call_is_not_proven(self):
        """Trap: the conditioner of a coupling and the embedding of a context have no bound that looks at them."""
        coupling, g = AffineCoupling(nn.Linear(1, 2)), contractive_mlp(2, (4,), context=1)
        flow, x, c = (
            Flow(Chain(coupling, ResidualBlock(g)), DiagonalNormal(2)).eval(),
            torch.ones(3, 2),
            torch.ones(3, 1),
        )
        assert flow.log_prob_with_error(x, c).proven
        for owner, name, outputs in ((coupling, "conditioner", 2), (g, "embed", 4)):
            before = getattr(owner, name)
            setattr(owner, name, Random(1, outputs).eval())
            assert not torch.equal(flow.log_prob(x, c), flow.log_prob(x, c))
            found = flow.log_prob_with_error(x, c)
            assert not found.proven
            assert torch.isinf(found.bias_bound).all()
            assert certify(flow).passed == (owner is g)  # a block is a contraction for every embedding
            setattr(owner, name, before)
        assert flow.log_prob_with_error(x, c).proven

    def test_the_determinant_of_a_users_block_has_no_bound(self):
        hooked = ResidualBlock(contractive_mlp(2, (4,)))
        hooked.g.register_forward_hook(lambda m, x, y: y + torch.rand_like(y))
        for block in (Off(contractive_mlp(2, (4,))), hooked):
            found = Flow(Chain(block), DiagonalNormal(2)).eval().log_prob_with_error(torch.ones(3, 2))
            assert not found.proven
            assert torch.isinf(found.bias_bound).all()

    def test_a_compiled_transform_is_seen_through(self):
        flow = Flow(Chain(ResidualBlock(contractive_mlp(2, (4,)))), DiagonalNormal(2)).eval()
        flow.transform = torch.compile(flow.transform, backend="eager")
        assert flow.proof_status((2,)) == (True, True)
        flow.transform.register_forward_hook(lambda m, x, y: 2 * y)
        assert flow.proof_status((2,)) == (False, False)

    def test_an_empty_interval_is_not_known(self):
        columns = _columns()
        columns.upper.fill_(-1.0)
        assert "reach of ColumnTransform must be at least upper - lower" in why_unproven(columns)

    def test_the_scale_of_given_columns_counts(self):
        inner = Chain(ResidualBlock(contractive_mlp(1, (4,), context=1)))
        given, c = Given(inner, Standardise([0.0], [1.0]), targets=[1]), torch.zeros(3, 1)
        assert given.solve(torch.zeros(3, 1), c).proven
        given.scale.register_forward_hook(lambda m, a, y: torch.randn_like(y))
        found = given.solve(torch.zeros(3, 1), c)
        assert not found.proven
        assert "Standardise has forward hooks" in found.reason
        assert not certify(given).passed


class TestInputs:
    """The operations of a tensor subclass may compute anything; proofs are about its numbers."""

    @pytest.mark.parametrize("kind", [ResidualBlock, lambda g: Chain(ActNorm(3), ResidualBlock(g))])
    @pytest.mark.parametrize("solve", [lambda t, z: t.solve(z), lambda t, z: Inverter(t, (4, 3)).solve(z)])
    def test_codes_of_a_subclass_are_solved_as_plain_numbers(self, kind, solve):
        transform, z = kind(network(constant=0.95)).eval(), normal(4, 3)
        found = solve(transform, z.as_subclass(Coarse))
        assert found.proven
        assert type(found.x) is torch.Tensor
        residual = (transform.reference(found.x) - z).norm(dim=1)
        assert bool((residual <= 2 * found.error_bound).all())

    def test_an_embedding_of_a_subclass_is_a_plain_number(self):
        class Embedding(nn.Linear):
            def forward(self, c):
                return super().forward(c).as_subclass(Coarse)

        block = ResidualBlock(contractive_mlp(3, (8,), context=2)).eval()
        block.g.embed = Embedding(2, 8)
        z, c = normal(4, 3), normal(4, 2, seed=1).float()
        found = block.solve(z, c)
        assert found.proven
        block.g.embed = block.g.embed.to(torch.float32)
        assert bool(((block.reference(found.x, c) - z).norm(dim=1) <= 2 * found.error_bound).all())

    def test_a_subclass_without_numbers_of_its_own_is_refused(self):
        from torch.masked import masked_tensor

        with pytest.warns(UserWarning, match="prototype"):
            z = masked_tensor(normal(2, 3), torch.tensor([[True, False, True]] * 2))
        with pytest.raises(ValueError, match="proofs are about plain tensors; got a MaskedTensor"):
            ResidualBlock(network()).solve(z)

    def test_a_likelihood_is_that_of_plain_numbers(self):
        flow, x = mlp_flow(80, blocks=1, hidden=(8,)).eval(), normal(3, 80).float()
        found = flow.log_prob_with_error(x.as_subclass(Coarse))
        assert type(found.value) is torch.Tensor
        assert torch.equal(found.value, flow.log_prob_with_error(x).value)


class TestFreshness:
    @pytest.mark.parametrize("note", [torch.ones(2), np.ones(2), {"a": torch.ones(2)}, torch.ones(0), threading.Lock()])
    def test_g_may_hold_anything(self, note):
        block, z = rouse_(ResidualBlock(contractive_mlp(3, (4,)))).eval(), normal(2, 3).float()
        block.g.note = note
        first, second = block.solve(z), block.solve(z)
        assert torch.equal(first.x, second.x)
        assert first.converged.all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    @pytest.mark.parametrize("how", ["lock", "computed weights", "computed buffer"])
    def test_what_cannot_be_copied_is_evaluated_in_float64_too(self, how, dtype):
        """A bias of 1000 has a rounding error of 3e-5 in float32."""
        block, z = linear(0.3 * torch.eye(2)), normal(3, 2).to(dtype)
        block.g = nn.Sequential(nn.Linear(2, 2))
        block.g[0].weight.data.copy_(0.3 * torch.eye(2))
        block.g[0].bias.data.fill_(1000.1)
        block = block.float().eval()
        weight, bias = (t.detach().double() for t in block.g[0].parameters())
        if how == "lock":
            block.g.lock = threading.Lock()
            found = block.solve(z, tolerance=1e-9 if dtype == torch.float64 else None)
        elif how == "computed weights":
            solver = Solving(block)
            weights = {name: 1.0 * p for name, p in solver.named_parameters()}
            found = torch.func.functional_call(solver, weights, (z,))
        else:
            computed = 1.0 * block.g[0].bias
            del block.g[0].bias
            block.g[0].register_buffer("bias", computed)
            found = block.solve(z)
        assert found.proven
        expected = torch.linalg.solve(torch.eye(2, dtype=torch.float64) + weight, (z.double() - bias).T).T
        assert bool(((found.x.double() - expected).norm(dim=1) <= found.error_bound).all())

    def test_a_g_that_shares_its_weights_with_its_copy_is_left_alone(self):
        block = ResidualBlock(nn.Sequential(Shared(2, 2)), lipschitz=0.9).eval()
        block.solve(normal(3, 2).float())
        assert block.g[0].weight.dtype == torch.float32

    @pytest.mark.parametrize("shared", ["first", "part of the rest", "rest's layer in embed"])
    def test_an_embedding_by_a_layer_of_g(self, shared):
        torch.manual_seed(0)
        layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
        parts = {
            "first": (layer, layer, nn.Sequential(nn.Tanh(), other)),
            "part of the rest": (layer, other, nn.Sequential(nn.Tanh(), other)),
            "rest's layer in embed": (layer, nn.Sequential(nn.Tanh(), other), nn.Sequential(nn.Tanh(), other)),
        }[shared]
        for m in (layer, other):
            m.weight.data.mul_(0.8 / torch.linalg.matrix_norm(m.weight.data, 2))
        block, x, c = ResidualBlock(Conditioned(*parts)).eval(), normal(5, 2).float(), normal(5, 2, seed=1).float()
        found = block.solve(block(x, c).detach(), c)
        assert found.proven
        assert bool(((found.x - x).norm(dim=1) <= found.error_bound + 1e-6).all())

    def test_numbers_that_are_flushed_to_zero_prove_nothing(self):
        """Trap: in this mode the first weight is zero, and so is its norm; without it, Lip(g) is 0.09."""
        g = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        with torch.no_grad():
            g[0].weight.copy_(torch.eye(2) * 3e-40)
            g[1].weight.copy_(-torch.eye(2) * 3e38)
        block = ResidualBlock(g).eval()
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor does not flush denormal numbers")
        try:
            bound = block.bound((2,))
            with pytest.raises(NoBoundKnown, match="set_flush_denormal"):
                norm_bound(g[0])
        finally:
            torch.set_flush_denormal(False)
        assert not bound.proven
        assert "set_flush_denormal" in bound.reason
        assert block.bound((2,)).value == pytest.approx(0.09, rel=1e-3)

    def test_threads_that_go_on_flushing_prove_nothing(self):
        """Trap: torch's threads keep what was set when they started; half of these weights were then zero."""
        found, weight = [], torch.zeros(512, 512).fill_diagonal_(3e-40)
        g = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
        with torch.no_grad():
            weight[:256] = 0
            g[0].weight.copy_(weight)
            g[1].weight.copy_(-torch.eye(512) * 3e38)
        block = ResidualBlock(g).eval()

        def prove():  # in a thread of its own, with which the threads that torch starts for it end
            torch.set_num_threads(2)
            if torch.set_flush_denormal(True):
                torch.ones(1 << 20).add_(1)
                torch.set_flush_denormal(False)
                found.append(block.bound((512,)))

        threads, thread = torch.get_num_threads(), threading.Thread(target=prove)
        thread.start()
        thread.join()
        torch.set_num_threads(threads)
        assert block.bound((512,)).value == pytest.approx(0.09, rel=1e-3)
        if not found:
            pytest.skip("this processor does not flush denormal numbers")
        assert not found[0].proven or found[0].value > 0.09 * (1 - 1e-6)  # where torch keeps no threads

    @pytest.mark.parametrize("name", MUTATIONS)
    def test_a_proof_is_one_of_the_weights_as_they_are(self, name):
        block, z = linear(torch.diag(torch.tensor([0.5, -0.25]))), normal(3, 2)
        block.solve(z)
        MUTATIONS[name](block)
        found = block.solve(z)
        if name == "forward":
            assert not found.proven
            return
        with torch.no_grad():
            error = (block(found.x) - z).norm(dim=1)
        assert (error <= 1e-9).all()

    def test_an_embedding_is_evaluated_anew_at_every_solve(self):
        """A buffer of -inf, which hid every change from a sum."""

        class Masked(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(2, 8)
                self.register_buffer("mask", torch.full((4,), -torch.inf))

            def forward(self, c):
                return self.layer(c)

        torch.manual_seed(0)
        g = constrain_(Conditioned(nn.Linear(3, 8), Masked(), nn.Sequential(nn.ELU(), nn.Linear(8, 3))), lipschitz=0.8)
        block, z, c = ResidualBlock(g).eval(), normal(5, 3).float(), normal(5, 2).float()
        block.solve(z, c)
        with torch.no_grad():
            g.embed.layer.weight.neg_()
        bound, residual = block.solve(z, c), None
        with torch.no_grad():
            residual = (block(bound.x, c) - z).norm(dim=1)
        assert bound.proven
        assert (residual < 1e-5).all()

    def test_a_batchnorm_in_an_embedding_is_one_function_for_a_solve(self):
        torch.manual_seed(0)
        embed = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8)).train()
        g = Conditioned(nn.Linear(3, 8), embed, nn.Sequential(nn.ELU(), nn.Linear(8, 3)))
        block, z, c = ResidualBlock(constrain_(g, lipschitz=0.8)), normal(6, 3).float(), normal(6, 2).float()
        block(z, c)
        found = block.solve(z, c)
        with torch.no_grad():
            residual = (block(found.x, c) - z).norm(dim=1)
        assert (residual < 1e-5).all()

    def test_an_embedding_of_integers(self):
        torch.manual_seed(0)
        g = Conditioned(nn.Linear(3, 8), nn.Embedding(4, 8), nn.Sequential(nn.ELU(), nn.Linear(8, 3)))
        block, z, c = ResidualBlock(constrain_(g, lipschitz=0.8)).eval(), normal(4, 3).float(), torch.arange(4)
        found = block.solve(z, c)
        assert found.proven
        assert found.converged.all()
        torch.testing.assert_close(block(block.inverse(z, c), c), z, atol=1e-5, rtol=1e-5)

    def test_a_seal_sees_every_change(self):
        g = network()
        before = fingerprint.Fingerprint(g)
        assert before.matches(g)
        assert before.matches(copy.deepcopy(g))
        for change in (
            lambda m: m[0].parametrizations.weight[0].__setattr__("coefficient", 0.3),
            lambda m: m[0].parametrizations.weight[0].gradient.mul_(-1),
            lambda m: m[1].__setattr__("alpha", 0.5),
            lambda m: m[2].bias.data.copy_(torch.nextafter(m[2].bias.data, m[2].bias.data + 1)),
            lambda m: m[2].bias.data.neg_(),
            lambda m: m.append(nn.Tanh()),
            lambda m: m.double(),
            lambda m: m[0].register_forward_hook(lambda *_: None),
            lambda m: m[0].__setattr__("forward", lambda x: -x),
            lambda m: setattr(type(m[0]), "forward", lambda self, x: -x),
            lambda m: m[2].bias.__setattr__("__class__", type("Mine", (nn.Parameter,), {})),
            lambda m: m[0].parametrizations.weight.append(nn.Identity()),
            lambda m: m._modules.__setitem__("1", nn.Tanh()),
        ):
            seen, unseen = copy.deepcopy(g), copy.deepcopy(g)
            assert before.matches(seen)
            assert before.matches(seen)
            for other in (seen, unseen):
                change(other)
                assert not before.matches(other)

    def test_a_seal_follows_a_tensor_that_takes_the_place_of_an_equal_one(self):
        layer = nn.Linear(1, 1)
        before = fingerprint.Fingerprint(layer)
        assert before.matches(layer)
        layer.weight = nn.Parameter(layer.weight.detach().clone())
        assert before.matches(layer)
        with torch.no_grad():
            layer.weight.neg_()
        assert not before.matches(layer)

    def test_a_seal_sees_a_change_that_came_while_it_compared(self, monkeypatch):
        layer = nn.ELU()
        before, describe = fingerprint.Fingerprint(layer), fingerprint.describe_function

        def change_afterwards(module):
            found = describe(module)
            module.alpha = 0.5
            return found

        with monkeypatch.context() as patched:
            patched.setattr(fingerprint, "describe_function", change_afterwards)
            assert before.matches(layer)
        assert not before.matches(layer)

    @pytest.mark.parametrize("what", ["setting", "tensor"])
    def test_a_seal_sees_a_change_that_was_undone_while_it_compared(self, monkeypatch, what):
        """Another thread may call `functional_call` meanwhile, whose tensors take the place of parameters."""
        g, describe = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ELU()), fingerprint.describe_function
        before, weight, twin = fingerprint.Fingerprint(g), g[0].weight, nn.Parameter(g[0].weight.detach().clone())

        def describe_between(module):
            if what == "setting":
                g[1].alpha = 1.0
                return describe(module)
            g[0].weight = twin
            found = describe(module)
            g[0].weight = weight
            return found

        if what == "setting":
            g[1].alpha = 0.5
        with monkeypatch.context() as patched:
            patched.setattr(fingerprint, "describe_function", describe_between)
            assert before.matches(g)
        if what == "setting":
            g[1].alpha = 0.5
        else:
            weight.data.neg_()
        assert not before.matches(g)

    def test_a_pass_in_another_thread_does_not_disturb_a_comparison(self, monkeypatch):
        g, is_constant = network(), fingerprint._is_constant
        before, frozen = fingerprint.Fingerprint(g), g[0].parametrizations.weight[0]._frozen
        frozen[0] = None

        def freeze_meanwhile(value):
            frozen[len(frozen)] = None
            return is_constant(value)

        monkeypatch.setattr(fingerprint, "_is_constant", freeze_meanwhile)
        assert before.matches(g)

    def test_a_seal_sees_changes_inside_settings(self):
        layer = nn.Unflatten(1, [2, 3])
        before = fingerprint.Fingerprint(layer)
        assert before.matches(layer)
        layer.unflattened_size[0] = 3
        assert not before.matches(layer)

    def test_a_seal_sees_another_order_of_the_same_layers(self):
        g = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())
        with torch.no_grad():
            g[0].weight.copy_(-0.9 * torch.eye(2))
        block, x = ResidualBlock(g).eval(), torch.ones(3, 2)
        for _ in range(2):
            torch.testing.assert_close(block.inverse(block(x)), x)
        first = g[0]
        del g._modules["0"]
        g.add_module("0", first)
        torch.testing.assert_close(block(x), 0.1 * x)
        torch.testing.assert_close(block.inverse(block(x)), x)

    def test_a_seal_leaves_a_users_embedding_out(self):
        class Embedding(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(3, 4)

            def forward(self, context):
                return self.layer(context).relu()

        g = Conditioned(nn.Linear(2, 4), Embedding(), nn.Linear(4, 2))
        before = fingerprint.Fingerprint(g)
        assert all(before.matches(g) for _ in range(3))
        with torch.no_grad():
            g.embed.layer.weight.neg_()
        assert before.matches(g)
        g.rest.register_forward_hook(lambda *_: None)
        assert not before.matches(g)

    def test_a_seal_keeps_a_copy_of_a_single_tensor(self):
        layer = nn.Linear(2, 2, bias=False)
        layer.weight = nn.Parameter(torch._neg_view(layer.weight.detach()))
        before = fingerprint.Fingerprint(layer)
        assert before.matches(layer)
        with torch.no_grad():
            layer.weight.add_(1)
        assert not before.matches(layer)

    def test_nothing_is_kept_of_a_users_g(self):
        block = ResidualBlock(Doubled(2, 2).double(), lipschitz=0.9)
        scaled(block.g)
        z = normal(3, 2)
        block.solve(z)
        assert block._cached is None

    def test_a_copy_of_a_block_keeps_nothing(self):
        block = ResidualBlock(network())
        block.solve(normal(2, 3).float())
        assert block._cached is not None
        assert copy.deepcopy(block)._cached is None


# ---------------------------------------------------------------------------------------------- state


class TestThreads:
    def test_four_threads_that_train_and_sample_leave_every_constraint(self):
        torch.manual_seed(0)
        shared = mlp_flow(2, blocks=2, hidden=(8,)).eval()
        models = [mlp_flow(2, blocks=2, hidden=(8,)) for _ in range(2)]
        failures: list[BaseException] = []

        def sample():
            try:
                for _ in range(6):
                    shared.sample((16,))
            except BaseException as error:
                failures.append(error)

        def train(model):
            try:
                step = torch.optim.SGD(model.parameters(), lr=0.5)
                for i in range(6):
                    step.zero_grad()
                    (-model(normal(32, 2, seed=i).float())).mean().backward()
                    step.step()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=sample) for _ in range(2)]
        threads += [threading.Thread(target=train, args=(m,)) for m in models]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not failures
        late = rouse(LipschitzLinear(4, 4, coefficient=0.9))
        late(normal(3, 4).float())  # a training pass of the main thread refreshes
        assert float(torch.linalg.matrix_norm(late.weight.detach(), 2)) < 1.2  # 9 and more without
        for model in models:
            model(normal(4, 2).float())
            assert certify(model.eval()).lipschitz

    def test_a_shared_model_may_be_trained_by_several_threads(self):
        torch.manual_seed(0)
        model, failures = mlp_flow(2, blocks=2, hidden=(8,)), []
        model(normal(32, 2).float())

        def passes():
            try:
                for i in range(5):
                    (-model(normal(16, 2, seed=i).float())).mean().backward()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=passes) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not failures
        assert not any(m._frozen for m in model.modules() if hasattr(m, "_frozen"))

    def test_a_solve_in_another_thread_does_not_stop_a_refresh(self):
        layer = rouse(LipschitzLinear(4, 4, coefficient=0.9, norm=PowerIteration()))
        block = ResidualBlock(network())
        begun, done = threading.Event(), threading.Event()

        def hold():
            from iresnet.lipschitz import freeze_norms

            with freeze_norms(layer), freeze_norms(block):
                begun.set()
                done.wait(5)

        other = threading.Thread(target=hold)
        other.start()
        begun.wait(5)
        before = layer.parametrizations.weight[0].direction.clone()
        layer(normal(3, 4).float())
        done.set()
        other.join()
        assert not torch.equal(before, layer.parametrizations.weight[0].direction)

    def test_a_solve_enters_no_cache_of_torch(self, monkeypatch):
        monkeypatch.setattr(parametrize, "cached", lambda: pytest.fail("cached"))
        ResidualBlock(network()).solve(normal(2, 3).float())


def rouse(layer):
    """A layer whose weight is far above its coefficient, before its norm is known."""
    layer.train()
    with torch.no_grad():
        layer.parametrizations.weight.original.copy_(5 * normal(4, 4, seed=3).float())
        refresh_(layer)
    return layer


def test_a_classifier_with_a_hook_has_no_radius():
    from iresnet.data import Dataset, Schema
    from iresnet.evaluate.radius import lipschitz_bound

    model = Classifier(ResidualBlock(network()), nn.Linear(3, 2)).eval()
    data = Dataset(normal(2, 3).float(), torch.tensor([0, 1]), Schema((3,), classes=("a", "b")))
    assert lipschitz_bound(model, data) > 1
    model.register_forward_hook(lambda m, a, y: -y)
    with pytest.raises(NoBoundKnown, match="has forward hooks"):
        lipschitz_bound(model, data)


@pytest.mark.gpu
class TestOnAGPU:
    def test_samples_are_those_of_the_weights_as_they_are(self):
        """What a decoder prepared for other weights is not used again."""
        flow = mlp_flow(2, blocks=2, hidden=(8,)).cuda().eval()
        flow.sample((64,))
        prepared = flow.decoder.inverter
        assert prepared is not None
        flow.sample((64,))
        assert flow.decoder.inverter is prepared
        with torch.no_grad():
            for p in flow.transform.parameters():
                p.neg_()
        refresh_(flow, settle=True)
        z = flow.base.rsample(64)
        with torch.no_grad():
            x = flow.decoder(flow.transform, z)
            assert flow.decoder.inverter is not prepared
            assert (flow.transform(x) - z).norm(dim=1).max() < 1e-4

    def test_a_recomputation_in_backward_leaves_the_norms(self):
        block = ResidualBlock(contractive_mlp(3, (8,))).cuda().train()
        x = normal(4, 3, dtype=torch.float32).cuda()
        refresh_(block, settle=True)
        expected = torch.autograd.grad(block(x).square().sum(), list(block.parameters()))
        y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        state = copy.deepcopy(block.state_dict())
        got = torch.autograd.grad(y.square().sum(), list(block.parameters()))  # in a thread of its own
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
        assert all(torch.equal(value, state[name]) for name, value in block.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_numbers_that_are_not_real_have_no_bound(name, dtype):
    """The norm of a complex weight is not that of its real part: .1 + 5i was certified as .1."""
    layer = nn.Linear(2, 2)
    block = ResidualBlock(nn.Sequential(layer)).eval()
    with torch.no_grad():
        layer.weight.copy_(0.1 * torch.eye(2))
    assert certify(block, input_shape=(2,)).passed
    number = (layer.weight if name == "weight" else layer.bias).detach()
    setattr(layer, name, nn.Parameter((number + 5j if dtype.is_complex else number).to(dtype), requires_grad=False))
    certificate = certify(block, input_shape=(2,))
    assert not certificate.passed
    assert f"has a {name} of {dtype}; bounds are for real numbers" in str(certificate)


def test_a_buffer_of_complex_numbers_is_not_known():
    norm = ActNorm(2)
    norm.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    assert "has a phase of torch.complex64" in trust.why_untrusted(norm)


@pytest.mark.parametrize("name", ["shift", "log_scale"])
def test_what_a_tensor_in_place_of_a_parameter_holds(name):
    """A NaN in it was not seen, and the certificate passed."""
    norm = ActNorm(2)
    delattr(norm, name)
    setattr(norm, name, torch.tensor([0.0, math.nan]))
    certificate = certify(Chain(norm, ResidualBlock(contractive_mlp(2, hidden=(4,)))))
    assert not certificate.passed
    assert "ActNorm holds NaN or infinity" in certificate.summary()

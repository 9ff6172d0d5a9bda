"""Layers that keep their input: what they compute, and what is proven of them; laws are in test_laws.py."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from iresnet import Exact, LipSwish, ResidualBlock, certify, constrain_
from iresnet.branch import (
    linearise,
    lipschitz_bound,
    requested_bound,
    requested_constant,
    run_program,
    tighten_layers_,
    try_parse,
)
from iresnet.data import Schema
from iresnet.lipschitz import Concatenated, cap_of
from iresnet.models import Network, build
from iresnet.models.branches import dense
from iresnet.presets import find
from iresnet.presets.coefficient import with_coefficient
from tests.zoo import DOUBLE, contraction, dense_jacobian, normal, rouse_

DIGITS = Schema((1, 8, 8), levels=17)
NETWORK = Network(blocks=(1, 1), branch="dense", width=3, kernels=(3, 3, 1))


def linear(matrix):
    layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, dtype=DOUBLE)
    with torch.no_grad():
        layer.weight.copy_(matrix)
    return layer.requires_grad_(False)


def at(angle, f):
    dense = Concatenated(f).double()
    with torch.no_grad():
        dense.angle.fill_(angle)
    return dense.requires_grad_(False)


class TestConcatenated:
    def test_what_it_computes(self):
        f, x = linear(contraction(3, 0.7)), normal(5, 3)
        expected = torch.cat([math.cos(0.3) * x, math.sin(0.3) * f(x)], dim=1)
        torch.testing.assert_close(at(0.3, f)(x), expected)

    def test_equal_parts_at_first(self):
        dense = Concatenated(nn.Identity())
        torch.testing.assert_close(dense(torch.ones(1, 2)), torch.full((1, 4), 0.5**0.5))

    @pytest.mark.parametrize("angle", [0.0, 0.4, math.pi / 4, 2.0])
    @pytest.mark.parametrize("norm", [0.2, 0.9, 1.5])
    def test_the_bound_is_attained_where_f_is_a_multiple_of_a_rotation(self, angle, norm):
        q = torch.linalg.qr(normal(4, 4)).Q
        dense = at(angle, linear(norm * q))
        jacobian = dense(torch.eye(4, dtype=DOUBLE)).T
        exact = float(torch.linalg.matrix_norm(jacobian, 2))
        found = lipschitz_bound(nn.Sequential(dense), (4,)).value
        assert exact <= found <= exact * (1 + 1e-8)

    def test_f_must_not_overwrite_what_is_kept(self):
        with pytest.raises(
            ValueError, match=r"f must not modify its input in place; got ReLU\(inplace=True\).*Use inplace=False"
        ):
            Concatenated(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2)))

    def test_layers_are_listed_where_they_are(self):
        g = constrain_(nn.Sequential(Concatenated(nn.Linear(2, 3)), nn.Linear(5, 2)), lipschitz=0.9)
        assert [p.name for p in lipschitz_bound(g, (2,)).parts] == ["0.f", "1"]
        assert [p.input_shape for p in lipschitz_bound(g, (2,), estimate=True).parts] == [(2,), (5,)]

    def test_its_program_is_a_graph(self):
        g = nn.Sequential(Concatenated(nn.Sequential(nn.Linear(2, 3), LipSwish())), nn.Linear(5, 2))
        found = try_parse(g)
        assert [(s.kind, s.tensors) for s in found.program.steps] == [
            ("linear", 2), ("lipswish", 1), ("join", 1), ("linear", 2)
        ]  # fmt: skip
        assert found.program.inputs == ((0,), (1,), (0, 2), (3,))
        assert not found.program.is_chain
        x = torch.randn(3, 2)
        torch.testing.assert_close(run_program(found.program, x, found.tensors()), g(x))
        assert try_parse(nn.Sequential(Concatenated(nn.Hardshrink()), nn.Linear(4, 2))) is None

    @pytest.mark.parametrize("shape", [(4,), (2, 4, 3)])
    def test_its_jacobian_is_that_of_torch(self, shape):
        g = dense(shape, 3, LipSwish, (3, 1, 3)).double()
        rouse_(g)
        x, v = normal(5, *shape), normal(5, *shape)
        y, jacobian = linearise(g, x)
        expected_y, vjp = torch.func.vjp(g, x)
        torch.testing.assert_close(y, expected_y)
        torch.testing.assert_close(jacobian.vjp(v), vjp(v)[0])
        # and its gradient in the parameters, the angles too
        parameters = list(g.parameters())
        found = torch.autograd.grad((jacobian.vjp(v) * v).sum(), parameters, allow_unused=True)
        expected = torch.autograd.grad((torch.func.vjp(g, x)[1](v)[0] * v).sum(), parameters, allow_unused=True)
        for a, b in zip(found, expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b)

    def test_layers_inside_see_the_size_of_images(self):
        g = constrain_(dense((2, 5, 4), 3, nn.ELU, (3, 3)), lipschitz=0.9)
        linearise(g, torch.randn(1, 2, 5, 4))
        assert {cap_of(m).seen for m in g.modules() if cap_of(m) is not None} == {(5, 4)}


class TestConstraint:
    def test_only_what_follows_counts_for_the_whole(self):
        g = nn.Sequential(
            Concatenated(nn.Linear(2, 3)), Concatenated(nn.Linear(5, 3)), nn.Linear(8, 2), nn.Linear(2, 2)
        )
        constrain_(g, lipschitz=0.81)
        assert [cap_of(m).coefficient for m in g.modules() if cap_of(m) is not None] == pytest.approx([0.9] * 4)
        assert requested_constant(g) == pytest.approx(0.81)
        assert requested_bound(g).value == pytest.approx(0.81)
        assert lipschitz_bound(g, (2,)).value <= 0.81

    def test_a_layer_must_follow(self):
        with pytest.raises(
            ValueError, match="lipschitz= needs a Linear or Conv layer after the last Concatenated; got none."
        ):
            constrain_(nn.Sequential(Concatenated(nn.Linear(2, 2))), lipschitz=0.9)

    def test_tightening_reaches_inside(self):
        g = constrain_(nn.Sequential(Concatenated(nn.Linear(2, 3)), nn.Linear(5, 2)), lipschitz=0.5).eval()
        with torch.no_grad():
            g[0].f.parametrizations.weight.original.fill_(40.0)  # eval: nothing is measured again
        assert "0.f" in tighten_layers_(g, (2,))
        assert lipschitz_bound(g, (2,)).value < 0.5

    def test_a_free_layer_inside_is_refused(self):
        with pytest.raises(ValueError, match="g must be a contraction"):
            ResidualBlock(nn.Sequential(at(1.0, linear(contraction(2, 3.0))), linear(0.9 * normal(2, 4))))


class TestTightness:
    """The proven constant of a dense branch beside the norm of its Jacobian, computed."""

    @pytest.mark.parametrize(("shape", "kernels"), [((3,), (1, 1, 1, 1)), ((2, 4, 4), (3, 3, 1))])
    def test_no_jacobian_exceeds_it(self, shape, kernels):
        g = constrain_(dense(shape, 5, LipSwish, kernels), lipschitz=0.98).double()
        rouse_(g, weight=20.0)  # every layer at its coefficient, every angle another one
        limit = lipschitz_bound(g.eval(), shape).value
        norms = [float(torch.linalg.matrix_norm(dense_jacobian(g, x), 2)) for x in 3 * normal(8, 1, *shape)]
        assert max(norms) <= limit <= 0.98
        assert limit > 0.7  # what is kept and what is made weigh as much together as one

    def test_it_is_attained_at_any_depth(self):
        """Layers that turn, each coefficient at its limit: nothing is lost from layer to layer."""
        q = torch.linalg.qr(normal(4, 4)).Q
        first = at(math.pi / 4, linear(q))
        both = torch.cat([q, q], dim=1) / 2**0.5  # on (h, q h) / sqrt 2 an isometry, up to a turn
        second = at(0.7, linear(both))
        g = nn.Sequential(first, second, linear(0.98 * torch.eye(12, dtype=DOUBLE)))
        exact = float(torch.linalg.matrix_norm(g(torch.eye(4, dtype=DOUBLE)).T, 2))
        found = lipschitz_bound(g, (4,)).value
        assert exact <= found * (1 + 1e-12)
        assert found == pytest.approx(0.98, rel=1e-8)
        assert exact > 0.9 * found

    def test_a_sum_of_norms_would_be_far_off(self):
        """What a reader might do instead: 1 + Lip(f) for every layer that keeps its input."""
        g = constrain_(dense((3,), 5, nn.ELU, (1,) * 6), lipschitz=0.98)
        assert lipschitz_bound(g, (3,)).value <= 0.98 < 1.98**5


class TestNetwork:
    def test_channels_grow_and_come_back(self):
        flow = build(NETWORK, DIGITS, "density")
        g = next(m for m in flow.modules() if isinstance(m, ResidualBlock)).g
        sizes = [(m.in_channels, m.out_channels, m.kernel_size[0]) for m in g.modules() if isinstance(m, nn.Conv2d)]
        assert sizes == [(4, 3, 3), (7, 3, 3), (10, 4, 1)]

    @pytest.mark.parametrize(
        ("network", "schema"), [(NETWORK, DIGITS), (replace(NETWORK, blocks=(2,)), Schema((3,), columns=tuple("abc")))]
    )
    def test_a_density_is_proven_and_inverted(self, network, schema):
        torch.manual_seed(0)
        flow = build(replace(network, tail=1, tail_width=4), schema, "density")
        x = (schema.levels or 1) * torch.rand(3, *schema.shape)
        flow(x)
        flow.double().eval()
        certificate = certify(flow, schema.shape)
        assert certificate.passed
        assert max(certificate.lipschitz.values()) <= network.lipschitz * (1 + 1e-4)
        x = x.double()
        torch.testing.assert_close(flow.transform.inverse(flow.transform(x)), x, atol=1e-6, rtol=0)
        assert flow.log_prob(x, estimator=Exact()).isfinite().all()

    @pytest.mark.parametrize(
        ("wrong", "sentence"),
        [
            ({"preactivation": True}, "branch 'dense' needs preactivation = false; got true."),
            ({"constrained": False}, "branch 'dense' needs constrained = true; got false."),
        ],
    )
    def test_wrong_settings_get_a_sentence(self, wrong, sentence):
        with pytest.raises(ValueError, match=sentence):
            replace(NETWORK, **wrong)

    @pytest.mark.parametrize("kernel", [2, 0, -1])
    def test_kernels_that_do_not_keep_the_size(self, kernel):
        with pytest.raises(ValueError, match=rf"kernels must be odd, .* got \({kernel},\)."):
            build(replace(NETWORK, kernels=(3, kernel)), DIGITS, "density")

    def test_the_tail_is_a_chain(self):
        """A dense one would end with a matrix as large as the code squared."""
        flow = build(replace(NETWORK, tail=1, tail_width=4), DIGITS, "density")
        sizes = [m.weight.shape for m in flow.modules() if isinstance(m, nn.Linear)]
        assert sizes == [(4, 64), (4, 4), (64, 4)]

    def test_a_coefficient_is_that_of_the_last_layer(self):
        made = replace(find("digits-density"), network=NETWORK)
        assert with_coefficient(made, "0.5").network.lipschitz == 0.5

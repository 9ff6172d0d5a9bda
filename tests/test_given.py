"""A conditional density of some columns given the others, as a flow of whole rows."""

import math
from dataclasses import replace

import pytest
import torch

from iresnet import ActNorm, Chain, DiagonalNormal, Flow, ResidualBlock, Standardise, certify, contractive_mlp
from iresnet.data import Dataset, Schema
from iresnet.evaluate import has_inverse, interpolate
from iresnet.models import Network, build
from iresnet.models.branches import conditioned, potential
from iresnet.transforms.given import Given

from .zoo import normal, rouse_

SCHEMA = Schema((4,), columns=("a", "t", "b", "u"), targets=("u", "t"))
TABLE = Network(blocks=(2,), width=8, preprocessing="standardise")


def inner():
    return rouse_(Chain(ActNorm(2), ResidualBlock(contractive_mlp(2, hidden=(8,), context=2)))).double().eval()


def given():
    return Given(inner(), Standardise(torch.tensor([1.0, 2.0]).double(), torch.tensor([2.0, 0.5]).double()), [3, 1])


class TestGiven:
    def test_it_is_the_transform_of_the_targets_given_the_scaled_others(self):
        f, x = given(), normal(5, 4)
        c = torch.stack([(x[:, 0] - 1) / 2, (x[:, 2] - 2) / 0.5], dim=1)
        expected, logdet = f.transform.forward_and_logdet(x[:, [3, 1]], c)
        found, own = f.forward_and_logdet(x)
        assert torch.equal(found, expected)
        assert torch.equal(own, logdet)
        assert torch.equal(f(x), expected)
        assert f.output_shape((4,)) == (2,)

    def test_the_log_determinant_is_that_of_the_targets(self):
        f, x = given(), normal(1, 4)
        jacobian = torch.autograd.functional.jacobian(f, x)[0, :, 0, [3, 1]]
        assert f.forward_and_logdet(x)[1].item() == pytest.approx(math.log(abs(torch.linalg.det(jacobian))), abs=1e-10)

    def test_the_inverse_of_a_code_given_the_others_is_the_row(self):
        f, x = given(), normal(5, 4)
        with torch.no_grad():
            assert torch.allclose(f.inverse(f(x), x[:, [0, 2]]), x, atol=1e-9)
        solution = f.solve(f(x).detach(), x[:, [0, 2]])
        assert solution.proven
        assert torch.allclose(solution.x, x, atol=1e-9)
        assert bool(((solution.x - x).norm(dim=1) <= solution.error_bound).all())
        assert torch.allclose(f.reference(x), f(x), atol=1e-12)

    def test_it_is_certified_by_its_parts(self):
        flow = Flow(given(), DiagonalNormal(2).double(), event_shape=(4,)).eval()
        certificate = certify(flow, (4,))
        assert certificate.passed
        assert [block.input_shape for block in certificate.blocks] == [(2,)]
        assert flow.proof_status((4,)) == (True, True)

    def test_a_flow_is_sampled_given_the_others(self):
        flow, c = Flow(given(), DiagonalNormal(2).double(), event_shape=(4,)).eval(), normal(3, 2)
        rows = flow.sample((5,), c)
        assert rows.shape == (5, 3, 4)
        assert torch.equal(rows[..., [0, 2]], c.expand(5, 3, 2))

    def test_the_context_is_part_of_the_rows(self):
        with pytest.raises(ValueError, match="the context is part of the rows; leave it out"):
            given()(normal(3, 4), normal(3, 2))
        with pytest.raises(ValueError, match="needs the 2 given columns of every row. Pass them as context"):
            given().inverse(normal(3, 2))
        with pytest.raises(ValueError, match=r"context must have shape \(batch, 2\); got \(3, 3\)"):
            given().inverse(normal(3, 2), normal(3, 3))
        with pytest.raises(ValueError, match=r"x must have shape \(batch, 4\); got \(3, 5\)"):
            given()(normal(3, 5))

    @pytest.mark.parametrize("targets", [[1, 1], [4, 0], [-1, 0]])
    def test_targets_are_some_columns(self, targets):
        with pytest.raises(ValueError, match=r"targets must be different columns of 0 .. 3, and not all; got"):
            Given(inner(), Standardise([0.0, 0.0], [1.0, 1.0]), targets)

    def test_categories_are_counted_for_every_given_column(self):
        with pytest.raises(ValueError, match=r"a count for each of the 2 given columns; got \[3\]."):
            Given(inner(), Standardise([0.0, 0.0], [1.0, 1.0]), [3, 1], [3])

    def test_a_category_is_an_indicator_each(self):
        f = rouse_(Chain(ActNorm(2), ResidualBlock(contractive_mlp(2, hidden=(8,), context=4)))).double().eval()
        f = Given(f, Standardise(torch.tensor([1.0, 0.0]).double(), torch.tensor([2.0, 1.0]).double()), [3, 1], [0, 3])
        x = normal(3, 4)
        x[:, 2] = torch.tensor([0.0, 1.0, 2.0])
        assert torch.equal(f.encode(x[:, [0, 2]]), torch.cat([(x[:, :1] - 1) / 2, torch.eye(3).double()], dim=1))
        with torch.no_grad():
            assert torch.allclose(f.inverse(f(x), x[:, [0, 2]]), x, atol=1e-9)

    def test_the_transform_takes_a_context(self):
        with pytest.raises(ValueError, match="the transform must take a context; got a ActNorm without"):
            Given(ActNorm(1), Standardise([0.0], [1.0]), [0])


class TestBuild:
    def test_columns_are_found_by_name_and_scaled(self):
        x = 3 + 2 * normal(50, 4, dtype=torch.float32)
        x[:, 2] = 7  # a constant column may be given
        flow = build(TABLE, SCHEMA, "density", x)
        transform = flow.transform
        assert isinstance(transform, Given)
        assert (transform.targets, transform.others) == ((3, 1), (0, 2))
        assert torch.allclose(transform.scale.mean, x[:, [0, 2]].mean(0))
        assert transform.scale.std.tolist() == pytest.approx([float(x[:, 0].std(correction=0)), 1.0])
        assert flow(x).shape == (50,)
        assert flow.base.shape == (2,)

    def test_the_density_depends_on_what_is_given(self):
        flow, x = (
            rouse_(build(TABLE, SCHEMA, "density", normal(50, 4, dtype=torch.float32))).eval(),
            normal(2, 4).float(),
        )
        moved = x + torch.tensor([0.0, 0.0, 1.0, 0.0])
        assert not torch.allclose(flow.log_prob(x), flow.log_prob(moved))

    @pytest.mark.parametrize("settings", [{"branch": "dense"}, {"preactivation": True}, {"mixing": True}, {"tail": 1}])
    def test_other_branches(self, settings):
        flow = build(replace(TABLE, **settings), SCHEMA, "density", normal(50, 4, dtype=torch.float32))
        assert flow(normal(5, 4, dtype=torch.float32)).shape == (5,)
        assert certify(flow.eval(), (4,)).blocks

    def test_what_has_no_context_is_refused(self):
        with pytest.raises(ValueError, match="must be a sequence of layers; got a Potential. Use branch = 'chain'"):
            conditioned(potential((2,), 4, torch.nn.ELU()), 2, 3)
        with pytest.raises(ValueError, match="a conditional density, of u, t given .* got the family glow"):
            build(replace(TABLE, family="glow"), SCHEMA, "density")
        with pytest.raises(ValueError, match='needs the objective "density" .* got hybrid'):
            build(TABLE, replace(SCHEMA, classes=("x", "y")), "hybrid")

    def test_codes_alone_have_no_inverse(self):
        flow = build(TABLE, SCHEMA, "density", normal(50, 4, dtype=torch.float32)).eval()
        assert not has_inverse(flow)
        with pytest.raises(ValueError, match="an inverse of a conditional density needs the given columns too"):
            interpolate(flow, Dataset(normal(5, 4, dtype=torch.float32), None, SCHEMA))

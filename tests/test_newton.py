"""Newton's method for inverses in few dimensions: known answers, its rate, and what is done where it fails."""

import math
from dataclasses import replace

import pytest
import torch

from iresnet import Anderson, Banach, Newton, ResidualBlock, contractive_mlp
from iresnet.fixed_point import FEW_DIMENSIONS, Affine, default_solver, solve
from tests.zoo import DOUBLE, contraction, linear_block, normal, rouse_


def diagonal(g, slope):
    """Return an approximation by zero, with exact derivatives, of a g that treats every coordinate alone."""

    def linearise(x):
        return g(x), torch.diag_embed(1 / (1 + slope(x)))

    return lambda d: Affine(torch.eye(d, dtype=DOUBLE), torch.zeros(d, dtype=DOUBLE), linearise)


def cosine(x, rows=None):
    return 0.9 * torch.cos(x)


COSINE = diagonal(cosine, lambda x: -0.9 * torch.sin(x))


def run(g, affine, z, limit=100, target=1e-12, contraction=0.9, x=None):
    """Return (x, evaluations) of Newton's method from x, by default from z."""
    target = torch.full((len(z),), target, dtype=z.dtype)
    return Newton().run(g, z, z if x is None else x, target, contraction, limit, affine)


class TestKnownAnswers:
    def test_a_linear_g_takes_one_step_and_the_evaluation_that_sees_it(self):
        a, z = contraction(5, 0.9), normal(30, 5, seed=1)
        p = torch.linalg.inv(torch.eye(5, dtype=DOUBLE) + a)
        affine = Affine(p, p[0], lambda x: (x @ a.T, p.expand(len(x), 5, 5)))
        x, count = run(lambda x, rows: x @ a.T, affine, z)
        torch.testing.assert_close(x, z @ p.T, atol=1e-12, rtol=0)
        assert count.tolist() == [2] * 30

    def test_the_first_step_is_that_of_the_textbook(self):
        z = normal(7, 1, seed=1)
        x, count = run(cosine, COSINE(1), z, limit=1)
        slope = 1 - 0.9 * torch.sin(z)
        torch.testing.assert_close(x, z - cosine(z) / slope, atol=1e-14, rtol=0)
        assert count.tolist() == [1] * 7

    @pytest.mark.parametrize("d", range(1, FEW_DIMENSIONS + 1))
    @pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=["float32", "float64"])
    def test_the_matrix_of_a_block_is_the_inverse_of_its_jacobian(self, d, dtype):
        block = rouse_(ResidualBlock(contractive_mlp(d, (8, 8)))).to(dtype).eval()
        x = normal(5, d, seed=1).to(dtype)
        y, p = block.snapshot((d,)).affine((d,)).linearise(x)
        torch.testing.assert_close(y, block.g(x))
        j = torch.func.vmap(torch.func.jacrev(block.g))(x)
        torch.testing.assert_close(torch.linalg.inv(torch.eye(d, dtype=dtype) + j), p)

    def test_a_step_without_a_finite_inverse_is_one_of_banach(self):
        """J = -I: I + J has no inverse."""
        eye = torch.eye(3, dtype=DOUBLE)
        vectors = linear_block(-0.5 * eye).snapshot((3,))._on_vectors(DOUBLE)
        x = normal(2, 3)
        torch.testing.assert_close(vectors.linearise(x)[1], (2 * eye).expand(2, 3, 3))
        vectors.values = [2 * v for v in vectors.values]
        y, p = vectors.linearise(x)
        torch.testing.assert_close(y, -x)
        assert torch.equal(p, eye.expand(2, 3, 3))


class TestRate:
    def test_errors_are_nearly_squared(self):
        """Where the slope of g is .76, Banach steps gain a digit in eight; Newton needs a handful in all."""
        root = torch.tensor([[-1.0]], dtype=DOUBLE)
        settings = {"lipschitz": 0.9, "tolerance": 1e-11, "reference": cosine}
        newton = solve(cosine, root + cosine(root), solver=Newton(), affine=COSINE(1), **settings)
        banach = solve(cosine, root + cosine(root), solver=Banach(), **settings)
        torch.testing.assert_close(newton.x, root, atol=1e-11, rtol=0)
        assert newton.iterations.item() <= 7
        assert banach.iterations.item() >= 80

    @pytest.mark.parametrize(("d", "share"), [(2, 0.9), (4, 0.9), (8, 0.9)])
    def test_trained_blocks_take_fewer_evaluations_than_with_anderson(self, d, share):
        torch.manual_seed(0)
        block = rouse_(ResidualBlock(contractive_mlp(d, (32, 32), lipschitz=0.95))).eval()
        z = 2 * normal(300, d, seed=9).float()
        newton, anderson = (block.solve(z, solver=s) for s in (Newton(), Anderson()))
        assert newton.converged.all()
        assert newton.iterations.sum() <= share * anderson.iterations.sum()


class TestWhereItFails:
    @pytest.mark.parametrize("factor", [-1.0, 0.0, 10.0, math.nan, math.inf])
    def test_a_wrong_jacobian_costs_evaluations_and_nothing_else(self, factor):
        z, exact = normal(50, 3, seed=1), COSINE(3)

        def wrong(x):
            y, p = exact.linearise(x)
            return y, factor * p

        settings = {"lipschitz": 0.9, "tolerance": 1e-9, "reference": cosine}
        affine = Affine(exact.transposed, exact.shift, wrong)
        found = solve(cosine, z, solver=Newton(), affine=affine, **settings)
        banach = solve(cosine, z, solver=Banach(), **settings)
        assert found.converged.all()
        torch.testing.assert_close(found.x, banach.x, atol=2e-9, rtol=0)
        assert (found.iterations - banach.iterations).max() <= 4

    def test_a_g_full_of_kinks_is_solved(self):
        q = torch.linalg.qr(normal(4, 4, seed=1))[0]

        def g(x, rows=None):
            y = x @ q.T
            return 0.9 * (y - 2 * torch.round(y / 2)).abs() @ q

        def linearise(x):
            y = x @ q.T
            slope = torch.sign(y - 2 * torch.round(y / 2))
            return g(x), torch.linalg.inv(torch.eye(4, dtype=DOUBLE) + 0.9 * q.T @ (slope[..., None] * q))

        z, settings = normal(400, 4, seed=7), {"lipschitz": 0.9, "tolerance": 1e-8, "reference": g}
        found = solve(g, z, solver=Newton(), affine=Affine.fit(g, 4, 0.9, linearise), **settings)
        assert found.converged.all()
        torch.testing.assert_close(found.x + g(found.x), z, atol=1e-8, rtol=0)

    def test_a_sample_that_is_not_a_number_stops_at_once_and_leaves_the_others_alone(self):
        z = torch.tensor([[1.0], [math.nan], [2.0]], dtype=DOUBLE)
        x, count = run(cosine, COSINE(1), z)
        alone, _ = run(cosine, COSINE(1), z[[0, 2]])
        assert torch.equal(x[[0, 2]], alone)
        assert x[1].isnan()
        assert count[1] <= 4

    @pytest.mark.parametrize("limit", range(1, 6))
    def test_no_more_evaluations_than_allowed(self, limit):
        z = 3 * normal(40, 2, seed=1)
        found = solve(
            cosine, z, lipschitz=0.9, tolerance=1e-12, solver=Newton(limit), reference=cosine, affine=COSINE(2)
        )
        assert found.iterations.max() <= limit


class TestChoice:
    @pytest.mark.parametrize("d", [FEW_DIMENSIONS, FEW_DIMENSIONS + 1])
    def test_it_is_the_default_in_few_dimensions_where_the_approximation_is_poor(self, d):
        block, z = rouse_(ResidualBlock(contractive_mlp(d, (8,)))).eval(), normal(6, d).float()
        found, newton, anderson = (block.solve(z, **s) for s in ({}, {"solver": Newton()}, {"solver": Anderson()}))
        assert torch.equal(found.x, newton.x)
        assert torch.equal(newton.x, anderson.x) == (d > FEW_DIMENSIONS)

    def test_a_good_approximation_suffices(self):
        block, z = ResidualBlock(contractive_mlp(3, (64, 64))).eval(), normal(6, 3).float()
        found, newton, anderson = (block.solve(z, **s) for s in ({}, {"solver": Newton()}, {"solver": Anderson()}))
        assert torch.equal(found.x, anderson.x)
        assert not torch.equal(newton.x, anderson.x)

    @pytest.mark.parametrize(("amplitude", "needed"), [(1e-3, False), (0.5, True)])
    def test_the_error_of_the_approximation_decides(self, amplitude, needed):
        affine = Affine.fit(lambda x: amplitude * torch.cos(2 * x), 2, 0.9, lambda x: (x, x))
        assert affine.needs_jacobians == needed
        assert isinstance(default_solver(affine), Newton) == needed
        assert not replace(affine, linearise=None).needs_jacobians

    def test_where_no_jacobian_is_known_it_is_anderson(self):
        assert default_solver(None) == Anderson()
        block, z = linear_block(contraction(5, 0.5)), normal(3, 5)
        asserted = ResidualBlock(torch.nn.Sequential(block.g, torch.nn.Softsign()).double(), lipschitz=0.5).eval()
        newton, anderson = (asserted.solve(z, solver=s) for s in (Newton(), Anderson()))
        assert torch.equal(newton.x, anderson.x)

    def test_the_gradient_is_that_of_the_inverse(self):
        block, z = rouse_(ResidualBlock(contractive_mlp(2, (8,)))).double().eval(), normal(4, 2)
        assert torch.autograd.gradcheck(
            lambda z: block.inverse(z, tolerance=1e-12, solver=Newton()), z.requires_grad_()
        )

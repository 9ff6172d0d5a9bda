"""An affine approximation of g makes an inverse cheaper, and can never make it wrong."""

import math

import pytest
import torch
from torch import nn

from iresnet import Anderson, Banach, ResidualBlock, contractive_convnet, contractive_mlp, mlp_flow, tighten_
from iresnet.data import toy
from iresnet.fixed_point import MAX_DIMENSION, Affine, solve
from iresnet.proof import sample_norms
from tests.zoo import DOUBLE, contraction, linear_block, normal, rouse_


def shifted(matrix, shift):
    """x -> A x + b."""
    return lambda x: x @ matrix.T + shift


def fit(matrix, shift, lipschitz=0.9):
    return Affine.fit(shifted(matrix, shift), len(matrix), lipschitz)


class TestFit:
    @pytest.mark.parametrize("d", [1, 3, 40, MAX_DIMENSION])
    def test_an_affine_g_is_found_exactly(self, d):
        a, b = contraction(d, 0.9), normal(d, seed=3)
        affine, x = fit(a, b), 0.5 * normal(20, d, seed=1)
        z = x + x @ a.T + b
        torch.testing.assert_close(affine.start(z, sample_norms(z)), x, atol=1e-10, rtol=0)
        torch.testing.assert_close(affine.correct(z - b), x, atol=1e-10, rtol=0)

    def test_of_a_curved_g_it_is_the_best_for_inputs_of_a_normalised_network(self):
        """The mean of cos at normal numbers of scales 1 and 2 is .607 and .135: the slopes, weighted by scale^2."""
        slope = (math.exp(-0.5) + 4 * math.exp(-2)) / 5
        affine = Affine.fit(lambda x: 0.9 * torch.sin(x), 64, 0.9)
        found = affine.transposed.inverse().diagonal().mean() - 1
        assert found.item() == pytest.approx(0.9 * slope, abs=0.03)

    def test_its_matrix_is_kept_below_the_lipschitz_constant(self):
        """So that I + A has an inverse, of norm at most 1 / (1 - L)."""
        affine = fit(-5 * torch.eye(3, dtype=DOUBLE), torch.zeros(3, dtype=DOUBLE), lipschitz=0.9)
        assert torch.linalg.matrix_norm(affine.transposed, 2).item() == pytest.approx(10)

    def test_a_code_far_from_what_was_fitted_starts_at_itself(self):
        a, b = contraction(3, 0.9), normal(3, seed=3)
        z = torch.tensor([[1.0, 2.0, 0.0], [100.0, 0.0, 0.0], [math.nan, 0.0, 0.0]], dtype=DOUBLE)
        start = fit(a, b).start(z, sample_norms(z))
        assert not torch.equal(start[0], z[0])
        assert torch.equal(start[1], z[1])

    def test_numbers_that_overflow_give_none(self):
        assert Affine.fit(lambda x: x * math.inf, 2, 0.9) is None


class TestInverse:
    @pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=["float32", "float64"])
    def test_a_linear_block_takes_one_evaluation(self, dtype):
        block = linear_block(contraction(5, 0.9)).to(dtype)
        found = block.solve(normal(30, 5, seed=1).to(dtype))
        assert found.converged.all()
        assert found.iterations.tolist() == [1] * 30

    @pytest.mark.parametrize("wrong", ["opposite", "zero", "random"])
    @pytest.mark.parametrize("lipschitz", [0.5, 0.9])
    def test_a_wrong_approximation_costs_evaluations_and_nothing_else(self, wrong, lipschitz):
        a, b, zero = contraction(4, lipschitz), normal(4, seed=3), torch.zeros(4, dtype=DOUBLE)
        matrix = {"opposite": -a, "zero": 0 * a, "random": contraction(4, lipschitz, seed=7)}[wrong]
        g = lambda x, rows: shifted(a, b)(x)  # noqa: E731
        z, settings = normal(50, 4, seed=1), {"lipschitz": lipschitz, "tolerance": 1e-9, "reference": g}
        found = solve(g, z, solver=Anderson(), affine=fit(matrix, zero, lipschitz), **settings)
        without = solve(g, z, solver=Anderson(), **settings)
        truth = torch.linalg.solve(torch.eye(4, dtype=DOUBLE) + a, (z - b).T).T
        assert found.converged.all()
        assert ((found.x - truth).norm(dim=1) <= found.error_bound).all()
        assert (found.iterations - without.iterations).max() <= 2

    @pytest.mark.parametrize(("tolerance", "evaluations"), [(1e-7, 2), (1e-10, 3)])
    def test_the_evaluation_that_would_only_confirm_is_left_out(self, tolerance, evaluations):
        """Every step divides the residual by 1000; the last one is not looked at, but by the proof."""
        g, z = lambda x, rows: 0.5 * x, torch.tensor([[1.0], [-0.5]], dtype=DOUBLE)
        affine = Affine(torch.full((1, 1), (1 - 1e-3) / 1.5, dtype=DOUBLE), torch.zeros(1, dtype=DOUBLE))
        found = solve(g, z, lipschitz=0.5, tolerance=tolerance, solver=Anderson(), reference=g, affine=affine)
        assert found.converged.all()
        assert found.iterations.tolist() == [evaluations] * 2
        residual = z.abs()[:, 0] * 1000.0 ** -(evaluations + 1)
        torch.testing.assert_close((found.x + g(found.x, None) - z).abs()[:, 0], residual, rtol=1e-2, atol=0)

    @pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=["float32", "float64"])
    def test_where_it_should_have_been_looked_at_the_proof_says_so_and_the_solve_goes_on(self, dtype):
        """The g of the iteration deceives: by it all samples converge, by the float64 one of the proof half do not."""
        reference = lambda x, rows: 0.5 * torch.where(x > 0, x, x.abs())  # noqa: E731
        z, a = torch.tensor([[1.0], [-0.3]], dtype=dtype), torch.full((1, 1), 0.5, dtype=DOUBLE)
        settings = {"lipschitz": 0.5, "tolerance": 1e-5, "reference": reference, "solver": Anderson()}
        found = solve(lambda x, rows: 0.5 * x, z, affine=fit(a, torch.zeros(1, dtype=DOUBLE)), **settings)
        assert found.converged.all()
        torch.testing.assert_close(found.x, torch.tensor([[2 / 3], [-0.6]], dtype=dtype), atol=1e-5, rtol=0)
        assert found.iterations[1] > found.iterations[0]

    def test_a_g_full_of_kinks_is_solved_where_every_approximation_misleads(self):
        q = torch.linalg.qr(normal(4, 4, seed=1))[0]

        def g(x, rows=None):
            y = x @ q.T
            return 0.9 * (y - 2 * torch.round(y / 2)).abs() @ q

        z, affine = normal(400, 4, seed=7), Affine.fit(g, 4, 0.9)
        found = solve(g, z, lipschitz=0.9, tolerance=1e-8, solver=Anderson(), reference=g, affine=affine)
        assert found.converged.all()
        torch.testing.assert_close(found.x + g(found.x), z, atol=1e-8, rtol=0)

    @pytest.mark.parametrize(("d", "share"), [(2, 0.9), (8, 0.7)])
    def test_trained_blocks_take_fewer_evaluations(self, d, share):
        torch.manual_seed(0)
        flow, generator = mlp_flow(d, blocks=2, hidden=(32, 32)), torch.Generator().manual_seed(0)
        adam, weight = torch.optim.Adam(flow.parameters(), lr=5e-3), torch.randn(2, d, generator=generator)
        for _ in range(150):
            adam.zero_grad()
            x = toy.sample("moons", 128, generator=generator) @ weight
            (-flow(torch.tanh(x) + 0.1 * torch.randn(128, d, generator=generator)).mean()).backward()
            adam.step()
        tighten_(flow.eval())
        blocks, evaluations = [t for t in flow.transform if isinstance(t, ResidualBlock)], {}
        for solver in (Anderson(affine=False), Anderson()):
            evaluations[solver] = sum(
                int(b.solve(normal(300, d, seed=9).float(), solver=solver).iterations.sum()) for b in blocks
            )
        assert evaluations[Anderson()] <= share * evaluations[Anderson(affine=False)]

    def test_it_belongs_to_the_weights_of_this_moment(self):
        """Trap: a cache of an approximation that outlives a training step would be right, and slow."""
        block, z = linear_block(contraction(5, 0.9)), normal(30, 5, seed=1)
        assert block.solve(z).iterations.max() == 1
        with torch.no_grad():
            block.g[0].weight.copy_(contraction(5, 0.9, seed=8))
        assert block.solve(z).iterations.max() == 1

    @pytest.mark.parametrize("d", [7, 13])  # no other test has cached these points
    def test_a_model_on_a_cpu_does_not_depend_on_the_default_device(self, d):
        block, z = linear_block(contraction(d, 0.9)), normal(3, d, seed=1)
        with torch.device("meta"):
            found = block.solve(z)
        assert found.iterations.tolist() == [1] * 3

    def test_banach_is_algorithm_1(self):
        """Bit for bit, x <- z - g(x) from x = z."""
        block, z = linear_block(0.5 * torch.eye(2, dtype=DOUBLE)), normal(3, 2)
        x = z
        for steps in range(1, 6):
            x = z - block.g(x)
            assert torch.equal(block.solve(z, tolerance=1e-12, solver=Banach(max_iterations=steps)).x, x)

    @pytest.mark.parametrize(
        ("block", "shape"),
        [
            (ResidualBlock(contractive_mlp(3, (8,))), (3,)),
            (rouse_(ResidualBlock(contractive_convnet(1, 4))).eval(), (1, 4, 4)),
            (ResidualBlock(nn.Linear(MAX_DIMENSION + 1, MAX_DIMENSION + 1), lipschitz=0.5), (MAX_DIMENSION + 1,)),
            (ResidualBlock(nn.Sequential(nn.Linear(3, 3), nn.Softsign()), lipschitz=0.5), (3,)),
            (ResidualBlock(contractive_mlp(3, (8,), context=2)), (3,)),
        ],
        ids=["vectors", "images", "many dimensions", "asserted", "context"],
    )
    def test_it_is_for_vectors_and_functions_the_library_knows(self, block, shape, request):
        affine = block.snapshot(shape).affine(shape)
        assert (affine is not None) == (request.node.callspec.id == "vectors")

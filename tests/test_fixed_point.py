"""Solving x + g(x) = z: exact answers of linear algebra, bounds that hold, and failures that are loud."""

import math
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from iresnet import (
    Anderson,
    Banach,
    Chain,
    ConvergenceError,
    MaxMin,
    Newton,
    ResidualBlock,
    Sine,
    Solution,
    constrain_,
    contractive_convnet,
    contractive_mlp,
    mlp_flow,
    tighten_,
)
from iresnet.data import toy
from iresnet.fixed_point import Solver, default_tolerance, iteration_limit, solve
from iresnet.transforms import AdditiveCoupling
from tests.zoo import DOUBLE, contraction, linear_block, normal, rouse_

ANDERSON = Anderson(affine=False)  # with an affine approximation of g, linear blocks would not need it
SOLVERS = {"banach": Banach(), "anderson": ANDERSON}
CONSTANTS = [0.3, 0.5, 0.7, 0.9, 0.97]

solvers = pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
all_solvers = pytest.mark.parametrize(
    "solver", [*SOLVERS.values(), Anderson(), Newton()], ids=[*SOLVERS, "affine", "newton"]
)


def scaled(matrix):
    """x -> A x as the two functions that `solve` takes."""
    return lambda x, rows: x @ matrix.to(x).T


def of(function):
    return lambda x, rows: function(x)


@pytest.fixture(scope="module")
def trained():
    """The residual blocks of a 2-D flow that has learned something, with Lip(g) close to 0.9."""
    torch.manual_seed(0)
    flow = mlp_flow(2, blocks=2, hidden=(32, 32), lipschitz=0.9)
    adam, generator = torch.optim.Adam(flow.parameters(), lr=5e-3), torch.Generator().manual_seed(0)
    for _ in range(150):
        adam.zero_grad()
        (-flow(toy.sample("moons", 128, generator=generator)).mean()).backward()
        adam.step()
    tighten_(flow.eval())
    blocks = [t.double() for t in flow.transform if isinstance(t, ResidualBlock)]
    assert max(b.bound((2,)).value for b in blocks) > 0.85
    return blocks


class TestLinear:
    @solvers
    @given(d=st.integers(1, 12), lipschitz=st.sampled_from(CONSTANTS), seed=st.integers(0, 99))
    def test_the_solution_is_that_of_linear_algebra(self, solver, d, lipschitz, seed):
        a, z = contraction(d, lipschitz, seed), normal(3, d, seed=seed + 1)
        found = solve(scaled(a), z, lipschitz=lipschitz, tolerance=1e-9, solver=solver, reference=scaled(a))
        expected = torch.linalg.solve(torch.eye(d, dtype=DOUBLE) + a, z.T).T
        error = (found.x - expected).norm(dim=1)
        assert found.converged.all()
        assert (error <= found.error_bound).all()
        assert found.error_bound.max() <= 1e-9

    @pytest.mark.parametrize("d", [1, 2, 5])
    def test_anderson_needs_one_evaluation_a_dimension_and_two_more(self, d):
        """On a linear map it is a Krylov method: exact as soon as its memory spans the space."""
        found = linear_block(contraction(d, 0.97)).solve(normal(20, d, seed=1), tolerance=1e-7, solver=ANDERSON)
        assert found.iterations.max() <= d + 3

    def test_banach_converges_at_the_rate_of_equation_1(self):
        """||x_k - x*|| <= L^k / (1 - L) ||x_1 - x_0||, with equality for g = L times a rotation."""
        q = torch.linalg.qr(normal(6, 6))[0]
        block, z = linear_block(0.5 * q), normal(1, 6, seed=1)
        truth = torch.linalg.solve(torch.eye(6, dtype=DOUBLE) + 0.5 * q, z[0])
        first = (0.5 * q @ z[0]).norm()
        for k in range(1, 12):
            found = block.solve(z, tolerance=1e-14, solver=Banach(max_iterations=k))
            error = (found.x[0] - truth).norm()
            assert error <= 0.5**k / 0.5 * first
            assert error >= 0.5**k / 1.5 * first * 0.99
            assert found.iterations.item() == k

    @solvers
    def test_the_zero_map_takes_one_evaluation(self, solver):
        z = normal(4, 3)
        found = solve(
            of(torch.zeros_like), z, lipschitz=0.0, tolerance=1e-12, solver=solver, reference=of(torch.zeros_like)
        )
        assert torch.equal(found.x, z)
        assert found.iterations.tolist() == [1] * 4


def problem(kind, lipschitz):
    torch.manual_seed(0)
    match kind:
        case "linear":
            return linear_block(contraction(6, lipschitz)), (6,)
        case "rotation":
            return linear_block(lipschitz * torch.linalg.qr(normal(6, 6))[0]), (6,)
        case "mlp":
            return rouse_(ResidualBlock(contractive_mlp(4, (16, 16), lipschitz=lipschitz))).eval(), (4,)
        case "conv":
            return rouse_(ResidualBlock(contractive_convnet(1, 4, lipschitz=lipschitz))).eval(), (1, 4, 4)


class TestBound:
    @pytest.mark.no_cover
    @all_solvers
    @pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=["float32", "float64"])
    @pytest.mark.parametrize("lipschitz", CONSTANTS)
    @pytest.mark.parametrize("kind", ["linear", "rotation", "mlp", "conv"])
    def test_the_error_never_exceeds_the_bound(self, kind, lipschitz, dtype, solver):
        block, shape = problem(kind, lipschitz)
        block.to(dtype)
        z = (3 * normal(40, *shape, seed=1)).to(dtype)
        found = block.solve(z, solver=solver)
        assert found.converged.all()
        # The same stored weights, solved in float64 far below the bound.
        reference = lambda x, rows: block.reference(x) - x  # noqa: E731
        truth = solve(
            reference, z.double(), lipschitz=lipschitz, tolerance=1e-11, solver=Anderson(), reference=reference
        )
        slack = truth.error_bound
        error = (found.x.double() - truth.x).flatten(1).norm(dim=1)
        assert (error <= found.error_bound + slack).all()
        assert (found.error_bound <= default_tolerance(z, block.bound(shape).value)).all()

    def test_it_is_not_vacuous(self):
        """For g = -L x the bound is attained: it is the residual over 1 - L, not a multiple of it."""
        block = linear_block(-0.9 * torch.eye(2, dtype=DOUBLE))
        found = block.solve(torch.ones(1, 2, dtype=DOUBLE), tolerance=1e-3, solver=Banach())
        error = (found.x - 10).norm().item()
        assert error <= found.error_bound.item() <= error * 1.001

    def test_the_bound_by_the_last_step_fails_in_float32(self):
        """Trap: L / (1 - L) times the last step is false once rounding makes the step zero."""
        block = linear_block(contraction(40, 0.9, dtype=torch.float32))
        z = normal(50, 40, seed=1, dtype=torch.float32)
        x, step = z, None
        for _ in range(400):
            following = z - block.g(x)
            step, x = (following - x).norm(dim=1), following
        truth = torch.linalg.solve(torch.eye(40, dtype=DOUBLE) + block.g[0].weight.double(), z.double().T).T
        error = (x.double() - truth).norm(dim=1)
        assert (error > 0.9 / 0.1 * step.double()).any()
        residual = (block.reference(x) - z.double()).norm(dim=1)
        assert (error <= residual / 0.1).all()

    def test_the_bound_by_the_last_step_fails_for_anderson(self):
        """Trap: an accelerated iterate can stand still far from the solution; its residual knows."""
        block = problem("rotation", 0.9)[0]
        z, last, violated = 3 * normal(40, 6, seed=2), None, 0
        truth = block.solve(z, tolerance=1e-10).x
        for k in range(1, 12):
            found = block.solve(z, tolerance=1e-10, solver=Anderson(max_iterations=k, affine=False))
            error = (found.x - truth).norm(dim=1)
            assert (error <= found.error_bound + 1e-10).all()
            if last is not None:
                violated += int((error > 0.9 / 0.1 * (found.x - last).norm(dim=1) + 1e-9).sum())
            last = found.x
        assert violated > 0

    @pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=["float32", "float64"])
    def test_a_users_solver_may_work_in_place(self, dtype):
        """Trap: it got z itself to start from, overwrote it, and the bound was that of another z."""

        class InPlace(Solver):
            max_iterations = None

            def run(self, g, z, x, target, contraction, limit, affine=None):
                for _ in range(60):
                    x.copy_(z - g(x, torch.arange(len(z))))
                return x, torch.full((len(z),), 60)

        block, z = linear_block(0.5 * torch.eye(2, dtype=dtype)), normal(3, 2, dtype=dtype)
        before = z.clone()
        found = block.solve(z, solver=InPlace())
        assert torch.equal(z, before)
        assert found.converged.all()
        assert ((found.x.double() - before.double() / 1.5).norm(dim=1) <= found.error_bound).all()


class TestPerSample:
    @solvers
    def test_easy_samples_stop_early(self, solver):
        block = linear_block(torch.diag(torch.tensor([0.0, 0.9, 0.5], dtype=DOUBLE)))
        found = block.solve(torch.eye(3, dtype=DOUBLE), tolerance=1e-9, solver=solver)
        easy, hard, middle = found.iterations.tolist()
        assert easy < middle <= hard
        assert easy <= 2

    @all_solvers
    def test_a_sample_is_solved_as_if_alone(self, solver):
        block = problem("mlp", 0.9)[0].double()
        z = normal(12, 4, seed=1) * torch.logspace(-2, 3, 12, dtype=DOUBLE)[:, None]
        together = block.solve(z, solver=solver)
        for i in range(12):
            alone = block.solve(z[i : i + 1], solver=solver)
            assert alone.iterations[0] == together.iterations[i]
            torch.testing.assert_close(alone.x[0], together.x[i], atol=1e-11, rtol=1e-11)

    @all_solvers
    def test_a_huge_code_does_not_make_the_others_inexact(self, solver):
        """Trap: one tolerance for the whole batch, taken from its largest code."""
        block = problem("mlp", 0.9)[0]
        z = normal(4, 4, seed=1, dtype=torch.float32)
        z[3] *= 1e6
        found = block.solve(z, solver=solver)
        assert found.converged.all()
        assert found.error_bound[:3].max() < 1e-4

    @solvers
    def test_rows_tell_g_which_samples_it_sees(self, solver):
        shift = normal(5, 2, seed=3)
        asked = []

        def g(x, rows):
            asked.append(len(rows))
            return 0.5 * torch.sin(x + shift[rows])

        z = normal(5, 2) * torch.tensor([0.1, 1, 1, 10, 100])[:, None]
        found = solve(g, z, lipschitz=0.5, tolerance=1e-10, solver=solver, reference=g)
        torch.testing.assert_close(found.x + 0.5 * torch.sin(found.x + shift), z)
        assert min(asked) < 5

    @all_solvers
    def test_a_gradient_is_that_of_its_sample(self, solver):
        """Trap: samples that become slow at different steps came in another order than the Jacobian's."""

        class TwoRates(nn.Module):
            def forward(self, x):
                return torch.tensor([0.001, 0.9], dtype=x.dtype) * torch.sin(x)

        block = ResidualBlock(TwoRates(), lipschitz=0.9)
        weight = torch.tensor([[1.0, 1e-5], [0.0, 1.0]], dtype=DOUBLE)  # the second sample is slow at once
        z = block(torch.tensor([[0.3, 0.2], [0.5, 2.5]], dtype=DOUBLE)).requires_grad_()
        x = block.inverse(z, solver=solver)
        (x * weight).sum().backward()
        slope = torch.tensor([0.001, 0.9], dtype=DOUBLE) * torch.cos(x.detach())
        torch.testing.assert_close(z.grad, weight / (1 + slope), atol=1e-11, rtol=0)


def hard(d=8, bias=100.0, lipschitz=0.97):
    """A block whose large biases cancel: float32 cannot reach the tolerance of most samples."""
    torch.manual_seed(0)
    g = constrain_(nn.Sequential(nn.Linear(d, 64), nn.ELU(), nn.Linear(64, d)), lipschitz=lipschitz)
    with torch.no_grad():
        g[0].bias.copy_(bias * torch.rand(64))
        g[2].bias.zero_()
        g[2].bias.copy_(-g(torch.zeros(1, d))[0])
    return ResidualBlock(g).eval()


class TestFromFloat32ToFloat64:
    @pytest.mark.parametrize("kind", [Banach, Anderson, Newton])
    @pytest.mark.parametrize("limit", [20, 50])
    def test_a_limit_counts_for_every_sample_alone(self, kind, limit):
        """Trap: one sample that stalls in float32 left no evaluations for the others."""
        block, z, solver = hard(), normal(24, 8, dtype=torch.float32), kind(max_iterations=limit)
        together = block.solve(z, solver=solver)
        alone = [block.solve(z[i : i + 1], solver=solver) for i in range(24)]
        assert together.iterations.max() <= limit
        assert torch.equal(together.converged, torch.cat([s.converged for s in alone]))

    @pytest.mark.parametrize("solver", [Banach(), ANDERSON, Anderson(), Newton()])
    def test_float32_stops_where_only_rounding_is_left(self, solver):
        """Trap: thousands of steps that changed nothing, up to the limit, before float64 took over."""
        block, z = hard(), normal(24, 8, dtype=torch.float32)
        found = block.solve(z, solver=solver)
        assert found.converged.all()
        assert found.iterations.max() <= 60

    @pytest.mark.parametrize("solver", [Banach(), ANDERSON, Anderson(), Newton()])
    def test_what_overflows_in_float32_starts_again_in_float64(self, solver):
        g = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False))
        with torch.no_grad():
            g[0].weight.copy_(1e4 * torch.eye(2))
            g[2].weight.copy_(9e-5 * torch.eye(2))
        z = torch.tensor([[1e35, 1e35], [1.0, -1.0]])
        found = ResidualBlock(g).eval().solve(z, solver=solver)
        assert found.converged.all()
        torch.testing.assert_close(found.x, z / torch.where(z > 0, 1.9, 1.0))


class TestAgainstBanach:
    """Evaluations of g: Anderson and Newton against Banach."""

    FAMILIES: ClassVar = {
        "random": lambda d, c: linear_block(contraction(d, c)),
        "rotation": lambda d, c: linear_block(c * torch.linalg.qr(normal(d, d, seed=2))[0]),
        "symmetric": lambda d, c: linear_block(_with_spectrum(torch.linspace(-c, c, d, dtype=DOUBLE))),
        "positive": lambda d, c: linear_block(_with_spectrum(torch.linspace(0, c, d, dtype=DOUBLE))),
        "elu": lambda d, c: _mlp(d, c, nn.ELU),
        "relu": lambda d, c: _mlp(d, c, nn.ReLU),
        "maxmin": lambda d, c: _mlp(d, c, MaxMin),
        "sine": lambda d, c: _mlp(d, c, Sine),
    }

    @pytest.mark.no_cover
    @pytest.mark.parametrize("lipschitz", CONSTANTS)
    @pytest.mark.parametrize("d", [2, 5, 30])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_never_more_than_two_evaluations_beyond(self, family, d, lipschitz):
        block, z = self.FAMILIES[family](d, lipschitz), 2 * normal(12, d, seed=9)
        banach = block.solve(z, tolerance=1e-7, solver=Banach())
        for solver in (ANDERSON, Anderson(), Newton()):
            other = block.solve(z, tolerance=1e-7, solver=solver)
            assert other.converged.all()
            assert (other.iterations - banach.iterations).max() <= 2

    @all_solvers
    def test_no_evaluation_is_spent_on_what_float32_cannot_reach(self, solver):
        """Trap: x is ten times as long as z, so its rounding hides a residual that would be small enough for z."""
        weight = ["0x1.88c9eep-3", "0x1.813286p-3", "0x1.2625bap-1", "-0x1.8f97e6p-1"]
        block = linear_block(torch.tensor([float.fromhex(w) for w in weight]).view(2, 2))
        with torch.no_grad():
            block.g[0].bias = nn.Parameter(
                torch.tensor([float.fromhex("-0x1.98cabep-5"), float.fromhex("0x1.94f85ap-2")])
            )
        z = torch.tensor([[float.fromhex("0x1.2f8da4p+0"), float.fromhex("-0x1.ebd1b2p+0")]])
        found = block.solve(z, solver=solver)
        assert found.converged.all()
        assert found.iterations.max() <= (120 if isinstance(solver, Banach) else 10)

    def test_on_convolutions(self):
        block, shape = problem("conv", 0.9)
        z = 2 * normal(12, *shape, seed=9, dtype=torch.float32)
        banach, anderson = (block.solve(z, solver=s) for s in (Banach(), Anderson()))
        assert (anderson.iterations - banach.iterations).max() <= 2

    @pytest.mark.parametrize("family", ["random", "rotation", "symmetric", "positive"])
    def test_at_most_half_on_linear_maps_of_the_plane(self, family):
        block, z = self.FAMILIES[family](2, 0.9), 2 * normal(50, 2, seed=9)
        banach, anderson = (block.solve(z, tolerance=1e-6, solver=s) for s in (Banach(), ANDERSON))
        assert anderson.iterations.sum() <= 0.5 * banach.iterations.sum()

    @pytest.mark.parametrize("tolerance", [1e-4, 1e-6, 1e-8])
    def test_at_most_half_on_trained_blocks_of_the_plane(self, trained, tolerance):
        z, total = normal(300, 2, seed=9), {}
        for solver in (Banach(), ANDERSON):
            total[solver] = sum(int(b.solve(z, tolerance=tolerance, solver=solver).iterations.sum()) for b in trained)
        assert total[ANDERSON] <= 0.5 * total[Banach()]

    def test_where_banach_is_fast_its_steps_are_taken(self):
        """Bit for bit: a few more plain steps cost less than combining them."""
        block, z = linear_block(contraction(5, 0.1)), normal(12, 5, seed=9)
        banach, anderson = (block.solve(z, tolerance=1e-5, solver=s) for s in (Banach(), ANDERSON))
        assert torch.equal(anderson.x, banach.x)
        assert torch.equal(anderson.iterations, banach.iterations)

    def test_slow_samples_are_combined_and_fast_ones_are_not(self):
        """The rate is that of every sample, whenever it turns out to be slow."""
        slope = torch.tensor([1e-3, 0.95], dtype=DOUBLE)
        late = torch.tensor([[1.0, 0.0], [2.0, 0.0], [1.0, 1e-6]], dtype=DOUBLE)  # the slow part is small at first
        z, g = torch.cat([normal(2, 2), late]), lambda x, rows: x * slope
        banach, anderson = (
            solve(g, z, lipschitz=0.95, tolerance=1e-9, solver=s, reference=g) for s in (Banach(), Anderson())
        )
        torch.testing.assert_close(anderson.x, z / (1 + slope), atol=1e-9, rtol=0)
        assert anderson.iterations[[2, 3]].tolist() == banach.iterations[[2, 3]].tolist()
        assert (anderson.iterations[[0, 1, 4]] <= 14).all()
        assert (banach.iterations[[0, 1, 4]] >= 100).all()

    @pytest.mark.parametrize("limit", range(1, 8))
    def test_no_slow_sample_takes_more_evaluations_than_allowed(self, limit):
        """Samples become slow at different steps, also at the last one that is allowed."""
        slope = torch.tensor([0.05, 0.95], dtype=DOUBLE)
        z = torch.stack([torch.ones(9, dtype=DOUBLE), torch.logspace(-8, 0, 9, dtype=DOUBLE)], 1)
        g = lambda x, rows: x * slope  # noqa: E731
        found = solve(g, z, lipschitz=0.95, tolerance=1e-12, solver=Anderson(max_iterations=limit), reference=g)
        assert found.iterations.max() == min(limit, 6)

    def test_a_combination_that_fails_is_taken_back(self):
        """A g whose slope jumps misleads the extrapolation; the solve still ends where Banach's does."""
        g = of(lambda x: 0.95 * (x - 1).abs().sub(0.7).abs() * torch.tensor([1.0, -1.0], dtype=x.dtype))
        z = 5 * normal(200, 2, seed=4)
        banach, anderson = (
            solve(g, z, lipschitz=0.95, tolerance=1e-9, solver=s, reference=g) for s in (Banach(), Anderson())
        )
        assert anderson.converged.all()
        torch.testing.assert_close(anderson.x, banach.x, atol=1e-8, rtol=0)

    @pytest.mark.parametrize("lipschitz", [0.3, 0.7, 0.9])
    @pytest.mark.parametrize("d", [1, 2, 5])
    def test_at_its_worst_two_evaluations_beyond_what_the_contraction_promises(self, d, lipschitz):
        """A g full of kinks, where every extrapolation misleads: L^n is kept but for two evaluations."""
        q = torch.linalg.qr(normal(d, d, seed=1))[0]

        def g(x, rows):
            y = x @ q.T
            return lipschitz * (y - 2 * torch.round(y / 2)).abs() @ q

        z, tolerance = 4 * normal(400, d, seed=7), 1e-8
        found = solve(g, z, lipschitz=lipschitz, tolerance=tolerance, solver=Anderson(), reference=g)
        assert found.converged.all()
        # Banach's first evaluation gives a residual of ||g(z)||, every other one L times the last.
        start, target = g(z, None).norm(dim=1), 0.5 * tolerance * (1 - lipschitz)
        promised = 1 + torch.ceil(torch.log(target / start) / math.log(lipschitz)).clamp_min(0)
        assert (found.iterations - promised).max() <= 2

    def test_memory_of_one_is_enough_for_one_dimension(self):
        found = linear_block(torch.tensor([[0.97]], dtype=DOUBLE)).solve(
            normal(5, 1), tolerance=1e-9, solver=Anderson(memory=1, affine=False)
        )
        assert found.iterations.max() <= 4


def _with_spectrum(values):
    q = torch.linalg.qr(normal(len(values), len(values), seed=2))[0]
    return q @ torch.diag(values) @ q.T


def _mlp(d, c, activation):
    torch.manual_seed(1)
    g = contractive_mlp(d, (32, 32), lipschitz=c, activation=activation)
    return rouse_(ResidualBlock(g), weight=8.0).double().eval()


class TestFailure:
    @solvers
    def test_solve_reports_and_inverse_raises(self, solver):
        """Trap: a fixed number of iterations without a test."""
        block, z = linear_block(0.9 * torch.eye(2, dtype=DOUBLE)), torch.ones(3, 2, dtype=DOUBLE)
        few = replace(solver, max_iterations=1)
        found = block.solve(z, tolerance=1e-6, solver=few)
        assert not found.converged.any()
        assert found.iterations.tolist() == [1] * 3
        truth = z / 1.9
        assert ((found.x - truth).norm(dim=1) <= found.error_bound).all()
        with pytest.raises(
            ConvergenceError,
            match=r"not proven to 1.0e-06 for 3 of 3 samples: error bound \d.\de[+-]\d\d after 1 iteration. "
            "Allow a larger tolerance or more iterations",
        ) as raised:
            block.inverse(z, tolerance=1e-6, solver=few)
        assert isinstance(raised.value.solution, Solution)
        assert raised.value.tolerance == 1e-6

    @pytest.mark.parametrize("limit", [1, 3, 7])
    @pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
    @pytest.mark.parametrize("kind", [Banach, Anderson, Newton])
    def test_no_sample_takes_more_evaluations_than_allowed(self, kind, dtype, limit):
        """Also where float64 goes on after float32 has stalled."""
        block, shape = problem("mlp", 0.97)
        found = block.to(dtype).solve(
            10 * normal(20, *shape, dtype=dtype), tolerance=1e-13, solver=kind(max_iterations=limit)
        )
        assert found.iterations.max() <= limit

    @solvers
    def test_without_a_contraction_nothing_is_proven(self, solver):
        g, z = of(lambda x: 0.5 * x), torch.ones(2, 2, dtype=DOUBLE)
        found = solve(g, z, lipschitz=None, tolerance=1e-3, solver=solver, reference=g)
        assert torch.isinf(found.error_bound).all()
        assert not found.converged.any()
        torch.testing.assert_close(found.x, z / 1.5, atol=1e-3, rtol=0)
        sentence = str(ConvergenceError(found, 1e-3, None))
        assert "No contraction is proven (no bound of Lip(g) is known): see certify(model)." in sentence
        assert str(ConvergenceError(found, 1e-3, math.inf)) == sentence
        sentence = str(ConvergenceError(found, 1e-3, 1.23456))
        assert "No contraction is proven (Lip(g) <= 1.235): see certify(model). tighten_(model) repairs it " in sentence
        assert sentence.endswith("where they are not, use constrain_(g) and train.")

    @solvers
    def test_an_expanding_map_ends_at_its_limit_without_a_proof(self, solver):
        g = of(lambda x: -1.5 * x)
        found = solve(g, torch.ones(1, 2), lipschitz=1.5, tolerance=1e-3, solver=solver, reference=g)
        assert not found.converged.any()
        assert found.iterations.max() <= 400

    @solvers
    def test_a_g_that_gives_nan_is_never_proven(self, solver):
        """Only the sample that meets it suffers."""
        g = of(lambda x: torch.where(x > 100, math.nan, 0.5 * torch.sin(x)))
        z = torch.tensor([[1.0], [200.0]], dtype=DOUBLE)
        found = solve(g, z, lipschitz=0.5, tolerance=1e-6, solver=solver, reference=g)
        assert found.converged.tolist() == [True, False]
        assert torch.isinf(found.error_bound[1])

    def test_an_error_names_its_place_outermost_first(self):
        found = Solution(torch.zeros(1, 2), torch.tensor([5]), torch.tensor([0.5]), torch.tensor([False]))
        error = ConvergenceError(found, 1e-6, 0.9).at("transform 1 of 2").at("stage 0 of 3")
        assert "the inverse of stage 0 of 3, transform 1 of 2 is not proven" in str(error)
        assert "or call .double() on model and code" in str(error)

    def test_a_report_reads_as_a_sentence(self):
        found = linear_block(contraction(3, 0.5)).solve(normal(4, 3), tolerance=1e-6)
        assert str(found).startswith("4 of 4 samples proven, largest error bound ")

    def test_a_report_without_a_proof_says_so_and_why(self):
        coupling, z = AdditiveCoupling(nn.Linear(1, 1)), normal(3, 2).float()
        coupling.conditioner.register_forward_hook(lambda module, inputs, output: None)
        words = (
            "3 of 3 samples solved, not proven (Linear has forward hooks, which may change its function; remove them)"
        )
        assert str(coupling.solve(z)).startswith(f"{words}, largest error bound ")
        assert str(Chain(coupling).solve(z)).startswith(f"{words}, block by block; ")

    @pytest.mark.parametrize(
        ("make", "sentence"),
        [
            (lambda: Banach(max_iterations=0), "max_iterations must be at least 1; got 0"),
            (lambda: Anderson(max_iterations=-3), "max_iterations must be at least 1; got -3"),
            (lambda: Anderson(memory=0), "memory must be at least 1; got 0"),
        ],
    )
    def test_bad_settings_get_a_sentence(self, make, sentence):
        with pytest.raises(ValueError, match=sentence):
            make()


class TestPrecision:
    @solvers
    def test_where_a_coarse_g_stalls_the_last_steps_run_in_float64(self, solver):
        """Trap: half precision stalls near 1e-3. Coarse iterations are allowed, the proof is not coarse."""
        block, shape = problem("mlp", 0.9)
        z, exact = normal(30, *shape, dtype=torch.float32), []

        def coarse(x, rows):
            return block.g(x).bfloat16().float()

        def reference(x, rows):
            exact.append(x.dtype)
            return block.reference(x) - x

        found = solve(coarse, z, lipschitz=0.9, tolerance=2e-5, solver=solver, reference=reference)
        assert found.x.dtype == torch.float32
        assert found.converged.all()
        assert set(exact) == {DOUBLE}
        assert len(exact) > 3
        only_coarse, _ = solver.run(coarse, z, z, torch.full((30,), 1e-7), 0.9, 100)
        assert (only_coarse - found.x).norm(dim=1).max() > 1e-3

    @all_solvers
    def test_what_float32_cannot_hold_is_refused_with_the_remedy(self, solver):
        block, shape = problem("mlp", 0.9)
        z = 100 * normal(5, *shape, dtype=torch.float32)
        with pytest.raises(ConvergenceError, match="or call .double\\(\\) on model and code"):
            block.inverse(z, tolerance=1e-9, solver=solver)
        assert block.double().solve(z.double(), tolerance=1e-9, solver=solver).converged.all()

    def test_default_tolerances_are_per_sample_and_respect_the_type(self):
        z = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
        assert default_tolerance(z, 0.5).tolist() == pytest.approx([1e-5, 2e-6])
        assert default_tolerance(z.double(), 0.5).tolist() == pytest.approx([1e-10, 2e-11], rel=1e-6)
        assert default_tolerance(z.requires_grad_(), 1.0).requires_grad is False

    def test_where_no_contraction_goes_nothing_is_allowed_for_the_size_of_x(self):
        """Trap: x ran away in float32, which can hold it to 1e13 only, and came half way back in float64."""

        class Runaway(Solver):
            max_iterations = None

            affine = False

            def run(self, g, z, start, target, contraction, limit):
                return torch.full_like(z, 1e10 if z.dtype == DOUBLE else 1e20), torch.ones(len(z), dtype=torch.long)

        g = of(lambda x: 3 * x)  # asserted to be a contraction by 0.9
        z = torch.ones(2, 3)
        found = solve(g, z, lipschitz=0.9, tolerance=None, solver=Runaway(), reference=g)
        assert not found.converged.any()

    def test_iteration_limit_is_what_the_contraction_needs(self):
        assert 0.5 ** (iteration_limit(0.5, 1.0, 1e-6) - 10) <= 1e-6
        assert 0.5 ** (iteration_limit(0.5, 1.0, 1e-6) - 11) > 1e-6
        assert iteration_limit(1.0, 1.0, 1e-6) == 200
        assert iteration_limit(0.5, 1e-9, 1e-6) == iteration_limit(0.0, 1.0, 1e-6) == 10
        assert (
            1000 < iteration_limit(0.5, math.inf, 0.0) < 3000
        )  # the norm of a huge code, a tolerance below all floats

"""The accelerated inverse: known answers, the validity of its proof, and what it refuses."""

import copy

import pytest
import torch
from torch import nn

from iresnet import (
    ActNorm,
    Banach,
    Chain,
    InjectivePad,
    LipSwish,
    MaxMin,
    ResidualBlock,
    Sine,
    Squeeze,
    Standardise,
    constrain_,
    contractive_convnet,
    contractive_mlp,
)
from iresnet.branch import PreparedBranch, convolution, linearise, try_parse
from iresnet.evaluate import solving
from iresnet.inverse import decoder, ordinary
from iresnet.inverse.arithmetic import Arithmetic
from iresnet.inverse.inverter import Inverter
from iresnet.inverse.refinement import Schedule
from iresnet.inverse.refusal import why_not_accelerated
from iresnet.lipschitz import refresh_
from iresnet.models.unconstrained import UnconstrainedBlock
from iresnet.spectral import Geometry, absolute_norm, dense_matrix
from iresnet.transforms.elementary import Flatten
from iresnet.transforms.mixing import InvertibleConv1x1
from tests.zoo import contraction, linear_block, normal, rouse_

A = contraction(3, 0.8)
INVERSE = torch.linalg.inv(torch.eye(3, dtype=A.dtype) + A)

LOW = [Arithmetic("float16", "im2col"), Arithmetic("bfloat16", "shift_and_add"), Arithmetic("float32", "auto")]


def images(activation=nn.ELU):
    """A small chain of the paper's kind, layers at their coefficient, on images of 3 x 8 x 8."""

    def block(channels):
        g = contractive_convnet(channels, channels, coefficient=0.9, preactivation=True, activation=activation)
        return ResidualBlock(g)

    chain = Chain(
        Standardise([0.5] * 3, [0.25] * 3), InjectivePad(1), ActNorm(4), block(4), Squeeze(), ActNorm(16), block(16),
        ActNorm(16),
    )  # fmt: skip
    rouse_(chain, weight=8.0)
    return chain.eval()


@pytest.fixture(scope="module")
def chain():
    torch.manual_seed(0)
    return images()


@pytest.fixture(scope="module")
def pair(chain):
    """Images and their codes in float64."""
    x = torch.rand(6, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return x, chain.reference(x)


# --------------------------------------------------------------------------------------------------- known answers


def test_the_inverse_of_linear_blocks_is_linear_algebra():
    z = normal(5, 3)
    solution = Inverter(Chain(linear_block(A), linear_block(A)), z, tolerance=1e-9).attempt(z)
    torch.testing.assert_close(solution.x, z @ (INVERSE @ INVERSE).T, atol=1e-8, rtol=0)
    assert bool(solution.converged.all())
    assert solution.proven


def test_a_lone_block_in_half_precision_reaches_float64():
    z = normal(5, 3)
    solution = Inverter(linear_block(A), z, tolerance=None, arithmetic=Arithmetic("bfloat16")).attempt(z)
    torch.testing.assert_close(solution.x, z @ INVERSE.T, atol=1e-9, rtol=0)
    assert bool(solution.converged.all())


@pytest.mark.parametrize("arithmetic", [None, *LOW], ids=str)
def test_images_are_recovered_with_a_proof(chain, pair, arithmetic):
    x, z = pair
    solution = Inverter(chain, z, arithmetic=arithmetic).attempt(z)
    assert bool(solution.converged.all())
    assert solution.proven
    assert solution.x.dtype == torch.float64
    assert float(solution.largest_block_bound.max()) <= 1e-5
    assert float(solution.measured_error(x).max()) <= float(solution.composed_bound.max())


@pytest.mark.parametrize("way", [convolution.im2col, convolution.im2col_by_row, convolution.shift_and_add])
@pytest.mark.parametrize(
    ("kernel", "padding", "bias"), [(3, 1, True), (1, 0, False), (5, 2, False), ((3, 1), (0, 2), True)]
)
def test_every_convolution_method_gives_the_same_result(way, kernel, padding, bias):
    layer = nn.Conv2d(3, 5, kernel, padding=padding, bias=bias, dtype=torch.float64)
    (step,), values, x = try_parse(layer).program.steps, try_parse(layer).tensors(), normal(2, 3, 6, 7)
    with torch.no_grad():
        torch.testing.assert_close(way(step, x, values), layer(x), atol=1e-12, rtol=1e-12)
        values[0] = convolution.pack_weight(values[0])
        torch.testing.assert_close(way(step, x, values), layer(x), atol=1e-12, rtol=1e-12)


def test_a_convolution_method_that_runs_out_of_memory_is_not_used(monkeypatch):
    layer = nn.Conv2d(3, 5, 3, padding=1, dtype=torch.float64)
    (step,), values, x = try_parse(layer).program.steps, try_parse(layer).tensors(), normal(2, 3, 6, 7)

    def large(*arguments):
        raise torch.cuda.OutOfMemoryError("no")

    ways = {name: convolution.native if name == "native" else large for name in convolution.CONVOLUTIONS}
    monkeypatch.setattr(convolution, "CONVOLUTIONS", ways)
    assert convolution.fastest_convolution(step, x, values) is convolution.native


@pytest.mark.parametrize(
    "activation",
    [nn.ELU(), nn.ELU(0.5), nn.Tanh(), nn.Softplus(1.0, 40.0), nn.ReLU(), nn.Identity(), Sine(2.0), LipSwish()],
    ids=str,
)
def test_the_tangent_is_the_jacobian(activation):
    g = nn.Sequential(activation, nn.Linear(4, 4), activation, nn.Linear(4, 4, bias=False)).double()
    x, v = normal(1, 4, seed=2), normal(1, 4, seed=3)
    steps, values = try_parse(g).program, try_parse(g).tensors()
    with torch.no_grad():
        y, slopes = PreparedBranch(steps, values).value_and_slopes(x)
        moved = PreparedBranch(steps, values).jvp(v, slopes)
    jacobian = torch.autograd.functional.jacobian(g, x).reshape(4, 4)
    torch.testing.assert_close(y, g(x).detach())
    torch.testing.assert_close(moved, v @ jacobian.T)
    assert linearise(g, x)[0].shape == y.shape


# --------------------------------------------------------------------------------------------------- what is proven


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "schedule", [Schedule(1, ()), Schedule(3, (1,)), Schedule(4, (4, 2)), Schedule(3, (3,), single=(2,))], ids=str
)
def test_no_block_bound_lies_below_the_error(seed, schedule):
    torch.manual_seed(seed)
    block = rouse_(ResidualBlock(contractive_mlp(6, (12,), lipschitz=0.9)), seed).eval()
    x = 10 ** float(normal(1, seed=seed)) * normal(32, 6, seed=seed)
    with torch.no_grad():
        z = block.reference(x)
    for working in ("float16", "bfloat16", "float32"):
        if schedule.single and working == "float32":
            continue  # float32 has nothing between itself and float64
        solution = Inverter(block, z, schedule=schedule, arithmetic=Arithmetic(working, proof="residual")).attempt(z)
        assert bool((solution.measured_error(x) <= solution.largest_block_bound + 1e-13).all())
        assert bool((solution.converged == (solution.largest_block_bound <= 1e-5)).all())


@pytest.mark.parametrize("tolerance", [1e-5, None])
def test_a_code_that_overflows_does_not_affect_the_others(tolerance):
    torch.manual_seed(0)
    blocks = [rouse_(ResidualBlock(contractive_mlp(6, (12,), lipschitz=0.9)), i).eval() for i in range(3)]
    z = normal(4, 6)
    z[2] *= 1e6  # more than half precision holds
    inverter = Inverter(Chain(*blocks), z, tolerance=tolerance, arithmetic=Arithmetic("float16", "native"))
    assert inverter.attempt(z).converged.tolist() == [True, True, False, True]
    assert bool(inverter.solve(z).converged.all())


def test_the_report_is_that_of_the_chain(chain, pair):
    x, z = pair
    inverter = Inverter(chain, z, tolerance=1e-9)
    ours, ordinary = inverter.attempt(z), inverter.transform.solve(z, tolerance=1e-9)
    torch.testing.assert_close(ours.x, ordinary.x, atol=1e-7, rtol=0)
    residual = (chain.reference(ours.x) - z).flatten(1).norm(dim=1)
    torch.testing.assert_close(ours.code_residual, residual, atol=1e-12, rtol=1e-3)
    assert ours.proven == ordinary.proven
    assert int(ours.iterations[0]) == sum(s.evaluations for s in inverter.schedules)
    # Both carry block bounds through the same later inverses.
    assert float((ours.composed_bound / ours.largest_block_bound).min()) >= 1
    assert bool((ours.measured_error(x) <= ours.composed_bound).all())


def test_bounds_are_carried_through_every_later_inverse():
    z = normal(4, 3)
    solution = Inverter(Chain(linear_block(A), linear_block(A)), z, schedule=Schedule(4, ())).attempt(z)
    blocks = Chain(linear_block(A), linear_block(A))
    expansion = blocks[0].stretch((3,)).inverse
    first = Inverter(linear_block(A), z, schedule=Schedule(4, ())).attempt(z)
    second = Inverter(linear_block(A), first.x, schedule=Schedule(4, ())).attempt(first.x)
    carried = second.composed_bound + expansion * first.composed_bound
    torch.testing.assert_close(solution.composed_bound, carried, atol=1e-12, rtol=1e-9)


def test_a_code_off_the_image_of_the_padding_is_projected(chain, pair):
    _, z = pair
    off = z + 0.1 * normal(*z.shape, seed=7)
    inverter = Inverter(chain, z)
    ours, ordinary = inverter.solve(off), inverter.transform.solve(off, tolerance=1e-5)
    assert bool(ours.converged.all())
    torch.testing.assert_close(ours.x, ordinary.x, atol=1e-4, rtol=0)
    assert float(ours.code_residual.min()) > 1e-3  # it says so


def test_an_asserted_constant_proves_nothing():
    block = ResidualBlock(nn.Sequential(nn.Linear(3, 3, bias=False)), lipschitz=0.9)
    with torch.no_grad():
        block.g[0].weight.copy_(A)
    solution = Inverter(block, normal(2, 3)).solve(normal(2, 3))
    assert bool(solution.converged.all())
    assert not solution.proven


def test_evaluation_takes_it_on_a_gpu_and_reports_the_same(chain, pair, monkeypatch):
    _, z = pair
    model = copy.deepcopy(chain).double()
    monkeypatch.setattr(solving, "CHUNK", 4)
    plain = solving._solve(model, z)
    monkeypatch.setattr(decoder, "_on_gpu", lambda z: True)
    made = []
    monkeypatch.setattr(decoder, "Inverter", lambda *a, **o: made.append(Inverter(*a, **o)) or made[-1])
    ours = solving._solve(model, z)
    assert len(made) == 1
    assert bool(ours.converged.all())
    assert float(ours.largest_block_bound.max()) < 1e-9
    torch.testing.assert_close(ours.x, plain.x, atol=1e-8, rtol=0)
    for options in ({"solver": Banach()}, {"tolerance": 1e-6, "solver": Banach()}):
        solving._solve(model, z, **options)
    solving._solve(images(MaxMin).double(), z)
    solving._solve(copy.deepcopy(chain).float(), z.float())
    assert [bool(i.reason) for i in made] == [False]


# --------------------------------------------------------------------------------------------------- proof by states


def test_the_forward_states_of_x_are_solutions():
    """All blocks but the last have no residual; the last has that of its code, and so has the whole."""
    chain, z = Chain(linear_block(A), linear_block(A), ActNorm(3).double()), normal(4, 3)
    inverter = Inverter(chain, z, tolerance=1e-2, arithmetic=Arithmetic("bfloat16", "native"))
    assert inverter.proves_forward
    solution = inverter.attempt(z)
    one = torch.eye(3, dtype=A.dtype) + A
    residual = (solution.x @ (one @ one).T - z).norm(dim=1)
    gap = 1 - chain[0].bound((3,)).value
    torch.testing.assert_close(solution.code_residual, residual, atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(solution.largest_block_bound, residual / gap, atol=1e-10, rtol=1e-9)
    torch.testing.assert_close(solution.composed_bound, residual / gap**2, atol=1e-9, rtol=1e-9)
    exact = z @ (INVERSE @ INVERSE).T
    assert bool(((solution.x - exact).norm(dim=1) <= solution.composed_bound).all())


@pytest.mark.parametrize("seed", range(3))
def test_every_state_is_within_the_tolerance_of_its_solution(seed):
    torch.manual_seed(seed)
    blocks = [rouse_(ResidualBlock(contractive_mlp(6, (12,), lipschitz=0.9)), seed + i).eval() for i in range(4)]
    chain, z = Chain(*blocks), 3 * normal(8, 6, seed=seed)
    inverter = Inverter(chain, z, tolerance=1e-3, arithmetic=Arithmetic("float16", "native"))
    solution = inverter.attempt(z)
    assert inverter.proves_forward
    assert bool(solution.converged.all())
    states = [solution.x]
    with torch.no_grad():
        for block in blocks[:-1]:
            states.append(block.reference(states[-1]))
    for block, x, code in zip(blocks, states, [*states[1:], z], strict=True):
        exact = copy.deepcopy(block).double().solve(code, tolerance=1e-11).x
        assert float((x - exact).norm(dim=1).max()) <= float(solution.largest_block_bound.max()) <= 1e-3


def test_one_evaluation_in_float64_proves_and_gives_the_code_residual(chain, pair, monkeypatch):
    _, z = pair
    inverter = Inverter(chain, z)
    blockwise = inverter.with_code("float64")
    blockwise.proves_forward = False
    counts, plain = [], PreparedBranch.__call__
    monkeypatch.setattr(PreparedBranch, "__call__", lambda self, x: counts.append(x.dtype) or plain(self, x))
    forward = inverter.attempt(z)
    few, _ = counts.count(torch.float64), counts.clear()
    by_blocks = blockwise.attempt(z)
    assert counts.count(torch.float64) - few == len(inverter.schedules)
    assert bool((forward.x == by_blocks.x).all())
    torch.testing.assert_close(forward.code_residual, by_blocks.code_residual, atol=1e-12, rtol=1e-6)


def test_where_errors_add_up_every_block_has_its_own_proof():
    """Blocks that all stretch by 1.8: what is left of the first is multiplied by all that follow."""
    stretch, z, plan = linear_block(0.8 * torch.eye(3, dtype=A.dtype)), normal(4, 3), Schedule(12, ())
    for depth in (1, 12):
        chain = Chain(*(copy.deepcopy(stretch) for _ in range(depth)))
        inverter = Inverter(chain, z, tolerance=2.0, schedule=plan, arithmetic=Arithmetic("float32", "native"))
        solution = inverter.attempt(z)
        assert bool(solution.converged.all())
        assert inverter.proves_forward == (depth == 1)
        assert (float(solution.code_residual.max()) / 0.2 > 2.0) == (depth == 12)


def test_the_forward_proof_needs_the_code_residual(chain, pair):
    _, z = pair
    inverter = Inverter(chain, z)
    assert inverter.proves_forward
    assert not inverter.with_code("none").proves_forward
    assert not Inverter(chain, z, arithmetic=Arithmetic("float32", "native", proof="residual")).proves_forward


# --------------------------------------------------------------------------------------------------- float32 between


def test_residuals_in_float32_refine_as_well(chain, pair):
    x, z = pair
    inverter = Inverter(chain, z, tolerance=1e-6, arithmetic=Arithmetic("float16", "im2col"))
    assert any(s.single for s in inverter.schedules)
    solution = inverter.attempt(z)
    assert bool(solution.converged.all())
    assert float(solution.measured_error(x).max()) <= float(solution.composed_bound.max())


# --------------------------------------------------------------------------------------------------- weights and slopes


def flat(channels):
    """A block whose layers have nearly all their singular values at the coefficient: the hardest to invert."""
    block = ResidualBlock(contractive_convnet(channels, channels, coefficient=0.95, preactivation=True))
    for name, p in block.named_parameters():
        if name.endswith("original"):
            with torch.no_grad():
                p.mul_(0.01)
                p[:, :, p.shape[2] // 2, p.shape[3] // 2] += 3 * torch.linalg.qr(torch.randn(len(p), len(p)))[0]
    refresh_(block, settle=True)
    return block.eval()


@pytest.mark.parametrize("shape", [(5, 7), (4, 3, 3, 3), (6, 2, 1, 1), (6, 2, 3, 3)])
def test_the_norm_of_absolute_values_is_bounded_within_a_factor_of_two(shape):
    weight, groups = normal(*shape), 2 if shape == (6, 2, 3, 3) else 1
    if len(shape) == 2:
        layer, size = nn.Linear(7, 5), ()
    else:
        layer, size = nn.Conv2d(shape[1] * groups, shape[0], shape[2], padding=shape[2] // 2, groups=groups), (5, 6)
    dense = dense_matrix(weight.abs(), Geometry.of(layer), size)
    norm = float(torch.linalg.matrix_norm(dense, 2))
    assert norm <= absolute_norm(weight, groups) <= 2 * norm


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ELU(0.5)], ids=str)
def test_a_slope_may_jump(activation):
    block = rouse_(ResidualBlock(constrain_(nn.Sequential(nn.Linear(4, 4), activation, nn.Linear(4, 4)), 0.8))).eval()
    inverter = Inverter(block, (5, 4), arithmetic=Arithmetic("float16"))
    assert bool(inverter.attempt(normal(5, 4)).converged.all())


@pytest.mark.parametrize("working", ["float16", "float32"])
@pytest.mark.parametrize("size", [1.0, 300.0])
def test_flat_weights_are_proven(working, size):
    torch.manual_seed(1)
    block, x = flat(8), size * normal(4, 8, 6, 6)
    with torch.no_grad():
        z = block.reference(x)
    assert block.bound((8, 6, 6)).value > 0.85
    inverter = Inverter(block, z, arithmetic=Arithmetic(working))
    solution = inverter.attempt(z)
    assert bool(solution.converged.all())
    assert bool((solution.measured_error(x) <= solution.largest_block_bound).all())
    (plan,) = inverter.schedules
    assert bool(plan.single) == (working == "float16")
    assert plan.exact_evaluations < plan.extended(1).exact_evaluations


# --------------------------------------------------------------------------------------------------- the code residual


def test_the_code_residual_can_be_left_out(chain, pair):
    _, z = pair
    for working in ("float16", "float32"):
        inverter = Inverter(chain, z, tolerance=1e-4, arithmetic=Arithmetic(working))
        without, evaluated = inverter.with_code("none").attempt(z), inverter.attempt(z)
        assert bool((without.x == evaluated.x).all())
        assert bool(without.converged.all())
        assert bool(without.code_residual.isnan().all())
        residual = (inverter.transform.reference(evaluated.x) - z).flatten(1).norm(dim=1)
        torch.testing.assert_close(evaluated.code_residual, residual, atol=1e-12, rtol=1e-6)


# --------------------------------------------------------------------------------------------------- schedules, batches


def test_too_short_a_schedule_falls_back_to_the_chain(chain, pair):
    x, z = pair
    inverter = Inverter(chain, z, schedule=Schedule(1, ()))
    assert not bool(inverter.attempt(z).converged.any())
    solution = inverter.solve(z)
    assert bool(solution.converged.all())
    assert float(solution.measured_error(x).max()) < 1e-4


def test_a_tolerance_that_cannot_be_reached_is_reported(chain, pair):
    _, z = pair
    solution = Inverter(chain, z, tolerance=1e-18).solve(z)
    assert not bool(solution.converged.any())


def test_only_unproven_samples_are_solved_again(monkeypatch):
    z = torch.cat([1e-6 * normal(3, 3), normal(2, 3)])
    inverter = Inverter(linear_block(A), z, schedule=Schedule(2, ()), arithmetic=Arithmetic("float32"))
    monkeypatch.setattr(inverter, "_run", lambda z, more: lambda z: inverter._compute(z, 0))
    seen, plain = [], ordinary.solve
    monkeypatch.setattr(ordinary, "solve", lambda t, z, **o: seen.append(len(z)) or plain(t, z, **o))
    solution = inverter.solve(z)
    assert seen == [2]
    assert bool(solution.converged.all())
    torch.testing.assert_close(solution.x, z @ INVERSE.T, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rows", [1, 6, 8])
def test_batches_of_other_sizes_are_split_and_padded(chain, pair, rows):
    _, z = pair
    inverter = Inverter(chain, z)
    codes = torch.cat([z, z])[:rows]
    solution = inverter.solve(codes)
    assert len(solution.x) == len(solution.converged) == len(solution.iterations) == rows
    torch.testing.assert_close(solution.x, torch.cat([inverter.solve(z).x] * 2)[:rows], atol=1e-5, rtol=0)


def test_a_shape_can_replace_the_example(chain):
    inverter = Inverter(chain, (4, 16, 4, 4))
    assert bool(inverter.solve(normal(4, 16, 4, 4).float()).converged.all())


def test_calibration_needs_more_for_harder_weights():
    z = normal(8, 3)
    easy, hard = (Inverter(linear_block(contraction(3, c)), z).schedules[0].coarse for c in (0.1, 0.9))
    assert easy < hard


def test_the_weights_are_copied_at_construction():
    block, z = linear_block(A), normal(2, 3)
    inverter = Inverter(block, z, tolerance=1e-9)
    with torch.no_grad():
        block.g[0].weight.mul_(0.5)
    torch.testing.assert_close(inverter.solve(z).x, z @ INVERSE.T, atol=1e-8, rtol=0)


def test_what_is_inverted_cannot_be_changed():
    """Trap: the branches in use were views of it, and an inverse of blocks that expand was called proven."""
    chain, z = Chain(rouse_(ResidualBlock(contractive_mlp(3, (8,), lipschitz=0.9)))).double().eval(), normal(4, 3)
    inverter = Inverter(chain, z)
    with torch.no_grad():
        for p in inverter.transform.parameters():
            p.mul_(3)
    found = inverter.solve(z)
    assert found.converged.all()
    assert (chain.reference(found.x) - z).norm(dim=1).max() < 1e-5


def test_a_hook_of_all_modules_after_the_preparation_proves_nothing():
    chain, z = Chain(ActNorm(3), linear_block(A)).double().eval(), normal(2, 3)
    inverter = Inverter(chain, z)
    assert inverter.solve(z).proven
    hook = nn.modules.module.register_module_forward_hook(lambda m, a, y: 3 * y if type(m) is ActNorm else None)
    try:
        for found in (inverter.solve(z), inverter.attempt(z)):
            assert not found.proven
            assert "global forward hooks" in found.reason
    finally:
        hook.remove()
    assert inverter.solve(z).proven


# --------------------------------------------------------------------------------------------------- refusals


class Free(nn.Module):
    def forward(self, x):
        return 0.5 * x


@pytest.mark.parametrize(
    ("transform", "sentence"),
    [
        (ResidualBlock(Free(), lipschitz=0.5), "has a g that is not made of known layers"),
        (ResidualBlock(constrain_(nn.Sequential(nn.Linear(4, 4), MaxMin()), 0.5)), "without a slope, maxmin"),
    ],
)  # fmt: skip
def test_a_transform_that_is_not_accelerated_says_why_and_is_solved(transform, sentence):
    inverter = Inverter(Chain(transform.double().eval()), (3, 4))
    assert sentence in inverter.reason
    assert bool(inverter.solve(normal(3, 4)).converged.all())
    with pytest.raises(ValueError, match="attempt needs a transform that is accelerated"):
        inverter.attempt(normal(3, 4))


CIRCULAR = constrain_(nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), 0.5)


@pytest.mark.parametrize(
    ("g", "reason"),
    [
        (contractive_mlp(4, context=2), "has a g that takes a context."),
        (
            constrain_(nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), 0.5),
            "has a g with circular or asymmetric padding.",
        ),
    ],
)
def test_the_reason_names_what_of_g_cannot_be_accelerated(g, reason):
    assert why_not_accelerated(ResidualBlock(g)) == f"not accelerated: transform 0, ResidualBlock, {reason}"


def test_an_unknown_transform_is_not_accelerated():
    class Named(Chain):
        """Adds nothing: it is a chain."""

    class Own(Chain):
        def steps(self):
            return super().steps()[::-1]

    assert Inverter(Named(linear_block(A)), (2, 3)).reason == ""
    assert "is a Chain with its own steps" in Inverter(Own(linear_block(A)), (2, 3)).reason
    words = "is neither a residual block nor a closed form"
    assert words in Inverter(Chain(UnconstrainedBlock(linear_block(A).g)), (2, 3)).reason


def test_a_block_that_is_no_contraction_is_not_accelerated():
    block = linear_block(A)
    with torch.no_grad():
        block.g[0].weight.mul_(2)
    inverter = Inverter(block, (2, 3))
    assert "not a proven contraction, Lip(g) <= 1.6" in inverter.reason
    assert not bool(inverter.solve(normal(2, 3)).converged.any())


def test_bad_arguments_are_refused(chain):
    with pytest.raises(ValueError, match="tolerance must be positive; got 0"):
        Inverter(chain, (2, 16, 4, 4), tolerance=0.0)
    with pytest.raises(ValueError, match="working must be one of float16, bfloat16, float32; got 'int8'"):
        Arithmetic("int8")
    with pytest.raises(ValueError, match="exact must be one of auto, native"):
        Arithmetic(exact="fft")
    with pytest.raises(ValueError, match="at least one coarse evaluation and no negative number of terms; got 0"):
        Schedule(0)
    with pytest.raises(ValueError, match="proof must be one of forward, residual; got 'product'"):
        Arithmetic(proof="product")
    with pytest.raises(ValueError, match="code must be one of float64, none; got 'exact'"):
        Arithmetic(code="exact")
    with pytest.raises(ValueError, match=r"z must have shape \(batch, 16, 4, 4\)"):
        Inverter(chain, (2, 16, 4, 4)).solve(normal(2, 16, 8, 8))
    with pytest.raises(ValueError, match="example must be finite"):
        Inverter(chain, torch.full((2, 16, 4, 4), torch.nan))


def test_a_branch_without_chosen_functions_uses_native_convolutions():
    g = contractive_convnet(2, 3).double().eval()
    x = normal(1, 2, 4, 4)
    values = [t.detach() for t in try_parse(g).tensors()]
    torch.testing.assert_close(PreparedBranch(try_parse(g).program, values)(x), g(x).detach())


# --------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("working", ["float16", "bfloat16", "float32"])
def test_a_graph_computes_what_the_chain_does(chain, pair, working):
    x, z = (t.cuda() for t in pair)
    inverter = Inverter(copy.deepcopy(chain).cuda(), z, arithmetic=Arithmetic(working))
    first, second = inverter.attempt(z), inverter.attempt(z.flip(0))
    assert bool(first.converged.all())
    assert float(first.measured_error(x).max()) <= float(first.composed_bound.max())
    torch.testing.assert_close(second.x, first.x.flip(0), atol=1e-5, rtol=0)


@pytest.mark.gpu
def test_global_torch_settings_are_restored(chain, pair):
    before = (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision())
    Inverter(copy.deepcopy(chain).cuda(), pair[1].cuda())
    after = (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision())
    assert before == after


def test_mixing_and_a_flat_tail_are_inverted_too():
    torch.manual_seed(0)
    image = [Squeeze(), InvertibleConv1x1(4), ResidualBlock(contractive_convnet(4, 6))]
    chain = Chain(*image, Flatten((4, 3, 3)), ResidualBlock(contractive_mlp(36, (8,)))).double().eval()
    x = normal(3, 1, 6, 6, seed=1)
    solution = Inverter(chain, (3, 36)).solve(chain(x))
    assert bool(solution.converged.all())
    assert float(solution.measured_error(x).max()) < 1e-5

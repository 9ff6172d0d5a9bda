"""Inverses of multiscale flows and of all that presets build: prepared once, always proven."""

import copy
import gc
import math
import pickle
import weakref
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from iresnet import (
    ActNorm,
    Banach,
    Chain,
    ConvergenceError,
    DiagonalNormal,
    Flow,
    Hybrid,
    InvertibleConv1x1,
    Logit,
    MaxMin,
    Multiscale,
    ResidualBlock,
    Squeeze,
    constrain_,
    contractive_convnet,
    contractive_mlp,
    mlp_flow,
    tighten_,
)
from iresnet.branch import PreparedBranch, try_parse
from iresnet.cli.sample import _describe_time
from iresnet.data.builtin import schema_of
from iresnet.fixed_point import default_tolerance
from iresnet.float64 import Rounding
from iresnet.inverse import Arithmetic, Decoder, Inverter, Schedule, decoder, ordinary
from iresnet.inverse.refusal import why_not_accelerated
from iresnet.lipschitz import Concatenated, SpectralCap
from iresnet.models import build
from iresnet.multiscale import JoinScales, SplitHalves
from iresnet.presets import PRESETS
from iresnet.presets.reading import GROUPS
from iresnet.proof import SetAside, compose_bounds, error_bound, error_growth
from iresnet.transform import StackOperation, flat_steps, run_forward, run_inverse
from tests.zoo import contraction, linear_block, normal, rouse_

A = contraction(4, 0.6)


@cache
def flow_of(name, **changes):
    """The flow of a preset, narrow, with few blocks and for small images, their layers at their coefficients."""
    network, schema = PRESETS[name].network, schema_of(PRESETS[name].data.source)
    schema = replace(schema, shape=(schema.shape[0], 16, 16))
    settings = {"blocks": (1,) * len(network.blocks), "tail": min(network.tail, 1), "width": 4, "tail_width": 4}
    torch.manual_seed(0)
    flow = build(replace(network, **settings | changes), schema, "density")
    for m in flow.modules():
        if isinstance(m, ResidualBlock):
            rouse_(m, weight=8.0)
        if isinstance(m, ActNorm):
            nn.init.normal_(m.log_scale, std=0.1)
            nn.init.normal_(m.shift, std=0.1)
    return flow.eval()


#: Every preset, one with all that may be switched on as well.
FLOW: dict = {name: {} for name in GROUPS["flows"] if name in PRESETS} | {
    "cifar10-flow": {"mixing": True, "tail": 1, "preprocessing": "logit"}
}


#: Each of them, all but two in the slow tests.
EVERY = [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("mnist-flow", "cifar10-flow"))) for name in FLOW]


def codes_of(flow, count=3, dtype=torch.float64):
    return flow.base.rsample(count, torch.Generator().manual_seed(1)).detach().to(dtype)


def split(first=2.0, second=3.0):
    """Scales of one ActNorm each, (4) -> two numbers that leave early and two that are scaled once more."""
    stages = [ActNorm(4), ActNorm(2)]
    for t, scale in zip(stages, (first, second), strict=True):
        with torch.no_grad():
            t.log_scale.fill_(-torch.tensor(scale).log())
    return Multiscale(stages, (4,))


# --------------------------------------------------------------------------------------------------- paths


@pytest.mark.parametrize(
    ("transform", "shape"),
    [
        (split(), (4,)),
        (Multiscale([Squeeze()], (1, 8, 8)), (1, 8, 8)),
        (Chain(Squeeze(), Multiscale([Squeeze(), ActNorm(8), Chain()], (4, 4, 4)), ActNorm(64)), (1, 8, 8)),
        (Chain(Multiscale([Chain(ActNorm(4), split()), ActNorm(2)], (4,)), ActNorm(4)), (4,)),
    ],
    ids=["rows", "one stage", "images", "nested"],
)
def test_flat_steps_compute_the_transform(transform, shape):
    x = normal(2, *shape)
    z = rouse_(transform.double(), seed=3)(x)
    steps = list(flat_steps(transform))
    assert all(isinstance(step, StackOperation) or not step.parts() for step in steps)
    torch.testing.assert_close(run_forward(steps, x, lambda t, y: t(y)), z)
    torch.testing.assert_close(run_inverse(steps, z, lambda t, y: t.inverse(y)), x)


@pytest.mark.parametrize("bad", [-1.0, math.nan])
def test_what_is_no_bound_gives_no_bound(bad):
    """Trap: a negative Lip(F^-1) gave a negative error bound, which meets any tolerance."""
    r, exact = torch.ones(2, dtype=torch.float64), Rounding.of(0.0, 0.0, 1)
    column = torch.tensor([[bad], [0.0], [2.0]], dtype=torch.float64)
    assert error_bound(r, r, r, rounding=exact, inverse_lipschitz=bad).tolist() == [math.inf] * 2
    found = error_bound(r, r, r, rounding=exact, inverse_lipschitz=column)
    assert found[0].tolist() == [math.inf] * 2
    assert found[1].tolist() == [0.0] * 2
    assert found[2].tolist() == pytest.approx([2.0] * 2)
    assert error_growth([bad, 2.0, 0.0, 3.0]) == [1.0, math.inf, math.inf, 0.0]
    bounds = torch.tensor([[bad, 1.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    factors = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    assert compose_bounds(bounds, factors).tolist() == [math.inf, 3.0, 2.0]
    assert compose_bounds(bounds.abs().nan_to_num(1.0), bad * factors).tolist()[1] == math.inf


def test_channels_that_leave_early_have_their_own_stretch():
    # Behind the last step: what left early was stretched 2 times, the rest 2 x 3 or 2 x 0.1 times.
    assert error_growth([2.0, SetAside(1), 3.0, SetAside(-1), 5.0]) == [1.0, 2.0, 6.0]
    assert error_growth([2.0, SetAside(1), 0.1, SetAside(-1), 5.0]) == [1.0, 2.0, 2.0]
    for second in (3.0, 0.1):
        whole = split(2.0, second)
        splits = SetAside(SplitHalves().pushed), SetAside(JoinScales(whole).pushed)
        assert whole.stretch((4,)).inverse == pytest.approx(error_growth([2.0, splits[0], second, splits[1], 1.0])[-1])


# --------------------------------------------------------------------------------------------------- inverses


def test_a_split_of_linear_blocks_is_linear_algebra():
    b = contraction(2, 0.5, seed=1)
    chain = Chain(Multiscale([linear_block(A), linear_block(b)], (4,)), linear_block(A))
    one, other = (torch.linalg.inv(torch.eye(len(m), dtype=m.dtype) + m).T for m in (A, b))
    z = normal(5, 4)
    y = z @ one
    exact = torch.cat([y[:, :2], y[:, 2:] @ other], dim=1) @ one
    solution = Inverter(chain, z, tolerance=1e-9).attempt(z)
    torch.testing.assert_close(solution.x, exact, atol=1e-8, rtol=0)
    assert bool(solution.converged.all())
    assert bool(((solution.x - exact).norm(dim=1) <= solution.composed_bound).all())


@pytest.mark.no_cover
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("arithmetic", [None, Arithmetic("float16", "im2col")], ids=str)
def test_everything_that_presets_build_is_inverted_and_proven(name, arithmetic):
    flow = flow_of(name, **FLOW[name])
    z = codes_of(flow)
    inverter = Inverter(flow.transform, z, tolerance=1e-5, arithmetic=arithmetic)
    assert inverter.reason == ""
    ours, ordinary = inverter.attempt(z), inverter.transform.solve(z, tolerance=1e-7)
    assert bool(ours.converged.all())
    assert ours.proven
    assert float(ours.largest_block_bound.max()) <= 1e-5
    residual = (inverter.transform.reference(ours.x) - z).flatten(1).norm(dim=1)
    torch.testing.assert_close(ours.code_residual, residual, atol=1e-9, rtol=2e-2)
    distance = (ours.x - ordinary.x).flatten(1).norm(dim=1)
    assert bool((distance <= ours.composed_bound + ordinary.composed_bound).all())
    assert float(distance.max()) < 0.02  # of values up to 256


@pytest.mark.no_cover
@pytest.mark.parametrize("name", EVERY)
def test_nothing_is_read_back_while_it_is_computed(name):
    """What a CUDA graph asks for: the computation goes through on tensors that have no values."""
    flow = flow_of(name, **FLOW[name])
    z = codes_of(flow)
    inverter = Inverter(flow.transform, z, arithmetic=Arithmetic("float16", "im2col_by_row", graph=False))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        for more in range(2):
            x, converged, *_ = inverter._compute(mode.from_tensor(z), more)
    assert (len(x), tuple(converged.shape)) == (3, (3,))


@pytest.mark.parametrize("shape", [(4,), (4, 3, 3)])
def test_mixed_channels_are_inverted_by_a_matrix_and_verified(shape):
    mix = InvertibleConv1x1(4).double()
    x = normal(3, *shape)
    z = mix(x).detach()
    inverter = Inverter(Chain(mix), z, tolerance=1e-9)
    solution = inverter.attempt(z)
    torch.testing.assert_close(solution.x, x, atol=1e-12, rtol=0)
    assert 0 < float(solution.largest_block_bound.max()) < 1e-12
    inverter.parts[0].inverse_weight.mul_(1.5)  # a wrong matrix is noticed
    assert float(inverter.attempt(z).largest_block_bound.min()) > 0.1


def test_a_saturated_logit_has_an_exact_inverse():
    alpha, slope = 1e-4, (1 - 2e-4) / 256
    z = torch.tensor([[-800.0, -60.0, -9.0, 0.0, 9.0, 60.0, 800.0]], dtype=torch.float64)
    solution = Inverter(Logit(256, alpha), z, tolerance=1e-9).attempt(z)
    exact = torch.tensor([[0, 0, 0.00012339457598623172, 0.5, 0.9998766054240137, 1, 1]], dtype=torch.float64)
    error = float((solution.x - (exact - alpha) / slope).norm())
    assert error <= float(solution.largest_block_bound.max()) < 1e-10
    assert bool(solution.converged.all())
    assert bool(solution.code_residual.isinf().all())  # as it is: no float64 gives such codes


def test_a_composed_bound_is_the_one_of_the_ordinary_report():
    """With a fixed number of steps in every block both ways have the same residuals, so the same bounds."""
    flow = flow_of("cifar10-flow", mixing=True, tail=1)
    z = codes_of(flow)
    steps = Schedule(3, ())
    inverter = Inverter(flow.transform, z, schedule=steps, arithmetic=Arithmetic("float32", "native", graph=False))
    ours = inverter.attempt(z)
    ordinary = inverter.transform.solve(z, solver=Banach(max_iterations=steps.coarse))
    torch.testing.assert_close(ours.largest_block_bound, ordinary.largest_block_bound, rtol=1e-2, atol=0)
    torch.testing.assert_close(ours.composed_bound, ordinary.composed_bound, rtol=1e-2, atol=0)


def test_the_default_tolerance_follows_the_dtype_of_the_codes():
    flow = flow_of("mnist-flow-small")
    for dtype in (torch.float32, torch.float64):
        z = codes_of(flow, dtype=dtype)
        inverter = Inverter(flow.transform, z, tolerance=None)
        goals = [p.goal for p in inverter.parts if p.branch is not None]
        one = torch.ones(1, 1, dtype=dtype)
        constants = [p.lipschitz for p in inverter.parts if p.branch is not None]
        assert goals == [float(default_tolerance(one, c)) for c in constants]
        assert bool(inverter.attempt(z).converged.all())


# --------------------------------------------------------------------------------------------------- dense branches


def dense():
    inner = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    steps = [Concatenated(inner), Concatenated(nn.Sequential(nn.Linear(5, 4), nn.ELU())), nn.Linear(9, 3)]
    return rouse_(constrain_(nn.Sequential(*steps), lipschitz=0.9)).double().eval()


def test_layers_that_keep_their_input_are_read_and_linearised():
    g, x, v = dense(), normal(1, 3, seed=2), normal(1, 3, seed=3)
    form = PreparedBranch(try_parse(g).program, [t.detach() for t in try_parse(g).tensors()])
    with torch.no_grad():
        y, slopes = form.value_and_slopes(x)
        torch.testing.assert_close(form(x), g(x))
        torch.testing.assert_close(y, g(x))
        moved = form.jvp(v, slopes)
    jacobian = torch.autograd.functional.jacobian(g, x).reshape(3, 3)
    torch.testing.assert_close(moved, v @ jacobian.T)


class Own(nn.Module):
    def forward(self, x):
        return x


def test_concatenation_with_an_unknown_layer_is_not_parsed():
    assert try_parse(nn.Sequential(Concatenated(nn.Sequential(Own())), nn.Linear(4, 2))) is None
    assert try_parse(nn.Sequential(Concatenated(nn.Linear(2, 2)), Own())) is None


def test_angles_are_those_of_float64_wherever_something_is_proven():
    block, x = ResidualBlock(dense().float()).eval(), normal(8, 3)
    exact = Inverter(block, x, arithmetic=Arithmetic("float16", "native")).parts[0].branch.exact
    with torch.no_grad():
        torch.testing.assert_close(x + exact(x), block.reference(x), atol=1e-13, rtol=0)


@pytest.mark.parametrize("working", ["float16", "float32"])
def test_a_dense_block_is_proven(working):
    z = normal(4, 3)
    inverter = Inverter(ResidualBlock(dense()), z, arithmetic=Arithmetic(working, "native"))
    solution = inverter.attempt(z)
    assert bool(solution.converged.all())
    exact = inverter.transform.solve(z, tolerance=1e-11).x
    assert bool(((solution.x - exact).norm(dim=1) <= solution.largest_block_bound + 1e-11).all())


# --------------------------------------------------------------------------------------------------- on a CPU


def test_on_a_cpu_it_is_proven_or_raises():
    flow = flow_of("mnist-flow-small")
    z = codes_of(flow, dtype=torch.float32)
    with torch.no_grad(), pytest.raises(ConvergenceError, match="is not proven to 1.0e-12"):  # no float32 holds it
        Decoder()(flow.transform, z, tolerance=1e-12)


def test_values_that_are_not_codes_are_refused():
    flow = linear_flow()
    with pytest.raises(ValueError, match="z must hold at least one sample"):
        flow.decoder(flow.transform, normal(0, 4))
    with torch.no_grad(), pytest.raises(ValueError, match="z must be finite; sample 1 of 2"):
        flow.decoder(flow.transform, torch.tensor([[0.0] * 4, [torch.nan] * 4], dtype=torch.float64))
    with torch.no_grad(), pytest.raises(ValueError, match=r"z must have shape \(batch, ..., 4\) for this block"):
        flow.decoder(flow.transform, normal(2, 3))
    with pytest.raises(ValueError, match="tolerance must be positive; got 0"):
        flow.sample((2,), tolerance=0.0)


def test_a_decoder_measures_with_the_stored_weights():
    block, z = ResidualBlock(contractive_convnet(4, 6, lipschitz=0.8)), normal(3, 4, 5, 5).float()
    rouse_(block, weight=8.0).eval()
    with torch.no_grad():
        x = Decoder()(block, z, tolerance=1e-4)
    residual = (block.reference(x) - z.double()).flatten(1).norm(dim=1)
    assert float(residual.max()) <= 1e-4 * (1 - block.bound((4, 5, 5)).value)


# --------------------------------------------------------------------------------------------------- the decoder


@pytest.fixture
def gpu(monkeypatch):
    """The way of a GPU on the CPU; the inverters that were made."""
    made = []
    monkeypatch.setattr(decoder, "_on_gpu", lambda z: True)
    monkeypatch.setattr(decoder, "Inverter", lambda *a, **o: made.append(Inverter(*a, **o)) or made[-1])
    return made


def linear_flow(*matrices):
    return Flow(Chain(*map(linear_block, matrices or (A, A))), DiagonalNormal(4)).double().eval()


def test_the_inverse_is_prepared_once_for_all_samples(gpu):
    flow = linear_flow()
    x = flow.sample((5,), generator=torch.Generator().manual_seed(3))
    z = flow.base.rsample(5, torch.Generator().manual_seed(3))
    inverse = torch.linalg.inv(torch.eye(4, dtype=A.dtype) + A).T
    torch.testing.assert_close(x, z @ inverse @ inverse, atol=1e-8, rtol=0)
    flow.sample((2, 2))
    assert flow.sample().shape == (4,)
    assert len(gpu) == 1
    assert flow.decoder.reason == ""
    assert flow.decoder.seconds == gpu[0].seconds > 0
    assert gpu[0].arithmetic.code == "none"


def test_other_weights_tolerances_or_larger_batches_are_prepared_again(gpu):
    flow, z = linear_flow(), normal(3, 4)
    with torch.no_grad():
        before = flow.decoder(flow.transform, z)
        for p in flow.transform.parameters():
            p.mul_(0.5)
        after = flow.decoder(flow.transform, z)
        assert len(gpu) == 2
        half = torch.linalg.inv(torch.eye(4, dtype=A.dtype) + A / 2).T
        torch.testing.assert_close(after, z @ half @ half, atol=1e-8, rtol=0)
        assert float((before - after).abs().max()) > 1e-3
        flow.decoder(flow.transform, z, tolerance=1e-3)
        assert [len(gpu), gpu[-1].tolerance] == [3, 1e-3]
        flow.decoder(flow.transform, normal(7, 4), tolerance=1e-3)
        assert [len(gpu), gpu[-1].shape[0]] == [4, 7]


def _swap(flow):
    flow.transform[1].g[1] = nn.Tanh()


def _bend(flow):
    flow.transform[1].g[1].alpha = 0.5


def _cap(flow):
    for m in flow.modules():
        if isinstance(m, SpectralCap):
            m.coefficient *= 0.9


def _turn(flow):
    flow.transform.transforms = nn.ModuleList(reversed(flow.transform.transforms))


def _scale(flow):
    flow.transform[0].levels = 2.0


def _load(flow):
    state = {name: t.clone() for name, t in flow.state_dict().items()}
    state["transform.transforms.2.shift"] += 0.1
    flow.load_state_dict(state)


def _tighten(flow):
    with torch.no_grad():
        for p in flow.transform[1].parameters():
            p.mul_(1.3)
    tighten_(flow, (4,))


@pytest.mark.parametrize("change", [_swap, _bend, _cap, _turn, _scale, _load, _tighten, Flow.float])
def test_every_change_of_the_function_is_prepared_again(gpu, change):
    """Not only weights: activations, coefficients, constants, the order, and the precision that they are rounded in."""
    block = rouse_(ResidualBlock(contractive_mlp(4, (8,), lipschitz=0.9)), weight=8.0)
    flow = Flow(Chain(Logit(levels=1.0), block, ActNorm(4)), DiagonalNormal(4)).double().eval()
    z = normal(3, 4)
    with torch.no_grad():
        flow.decoder(flow.transform, z)
        change(flow)
        x = flow.decoder(flow.transform, z)
        assert len(gpu) == 2
        assert float((flow.transform.reference(x) - z).norm(dim=1).max()) < 1e-8


def test_a_rounded_solution_is_proven_as_it_is_rounded(gpu):
    """float32 holds no solution to 1e-9, though float64 finds one: as on a CPU, that raises."""
    flow = linear_flow().float()
    with pytest.raises(ConvergenceError, match="is not proven to 1.0e-09"):
        flow.sample((3,), tolerance=1e-9)
    assert flow.decoder.reason == ""
    assert flow.sample((3,), tolerance=1e-4).dtype == torch.float32
    closed = Flow(Chain(ActNorm(4), *linear_flow().transform), DiagonalNormal(4)).float().eval()
    assert closed.sample((3,), tolerance=1e-9).dtype == torch.float32  # a closed form has no tolerance


def test_the_batch_is_halved_until_memory_suffices(monkeypatch):
    sizes = []

    def small(transform, z, **options):
        sizes.append(len(z))
        if len(z) > limit:
            raise torch.cuda.OutOfMemoryError("no")
        return Inverter(transform, z, **options)

    monkeypatch.setattr(decoder, "_on_gpu", lambda z: True)
    monkeypatch.setattr(decoder, "Inverter", small)
    flow, z, limit = linear_flow(), normal(20, 4), 6
    with torch.no_grad():
        for _ in range(2):
            x = flow.decoder(flow.transform, z)
            torch.testing.assert_close(x, ordinary.invert(flow.transform, z), atol=1e-8, rtol=0)
        assert sizes == [20, 10, 5]
        limit = 0
        with pytest.raises(torch.cuda.OutOfMemoryError):
            flow.decoder(flow.transform, z, tolerance=1e-3)


def test_the_prepared_inverse_is_freed_with_the_flow_and_off_the_gpu(gpu, monkeypatch):
    """With its flow, or where that has left the GPU; nothing waits for the collector of cycles."""
    flow = linear_flow()
    flow.sample((2,))
    gone = weakref.ref(gpu.pop())
    assert gone() is flow.decoder.inverter
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "_on_gpu", lambda z: False)
        flow.sample((2,))
    assert gone() is None
    flow.sample((2,))
    gone = weakref.ref(gpu.pop())
    gc.disable()
    try:
        del flow
        assert gone() is None
    finally:
        gc.enable()


def test_many_codes_are_solved_in_batches(gpu, monkeypatch):
    monkeypatch.setattr(decoder, "MAX_BATCH", 4)
    flow, z = linear_flow(), normal(10, 4)
    with torch.no_grad():
        x = flow.decoder(flow.transform, z)
        torch.testing.assert_close(x, ordinary.invert(flow.transform, z), atol=1e-8, rtol=0)
        flow.decoder(flow.transform, normal(11, 4))
    assert [i.shape[0] for i in gpu] == [4]


def test_samples_in_float32_are_float32(gpu):
    flow = copy.deepcopy(flow_of("cifar10-flow"))
    x = flow.sample((3,), generator=torch.Generator().manual_seed(0), tolerance=1e-4)
    assert x.dtype == torch.float32
    assert x.shape == (3, 3, 16, 16)
    assert float(gpu[0].attempt(codes_of(flow)).largest_block_bound.max()) <= 1e-4


def test_a_copy_has_nothing_prepared(gpu):
    flow = linear_flow()
    flow.sample((2,))
    for other in (copy.deepcopy(flow), pickle.loads(pickle.dumps(flow))):
        assert other.decoder.seconds == 0.0
        assert other.sample((2,)).shape == (2, 4)
    assert len(gpu) == 3
    assert set(flow.state_dict()) == set(linear_flow().state_dict())


def test_a_hybrid_prepares_once(gpu):
    model = Hybrid(linear_flow().transform, DiagonalNormal(4), nn.Linear(4, 2)).double().eval()
    model.sample((3,))
    model.sample((3,))
    assert len(gpu) == 1


def conditional():
    return mlp_flow(4, blocks=1, hidden=(8,), context=2).double().eval()


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (lambda f: f, {"solver": Banach()}, "a solver was given"),
        (lambda f: conditional(), {"context": normal(3, 2)}, "a context was given"),
        (lambda f: f.train(), {}, "the model is in training mode"),
    ],
)
def test_the_decoder_says_why_it_is_not_accelerated(gpu, change, options, words):
    flow = change(linear_flow())
    with torch.no_grad():
        x = flow.decoder(flow.transform, normal(3, 4), **options)
    assert x.shape == (3, 4)
    assert flow.decoder.reason == f"not accelerated: {words}."
    assert not gpu


def test_gradients_half_precision_and_unknown_slopes_use_the_ordinary_method(gpu):
    flow = linear_flow()
    z = normal(3, 4).requires_grad_()
    flow.decoder(flow.transform, z).sum().backward()
    assert z.grad is not None
    assert "gradients are enabled" in flow.decoder.reason
    with torch.no_grad():
        flow.decoder(flow.transform, normal(3, 4).to(torch.bfloat16), tolerance=1.0)
        assert "codes must be float32 or float64; got torch.bfloat16" in flow.decoder.reason
        block = ResidualBlock(constrain_(nn.Sequential(nn.Linear(4, 4), MaxMin()), 0.5)).double().eval()
        flow.decoder(block, normal(3, 4))
    assert "without a slope, maxmin" in flow.decoder.reason
    assert flow.decoder.seconds == 0.0
    assert why_not_accelerated(block) == flow.decoder.reason


def test_a_block_that_is_no_contraction_is_refused(gpu):
    flow = linear_flow()
    with torch.no_grad():
        flow.transform[0].g[0].weight.mul_(2)
    with pytest.raises(ConvergenceError, match="No contraction is proven"):
        flow.sample((2,))
    assert "not a proven contraction" in flow.decoder.reason


def test_a_solve_that_is_not_proven_raises(gpu):
    with pytest.raises(ConvergenceError, match="is not proven to 1.0e-18"):
        linear_flow().sample((2,), tolerance=1e-18)


def test_the_command_says_how_long_it_took():

    on_gpu, on_cpu = "cuda:0", "cpu"
    assert _describe_time(1.24, Decoder(), on_cpu) == "1.2 s"
    assert _describe_time(1.24, SimpleNamespace(reason="", seconds=1.1), on_gpu) == "1.2 s, 1.1 s of it to prepare"
    why = SimpleNamespace(reason="not accelerated: a solver was given.", seconds=0.0)
    assert _describe_time(1.24, why, on_gpu) == "1.2 s, not accelerated: a solver was given"


# --------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", FLOW)
def test_every_preset_is_captured_and_sampled(name):
    flow = copy.deepcopy(flow_of(name, **FLOW[name])).cuda()
    with torch.no_grad():
        z = flow.base.rsample(4, torch.Generator("cuda").manual_seed(0))
        first, second = (flow.decoder(flow.transform, z, tolerance=1e-4) for _ in range(2))
    assert flow.decoder.reason == ""
    torch.testing.assert_close(first, second, atol=0.02, rtol=0)
    ordinary = copy.deepcopy(flow).double().transform.solve(z.double(), tolerance=1e-6).x
    torch.testing.assert_close(first.double(), ordinary, atol=0.02, rtol=0)


def test_weights_that_make_numbers_overflow_are_not_blamed_on_the_codes():
    """Trap: a training that diverged was reported as NaN in the data."""
    norm = ActNorm(4)
    with torch.no_grad():
        norm.log_scale.fill_(-200.0)
    chain = Chain(ResidualBlock(contractive_mlp(4)), Chain(norm)).eval()
    with pytest.raises(ValueError, match=r"overflow in the inverse, before it reaches transform 0 of 2, .* diverged"):
        chain.inverse(torch.ones(2, 4))
    with pytest.raises(ValueError, match="z must be finite; sample 0 of 2"):
        chain.inverse(torch.full((2, 4), torch.inf))

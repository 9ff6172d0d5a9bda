"""Fused runs of blocks against their parts one by one: the same values and gradients, and the same refusals."""

import copy
import io
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize

from iresnet import (
    ActNorm,
    Chain,
    Exact,
    LipSwish,
    PowerSeries,
    ResidualBlock,
    RussianRoulette,
    Sine,
    Standardise,
    contractive_mlp,
    mlp_flow,
    outermost,
)
from iresnet.branch import try_parse
from iresnet.branch.derivative import linearise_program, vector_jacobian_product
from iresnet.branch.explicit import DualPass, VectorBranch, is_explicit
from iresnet.branch.factors import _dense_from
from iresnet.branch.products import gram, times, times_transpose
from iresnet.chain import Composition
from iresnet.fused import read_run
from iresnet.lipschitz import ACTIVATIONS, Concatenated, batched_refresh, freeze_norms, refresh, refresh_
from iresnet.lipschitz.constraint import weight_of
from iresnet.lipschitz.elu import fast_value
from iresnet.lipschitz.parametrized import constrain_layer_
from iresnet.lipschitz.rules import default_rule
from iresnet.logdet import StoppedRoulette
from iresnet.logdet.determinant import safe_inverse_and_logdet
from iresnet.outermost import outermost_call
from iresnet.transforms.mixing import Reverse
from iresnet.trust import why_untrusted

DOUBLE = torch.float64

#: Every activation with a slope in closed form; a record that is added must be tested here.
ACTIVATION = {
    "elu": nn.ELU, "elu with alpha": lambda: nn.ELU(0.7), "softplus": lambda: nn.Softplus(threshold=40),
    "tanh": nn.Tanh, "relu": nn.ReLU, "identity": nn.Identity, "sine": lambda: Sine(2.0), "lipswish": LipSwish,
}  # fmt: skip

ESTIMATORS = {
    "default": None, "exact": Exact(), "series": PowerSeries(5, probes=2), "shared": PowerSeries(4, shared=True),
    "roulette": RussianRoulette(), "two probes": RussianRoulette(probes=2, probe="gaussian"),
    "long": RussianRoulette(continuation=0.95), "stopped": StoppedRoulette(40, 4, 0.9),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fuse_float64(monkeypatch):
    """Fuse float64 too, where both ways can be compared to many digits."""
    monkeypatch.setattr("iresnet.fused.DTYPES", (torch.float32, torch.float64))


def build(d=3, blocks=3, hidden=(20, 17), dtype=DOUBLE, seed=0, **options):
    """A flow past its first batch, with biases, shifts and scales away from zero."""
    torch.manual_seed(seed)
    flow = mlp_flow(d, blocks, hidden, **options).to(dtype).train()
    with torch.no_grad():
        flow.transform(torch.randn(40, d, dtype=dtype))
        for p in flow.parameters():
            p.add_(0.2 * torch.randn_like(p))
    for m in flow.modules():
        if isinstance(m, ActNorm):
            m._mark_initialised()
    refresh_(flow, settle=True)
    return flow


def batch(d=3, rows=40, dtype=DOUBLE):
    return torch.randn(rows, d, dtype=dtype, generator=torch.Generator().manual_seed(1))


def by_parts(chain, *arguments, **options):
    """The parts one by one, which is what a fused run must agree with."""
    return Composition.forward_and_logdet(chain, *arguments, **options)


def gradients(forward, flow, x, estimator=None, seed=2):
    """Code, ln det, and the gradients of x and all parameters of a weighted sum of both."""
    x = x.clone().requires_grad_()
    flow.zero_grad()
    generator = torch.Generator().manual_seed(seed)
    z, logdet = forward(flow.transform, x, estimator=estimator, generator=generator)
    weights = torch.linspace(0.5, 2.0, len(x), dtype=x.dtype)
    ((z.square().sum(1) + logdet) * weights).sum().backward()
    return [z.detach(), logdet.detach(), x.grad, *(p.grad for p in flow.transform.parameters())]


def assert_same(found, expected, tolerance=1e-9):
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def is_fused(flow, x, estimator=None):
    return len(read_run(list(flow.transform), x, estimator)) == len(flow.transform)


def test_every_activation_with_a_slope_is_listed():
    known = {name for name, record in ACTIVATIONS.items() if record.slope is not None}
    assert known == {name.split()[0] for name in ACTIVATION}


@pytest.mark.parametrize("activation", ACTIVATION)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_values_and_gradients_are_those_of_the_parts(activation, estimator):
    flow, x, estimator = build(activation=ACTIVATION[activation]), batch(), ESTIMATORS[estimator]
    assert is_fused(flow, x, estimator)
    with torch.no_grad():
        flow(x)
    results = [gradients(way, flow, x, estimator) for way in (Chain.forward_and_logdet, by_parts)]
    assert_same(*results)


@pytest.mark.parametrize("d", [1, 2, 4, 9, 40])
@pytest.mark.parametrize("estimator", [None, RussianRoulette(), RussianRoulette(continuation=0.95)])
def test_dimensions(d, estimator):
    flow, x = build(d, 2), batch(d, 90)
    assert_same(*(gradients(way, flow, x, estimator) for way in (Chain.forward_and_logdet, by_parts)), 1e-8)


@pytest.mark.parametrize("d", [2, 16])
@pytest.mark.parametrize("estimator", [None, RussianRoulette()])
def test_float32_at_the_size_of_fast_products(d, estimator):
    flow, x = build(d, 2, (64, 64), torch.float32), batch(d, 300, torch.float32)
    assert_same(*(gradients(way, flow, x, estimator) for way in (Chain.forward_and_logdet, by_parts)), 2e-3)


def test_the_mean_of_the_roulette_is_the_exact_value():
    flow, x = build(4, 1), batch(4, 2).repeat_interleave(4000, 0)
    with torch.no_grad():
        _, drawn = flow.transform.forward_and_logdet(x, estimator=RussianRoulette(), generator=torch.Generator())
        _, exact = flow.transform.forward_and_logdet(x)
    for estimate, value in zip(drawn.chunk(2), exact.chunk(2), strict=True):
        assert abs(estimate.mean() - value[0]) < 4 * estimate.std() / len(estimate) ** 0.5


def test_training_is_the_same_after_several_steps(monkeypatch):
    fused, plain, x = build(seed=3), build(seed=3), batch()
    losses = []
    for flow, way in ((fused, Chain.forward_and_logdet), (plain, by_parts)):
        monkeypatch.setattr(Chain, "forward_and_logdet", way)
        optimiser = torch.optim.Adam(flow.parameters(), 1e-2)
        for _ in range(5):
            optimiser.zero_grad()
            loss = -flow(x).mean()
            loss.backward()
            optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)
    assert_same(fused.parameters(), plain.parameters(), 1e-7)


def test_chunks_of_a_batch_change_nothing(monkeypatch):
    flow, x = build(), batch(rows=101)
    whole = gradients(Chain.forward_and_logdet, flow, x)
    monkeypatch.setattr("iresnet.fused._ROWS", 64)
    assert_same(gradients(Chain.forward_and_logdet, flow, x), whole)


def test_eval_without_gradients_is_the_same():
    flow, x = build().eval(), batch(rows=1)
    with torch.no_grad():
        assert_same(flow.transform.forward_and_logdet(x), by_parts(flow.transform, x))
    assert torch.equal(flow.log_prob(x).detach(), flow.log_prob(x).detach())


def test_two_forwards_before_one_backward():
    flow, x = build(), batch()
    flow.zero_grad()
    with torch.no_grad():
        refresh_(flow, settle=True)
    (flow(x).mean() + flow(2 * x).mean()).backward()
    both = [p.grad.clone() for p in flow.parameters() if p.grad is not None]
    flow.zero_grad()
    flow(x).mean().backward()
    flow(2 * x).mean().backward()
    assert_same(both, [p.grad for p in flow.parameters() if p.grad is not None])


@pytest.mark.parametrize("estimator", [None, RussianRoulette()])
def test_two_backward_passes_through_one_graph(estimator):
    flow, x = build(estimator=estimator), batch()
    loss = flow(x, generator=torch.Generator().manual_seed(0)).sum()
    parameters = list(flow.transform.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(loss, parameters)
    assert_same(first, second)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, parameters)


def test_second_derivatives_of_an_exact_determinant():
    flow, x = build(blocks=1).eval(), batch(rows=3).requires_grad_()

    def curvature(logdet):
        (first,) = torch.autograd.grad(logdet.sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    found = curvature(flow.transform.forward_and_logdet(x)[1])
    assert torch.allclose(found, curvature(by_parts(flow.transform, x)[1]))


def test_second_derivatives_of_a_block_that_is_used_again():
    flow = build(blocks=2)
    chain, x = Chain(*flow.transform, flow.transform[1]).eval(), batch(rows=3).requires_grad_()
    inputs = [x, *chain.parameters()]

    def derivatives(forward):
        z, logdet = forward(x)
        z, more = forward(z)  # x of this run is computed from its own weights
        first = torch.autograd.grad((z.sum() + logdet + more).sum(), inputs, create_graph=True)
        return first, torch.autograd.grad(sum(g.square().sum() for g in first), inputs)

    for found, expected in zip(
        derivatives(chain.forward_and_logdet), derivatives(lambda x: by_parts(chain, x)), strict=True
    ):
        assert_same(found, expected)


@pytest.mark.parametrize("name", ["transforms.0.shift", "transforms.1.g.4.bias", "transforms.2.shift"])
def test_second_derivatives_where_the_determinant_may_be_constant(name):
    flow, x = build(blocks=1).eval().requires_grad_(requires_grad=False), batch(rows=3)
    chosen = flow.transform.get_parameter(name).requires_grad_()

    def curvature(result):
        (first,) = torch.autograd.grad(result[0].square().sum(), chosen, create_graph=True)
        return torch.autograd.grad(first.square().sum(), chosen)

    assert_same(curvature(flow.transform.forward_and_logdet(x)), curvature(by_parts(flow.transform, x)))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's decompositions
@pytest.mark.parametrize("grad", [True, False])
def test_forward_mode_derivatives_are_those_of_the_parts(grad):
    chain, x = build().transform.eval(), batch()
    tangents = []
    for way in (Chain.forward_and_logdet, by_parts):
        with forward_ad.dual_level(), torch.set_grad_enabled(grad):
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            tangents.append([forward_ad.unpack_dual(t).tangent for t in way(chain, dual)])
    assert_same(*tangents)


def test_second_derivatives_of_a_random_estimate_are_refused():
    flow, x = build(estimator=RussianRoulette()), batch().requires_grad_()
    with pytest.raises(RuntimeError, match="differentiate twice"):
        torch.autograd.grad(flow(x).sum(), x, create_graph=True)


def test_only_the_gradients_that_are_needed():
    flow, x = build().requires_grad_(requires_grad=False), batch()
    assert not flow(x).requires_grad
    x.requires_grad_()
    flow(x).sum().backward()
    assert x.grad is not None
    assert all(p.grad is None for p in flow.parameters())


def test_weights_changed_in_place_are_used_at_once():
    flow, x = build().eval(), batch()
    with torch.no_grad():
        before = flow.log_prob(x)
        flow.transform[1].g[0].bias.add_(1)
        after = flow.log_prob(x)
        assert not torch.allclose(before, after)
        assert torch.allclose(
            after - flow.base.log_prob(by_parts(flow.transform, x)[0]), by_parts(flow.transform, x)[1]
        )


def test_an_unconstrained_weight_changed_before_backward_is_refused():
    linear = nn.Linear(2, 2, dtype=DOUBLE)
    nn.init.eye_(linear.weight)
    with torch.no_grad():
        linear.weight.mul_(0.5)
    chain = Chain(ResidualBlock(nn.Sequential(linear, nn.Tanh())))
    x = batch(2).requires_grad_()
    _, logdet = chain.forward_and_logdet(x)
    with torch.no_grad():
        linear.weight.mul_(0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logdet.sum().backward()


@pytest.mark.parametrize("name", ["transforms.0.shift", "transforms.0.log_scale", "transforms.1.g.1.raw_beta"])
def test_any_other_parameter_changed_before_backward_is_refused(name):
    flow, x = build(activation=LipSwish), batch().requires_grad_()
    _, logdet = flow.transform.forward_and_logdet(x)
    with torch.no_grad():
        flow.transform.get_parameter(name).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logdet.sum().backward()


def test_gradients_do_not_change_the_value():
    flow, x = build(dtype=torch.float32).eval(), batch(dtype=torch.float32)
    with torch.no_grad():
        expected = flow.log_prob(x)
    assert torch.equal(flow.log_prob(x).detach(), expected)


def test_float64_runs_part_by_part(monkeypatch):
    monkeypatch.undo()
    assert not is_fused(build(), batch())
    assert is_fused(build(dtype=torch.float32), batch(dtype=torch.float32))


def test_a_hook_is_called():
    flow, x = build(), batch()
    assert is_fused(flow, x)
    called = []
    flow.transform[1].g[0].register_forward_hook(lambda *_: called.append(1))
    assert not is_fused(flow, x)
    flow(x)
    assert called


@pytest.mark.parametrize(
    "change",
    [
        lambda flow: flow.transform[1].register_forward_hook(lambda *_: None),
        lambda flow: setattr(flow.transform[0], "value", lambda x: x),
        lambda flow: flow.transform.transforms.append(ResidualBlock(nn.SiLU(), lipschitz=0.5)),
    ],
)
def test_what_is_not_fused(change):
    flow = build()
    change(flow)
    assert not is_fused(flow, batch())


def test_other_inputs_and_estimators_are_not_fused():
    flow, x = build(), batch()
    assert not is_fused(flow, x[:, :, None])
    assert not is_fused(flow, x.half())
    assert not is_fused(flow, x, object())
    with torch.autocast("cpu"):
        assert not is_fused(flow, x)


def test_runs_between_other_transforms():
    torch.manual_seed(0)
    blocks = [ResidualBlock(contractive_mlp(3, (8,))) for _ in range(3)]
    chain = Chain(
        Standardise([0.5] * 3, [2.0] * 3), blocks[0], ActNorm(3), Reverse(), blocks[1], Reverse(), ActNorm(3), blocks[2]
    )
    chain, x = chain.to(DOUBLE).eval(), batch()
    assert [len(read_run(list(chain)[i:], x, None)) for i in range(8)] == [0, 2, 0, 0, 1, 0, 2, 1]
    for estimator in (None, RussianRoulette()):
        results = [
            way(chain, x, estimator=estimator, generator=torch.Generator().manual_seed(0))
            for way in (Chain.forward_and_logdet, by_parts)
        ]
        assert_same(*results)


def test_every_part_checks_its_input():
    chain = Chain(ActNorm(1), ResidualBlock(contractive_mlp(3, (8,)))).eval()
    with pytest.raises(ValueError, match="ActNorm"):
        chain.forward_and_logdet(torch.zeros(4, 3))


def test_beyond_64_dimensions_eval_is_certified_and_training_needs_an_estimator():
    flow, x = mlp_flow(70, 2, (8,)).eval(), torch.zeros(2, 70)
    with torch.no_grad():
        assert_same(flow.transform.forward_and_logdet(x), by_parts(flow.transform, x))
    with pytest.raises(ValueError, match="needs an estimator"):
        build(70, 1, (8,)).transform.forward_and_logdet(batch(70))


def test_the_first_batch_goes_through_the_parts_and_initialises(monkeypatch):
    flow, x, seen = mlp_flow(3, 2, (8,)).train(), batch(dtype=torch.float32), []
    monkeypatch.setattr("iresnet.chain.read_run", lambda rest, *_: seen.append(len(rest)) or [])
    flow(x)
    assert not seen
    assert all(bool(t.initialised) for t in flow.transform if isinstance(t, ActNorm))
    flow(x)
    assert seen


def test_a_context_goes_to_the_parts():
    flow = mlp_flow(2, 2, (8,), context=3).eval()
    assert flow.log_prob(torch.zeros(4, 2), torch.zeros(4, 3)).shape == (4,)
    with pytest.raises(ValueError, match="context"):
        flow.log_prob(torch.zeros(4, 2))


@pytest.mark.parametrize(
    ("x", "message"), [(torch.zeros(0, 3), "empty batch"), (torch.zeros(4, 2), r"shape \(batch, 3\)")]
)
def test_bad_batches_are_refused(x, message):
    with pytest.raises(ValueError, match=message):
        build(dtype=torch.float32)(x)


def test_a_wrong_width_is_refused_by_the_chain():
    with pytest.raises(ValueError, match="must have shape"):
        build(dtype=torch.float32).transform.forward_and_logdet(torch.zeros(4, 2))


def test_input_that_is_not_contiguous():
    flow, x = build().eval(), batch(6, 40)[:, ::2]
    with torch.no_grad():
        assert_same(flow.transform.forward_and_logdet(x), by_parts(flow.transform, x.contiguous()))


def test_an_expanding_block_is_reported():
    g = nn.Sequential(nn.Linear(3, 3, dtype=DOUBLE))
    chain = Chain(ResidualBlock(g, lipschitz=0.9))
    with torch.no_grad():
        g[0].weight.copy_(-2 * torch.eye(3))
    with pytest.raises(ValueError, match="det\\(I \\+ J\\) must be positive"):
        chain.forward_and_logdet(batch())


def test_copies_and_files_do_not_change():
    flow, x = build(), batch()
    flow(x).sum().backward()
    twin, buffer = copy.deepcopy(flow), io.BytesIO(pickle.dumps(flow))
    flow.eval()
    with torch.no_grad():
        expected = flow.log_prob(x)
        assert torch.equal(twin.eval().log_prob(x), expected)
        assert torch.equal(pickle.load(buffer).eval().log_prob(x), expected)


# ---------------------------------------------------------------------------------------------- parts of it


@pytest.mark.parametrize("activation", ACTIVATION)
@pytest.mark.parametrize("probes", [None, 1, 3, 5])
@pytest.mark.parametrize("d", [4, 5])
def test_dual_pass(activation, probes, d):
    torch.manual_seed(0)
    make = ACTIVATION[activation]
    layers = contractive_mlp(d, (7, 6), activation=make)
    g = nn.Sequential(make(), *layers[:2], nn.Tanh(), *layers[2:], make(), nn.Tanh()).to(DOUBLE)
    parsed, x = try_parse(g), batch(d, 10).requires_grad_()
    values = [t.detach().requires_grad_() for t in parsed.tensors()]
    v = (
        torch.eye(d, dtype=DOUBLE)[:, None].expand(d, 10, d)
        if probes is None
        else batch(d, 10 * probes).view(-1, 10, d)
    )
    y, transposes = linearise_program(parsed.program, x, values)
    u = torch.zeros_like(y, requires_grad=True)  # J v is the gradient of v' (J' u)
    back = vector_jacobian_product(parsed.program, transposes, u)
    jv = torch.stack([torch.autograd.grad(back, u, w, create_graph=True)[0] for w in v])
    dy, djv = torch.randn_like(y), torch.randn_like(jv)
    expected = torch.autograd.grad((y, jv), [x, *values], (dy, djv), allow_unused=True)
    with torch.no_grad():
        dual = DualPass(parsed.program, values, x, None if probes is None else v, keep=True)
        rows, w = torch.randperm(10), batch(d, 10)
        product = vector_jacobian_product(parsed.program, transposes, w)[rows]
        assert_same([dual.y, dual.jv, dual.select(rows)(w[rows])], [y, jv, product])
        assert torch.allclose((dual.jacobian(rows) @ w[rows, :, None])[..., 0], product)
        dual.forget_slopes()
        dx, found = dual.backward(dy, djv, [True] * len(values))
    zeros = [torch.zeros_like(t) for t in (x, *values)]
    assert_same([dx, *found], [z if e is None else e for z, e in zip(zeros, expected, strict=True)])


def test_programs_that_are_not_sequences_of_layers_are_not_explicit():
    dense = nn.Sequential(Concatenated(nn.Linear(2, 3)), nn.Linear(5, 2))
    assert not is_explicit(try_parse(dense).program)
    assert not is_explicit(try_parse(nn.Sequential(nn.Linear(2, 2), nn.SiLU())).program)
    assert is_explicit(try_parse(nn.Sequential(nn.Linear(2, 2), nn.ELU())).program)


@pytest.mark.parametrize("rows", [5, 400])
@pytest.mark.parametrize(("inputs", "outputs"), [(2, 64), (64, 2), (64, 64), (32, 48)])
def test_products(rows, inputs, outputs):
    x, weight, bias, g = (torch.randn(*s) for s in ((rows, inputs), (outputs, inputs), (outputs,), (rows, outputs)))
    exact = [t.double() for t in (x, weight, bias, g)]
    assert torch.allclose(times_transpose(x, weight, bias).double(), exact[0] @ exact[1].t() + exact[2], atol=1e-4)
    assert torch.allclose(times(g, weight).double(), exact[3] @ exact[1], atol=1e-4)
    assert torch.allclose(gram(g, x).double(), exact[3].t() @ exact[0], atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=["float32", "float64"])
@pytest.mark.parametrize("activation", [nn.ELU, lambda: nn.ELU(0.7), nn.Tanh, LipSwish])
def test_vector_branch(activation, dtype):
    g = contractive_mlp(3, (20,), activation=activation).to(dtype).eval()
    parsed, atol = try_parse(g), 1e-6 if dtype == torch.float32 else 1e-15
    for rows in (5, 4500):
        x = torch.randn(rows, 3, dtype=dtype)
        with torch.no_grad():
            assert torch.allclose(VectorBranch(parsed.program, parsed.tensors())(x), g(x), atol=atol)


def test_the_reference_of_a_block_has_derivatives():
    block, x = ResidualBlock(contractive_mlp(3, (20,))).double().eval(), torch.randn(1000, 3, dtype=DOUBLE)
    (found,) = torch.autograd.grad(block.reference(x.requires_grad_()).sum(), x)
    (expected,) = torch.autograd.grad(block(x).sum(), x)
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        _, pull_back = torch.func.vjp(block.reference, x.detach())
    torch.testing.assert_close(pull_back(torch.ones_like(x))[0], expected)


def test_the_error_of_a_fast_elu_is_the_one_that_bounds_rely_on():
    """Against 80-bit numbers, over all magnitudes: zeros, denormal numbers, and what overflows."""
    torch.manual_seed(0)
    x = torch.randn(40000, dtype=DOUBLE) * 10.0 ** torch.linspace(-20, 3, 40000, dtype=DOUBLE)
    x = torch.cat([x, torch.tensor([0.0, -0.0, 5e-324, -5e-324, 1e308, -1e308, math.inf, -math.inf], dtype=DOUBLE)])
    wide = x.numpy().astype(np.longdouble)
    with np.errstate(over="ignore"):
        exact = np.where(wide > 0, wide, np.expm1(np.minimum(wide, 0)))
    found, finite = fast_value(x, 1.0), np.isfinite(exact)
    error = np.abs(found.numpy().astype(np.longdouble)[finite] - exact[finite])
    assert error.max() <= ACTIVATIONS["elu"].rounding(1.0)[1]
    assert found[-2].item() == math.inf
    assert fast_value(torch.full((10000,), math.nan), 1.0).isnan().all()


@pytest.mark.parametrize("d", [1, 2, 3, 7, 16, 21, 40])
def test_elimination_gives_inverses_and_determinants(d):
    torch.manual_seed(d)
    j = torch.randn(5, d, d, dtype=DOUBLE)
    a = torch.eye(d, dtype=DOUBLE) + 0.95 * j / torch.linalg.matrix_norm(j, 2)[:, None, None]
    kept = a.clone()
    inverse, logdet = safe_inverse_and_logdet(a)
    assert torch.allclose(inverse @ a, torch.eye(d, dtype=DOUBLE).expand(5, d, d))
    assert torch.allclose(logdet, torch.linalg.slogdet(a)[1])
    assert torch.equal(a, kept)


def test_small_pivots_are_left_to_the_caller():
    assert safe_inverse_and_logdet(torch.tensor([[[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]])) is None
    assert safe_inverse_and_logdet(-torch.eye(2)[None]) is None


def test_a_determinant_without_safe_pivots_is_still_exact():
    """A rotation by a right angle: positive determinant, zero on the diagonal; no contraction, so nothing is proven."""
    weight = torch.zeros(3, 3, dtype=DOUBLE)
    weight[0, 0] = weight[1, 1] = weight[0, 1] = -1.0
    weight[1, 0] = 1.0
    g = nn.Sequential(nn.Linear(3, 3, dtype=DOUBLE))
    chain = Chain(ResidualBlock(g, lipschitz=0.9))
    with torch.no_grad():
        g[0].weight.copy_(weight)
    x = batch().requires_grad_()
    _, logdet = chain.forward_and_logdet(x)
    assert torch.allclose(logdet, torch.zeros_like(logdet))
    logdet.sum().backward()


@pytest.mark.parametrize(
    ("rows", "d", "first"),
    [([512], 4, 1), ([512] * 5, 64, 5), ([512] * 10 + [20] * 40, 16, 10), ([512] * 40, 4, 1)],
)
def test_where_dense_jacobians_pay_off(rows, d, first):
    assert _dense_from(rows, d) == first


def test_norms_are_refreshed_once_for_several_runs(monkeypatch):
    refreshed = []

    def counted(module):
        refreshed.append(module)
        return batched_refresh(module)

    monkeypatch.setattr("iresnet.outermost.batched_refresh", counted)
    chain = Chain(ResidualBlock(contractive_mlp(4, (8,))), Reverse(), ResidualBlock(contractive_mlp(4, (8,))))
    chain.forward_and_logdet(torch.randn(5, 4))
    assert refreshed == [chain]


def test_a_part_finds_its_layers_frozen_without_a_walk_over_them(monkeypatch):
    walked = []
    chain = Chain(ResidualBlock(contractive_mlp(4, (8,))), Reverse(), ResidualBlock(contractive_mlp(4, (8,))))
    walk = refresh.modules_of
    monkeypatch.setattr("iresnet.lipschitz.refresh.modules_of", lambda m: walked.append(m) or walk(m))
    for way in (chain, lambda x: by_parts(chain, x), chain.forward_and_logdet):
        walked.clear()
        way(torch.randn(5, 4))
        assert len(walked) == (1 if way == chain.forward_and_logdet else 2)
    assert outermost._thread_state.frozen == ()


class Waking(nn.Module):
    """Calls a block that it has just put into training mode."""

    def __init__(self, block):
        super().__init__()
        self.block = block.eval()

    def forward(self, x):
        with outermost_call(self, x):
            return self.block.train()(x)


def test_a_part_that_is_put_into_training_on_the_way_is_refreshed():
    waking, x = Waking(ResidualBlock(contractive_mlp(4, (8,), lipschitz=0.5))), torch.randn(5, 4)
    assert waking.training
    assert not waking.block.training
    layer = waking.block.g[0].parametrizations.weight
    with torch.no_grad():
        layer.original.mul_(10)
    before = layer[0].gradient.clone()
    waking(x)
    assert not torch.equal(before, layer[0].gradient)
    assert not layer[0]._frozen


def test_a_failed_pass_leaves_nothing_frozen():
    block = ResidualBlock(contractive_mlp(4, (8,)))
    with pytest.raises(ValueError, match="must have shape"):
        block(torch.ones(2, 5))
    assert outermost._thread_state.frozen == ()
    assert not any(m._frozen for m in block.modules() if hasattr(m, "_frozen"))


def test_what_one_thread_has_frozen_another_refreshes():
    block, x = ResidualBlock(contractive_mlp(4, (8,))), torch.randn(5, 4)
    layer = block.g[0].parametrizations.weight
    with outermost_call(block, x):
        with torch.no_grad():
            layer.original.mul_(10)
        before = layer[0].gradient.clone()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(block, x).result()
        assert not torch.equal(before, layer[0].gradient)


# ---------------------------------------------------------------------------------------------- changes after a run


def shadow_a_method(g):
    g[1].forward = lambda x: 30 * x


def shadow_the_call(g):
    g[1]._call_impl = lambda x: 30 * x


def shadow_the_weight(g):
    vars(g[0])["weight"] = torch.zeros(8, 4)


def hook_a_layer(g):
    g[2].register_forward_hook(lambda m, a, y: 30 * y)


def hook_the_constraint(g):
    g[0].parametrizations.weight[0].register_forward_hook(lambda m, a, y: 30 * y)


def hook_the_parametrization(g):
    g[0].parametrizations.weight.register_forward_hook(lambda m, a, y: 30 * y)


def halve_the_constraint(g):
    g[0].parametrizations.weight[0].forward = lambda w: w / 2


def add_a_parametrization(g):
    parametrize.register_parametrization(g[0], "weight", nn.Hardtanh(-0.1, 0.1))


def add_a_parametrized_bias(g):
    parametrize.register_parametrization(g[0], "bias", nn.Hardtanh(-0.1, 0.1))


class Strange(torch.Tensor):
    pass


def replace_a_tensor(g):
    g[2].bias = nn.Parameter(g[2].bias.detach().as_subclass(Strange))


def replace_the_original(g):
    weight = g[0].parametrizations.weight
    weight.original = nn.Parameter(weight.original.detach().as_subclass(Strange))


def replace_a_layer(g):
    g[1] = nn.Sequential(nn.ELU(), nn.Dropout(0.0))


def change_the_class(g):
    g[1].__class__ = type("Own", (nn.ELU,), {"forward": lambda self, x: 30 * x})


CHANGES = [
    shadow_a_method, shadow_the_call, shadow_the_weight, hook_a_layer, hook_the_constraint, hook_the_parametrization,
    halve_the_constraint,
    add_a_parametrization, add_a_parametrized_bias, replace_a_tensor, replace_the_original, replace_a_layer,
    change_the_class,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_change_after_a_run_ends_it(change):
    """Also between the refresh of a pass and its run, when weights are frozen."""
    chain, x = Chain(ResidualBlock(contractive_mlp(4, (8,))), ActNorm(4)).train(), batch(4)
    chain.double()
    chain.forward_and_logdet(x)
    chain.forward_and_logdet(x)
    assert len(read_run(list(chain), x, None)) == 2
    assert not why_untrusted(chain[0].g[0])
    with batched_refresh(chain):
        change(chain[0].g)
        assert not read_run(list(chain), x, None)
    if change is not replace_a_layer:
        assert any(why_untrusted(layer) for layer in chain[0].g)


@pytest.mark.parametrize("freeze", [nullcontext, batched_refresh, freeze_norms])
def test_a_frozen_weight_is_that_of_the_layer(freeze):
    g = contractive_mlp(8, (8,))
    layer, plain = g[0], nn.Linear(2, 2)
    with freeze(g):
        assert torch.equal(weight_of(layer), layer.weight)
        assert (weight_of(layer) is layer.weight) == (freeze is batched_refresh)  # which scales both layers as a stack
        assert weight_of(plain) is plain.weight
        add_a_parametrization(g)
        assert torch.equal(weight_of(layer), layer.weight)
        assert weight_of(layer).abs().max() <= 0.1 + 1e-6


@pytest.mark.parametrize("change", [hook_the_constraint, hook_the_parametrization, halve_the_constraint])
def test_a_weight_with_a_hook_is_what_the_hook_returns(change):
    g = contractive_mlp(8, (8,))
    before = g[0].weight
    change(g)
    assert torch.equal(weight_of(g[0]), g[0].weight)
    assert not torch.equal(weight_of(g[0]), before)


def test_a_hook_on_the_gradient_of_a_weight_is_called():
    g, called = contractive_mlp(8, (8,)), []
    g[0].parametrizations.weight[0].register_full_backward_hook(lambda *_: called.append(True))
    weight_of(g[0]).sum().backward()
    assert called


def test_a_weight_that_is_no_parameter_is_constrained_all_the_same():
    layer = nn.Linear(4, 4)
    weight = layer.weight.detach()
    del layer.weight
    layer.register_buffer("weight", weight)
    constrain_layer_(layer, 0.5, default_rule(weight.shape))
    assert torch.equal(weight_of(layer), layer.weight)

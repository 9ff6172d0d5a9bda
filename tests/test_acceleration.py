"""A step that was made fast computes what a plain step computes, up to rounding."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from iresnet import (
    ActNorm,
    Chain,
    Classifier,
    DiagonalNormal,
    Exact,
    Flow,
    Multiscale,
    PowerSeries,
    ResidualBlock,
    Squeeze,
    contractive_convnet,
    contractive_mlp,
    mlp_flow,
)
from iresnet.acceleration import Acceleration, Stepper, fused
from iresnet.acceleration.unit import advance
from iresnet.checkpoint import load, save
from iresnet.lipschitz import MaxMin, together
from iresnet.objective import Classification, MaximumLikelihood
from iresnet.precision import float32_products
from iresnet.rivals import FreeBlock
from iresnet.training import State, Training, make_optimiser, set_rate
from tests.zoo import normal

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class Own(nn.Sequential):
    """A branch with a forward of its own."""

    def forward(self, x):
        return super().forward(x) / 4


def branch(channels):
    return contractive_convnet(channels, 6, coefficient=0.8, preactivation=True)


def convolutional(kind="blocks"):
    torch.manual_seed(0)
    parts = [ActNorm(2), ResidualBlock(branch(2)), ActNorm(2), ResidualBlock(branch(2)), Squeeze()]
    if kind == "mixed":  # a block without ActNorm, an ActNorm without a block, a branch that cannot be read
        parts += [
            ResidualBlock(branch(8)),
            ActNorm(8),
            Squeeze(),
            ResidualBlock(Own(nn.Conv2d(32, 32, 1)), lipschitz=0.9),
        ]
    elif kind == "free":
        parts += [ActNorm(8), FreeBlock(nn.Sequential(nn.ELU(), nn.Conv2d(8, 8, 3, padding=1, bias=False)))]
    else:
        parts += [ActNorm(8), ResidualBlock(branch(8)), ActNorm(8), ResidualBlock(branch(8))]
    size = 32 if kind == "mixed" else 8
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(size, 3))
    return (
        Classifier(Chain(*parts), head),
        normal(5, 2, 4, 4, seed=1, dtype=torch.float32),
        torch.tensor([0, 1, 2, 0, 1]),
    )


def dense():
    torch.manual_seed(0)
    parts = [t for _ in range(3) for t in (ActNorm(4), ResidualBlock(contractive_mlp(4, (8,))))]
    return (
        Classifier(Chain(*parts), nn.Linear(4, 2)),
        normal(6, 4, seed=1, dtype=torch.float32),
        torch.tensor([0, 1] * 3),
    )


def train(objective, x, y, wish, steps=9, device="cpu"):
    """Losses and weights of a few steps with a learning rate that changes, and what took them."""
    objective, x, y = copy.deepcopy(objective).to(device), x.to(device), y.to(device)
    optimiser = make_optimiser(objective.train(), Training(optimiser="sgd", learning_rate=0.05))
    stepper = Stepper(objective, optimiser, 1.0, torch.Generator(device).manual_seed(3), wish)
    losses = []
    for step in range(steps):
        set_rate(optimiser, 0.05 / (1 + step))
        losses.append(stepper(x, y, step)[0])
    return torch.stack(losses).cpu(), {k: v.cpu() for k, v in objective.state_dict().items()}, stepper


MAKE = {
    "blocks": convolutional,
    "mixed": lambda: convolutional("mixed"),
    "free": lambda: convolutional("free"),
    "dense": dense,
}
EAGER = Acceleration("off", "off", "float32")


@pytest.mark.parametrize("kind", MAKE)
def test_a_fused_pass_is_the_plain_pass(kind):
    model, x, y = MAKE[kind]()
    for _ in range(2):
        model.train()(x)
    twin, results = copy.deepcopy(model), []
    for each, context in ((model, nullcontext()), (twin, fused(twin, torch.float32, compiled=False))):
        with context:
            logits = each(x)
            nn.functional.cross_entropy(logits, y).backward()
        results.append([logits, *(p.grad for p in each.parameters())])
    torch.testing.assert_close(results[1], results[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(twin.state_dict(), model.state_dict())


@pytest.mark.parametrize("kind", MAKE)
def test_steps_in_bfloat16_stay_near_those_in_float32_and_keep_the_state_in_float32(kind):
    model, x, y = MAKE[kind]()
    plain, _, _ = train(Classification(model), x, y, EAGER)
    quick, _, stepper = train(Classification(model), x, y, Acceleration(precision="bfloat16"))
    assert stepper.dtype is torch.bfloat16
    assert not torch.equal(quick, plain)
    torch.testing.assert_close(quick, plain, atol=3e-2, rtol=3e-2)
    with fused(model, torch.bfloat16, compiled=False):
        assert model.encode(x).dtype is torch.float32


def test_the_compiled_function_is_the_plain_one(monkeypatch):
    """With a backend that needs no compiler; the default one is tried where there is time."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    advance.cache_clear()
    model, x, y = dense()
    plain, plain_state, _ = train(Classification(model), x, y, EAGER)
    quick, quick_state, stepper = train(Classification(model), x, y, Acceleration("off", "on", "float32"))
    advance.cache_clear()
    assert stepper.compiled
    torch.testing.assert_close(quick, plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(quick_state, plain_state, atol=2e-5, rtol=1e-4)


def test_a_cpu_takes_plain_steps_and_says_why():
    model, x, y = dense()
    _, _, stepper = train(Classification(model), x, y, Acceleration(), steps=1)
    assert stepper.method == "operation by operation"
    assert stepper.reasons == ["no CUDA graph: this device is a CPU", "no compiled blocks: this device is a CPU"]


def image_flow(terms=3, kind="plain"):
    torch.manual_seed(0)
    activation = MaxMin if kind == "no slope" else partial(nn.ELU, 1.0)
    parts = [Squeeze()]
    for _ in range(2):
        g = contractive_convnet(4, 6, coefficient=0.8, activation=activation)
        parts += [ActNorm(4), ResidualBlock(g)]
    stages = [Chain(*parts), Chain(Squeeze(), ActNorm(8), ResidualBlock(contractive_convnet(8, 6)), ActNorm(8))]
    transform = Multiscale(stages, (1, 12, 12)) if kind == "multiscale" else Chain(*parts)
    base = DiagonalNormal(transform.output_shape((1, 12, 12)))
    flow = Flow(transform, base, estimator=PowerSeries(terms=terms), event_shape=(1, 12, 12))
    return flow, normal(5, 1, 12, 12, seed=1, dtype=torch.float32)


@pytest.mark.parametrize("kind", ["plain", "multiscale", "no slope"])
def test_a_fused_density_is_the_plain_density_with_the_same_probes(kind):
    flow, x = image_flow(kind=kind)
    for _ in range(2):
        flow.train()(x, generator=torch.Generator().manual_seed(0))
    twin, results = copy.deepcopy(flow), []
    for each, context in ((flow, nullcontext()), (twin, fused(twin, torch.float32, compiled=False))):
        with context:
            log_prob = each(x, generator=torch.Generator().manual_seed(5))
            log_prob.sum().backward()
        results.append([log_prob, *(p.grad for p in each.parameters())])
    torch.testing.assert_close(results[1], results[0], atol=2e-4, rtol=1e-4)


def test_an_estimator_that_cannot_be_fused_is_left_as_it_is():
    flow, x = image_flow()
    twin = copy.deepcopy(flow.train())
    with fused(twin, torch.float32, compiled=False):
        got = twin(x, estimator=Exact())
    torch.testing.assert_close(got, flow(x, estimator=Exact()), atol=1e-4, rtol=1e-5)


def test_a_density_in_bfloat16_stays_near_float32():
    flow, x = image_flow()
    plain, _, _ = train(MaximumLikelihood(flow), x, torch.zeros(5), EAGER)
    quick, _, stepper = train(MaximumLikelihood(flow), x, torch.zeros(5), Acceleration(precision="bfloat16"))
    assert stepper.dtype is torch.bfloat16
    assert not torch.equal(quick, plain)
    torch.testing.assert_close(quick, plain, atol=0.5, rtol=1e-2)


def test_an_exact_determinant_keeps_its_branches_in_float32_and_says_why():
    flow, x = mlp_flow(2, blocks=1, hidden=(4,)), normal(4, 2, seed=1, dtype=torch.float32)
    _, _, stepper = train(MaximumLikelihood(flow), x, torch.zeros(4), Acceleration(precision="bfloat16"), steps=1)
    assert stepper.dtype is torch.float32
    assert "no bfloat16: the log-determinant is not a power series of one probe" in stepper.reasons


@pytest.mark.parametrize("wrong", [{"graph": "yes"}, {"compile": "maybe"}, {"precision": "float8"}])
def test_wrong_settings_get_a_sentence(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} must be one of auto, .*; got '{wrong[name]}'"):
        Acceleration(**wrong)


@needs_cuda
@pytest.mark.parametrize("kind", MAKE)
def test_a_graph_trains_as_eager_steps_do(kind):
    model, x, y = MAKE[kind]()
    plain, plain_state, _ = train(Classification(model), x, y, EAGER, device="cuda")
    quick, quick_state, stepper = train(
        Classification(model), x, y, Acceleration("on", "off", "float32"), device="cuda"
    )
    assert stepper.graph
    assert stepper.reasons == []
    torch.testing.assert_close(quick, plain, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(quick_state, plain_state, atol=1e-3, rtol=1e-2)


@needs_cuda
def test_a_captured_density_draws_fresh_noise_at_every_step():
    flow, x = image_flow()
    plain, _, _ = train(MaximumLikelihood(flow), x, torch.zeros(5), EAGER, device="cuda")
    wish = Acceleration(precision="float32")
    quick, _, stepper = train(MaximumLikelihood(flow), x, torch.zeros(5), wish, device="cuda")
    assert stepper.graph
    assert stepper.fuse
    torch.testing.assert_close(quick, plain, atol=1e-3, rtol=1e-3)


@needs_cuda
@pytest.mark.parametrize("kind", ["blocks", "free"])
def test_everything_together_stays_near_eager_float32(kind):
    model, x, y = MAKE[kind]()
    plain, _, _ = train(Classification(model), x, y, EAGER, device="cuda")
    quick, _, stepper = train(Classification(model), x, y, Acceleration(), device="cuda")
    assert stepper.method == "one CUDA graph, blocks compiled, g in bfloat16"
    torch.testing.assert_close(quick, plain, atol=3e-2, rtol=3e-2)


def test_a_resumed_run_keeps_the_layout_of_its_moments(tmp_path):
    """A file keeps no layout; a fused optimiser that walks through memory would mix channels and positions."""
    model, x, y = convolutional()
    settings = Training(optimiser="adam", learning_rate=0.01, steps=6, warmup=1)
    wish = Acceleration(precision="bfloat16")

    def state_of():
        return State(Classification(copy.deepcopy(model)).train(), settings, None, wish)

    def advance_by(state, steps):
        for _ in range(steps):
            state.advance(x, y, state.step)
            state.step += 1

    first = state_of()
    advance_by(first, 4)
    first.update_average()
    save(first.snapshot(), tmp_path / "state.safetensors", version="test")
    second = state_of()
    second.restore(load(tmp_path / "state.safetensors"))
    second.advance.taken = 4  # past the eager steps, as the first is
    for state in (first, second):
        advance_by(state, 3)
    torch.testing.assert_close(second.objective.state_dict(), first.objective.state_dict(), atol=1e-6, rtol=1e-5)
    with pytest.raises(ValueError, match="a snapshot is restored before the first step"):
        second.restore(load(tmp_path / "state.safetensors"))


def test_linear_blocks_on_more_axes_are_left_as_they_are():
    torch.manual_seed(0)
    chain = Chain(ResidualBlock(contractive_mlp(4, (8,))))
    x = normal(5, 4, 4, seed=1, dtype=torch.float32)
    expected = chain(x)
    with fused(chain, torch.float32, compiled=False):
        torch.testing.assert_close(chain(x), expected)


def test_a_layer_without_a_part_in_the_loss_gets_no_gradient():
    torch.manual_seed(0)
    blocks = nn.ModuleList(ResidualBlock(contractive_mlp(3, (3,))) for _ in range(2))
    with together(blocks.train()):
        blocks[0](normal(2, 3, seed=1, dtype=torch.float32)).sum().backward()
    assert all(p.grad is None for p in blocks[1].parameters())
    assert all(p.grad is not None for p in blocks[0].parameters())


def test_a_second_derivative_through_scaled_weights_is_refused():
    model, x, _ = dense()
    model(x)
    weights = [p for n, p in model.named_parameters() if n.endswith("original")]
    (gradient,) = torch.autograd.grad(model.train()(x).square().sum(), weights[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable|not have been used"):
        torch.autograd.grad(gradient.sum(), weights[:1])


@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_products_are_set_back_as_they_were(precision):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with float32_products("tf32", torch.device("cuda")), float32_products("ieee", torch.device("cuda")):
            pass
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)

"""torch.compile into one graph gives the same numbers. The backends used here need no compiler."""

import copy

import pytest
import torch
from torch import nn

from iresnet import (
    ActNorm,
    Chain,
    Classifier,
    Exact,
    GramIteration,
    LipschitzConv2d,
    LipschitzLinear,
    PowerSeries,
    ResidualBlock,
    RussianRoulette,
    Squeeze,
    constrain_,
    contractive_convnet,
    contractive_mlp,
    mlp_flow,
)
from iresnet.lipschitz import cap_of
from tests.compiling import fresh, whole, x_of  # noqa: F401
from tests.zoo import UserNet, normal, rouse_

# Tracing doubles the time of a compilation; what is compiled is covered where it is tested as it is.
pytestmark = pytest.mark.no_cover


def warm(model, x):
    """Let ActNorms see data and convolutions their size: the refresh after a new size is a long one."""
    for _ in range(2):
        model(x)


def agree(model, twin, run):
    """Two training passes with the same numbers: outputs, gradients and the state that is left behind."""
    compiled = whole(lambda: run(twin))
    for _ in range(2):
        outputs = []
        for module, call in ((model, lambda: run(model)), (twin, compiled)):
            module.zero_grad()
            out = call()
            sum(t.square().sum() for t in out).backward()
            outputs.append([*out, *(p.grad for p in module.parameters())])
        torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(twin.state_dict(), model.state_dict(), atol=1e-5, rtol=1e-5)


LAYERS = {
    "linear": (lambda: LipschitzLinear(5, 4), (3, 5)),
    "linear-strict": (lambda: LipschitzLinear(5, 4, norm=GramIteration()), (3, 5)),
    "conv": (lambda: LipschitzConv2d(2, 3, 3, padding=1), (3, 2, 6, 6)),
    "conv-strict": (lambda: LipschitzConv2d(2, 3, 3, padding=1, norm=GramIteration()), (3, 2, 6, 6)),
    "conv-circular": (lambda: LipschitzConv2d(2, 3, 3, padding=1, padding_mode="circular"), (3, 2, 6, 6)),
    "conv-strided": (lambda: LipschitzConv2d(2, 4, 3, stride=2, groups=2), (3, 2, 7, 7)),
}


def kinds(table, quick):
    """All kinds, those that take long to trace for `make test-all` only."""
    return [kind if kind in quick else pytest.param(kind, marks=pytest.mark.slow) for kind in table]


@pytest.mark.parametrize("kind", kinds(LAYERS, ("conv",)))
def test_a_constrained_layer_trains_the_same(kind):
    make, shape = LAYERS[kind]
    layer, x = rouse_(make()), x_of(*shape)
    layer(x)
    agree(layer, copy.deepcopy(layer), lambda module: (module(x),))


@pytest.mark.parametrize("kind", kinds(LAYERS, ("linear-strict",)))
def test_autocast_breaks_no_graph_and_leaves_the_norms(kind):
    make, shape = LAYERS[kind]
    layer, x = rouse_(make()), x_of(*shape)
    layer(x)
    twin = copy.deepcopy(layer)
    compiled = whole(twin)
    with torch.autocast("cpu", torch.bfloat16):
        half = compiled(x)
    layer(x)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(twin.state_dict(), layer.state_dict(), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_convolution_that_meets_a_larger_input_grows_with_it():
    layer = rouse_(LipschitzConv2d(1, 1, 3, padding=1, coefficient=0.5))
    twin = copy.deepcopy(layer)
    compiled = whole(twin, backend="eager")
    for n in (4, 4, 9, 6):
        x = x_of(1, 1, n, n)
        torch.testing.assert_close(compiled(x), layer(x))
        assert cap_of(twin).seen == cap_of(layer).seen
    assert cap_of(twin).seen == (9, 9)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_evaluation_compiles_too(mode):
    block, x = rouse_(ResidualBlock(contractive_mlp(3, (8,)))).train(mode == "train"), x_of(4, 3)
    with torch.no_grad():
        torch.testing.assert_close(whole(block)(x), block(x))


def test_an_exact_log_determinant_is_exported():
    flow, x = rouse_(mlp_flow(3, blocks=2, hidden=(8,))).eval(), x_of(4, 3)
    program = torch.export.export(flow, (x,), strict=True)
    torch.testing.assert_close(program.module()(x), flow(x))


NETWORKS = {
    "mlp": (lambda: contractive_mlp(3, (8,)), (4, 3), None),
    "conv": (lambda: contractive_convnet(2, 3), (4, 2, 4, 4), None),
    "circular": (
        lambda: constrain_(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), nn.ELU()), 0.9),
        (4, 2, 4, 4),
        None,
    ),
    "user": (UserNet, (4, 4), 0.7),
}


def block_of(kind):
    make, shape, lipschitz = NETWORKS[kind]
    torch.manual_seed(0)
    block = rouse_(ResidualBlock(make(), lipschitz=lipschitz))
    warm(block, x_of(*shape))
    return block, x_of(*shape)


@pytest.mark.parametrize("kind", kinds(NETWORKS, ("mlp", "user")))
def test_a_block_trains_the_same(kind):
    block, x = block_of(kind)
    agree(block, copy.deepcopy(block), lambda module: (module(x),))


@pytest.mark.parametrize("kind", kinds(NETWORKS, ("mlp",)))
@pytest.mark.parametrize(
    "estimator",
    [
        pytest.param(Exact(), id="exact", marks=pytest.mark.slow),
        pytest.param(PowerSeries(4), id="series"),
        pytest.param(RussianRoulette().stopped(0.9, u=0.3), id="roulette", marks=pytest.mark.slow),
    ],
)
def test_a_block_with_its_logdet_trains_the_same(kind, estimator, monkeypatch):
    """Probes are drawn outside of the graph in real use; here both draw the same ones."""
    block, x = block_of(kind)
    v = torch.sign(x_of(*x.shape, seed=9))
    monkeypatch.setattr("iresnet.logdet.estimators.draw_probes", lambda *_, **__: v)
    agree(block, copy.deepcopy(block), lambda module: module.forward_and_logdet(x, estimator=estimator))


@pytest.mark.slow
def test_a_flow_takes_the_same_training_steps():
    torch.manual_seed(0)
    flow, x = mlp_flow(2, blocks=2, hidden=(8,)), x_of(16, 2)
    flow(x)  # ActNorm sees its first batch before the graph is made
    twin = copy.deepcopy(flow)
    losses = []
    for model in (flow, twin):
        adam = torch.optim.Adam(model.parameters(), lr=1e-2)
        forward = whole(model) if model is twin else model
        run = []
        for i in range(4):
            adam.zero_grad()
            loss = -forward(x_of(16, 2, seed=i)).mean()
            loss.backward()
            adam.step()
            run.append(loss.detach())
        losses.append(torch.stack(run))
    torch.testing.assert_close(losses[0], losses[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(twin.state_dict(), flow.state_dict(), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_a_conditional_flow_is_one_graph():
    torch.manual_seed(0)
    flow, x, c = mlp_flow(2, blocks=2, hidden=(8,), context=3), x_of(16, 2), x_of(16, 3, seed=2)
    flow(x, context=c)
    twin = copy.deepcopy(flow)
    torch.testing.assert_close(whole(twin)(x, context=c), flow(x, context=c), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_classifier_trains_the_same():
    torch.manual_seed(0)
    chain = Chain(ActNorm(2), ResidualBlock(contractive_convnet(2, 3)), Squeeze())
    model, x = Classifier(chain, nn.Sequential(nn.Flatten(), nn.Linear(32, 3))), x_of(4, 2, 4, 4)
    warm(model, x)
    agree(model, copy.deepcopy(model), lambda module: (module(x),))


@pytest.mark.slow
def test_a_convolutional_block_with_its_logdet_is_one_graph():
    block, x = block_of("conv")
    v = torch.sign(x_of(*x.shape, seed=9))
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("iresnet.logdet.estimators.draw_probes", lambda *_, **__: v)
        for estimator in (Exact(), PowerSeries(4)):

            def run(t, estimator=estimator):
                return block.forward_and_logdet(t, estimator=estimator)

            torch.testing.assert_close(whole(run, backend="eager")(x), run(x), atol=1e-5, rtol=1e-5)


def test_graphs_of_a_layer_that_is_held_and_one_that_is_not_are_kept_apart():
    """A graph made inside a model, where nothing refreshes, must not serve a lone layer, where it does."""
    from iresnet.lipschitz import freeze_norms

    layer, x = rouse_(LipschitzLinear(6, 6)), x_of(4, 6)
    compiled = whole(layer)
    with freeze_norms(layer):
        compiled(x)
    with torch.no_grad():
        layer.parametrizations.weight.original.copy_(normal(6, 6, seed=4))
    before = cap_of(layer).direction.clone()
    with freeze_norms(layer):
        compiled(x)
    assert torch.equal(cap_of(layer).direction, before)
    compiled(x)
    assert not torch.equal(cap_of(layer).direction, before)

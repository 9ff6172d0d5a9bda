"""A branch read into a program computes what the branch computes."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from iresnet import Chain, ResidualBlock, presets
from iresnet.branch import Program, linearise, parse, run_program, try_parse
from iresnet.branch.input_spec import InputSpec
from iresnet.branch.program import interpret
from iresnet.data import builtin
from iresnet.gpu import planned
from iresnet.lipschitz import ACTIVATIONS as RECORDS
from iresnet.lipschitz import Concatenated, Conditioned, LipSwish, MaxMin, Potential, Sine, cap_of, constrain_
from iresnet.lipschitz.constraint import SpectralCap
from iresnet.models import build
from iresnet.spectral import NoBoundKnown
from tests.zoo import normal

ACTIVATIONS = [
    nn.ELU(), nn.Tanh(), nn.ReLU(), nn.Softplus(1.0, 40.0), nn.Softplus(2.0, 50.0), Sine(2.5), LipSwish(), MaxMin(),
    nn.Identity()
]  # fmt: skip


def convolutional(activation):
    first, last = nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(6, 4, 3, padding=1)
    return nn.Sequential(activation, first, activation, nn.Conv2d(6, 6, 1, bias=False), last).double()


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_a_program_computes_what_its_branch_does(activation):
    for g, shape in (
        (convolutional(activation), (3, 4, 5, 5)),
        (nn.Sequential(nn.Linear(4, 8), activation, nn.Linear(8, 4)).double(), (3, 4)),
    ):
        constrain_(g, 0.7).eval()
        x, found = normal(*shape, seed=1), try_parse(g)
        torch.testing.assert_close(run_program(found.program, x, found.tensors()), g(x))
        assert found.program.is_chain


def test_branches_of_one_shape_have_one_program_whatever_their_weights():
    programs = [try_parse(convolutional(activation)).program for activation in (nn.ELU(), nn.ELU(), nn.ELU(0.5))]
    assert programs[0] == programs[1] != programs[2]
    assert len(set(programs)) == 2


def test_gradients_reach_the_weights_behind_the_constraint():
    g = constrain_(nn.Sequential(nn.Linear(3, 3), nn.ELU(), nn.Linear(3, 3)), 0.5)
    run_program(
        try_parse(g).program, normal(2, 3, seed=1, dtype=torch.float32), try_parse(g).tensors()
    ).sum().backward()
    assert all(p.grad is not None for p in g.parameters())


@pytest.mark.parametrize("padding", [1, "same"])
def test_reading_a_branch_computes_no_constrained_weight(monkeypatch, padding):
    """Parsing happens in every step, and would otherwise scale every weight again, on a GPU inside its CUDA graph."""
    layers = [nn.Conv2d(3, 5, 3, padding=padding), nn.ELU(), nn.Conv2d(5, 3, 3, padding=padding)]
    block = ResidualBlock(constrain_(nn.Sequential(*layers), 0.7))
    with monkeypatch.context() as patched:
        patched.setattr(SpectralCap, "forward", lambda cap, weight: pytest.fail("a constrained weight was computed"))
        parse(block.g).record_sizes((8, 8))
        InputSpec.of(block.g)
        with planned(Chain(block), torch.float32, compiled=False):
            pass
    assert [cap_of(layer).seen for layer in layers[::2]] == [(8, 8), (8, 8)]


@pytest.mark.parametrize("preset", ["iresnet64", "cifar10-flow", "points-density"])
def test_a_training_step_reads_every_constrained_weight_once(monkeypatch, preset):
    e, reads, forward = presets.find(preset), Counter(), SpectralCap.forward
    network = replace(e.network, blocks=(2,) * len(e.network.blocks), width=min(4, e.network.width))
    schema = builtin.schema_of(e.data.source)
    data = torch.arange(6 * math.prod(schema.shape)).reshape(6, *schema.shape) % 251
    x, y = data.float() if schema.levels is None else data.byte(), torch.arange(6) if schema.classes else None
    objective = e.objective.build_objective(build(network, schema, e.objective.kind, data.float()), schema.levels)
    objective.train()(x, y)  # initialises ActNorms
    monkeypatch.setattr(SpectralCap, "forward", lambda cap, weight: reads.update([cap]) or forward(cap, weight))
    objective(x, y)[0].backward()
    assert set(reads) == {cap for m in objective.modules() if (cap := cap_of(m)) is not None}
    assert set(reads.values()) == {1}


class Own(nn.Sequential):
    def forward(self, x):
        return super().forward(x) / 2


@pytest.mark.parametrize(
    "g",
    [
        Own(nn.Linear(2, 2)),
        nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect")),
        nn.Sequential(nn.BatchNorm2d(2)),
        nn.Sequential(nn.Hardshrink()),
    ],
    ids=["own forward", "reflected", "batchnorm", "unknown"],
)
def test_what_cannot_be_read_has_no_program(g):
    assert try_parse(g) is None


@pytest.mark.parametrize(
    ("g", "shape"),
    [
        (nn.Sequential(nn.Conv2d(2, 2, 3, padding=(1, 2), padding_mode="circular")), (3, 2, 5, 4)),
        (nn.Sequential(nn.Conv2d(2, 2, (2, 4), padding="same")), (3, 2, 5, 4)),
        (nn.Sequential(nn.Conv1d(2, 3, 3, stride=2, dilation=2)), (3, 2, 9)),
        (nn.Sequential(nn.Flatten(), nn.Linear(8, 8), nn.GELU("tanh"), nn.Unflatten(1, (2, 2, 2))), (3, 2, 2, 2)),
        (nn.Sequential(nn.Linear(4, 6), nn.Hardtanh(-0.5, 0.3), nn.CELU(0.7), nn.LeakyReLU(0.2), nn.SiLU()), (3, 4)),
        (nn.Sequential(nn.Linear(4, 6), nn.ReLU6(), nn.Softsign(), nn.LogSigmoid(), nn.Sigmoid()), (3, 4)),
        (Potential(nn.Linear(4, 6), nn.ELU()), (3, 4)),
        (Potential(nn.Conv2d(2, 6, 3, padding=1, groups=2), nn.Tanh()), (3, 2, 4, 5)),
        (nn.Sequential(Concatenated(nn.Sequential(nn.Linear(4, 3), Concatenated(nn.ELU()))), nn.Linear(10, 4)), (3, 4)),
    ],
    ids=["circular", "uneven", "strided", "reshaped", "others", "more", "potential", "conv potential", "nested"],
)
def test_every_known_layer_and_combinator_has_a_program(g, shape):
    g, x, v = g.double(), normal(*shape, seed=1), normal(*shape, seed=2)
    found = try_parse(g)
    torch.testing.assert_close(run_program(found.program, x, found.tensors()), g(x))
    if found.program.has_slopes and shape == tuple(g(x).shape):
        _, vjp = torch.func.vjp(g, x)
        torch.testing.assert_close(linearise(g, x)[1](v), vjp(v)[0])


def test_a_context_is_a_tensor_of_the_program():
    g = Conditioned(nn.Linear(2, 3), nn.Linear(1, 3), nn.Sequential(nn.ELU(), nn.Linear(3, 2))).double()
    x, context = normal(4, 2), normal(4, 1, seed=1)
    found = try_parse(g)
    assert found.program.is_conditional
    assert not found.program.is_chain
    torch.testing.assert_close(run_program(found.program, x, found.tensors(g.embed(context))), g(x, context))
    with pytest.raises(ValueError, match="this network is conditional; pass context"):
        found.tensors()
    for whole in (nn.Sequential(g), Conditioned(g, nn.Linear(1, 2), nn.Linear(2, 2))):  # which gets no context inside
        with pytest.raises(NoBoundKnown, match="Conditioned inside another network gets no context"):
            parse(whole)


def test_results_are_kept_no_longer_than_a_step_takes_them():
    held = []

    def function(i, step, inputs, own):
        held.append(inputs[0])
        return inputs[0] + 1

    found: Program = try_parse(nn.Sequential(nn.ELU(), Concatenated(nn.Sequential(nn.ELU(), nn.ELU())))).program
    assert found.inputs == ((0,), (1,), (2,), (1, 3))
    assert float(interpret(found, torch.zeros(()), [torch.zeros(2)], function)) == 2
    assert [float(t) for t in held] == [0, 1, 2, 1]


@pytest.mark.parametrize("activation", [nn.ELU, LipSwish])
def test_without_a_graph_on_a_cpu_channels_come_last_and_nothing_else_changes(activation):
    g = constrain_(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), activation(), nn.Conv2d(8, 3, 1)), 0.9).double()
    x, v = normal(2, 3, 5, 6), normal(2, 3, 5, 6, seed=1)
    y, jacobian = linearise(g, x)
    with torch.no_grad():
        fast, fast_jacobian = linearise(g, x)
        torch.testing.assert_close(fast, y, atol=1e-12, rtol=0)
        torch.testing.assert_close(fast_jacobian(v), jacobian(v), atol=1e-12, rtol=0)
        assert fast.is_contiguous(memory_format=torch.channels_last)


OTHER = {"approximate": "tanh", "start_dim": 2, "end_dim": 2, "dim": 2, "unflattened_size": [1, 4], "threshold": 60.0}
MADE = {
    nn.Flatten: lambda: nn.Flatten(1, 2),
    nn.Unflatten: lambda: nn.Unflatten(1, (2, 2)),
    nn.Softplus: lambda: nn.Softplus(1.0, 50.0),
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=list(RECORDS))
def test_a_program_has_every_setting_of_an_activation_as_it_is_now(record):
    layer = MADE.get(record.kind, record.kind)().double()
    own = {name for name in vars(layer) if not name.startswith("_")} - {"training", "inplace"}
    assert own == set(record.settings)
    x = normal(3, 4, 4, 4, seed=1).mul(3)
    for name in record.settings:
        before = getattr(layer, name)
        setattr(layer, name, OTHER.get(name, 0.3 if before != 0.3 else 0.2))
        found = try_parse(nn.Sequential(layer))
        torch.testing.assert_close(run_program(found.program, x, found.tensors()), layer(x))
        setattr(layer, name, before)


def test_a_setting_that_is_no_number_is_refused_in_a_sentence():
    layer = nn.ELU()
    layer.alpha = object()
    with pytest.raises(NoBoundKnown, match="alpha must be a number; got <object"):
        parse(nn.Sequential(nn.Linear(2, 2), layer))


def test_an_activation_whose_limit_was_changed_is_inverted_as_it_is():
    torch.manual_seed(0)
    g = constrain_(nn.Sequential(nn.Linear(3, 8), nn.ReLU6(), nn.Linear(8, 3)), 0.9)
    g[1].max_val = 0.05
    block, x = ResidualBlock(g).double().eval(), normal(4, 3).mul(3)
    solution = block.solve(block(x).detach())
    assert bool(((solution.x - x).norm(dim=1) <= solution.error_bound + 1e-12).all())


def test_layers_after_a_potential_note_the_size_that_they_are_given():
    g = nn.Sequential(Potential(nn.Conv2d(1, 2, 5), nn.ELU()), nn.Conv2d(1, 1, 3, padding=1))
    constrain_(g, 0.9)
    try_parse(g).record_sizes((9, 9))
    assert [cap_of(layer).seen for layer in (g[0].layer, g[1])] == [(9, 9), (9, 9)]


@pytest.mark.parametrize("name", ["padding", "stride", "dilation"])
def test_one_number_for_all_axes_is_parsed_as_torch_does(name):
    layer = nn.Conv2d(2, 2, 3, padding=1).double()
    setattr(layer, name, 2)
    x = torch.randn(3, 2, 7, 7, dtype=torch.float64)
    found = try_parse(layer)
    assert torch.allclose(run_program(found.program, x, found.tensors()), layer(x))


@pytest.mark.parametrize("name", ["padding", "stride", "dilation"])
@pytest.mark.parametrize("value", [(1, 1, 1), (1.0, 1.0), 1.5, None, True], ids=str)
def test_settings_that_are_not_integers_are_not_parsed(name, value):
    layer = nn.Conv2d(2, 2, 3, padding=1)
    setattr(layer, name, value)
    assert try_parse(layer) is None

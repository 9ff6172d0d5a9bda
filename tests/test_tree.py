"""The walks over a model, beside torch's own."""

import pytest
import torch
from torch import nn

from iresnet import contractive_convnet, contractive_mlp, mlp_flow
from iresnet.tree import modules_of, parameters_of


def shared():
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.Sequential(nn.Tanh(), layer), nn.Linear(2, 2))
    model[2].weight = layer.weight
    model.register_module("empty", None)
    model.register_parameter("none", None)
    return model


def recursive():
    """A module inside itself, as a wrapper that keeps a reference to its owner."""
    model = nn.Sequential(nn.Sequential(nn.Tanh()))
    model[0].owner = model
    return model


MODELS = {
    "flow": lambda: mlp_flow(2, blocks=3, hidden=(8, 8)),
    "convolutions": lambda: contractive_convnet(2, 4),
    "shared": shared,
    "recursive": recursive,
    "layer": lambda: nn.Linear(2, 2),
    "script": lambda: torch.jit.script(nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Tanh())),
    "compiled": lambda: torch.compile(contractive_mlp(2, (4,)), backend="eager"),
    "parallel": lambda: nn.DataParallel(contractive_mlp(2, (4,))),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("name", MODELS)
def test_the_order_is_that_of_torch(name):
    model = MODELS[name]()
    assert [id(m) for m in modules_of(model)] == [id(m) for m in model.modules()]
    assert [id(p) for p in parameters_of(model)] == [id(p) for p in model.parameters()]


def test_it_sees_what_was_added_or_removed():
    model = nn.Sequential(nn.Tanh())
    assert len(modules_of(model)) == 2
    model.append(nn.Linear(2, 2))
    assert len(modules_of(model)) == 3
    assert len(parameters_of(model)) == 2
    del model[1]
    assert not parameters_of(model)


def test_it_can_be_compiled():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

    def total(x):
        return x + len(modules_of(model)) + sum(p.sum() for p in parameters_of(model))

    x = torch.zeros(2)
    torch.testing.assert_close(torch.compile(total, backend="eager", fullgraph=True)(x), total(x))

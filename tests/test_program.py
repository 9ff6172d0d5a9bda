"""A branch read into a program computes what the branch computes."""

import pytest
import torch
from torch import nn

from iresnet.lipschitz import Conditioned, LipSwish, MaxMin, Sine, constrain_, linearise, program
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
        x, steps = normal(*shape, seed=1), program.read(g)
        assert steps is not None
        torch.testing.assert_close(program.run(steps, x, program.tensors(g)), g(x))


def test_branches_of_one_shape_have_one_program_whatever_their_weights():
    assert program.read(convolutional(nn.ELU())) == program.read(convolutional(nn.ELU()))
    assert program.read(convolutional(nn.ELU())) != program.read(convolutional(nn.ELU(0.5)))


def test_gradients_reach_the_weights_behind_the_constraint():
    g = constrain_(nn.Sequential(nn.Linear(3, 3), nn.ELU(), nn.Linear(3, 3)), 0.5)
    program.run(program.read(g), normal(2, 3, seed=1, dtype=torch.float32), program.tensors(g)).sum().backward()
    assert all(p.grad is not None for p in g.parameters())


class Own(nn.Sequential):
    def forward(self, x):
        return super().forward(x) / 2


@pytest.mark.parametrize(
    "g",
    [
        Own(nn.Linear(2, 2)),
        nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")),
        nn.Sequential(nn.BatchNorm2d(2)),
        nn.Sequential(Conditioned(nn.Linear(2, 2), nn.Linear(1, 2), nn.Linear(2, 2))),
        nn.Sequential(nn.GELU()),
    ],
    ids=["own forward", "circular", "batchnorm", "conditioned", "unknown"],
)
def test_what_cannot_be_read_has_no_program(g):
    assert program.read(g) is None


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

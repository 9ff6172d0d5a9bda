"""The builders: contractive by construction, and clear about what they do not accept."""

import pytest
import torch
from torch import nn

from iresnet import LipSwish, ResidualBlock, certify, contractive_convnet, contractive_mlp, mlp_flow
from iresnet.lipschitz import cap_of


def coefficients(g):
    return [cap_of(m).coefficient for m in g.modules() if cap_of(m) is not None]


def test_lipschitz_is_shared_among_the_layers():
    assert coefficients(contractive_mlp(3, (8, 8), lipschitz=0.5)) == pytest.approx([0.5 ** (1 / 3)] * 3)


def test_coefficient_is_per_layer():
    assert coefficients(contractive_convnet(3, 8, coefficient=0.7)) == [0.7] * 3


def test_the_convolutional_branch_is_the_papers():
    g = contractive_convnet(3, 8, preactivation=True)
    kernels = [m.kernel_size for m in g if isinstance(m, nn.Conv2d)]
    assert kernels == [(3, 3), (1, 1), (3, 3)]
    assert isinstance(g[0], nn.ELU)
    assert g(torch.zeros(2, 3, 5, 6)).shape == (2, 3, 5, 6)


@pytest.mark.parametrize("activation", [nn.ELU, nn.Tanh, nn.Softplus, nn.ReLU, LipSwish])
def test_every_builder_passes_certify(activation):
    assert certify(ResidualBlock(contractive_mlp(3, (8,), activation=activation))).passed
    assert certify(ResidualBlock(contractive_convnet(2, 4, activation=activation)), (2, 6, 6)).passed
    assert certify(mlp_flow(2, blocks=2, hidden=(8,), activation=activation, context=3)).passed


def test_context_moves_the_output_and_not_the_constant():
    torch.manual_seed(0)
    g = contractive_mlp(2, (16,), context=3)
    x, far = torch.randn(50, 2), 100 * torch.randn(50, 3)
    assert not torch.allclose(g(x, far), g(x, torch.zeros(50, 3)))
    y = x + 1e-2 * torch.randn(50, 2)
    ratio = (g(x, far) - g(y, far)).norm(dim=1) / (x - y).norm(dim=1)
    assert float(ratio.detach().max()) < 0.9001


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: contractive_mlp(0), "must be positive; got 0"),
        (lambda: contractive_mlp(2, ()), "must be positive"),
        (lambda: contractive_mlp(2, activation=nn.SiLU), "LipSwish is its contractive form"),
        (lambda: contractive_mlp(2, coefficient=1.5), r"coefficient must lie in \(0, 1\); got 1.5"),
        (lambda: contractive_mlp(2, lipschitz=1.0), r"lipschitz must lie in \(0, 1\); got 1.0"),
        (lambda: contractive_mlp(2, coefficient=0.5, lipschitz=0.5), "either coefficient"),
        (lambda: contractive_convnet(0), "must be positive"),
        (lambda: contractive_convnet(2, kernels=(2,)), "kernels must be odd"),
        (lambda: mlp_flow(2, blocks=0), "blocks must be at least 1; got 0"),
    ],
)
def test_wrong_arguments_get_a_sentence(build, sentence):
    with pytest.raises(ValueError, match=sentence):
        build()

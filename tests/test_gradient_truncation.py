"""Theorem 4: the gradient of the truncated series is off by O(L^n), measured with exact traces in float64.

With d/dt ln det(I + J) = tr((I + J)^-1 dJ/dt) = sum_{k>=0} (-1)^k tr(J^k dJ/dt), the first n terms leave out

    |sum_{k>=n} (-1)^k tr(J^k dJ/dt)|  <=  ||dJ/dt||_* L^n / (1 - L),

where ||.||_* is the nuclear norm. The tail starts at k = n, one power earlier than that of the value.
"""

import pytest
import torch
from torch import nn

from iresnet import ResidualBlock, certify, contractive_mlp
from iresnet.logdet import Jacobian, power_series, series_weights
from tests.zoo import rouse_

DIMENSION, TERMS = 3, range(1, 13)


def truncated_logdet(g, x, terms):
    """The first terms of the series at one point x, its traces exact: the unit vectors are the probes."""
    points = x.expand(DIMENSION, DIMENSION)
    _, pull = torch.func.vjp(g, points)
    basis = torch.eye(DIMENSION, dtype=x.dtype)
    return power_series(Jacobian(lambda v: pull(v)[0]), basis, *series_weights(terms, points)).sum()


def gradient(loss, parameters):
    found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
    return torch.cat([part.flatten() for part in found])


class Scale(nn.Module):
    """g(x) = t x, of which everything is known: J = t I."""

    def __init__(self, t):
        super().__init__()
        self.t = nn.Parameter(torch.tensor(t, dtype=torch.float64))

    def forward(self, x):
        return self.t * x


@pytest.mark.parametrize("t", [0.9, 0.5, -0.5])
@pytest.mark.parametrize("terms", TERMS)
def test_the_error_of_a_scaling_is_its_geometric_tail(t, terms):
    g, x = Scale(t), torch.ones(1, DIMENSION, dtype=torch.float64)
    error = gradient(truncated_logdet(g, x, terms), [g.t]) - DIMENSION / (1 + t)
    assert error.item() == pytest.approx(-DIMENSION * (-t) ** terms / (1 + t), rel=1e-9)


@pytest.fixture(scope="module")
def network():
    """A block with a proven constant; the exact gradient of its log-determinant, and ||dJ/dt||_* of every parameter."""
    torch.manual_seed(0)
    block = rouse_(ResidualBlock(contractive_mlp(DIMENSION, (8,), lipschitz=0.8))).double().eval()
    x = torch.randn(1, DIMENSION, dtype=torch.float64)
    parameters = list(block.g.parameters())
    jacobian = torch.func.jacrev(lambda p: block.g(p[None])[0])(x[0])
    exact = gradient(torch.linalg.slogdet(torch.eye(DIMENSION, dtype=x.dtype) + jacobian)[1], parameters)
    entries = [gradient(entry, parameters) for entry in jacobian.flatten()]
    nuclear = torch.linalg.svdvals(torch.stack(entries).T.reshape(-1, DIMENSION, DIMENSION)).sum(1)
    (lipschitz,) = certify(block, input_shape=(DIMENSION,)).lipschitz.values()
    return block.g, lipschitz, x, parameters, exact, nuclear


@pytest.mark.parametrize("terms", TERMS)
def test_the_error_of_a_network_is_bounded_by_the_tail(network, terms):
    g, lipschitz, x, parameters, exact, nuclear = network
    error = (gradient(truncated_logdet(g, x, terms), parameters) - exact).abs()
    bound = nuclear * lipschitz**terms / (1 - lipschitz)
    assert (error <= bound + 1e-12).all()
    assert error.max() > 1e-10, "so small an error would show nothing"


def test_the_error_falls_at_least_as_fast_as_the_powers_of_the_constant(network):
    g, lipschitz, x, parameters, exact, _ = network
    errors = [(gradient(truncated_logdet(g, x, n), parameters) - exact).abs().max().item() for n in TERMS]
    rate = (errors[-1] / errors[0]) ** (1 / (len(errors) - 1))
    assert 0 < rate <= lipschitz

"""What the tests of compiled code share."""

import pytest
import torch

from tests.zoo import normal


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def whole(function, backend="aot_eager"):
    """One graph, with nothing outside."""
    return torch.compile(function, backend=backend, fullgraph=True)


def x_of(*shape, seed=1):
    return normal(*shape, seed=seed, dtype=torch.float32)

"""What the tests of compiled code share."""

import pytest
import torch
from torch._dynamo.utils import counters

from tests.zoo import normal


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def whole(function, backend="aot_eager"):
    """One graph, with nothing outside."""
    return torch.compile(function, backend=backend, fullgraph=True)


def x_of(*shape, seed=1):
    return normal(*shape, seed=seed, dtype=torch.float32)

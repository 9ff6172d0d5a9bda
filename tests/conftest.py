"""One thread, one seed, and hypothesis without chance: a test gives the same verdict every time."""

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("iresnet", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("iresnet")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)

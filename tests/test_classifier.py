"""The classifier: encode and decode are inverses; logits come from the code."""

import pytest
import torch
from torch import nn

from iresnet import (
    Banach,
    Chain,
    Classifier,
    ConvergenceError,
    InjectivePad,
    ResidualBlock,
    Squeeze,
    contractive_convnet,
    contractive_mlp,
)
from iresnet.lipschitz import refresh as refresh_module
from tests.zoo import normal, rouse_


@pytest.fixture
def model():
    torch.manual_seed(0)
    blocks = (ResidualBlock(contractive_convnet(4, 4)), Squeeze(), ResidualBlock(contractive_convnet(16, 4)))
    head = nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return rouse_(Classifier(Chain(InjectivePad(1), *blocks), head)).eval()


def test_logits_are_the_head_of_the_code(model):
    x = normal(5, 3, 4, 4, dtype=torch.float32)
    assert model(x).shape == (5, 10)
    assert torch.equal(model(x), model.head(model.encode(x)))
    assert torch.equal(model.encode(x), model.transform(x))


def test_decode_undoes_encode(model):
    x = normal(5, 3, 4, 4, dtype=torch.float32)
    torch.testing.assert_close(model.decode(model.encode(x)), x, atol=1e-4, rtol=0)


def test_decode_passes_tolerance_and_solver_on(model):
    z = model.encode(normal(1, 3, 4, 4, dtype=torch.float32))
    with pytest.raises(ConvergenceError, match="transform 3 of 4"):
        model.decode(z, tolerance=1e-6, solver=Banach(max_iterations=1))


def test_a_training_step_refreshes_each_layer_once_and_reaches_every_parameter(model, monkeypatch):
    calls, plain = [], refresh_module.refresh_group
    model.train()
    monkeypatch.setattr(
        refresh_module,
        "refresh_group",
        lambda group, *, settle: calls.append(len(group)) or plain(group, settle=settle),
    )
    nn.functional.cross_entropy(model(normal(5, 3, 4, 4, dtype=torch.float32)), torch.arange(5)).backward()
    assert sum(calls) == 6
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_a_context_reaches_the_blocks():
    model = Classifier(ResidualBlock(contractive_mlp(3, (8,), context=2)), nn.Linear(3, 4)).eval()
    x, c = normal(5, 3, dtype=torch.float32), normal(5, 2, seed=1, dtype=torch.float32)
    assert not torch.equal(model(x, c), model(x, -c))
    torch.testing.assert_close(model.decode(model.encode(x, c), c), x, atol=1e-4, rtol=0)


def test_bad_input_is_refused(model):
    with pytest.raises(ValueError, match="x must be finite; sample 0 of 1"):
        model(torch.full((1, 3, 4, 4), torch.nan))
    with pytest.raises(ValueError, match="x must be a floating-point tensor"):
        model.encode(torch.zeros(1, 3, 4, 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match="Squeeze"):
        model(torch.zeros(1, 3, 5, 5))

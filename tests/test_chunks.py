"""How many rows pass through blocks at a time (`evaluation.chunks`): by what a convolution lays out for each."""

import pytest
import torch
from torch import nn

from iresnet import DiagonalNormal, Flow
from iresnet.data import Dataset, Schema
from iresnet.evaluate import chunks, log_likelihood
from iresnet.evaluate.solving import decode, reconstruct, solve_codes
from iresnet.lipschitz import LipschitzConv2d, LipschitzLinear
from iresnet.models import Network, build
from iresnet.residual import ResidualBlock

SCHEMA = Schema((1, 8, 8), levels=256)


def block() -> ResidualBlock:
    """4 channels to 256 and back, kernels of 3 x 3: the second lays out 256 * 9 numbers for a position."""
    return ResidualBlock(
        nn.Sequential(LipschitzConv2d(4, 256, 3, padding=1), nn.ELU(), LipschitzConv2d(256, 4, 3, padding=1))
    )


def images(rows=10):
    x = torch.randint(256, (rows, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return Dataset(x, None, SCHEMA)


def flow():
    torch.manual_seed(0)
    model = build(Network(blocks=(2, 1), width=8, estimator="series"), SCHEMA, "density", images().x)
    model(images().x.float() + 0.5)  # initialises ActNorms
    return model.eval()


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.float64, 8)])
def test_a_layer_stays_below_what_is_used_again(dtype, size):
    x = torch.zeros(1, 4, 14, 14, dtype=dtype)
    rows = chunks.chunk_size(block().to(dtype), x, 500)
    needed = 256 * 9 * 14 * 14 * size
    assert rows * needed <= 32 * 2**20 < (rows + 1) * needed
    assert chunks.chunk_size(block().to(dtype), x, 3) == 3
    codes = torch.zeros(1, 784, dtype=dtype)
    assert chunks.chunk_size(block().to(dtype), codes, 500) == rows, "a code has as many numbers as the image"


def test_one_row_passes_however_large_a_layer_is(monkeypatch):
    monkeypatch.setattr(chunks, "REUSED", 1)
    assert chunks.chunk_size(block(), torch.zeros(1, 4, 14, 14), 500) == 1


def test_tables_pass_as_they_did():
    model = Flow(ResidualBlock(LipschitzLinear(3, 3)), DiagonalNormal(3))
    assert chunks.chunk_size(model, torch.zeros(1, 3), 500) == 500


def test_rows_do_not_depend_on_how_many_pass_at_a_time(monkeypatch):
    model, data = flow(), images()
    whole = log_likelihood(model, data, draws=2).value
    _, x = reconstruct(model, data)
    z = torch.randn(10, 16, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    solved, decoded = solve_codes(model, z).x, decode(model.double().transform, z)
    seen, plain = [], ResidualBlock.forward

    def forward(self, x, context=None):
        seen.append(len(x))
        return plain(self, x, context)

    monkeypatch.setattr(ResidualBlock, "forward", forward)
    monkeypatch.setattr(chunks, "REUSED", 3 * (8 * 9) * 16 * 8)  # three rows of 8 channels at 16 positions, in float64
    assert torch.allclose(decode(model.transform, z), decoded, atol=1e-6)
    assert torch.allclose(solve_codes(model, z).x, solved, atol=1e-6)
    again, _ = reconstruct(model, data)
    assert torch.allclose(again.x, x, atol=1e-6)
    assert max(seen) == 3
    torch.testing.assert_close(log_likelihood(model.float(), data, draws=2).value, whole, atol=1e-3, rtol=0)

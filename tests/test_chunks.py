"""How many rows pass through blocks at a time (`evaluation.chunks`): by what a convolution lays out for each."""

import threading

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
    assert rows * needed <= chunks.REUSED < (rows + 1) * needed
    assert chunks.chunk_size(block().to(dtype), x, 3) == 3
    codes = torch.zeros(1, 784, dtype=dtype)
    assert chunks.chunk_size(block().to(dtype), codes, 500) == rows, "a code has as many numbers as the image"


def test_one_row_passes_however_large_a_layer_is(monkeypatch):
    monkeypatch.setattr(chunks, "REUSED", 1)
    assert chunks.chunk_size(block(), torch.zeros(1, 4, 14, 14), 500) == 1


def test_tables_pass_as_they_did():
    model = Flow(ResidualBlock(LipschitzLinear(3, 3)), DiagonalNormal(3))
    assert chunks.chunk_size(model, torch.zeros(1, 3), 500) == 500


class TestChunksInParallel:
    @pytest.fixture(params=[1, 2, 3], ids=["one thread", "two threads", "three threads"])
    def threads(self, request):
        before = torch.get_num_threads()
        torch.set_num_threads(request.param)
        yield request.param
        torch.set_num_threads(before)

    @pytest.mark.parametrize(("rows", "size"), [(1, 5), (7, 2), (12, 4), (5, 500)])
    def test_every_sample_passes_once_and_in_order(self, threads, rows, size):
        seen, x = [], torch.arange(float(rows))[:, None]

        def function(part):
            seen.append((len(part), torch.is_grad_enabled(), threading.get_ident()))
            return 2 * part[:, 0]

        assert torch.equal(chunks.in_parallel(function, x, size), 2 * x[:, 0])
        assert sum(n for n, _, _ in seen) == rows
        assert max(n for n, _, _ in seen) <= size
        if threads > 1 and rows > 1:
            assert len(seen) >= min(rows, threads)  # none is idle
            assert not any(grad for _, grad, _ in seen)
            assert threading.get_ident() not in {thread for _, _, thread in seen}

    def test_each_computes_with_one_thread_and_the_number_is_restored(self, threads):
        found = chunks.in_parallel(lambda part: torch.full((len(part),), torch.get_num_threads()), torch.zeros(6, 1), 1)
        assert found.tolist() == [1] * 6
        assert torch.get_num_threads() == threads

    def test_an_error_is_raised_and_the_number_of_threads_restored(self, threads):
        def function(part):
            raise ValueError("the third chunk")

        with pytest.raises(ValueError, match="the third chunk"):
            chunks.in_parallel(function, torch.zeros(6, 1), 1)
        assert torch.get_num_threads() == threads

    def test_a_likelihood_is_the_same_for_any_number_of_threads(self, threads):
        shape = (1, 8, 12)
        data = Dataset(torch.arange(6 * 96, dtype=torch.uint8).reshape(6, *shape), None, Schema(shape, levels=256))
        torch.manual_seed(0)
        model = build(Network(blocks=(2, 1), width=8, estimator="series"), data.schema, "density", data.x)
        model(data.x.float() + 0.5)
        got = log_likelihood(model.eval(), data, draws=2).value
        torch.set_num_threads(1)
        torch.testing.assert_close(got, log_likelihood(model, data, draws=2).value, atol=1e-3, rtol=0)


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

"""Solving codes back in parts: the same numbers, in bounded memory."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from iresnet import Chain, DiagonalNormal, Flow, ResidualBlock
from iresnet.data import Dataset, Schema
from iresnet.evaluate import interpolate, reconstruct, solving
from iresnet.evaluate.solving import concatenate_solutions, decode, solve_codes, summarise_inverse
from tests.zoo import contraction, linear_block, normal

A = contraction(3, 0.8)


def flow():
    return Flow(Chain(linear_block(A), linear_block(A)), DiagonalNormal(3)).double().eval()


def table(rows=10):
    return Dataset(normal(rows, 3, seed=1).float(), None, Schema((3,)))


@pytest.fixture
def largest(monkeypatch):
    """Parts of four rows; a list of the sizes of the batches that a block has seen."""
    seen, plain = [], ResidualBlock.forward

    def forward(self, x, context=None):
        seen.append(len(x))
        return plain(self, x, context)

    monkeypatch.setattr(solving, "CHUNK", 4)
    monkeypatch.setattr(ResidualBlock, "forward", forward)
    return seen


def test_a_reconstruction_in_parts_is_the_whole(largest):
    solution, x = reconstruct(flow(), table())
    assert max(largest) == 4
    assert len(solution.x) == len(solution.converged) == len(solution.composed_bound) == 10
    assert bool(solution.converged.all())
    assert solution.proven
    torch.testing.assert_close(solution.x, x, atol=1e-9, rtol=0)


def test_codes_in_parts_are_linear_algebra(largest):
    inverse = torch.linalg.inv(torch.eye(3, dtype=A.dtype) + A)
    z = normal(10, 3, seed=2)
    exact = z @ (inverse @ inverse).T
    torch.testing.assert_close(solve_codes(flow(), z).x, exact, atol=1e-9, rtol=0)
    torch.testing.assert_close(decode(flow().transform, z, tolerance=1e-10), exact, atol=1e-9, rtol=0)


def test_a_lone_block_reports_like_a_chain():
    z = normal(5, 3)
    solution = solve_codes(Flow(linear_block(A), DiagonalNormal(3)).double().eval(), z)
    assert float(solution.code_residual.max()) < 1e-9


def test_lines_in_parts_are_the_same_lines(largest, monkeypatch):
    model = flow().float()
    parts = interpolate(model, table(), pairs=5, steps=3)
    assert max(largest) == 4
    monkeypatch.setattr(solving, "CHUNK", 500)
    torch.testing.assert_close(parts, interpolate(model, table(), pairs=5, steps=3))


def test_one_solution_that_is_not_proven_makes_the_whole_so():
    class Half(nn.Module):
        def forward(self, x):
            return 0.5 * x

    z = normal(4, 3)
    proven, asserted = (Chain(block).solve(z) for block in (linear_block(A), ResidualBlock(Half(), lipschitz=0.5)))
    assert concatenate_solutions([proven, proven]).proven
    both = concatenate_solutions([proven, asserted])
    assert not both.proven
    assert torch.equal(both.x, torch.cat([proven.x, asserted.x]))
    assert torch.equal(both.iterations, torch.cat([proven.iterations, asserted.iterations]))
    assert both.converged.all()
    assert summarise_inverse(both, torch.cat([z, z])).proven == 0
    assert concatenate_solutions([proven, replace(asserted, reason="A hook.")]).reason == "A hook."

"""Blocks of several kinds with a given Lipschitz constant, which `core.py` measures."""

from __future__ import annotations

import torch
from torch import nn

from iresnet import ResidualBlock, contractive_convnet, contractive_mlp, spectral, tighten_


def families(lipschitz: float) -> dict[str, tuple[ResidualBlock, tuple[int, ...]]]:
    """Blocks of several kinds with this constant, and the input shape of each."""

    def mlp(dimension: int) -> ResidualBlock:
        g = saturated(contractive_mlp(dimension, (64, 64), lipschitz=lipschitz))
        return certified(ResidualBlock(g), (dimension,))

    conv = ResidualBlock(saturated(contractive_convnet(2, 16, lipschitz=lipschitz)))
    conv.train()(torch.randn(2, 2, 6, 6))
    return {
        "2-D linear": (linear_block(2, lipschitz), (2,)),
        "2-D MLP, trained": (stretched_block(2, lipschitz), (2,)),
        "10-D MLP, trained": (stretched_block(10, lipschitz), (10,)),
        "2-D MLP, random": (mlp(2), (2,)),
        "10-D MLP, random": (mlp(10), (10,)),
        "50-D MLP, random": (mlp(50), (50,)),
        "20-D linear": (linear_block(20, lipschitz), (20,)),
        "2x6x6 convolutional, random": (certified(conv, (2, 6, 6)), (2, 6, 6)),
    }


def stretched_block(dimension: int, lipschitz: float, steps: int = 250) -> ResidualBlock:
    """A block trained on x -> x + 2 sin 2x, so that its slopes reach the allowed constant."""
    g = contractive_mlp(dimension, (64, 64), lipschitz=lipschitz)
    block = ResidualBlock(g)
    optimiser = torch.optim.Adam(block.parameters(), 1e-2)
    for _ in range(steps):
        x = torch.randn(256, dimension)
        loss = (block(x) - x - 2 * torch.sin(2 * x)).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return certified(block, (dimension,))


def certified(block: ResidualBlock, shape: tuple[int, ...]) -> ResidualBlock:
    """The block in eval mode, tightened so that its constant is proven."""
    block.eval()
    tighten_(block, shape)
    return block


def saturated(g: nn.Module) -> nn.Module:
    """The network with weights scaled up until every layer reaches its coefficient."""
    with torch.no_grad():
        for name, p in g.named_parameters():
            if name.endswith("original"):
                p.mul_(10)
    return g


def linear_block(dimension: int, lipschitz: float) -> ResidualBlock:
    """x + A x with a random A of norm `lipschitz`."""
    layer = nn.Linear(dimension, dimension)
    with torch.no_grad():
        layer.weight.mul_(0.9999 * lipschitz / spectral.norm_bound(layer))
    return ResidualBlock(nn.Sequential(layer)).eval()

"""The systems of Table 1 with random weights: a few layers of each, on vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ..chain import Chain
from ..models import contractive_mlp
from ..models.glow import glow, i_revnet, nice, real_nvp
from ..models.unconstrained import UnconstrainedBlock
from ..residual import ResidualBlock
from ..transform import Transform
from ..transforms.conditioner import mlp
from ..transforms.imported import ffjord, maf

#: From the number of dimensions to a list of layers.
Maker: TypeAlias = Callable[[int], Sequence[Transform]]

#: Layers of a system, and the number of inputs.
LAYERS, INPUTS = 4, 16


def _conditioner(inputs: int, outputs: int) -> nn.Module:
    return mlp(inputs, outputs, (32, 32), nn.ELU)


def _iresnet(d: int) -> list[Transform]:
    return [ResidualBlock(contractive_mlp(d, (32, 32), lipschitz=0.9)) for _ in range(LAYERS)]


def _resnet(d: int) -> list[Transform]:
    return [UnconstrainedBlock(nn.Sequential(nn.Linear(d, 32), nn.ELU(), nn.Linear(32, d))) for _ in range(LAYERS)]


def _i_revnet(d: int) -> list[Transform]:
    return i_revnet((d, 2, 2), LAYERS, first=True)


#: The layers of a system by number of dimensions (i-RevNet: channels of a 2 x 2 image).
MAKERS: dict[str, tuple[Maker, ...]] = {
    "ResNet": (_resnet,),
    "NICE / i-RevNet": (lambda d: nice((d,), LAYERS, _conditioner), _i_revnet),
    "Real NVP": (lambda d: real_nvp((d,), LAYERS, _conditioner),),
    "Glow": (lambda d: glow((d,), LAYERS, _conditioner),),
    "FFJORD": (partial(ffjord, hidden=(32, 32)),),
    "MAF": (partial(maf, blocks=LAYERS, hidden=(32, 32)),),
    "i-ResNet": (_iresnet,),
}
IMPORTED = ("FFJORD", "MAF")


def instance(make: Maker, dimension: int, seed: int) -> Transform:
    """Build a system with random weights, none of them zero, in float64 and eval mode."""
    torch.manual_seed(seed)
    chain = Chain(*make(dimension))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in chain.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator) / max(1, p.shape[-1]) ** 0.5)
    return chain.double().eval()


def inputs(make: Maker, dimension: int, samples: int = INPUTS) -> Tensor:
    """Draw random vectors, or images for i-RevNet."""
    shape = (dimension, 2, 2) if make is _i_revnet else (dimension,)
    return torch.randn(samples, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def count_turns() -> int:
    """Count how often an unconstrained residual block on the line turns around; if it does, two inputs share a code."""
    torch.manual_seed(0)
    block = UnconstrainedBlock(nn.Sequential(nn.Linear(1, 32), nn.ELU(), nn.Linear(32, 1))).double()
    with torch.no_grad():
        for p in block.parameters():
            p.mul_(6)
        steps = block(torch.linspace(-3, 3, 2_000, dtype=torch.float64)[:, None]).diff(dim=0).sign()
    return int((steps[1:] != steps[:-1]).sum())

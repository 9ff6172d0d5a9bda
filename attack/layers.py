"""Attacks on norm bounds of layers: no bound may lie below the largest singular value of the dense matrix."""

from __future__ import annotations

import math
import random
from typing import Any, cast

import torch
from torch import Tensor, nn

import iresnet
from iresnet import NoBoundKnown, ResidualBlock, constrain_, spectral

from . import Violation, kind, networks
from .reference import dense, spectral_norm

#: The largest relative error of LAPACK's singular values.
ROUNDING = 1e-12


@kind("layers", cases=45_000)
def layers(r: random.Random) -> str:
    """Norm bounds of linear layers and convolutions, for one input size and for all, against dense SVDs."""
    layer, shape = networks.layer(r)
    try:
        bound = spectral.norm_bound(layer, shape)
    except NoBoundKnown:
        return "refused"
    except ValueError as error:
        if bool(cast(Tensor, layer.weight).isfinite().all()):
            raise
        return "not finite" if str(error) else "?"
    true = spectral_norm(dense(layer, shape))
    check(layer, shape, bound, true, "for this shape")
    if r.random() < 0.4:
        try:
            free = spectral.norm_bound(layer)
        except NoBoundKnown:
            return "bounded for this shape only"
        check(layer, shape, free, true, "for all shapes")
        if not isinstance(layer, nn.Linear):
            other = (shape[0], *networks.spatial_size(r, layer))
            check(layer, other, free, spectral_norm(dense(layer, other)), "for all shapes")
    return "bounded" if math.isfinite(bound) else "infinite"


def check(layer: Any, shape: tuple[int, ...], bound: float, true: float, which: str) -> None:
    """Raise `Violation` if a bound is NaN or below the true norm."""
    if not bound >= true * (1 - ROUNDING):
        weight = layer.weight.detach()
        what = f"{layer.extra_repr()}, {weight.dtype}, largest weight {float(weight.double().abs().max()):.1g}"
        raise Violation(f"bound {which} {bound:.8g} < {true:.8g} for inputs {shape} of {type(layer).__name__}({what})")


@kind("sizes", cases=300)
def sizes(r: random.Random) -> str:
    """Certificates of constrained convolutions without a shape hold for every input size seen, smaller ones too."""
    axes = r.choice([1, 1, 2])
    kernel = tuple(r.choice([1, 2, 3, 3, 5]) for _ in range(axes))
    channels, mode = r.randint(1, 2), r.choice(["circular", "circular", "zeros"])
    make: Any = networks.CONVOLUTIONS[axes - 1]
    layer = make(channels, channels, kernel, padding="same", padding_mode=mode, bias=False)
    networks.fill_(layer.weight, r)
    with torch.no_grad():
        layer.weight.mul_(10)
    norm = iresnet.GramIteration() if r.random() < 0.5 else iresnet.PowerIteration()
    block = ResidualBlock(constrain_(nn.Sequential(layer), r.uniform(0.3, 0.95), norm=norm)).eval()
    met = [(channels, *networks.spatial_size(r, layer, 9)) for _ in range(r.randint(1, 3))]
    with torch.no_grad():
        for shape in met:
            block(torch.randn(1, *shape))
    certificate = iresnet.certify(block)
    for shape in met if certificate.passed else []:
        check(
            layer,
            shape,
            certificate.lipschitz["block"],
            spectral_norm(dense(layer, shape)),
            "by certify, at a size seen,",
        )
    return "passed" if certificate.passed else "not passed"

"""Norm bounds of random layers, compared with the SVD of the dense operator."""

from __future__ import annotations

import math
import random
from statistics import median

import torch
from core_results import Row, row
from torch import nn

from iresnet import spectral
from iresnet.spectral import Geometry

KINDS = (
    "linear",
    "1x1",
    "same padding, n >= 8",
    "same padding 5x5, n >= 8",
    "same padding, n < 8",
    "other zero padding",
    "even kernel, 'same'",
    "strided",
    "dilated",
    "grouped",
    "circular",
    "circular, strided",
    "1-D",
    "3-D",
)


def measure_norms(trials: int) -> list[Row]:
    """Compare norm bounds with the SVD of the dense operator: as used (dense where small), and by the Fourier rule."""
    r, rows, violations, count = random.Random(0), [], 0, 0
    torch.manual_seed(0)
    for kind in KINDS:
        used, fourier = [], []
        for _ in range(math.ceil(trials / len(KINDS))):
            layer, shape = random_layer(kind, r)
            layer = layer.double()
            weight, geometry = layer.weight.detach(), Geometry.of(layer)
            size = shape[1:] if geometry.axes else ()
            true = float(torch.linalg.svdvals(spectral.dense_matrix(weight, geometry, size))[0])
            bound = spectral.norm_bound(layer, shape)
            rule = bound if geometry.axes == 0 else float(spectral.fourier_bound(weight[None], geometry, size))
            rule *= 1 if geometry.axes == 0 else 1 + spectral.ROUNDING_MARGIN
            strict = float(spectral.cheap_norm_bounds(weight[None], geometry, size or None, 6))
            violations += (bound < true) + (rule < true) + (strict < true)
            count += 1
            used.append(100 * (bound / true - 1))
            fourier.append(100 * (rule / true - 1))
        target = "< 5" if kind == "same padding, n >= 8" else "reported"
        rows.append(row("norm bound", kind, "median overshoot %, as used", median(used)))
        rows.append(row("norm bound", kind, "median overshoot %, Fourier rule alone", median(fourier), target))
    rows.insert(0, row("norm bound", f"{count} layers of {len(KINDS)} kinds", "violations", violations, "0"))
    return rows


def random_layer(kind: str, r: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    """A layer of the given kind with random sizes, and an input shape for it."""
    cin, cout, n = r.randint(1, 4), r.randint(1, 4), (r.randint(4, 12), r.randint(4, 12))
    odd = r.choice([1, 3, 5])
    match kind:
        case "linear":
            i, o = r.randint(1, 40), r.randint(1, 40)
            return nn.Linear(i, o, bias=False), (i,)
        case "1x1":
            return nn.Conv2d(cin, cout, 1, bias=False), (cin, *n)
        case "same padding, n >= 8":
            n = (r.randint(8, 14), r.randint(8, 14))
            return nn.Conv2d(cin, cout, 3, padding=1, bias=False), (cin, *n)
        case "same padding 5x5, n >= 8":
            n = (r.randint(8, 14), r.randint(8, 14))
            return nn.Conv2d(cin, cout, 5, padding=2, bias=False), (cin, *n)
        case "same padding, n < 8":
            n = (r.randint(2, 7), r.randint(2, 7))
            return nn.Conv2d(cin, cout, (odd, 3), padding=(odd // 2, 1), bias=False), (cin, *n)
        case "other zero padding":
            k = (r.randint(1, 4), r.randint(1, 4))
            return nn.Conv2d(cin, cout, k, padding=(r.randint(0, 3), r.randint(0, 3)), bias=False), (cin, *n)
        case "even kernel, 'same'":
            k = (r.choice([2, 4]), r.choice([2, 3, 4]))
            return nn.Conv2d(cin, cout, k, padding="same", bias=False), (cin, *n)
        case "strided":
            k, s = r.randint(2, 4), (r.choice([2, 3]), r.choice([1, 2]))
            return nn.Conv2d(cin, cout, k, stride=s, padding=r.randint(0, 2), bias=False), (cin, *n)
        case "dilated":
            return nn.Conv2d(cin, cout, 3, padding=r.randint(1, 3), dilation=r.choice([2, 3]), bias=False), (
                cin,
                r.randint(7, 12),
                r.randint(7, 12),
            )
        case "grouped":
            g = r.choice([2, 3])
            return nn.Conv2d(g * cin, g * cout, 3, padding=1, groups=g, bias=False), (g * cin, *n)
        case "circular":
            return nn.Conv2d(cin, cout, 3, padding=1, padding_mode="circular", bias=False), (cin, *n)
        case "circular, strided":
            return nn.Conv2d(cin, cout, 3, stride=2, padding=1, padding_mode="circular", bias=False), (cin, *n)
        case "1-D":
            return nn.Conv1d(cin, cout, odd, padding=odd // 2, bias=False), (cin, r.randint(4, 40))
        case _:
            n3 = tuple(r.randint(3, 5) for _ in range(3))
            return nn.Conv3d(cin, min(cout, 2), 3, padding=1, bias=False), (cin, *n3)

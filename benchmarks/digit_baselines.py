"""Baselines for the digits: standard models, each tuned on the same validation images as the i-ResNet.

svm       scikit-learn's support vector machine with an RBF kernel: classes, no density
mixture   scikit-learn's mixture of full Gaussians: a density, no classes
spline    zuko's neural spline flow (autoregressive, rational-quadratic): a density, trained for a time budget
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from iresnet.data import Augment, Splits

LEVELS, DIMENSION = 17, 64

#: Dequantised images (N, 64) -> ln p(x).
LogProb = Callable[[Tensor], Tensor]


def svm_error(splits: Splits) -> tuple[float, str]:
    """The test error in percent, and the settings with the lowest validation error."""
    from sklearn.svm import SVC

    def flat(part: str) -> tuple[np.ndarray, np.ndarray]:
        data = getattr(splits, part)
        return data.x.flatten(1).numpy() / 16.0, data.y.numpy()

    (x, y), (vx, vy), (tx, ty) = (flat(part) for part in ("train", "validation", "test"))
    grid = [(c, g) for c in (1.0, 3.0, 10.0, 30.0) for g in (0.05, 0.1, 0.2, 0.3, 0.5)]
    models = {(c, g): SVC(C=c, gamma=g).fit(x, y) for c, g in grid}
    best = max(grid, key=lambda s: models[s].score(vx, vy))
    return 100 * (1 - float(models[best].score(tx, ty))), f"C={best[0]:g}, gamma={best[1]:g}"


def mixture_bits(splits: Splits, seed: int = 0) -> tuple[float, str]:
    """The test bits/dim, and the settings with the highest validation likelihood."""
    from sklearn.mixture import GaussianMixture

    x, vx, tx = (dequantised(getattr(splits, p).x, seed, 4) for p in ("train", "validation", "test"))
    grid = [(k, r) for k in (5, 10, 20, 30) for r in (0.03, 0.1, 0.3)]
    models = {
        (k, r): GaussianMixture(k, covariance_type="full", reg_covar=r, max_iter=50, tol=1e-2, random_state=seed).fit(x)
        for k, r in grid
    }
    best = max(grid, key=lambda s: models[s].score(vx))
    bits = -float(models[best].score(tx)) / (DIMENSION * math.log(2))
    return bits, f"{best[0]} components, reg_covar={best[1]:g}"


def dequantised(x: Tensor, seed: int, draws: int = 1) -> Tensor:
    """Add uniform noise to integer images: each image `draws` times, flattened."""
    generator = torch.Generator().manual_seed(seed)
    images = x.flatten(1).float().repeat(draws, 1)
    return images + torch.rand(images.shape, generator=generator) * (1 - 1e-6)


@dataclass(frozen=True)
class Spline:
    """Settings of the spline flow: `alpha` of the logit, `shifted` the fraction of images shifted by up to a pixel."""

    hidden: tuple[int, ...] = (512,)
    transforms: int = 2
    bins: int = 8
    learning_rate: float = 4e-3
    weight_decay: float = 1.0
    batch: int = 64
    alpha: float = 0.002
    average: float = 0.99
    cooldown: float = 0.5
    shifted: float = 0.1


#: The best of 42 settings on held-out training images, with the i-ResNet's shifts; and settings near zuko's defaults.
TUNED = Spline()
PLAIN = Spline((128, 128), transforms=3, learning_rate=2e-3, weight_decay=1e-2, alpha=0.01, shifted=0.0)


def spline_bits(splits: Splits, seconds: float, seed: int, settings: Spline) -> tuple[float, float]:
    """Train for `seconds`; return the test and validation bits/dim of the averaged weights that validate best."""
    log_prob, validation = train_spline(splits, seconds, seed, settings)
    with torch.no_grad():
        bits = -float(log_prob(dequantised(splits.test.x, seed, 8)).mean()) / (DIMENSION * math.log(2))
    return bits, validation


def train_spline(splits: Splits, seconds: float, seed: int, s: Spline) -> tuple[LogProb, float]:
    """Train for `seconds`; return the log-likelihood and validation bits/dim of the best averaged model."""
    import zuko

    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    images, held_out = splits.train.x, dequantised(splits.validation.x, seed)
    augment = Augment(shift=1, shifted=s.shifted, border="blank")
    z, _ = _logit(dequantised(images, seed, 8), s.alpha)
    mean, std = z.mean(0), z.std(0)
    flow = zuko.flows.NSF(DIMENSION, transforms=s.transforms, hidden_features=s.hidden, bins=s.bins)

    def log_prob(model: nn.Module, x: Tensor) -> Tensor:
        z, logdet = _logit(x, s.alpha)
        return model().log_prob((z - mean) / std) + logdet - std.log().sum()

    optimiser = torch.optim.AdamW(flow.parameters(), s.learning_rate, weight_decay=s.weight_decay, betas=(0.9, 0.99))
    average = copy.deepcopy(flow).requires_grad_(False)
    best, best_bits, step, start = average, math.inf, 0, time.perf_counter()
    per_epoch = len(images) // s.batch
    while (done := (time.perf_counter() - start) / seconds) < 1:
        if step % per_epoch == 0:
            order = torch.randperm(len(images), generator=generator)
        x = augment(images[order[(step % per_epoch) * s.batch :][: s.batch]], generator).flatten(1).float()
        x = x + torch.rand(x.shape, generator=generator) * (1 - 1e-6)
        for group in optimiser.param_groups:
            group["lr"] = s.learning_rate * min(1, (step + 1) / 100) * min(1, (1 - done) / s.cooldown)
        loss = -log_prob(flow, x).mean()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(flow.parameters(), 5.0)
        optimiser.step()
        step += 1
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), flow.parameters(), strict=True):
                mine.lerp_(theirs, 1 - min(s.average, step / (step + 10)))
            if step % (2 * per_epoch) == 0:
                bits = -float(log_prob(average, held_out).mean()) / (DIMENSION * math.log(2))
                if bits < best_bits:
                    best, best_bits = copy.deepcopy(average), bits
    return lambda x: log_prob(best, x), best_bits


def _logit(x: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    slope = (1 - 2 * alpha) / LEVELS
    a, b = (alpha + slope * x).log(), (alpha + slope * (LEVELS - x)).log()
    return a - b, (math.log(slope) - a - b).sum(1)

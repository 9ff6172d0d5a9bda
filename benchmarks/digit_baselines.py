"""Baselines for the digits: standard models, each tuned on the same validation images as the i-ResNet.

svm       scikit-learn's support vector machine with an RBF kernel: classes, no density
mixture   scikit-learn's mixture of full Gaussians: a density, no classes
spline    zuko's neural spline flow (autoregressive, rational-quadratic): a density, trained for a time budget

    python benchmarks/digit_baselines.py [--seconds 190] [--jobs N] [--out FILE]

tries settings of the spline flow on held-out training images, never on test images, and writes them as pilots;
`python -m tools.trial FILE` adds them to the recipes in the documentation.
"""

from __future__ import annotations

import argparse
import copy
import math
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from iresnet import data
from iresnet.data import Augment, Dataset, Splits
from iresnet.presets import PRESETS
from iresnet.results import PILOT, Results, provenance, write
from iresnet.transforms.dequantisation import LearnedNoise

SHAPE, LEVELS, DIMENSION = (1, 8, 8), 17, 64

#: Integer images (N, 1, 8, 8) and their noise -> a lower bound of ln P(x), in expectation over the noise.
LogProb = Callable[[Tensor, torch.Generator], Tensor]


def shifted_copies(images: Dataset) -> tuple[Tensor, Tensor]:
    """Every image shifted by up to a pixel along each axis, nine copies, with its label; the border is blank."""
    assert images.y is not None
    wide = nn.functional.pad(images.x, (1, 1, 1, 1))
    x = torch.cat([wide[:, :, i : i + 8, j : j + 8] for i in range(3) for j in range(3)])
    return x, images.y.repeat(9)


def svm_error(splits: Splits, *, shifts: bool) -> tuple[float, str]:
    """The test error in percent, and the settings with the lowest validation error.

    With `shifts` it is trained on every image shifted by up to a pixel, as the i-ResNet is.
    """
    from sklearn.svm import SVC

    def flat(x: Tensor, y: Tensor) -> tuple[np.ndarray, np.ndarray]:
        return x.flatten(1).numpy() / 16.0, y.numpy()

    train = shifted_copies(splits.train) if shifts else (splits.train.x, splits.train.y)
    held_out = ((part.x, part.y) for part in (splits.validation, splits.test))
    (x, y), (vx, vy), (tx, ty) = (flat(*part) for part in (train, *held_out))
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
    """Settings of the spline flow.

    `alpha` is that of the logit, `shifted` the fraction of images shifted by up to a pixel, `noise` the width of the
    network that learns the dequantisation noise, the same as ours (0: uniform noise).
    """

    hidden: tuple[int, ...] = (512,)
    transforms: int = 2
    bins: int = 8
    learning_rate: float = 4e-3
    weight_decay: float = 1.0
    batch: int = 64
    alpha: float = 0.0005
    average: float = 0.99
    cooldown: float = 0.5
    shifted: float = 0.1
    noise: int = 0


#: The best settings on held-out training images, with the i-ResNet's shifts (docs/results/recipes.md has the trials);
#: settings near zuko's defaults; and the best with learned noise.
TUNED = Spline()
PLAIN = Spline((128, 128), transforms=3, learning_rate=2e-3, weight_decay=1e-2, alpha=0.01, shifted=0.0)


NOISY = replace(TUNED, noise=16, alpha=1e-5)

#: Settings to try: the best with uniform noise and its neighbours, then with learned noise.
NEIGHBOURS: dict[str, tuple[Any, ...]] = {
    "learning_rate": (2e-3, 8e-3),
    "weight_decay": (0.1, 3.0),
    "transforms": (1, 3),
    "bins": (16,),
    "hidden": ((256,), (1024,), (512, 512)),
    "batch": (128,),
    "alpha": (0.0001, 0.002, 0.01),
}
WIDE_BATCH = replace(TUNED, batch=128)
TRIALS = (
    TUNED,
    PLAIN,
    *(replace(TUNED, **{name: value}) for name, values in NEIGHBOURS.items() for value in values),
    *(replace(WIDE_BATCH, alpha=alpha) for alpha in (0.0001, 0.0005)),
    *(replace(TUNED, noise=noise, alpha=alpha) for noise in (16, 32) for alpha in (0.002, 0.0005, 1e-5)),
    *(replace(WIDE_BATCH, noise=16, alpha=alpha) for alpha in (0.002, 0.0005, 1e-5)),
    *(replace(TUNED, noise=16, learning_rate=rate) for rate in (2e-3, 8e-3)),
)


def spline_bits(splits: Splits, seconds: float, seed: int, settings: Spline) -> float:
    """Train for `seconds`; return the test bits/dim of the averaged weights with the fewest validation bits."""
    log_prob, _ = train_spline(splits, seconds, seed, settings)
    return _bits(log_prob, splits.test.x, seed, draws=8)


@torch.no_grad()
def _bits(log_prob: LogProb, images: Tensor, seed: int, draws: int = 1) -> float:
    generator = torch.Generator().manual_seed(seed)
    nats = torch.stack([log_prob(images, generator).mean() for _ in range(draws)])
    return -float(nats.mean()) / (DIMENSION * math.log(2))


class SplineFlow(nn.Module):
    """zuko's spline flow of the logits of dequantised images, whose noise is uniform or learned with it."""

    def __init__(self, images: Tensor, seed: int, s: Spline) -> None:
        super().__init__()
        import zuko

        z, _ = _logit(dequantised(images, seed, 8), s.alpha)
        self.alpha, self.mean, self.std = s.alpha, z.mean(0), z.std(0)
        self.flow = zuko.flows.NSF(DIMENSION, transforms=s.transforms, hidden_features=s.hidden, bins=s.bins)
        self.noise = LearnedNoise(SHAPE, LEVELS, s.noise) if s.noise else None

    def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Return ln p(x + u) - ln q(u | x), whose expectation over u is a lower bound of ln P(x)."""
        if self.noise is None:
            u, log_q = torch.rand(x.shape, generator=generator), torch.zeros(len(x))
        else:
            u, log_q = self.noise(x, torch.randn(x.shape, generator=generator))
        z, logdet = _logit((x + u * (1 - 1e-6)).flatten(1), self.alpha)
        log_p: Tensor = self.flow().log_prob((z - self.mean) / self.std)
        return log_p + logdet - self.std.log().sum() - log_q


def train_spline(splits: Splits, seconds: float, seed: int, s: Spline) -> tuple[LogProb, float]:
    """Train for `seconds`; return the log-likelihood and validation bits/dim of the best averaged model."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    images, augment = splits.train.x, Augment(shift=1, shifted=s.shifted, border="blank")
    flow = SplineFlow(images, seed, s)
    optimiser = torch.optim.AdamW(flow.parameters(), s.learning_rate, weight_decay=s.weight_decay, betas=(0.9, 0.99))
    average = copy.deepcopy(flow).requires_grad_(False)
    best, best_bits, step, start = average, math.inf, 0, time.perf_counter()
    per_epoch = len(images) // s.batch
    while (done := (time.perf_counter() - start) / seconds) < 1:
        if step % per_epoch == 0:
            order = torch.randperm(len(images), generator=generator)
        x = augment(images[order[(step % per_epoch) * s.batch :][: s.batch]], generator).float()
        for group in optimiser.param_groups:
            group["lr"] = s.learning_rate * min(1, (step + 1) / 100) * min(1, (1 - done) / s.cooldown)
        loss = -flow(x, generator).mean()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(flow.parameters(), 5.0)
        optimiser.step()
        step += 1
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), flow.parameters(), strict=True):
                mine.lerp_(theirs, 1 - min(s.average, step / (step + 10)))
            if step % (2 * per_epoch) == 0:
                bits = _bits(average, splits.validation.x, seed)
                if bits < best_bits:
                    best, best_bits = copy.deepcopy(average), bits
    return best, best_bits


def _logit(x: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    slope = (1 - 2 * alpha) / LEVELS
    a, b = (alpha + slope * x).log(), (alpha + slope * (LEVELS - x)).log()
    return a - b, (math.log(slope) - a - b).sum(1)


def try_spline(settings: Spline, seconds: float, splits: Splits) -> tuple[dict[str, Any], dict[str, Any]]:
    """One row of the recipes, and how it was made."""
    torch.set_num_threads(1)
    _, bits = train_spline(splits, seconds, 0, settings)
    changes = {k: v for k, v in asdict(settings).items() if v != asdict(TUNED)[k]}
    row = {"dataset": "digits", "task": "density", "preset": "zuko spline flow, tuned"}
    row["settings"] = " ".join(f"{k}={v}".replace(" ", "") for k, v in changes.items()) or None
    row |= {"training rows": len(splits.train), "batch": settings.batch, "steps": None, "seconds": round(seconds, 1)}
    row |= {"bits/dim": bits, "held-out rows": len(splits.validation), "method": "exact"}
    return row, provenance(seeds=[0], seconds=seconds) | {"settings": asdict(settings)} | PILOT


def main() -> None:
    """Try all settings, some at a time, and write their rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=190.0, help="training time of each trial")
    parser.add_argument("--jobs", type=int, default=1, help="number of trials that run in parallel")
    parser.add_argument("--out", type=Path, default=Path("runs/pilots/spline.json"), help="the file to write")
    options = parser.parse_args()
    splits = data.load(PRESETS["digits-density"].data)
    rows: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(try_spline, settings, options.seconds, splits) for settings in TRIALS]
        for row, run in (future.result() for future in as_completed(futures)):
            rows.append({**row, "run": len(runs)})
            runs.append(run)
            write(Results(options.out.stem, rows, runs), options.out.parent)
            print(f"{row['bits/dim']:.4f} bits/dim", row["settings"] or "unchanged", flush=True)


if __name__ == "__main__":
    main()

"""Log-determinants: the bound of Theorem 3, unbiased estimators, and memory that does not grow with terms."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from core_blocks import certified, families
from core_results import Row, row
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from iresnet import (
    Exact,
    PowerSeries,
    ResidualBlock,
    RussianRoulette,
    constrain_,
    contractive_convnet,
    contractive_mlp,
    truncation_bound,
)
from iresnet.logdet import Estimator


def measure_truncation() -> list[Row]:
    """Compare |ln det - first n terms with exact traces| with the bound of Theorem 3, n = 1..30."""
    violations, trials, closest = 0, 0, math.inf
    for lipschitz in (0.3, 0.5, 0.7, 0.9, 0.97):
        torch.manual_seed(1)
        for block, shape in families(lipschitz).values():
            block.double()
            x = 2 * torch.randn(20, *shape, dtype=torch.float64)
            j = dense_jacobian(block, x)
            exact = torch.linalg.slogdet(torch.eye(j.shape[-1]) + j)[1]
            constant, power, total = block.bound(shape).value, torch.eye(j.shape[-1]).expand_as(j).double(), 0 * exact
            for n in range(1, 31):
                power = power @ j
                total = total + (-1) ** (n + 1) / n * power.diagonal(dim1=-2, dim2=-1).sum(-1)
                bound = truncation_bound(constant, j.shape[-1], n)
                error = (exact - total).abs()
                violations += int((error > bound + 1e-12).sum())
                trials += len(x)
                if bool((error > 1e-9).any()):  # below that, the difference is rounding
                    closest = min(closest, float((bound / error[error > 1e-9]).min()))
    head = f"{trials} truncations: n = 1..30, 5 L x 8 families x 20 inputs"
    return [
        row("truncation <= Theorem 3", head, "violations", violations, "0"),
        row("truncation <= Theorem 3", head, "smallest bound / error", closest),
    ]


def dense_jacobian(block: ResidualBlock, x: Tensor) -> Tensor:
    """The Jacobians of g, (batch, d, d)."""
    jacobian = torch.func.vmap(torch.func.jacrev(lambda t: block.g(t[None])[0]))(x)
    d = x[0].numel()
    return jacobian.detach().reshape(len(x), d, d)


def measure_estimators(draws: int) -> list[Row]:
    """Distance of the mean of many draws from the exact value and gradient, in standard errors.

    The log-determinants are summed with random weights, one per sample.
    """
    rows = []
    blocks = {
        "MLP": (ResidualBlock(contractive_mlp(6, (32, 32), lipschitz=0.8)), (6,)),
        "convolutional": (ResidualBlock(contractive_convnet(2, 8, lipschitz=0.8)), (2, 4, 4)),
    }
    estimators: dict[str, Estimator] = {
        "series, 60 terms, Rademacher": PowerSeries(60),
        "series, 60 terms, Gaussian": PowerSeries(60, probe="gaussian"),
        "roulette": RussianRoulette(),
    }
    for family, (block, shape) in blocks.items():
        torch.manual_seed(2)
        certified(block.double(), shape)
        x = torch.randn(8, *shape, dtype=torch.float64).requires_grad_()
        weights = torch.rand(8, dtype=torch.float64)
        inputs = [x, *(p for p in block.parameters() if p.requires_grad)]
        directions = [torch.randn_like(p) for p in inputs]
        generator = torch.Generator().manual_seed(3)

        def once(estimator: Estimator) -> Tensor:
            _, logdet = block.forward_and_logdet(x, estimator=estimator, generator=generator)  # noqa: B023
            total = (weights * logdet).sum()  # noqa: B023
            grads = torch.autograd.grad(total, inputs, allow_unused=True)  # noqa: B023
            slope = sum((g * d).sum() for g, d in zip(grads, directions, strict=True) if g is not None)  # noqa: B023
            return torch.stack([total.detach(), torch.as_tensor(slope).detach()])

        exact = once(Exact())
        for name, estimator in estimators.items():
            drawn = torch.stack([once(estimator) for _ in range(draws)])
            z = ((drawn.mean(0) - exact) / (drawn.std(0) / draws**0.5)).abs()
            for metric, value in zip(("value", "gradient"), z.tolist(), strict=True):
                title = f"{metric}: distance in standard errors"
                rows.append(row("unbiased", f"{family}, {name}", title, value, "< 4", detail=True))
    largest = max(r["value"] for r in rows)
    return [row("unbiased", f"all {len(rows)} cases", "largest distance in standard errors", largest, "< 4"), *rows]


def measure_memory() -> list[Row]:
    """The ratio of peak tensor memory of a training step with 40 terms to one with 5 terms."""
    rows = []
    branch = constrain_(
        nn.Sequential(nn.Conv2d(4, 16, 3, padding=1), nn.Softsign(), nn.Conv2d(16, 4, 3, padding=1)), 0.9
    )
    for name, g in (("explicit products", contractive_convnet(4, 16)), ("general g", branch)):
        block, peaks = ResidualBlock(g), {}
        x = torch.randn(32, 4, 16, 16)
        block.forward_and_logdet(x, estimator=PowerSeries(2))[1].sum().backward()
        for terms in (5, 40):
            block.zero_grad(set_to_none=True)
            with PeakMemory() as memory:
                z, logdet = block.forward_and_logdet(x, estimator=PowerSeries(terms))
                (z.square().mean() - logdet.mean()).backward()
            peaks[terms] = memory.peak
        rows.append(row("memory", name, "peak, 40 terms / 5 terms", peaks[40] / peaks[5], "<= 1.1"))
    return rows


class PeakMemory(TorchDispatchMode):
    """The peak of live tensor storage in bytes, updated after every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, list[int]] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, Tensor):
                self._track(t)
        return out

    def _track(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        key = storage._cdata
        entry = self.live.setdefault(key, [storage.nbytes(), 0])
        if entry[1] == 0:
            self.now += entry[0]
            self.peak = max(self.peak, self.now)
        entry[1] += 1
        weakref.finalize(t, self._drop, key)

    def _drop(self, key: int) -> None:
        entry = self.live[key]
        entry[1] -= 1
        if entry[1] == 0:
            self.now -= entry[0]
            del self.live[key]

"""Measure the core's claims and write results/core.json: `make bench` (a few minutes on one core).

Norm bounds, error bounds of inverses, truncation bounds, unbiased estimators and constant memory. "No violation" is the
result of a test with the stated number of trials, not a proof.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import time
import weakref
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from iresnet import (
    Anderson,
    Banach,
    Exact,
    Newton,
    PowerSeries,
    ResidualBlock,
    RussianRoulette,
    constrain_,
    contractive_convnet,
    contractive_mlp,
    spectral,
    tighten_,
    truncation_bound,
)
from iresnet.audit.extended import evaluate_extended, to_extended
from iresnet.fixed_point import FEW_DIMENSIONS
from iresnet.logdet import Estimator
from iresnet.results import Results, provenance, require_commit, write
from iresnet.spectral import Geometry

Row = dict[str, Any]


def row(claim: str, family: str, metric: str, value: float, target: str = "-", **more: Any) -> Row:
    """One row of the results file. A row with a target is a headline, unless it is marked as a detail."""
    headline = target not in ("-", "reported") and not more.pop("detail", False)
    entry = {"claim": claim, "family": family, "metric": metric, "value": value, "target": target}
    return {**entry, **more, "headline": headline, "run": 0}


# ------------------------------------------------------------------------------------------------- norms of layers


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


# ------------------------------------------------------------------------------------------------- inverses


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


def families(lipschitz: float) -> dict[str, tuple[ResidualBlock, tuple[int, ...]]]:
    """Blocks of several kinds with this constant, and the input shape of each."""
    mlp = lambda d: certified(ResidualBlock(saturated(contractive_mlp(d, (64, 64), lipschitz=lipschitz))), (d,))  # noqa: E731
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


def truth(block: ResidualBlock, z: Tensor) -> tuple[Tensor, Tensor]:
    """The solution for z with the stored weights, as a float64 number and what it lacks.

    The iteration ends where float64 does, with an error that can exceed a bound; so it is corrected by its residual in
    extended precision, and the Jacobian there.
    """
    z = z.double()
    x = z
    for _ in range(5_000):
        following = z - (block.reference(x) - x)
        if bool((following - x).abs().max() <= 1e-15 * z.abs().max()):
            break
        x = following
    exact = to_extended(x)
    residual = torch.from_numpy((to_extended(z) - exact - evaluate_extended(block.g, exact)).astype(float))
    g, d = copy.deepcopy(block.g).double(), residual[0].numel()
    jacobian = torch.func.vmap(torch.func.jacrev(lambda v: g(v[None])[0]))(x).reshape(-1, d, d).detach()
    missing = torch.linalg.solve(torch.eye(d, dtype=torch.float64) + jacobian, residual.reshape(-1, d, 1))
    return x, missing.reshape(x.shape)


def measure_inverses(inputs: int) -> list[Row]:
    """Compare true errors with reported bounds, and evaluations of g with those of Banach's steps, for each family."""
    rows, violations, unproven, trials, tightness = [], 0, 0, 0, []
    solvers, others = (Banach(), Anderson(), Newton()), ("Anderson", "Newton")
    worst = dict.fromkeys(others, -(10**9))
    for lipschitz in (0.3, 0.5, 0.7, 0.9, 0.97):
        torch.manual_seed(0)
        named = families(lipschitz)
        for name, (block, shape) in named.items():
            count, evaluations = math.ceil(inputs / len(named)), Counter[str]()
            extra = dict.fromkeys(others, -(10**9))
            for dtype in (torch.float32, torch.float64):
                block.to(dtype)
                z = 2 * torch.randn(count, *shape, dtype=dtype)
                exact, missing = truth(block, z)
                iterations = {}
                for solver in solvers:
                    s = block.solve(z, solver=solver)
                    error = (s.x.double() - exact - missing).flatten(1).norm(dim=1)
                    violations += int((error > s.error_bound).sum())
                    unproven += int((~s.converged).sum())
                    trials += count
                    tightness.append(float((s.error_bound / error.clamp_min(1e-300)).median()))
                    iterations[type(solver).__name__] = s.iterations
                    evaluations[type(solver).__name__] += int(s.iterations.sum())
                for other in others:
                    extra[other] = max(extra[other], int((iterations[other] - iterations["Banach"]).max()))
            block.float()
            wanted = name.startswith("2-D") or "trained" in name
            target = "<= 0.5" if wanted and lipschitz == 0.9 else "reported"
            for other in others if math.prod(shape) <= FEW_DIMENSIONS else others[:1]:
                pair, ratio = f"{other} / Banach", evaluations[other] / evaluations["Banach"]
                rows.append(row(pair, name, "evaluations of g, ratio", ratio, target, L=lipschitz))
                what = "evaluations of g, worst sample"
                rows.append(row(f"{other} - Banach", name, what, extra[other], "<= 2", detail=True, L=lipschitz))
                worst[other] = max(worst[other], extra[other])
    head = f"{trials} solves: 5 L x 8 families x 3 solvers x 2 precisions"
    return [
        row("inverse error <= bound", head, "violations", violations, "0"),
        row("inverse error <= bound", head, "not proven to the default tolerance", unproven, "0"),
        row("inverse error <= bound", head, "median of bound / true error", median(tightness)),
        row("Anderson - Banach", "all families, all L", what, worst["Anderson"], "<= 2"),
        row("Newton - Banach", "2-D families, all L", what, worst["Newton"], "<= 2"),
        *rows,
    ]


# ------------------------------------------------------------------------------------------------- log-determinants


def dense_jacobian(block: ResidualBlock, x: Tensor) -> Tensor:
    """The Jacobians of g, (batch, d, d)."""
    jacobian = torch.func.vmap(torch.func.jacrev(lambda t: block.g(t[None])[0]))(x)
    d = x[0].numel()
    return jacobian.detach().reshape(len(x), d, d)


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


def main() -> None:
    """Measure everything, print it, and write results/core.json."""
    parser = argparse.ArgumentParser(description="Measure the core's claims; write results/core.json.")
    parser.add_argument("--quick", action="store_true", help="run fewer trials; print the results, do not write them")
    quick = parser.parse_args().quick
    if not quick:
        require_commit("results")
    torch.set_num_threads(1)
    start = time.perf_counter()
    parts: list[Callable[[], list[Row]]] = [
        lambda: measure_norms(56 if quick else 1_000),
        lambda: measure_inverses(80 if quick else 10_000),
        measure_truncation,
        lambda: measure_estimators(30 if quick else 3_000),
        measure_memory,
    ]
    rows = []
    for part in parts:
        rows += part()
        print(f"{len(rows)} rows after {time.perf_counter() - start:.0f} s", flush=True)
    for r in rows:
        at = f"L={r['L']} " if "L" in r else ""
        print(f"{r['claim']:<24}{at + r['family']:<62}{r['metric']:<42}{r['value']:>10.4g}   target {r['target']}")
    if not quick:
        seconds = time.perf_counter() - start
        run = provenance(seeds=[0, 1, 2, 3], seconds=seconds, precision="float32 and float64")
        print(write(Results("core", rows, [run])))


if __name__ == "__main__":
    main()

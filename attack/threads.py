"""Attacks with threads: four threads train, sample and certify at once; then every constraint and proof must hold."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import iresnet
from iresnet import Flow, certify
from iresnet.lipschitz import SpectralCap

from . import Violation, kind, networks
from .reference import spectral_norm
from .search import branch_of, largest_ratio, norms

#: The relative error allowed for constrained layers, since power iteration estimates from below.
LAG = 1e-3


@kind("threads", cases=60, limit=120)
def threads(r: random.Random) -> str:
    """Four threads train and sample their own or one shared model: constraints and proofs hold, no exception."""
    setting = r.choice(["own", "shared in eval", "shared in training"])
    flows = [_flow(r) for _ in range(1 if setting != "own" else 4)] * (4 if setting != "own" else 1)
    if setting == "shared in eval":
        flows[0].eval()
    jobs = [_job(r, setting, flow, r.getrandbits(60)) for flow in flows]
    _run_threads(jobs)
    for flow in {id(flow): flow for flow in flows}.values():
        _check(r, flow, setting)
    _check(r, _trained(_flow(r)), f"a model trained after {setting}")
    return setting


def _flow(r: random.Random) -> Flow:
    flow = iresnet.mlp_flow(2, blocks=2, hidden=(8,))
    for p in flow.parameters():
        if p.dim() > 1:
            p.data.mul_(r.choice([1.0, 4.0]))
    return flow


def _trained(flow: Flow, steps: int = 3, generator: torch.Generator | None = None) -> Flow:
    """The flow after a few steps that increase its weights."""
    flow.train()
    optimiser = torch.optim.SGD(flow.parameters(), lr=0.5)
    for _ in range(steps):
        x = 3 * torch.randn(16, 2, generator=generator)
        optimiser.zero_grad()
        (-flow(x).mean()).backward()
        nn.utils.clip_grad_norm_(flow.parameters(), 1.0)
        optimiser.step()
    return flow


def _job(r: random.Random, setting: str, flow: Flow, seed: int) -> Callable[[], None]:
    rounds = r.randint(2, 4)

    def job() -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(rounds):
            if setting == "own":
                _trained(flow, 2, generator).eval()
                x = flow.sample((4,), generator=generator)
                _check_sample(flow, x)
                certify(flow)
            elif setting == "shared in eval":
                x = flow.sample((4,), generator=generator)
                _check_sample(flow, x)
                flow.log_prob(x)
                certify(flow)
            else:
                (-flow(torch.randn(8, 2, generator=generator)).mean()).backward()

    return job


def _check_sample(flow: Flow, x: Tensor) -> None:
    """Check that the code of a sample inverts to it."""
    with torch.no_grad():
        z = flow.transform(x)
    s: Any = flow.transform.solve(z)
    error = norms(s.x.double() - x.double())
    if s.proven and bool((error > s.error_bound + 1e-3 * (1 + norms(x)))[s.converged].any()):
        raise Violation(
            f"in a thread: solve proven to {float(s.error_bound.max()):.3g}, error {float(error.max()):.3g}"
        )


def _run_threads(jobs: list[Callable[[], None]]) -> None:
    """Run all jobs at once with the shortest switch interval; raise the first exception."""
    failures, gate, before = list[BaseException](), threading.Barrier(len(jobs)), sys.getswitchinterval()

    def run(job: Callable[[], None]) -> None:
        gate.wait()
        try:
            job()
        except BaseException as error:
            failures.append(error)

    sys.setswitchinterval(1e-5)
    try:
        running = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    if failures:
        raise failures[0]


def _check(r: random.Random, flow: Flow, setting: str) -> None:
    """Check that after training and eval every layer respects its coefficient and every proof holds."""
    _trained(flow, 2)
    flow.eval()
    for name, layer in flow.named_modules():
        caps = [m for m in layer.modules() if isinstance(m, SpectralCap)]
        if isinstance(layer, nn.Linear) and len(caps) == 1:
            norm = spectral_norm(layer.weight.detach().double().numpy())
            if norm > caps[0].coefficient * (1 + LAG):
                raise Violation(f"{setting}: norm {norm:.5g} of {name} > coefficient {caps[0].coefficient:.5g}")
    certificate = certify(flow)
    if not certificate.passed:
        raise Violation(f"{setting}: {certificate.summary()}")
    for block in flow.modules():
        if isinstance(block, iresnet.ResidualBlock):
            x = networks.inputs(r, 4, (2,), torch.float32, largest=1)
            ratio = largest_ratio(partial(branch_of, block), x, r, steps=3)
            if not ratio <= block.bound((2,)).value * (1 + 1e-3):
                raise Violation(f"{setting}: found {ratio:.5g} > proven {block.bound((2,)).value:.5g}")

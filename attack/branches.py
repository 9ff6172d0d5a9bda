"""Attacks on certificates of blocks: no search may exceed a proven constant, and a failed certificate must say why.

A trick (`tricks`) changes the network of a block before or after the block is created, or the block itself. In every
case a forward pass that PyTorch can run works, `solve` returns a report, and `certify` passes only true claims.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from iresnet import ConvergenceError, NoBoundKnown, ResidualBlock, certify

from . import Violation, kind, networks, tricks
from .networks import one_line
from .search import branch_of, largest_ratio, mixes_samples, norms

#: Exceptions that a user must expect from a block about which nothing is proven.
REFUSALS = (NoBoundKnown, ValueError, ConvergenceError)

#: The relative slack for rounding of a search in float64 and in float32.
SLACK = {torch.float64: 1e-6, torch.float32: 1e-3}

BlockTrick: TypeAlias = Callable[[random.Random, ResidualBlock], ResidualBlock]


# ------------------------------------------------------------------------------------------------- tricks on blocks


class TripledForward(ResidualBlock):
    """A block with a custom forward, x + 3 g(x)."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return x + 3 * cast(Tensor, self.g(x))


class TripledBranch(ResidualBlock):
    """A block whose branch is 3 g."""

    def _branch(self, x: Tensor, context: Tensor | None) -> Tensor:
        return 3 * super()._branch(x, context)


def _subclass(r: random.Random, block: ResidualBlock) -> ResidualBlock:
    return r.choice([TripledForward, TripledBranch])(block.g)


def _hooked(r: random.Random, block: ResidualBlock) -> ResidualBlock:
    k = tricks.factor(r)
    block.register_forward_hook(lambda module, inputs, output: k * output)
    return block


def _pre_hooked(r: random.Random, block: ResidualBlock) -> ResidualBlock:
    k = tricks.factor(r)
    block.register_forward_pre_hook(lambda module, inputs: (k * inputs[0], *inputs[1:]))
    return block


def _forward_replaced(r: random.Random, block: ResidualBlock) -> ResidualBlock:
    parent, k = block.forward, tricks.factor(r)
    block.forward = lambda x, context=None: k * parent(x, context)  # type: ignore[method-assign]
    return block


def _g_replaced(r: random.Random, block: ResidualBlock) -> ResidualBlock:
    inner = block.g
    block.g = r.choice([tricks.Twice(inner), nn.Sequential(inner, tricks.Scale(9.0)), nn.Identity()])
    return block


BLOCK_TRICKS: tuple[BlockTrick, ...] = (_subclass, _hooked, _pre_hooked, _forward_replaced, _g_replaced)


# ------------------------------------------------------------------------------------------------- the attack


@kind("branches", cases=12_000)
def branches(r: random.Random) -> str:
    """Certificates and solves of blocks after a trick with hooks, subclasses, parametrizations, unknown parts."""
    dtype = r.choices([torch.float64, torch.float32], [3, 1])[0]
    shape = networks.vector_shape(r) if r.random() < 0.7 else networks.image_shape(r)
    g, _, _ = networks.branch(r, shape, lipschitz=r.uniform(0.2, 0.9), dtype=torch.float64)
    networks.clamp_biases_(g)
    g.to(dtype)
    try:
        name, block = _tricked(r, cast(nn.Sequential, g))
    except REFUSALS:
        return "refused"
    block.to(dtype)
    if r.random() < 0.8:
        block.eval()
    x = networks.inputs(r, 4, shape, dtype, largest=1)
    if r.random() > 0.02:
        return verify(r, block, x, name)
    with _hooks_of_all(r):
        return verify(r, block, x, f"{name}, hooks of all modules")


@contextmanager
def _hooks_of_all(r: random.Random) -> Iterator[None]:
    """Within this context a global forward hook scales the output of some modules."""
    k, chosen = tricks.factor(r), r.choice([nn.Linear, nn.Conv1d, nn.ELU, nn.Sequential, ResidualBlock])
    handle = register_module_forward_hook(lambda module, inputs, y: k * y if isinstance(module, chosen) else None)
    try:
        yield
    finally:
        handle.remove()


def _tricked(r: random.Random, g: nn.Sequential) -> tuple[str, ResidualBlock]:
    """A block with a random applicable trick, and the name of the trick."""
    for _ in range(20):
        try:
            return _played(r, g)
        except tricks.NotApplicable:
            pass
    return "harmless", ResidualBlock(g)


def _played(r: random.Random, g: nn.Sequential) -> tuple[str, ResidualBlock]:
    choice = r.random()
    if choice < 0.1:
        play = r.choice(BLOCK_TRICKS)
        return play.__name__.strip("_"), play(r, ResidualBlock(g))
    name = r.choice(sorted(tricks.TRICKS)) if r.random() < 0.85 else "harmless"
    if name == "compiled" and r.random() < 0.95:  # which takes a tenth of a second
        name = "traced"
    if choice < 0.55 and name in tricks.IN_PLACE:
        block = ResidualBlock(g)
        if r.random() < 0.5:
            block.bound()
        tricks.IN_PLACE[name](r, g)
        return f"{name} afterwards", block
    g = cast(nn.Sequential, tricks.TRICKS[name](r, g))
    if choice < 0.7:  # an asserted constant must never count as proven
        return f"{name} asserted", ResidualBlock(g, lipschitz=0.5)
    return name, ResidualBlock(g)


def verify(r: random.Random, block: ResidualBlock, x: Tensor, name: str) -> str:
    """Check every claim about a block; return the outcome."""
    try:
        with torch.no_grad():
            own = block.g(x.clone())
    except Exception:
        return "invalid"  # PyTorch itself cannot run it
    if own.shape != x.shape:
        return "invalid"
    if not bool(own.isfinite().all()):
        if certified(block, x) is not None:
            raise Violation(f"{name}: certified, but g returns NaN or infinity: {one_line(block)}")
        return "invalid"
    before = x.clone()
    try:
        with torch.no_grad():
            block(x)
    except Exception as error:
        raise Violation(f"{name}: forward fails: {type(error).__name__}: {error}") from error
    kept = torch.equal(x, before)
    x = before

    bound = claimed(block, x, name)
    if (
        r.random() < 0.5 and "mixed_samples" not in name
    ):  # a solve runs on single samples, which that trick cannot handle
        check_solve(r, block, x, bound, name)
    if r.random() < 0.15:
        check_training(block, x, name)
    if r.random() < 0.2 and x.dtype == torch.float64 and not block.training and name.split()[0] in tricks.TRICKS:
        check_logdet(block, x[:2], name)
    check_bound(r, block, x, name)
    if bound is None:
        return "not proven"
    if not kept:
        raise Violation(f"{name}: certified {bound:.4g}, but a forward pass overwrites the caller's x")
    if "asserted" in name:
        raise Violation(f"{name}: an asserted constant is called proven")
    branch = partial(branch_of, block)
    found = largest_ratio(branch, x, r)
    if not found <= bound * (1 + SLACK[x.dtype]) + 1e-9:
        raise Violation(f"{name}: certified Lip(g) <= {bound:.6g}, found {found:.6g}: {one_line(block)}")
    if mixes_samples(branch, x, r):
        raise Violation(
            f"{name}: certified {bound:.4g}, but a sample depends on other samples of its batch: {one_line(block)}"
        )
    return "proven"


def claimed(block: ResidualBlock, x: Tensor, name: str) -> float | None:
    """The certified constant of the block; None if there is none, which must come with a reason."""
    try:
        certificate = certify(block, tuple(x.shape[1:]))
    except ValueError as error:
        _check_message(error, name)
        return None
    if certificate.passed:
        return min(b.lipschitz for b in certificate.blocks)
    for b in certificate.blocks:
        if b.status == "proven" or not (b.remark or math.isfinite(b.lipschitz)):
            raise Violation(f"{name}: FAILED without a reason: {b}")
    return None


def certified(block: ResidualBlock, x: Tensor) -> float | None:
    """The certified constant of the block, or None."""
    try:
        certificate = certify(block, tuple(x.shape[1:]))
    except ValueError:
        return None
    return certificate.blocks[0].lipschitz if certificate.passed else None


def check_bound(r: random.Random, block: ResidualBlock, x: Tensor, name: str) -> None:
    """Check that the cached bound of a block holds for its g, whatever was done to the block."""
    try:
        bound = block.bound(tuple(x.shape[1:]))
    except REFUSALS as error:
        return _check_message(error, name)
    if bound.proven and bound.value < 1 and r.random() < 0.3:
        found = largest_ratio(lambda t: cast(Tensor, block.g(t.clone())), x, r, steps=3)
        if not found <= bound.value * (1 + SLACK[x.dtype]) + 1e-9:
            raise Violation(f"{name}: bound of g {bound.value:.6g}, found {found:.6g}: {one_line(block)}")
    return None


def _check_message(error: Exception, name: str) -> None:
    if len(str(error)) < 10:
        raise Violation(f"{name}: rejected without a reason: {error!r}")


def check_solve(r: random.Random, block: ResidualBlock, x: Tensor, bound: float | None, name: str) -> None:
    """Check that `solve` returns a report whose proven bound fits the residual of the live block."""
    with torch.no_grad():
        z = block(x.clone())
    if not bool(z.isfinite().all()):
        return
    try:
        s = block.solve(z)
    except Exception as error:
        if "NaN or infinity; no bound" in str(error):  # a broken model, reported as such
            return
        raise Violation(f"{name}: solve raises {type(error).__name__}: {error}") from error
    if s.proven and bool(s.converged.any()):
        with torch.no_grad():
            residual = norms(block(s.x.clone()).double() - z.double())
        most = 2 * s.error_bound + 1e4 * torch.finfo(x.dtype).eps * (1 + norms(z) + norms(s.x))
        if bool((residual > most)[s.converged].any()):
            raise Violation(
                f"{name}: solve proven to {float(s.error_bound.max()):.3g}, residual {float(residual.max()):.3g}: "
                f"{one_line(block)}"
            )
    if r.random() < 0.3:
        _check_inverse(block, z, s, name)


def _check_inverse(block: ResidualBlock, z: Tensor, s: Any, name: str) -> None:
    """Check that `inverse` returns, or raises an error with a message."""
    try:
        with torch.no_grad():
            block.inverse(z)
    except (*REFUSALS, RuntimeError) as error:
        if not isinstance(error, REFUSALS):
            raise Violation(f"{name}: inverse raises {type(error).__name__}: {error}") from error
        if s.proven and bool(s.converged.all()):
            raise Violation(f"{name}: solve is proven, inverse raises {error}") from error
        _check_message(error, name)


def check_training(block: ResidualBlock, x: Tensor, name: str) -> None:
    """Check that a training step works if PyTorch can differentiate g."""
    was = block.training
    block.train()
    try:
        for _ in range(2):  # PyTorch may succeed once and fail the second time
            cast(Tensor, block.g(x.clone() + 0)).square().sum().backward()
    except Exception:
        block.train(was)
        return
    try:
        cast(Tensor, block(x.clone())).square().sum().backward()
    except Exception as error:
        raise Violation(f"{name}: training fails: {type(error).__name__}: {error}") from error
    finally:
        block.train(was)


def check_logdet(block: ResidualBlock, x: Tensor, name: str) -> None:
    """Compare code and log-determinant with those of the live network, computed by finite differences."""
    with torch.no_grad():
        if any(word in name for word in ("backward_hook", "mixed", "in_place", "all modules")) or not torch.equal(
            block.g(x.clone()), block.g(x.clone())
        ):
            return
        if not _differentiates(block.g, x):
            return
        try:
            z, logdet = block.forward_and_logdet(x.clone())
        except ValueError:  # a determinant that is not positive is rejected
            return
        except Exception as error:
            raise Violation(f"{name}: forward_and_logdet raises {type(error).__name__}: {error}") from error
        if bool((norms(z - block(x.clone())) > 1e-9 * (1 + norms(z))).any()):
            raise Violation(f"{name}: forward_and_logdet gives another code than forward: {one_line(block)}")
        fine, coarse = (_by_differences(block, x, h) for h in (1e-6, 1e-4))
    settled = (fine - coarse).abs() < 1e-4  # no kink nearby
    if bool(((logdet - fine).abs() > 1e-3)[settled].any()):
        raise Violation(f"{name}: ln det {logdet.tolist()} is {fine.tolist()}: {one_line(block)}")


def _differentiates(g: nn.Module, x: Tensor) -> bool:
    """Whether PyTorch can differentiate g."""
    try:
        with torch.enable_grad():
            leaf = x.clone().requires_grad_()
            torch.autograd.grad(cast(Tensor, g(leaf + 0)).sum(), leaf)
    except RuntimeError:
        return False
    return True


def _by_differences(block: ResidualBlock, x: Tensor, h: float) -> Tensor:
    """ln |det| of the live block from central differences."""
    found = []
    for row in x:
        d = row.numel()
        steps = h * torch.eye(d, dtype=x.dtype).reshape(d, *row.shape)
        ahead = torch.cat([block((row + step)[None]) for step in steps])
        behind = torch.cat([block((row - step)[None]) for step in steps])
        found.append(torch.linalg.slogdet((ahead - behind).flatten(1) / (2 * h))[1])
    return torch.stack(found)

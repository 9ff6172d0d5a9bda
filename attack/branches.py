"""Attacks on certificates of blocks: whenever one is proven, no search may find a larger ratio; else it must say why.

The network of a block is changed by a trick (`tricks`) before the block is made or afterwards, or the block itself is.
Whatever is done, a forward pass that PyTorch can do works, `solve` reports, and `certify` passes only what is true.
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
from .search import branch_of, largest_ratio, mixes, norms

#: What a user must expect of a block that nothing is proven of.
REFUSALS = (NoBoundKnown, ValueError, ConvergenceError)

#: Ratios found may exceed a bound by this part, for the rounding of a search in float64 and in float32.
SLACK = {torch.float64: 1e-6, torch.float32: 1e-3}

BlockTrick: TypeAlias = Callable[[random.Random, ResidualBlock], ResidualBlock]


# ------------------------------------------------------------------------------------------------- tricks on blocks


class Doubled(ResidualBlock):
    """A block with a forward of its own, x + 3 g(x)."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return x + 3 * cast(Tensor, self.g(x))


class Branched(ResidualBlock):
    """A block whose branch is not g alone."""

    def _branch(self, x: Tensor, context: Tensor | None) -> Tensor:
        return 3 * super()._branch(x, context)


def _subclass(r: random.Random, block: ResidualBlock) -> ResidualBlock:
    return r.choice([Doubled, Branched])(block.g)


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
    block.g = r.choice([tricks.Twice(inner), nn.Sequential(inner, tricks.Times(9.0)), nn.Identity()])
    return block


BLOCK_TRICKS: tuple[BlockTrick, ...] = (_subclass, _hooked, _pre_hooked, _forward_replaced, _g_replaced)


# ------------------------------------------------------------------------------------------------- the attack


@kind("branches", cases=12_000)
def branches(r: random.Random) -> str:
    """Certificates and solves of blocks after a trick with hooks, subclasses, parametrizations, unknown parts."""
    dtype = r.choices([torch.float64, torch.float32], [3, 1])[0]
    shape = networks.rows(r) if r.random() < 0.7 else networks.images(r)
    g, _, _ = networks.branch(r, shape, lipschitz=r.uniform(0.2, 0.9), dtype=torch.float64)
    with torch.no_grad():
        for name, p in g.named_parameters():
            if name.endswith("bias"):
                p.clamp_(-1, 1)
    g.to(dtype)
    try:
        name, block = _tricked(r, cast(nn.Sequential, g))
    except REFUSALS:
        return "refused"
    block.to(dtype)
    if r.random() < 0.8:
        block.eval()
    x = networks.points(r, 4, shape, dtype, largest=1)
    if r.random() > 0.02:
        return verify(r, block, x, name)
    with _hooks_of_all(r):
        return verify(r, block, x, f"{name}, hooks of all modules")


@contextmanager
def _hooks_of_all(r: random.Random) -> Iterator[None]:
    """Within this context a hook of all modules of the process changes what some of them return."""
    k, chosen = tricks.factor(r), r.choice([nn.Linear, nn.Conv1d, nn.ELU, nn.Sequential, ResidualBlock])
    handle = register_module_forward_hook(lambda module, inputs, y: k * y if isinstance(module, chosen) else None)
    try:
        yield
    finally:
        handle.remove()


def _tricked(r: random.Random, g: nn.Sequential) -> tuple[str, ResidualBlock]:
    """A block and the name of the trick that was played on it: the first of several that fits."""
    for _ in range(20):
        try:
            return _played(r, g)
        except tricks.Unfit:
            pass
    return "harmless", ResidualBlock(g)


def _played(r: random.Random, g: nn.Sequential) -> tuple[str, ResidualBlock]:
    choice = r.random()
    if choice < 0.1:
        play = r.choice(BLOCK_TRICKS)
        return play.__name__.strip("_"), play(r, ResidualBlock(g))
    name = r.choice(sorted(tricks.TRICKS)) if r.random() < 0.85 else "harmless"
    if name == "compiled" and r.random() < 0.95:  # it takes a tenth of a second
        name = "traced"
    if choice < 0.55 and name in tricks.AFTERWARDS:
        block = ResidualBlock(g)
        if r.random() < 0.5:
            block.bound()
        tricks.AFTERWARDS[name](r, g)
        return f"{name} afterwards", block
    g = cast(nn.Sequential, tricks.TRICKS[name](r, g))
    if choice < 0.7:  # a constant that is asserted must never become a proof
        return f"{name} asserted", ResidualBlock(g, lipschitz=0.5)
    return name, ResidualBlock(g)


def verify(r: random.Random, block: ResidualBlock, x: Tensor, name: str) -> str:
    """Attack what is claimed of a block; the outcome in a word."""
    try:
        with torch.no_grad():
            own = block.g(x.clone())
    except Exception:
        return "invalid"  # PyTorch itself cannot run it
    if own.shape != x.shape:
        return "invalid"
    if not bool(own.isfinite().all()):
        if certified(block, x) is not None:
            raise Violation(f"{name}: certified, but g gives numbers that are not finite: {_short(block)}")
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
    if r.random() < 0.5 and "mixed_samples" not in name:  # a solve takes rows by themselves, which that one refuses
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
        raise Violation(f"{name}: certified Lip(g) <= {bound:.6g}, found {found:.6g}: {_short(block)}")
    if mixes(branch, x, r):
        raise Violation(f"{name}: certified {bound:.4g}, but a row depends on the rows beside it: {_short(block)}")
    return "proven"


def claimed(block: ResidualBlock, x: Tensor, name: str) -> float | None:
    """The constant that is certified, of the block as it is; None where none is, with a reason."""
    try:
        certificate = certify(block, tuple(x.shape[1:]))
    except ValueError as error:
        _sentence(error, name)
        return None
    if certificate.passed:
        return min(b.lipschitz for b in certificate.blocks)
    for b in certificate.blocks:
        if b.status == "proven" or not (b.remark or math.isfinite(b.lipschitz)):
            raise Violation(f"{name}: FAILED without a reason: {b}")
    return None


def certified(block: ResidualBlock, x: Tensor) -> float | None:
    """What is certified, if anything is."""
    try:
        certificate = certify(block, tuple(x.shape[1:]))
    except ValueError:
        return None
    return certificate.blocks[0].lipschitz if certificate.passed else None


def check_bound(r: random.Random, block: ResidualBlock, x: Tensor, name: str) -> None:
    """The bound that a block keeps is one of its g, whatever was done to the block."""
    try:
        bound = block.bound(tuple(x.shape[1:]))
    except REFUSALS as error:
        return _sentence(error, name)
    if bound.proven and bound.value < 1 and r.random() < 0.3:
        found = largest_ratio(lambda t: cast(Tensor, block.g(t.clone())), x, r, steps=3)
        if not found <= bound.value * (1 + SLACK[x.dtype]) + 1e-9:
            raise Violation(f"{name}: bound of g {bound.value:.6g}, found {found:.6g}: {_short(block)}")
    return None


def _sentence(error: Exception, name: str) -> None:
    if len(str(error)) < 10:
        raise Violation(f"{name}: refused without a reason: {error!r}")


def check_solve(r: random.Random, block: ResidualBlock, x: Tensor, bound: float | None, name: str) -> None:
    """`solve` reports; what it calls proven has a residual, of the live block, that fits."""
    with torch.no_grad():
        z = block(x.clone())
    if not bool(z.isfinite().all()):
        return
    try:
        s = block.solve(z)
    except Exception as error:
        if "NaN or infinity; no bound" in str(error):  # the numbers of a model that is broken, named
            return
        raise Violation(f"{name}: solve raises {type(error).__name__}: {error}") from error
    if s.proven and bool(s.converged.any()):
        with torch.no_grad():
            residual = norms(block(s.x.clone()).double() - z.double())
        most = 2 * s.error_bound + 1e4 * torch.finfo(x.dtype).eps * (1 + norms(z) + norms(s.x))
        if bool((residual > most)[s.converged].any()):
            raise Violation(
                f"{name}: solve proven to {float(s.error_bound.max()):.3g}, residual {float(residual.max()):.3g}: "
                f"{_short(block)}"
            )
    if r.random() < 0.3:
        _check_inverse(block, z, s, name)


def _check_inverse(block: ResidualBlock, z: Tensor, s: Any, name: str) -> None:
    """`inverse` raises a sentence, or returns what was solved."""
    try:
        with torch.no_grad():
            block.inverse(z)
    except (*REFUSALS, RuntimeError) as error:
        if not isinstance(error, REFUSALS):
            raise Violation(f"{name}: inverse raises {type(error).__name__}: {error}") from error
        if s.proven and bool(s.converged.all()):
            raise Violation(f"{name}: solve is proven, inverse raises {error}") from error
        _sentence(error, name)


def check_training(block: ResidualBlock, x: Tensor, name: str) -> None:
    """A step of training works where PyTorch can differentiate g itself."""
    was = block.training
    block.train()
    try:
        for _ in range(2):  # PyTorch itself may be able to do it once, or never
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
    """Code and log-determinant are those of the live network, whatever is known of it: by differences of its values."""
    with torch.no_grad():
        if any(word in name for word in ("backward_hook", "mixed", "in_place", "all modules")) or not torch.equal(
            block.g(x.clone()), block.g(x.clone())
        ):
            return
        if not _differentiates(block.g, x):
            return
        try:
            z, logdet = block.forward_and_logdet(x.clone())
        except ValueError:  # a determinant that is not positive is refused
            return
        except Exception as error:
            raise Violation(f"{name}: forward_and_logdet raises {type(error).__name__}: {error}") from error
        if bool((norms(z - block(x.clone())) > 1e-9 * (1 + norms(z))).any()):
            raise Violation(f"{name}: forward_and_logdet gives another code than forward: {_short(block)}")
        fine, coarse = (_by_differences(block, x, h) for h in (1e-6, 1e-4))
    settled = (fine - coarse).abs() < 1e-4  # no kink nearby
    if bool(((logdet - fine).abs() > 1e-3)[settled].any()):
        raise Violation(f"{name}: ln det {logdet.tolist()} is {fine.tolist()}: {_short(block)}")


def _differentiates(g: nn.Module, x: Tensor) -> bool:
    """Whether PyTorch itself has a gradient of g."""
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


def _short(block: nn.Module) -> str:
    return " ".join(str(block).split())[:200]

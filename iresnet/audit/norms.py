"""Norms and Lipschitz constants from below: what is found may not exceed what is claimed."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .subject import Block, Skipped, Subject, Verdict, lengths, number, unit

#: Rounding that a comparison forgives, relatively.
ROUNDING = 1e-9

#: Operators with at most so many entries are written out; others get so many steps of Lanczos.
DENSE, LANCZOS = 2**18, 24

#: Pairs of points, and their steps uphill: of a block, of the whole map.
PAIRS, CLIMB, FEW = 2, 8, 2


def norms(s: Subject) -> Verdict:
    """Every layer's norm from below, against its bound."""
    blocks = s.certified()
    total = sum(len(_layers(b.plain.g)) for b in blocks)
    tight = worst = done = 0.0
    for block in s.some(blocks, 0.25):
        for name, claim, shape in _claimed(s, block):
            done += 1
            ratio = from_below(block.plain.g.get_submodule(name), shape, s.generator()) / claim if claim else math.inf
            worst, tight = max(worst, ratio), max(tight, 1 / ratio - 1 if ratio else math.inf)
    if not done:
        raise Skipped("no bound of a layer is claimed")
    words = f"{done:.0f} of {total} layers: norms from below reach {worst:.6f} of their bounds"
    return worst <= 1 + ROUNDING, f"{words}; a bound is at most {100 * tight:.2g} % above what was found"


def _layers(g: nn.Module) -> list[nn.Module]:
    return [m for m in g.modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)]


def _claimed(s: Subject, block: Block) -> list[tuple[str, float, tuple[int, ...]]]:
    """(name, bound, input shape) of the linear layers of g: the smaller of what is stored and what is computed."""
    stored = {p["name"]: number(p["bound"]) for p in s.claims.get(block.name, {}).get("layers", [])}
    return [
        (p.name, min(p.bound, stored.get(p.name, math.inf)), p.input_shape)
        for p in block.bound.parts
        if p.input_shape and isinstance(getattr(block.plain.g.get_submodule(p.name), "weight", None), Tensor)
    ]


def from_below(layer: nn.Module, shape: tuple[int, ...], generator: torch.Generator) -> float:
    """||A|| of the linear part A of a float64 layer: its singular values if it is small, else Lanczos on A'A."""
    zero = torch.zeros(1, *shape, dtype=torch.float64)
    offset = layer(zero)
    if math.prod(shape) * offset.numel() <= DENSE:
        basis = torch.eye(math.prod(shape), dtype=torch.float64).reshape(-1, *shape)
        return float(torch.linalg.matrix_norm((layer(basis) - offset).flatten(1), 2))
    return _lanczos(lambda v: _gram(layer, offset, v), torch.randn(zero.shape, generator=generator).double())


def _gram(layer: nn.Module, offset: Tensor, v: Tensor) -> Tensor:
    """A'A v, the transpose by automatic differentiation."""
    v = v.detach().requires_grad_()
    y = layer(v) - offset
    return torch.autograd.grad(y, v, y.detach())[0]


def _lanczos(gram: Callable[[Tensor], Tensor], start: Tensor) -> float:
    """The square root of the largest Ritz value: never above the norm."""
    basis = [unit(start).flatten()]
    alphas, betas = list[float](), list[float]()
    for _ in range(LANCZOS):
        r = gram(basis[-1].reshape(start.shape)).flatten()
        alphas.append(float(r @ basis[-1]))
        for _ in range(2):
            for q in basis:
                r = r - (r @ q) * q
        betas.append(float(r.norm()))
        if betas[-1] <= 1e-12 * abs(alphas[0]):
            break
        basis.append(r / betas[-1])
    beside = torch.tensor(betas[: len(alphas) - 1], dtype=torch.float64)
    ritz = torch.diag(torch.tensor(alphas, dtype=torch.float64)) + torch.diag(beside, 1) + torch.diag(beside, -1)
    return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(ritz).max())))


def contraction(s: Subject) -> Verdict:
    """Pairs of points that are far from keeping their distance, against Lip(g) of every block."""
    done = worst = 0.0
    for block in s.some(s.certified(), 0.2):
        stored = number(s.claims.get(block.name, {}).get("lipschitz"))
        claim = min(block.bound.value, stored)
        if math.isfinite(claim):
            done += 1
            found = _climb(block.plain.g, s.states[block.name][:PAIRS], s.generator(), CLIMB)[1]
            worst = max(worst, found / claim if claim else math.inf)
    if not done:
        raise Skipped("no bound of a block is claimed")
    words = f"{done:.0f} of {len(s.blocks)} blocks: pairs reach {worst:.3f} of Lip(g) after {CLIMB} steps uphill"
    return worst <= 1 + ROUNDING, words


def whole_map(s: Subject) -> Verdict:
    """Pairs of rows against Lip(F) and Lip(F^-1) of the certificate."""
    stretch = s.read("certificate.json").get("stretch")
    if not stretch:
        raise Skipped("no bound of the whole map is claimed")
    forward, inverse = number(stretch["forward"]), number(stretch["inverse"])
    levels = s.schema.levels

    def within(x: Tensor) -> Tensor:
        return x if levels is None else x.clamp(0, levels)

    low, high = _climb(lambda x: s.transform(within(x)), s.rows[:PAIRS], s.generator(), FEW)
    words = f"pairs of rows are stretched by {low:.3g} to {high:.3g}; claimed {1 / inverse:.3g} to {forward:.3g}"
    inside = 1 / inverse <= low * (1 + ROUNDING) or levels is not None  # what is clamped may come together
    return inside and high <= forward * (1 + ROUNDING), words


def _climb(
    g: Callable[[Tensor], Tensor], a: Tensor, generator: torch.Generator, steps: int
) -> tuple[float, float]:
    """The smallest and largest ||g(a) - g(b)|| / ||a - b|| met while a pair goes uphill: b - a by J'J, a by the gradient.

    Pairs are close together and far apart, so that slopes and chords are both seen.
    """
    scale = lengths(a).clamp_min(1.0).reshape(-1, *[1] * (a.dim() - 1))
    size = scale * torch.logspace(-4, -1, len(a), dtype=a.dtype).reshape(scale.shape)
    d = unit(torch.randn(a.shape, generator=generator, dtype=a.dtype))
    low, high = math.inf, 0.0
    for _ in range(steps):
        a, d = a.detach().requires_grad_(), d.detach().requires_grad_()
        y = g(a + size * d) - g(a)
        ratios = lengths(y) / lengths((a + size * d).detach() - a.detach())
        low, high = min(low, float(ratios.detach().min())), max(high, float(ratios.detach().max()))
        up, along = torch.autograd.grad(ratios.sum(), (a, d))
        a, d = a.detach() + 0.1 * scale * unit(up), unit(unit(along) + 0.1 * d.detach())
    return low, high

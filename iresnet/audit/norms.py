"""Norms and Lipschitz constants from below: what is found may not exceed what is claimed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor, nn

from .subject import Block, Skipped, Subject, Verdict, lengths, number, unit

#: Rounding that a comparison forgives, relatively.
ROUNDING = 1e-9

#: Operators with at most so many entries are written out; others get so many steps of Lanczos.
DENSE, LANCZOS = 2**18, 24

LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

#: Pairs of points, and their steps uphill: of a block, of the whole map.
PAIRS, CLIMB, FEW = 2, 8, 2


def norms(s: Subject) -> Verdict:
    """Every layer's norm from below, against its bound."""
    ratios = list[float]()
    for block in s.contractions(0.25):
        for layer, claim, shape in _claimed(block):
            norm = from_below(layer, shape, s.generator("norms"))
            ratios.append(norm / claim if claim else math.inf if norm else 1.0)
    if not ratios:
        raise Skipped("no bound of a layer is claimed")
    total = sum(isinstance(m, LINEAR) for block in s.blocks for m in block.plain.g.modules())
    words = (
        f"{len(ratios)} of {total} layers: norms from below are {min(ratios):.4f} to {max(ratios):.9f} of their bounds"
    )
    return max(ratios) <= 1 + ROUNDING, words


def _claimed(block: Block) -> Iterator[tuple[nn.Module, float, tuple[int, ...]]]:
    """(layer, bound, input shape) of the linear layers of g: the smaller of what is stored and what is computed."""
    stored = {p["name"]: number(p["bound"]) for p in block.stored.get("layers", [])}
    for p in block.bound.parts:
        layer = block.plain.g.get_submodule(p.name)
        if isinstance(layer, LINEAR) and p.input_shape is not None:
            yield layer, min(p.bound, stored.get(p.name, math.inf)), p.input_shape


def from_below(layer: nn.Module, shape: tuple[int, ...], generator: torch.Generator) -> float:
    """||A|| of the linear part A of a float64 layer: its singular values if it is small, else Lanczos on A'A."""
    zero = torch.zeros(1, *shape, dtype=torch.float64)
    offset = layer(zero).detach()
    if math.prod(shape) * offset.numel() <= DENSE:
        basis = torch.eye(math.prod(shape), dtype=torch.float64).reshape(-1, *shape)
        return float(torch.linalg.matrix_norm((layer(basis).detach() - offset).flatten(1), 2))
    return _lanczos(lambda v: _gram(layer, offset, v), torch.randn(zero.shape, generator=generator).double())


def _gram(layer: nn.Module, offset: Tensor, v: Tensor) -> Tensor:
    """A'A v, the transpose by automatic differentiation."""
    v = v.detach().requires_grad_()
    y = layer(v) - offset
    return torch.autograd.grad(y, v, y.detach())[0]


def _lanczos(gram: Callable[[Tensor], Tensor], start: Tensor) -> float:
    """The square root of the largest Ritz value, never above the norm: V'(A'A)V for an orthonormal basis V."""
    basis, images = unit(start).flatten()[None], list[Tensor]()
    for _ in range(LANCZOS):
        images.append(gram(basis[-1].reshape(start.shape)).flatten())
        r = images[-1]
        for _ in range(2):
            r = r - basis.T @ (basis @ r)
        if float(r.norm()) <= 1e-12 * float(images[0].norm()):
            break
        basis = torch.cat([basis, r[None] / r.norm()])
    ritz = basis[: len(images)] @ torch.stack(images).T
    return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(ritz).max())))


def contraction(s: Subject) -> Verdict:
    """Pairs of points that climb ||g(a) - g(b)|| / ||a - b||, against Lip(g) of every block."""
    ratios = list[float]()
    for block in s.contractions(0.2):
        found = _climb(block.plain.g, s.states[block.name][:PAIRS], s.generator(block.name), CLIMB)[1]
        ratios.append(found / block.claim if block.claim else math.inf if found else 1.0)
    words = (
        f"{len(ratios)} of {len(s.blocks)} blocks: ||g(a) - g(b)|| / ||a - b|| climbs to {max(ratios):.3f} of Lip(g)"
    )
    return max(ratios) <= 1 + ROUNDING, words


def whole_map(s: Subject) -> Verdict:
    """The same for F, against Lip(F) and Lip(F^-1) of the certificate."""
    stretch, levels = s.read("certificate.json").get("stretch"), s.schema.levels
    if not stretch:
        raise Skipped("no bound of the whole map is claimed")
    least, most = 1 / number(stretch["inverse"]), number(stretch["forward"])

    def f(x: Tensor) -> Tensor:
        return cast(Tensor, s.transform(x if levels is None else x.clamp(0, levels)))  # where points may come together

    low, high = _climb(f, s.rows[:PAIRS], s.generator("pairs"), FEW)
    holds = high <= most * (1 + ROUNDING) and (levels is not None or low >= least * (1 - ROUNDING))
    return holds, f"rows are stretched by {low:.3g} to {high:.3g}; claimed {least:.3g} to {most:.3g}"


def _climb(g: Callable[[Tensor], Tensor], a: Tensor, generator: torch.Generator, steps: int) -> tuple[float, float]:
    """The smallest and largest ||g(a) - g(b)|| / ||a - b|| met on a way uphill: b - a follows J'J, a the gradient."""
    scale = lengths(a).clamp_min(1.0).reshape(-1, *[1] * (a.dim() - 1))
    size = scale * torch.logspace(-4, -1, len(a), dtype=a.dtype).reshape(scale.shape)  # slopes, and chords
    d = unit(torch.randn(a.shape, generator=generator, dtype=a.dtype))
    low, high = math.inf, 0.0
    for _ in range(steps):
        a, d = a.detach().requires_grad_(), d.detach().requires_grad_()
        ratios = lengths(g(a + size * d) - g(a)) / lengths((a + size * d).detach() - a.detach())
        low, high = min(low, float(ratios.detach().min())), max(high, float(ratios.detach().max()))
        up, along = torch.autograd.grad(ratios.sum(), (a, d))
        a, d = a.detach() + 0.1 * scale * unit(up), unit(unit(along) + 0.1 * d.detach())
    return low, high

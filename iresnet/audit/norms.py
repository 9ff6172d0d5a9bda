"""Check norms and Lipschitz constants from below: a lower bound must not exceed the claim."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor, nn

from .subject import Block, Skipped, Subject, Verdict, json_number, lengths, normalise

#: The relative allowance for rounding in comparisons.
ROUNDING = 1e-9

#: The most entries of an operator that is written out as a matrix; the steps of Lanczos for larger ones.
DENSE, LANCZOS = 2**18, 24

LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

#: Pairs of points, and their gradient steps for a block and for the whole map.
PAIRS, ASCENT_STEPS, MAP_STEPS = 2, 8, 2


def check_norms(s: Subject) -> Verdict:
    """Every layer's norm from below, against its bound."""
    ratios = list[float]()
    for block in s.contractions(0.25):
        for layer, claim, shape in _claimed(block):
            norm = norm_from_below(layer, shape, s.generator("norms"))
            ratios.append(_share_of(claim, norm))
    if not ratios:
        raise Skipped("no layer has a claimed bound")
    total = sum(isinstance(m, LINEAR) for block in s.blocks for m in block.plain.g.modules())
    words = (
        f"{len(ratios)} of {total} layers: norms from below are {min(ratios):.4f} to {max(ratios):.9f} of their bounds"
    )
    return max(ratios) <= 1 + ROUNDING, words


def _claimed(block: Block) -> Iterator[tuple[nn.Module, float, tuple[int, ...]]]:
    """(layer, bound, input shape) of the linear layers of g, with the smaller of the stored and the computed bound."""
    stored = {p["name"]: json_number(p["bound"]) for p in block.stored.get("layers", [])}
    for p in block.bound.parts:
        layer = block.plain.g.get_submodule(p.name)
        if isinstance(layer, LINEAR) and p.input_shape is not None:
            yield layer, min(p.bound, stored.get(p.name, math.inf)), p.input_shape


def norm_from_below(layer: nn.Module, shape: tuple[int, ...], generator: torch.Generator) -> float:
    """Compute ||A|| of the linear part A of a float64 layer: by an SVD if it is small, else by Lanczos on A'A."""
    zero = torch.zeros(1, *shape, dtype=torch.float64)
    offset = layer(zero).detach()
    if math.prod(shape) * offset.numel() <= DENSE:
        basis = torch.eye(math.prod(shape), dtype=torch.float64).reshape(-1, *shape)
        return float(torch.linalg.matrix_norm((layer(basis).detach() - offset).flatten(1), 2))
    return _lanczos(lambda v: _gram_product(layer, offset, v), torch.randn(zero.shape, generator=generator).double())


def _gram_product(layer: nn.Module, offset: Tensor, v: Tensor) -> Tensor:
    """A'A v, the transpose by automatic differentiation."""
    v = v.detach().requires_grad_()
    y = layer(v) - offset
    return torch.autograd.grad(y, v, y.detach())[0]


def _lanczos(gram: Callable[[Tensor], Tensor], start: Tensor) -> float:
    """The square root of the largest Ritz value, never above the norm: V'(A'A)V for an orthonormal basis V."""
    basis, images = normalise(start).flatten()[None], list[Tensor]()
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


def _share_of(claim: float, found: float) -> float:
    """Return what was found as a share of the claimed bound; a bound of 0 is reached by 0 alone."""
    if claim:
        return found / claim
    return math.inf if found else 1.0


def check_contraction(s: Subject) -> Verdict:
    """The largest ||g(a) - g(b)|| / ||a - b|| found by gradient ascent, against Lip(g) of every block."""
    ratios = list[float]()
    for block in s.contractions(0.2):
        found = _ascend(block.plain.g, s.block_inputs[block.name][:PAIRS], s.generator(block.name), ASCENT_STEPS)[1]
        ratios.append(_share_of(block.claim, found))
    words = f"{len(ratios)} of {len(s.blocks)} blocks: ||g(a) - g(b)|| / ||a - b|| reaches {max(ratios):.3f} of Lip(g)"
    return max(ratios) <= 1 + ROUNDING, words


def check_whole_map(s: Subject) -> Verdict:
    """The smallest and largest ||F(a) - F(b)|| / ||a - b|| found, against Lip(F) and Lip(F^-1) of the certificate."""
    stretch = s.read("certificate.json").get("stretch")
    if not stretch:
        raise Skipped("no bound is claimed for the whole map")
    least, most = 1 / json_number(stretch["inverse"]), json_number(stretch["forward"])

    def f(x: Tensor) -> Tensor:
        return cast(Tensor, s.transform(s.clamp(x)))

    low, high = _ascend(f, s.samples[:PAIRS], s.generator("pairs"), MAP_STEPS)
    bounded = s.schema.levels is not None or s.columns is not None  # clamping may bring points closer together
    holds = high <= most * (1 + ROUNDING) and (bounded or low >= least * (1 - ROUNDING))
    return holds, f"||F(a) - F(b)|| / ||a - b|| is {low:.3g} to {high:.3g}; claimed {least:.3g} to {most:.3g}"


def _ascend(g: Callable[[Tensor], Tensor], a: Tensor, generator: torch.Generator, steps: int) -> tuple[float, float]:
    """The smallest and largest ||g(a) - g(b)|| / ||a - b|| during gradient ascent in a and in b - a."""
    scale = lengths(a).clamp_min(1.0).reshape(-1, *[1] * (a.dim() - 1))
    # From close pairs, whose ratio is a slope, to distant ones.
    size = scale * torch.logspace(-4, -1, len(a), dtype=a.dtype).reshape(scale.shape)
    d = normalise(torch.randn(a.shape, generator=generator, dtype=a.dtype))
    low, high = math.inf, 0.0
    for _ in range(steps):
        a, d = a.detach().requires_grad_(), d.detach().requires_grad_()
        ratios = lengths(g(a + size * d) - g(a)) / lengths((a + size * d).detach() - a.detach())
        low, high = min(low, float(ratios.detach().min())), max(high, float(ratios.detach().max()))
        up, along = torch.autograd.grad(ratios.sum(), (a, d))
        a, d = a.detach() + 0.1 * scale * normalise(up), normalise(normalise(along) + 0.1 * d.detach())
    return low, high

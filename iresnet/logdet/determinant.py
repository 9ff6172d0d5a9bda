"""The inverses of many small matrices I + J with ||J|| < 1, by elimination without pivoting.

    [A B; C D]:   S = D - C A^-1 B, and the inverse follows from A^-1 and S^-1

For a contraction the symmetric part of I + J is positive definite, and so is that of every Schur complement S: the
pivots are positive. So all matrices of a batch are eliminated at once, in blocks of at most 16 rows, which takes a
fraction of the time of one factorisation per matrix. A pivot close to zero disproves a contraction, or is too close to
tell; then the caller factorises with pivoting.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: The smallest pivot that counts as safe, and the most rows that are eliminated one by one.
_SMALLEST, _BLOCK = 1e-3, 16


def safe_inverse(a: Tensor) -> Tensor | None:
    """Return the inverse of matrices, (batch, d, d); None if a pivot is not clearly positive.

    >>> safe_inverse(torch.tensor([[[2.0, 1.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 0.5]]]))[0, 0].tolist()
    [0.5, -0.25, 0.0]
    """
    pivots = list[Tensor]()
    inverse = _invert(a, pivots)
    return inverse if bool((torch.cat(pivots) > _SMALLEST).all()) else None


def _invert(a: Tensor, pivots: list[Tensor]) -> Tensor:
    """Return the inverse; append the pivots, (rows, batch)."""
    d = a.shape[-1]
    if d == 2:
        return _invert_pair(a, pivots)
    if d <= _BLOCK:
        return _eliminate(a.permute(1, 2, 0).clone(memory_format=torch.contiguous_format), pivots).permute(2, 0, 1)
    k = d // 2
    b, c = a[:, :k, k:].contiguous(), a[:, k:, :k].contiguous()
    top = _invert(a[:, :k, :k], pivots).contiguous()
    left = torch.bmm(c, top)
    corner = _invert(torch.baddbmm(a[:, k:, k:], left, b, alpha=-1), pivots).contiguous()
    upper, lower = torch.bmm(torch.bmm(top, b), corner), torch.bmm(corner, left)
    return torch.cat([torch.cat([torch.baddbmm(top, upper, left), -upper], 2), torch.cat([-lower, corner], 2)], 1)


def _invert_pair(a: Tensor, pivots: list[Tensor]) -> Tensor:
    p, q, r, s = a.flatten(1).unbind(1)
    det = p * s - q * r
    pivots += [p[None], (det / p)[None]]
    return torch.stack([s, -q, -r, p], 1).div_(det[:, None]).view_as(a)


def _eliminate(a: Tensor, pivots: list[Tensor]) -> Tensor:
    """Invert matrices (d, d, batch) in place by Gauss-Jordan elimination, one row after another."""
    for k in range(len(a)):
        pivot, column = a[k, k].clone(), a[:, k].clone()
        pivots.append(pivot[None])
        row = a[k] / pivot
        row[k] = 1 / pivot
        column[k] = 0
        a[:, k] = 0
        a.addcmul_(column[:, None], row[None], value=-1)
        a[k] = row
    return a

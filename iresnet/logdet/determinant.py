"""ln det(I + J) of matrices with ||J|| < 1, exactly; for many small ones with the inverse, by elimination.

For a contraction the symmetric part of I + J is positive definite, and so is that of every Schur complement: the pivots
are positive. So all matrices of a batch are eliminated at once, which takes a fraction of the time of one factorisation
per matrix. A pivot close to zero disproves a contraction, or is too close to tell; then the caller factorises with
pivoting.

One step of Gauss-Jordan elimination, for a pivot P of one row or of a block of rows, R = P^-1 A[P,:] and C = A[:,P]:

    the pivot's rows become R, all others A - C R;  the pivot's columns -C P^-1, and the pivot P^-1

It is one update, A - C' R', if C' is C minus I at the pivot, and R' is R plus P^-1 at the pivot.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ..compiler import can_read_values, is_transforming

#: The smallest pivot that counts as safe.
_SMALLEST = 1e-3

#: Larger matrices are eliminated in blocks of so many rows.
_LARGE, _BLOCK = 16, 8


def exact_logdet(j: Tensor) -> Tensor:
    """Compute ln det(I + J) of matrices, (batch, d, d); raise ValueError unless all determinants are positive."""
    if j.shape[-1] == 2:  # factorising thousands of 2 x 2 matrices is slower than the closed form
        det = (1 + j[:, 0, 0]) * (1 + j[:, 1, 1]) - j[:, 0, 1] * j[:, 1, 0]
        _check_positive(det)
        return det.log()
    eye = torch.eye(j.shape[-1], dtype=j.dtype, device=j.device)
    sign, logdet = _slogdet(eye + j)
    _check_positive(torch.where(logdet.isnan(), logdet, sign))  # the sign of NaN, of rows that overflowed, is 0
    return logdet


def exact_logdet_and_inverse(j: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ln det(I + J), as `exact_logdet` does, and (I + J)^-1 of matrices, (batch, d, d), without a graph."""
    a = j + torch.eye(j.shape[-1], dtype=j.dtype, device=j.device)
    found = safe_inverse_and_logdet(a)
    if found is None:
        return exact_logdet(j), torch.linalg.inv(a)
    inverse, logdet = found
    return logdet, inverse


def _slogdet(a: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the sign and ln |det| of matrices.

    Inside `torch.func` this uses an LU factorisation: vmap of a forward derivative of slogdet is wrong there
    (torch 2.7 to 2.13).
    """
    if not is_transforming():
        return cast("tuple[Tensor, Tensor]", torch.linalg.slogdet(a))
    factors, pivots = torch.linalg.lu_factor(a)
    diagonal = factors.diagonal(dim1=-2, dim2=-1)
    swapped = (pivots != torch.arange(1, a.shape[-1] + 1, device=a.device)).sum(-1)
    return diagonal.sign().prod(-1) * (1 - 2 * (swapped % 2)), diagonal.abs().log().sum(-1)


def _check_positive(det: Tensor) -> None:
    """Raise unless det > 0, which Lemma 6 guarantees for a contractive g; ln |det| would hide a violation."""
    if can_read_values(det) and bool((det <= 0).any()):
        raise ValueError(
            f"det(I + J) must be positive; got {float(det.detach().min()):.3g}. g is not a contraction here: constrain "
            "its layers. If they are constrained, power iteration lags behind large steps: lower the learning rate, "
            'or use norm=GramIteration() (network.norm = "gram-iteration" in settings).'
        )


def safe_inverse_and_logdet(a: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the inverse and ln det of matrices, (batch, d, d); None if a pivot is not clearly positive.

    >>> inverse, logdet = safe_inverse_and_logdet(torch.tensor([[[2.0, 1.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 0.5]]]))
    >>> inverse[0, 0].tolist(), logdet.exp().tolist()
    ([0.5, -0.25, 0.0], [2.0])
    """
    d = a.shape[-1]
    if d == 2:
        return _invert_pair(a)
    pivots = a.new_empty(d, len(a))
    inverse = _by_rows(a, pivots) if d <= _LARGE else _by_blocks(a, pivots)
    return (inverse, pivots.log().sum(0)) if bool((pivots > _SMALLEST).all()) else None


def _invert_pair(a: Tensor) -> tuple[Tensor, Tensor] | None:
    p, q, r, s = a.flatten(1).unbind(1)
    det = p * s - q * r
    if not bool(((p > _SMALLEST) & (det > _SMALLEST * p)).all()):
        return None
    return torch.stack([s, -q, -r, p], 1).div_(det[:, None]).view_as(a), det.log()


def _by_rows(a: Tensor, pivots: Tensor) -> Tensor:
    """Return the inverse and write the pivots, (d, batch), with the batch as the innermost axis."""
    a = a.permute(1, 2, 0).clone(memory_format=torch.contiguous_format)
    for k, (row, column, pivot) in enumerate(zip(a, a.unbind(1), pivots, strict=True)):
        inverse = pivot.copy_(row.select(0, k)).reciprocal()
        left, right = column.clone(), row * inverse
        left.select(0, k).sub_(1)
        right.select(0, k).add_(inverse)
        a.addcmul_(left.unsqueeze(1), right, value=-1)
    return a.permute(2, 0, 1)


def _by_blocks(a: Tensor, pivots: Tensor) -> Tensor:
    a = a.clone(memory_format=torch.contiguous_format)
    for k in range(0, a.shape[-1], _BLOCK):
        block = slice(k, k + _BLOCK)
        inverse = _by_rows(a[:, block, block], pivots[block]).contiguous()
        left, right = a[:, :, block].clone(memory_format=torch.contiguous_format), torch.bmm(inverse, a[:, block])
        left[:, block].diagonal(dim1=1, dim2=2).sub_(1)
        right[:, :, block].add_(inverse)
        a.baddbmm_(left, right, alpha=-1)
    return a

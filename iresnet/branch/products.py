"""Matrix products of many short rows on a CPU, without a graph, by the faster of two libraries.

torch multiplies float32 matrices by MKL, which uses half of the vector width of some processors. oneDNN, which torch
also contains, uses all of it: on those it takes half the time for the shapes of a residual branch, on others about the
same. The choice depends on shapes alone, so that a run repeats bit for bit.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import Tensor

#: The fewest rows and columns for which oneDNN pays off: it takes a few microseconds more to call.
_ROWS, _COLUMNS = 160, 16


def _find_onednn() -> Any:
    """Return oneDNN's x w' + b; None where torch was built without it."""
    backend: Any = torch.backends.mkldnn
    known = platform.machine().lower() in ("x86_64", "amd64") and backend.is_available()
    packet = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if known else None
    return getattr(packet, "default", None)


_onednn = _find_onednn()


def _is_suitable(x: Tensor, inner: int, columns: int) -> bool:
    return (
        _onednn is not None
        and x.dtype == torch.float32
        and len(x) >= _ROWS
        and inner >= _COLUMNS
        and columns >= _COLUMNS
        and bool(torch.backends.mkldnn.enabled)
    )


def times_transpose(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x W' + b."""
    if _is_suitable(x, weight.shape[1], weight.shape[0]):
        return _linear(x, weight, bias)
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def times(x: Tensor, weight: Tensor) -> Tensor:
    """Compute x W."""
    if _is_suitable(x, weight.shape[0], weight.shape[1]):
        return _linear(x, weight.t())
    return torch.mm(x, weight)


def gram(g: Tensor, x: Tensor) -> Tensor:
    """Compute g' x, a sum over rows: the gradient of a weight."""
    if min(g.shape[1], x.shape[1]) >= 2 * _COLUMNS and _is_suitable(g, g.shape[1], x.shape[1]):
        return _linear(g.t().contiguous(), x.t())
    return torch.mm(g.t(), x) if g.shape[1] <= x.shape[1] else torch.mm(x.t(), g).t()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    result: Tensor = _onednn(x, weight, bias, "none", [], "")
    return result

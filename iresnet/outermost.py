"""The outermost call of a model: check the input, and in training refresh the norms once for the whole pass.

Models call blocks, and blocks may be called alone. Whichever is called first does both, for everything inside it.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from .batch import check_batch, check_finite
from .lipschitz import batched_refresh, freeze_norms
from .tree import modules_of


class _ThreadState(threading.local):
    checked = False
    frozen: Container[nn.Module] = ()


_thread_state = _ThreadState()


@contextmanager
def outermost_call(module: nn.Module, x: Tensor) -> Iterator[None]:
    """Context for a forward pass. The outermost checks x; in training, norms are refreshed and then frozen in it."""
    freeze = batched_refresh if torch.is_grad_enabled() else freeze_norms
    if torch.compiler.is_compiling():
        with freeze(module) if module.training else nullcontext():
            yield
        return
    before = _thread_state.checked, _thread_state.frozen
    if not _thread_state.checked:  # a check that is skipped or repeated changes no result
        check_batch(x)
        if not (x.is_cuda and module.training):  # it would make every step wait for the GPU; training has its own check
            check_finite(x, "x")
    freezes = module.training and module not in _thread_state.frozen  # a part of what is frozen needs no walk over it
    try:
        _thread_state.checked = True
        with freeze(module) if freezes else nullcontext():
            if freezes:
                _thread_state.frozen = {m for m in modules_of(module) if m.training}
            yield
    except RuntimeError as error:
        if not before[0] and "type" in str(error):
            _check_dtype(module, x)
        raise
    finally:
        _thread_state.checked, _thread_state.frozen = before


def _check_dtype(module: nn.Module, x: Tensor) -> None:
    """Refuse an x of another dtype than the weights, where torch has refused it with a message about matrices."""
    found = sorted({str(p.dtype) for p in module.parameters() if p.is_floating_point()})
    if found and str(x.dtype) not in found:
        raise ValueError(
            f"x must have the dtype of the weights, {' or '.join(found)}; got {x.dtype}. Convert x with "
            f"x.to({found[0]}), or the model with .to({x.dtype})."
        )

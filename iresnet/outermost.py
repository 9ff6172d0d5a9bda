"""The outermost call of a model: check the input, and in training refresh the norms once for the whole pass.

Models call blocks, and blocks may be called alone. Whichever is called first does both, for everything inside it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from .lipschitz import batched_refresh, freeze_norms
from .transform import check_batch, check_finite


class _ThreadState(threading.local):
    checked = False


_thread_state = _ThreadState()


@contextmanager
def outermost_call(module: nn.Module, x: Tensor) -> Iterator[None]:
    """Context for a forward pass. The outermost checks x; in training, norms are refreshed and then frozen in it."""
    freeze = batched_refresh if torch.is_grad_enabled() else freeze_norms
    frozen = freeze(module) if module.training else nullcontext()
    if torch.compiler.is_compiling():
        with frozen:
            yield
        return
    outermost = not _thread_state.checked  # a check that is skipped or repeated changes no result
    if outermost:
        check_batch(x)
        if not (x.is_cuda and module.training):  # it would make every step wait for the GPU; training has its own check
            check_finite(x, "x")
    try:
        _thread_state.checked = True
        with frozen:
            yield
    finally:
        _thread_state.checked = not outermost

"""CUDA streams for work that runs concurrently: small kernels that do not depend on each other share the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

#: What a function returns: tensors.
Results = TypeVar("Results", bound=tuple[Tensor, ...])


@cache
def side_stream(device: torch.device, number: int = 0) -> torch.cuda.Stream:
    """Return a stream beside the main one, always the same for the same number."""
    return torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]


def concurrently(tasks: Sequence[Callable[[], Results]], device: torch.device) -> list[Results]:
    """Call functions that do not depend on each other and return their results; on a GPU, on a stream each.

    They follow all work launched before and precede all work launched after, also in a CUDA graph.

    >>> concurrently([lambda: (torch.ones(1),), lambda: (torch.zeros(1),)], torch.device("cpu"))
    [(tensor([1.]),), (tensor([0.]),)]
    """
    if device.type != "cuda" or len(tasks) < 2:
        return [task() for task in tasks]
    main, results = torch.cuda.current_stream(device), list[Results]()
    for number, task in enumerate(tasks):
        side = side_stream(device, number)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            results.append(task())
    for number, tensors in enumerate(results):
        main.wait_stream(side_stream(device, number))
        for tensor in tensors:  # their memory belongs to the side stream, which must not reuse it too early
            tensor.record_stream(main)
    return results

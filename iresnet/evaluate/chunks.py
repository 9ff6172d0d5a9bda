"""Evaluate a model on many samples in chunks, so that memory does not grow with the dataset.

On a CPU, chunks for residual blocks are smaller. A convolution builds a buffer of channels times kernel size times
positions for every sample. One of more than 32 MiB goes back to the system when it is freed (`allocator`); with
smaller chunks the same buffer is reused, and stays closer to the cache.

Threads that share an operation wait for each other after each of them: on a busy machine that takes most of the time.
Threads that have chunks of their own wait once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from ..allocator import keep_freed_memory
from ..precision import full_precision
from ..progress import each
from ..residual import ResidualBlock
from ..train.threads import suitable_threads

#: The largest buffer of a layer that is reused, in bytes.
REUSED = 32 * 2**20

#: Samples per chunk on a machine with little memory, and the memory of a GPU that counts as little, in bytes.
CHUNK, LITTLE = 500, 8 * 2**30


def in_chunks(function: Callable[[Tensor], Tensor], x: Tensor, size: int) -> Tensor:
    """Apply a function to `size` samples or codes at a time, in full precision, and concatenate the results."""
    keep_freed_memory()
    with full_precision(x):
        return torch.cat(each(function, torch.split(x, size)))


def in_parallel(function: Callable[[Tensor], Tensor], x: Tensor, size: int) -> Tensor:
    """Apply a function as `in_chunks` does, without gradients; on a CPU every thread has chunks of its own.

    The function must not change what others use, such as a generator.
    """
    threads = torch.get_num_threads()
    if x.is_cuda or threads == 1 or len(x) < 2:
        return in_chunks(function, x, size)

    @torch.no_grad()
    def run(part: Tensor) -> Tensor:  # the precision and the grad mode are those of a thread
        with full_precision(x):
            return function(part)

    rounds = math.ceil(len(x) / (size * threads))
    parts = torch.split(x, math.ceil(len(x) / (rounds * threads)))
    keep_freed_memory()
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    with suitable_threads(0):
        try:
            return torch.cat(each(lambda part: part.result(), [pool.submit(run, part) for part in parts]))
        finally:
            pool.shutdown(cancel_futures=True)


def chunk_size(model: nn.Module, x: Tensor, most: int) -> int:
    """Return how many of the samples or codes `x` to process at a time: `most` on a GPU and for small layers."""
    size = next((p.element_size() for p in model.parameters()), x.element_size())
    dimension = math.prod(x.shape[1:])
    largest = max((_buffer_size(m, dimension) for m in model.modules() if isinstance(m, ResidualBlock)), default=0)
    return most if x.is_cuda or not largest else max(1, min(most, REUSED // (largest * size)))


def memory_factor(device: torch.device) -> int:
    """Return by what factor to enlarge a chunk: 1 on a CPU, more on a GPU with much memory, which small chunks idle."""
    if device.type != "cuda":
        return 1
    return max(1, round(torch.cuda.get_device_properties(device).total_memory / LITTLE))


def _buffer_size(block: ResidualBlock, dimension: int) -> int:
    """The numbers in the buffer of a block's largest convolution for one sample; 0 without convolutions."""
    layers = [m for m in block.modules() if isinstance(m, nn.Conv2d)]
    if not layers:
        return 0
    # An estimate: there are more positions where the model adds channels, fewer where it splits some off.
    positions = dimension // layers[0].in_channels
    return positions * max(m.in_channels * math.prod(m.kernel_size) for m in layers)

"""Large CPU tensors in memory that was used before: a block goes back to the pool when the tensor's storage is freed.

A fresh weight gradient of a layer is tens of MB that malloc returns to the system each time and gets back as pages to
be zeroed, which at few rows per expert takes longer than the mathematics. Tensors are ordinary ones, each with a
storage of its own for as long as anybody holds it. Blocks come in eighths of a power of two, in huge pages where the
system gives them on request.
"""

import math
import mmap
import weakref

import torch
from torch import Tensor

LEAST = 1 << 20  # bytes; smaller tensors are malloc's
IDLE = 1 << 30  # bytes kept while nobody uses them

_idle: dict[int, list[mmap.mmap]] = {}
_total = 0  # bytes idle


def empty(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
    """An uninitialised contiguous CPU tensor.

    >>> a = empty((1024, 512), torch.float32)
    >>> place = a.data_ptr()
    >>> del a
    >>> empty((1024, 500), torch.float32).data_ptr() == place
    True
    """
    global _total
    count = math.prod(shape)
    if count * dtype.itemsize < LEAST:
        return torch.empty(shape, dtype=dtype)
    eighth = 1 << ((count * dtype.itemsize).bit_length() - 4)
    size = -(-count * dtype.itemsize // eighth) * eighth
    try:
        block = _idle.get(size, []).pop()
        _total -= size
    except IndexError:
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            block.madvise(mmap.MADV_HUGEPAGE)
    lent = memoryview(block)  # the storage holds this object, and it holds the block
    weakref.finalize(lent, _back, block, size).atexit = False
    return torch.frombuffer(lent, dtype=dtype, count=count).view(shape)


def _back(block: mmap.mmap, size: int) -> None:
    global _total
    if _total + size <= IDLE:
        _total += size
        _idle.setdefault(size, []).append(block)


def words() -> str:
    """For `explain`."""
    return f"large tensors from a pool of at most {IDLE >> 20} MiB idle, {_total >> 20} now"

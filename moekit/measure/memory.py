"""Bytes that autograd keeps for the backward, counted where they are kept.

A tensor is counted by the storage that it keeps alive, once, whoever saves it again: a view of a large tensor keeps
the large one. Parameters and buffers of the model are not counted; they are there anyway.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass
class SavedBytes:
    """What `saved_bytes` counted."""

    bytes: int = 0  # of all storages that were saved, each once
    tensors: int = 0  # how many tensors were saved, repeats included
    _seen: dict[int, tuple[StorageWeakRef, int]] = field(default_factory=dict, repr=False)

    @property
    def live(self) -> int:
        """Bytes of those storages that are still alive: what the backward has not released yet."""
        return sum(size for ref, size in self._seen.values() if not ref.expired())

    def _count(self, storage: torch.UntypedStorage) -> None:
        self.tensors += 1
        # a weak reference keeps the identity from being reused, and does not keep the memory
        ref = StorageWeakRef(storage)
        if ref.cdata not in self._seen:
            self._seen[ref.cdata] = (ref, storage.nbytes())
            self.bytes += storage.nbytes()


def held_bytes(kinds: Mapping[str, Iterable[Tensor | None]]) -> dict[str, int]:
    """Bytes of the storages behind tensors, by kind; a storage counts once, for the first kind that has it.

    >>> w = torch.zeros(8, 4)
    >>> held_bytes({"parameters": [w, w[2:]], "optimizer": [w.view(-1), torch.zeros(3), None]})
    {'parameters': 128, 'optimizer': 12}
    """
    seen: set[int] = set()
    out = dict.fromkeys(kinds, 0)
    for kind, tensors in kinds.items():
        for storage in (t.untyped_storage() for t in tensors if t is not None):
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                out[kind] += storage.nbytes()
    return out


@contextmanager
def saved_bytes(model: nn.Module | None = None) -> Iterator[SavedBytes]:
    """Count the bytes that operations inside the block save for their backward.

    Args:
        model: its parameters and buffers are left out (other `nn.Parameter`s are too).

    Yields:
        `SavedBytes`; it can be read inside the block and after it.

    Cost: a few microseconds for each saved tensor. What a custom `autograd.Function` puts on `ctx` by itself, not with
    `save_for_backward`, is invisible here.

    >>> x, w = torch.ones(8, 4, requires_grad=True), nn.Parameter(torch.ones(4, 4))
    >>> with saved_bytes() as saved:
    ...     y = (x @ w).square().sum()          # matmul saves x (and w, not counted); square saves x @ w
    >>> saved.bytes                             # 8 * 4 * 4 bytes, twice
    256
    """
    saved = SavedBytes()
    kept = [*model.parameters(), *model.buffers()] if model is not None else []
    ours = [StorageWeakRef(t.untyped_storage()) for t in kept]
    excluded = {ref.cdata for ref in ours}

    def pack(t: Tensor) -> Tensor:
        source = t._base if t._base is not None else t
        if not isinstance(source, nn.Parameter) and StorageWeakRef(t.untyped_storage()).cdata not in excluded:
            saved._count(t.untyped_storage())
        return t.detach()  # not t: torch forbids a reference to its input, which can be a cycle

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield saved

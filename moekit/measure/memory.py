"""Bytes that autograd keeps for the backward, counted where they are kept.

A tensor is counted by the storage that it keeps alive, once, whoever saves it again: a view of a large tensor keeps
the large one. Parameters and buffers of the model are not counted; they are there anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass
class SavedBytes:
    """What `saved_bytes` counted."""

    by_tag: dict[str, int] = field(default_factory=dict)  # bytes first saved under each tag
    tensors: int = 0  # how many tensors were saved, repeats included
    _tags: list[str] = field(default_factory=list, repr=False)
    _seen: dict[int, tuple[StorageWeakRef, int]] = field(default_factory=dict, repr=False)

    @property
    def bytes(self) -> int:
        """Bytes of all storages that were saved, each once."""
        return sum(self.by_tag.values())

    @property
    def live(self) -> int:
        """Bytes of those storages that are still alive: what the backward has not released yet."""
        return sum(size for ref, size in self._seen.values() if not ref.expired())

    @contextmanager
    def tag(self, name: str) -> Iterator[None]:
        """Count what is saved inside under `name`; the innermost tag wins."""
        self._tags.append(name)
        try:
            yield
        finally:
            self._tags.pop()

    def _count(self, t: Tensor) -> None:
        self.tensors += 1
        storage = t.untyped_storage()
        # a weak reference keeps the identity from being reused, and does not keep the memory
        ref = StorageWeakRef(storage)
        if ref.cdata in self._seen:
            return
        size = storage.nbytes()
        self._seen[ref.cdata] = (ref, size)
        name = self._tags[-1] if self._tags else ""
        self.by_tag[name] = self.by_tag.get(name, 0) + size

    def __repr__(self) -> str:
        width = max((len(name) for name in self.by_tag), default=0)
        lines = [f"  {name or '(untagged)':<{max(width, 10)}} {size:>14,}" for name, size in self.by_tag.items()]
        return "\n".join([f"SavedBytes({self.bytes:,} bytes saved for backward, {self.live:,} alive)", *lines])


@contextmanager
def saved_bytes(model: nn.Module | None = None, depth: int | None = None) -> Iterator[SavedBytes]:
    """Count the bytes that operations inside the block save for their backward.

    Args:
        model: its parameters and buffers are left out (other `nn.Parameter`s are too).
        depth: tag by sub-module, to this many parts of its name: 2 gives "layers.0", 3 "layers.0.attention". Only
            modules that run through `forward` are seen. None = tags are the caller's (`with saved.tag("...")`).

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
    kept = [t for t in (*model.parameters(), *model.buffers())] if model is not None else []
    ours = [StorageWeakRef(t.untyped_storage()) for t in kept]
    excluded = {ref.cdata for ref in ours}

    def pack(t: Tensor) -> Tensor:
        source = t._base if t._base is not None else t
        if not isinstance(source, nn.Parameter) and StorageWeakRef(t.untyped_storage()).cdata not in excluded:
            saved._count(t)
        return t.detach()  # not t: torch forbids a reference to its input, which can be a cycle

    with ExitStack() as stack:
        if model is not None and depth is not None:
            _tag_modules(model, depth, saved, stack)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t))
        yield saved


def _tag_modules(model: nn.Module, depth: int, saved: SavedBytes, stack: ExitStack) -> None:
    for name, module in model.named_modules():
        if name and name.count(".") < depth:
            enter = module.register_forward_pre_hook(lambda *_, name=name: saved._tags.append(name))
            leave = module.register_forward_hook(lambda *_: _drop_last(saved._tags), always_call=True)
            stack.callback(enter.remove)
            stack.callback(leave.remove)


def _drop_last(tags: list[str]) -> None:
    tags.pop()  # a hook that returns something would replace the module's output

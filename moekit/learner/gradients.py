"""Flat buckets: parameters, fp32 masters and summed gradients as contiguous memory, one bucket per family.

A family is (dense or expert, decayed or not). Every parameter owns a span of its bucket, aligned so that expert slices
can feed a grouped GEMM. Gradients are accumulated over microbatches in the wider of float32 and the parameter's dtype,
are zero in the gaps between spans, and are written once: the first microbatch overwrites, later ones add, so nothing
has to be cleared. Expert weight gradients are written into their span by the expert operation itself
(`moekit.ops.GradSlot`), all others by a hook when autograd has finished with the parameter.

Where the parameter has the accumulator's dtype its storage *is* the master; a bf16 parameter has an fp32 master beside
it and equals bf16(master) after every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..ops import GradSlot

ALIGN = 64  # elements between spans; 128 bytes in bf16


@dataclass(frozen=True)
class Span:
    """One parameter's place in its bucket."""

    name: str
    start: int
    shape: torch.Size

    @property
    def stop(self) -> int:
        """One past the last place."""
        return self.start + self.shape.numel()


class Bucket:
    """One family's flat tensors: `param` (what the forward reads), `master` and `grad` (same length)."""

    def __init__(self, expert: bool, decay: bool, items: list[tuple[str, nn.Parameter]]):
        self.expert, self.decay = expert, decay
        self.params = dict(items)
        self.spans: list[Span] = []
        at = 0
        for name, p in items:
            self.spans.append(Span(name, at, p.shape))
            at += -(-p.numel() // ALIGN) * ALIGN
        first = items[0][1]
        wide = torch.promote_types(first.dtype, torch.float32)
        self.param = torch.zeros(at, dtype=first.dtype, device=first.device)
        for span, (_, p) in zip(self.spans, items):
            view = self.view(self.param, span)
            view.copy_(p.detach())
            p.data = view
        self.master = self.param if wide == first.dtype else self.param.to(wide)
        self.grad = torch.zeros(at, dtype=wide, device=first.device)
        self.slots = [GradSlot(self.view(self.grad, s), False) for s in self.spans]

    def view(self, flat: Tensor, span: Span) -> Tensor:
        """The parameter-shaped part of a flat tensor of this bucket."""
        return flat[span.start : span.stop].view(span.shape)

    def refresh(self) -> None:
        """Make the parameters equal their masters, rounded."""
        if self.master is not self.param:
            self.param.copy_(self.master)


def decays(name: str, p: Tensor) -> bool:
    """Whether weight decay applies: not to norms, biases and other one-dimensional parameters."""
    return p.ndim >= 2


class Gradients:
    """All buckets of a model, and the accumulation of gradients into them.

    Args:
        model: its trainable parameters move into the buckets (their `data` become views).
        expert_names: names of the parameters that expert parallelism would split.
    """

    def __init__(self, model: nn.Module, expert_names: set[str]):
        families: dict[tuple[bool, bool, torch.dtype], list[tuple[str, nn.Parameter]]] = {}
        for name, p in model.named_parameters():
            if p.requires_grad:
                families.setdefault((name in expert_names, decays(name, p), p.dtype), []).append((name, p))
        self.buckets = [Bucket(e, d, items) for (e, d, _), items in families.items()]
        self._hooks = []
        for bucket in self.buckets:
            for slot, p in zip(bucket.slots, bucket.params.values()):
                p.grad_slot = slot  # type: ignore[attr-defined]
                self._hooks.append(p.register_post_accumulate_grad_hook(_drain))

    def start(self) -> None:
        """Begin a step: the next gradient of every parameter overwrites."""
        for bucket in self.buckets:
            for slot, p in zip(bucket.slots, bucket.params.values()):
                slot.filled, p.grad = False, None

    def finish(self) -> None:
        """End of the last backward: parameters that got no gradient have gradient zero."""
        for bucket in self.buckets:
            for slot in bucket.slots:
                if not slot.filled:
                    slot.view.zero_()
                    slot.filled = True

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """(name, gradient) of every trainable parameter: views, valid until the next step."""
        for bucket in self.buckets:
            for span in bucket.spans:
                yield span.name, bucket.view(bucket.grad, span)

    def norm(self) -> float:
        """Global 2-norm, every parameter counted once. One number leaves the device."""
        parts = [torch.linalg.vector_norm(b.grad).to(torch.float64) for b in self.buckets]
        return float(torch.linalg.vector_norm(torch.stack(parts))) if parts else 0.0

    def close(self) -> None:
        """Give the parameters back to plain autograd."""
        for hook in self._hooks:
            hook.remove()
        for bucket in self.buckets:
            for p in bucket.params.values():
                del p.grad_slot  # type: ignore[attr-defined]


def _drain(p: nn.Parameter) -> None:
    slot: GradSlot = p.grad_slot  # type: ignore[attr-defined]
    if p.grad is None:  # the operation wrote into the slot itself
        return
    if slot.filled:
        slot.view.add_(p.grad)
    else:
        slot.view.copy_(p.grad)
        slot.filled = True
    p.grad = None

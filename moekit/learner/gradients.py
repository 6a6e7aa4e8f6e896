"""Flat buckets: parameters, masters and summed gradients as contiguous memory, one family of buckets per group.

A family is (expert or dense, decayed or not, dtype, copy of a tied weight or not). Dense buckets are shared by the dp
ranks, expert buckets by the expert_dp ranks; each of those ranks owns one n-th of a bucket. Every parameter has a span
of its bucket, aligned so that expert slices can feed a grouped GEMM. What lies between spans belongs to no parameter,
is zero, is never saved and adds nothing to the norm.

Gradients are summed over microbatches in the wider of float32 and the parameter's dtype and are written once: the
first microbatch overwrites, later ones add, so nothing has to be cleared. Expert weight gradients are written into
their span by the expert operation itself (see `moekit.ops.GradSlot`), all others by a hook when autograd has finished
with the parameter. Expert gradients hold the tokens of all ep ranks already: the dispatch brought them.

    zero=0, 1                all-reduce after the last backward; every rank has the whole gradient
    zero=2, reduce=step      reduce-scatter after the last backward; a rank has the gradient of what it owns
    zero=2, microbatch       the same after every microbatch, bucket by bucket as soon as a bucket is whole, and its
                             memory is given back: less memory, as many times the wire as there are microbatches
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.intervals import Piece
from ..config import LearnerConfig
from ..model.transformer import Transformer
from .mesh import Mesh, World

ALIGN = 64  # elements between spans; 128 bytes in bf16
LARGEST = {"step": 1 << 25, "microbatch": 1 << 22}  # elements after which a bucket takes no further parameter


@dataclass(frozen=True)
class Family:
    """What the parameters of one bucket have in common."""

    expert: bool
    decay: bool
    dtype: torch.dtype
    tied: bool = False  # one of the two copies of an embedding that first and last pipeline stage share


@dataclass(frozen=True)
class Span:
    """One parameter's place in its bucket, and the place of what is held here in the whole parameter seen flat."""

    name: str
    start: int
    shape: torch.Size
    whole: tuple[int, ...]
    base: int

    @property
    def stop(self) -> int:
        """One past the last place."""
        return self.start + self.shape.numel()


class Slot:
    """Where one parameter's gradient goes (`moekit.ops.GradSlot`); its bucket gets memory when it is first touched."""

    def __init__(self, bucket: "Bucket", span: Span):
        self.bucket, self.span, self.filled = bucket, span, False
        self.hook: Any = None  # the parameter's, which fills this

    @property
    def view(self) -> Tensor:
        """The parameter-shaped part of the bucket's gradient."""
        return self.bucket.view(self.bucket.open(), self.span)


class Bucket:
    """Some parameters' flat tensors: `param` (what the forward reads), `grad` (as long), and what this rank owns.

    Owned is [start, stop) of the bucket, of the same length on every rank of `ranks`. `master` and `owned_grad` cover
    that, or the whole bucket with zero=0. Where the parameter has the accumulator's dtype its storage *is* the master;
    a bf16 parameter has a float32 master beside it and equals bf16(master) after every step.
    """

    def __init__(
        self, family: Family, items: list[tuple[str, nn.Parameter]], spans: list[Span], ranks: World, zero: int
    ):
        self.family, self.params, self.spans, self.ranks, self.zero = family, dict(items), spans, ranks, zero
        first = items[0][1]
        unit = ranks.size * ALIGN
        length = -(-spans[-1].stop // unit) * unit
        each = length // ranks.size
        self.start, self.stop = ranks.rank * each, (ranks.rank + 1) * each
        self.wide = torch.promote_types(first.dtype, torch.float32)
        self.param = torch.zeros(length, dtype=first.dtype, device=first.device)
        for span, (_, p) in zip(spans, items):
            view = self.view(self.param, span)
            view.copy_(p.detach())
            p.data = view
        part = self.param if zero == 0 else self.param[self.start : self.stop]
        self.master = part if self.wide == first.dtype else part.to(self.wide)
        self.grad: Tensor | None = None
        self.owned_grad: Tensor | None = None
        self.slots = [Slot(self, s) for s in spans]

    def view(self, flat: Tensor, span: Span) -> Tensor:
        """The parameter-shaped part of a flat tensor as long as the bucket."""
        return flat[span.start : span.stop].view(span.shape)

    def open(self) -> Tensor:
        """The gradient's memory; made zero once, so that gaps stay zero."""
        if self.grad is None:
            self.grad = torch.zeros_like(self.param, dtype=self.wide)
        return self.grad

    def fill(self) -> None:
        """Parameters that got no gradient have gradient zero."""
        for slot in self.slots:
            if not slot.filled:
                slot.view.zero_()
                slot.filled = True

    def reduce(self) -> None:
        """Sum over the ranks that share the bucket; `owned_grad` is the result's part for the optimizer here."""
        grad = self.open()
        if self.zero == 2:
            self.owned_grad = self.ranks.reduce_scatter(grad)
            return
        self.ranks.sum(grad, "gradients")
        self.owned_grad = grad if self.zero == 0 else grad[self.start : self.stop]

    def refresh(self) -> None:
        """Make the parameters equal their masters, rounded, on all ranks that share the bucket."""
        own = self.param if self.zero == 0 else self.param[self.start : self.stop]
        if self.master.data_ptr() != own.data_ptr():
            own.copy_(self.master)
        if self.zero:
            self.ranks.all_gather(self.param, own)

    def share(self, tensor: Tensor) -> Tensor:
        """The owned part of a tensor that covers what `master` covers."""
        return tensor[self.start : self.stop] if self.zero == 0 else tensor

    def pieces(self, tensor: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """What this rank owns of every parameter, with the flat part of `tensor` (like `master`) that belongs to it."""
        yield from self.cover(self.share(tensor), self.start, self.stop)

    def cover(self, tensor: Tensor, start: int, stop: int) -> Iterator[tuple[Piece, Tensor]]:
        """Every parameter's part of [start, stop) of the bucket, which `tensor` covers."""
        for span in self.spans:
            low, high = max(span.start, start), min(span.stop, stop)
            if low < high:
                at = span.base - span.start
                yield Piece(span.name, span.whole, low + at, high + at), tensor[low - start : high - start]


def decays(name: str, p: Tensor) -> bool:
    """Whether weight decay applies: not to norms, biases and other one-dimensional parameters."""
    return p.ndim >= 2


def is_expert(name: str) -> bool:
    """Whether a parameter is a stack of routed experts, the kind that expert parallelism splits."""
    return name.endswith((".moe.gate_up", ".moe.down"))


class Gradients:
    """All buckets of a model, and the summing of gradients into them.

    Args:
        model: its trainable parameters move into the buckets (their `data` become views).
        config: zero and reduce.
        mesh: who shares what.
    """

    def __init__(self, model: Transformer, config: LearnerConfig, mesh: Mesh):
        self.config, self.mesh = config, mesh
        names = [(n, p) for n, p in model.named_parameters() if p.requires_grad][::-1]  # as gradients come
        self.frozen = {n: (p, *_whole(model, n, p)) for n, p in model.named_parameters() if not p.requires_grad}
        families: dict[Family, list[tuple[str, nn.Parameter]]] = {}
        for name, p in names:
            tied = mesh.tie.size > 1 and name == "embed.weight"
            families.setdefault(Family(is_expert(name), decays(name, p), p.dtype, tied), []).append((name, p))
        self.buckets: list[Bucket] = []
        for family, items in families.items():
            for some in _groups(items, LARGEST[config.reduce]):
                spans, at = [], 0
                for name, p in some:
                    spans.append(Span(name, at, p.shape, *_whole(model, name, p)))
                    at += -(-p.numel() // ALIGN) * ALIGN
                self.buckets.append(Bucket(family, some, spans, self.ranks(some[0][0]), config.zero))
        order = {name: at for at, (name, _) in enumerate(names)}
        self.buckets.sort(key=lambda b: max(order[n] for n in b.params))  # as they become whole in a backward
        self.eager = config.reduce == "microbatch"
        self._next = 0
        for bucket in self.buckets:
            for slot, p in zip(bucket.slots, bucket.params.values()):
                if (before := getattr(p, "grad_slot", None)) is not None:  # an earlier learner's, and its memory
                    before.hook.remove()
                p.grad_slot, slot.hook = slot, p.register_post_accumulate_grad_hook(self._drain)  # type: ignore

    def ranks(self, name: str) -> World:
        """The ranks that hold the same part of a parameter."""
        return self.mesh.expert_dp if is_expert(name) else self.mesh.dp

    def held(self, owned: bool = False) -> list[tuple[Piece, Tensor]]:
        """What is held of frozen parameters, flat; `owned` = over the world every element once."""
        return [
            (Piece(n, whole, base, base + p.numel()), p.data.view(-1))
            for n, (p, whole, base) in self.frozen.items()
            if not (owned and (self.ranks(n).rank or (n == "embed.weight" and self.mesh.tie.rank)))
        ]

    # ------------------------------------------------------------------ one step
    def start(self) -> None:
        """Begin a step: the next gradient of every parameter overwrites."""
        for bucket in self.buckets:
            bucket.owned_grad = None
        self._again()

    def finish_microbatch(self) -> None:
        """End of one microbatch's backward."""
        if self.eager:
            self._reduce_whole(everything=True)
            self._again()

    def finish(self) -> None:
        """End of the last backward: sum over ranks; `Bucket.owned_grad` is ready on return."""
        for bucket in self.buckets:
            if self.eager:
                if bucket.owned_grad is None:  # no microbatch had anything to learn
                    bucket.owned_grad = torch.zeros_like(bucket.master)
                continue
            bucket.fill()
            if bucket.family.tied:  # first and last stage hold one weight: the sum of both before all else
                self.mesh.tie.sum(bucket.open(), "gradients")
            bucket.reduce()

    def owned(self) -> list[Bucket]:
        """The buckets that count: all but the second copy of a tied weight, for which the first stage's stands."""
        return [b for b in self.buckets if not (b.family.tied and self.mesh.tie.rank)]

    def square_norm(self) -> Tensor:
        """Sum of squares of what this rank owns, float64, on the device; over the world every parameter counts once."""
        parts = [b.share(b.owned_grad) for b in self.owned()]  # pyright: ignore[reportArgumentType]
        # of ALIGN each: torch's float32 norm of 2**24 numbers is off by 6e-4 on a CPU, differently in every layout
        norms = [torch.linalg.vector_norm(g.view(-1, ALIGN), dim=1).to(torch.float64).square().sum() for g in parts]
        return torch.stack(norms).sum() if norms else torch.zeros((), dtype=torch.float64)

    def _again(self) -> None:
        self._next = 0
        for bucket in self.buckets:
            for slot, p in zip(bucket.slots, bucket.params.values()):
                slot.filled, p.grad = False, None

    def _reduce_whole(self, everything: bool = False) -> None:
        """Reduce, in the buckets' order on every rank, those whose parameters all have this microbatch's gradient."""
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if not everything and not all(slot.filled for slot in bucket.slots):
                return
            bucket.fill()
            before = bucket.owned_grad
            bucket.reduce()
            if before is not None:
                bucket.owned_grad = before.add_(bucket.owned_grad)  # pyright: ignore[reportArgumentType]
            bucket.grad = None
            self._next += 1

    def _drain(self, p: nn.Parameter) -> None:
        slot: Slot = p.grad_slot  # type: ignore[attr-defined]
        if p.grad is not None:  # else the operation wrote into the slot itself
            if slot.filled:
                slot.view.add_(p.grad)
            else:
                slot.view.copy_(p.grad)
                slot.filled = True
            p.grad = None
        if self.eager:
            self._reduce_whole()

    def close(self) -> None:
        """Give the parameters back to plain autograd."""
        for bucket in self.buckets:
            for slot, p in zip(bucket.slots, bucket.params.values()):
                slot.hook.remove()
                del p.grad_slot  # type: ignore[attr-defined]


def _whole(model: Transformer, name: str, p: Tensor) -> tuple[tuple[int, ...], int]:
    """Shape of the whole parameter, and the place in it, seen flat, of what is held here."""
    if not is_expert(name):
        return tuple(p.shape), 0
    return (model.config.experts, *p.shape[1:]), model.part.experts[0] * p[0].numel()


def _groups(items: list[tuple[str, nn.Parameter]], largest: int) -> Iterator[list[tuple[str, nn.Parameter]]]:
    group, size = [], 0
    for name, p in items:
        group.append((name, p))
        size += p.numel()
        if size >= largest:
            yield group
            group, size = [], 0
    if group:
        yield group

"""The batch: rows of fixed length, and the same microbatch seen flat, document after document.

Axis letters: B rows, T positions in a row, N = B*T positions seen flat, M labelled positions, S documents.

`Batch` is what data loading makes and what a person looks at (`moekit.show`). `Flat` is what the model, the
objectives and the router losses compute on: all positions of the microbatch reordered so that every document is one
contiguous span, documents of equal length are neighbours, and padding comes last. Attention then needs neither a mask
nor a gather, and removing padding is a slice. The reordering is exact: everything but attention acts on one position
at a time, and attention never leaves a document and its parent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError

SUPERVISED, CONTEXT, FILTERED, PADDING = range(4)
CLASSES: tuple[str, ...] = ("supervised", "context", "filtered", "padding")
IGNORE = -100


@dataclass(frozen=True)
class Run:
    """`documents` neighbours of equal `length` in a `Flat`, starting at position `start`; none has a parent."""

    start: int
    documents: int
    length: int


@dataclass(frozen=True)
class Child:
    """A document that continues a shared prompt: its span, and its parent's span, in a `Flat`."""

    start: int
    length: int
    parent_start: int
    parent_length: int


@dataclass(frozen=True)
class Size:
    """How large a microbatch is on one rank: what others must know to make room for its rows."""

    positions: int
    real: int
    labels: int


@dataclass(frozen=True)
class Flat:
    """One microbatch, position by position, in document order (see the module's docstring)."""

    ids_N: Tensor  # int64
    position_N: Tensor  # int64, rotary position
    label_N: Tensor  # int64, next token of the same document, or ignore_index
    class_N: Tensor  # int64, index into CLASSES
    document_N: Tensor  # int64 in [0, S), -1 for padding
    order_N: Tensor  # int64, the position's place in the batch: row * T + t
    share_N: Tensor  # int64, documents that this position serves: number of children for a shared prompt, else 1
    parent_S: Tensor  # int64 in [0, S), -1 = no parent
    label_index_M: Tensor  # int64, where the labels are; made on the host
    runs: tuple[Run, ...]  # documents without a parent
    children: tuple[Child, ...]
    real: int  # positions [0, real) are not padding
    documents: int  # S
    rows: int  # B
    length: int  # T
    removed: int  # instances that the filter removed
    ignore_index: int = IGNORE
    peers: tuple[Size, ...] = ()  # this microbatch on every rank that shares its experts; () = alone
    extra: dict[str, Tensor] = field(default_factory=dict)  # [N] each: what an objective reads beside the labels

    @property
    def positions(self) -> int:
        """N, padding included."""
        return self.ids_N.shape[0]

    @property
    def size(self) -> Size:
        """This rank's entry of `peers`."""
        return Size(self.positions, self.real, self.label_index_M.shape[0])

    @cached_property
    def label_M(self) -> Tensor:
        """Targets at `label_index_M`."""
        return self.label_N[self.label_index_M]

    def to(self, device: torch.device | str) -> Flat:
        """The same, on another device. Costs one copy a field; nothing to do if it is there already."""
        if self.ids_N.device == torch.device(device):
            return self
        moved = {f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)
                 if isinstance(getattr(self, f.name), Tensor)}  # fmt: skip
        extra = {name: x.to(device, non_blocking=True) for name, x in self.extra.items()}
        return replace(self, **moved, extra=extra)

    def at_labels(self, name: str) -> Tensor:
        """[M], the values of `extra[name]` at the labelled positions.

        Raises:
            DataError: the batch has no such values.
        """
        if name not in self.extra:
            raise DataError(f"the batch has no extra values {name!r}, only {sorted(self.extra)}; give Batch.make them")
        return self.extra[name][self.label_index_M]

    def to_rows(self, x_N: Tensor, fill: float = 0) -> Tensor:
        """Put a per-position tensor [N, ...] back in the batch's order [B, T, ...]."""
        out = torch.full_like(x_N, fill)
        out[self.order_N] = x_N
        return out.view(self.rows, self.length, *x_N.shape[1:])


@dataclass(frozen=True)
class Batch:
    """Rows of T positions. Make one with `Batch.make`, which checks it and fills in what follows from the ids.

    Position t attends to j <= t in its own segment or its parent's; padding (segment -1) attends to itself only.
    """

    input_ids: Tensor  # [B, T] int64
    labels: Tensor  # [B, T] int64, already shifted: the target of this position
    segment: Tensor  # [B, T] int64, document index in the row, -1 = padding
    position: Tensor  # [B, T] int64
    parent: Tensor  # [B, T] int64, segment of the shared prompt, -1 = none
    filtered: Tensor  # [B, T] bool, the position's instance was removed by the instance filter
    removed: int = 0  # how many instances the filter removed
    ignore_index: int = IGNORE
    extra: dict[str, Tensor] = field(default_factory=dict)  # [B, T] each, for the objective; the model reads none

    @classmethod
    def make(
        cls,
        input_ids: Tensor,
        *,
        labels: Tensor | None = None,
        segment: Tensor | None = None,
        position: Tensor | None = None,
        parent: Tensor | None = None,
        filtered: Tensor | None = None,
        removed: int = 0,
        ignore_index: int = IGNORE,
        extra: dict[str, Tensor] | None = None,
    ) -> Batch:
        """A checked batch; what is left out is derived.

        Args:
            input_ids: [B, T] integers.
            labels: [B, T], already shifted. Derived when absent: the next token of the same document.
            segment: [B, T]; absent = every row is one document without padding.
            position: [B, T]; absent = 0, 1, ... in each document, continuing from the parent's length.
            parent: [B, T]; absent = no prefix is shared.
            filtered: [B, T] bool; labels there become `ignore_index`.
            removed: instances removed by the filter (documents, or rows when packed).
            extra: values [B, T] by name that only the objective reads: advantages, old log-probs. What belongs to the
                token that position t predicts stands at position t, as its label does.

        Raises:
            DataError: shapes differ, a parent is missing, has a parent itself, or comes after its child; or a segment
                has two.

        >>> b = Batch.make(torch.tensor([[5, 6, 2, 7, 8, 2]]), segment=torch.tensor([[0, 0, 0, 1, 1, 1]]))
        >>> b.labels.tolist(), b.position.tolist()
        ([[6, 2, -100, 8, 2, -100]], [[0, 1, 2, 0, 1, 2]])
        """
        ids = input_ids.long()
        if ids.ndim != 2:
            raise DataError(f"input_ids must be [rows, positions], got shape {tuple(ids.shape)}")
        segment = torch.zeros_like(ids) if segment is None else segment.long()
        parent = torch.full_like(ids, -1) if parent is None else parent.long()
        filtered = torch.zeros_like(ids, dtype=torch.bool) if filtered is None else filtered.bool()
        given = {"labels": labels, "segment": segment, "position": position, "parent": parent, "filtered": filtered}
        extra = dict(extra or {})
        for name, value in (given | {f"extra {name!r}": value for name, value in extra.items()}).items():
            if value is not None and value.shape != ids.shape:
                raise DataError(f"{name} has shape {tuple(value.shape)}, input_ids {tuple(ids.shape)}; they must agree")
        _check_parents(segment, parent)
        follow = _next_in_document(segment)
        if labels is None:
            flat = ids.reshape(-1)
            labels = torch.where(follow >= 0, flat[follow.clamp(min=0)], ignore_index).view_as(ids)
        labels = labels.long().masked_fill(filtered | (segment < 0), ignore_index)
        if position is None:
            position = _positions(segment, parent)
        return cls(ids, labels, segment, position.long(), parent, filtered, removed, ignore_index, extra)

    @property
    def rows(self) -> int:
        """B."""
        return self.input_ids.shape[0]

    @property
    def length(self) -> int:
        """T."""
        return self.input_ids.shape[1]

    @cached_property
    def classes(self) -> Tensor:
        """[B, T] int64 index into `CLASSES`; first match wins: padding, filtered, supervised, context."""
        out = torch.full_like(self.input_ids, CONTEXT)
        out[self.labels != self.ignore_index] = SUPERVISED
        out[self.filtered] = FILTERED
        out[self.segment < 0] = PADDING
        return out

    @cached_property
    def flat(self) -> Flat:
        """The batch seen flat, in document order. Computed once, on the host."""
        return _flatten(self)

    def split(self, rows: int) -> list[Batch]:
        """Cut into microbatches of at most `rows` rows. `removed` stays with the first: it is a count of the step."""
        cuts = [self._each(lambda x, at=at: x[at : at + rows]) for at in range(0, self.rows, rows)]
        return [replace(cut, removed=self.removed if i == 0 else 0) for i, cut in enumerate(cuts)]

    def take(self, rows: list[int] | Tensor) -> Batch:
        """The rows of these numbers, in this order. `removed`, a count of the step, is 0 and not shared out."""
        return replace(self._each(lambda x: x[rows]), removed=0)

    def trim(self) -> Batch:
        """The same without the columns at the end that are padding in every row; one column stays."""
        used = int((self.segment >= 0).any(0).nonzero().max()) + 1 if bool((self.segment >= 0).any()) else 1
        return self._each(lambda x: x[:, :used])

    @staticmethod
    def join(batches: list[Batch]) -> Batch:
        """Rows of several batches of equal length under each other; all must have the same extra values."""
        first = batches[0]
        joined = {f.name: torch.cat([getattr(b, f.name) for b in batches]) for f in fields(first)
                  if isinstance(getattr(first, f.name), Tensor)}  # fmt: skip
        extra = {name: torch.cat([b.extra[name] for b in batches]) for name in first.extra}
        return replace(first, **joined, extra=extra, removed=sum(b.removed for b in batches))

    def empty(self) -> Batch:
        """A batch of no rows: what a rank runs when others have more microbatches. It routes nothing."""
        return replace(self._each(lambda x: x[:0]), removed=0)

    def _each(self, fn: Callable[[Tensor], Tensor]) -> Batch:
        """The same with `fn` of every tensor."""
        made = {f.name: fn(getattr(self, f.name)) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        return replace(self, **made, extra={name: fn(x) for name, x in self.extra.items()})


def _sorted_documents(segment: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Flat places of all non-padding positions grouped by (row, segment), in row order, and their group key."""
    length = segment.shape[1]
    seg = segment.numpy().reshape(-1)
    place = np.nonzero(seg >= 0)[0]
    key = (place // max(length, 1)) * (int(seg.max(initial=0)) + 1) + seg[place]
    order = np.argsort(key, kind="stable")
    return place[order], key[order]


def _next_in_document(segment: Tensor) -> Tensor:
    """For every flat place the place of the next token of its document, -1 at a document's end and on padding."""
    place, key = _sorted_documents(segment)
    out = np.full(segment.numel(), -1, np.int64)
    if len(place):
        same = key[1:] == key[:-1]
        out[place[:-1][same]] = place[1:][same]
    return torch.from_numpy(out)


def _spans(key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Start and length of every run of equal keys."""
    if not len(key):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    start = np.concatenate([[0], np.nonzero(key[1:] != key[:-1])[0] + 1])
    return start, np.diff(np.append(start, len(key)))


def _positions(segment: Tensor, parent: Tensor) -> Tensor:
    place, key = _sorted_documents(segment)
    start, length = _spans(key)
    out = np.zeros(segment.numel(), np.int64)
    out[place] = np.arange(len(place)) - np.repeat(start, length)
    up = parent.numpy().reshape(-1)
    if (up >= 0).any():
        width = segment.shape[1]
        size = {(int(place[a]) // width, int(segment.reshape(-1)[place[a]])): int(n) for a, n in zip(start, length)}
        for at in np.nonzero(up >= 0)[0]:
            out[at] += size[(int(at) // width, int(up[at]))]
    return torch.from_numpy(out).view_as(segment)


def _check_parents(segment: Tensor, parent: Tensor) -> None:
    if not bool((parent >= 0).any()):
        return
    for row, (seg, up) in enumerate(zip(segment.tolist(), parent.tolist())):
        first, last = ({s: t for t, s in order} for order in (reversed([*enumerate(seg)]), enumerate(seg)))
        for t, (s, p) in enumerate(zip(seg, up)):
            if p != up[first[s]]:
                raise DataError(
                    f"row {row}, position {t}: segment {s} has the parents {up[first[s]]} and {p}; one is allowed"
                )
            if p < 0:
                continue
            if s < 0 or p not in first or p == s:
                raise DataError(f"row {row}, position {t}: parent segment {p} of segment {s} is not in the row")
            if up[first[p]] >= 0:
                raise DataError(f"row {row}: segment {p} is a parent and has a parent itself; one level is allowed")
            if last[p] > first[s]:
                raise DataError(f"row {row}: parent segment {p} must come before its child {s}")


def _flatten(batch: Batch) -> Flat:
    place, key = _sorted_documents(batch.segment)
    start, length = _spans(key)
    seg = batch.segment.numpy().reshape(-1)
    up = batch.parent.numpy().reshape(-1)
    width = max(batch.length, 1)
    first = place[start] if len(start) else np.zeros(0, np.int64)
    child = up[first] >= 0
    rank = np.lexsort((np.arange(len(start)), -length, child))  # parentless first, then longest first
    home = {(int(first[d]) // width, int(seg[first[d]])): new for new, d in enumerate(rank)}
    length, start_new = length[rank], np.concatenate([[0], np.cumsum(length[rank])])[: len(rank)]
    order = np.concatenate([place[start[d] : start[d] + n] for d, n in zip(rank, length)] or [np.zeros(0, np.int64)])
    parent = np.array([home[(int(first[d]) // width, int(up[first[d]]))] if child[d] else -1 for d in rank], np.int64)
    children = np.bincount(parent[parent >= 0], minlength=len(rank))
    document = np.repeat(np.arange(len(rank)), length)
    padding = np.nonzero(seg < 0)[0]
    order_N = torch.from_numpy(np.concatenate([order, padding]).astype(np.int64))
    pick = lambda x: x.reshape(-1)[order_N]
    label = pick(batch.labels)
    runs: list[Run] = []
    for at, n, p in zip(start_new.tolist(), length.tolist(), parent.tolist()):
        if p >= 0:
            continue
        if runs and runs[-1].length == n:
            runs[-1] = replace(runs[-1], documents=runs[-1].documents + 1)
        else:
            runs.append(Run(at, 1, n))
    return Flat(
        ids_N=pick(batch.input_ids),
        position_N=pick(batch.position),
        label_N=label,
        class_N=pick(batch.classes),
        document_N=torch.from_numpy(np.concatenate([document, np.full(len(padding), -1)]).astype(np.int64)),
        order_N=order_N,
        share_N=torch.from_numpy(
            np.concatenate([np.maximum(children, 1)[document], np.ones(len(padding))]).astype(np.int64)
        ),
        parent_S=torch.from_numpy(parent),
        label_index_M=torch.nonzero(label != batch.ignore_index).reshape(-1),
        runs=tuple(runs),
        children=tuple(
            Child(int(start_new[d]), int(length[d]), int(start_new[p]), int(length[p]))
            for d, p in enumerate(parent.tolist())
            if p >= 0
        ),
        real=len(place),
        documents=len(rank),
        rows=batch.rows,
        length=batch.length,
        removed=batch.removed,
        ignore_index=batch.ignore_index,
        extra={name: pick(x) for name, x in batch.extra.items()},
    )

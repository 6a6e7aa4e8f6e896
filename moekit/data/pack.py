"""Documents to rows of fixed length: padded, packed or interleaved; over-long ones truncated, split or dropped.

Axis letters: D documents given, P pieces (what is left of them, each a document in a row), R rows, N tokens of all
rows laid end to end, T positions in a row.

A piece is a document's tokens, or a part of them where it was cut; every piece is a document of its own in its row.
A label is the next token of the same piece, so a piece of n tokens has at most n - 1 labels: where a document is split,
the next part's first token is no target. `report.counts["targets_lost"]` counts those and what a truncation cut off."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from ..config import DataConfig, FilterConfig
from ..errors import DataError
from .batch import Batch
from .chat import Document
from .filters import find_periodic
from .report import Report


@dataclass(frozen=True, eq=False)
class Rows:
    """All rows of a data set. `rows.batch(indices)` makes a `Batch` of any of them, `len(rows)` says how many."""

    config: DataConfig
    pad_id: int
    ids_N: np.ndarray  # int32, row after row, piece after piece, without padding
    target_N: np.ndarray  # bool, the next token of the same piece is supervised
    offset_P: np.ndarray  # [P + 1], piece p is tokens offset_P[p]:offset_P[p + 1]
    first_R: np.ndarray  # [R + 1], row r holds pieces first_R[r]:first_R[r + 1]
    removed_P: np.ndarray  # bool, the piece belongs to an instance that the filter removed
    removed_R: np.ndarray  # how many instances the filter removed from the row
    document_P: np.ndarray  # the document that the piece comes from
    sources: tuple[tuple[str, int], ...]  # of every document: source, and line or row in it
    report: Report

    def __len__(self) -> int:
        return len(self.first_R) - 1

    @property
    def length(self) -> int:
        """T."""
        return self.config.length

    @cached_property
    def tokens_R(self) -> np.ndarray:
        """[R] int64, positions of each row that are not padding."""
        return np.diff(self.offset_P[self.first_R])

    @cached_property
    def fingerprint(self) -> str:
        """Hash of tokens, targets, rows and filter: two data sets with the same one give the same batches."""
        digest = hashlib.blake2b(f"{self.length} {self.config.rows} {self.pad_id}".encode(), digest_size=16)
        for part in (self.ids_N, self.target_N, self.offset_P, self.first_R, self.removed_P):
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()

    def documents(self, row: int) -> list[tuple[str, int]]:
        """Where the documents of a row come from: (source, line or row in it), in segment order."""
        return [self.sources[d] for d in self.document_P[self.first_R[row] : self.first_R[row + 1]].tolist()]

    def batch(self, indices: Sequence[int] | np.ndarray | slice = slice(None)) -> Batch:
        """The rows `indices`, in that order, as a `Batch` [B, T]; B may be 0. `Batch.removed` counts these rows only.
        Raises DataError: an index is not in 0..len(rows) - 1."""
        chosen = np.arange(len(self))[indices] if isinstance(indices, slice) else np.asarray(indices, np.int64)
        bad = chosen[(chosen < 0) | (chosen >= len(self))]
        if len(bad):
            raise DataError(f"row {int(bad[0])} does not exist; there are rows 0..{len(self) - 1}")
        shape = (len(chosen), self.length)
        ids, label = np.full(shape, self.pad_id, np.int64), np.full(shape, self.config.ignore_index, np.int64)
        segment, position = np.full(shape, -1, np.int64), np.zeros(shape, np.int64)
        filtered = np.zeros(shape, bool)
        for b, row in enumerate(chosen.tolist()):
            pieces = slice(self.first_R[row], self.first_R[row + 1])
            bounds = self.offset_P[self.first_R[row] : self.first_R[row + 1] + 1]
            start, stop, sizes = bounds[0], bounds[-1], np.diff(bounds)
            alternate = self.config.rows == "interleaved"
            place = interleave(sizes, self.config.chunks_per_document) if alternate else slice(0, stop - start)
            ids[b, place] = self.ids_N[start:stop]
            following = np.append(self.ids_N[start + 1 : stop], 0)  # past the last token, which is never a target: any
            label[b, place] = np.where(self.target_N[start:stop], following, self.config.ignore_index)
            segment[b, place] = np.repeat(np.arange(len(sizes)), sizes)
            position[b, place] = np.arange(stop - start) - np.repeat(bounds[:-1] - start, sizes)
            filtered[b, place] = np.repeat(self.removed_P[pieces], sizes)
        ids, label, segment, position, filtered = map(torch.from_numpy, (ids, label, segment, position, filtered))
        return Batch.make(ids, labels=label, segment=segment, position=position, filtered=filtered,
                          removed=int(self.removed_R[chosen].sum()), ignore_index=self.config.ignore_index)  # fmt: skip


def build_rows(
    documents: Sequence[Document], config: DataConfig, *, pad_id: int = 0, report: Report | None = None
) -> Rows:
    """Cut documents to size, arrange them in rows, and judge them with the instance filter.

    Padded rows hold one document each, in the order given. Packed rows are filled by best-fit decreasing. Interleaved
    rows hold `documents_per_row` neighbours, each of at most `length // documents_per_row` tokens, cut into
    `chunks_per_document` chunks that take turns. An instance of the filter is a document, but the row where rows are
    packed; removed ones stay in their rows without labels.
    Args:
        documents: at least one.
        pad_id: the id at padding positions; never a label and never attended to.
        report: counts and events are added to it (`Rows.report`).
    Raises DataError: there are no documents, or none has anything left to predict.
    >>> documents = [Document([5, 6, 2], [True] * 3), Document([7, 8, 2], [False, True, True])]
    >>> build_rows(documents, DataConfig(length=8)).batch().labels.tolist()
    [[6, 2, -100, 8, 2, -100, -100, -100]]
    """
    report = Report() if report is None else report
    if not len(documents):
        raise DataError("there are no documents to make rows of; the data set is empty")
    report.counts["documents"] += len(documents)
    ids_N = np.concatenate([d.ids for d in documents])
    supervised_N = np.concatenate([d.supervised for d in documents])
    end_D = np.cumsum([len(d.ids) for d in documents])
    document_P, start_P, stop_P = _cut(documents, end_D, config, report)

    # targets_N[i]: how many of the tokens before i are supervised; a piece's first token is never a target.
    targets_N = np.concatenate([[0], np.cumsum(supervised_N)])
    have_D = targets_N[end_D] - targets_N[np.minimum(np.concatenate([[0], end_D[:-1]]) + 1, end_D)]
    have_P = targets_N[stop_P] - targets_N[np.minimum(start_P + 1, stop_P)]
    for p in np.flatnonzero(have_P == 0).tolist():
        d, kept = documents[document_P[p]], stop_P[p] - start_P[p]
        why = f"{kept} of its {len(d)} tokens were kept, none of them" if have_D[document_P[p]] else (
            f"none of its {len(d)} tokens is")  # fmt: skip
        report.add(*_origin(d), "rows_without_target", f"{why} a target")
    keep = have_P > 0
    if not keep.any():
        raise DataError(
            f"none of {len(documents)} documents has a token to learn within length={config.length}: "
            f"{report.counts['dropped']} over-long ones dropped, {report.counts['truncated']} truncated; "
            f"first: {documents[0].source}, {documents[0].index}. Raise length, or check the chat template's masks"
        )
    document_P, start_P, stop_P = document_P[keep], start_P[keep], stop_P[keep]
    report.counts["targets_lost"] += int(have_D.sum() - have_P.sum())

    size_P = stop_P - start_P
    order_P, row_P = _arrange(size_P, config)
    document_P, start_P, size_P = document_P[order_P], start_P[order_P], size_P[order_P]
    offset_P = np.concatenate([[0], np.cumsum(size_P)])
    from_N = np.repeat(start_P - offset_P[:-1], size_P) + np.arange(offset_P[-1])
    ids_N, supervised_N = ids_N[from_N], supervised_N[from_N]
    target_N = np.append(supervised_N[1:], False)
    target_N[offset_P[1:] - 1] = False
    first_R = np.concatenate([[0], np.flatnonzero(np.diff(row_P)) + 1, [len(row_P)]])

    removed_P, removed_R = _judge(ids_N, offset_P, first_R, config)
    rows = Rows(
        config, pad_id, ids_N, target_N, offset_P, first_R, removed_P, removed_R, document_P,
        tuple(map(_origin, documents)), report,
    )  # fmt: skip
    if config.filter is not None:
        _report_filtered(rows, config.filter)
    lost = int(target_N[np.repeat(removed_P, size_P)].sum())
    report.counts.update(rows=len(rows), pieces=len(size_P), tokens=len(ids_N), supervised=int(target_N.sum()) - lost,
                         padding=len(rows) * config.length - len(ids_N), targets_filtered=lost)  # fmt: skip
    return rows


def _origin(document: Document) -> tuple[str, int]:
    return document.source, document.index


def _cut(
    documents: Sequence[Document], end_D: np.ndarray, config: DataConfig, report: Report
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pieces of at most `limit` tokens: document, start and stop (in all documents laid end to end) of each."""
    limit = config.length // (config.documents_per_row if config.rows == "interleaved" else 1)
    if limit < 2 <= config.length:
        each = f"each of documents_per_row={config.documents_per_row} documents"
        raise DataError(f"length={config.length} leaves {limit} positions for {each}; a document needs at least 2")
    size_D = np.diff(end_D, prepend=0)
    reason, why = {
        "truncate": ("truncated", "{limit} of {n} tokens kept"),
        "split": ("split", "{n} tokens in {parts} parts"),
        "drop": ("dropped", "{n} tokens, more than {limit}"),
    }[config.over_long]
    for d in np.flatnonzero(size_D > limit).tolist():
        n = int(size_D[d])
        report.add(*_origin(documents[d]), reason, why.format(n=n, limit=limit, parts=-(-n // limit)))
    start_D, stop_D = end_D - size_D, end_D
    if config.over_long == "split":
        parts_D = np.maximum(-(-size_D // limit), 1)
        document_P = np.repeat(np.arange(len(documents)), parts_D)
        part_P = np.arange(len(document_P)) - np.repeat(np.cumsum(parts_D) - parts_D, parts_D)
        start_P = start_D[document_P] + part_P * limit
        return document_P, start_P, np.minimum(start_P + limit, stop_D[document_P])
    document_D = np.arange(len(documents))
    if config.over_long == "drop":
        short = size_D <= limit
        return document_D[short], start_D[short], stop_D[short]
    kept_D = np.minimum(size_D, limit)
    if config.keep == "end":
        return document_D, stop_D - kept_D, stop_D
    return document_D, start_D, start_D + kept_D


def _arrange(size_P: np.ndarray, config: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """The pieces in the order of the rows, and the row of each, ascending."""
    in_order = np.arange(len(size_P))
    if config.rows != "packed":
        return in_order, in_order // (config.documents_per_row if config.rows == "interleaved" else 1)
    row_P = best_fit_decreasing(size_P, config.length)
    order_P = np.lexsort((in_order, -size_P, row_P))
    return order_P, row_P[order_P]


def best_fit_decreasing(size_P: np.ndarray, capacity: int) -> np.ndarray:
    """The row of each piece: longest pieces first, each into the fullest row that still has room for it.
    Args: `size_P`: [P] integers in 1..capacity.
    Returns: [P] int64 row numbers without gaps; depends on the sizes and their order only.
    Cost: P steps; each looks up the tightest room in one integer of `capacity` bits (bit c set: some row has exactly c
        free positions), which is fast enough that no search tree is needed.
    References: Johnson et al. 1974 (best-fit decreasing); Ding et al. 2024, arXiv:2404.10830 (packing documents so).
    >>> best_fit_decreasing(np.array([2, 5, 3, 4]), 7).tolist()
    [0, 0, 1, 1]
    """
    row_P = np.empty(len(size_P), np.int64)
    rows_with: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows_with[c]: rows with c free positions
    room = rows = 0
    for p in np.argsort(-size_P, kind="stable").tolist():
        size = int(size_P[p])
        enough = room >> size
        if enough:
            free = size + (enough & -enough).bit_length() - 1
            row = rows_with[free].pop()
            if not rows_with[free]:
                room ^= 1 << free
        else:
            free, row, rows = capacity, rows, rows + 1
        left = free - size
        if left:
            rows_with[left].append(row)
            room |= 1 << left
        row_P[p] = row
    return row_P


def interleave(sizes: np.ndarray, chunks: int) -> np.ndarray:
    """Places in a row of the tokens of several documents whose chunks take turns.

    Every document is cut into `chunks` chunks that differ by at most one token (a document with fewer tokens has
    fewer chunks); the row is all first chunks, then all second chunks, and so on.
    Args: `sizes`: tokens of each document.
    Returns: [sum(sizes)] int64; entry i is the place of token i, counted document after document.
    >>> interleave(np.array([4, 3]), 2).tolist()
    [0, 1, 4, 5, 2, 3, 6]
    """
    chunk_DC = sizes[:, None] // chunks + (np.arange(chunks) < (sizes % chunks)[:, None])
    turn_CD = chunk_DC.T
    start_DC = (np.cumsum(turn_CD.ravel()) - turn_CD.ravel()).reshape(turn_CD.shape).T.ravel()
    size_DC = chunk_DC.ravel()
    before = np.cumsum(size_DC) - size_DC
    return np.repeat(start_DC - before, size_DC) + np.arange(size_DC.sum())


def _judge(
    ids_N: np.ndarray, offset_P: np.ndarray, first_R: np.ndarray, config: DataConfig
) -> tuple[np.ndarray, np.ndarray]:
    """What the instance filter removes: a flag for every piece, and the number of instances for every row."""
    size_R, packed = np.diff(first_R), config.rows == "packed"
    if config.filter is None:
        return np.zeros(len(offset_P) - 1, bool), np.zeros(len(size_R), np.int64)
    offset_I = offset_P[first_R] if packed else offset_P
    found_I = find_periodic(ids_N, offset_I, config.filter.max_period, config.filter.min_repeats)
    if packed:
        return np.repeat(found_I, size_R), found_I.astype(np.int64)
    return found_I, np.bincount(np.repeat(np.arange(len(size_R)), size_R)[found_I], minlength=len(size_R))


def _report_filtered(rows: Rows, judge: FilterConfig) -> None:
    """List the documents of removed instances; the count is of instances."""
    row_P = np.repeat(np.arange(len(rows)), np.diff(rows.first_R))
    why = f"a pattern of at most {judge.max_period} tokens repeats {judge.min_repeats} times or more, in row"
    for p in np.flatnonzero(rows.removed_P).tolist():
        source, index = rows.sources[rows.document_P[p]]
        rows.report.add(source, index, "filtered", f"{why} {row_P[p]}", count=0)
    rows.report.counts["filtered"] += int(rows.removed_R.sum())


def check_vocabulary(rows: Rows, vocab: int) -> None:
    """Raise `DataError` if any id of the rows, padding included, is outside 0..vocab - 1."""
    bad = np.flatnonzero((rows.ids_N < 0) | (rows.ids_N >= vocab))
    if len(bad):
        source, index = rows.sources[rows.document_P[np.searchsorted(rows.offset_P, bad[0], side="right") - 1]]
        raise DataError(
            f"{len(bad)} tokens have ids outside the model's vocabulary of {vocab} (first: id {rows.ids_N[bad[0]]} in "
            f"{source}, {index}); the tokenizer does not belong to this model, or the model's vocab is too small"
        )
    if not 0 <= rows.pad_id < vocab:
        raise DataError(f"the padding id {rows.pad_id} is outside the model's vocabulary of {vocab}")

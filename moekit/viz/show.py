"""Rows as coloured tokens: see what is trained on before training.

The classes are those that every counter of the kit uses, by the position that predicts: position t predicts token
t + 1 of its document, so the last token of a prompt is supervised and the last token of a document is not.

Axis letters: B rows, T positions in a row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ..data.batch import CLASSES, Batch
from ..errors import DataError
from .theme import CLASS_MEANING, page

SIGN: dict[str, str] = dict(zip(CLASSES, ("⟦{}⟧", "{}", "~{}~", "{}")))  # of the classes in plain text
VISIBLE = str.maketrans({"\n": "↵\n", "\t": "⇥\t", "\r": "␍"})
MEANING = (
    "Colour of a token: what its position is for. A position predicts the next token of its document, so the last "
    "prompt token is supervised and a document's last token is not."
)


class Piece(NamedTuple):
    """Neighbouring positions of one row with the same document and class."""

    kind: str  # class
    opens: str  # what is said before it: "" where the document goes on
    title: str  # the same in words
    tokens: tuple[tuple[str, str], ...]  # text, and position, id and target in words


class Row(NamedTuple):
    """A drawn row: its pieces, what there is to say about it, and how many positions are not drawn."""

    pieces: tuple[Piece, ...]
    facts: str
    hidden: int


@dataclass(frozen=True)
class Shown:
    """A drawn batch: HTML in a notebook, text elsewhere."""

    counts: dict[str, int]  # positions of each class, over all chosen rows (also those that are not drawn)
    documents: int  # in the chosen rows
    misplaced: int  # supervised positions whose label is not the next token of their document
    rows: dict[int, Row]  # the drawn rows
    drawn: str  # what is said above them
    warning: str

    @property
    def legend(self) -> dict[str, tuple[str, str]]:
        """Class -> its share and its meaning."""
        whole = max(sum(self.counts.values()), 1)
        return {n: (f"{c:,} ({100 * c / whole:.0f} %)", CLASS_MEANING[n]) for n, c in self.counts.items()}

    def __repr__(self) -> str:
        lines = [self.drawn, MEANING]
        lines += [f"  {SIGN[n].format(n):<13}{share:>16}  {words}" for n, (share, words) in self.legend.items()]
        lines += [f"WARNING: {self.warning}"] if self.warning else []
        for number, row in self.rows.items():
            text = "".join(map(_plain, row.pieces)).strip("\n").split("\n")
            lines += [f"row {number}: {row.facts}", *("  " + line for line in text)]
            lines += [f"  ... {row.hidden:,} more positions"] if row.hidden else []
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return page("show.html.jinja", shown=self, meaning=MEANING)


def show(
    batch: Batch, tokenizer: Any = None, rows: Sequence[int] | None = None, max_rows: int = 8, max_positions: int = 1024
) -> Shown:
    """Draw rows of a batch as coloured tokens, with the documents' boundaries and what they share.
    Args:
        batch: rows of T positions.
        tokenizer: anything with `decode([id])`, or a function from id to text; None = ids are drawn.
        rows: which rows; None = all.
        max_rows: rows that are drawn; all chosen rows are counted.
        max_positions: positions drawn of each row.
    Returns: Shown, which displays itself; `counts` holds the positions of each class.
    Raises DataError: no such row, or something that is no batch.
    >>> import torch
    >>> batch = Batch.make(torch.tensor([[5, 6, 7, 2]]), labels=torch.tensor([[-100, 7, 2, -100]]))
    >>> show(batch).counts
    {'supervised': 2, 'context': 2, 'filtered': 0, 'padding': 0}
    """
    if not isinstance(batch, Batch):
        raise DataError(f"show() draws a Batch, not a {type(batch).__name__}; make one with Batch.make(...)")
    chosen = list(range(batch.rows)) if rows is None else [int(r) for r in rows]
    if wrong := [r for r in chosen if not 0 <= r < batch.rows]:
        raise DataError(f"row {wrong[0]} is not in the batch, which has rows 0 to {batch.rows - 1}")
    fields = (batch.classes, batch.segment, batch.input_ids, batch.labels, batch.parent)
    kinds_BT, segment_BT, ids_BT, labels_BT, parent_BT = (f.numpy()[chosen] for f in fields)
    after_BT = np.array([_next(s) for s in segment_BT], dtype=int).reshape(segment_BT.shape)
    labelled_BT = labels_BT != batch.ignore_index
    following_BT = np.take_along_axis(ids_BT, np.maximum(after_BT, 0), axis=1)
    misplaced_BT = labelled_BT & ((after_BT < 0) | (following_BT != labels_BT))
    counts: dict[str, int] = dict(zip(CLASSES, np.bincount(kinds_BT.reshape(-1), minlength=len(CLASSES)).tolist()))
    documents = sum(len(np.unique(s[s >= 0])) for s in segment_BT)
    text, drawn = _decoder(tokenizer), {}
    for i, row in enumerate(chosen[:max_rows]):
        target = np.where(labelled_BT[i], labels_BT[i], -1)
        row_T = (ids_BT[i], target, kinds_BT[i], segment_BT[i], parent_BT[i])
        pieces = _pieces(row_T, text, max_positions)
        real = int(np.flatnonzero(segment_BT[i] >= 0).max(initial=-1)) + 1
        drawn[row] = Row(pieces, _facts(kinds_BT[i], segment_BT[i], parent_BT[i]), max(0, real - max_positions))
    part = f"{len(drawn)} of {len(chosen)} rows drawn" if len(drawn) < len(chosen) else _many(len(chosen), "row")
    said = f"{part} × {batch.length} positions, {_many(documents, 'document')}"
    warning, misplaced = "", int(misplaced_BT.sum())
    if misplaced:
        i, t = np.argwhere(misplaced_BT)[0]
        what = f"{misplaced:,} label{'s are' if misplaced > 1 else ' is'} not the next token of the document"
        rule = "Labels are shifted exactly once: labels[t] is the target of position t"
        warning = f"{what} (first: row {chosen[i]}, position {t}). {rule}"
    return Shown(counts, documents, misplaced, drawn, said, warning)


def _next(segment: np.ndarray) -> np.ndarray:
    """Place of the next token of the same document, -1 at its end and on padding."""
    order = np.argsort(segment, kind="stable")
    same = (segment[order][1:] == segment[order][:-1]) & (segment[order][1:] >= 0)
    out = np.full(len(segment), -1)
    out[order[:-1][same]] = order[1:][same]
    return out


def _pieces(row: Sequence[np.ndarray], text: Callable[[int], str], most: int) -> tuple[Piece, ...]:
    ids, target, kinds, segment, parent = row
    out, seen, last = [], set(), -1
    cut = (np.flatnonzero((np.diff(kinds) != 0) | (np.diff(segment) != 0)) + 1).tolist()
    for start, end in zip([0, *cut], [*cut, len(ids)]):
        here, above, kind = int(segment[start]), int(parent[start]), CLASSES[kinds[start]]
        if kind == "padding":
            out.append(Piece(kind, "", f"padding ×{end - start}", ()))
        elif start < most:
            mark, words = (f" ↳ {above}", f", continues the prompt of document {above}") if above >= 0 else ("", "")
            opens, title = f"{here}{mark}{' …' * (here in seen)}", f"document {here}{words}"
            tokens = tuple(
                (text(int(ids[t])), f"{t}: {ids[t]}" + (f" → {target[t]}" if target[t] >= 0 else ""))
                for t in range(start, min(end, most))
            )
            out.append(Piece(kind, opens if here != last else "", title, tokens))
            seen.add(here)
        last = here
    return tuple(out)


def _facts(kinds: np.ndarray, segment: np.ndarray, parent: np.ndarray) -> str:
    parts = [_many(len(np.unique(segment[segment >= 0])), "document")]
    parts += [f"{int((kinds == i).sum()):,} {name}" for i, name in enumerate(CLASSES) if (kinds == i).any()]
    children = np.unique(segment[parent >= 0])
    if len(children):
        shared = int(np.isin(segment, parent[parent >= 0]).sum())
        parts.append(f"{len(children)} documents share {shared:,} prompt positions")
    return " · ".join(parts)


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _decoder(tokenizer: Any) -> Callable[[int], str]:
    """A function from id to the text that is drawn."""

    @cache
    def decode(i: int) -> str:
        if tokenizer is None:
            return f"{i} "
        if not hasattr(tokenizer, "decode"):
            return str(tokenizer(i)).translate(VISIBLE)
        text = tokenizer.decode([i], skip_special_tokens=False)
        piece = str(tokenizer.convert_ids_to_tokens(i)) if hasattr(tokenizer, "convert_ids_to_tokens") else ""
        if piece.startswith("▁") and not text.startswith(" "):
            text = " " + text  # sentencepiece drops the space of a token that stands alone
        return (text or f"⟨{i}⟩").translate(VISIBLE)

    return decode


def _plain(piece: Piece) -> str:
    mark = f"\n|{piece.opens}| " if piece.opens else ""
    text = "".join(text for text, _ in piece.tokens)
    return mark + SIGN[piece.kind].format(text) if piece.tokens else f"\n{piece.title}\n"

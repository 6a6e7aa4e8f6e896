"""Rows as coloured tokens: see what is trained on before training.

Axis letters: B rows, T positions in a row.

The classes are those that every counter of the kit uses, by the position that predicts: position t predicts token
t + 1 of its document, so the last token of a prompt is supervised (it predicts the first token of the answer) and the
last token of a document is not. `mark="target"` colours the tokens that the loss asks for instead.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..data.batch import CLASSES, CONTEXT, PADDING, SUPERVISED, Batch
from ..errors import DataError
from .theme import CLASS, CLASS_MEANING, CLASS_TEXT, GRID, INK, MUTED, tint

TAG = dict(zip(CLASSES, ("b", "span", "s", "i")))  # so that something is left where styles are stripped
OPEN, CLOSE = ("⟦", "", "~", ""), ("⟧", "", "~", "")  # the same in plain text
VISIBLE = {"\n": "↵\n", "\t": "⇥\t", "\r": "␍"}
TARGET_MEANING = {"supervised": "trained on", "context": "read, not trained on"}
MEANING = {
    "predicts": "Colour of a token: what its position is for. A position predicts the next token of its document, so "
    "the last prompt token is supervised and a document's last token is not.",
    "target": "Colour of a token: whether the loss asks for it. Counts are of the positions that predict, one before.",
}


@dataclass(frozen=True)
class Piece:
    """Neighbouring positions of one row with the same document and class."""

    start: int
    tokens: tuple[str, ...]
    kind: int  # index into CLASSES
    document: int  # segment, -1 = padding
    parent: int  # segment whose prefix it shares, -1 = none
    opens: str  # "": goes on; "start": the document begins here; "again": it goes on after another one


@dataclass(frozen=True)
class Shown:
    """A drawn batch: HTML in a notebook, text elsewhere.

    Attributes:
        counts: positions of each class, over all chosen rows (also those that are not drawn).
        documents: documents in the chosen rows.
        misplaced: supervised positions whose label is not the next token of their document.
    """

    counts: dict[str, int]
    documents: int
    misplaced: int
    mark: str
    chosen: int
    length: int
    rows: dict[int, tuple[Piece, ...]]
    facts: dict[int, str]
    hidden: dict[int, int]
    ids: dict[int, np.ndarray]
    labels: dict[int, np.ndarray]
    warning: str = ""

    def _headline(self) -> str:
        drawn = (
            f"{len(self.rows)} of {self.chosen} rows drawn" if len(self.rows) < self.chosen else f"{self.chosen} row"
        )
        drawn += "s" if drawn.endswith(" row") and self.chosen != 1 else ""
        return f"{drawn} × {self.length} positions, {self.documents} document{'s' * (self.documents != 1)}"

    def _meaning(self, name: str) -> str:
        return TARGET_MEANING.get(name, CLASS_MEANING[name]) if self.mark == "target" else CLASS_MEANING[name]

    def _share(self, name: str) -> str:
        total = sum(self.counts.values())
        return f"{self.counts[name]:,}" + (f" ({100 * self.counts[name] / total:.0f} %)" if total else "")

    def __repr__(self) -> str:
        signs = dict(zip(CLASSES, ("⟦ ⟧", "plain", "~ ~", "padding×n")))
        lines = [self._headline(), MEANING[self.mark]]
        lines += [f"  {name:<11}{self._share(name):>16}  {signs[name]:<10} {self._meaning(name)}" for name in CLASSES]
        if self.warning:
            lines.append(f"WARNING: {self.warning}")
        for row, pieces in self.rows.items():
            text = "".join(_plain(p) for p in pieces)
            lines += [f"row {row}: {self.facts[row]}", *("  " + line for line in text.strip("\n").split("\n"))]
            if self.hidden[row]:
                lines.append(f"  ... {self.hidden[row]:,} more positions")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        legend = "".join(
            f"<span class='k'><{TAG[n]} class='{n[0]}'>{n}</{TAG[n]}> <b class='n'>{self._share(n)}</b> "
            f"{self._meaning(n)}</span>"
            for n in CLASSES
        )
        warning = f"<p class='w'>⚠ {html.escape(self.warning)}</p>" if self.warning else ""
        rows = "".join(
            f"<div class='r'><div class='h'>row {row} <span>{self.facts[row]}</span></div><div class='t'>"
            + "".join(_markup(p, self.ids[row], self.labels[row]) for p in pieces)
            + (f"<span class='e'>… {self.hidden[row]:,} more positions</span>" if self.hidden[row] else "")
            + "</div></div>"
            for row, pieces in self.rows.items()
        )
        what = f"<b class='n'>{self._headline()}.</b> {MEANING[self.mark]}"
        head = f"{_STYLE}<p class='m'>{what}</p><div class='l'>{legend}</div>"
        return f"<div class='moekit-show'>{head}{warning}{rows}</div>"


def show(
    batch: Batch,
    tokenizer: Any = None,
    rows: Sequence[int] | None = None,
    max_rows: int = 8,
    *,
    mark: str = "predicts",
    max_positions: int = 1024,
) -> Shown:
    """Draw rows of a batch as coloured tokens, with the documents' boundaries and what they share.

    Args:
        batch: rows of T positions.
        tokenizer: anything with `decode([id])`, or a function from id to text; None = ids are drawn.
        rows: which rows; None = all.
        max_rows: rows that are drawn; all chosen rows are counted.
        mark: "predicts" colours the position that predicts (as everything is counted), "target" the token asked for.
        max_positions: positions drawn of each row.

    Returns:
        Shown, which displays itself; `counts` holds the positions of each class.

    Raises:
        DataError: no such row, an unknown `mark`, or something that is no batch.

    >>> import torch
    >>> batch = Batch.make(torch.tensor([[5, 6, 7, 2]]), labels=torch.tensor([[-100, 7, 2, -100]]))
    >>> show(batch).counts
    {'supervised': 2, 'context': 2, 'filtered': 0, 'padding': 0}
    """
    if not isinstance(batch, Batch):
        raise DataError(f"show() draws a Batch, not a {type(batch).__name__}; make one with Batch.make(...)")
    if mark not in MEANING:
        raise DataError(f"mark={mark!r} is not one of {', '.join(map(repr, MEANING))}")
    chosen = list(range(batch.rows)) if rows is None else [int(r) for r in rows]
    wrong = [r for r in chosen if not 0 <= r < batch.rows]
    if wrong:
        raise DataError(f"row {wrong[0]} is not in the batch, which has rows 0 to {batch.rows - 1}")
    kinds_BT, segment_BT = batch.classes.numpy()[chosen], batch.segment.numpy()[chosen]
    ids_BT, labels_BT = batch.input_ids.numpy()[chosen], batch.labels.numpy()[chosen]
    parent_BT = batch.parent.numpy()[chosen]
    counts = np.bincount(kinds_BT.reshape(-1), minlength=len(CLASSES))
    after_BT = np.stack([_next(s) for s in segment_BT]) if chosen else np.zeros((0, batch.length), int)
    labelled_BT = labels_BT != batch.ignore_index
    following_BT = np.take_along_axis(ids_BT, np.maximum(after_BT, 0), axis=1)
    misplaced_BT = labelled_BT & ((after_BT < 0) | (following_BT != labels_BT))
    text = _decoder(tokenizer)
    drawn = range(min(len(chosen), max_rows))
    pieces, facts, hidden = {}, {}, {}
    for i in drawn:
        row = chosen[i]
        kinds = kinds_BT[i] if mark == "predicts" else _targets(kinds_BT[i], labelled_BT[i], after_BT[i])
        pieces[row] = _pieces(ids_BT[i], kinds, segment_BT[i], parent_BT[i], text, max_positions)
        facts[row] = _facts(kinds_BT[i], segment_BT[i], parent_BT[i])
        hidden[row] = max(0, int((segment_BT[i] >= 0).nonzero()[0].max(initial=-1)) + 1 - max_positions)
    return Shown(
        counts={name: int(n) for name, n in zip(CLASSES, counts)},
        documents=sum(len(np.unique(s[s >= 0])) for s in segment_BT),
        misplaced=int(misplaced_BT.sum()),
        mark=mark,
        chosen=len(chosen),
        length=batch.length,
        rows=pieces,
        facts=facts,
        hidden=hidden,
        ids={chosen[i]: ids_BT[i] for i in drawn},
        labels={chosen[i]: np.where(labelled_BT[i], labels_BT[i], -1) for i in drawn},
        warning=_warning(misplaced_BT, chosen),
    )


def _next(segment: np.ndarray) -> np.ndarray:
    """Place of the next token of the same document, -1 at its end and on padding."""
    order = np.argsort(segment, kind="stable")
    same = (segment[order][1:] == segment[order][:-1]) & (segment[order][1:] >= 0)
    out = np.full(len(segment), -1)
    out[order[:-1][same]] = order[1:][same]
    return out


def _targets(kinds: np.ndarray, labelled: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Classes with "supervised" moved from the positions that predict to the tokens that they predict."""
    out = np.where(kinds == SUPERVISED, CONTEXT, kinds)
    out[after[labelled & (after >= 0)]] = SUPERVISED
    return out


def _pieces(
    ids: np.ndarray, kinds: np.ndarray, segment: np.ndarray, parent: np.ndarray, text: Callable[[int], str], most: int
) -> tuple[Piece, ...]:
    out: list[Piece] = []
    seen: set[int] = set()
    cut = np.flatnonzero((np.diff(kinds) != 0) | (np.diff(segment) != 0)) + 1
    for start, end in zip([0, *cut.tolist()], [*cut.tolist(), len(ids)]):
        here = int(segment[start])
        if kinds[start] == PADDING:
            out.append(Piece(start, (f"padding ×{end - start}",), PADDING, -1, -1, ""))
        elif start < most:
            opens = "start" if here not in seen else "again" if out and out[-1].document != here else ""
            tokens = tuple(text(int(i)) for i in ids[start : min(end, most)])
            out.append(Piece(start, tokens, int(kinds[start]), here, int(parent[start]), opens))
            seen.add(here)
    return tuple(out)


def _facts(kinds: np.ndarray, segment: np.ndarray, parent: np.ndarray) -> str:
    documents = np.unique(segment[segment >= 0])
    parts = [f"{len(documents)} document{'s' * (len(documents) != 1)}"]
    parts += [f"{int((kinds == i).sum()):,} {name}" for i, name in enumerate(CLASSES) if (kinds == i).any()]
    children = np.unique(segment[parent >= 0])
    if len(children):
        shared = sum(int((segment == p).sum()) for p in {int(parent[segment == c][0]) for c in children})
        parts.append(f"{len(children)} documents share {shared:,} prompt positions")
    return " · ".join(parts)


def _warning(misplaced_BT: np.ndarray, chosen: list[int]) -> str:
    if not misplaced_BT.any():
        return ""
    i, t = np.argwhere(misplaced_BT)[0].tolist()
    count = int(misplaced_BT.sum())
    return (
        f"{count:,} label{'s are' if count > 1 else ' is'} not the next token of the document (first: row {chosen[i]}, "
        f"position {t}). Labels are shifted exactly once: labels[t] is the target of position t"
    )


def _decoder(tokenizer: Any) -> Callable[[int], str]:
    """A function from id to the text that is drawn."""
    known: dict[int, str] = {}

    def decode(i: int) -> str:
        if tokenizer is None:
            return f"{i} "
        if not hasattr(tokenizer, "decode"):
            return str(tokenizer(i))
        text = tokenizer.decode([i], skip_special_tokens=False)
        piece = tokenizer.convert_ids_to_tokens(i) if hasattr(tokenizer, "convert_ids_to_tokens") else None
        if isinstance(piece, str) and piece.startswith("▁") and not text.startswith(" "):
            text = " " + text  # sentencepiece drops the space of a token that stands alone
        return text or f"⟨{i}⟩"

    def cached(i: int) -> str:
        if i not in known:
            known[i] = "".join(VISIBLE.get(c, c) for c in decode(i))
        return known[i]

    return cached


def _plain(piece: Piece) -> str:
    share = f" shares {piece.parent}" if piece.parent >= 0 else ""
    if piece.kind == PADDING:
        return f"\n{piece.tokens[0]}\n"
    mark = {"": "", "start": f"\n|{piece.document}{share}| ", "again": f"\n|{piece.document}…| "}[piece.opens]
    return mark + OPEN[piece.kind] + "".join(piece.tokens) + CLOSE[piece.kind]


def _markup(piece: Piece, ids: np.ndarray, labels: np.ndarray) -> str:
    name = CLASSES[piece.kind]
    tag = TAG[name]
    if piece.kind == PADDING:
        return f"<{tag} class='p'>{piece.tokens[0]}</{tag}>"
    mark = ""
    if piece.opens:
        share = f" ↳ {piece.parent}" if piece.parent >= 0 else ""
        title = f"document {piece.document}" + (f", continues the prompt of document {piece.parent}" if share else "")
        more = " …" if piece.opens == "again" else ""
        kind = " c2" if share else ""
        mark = f"<span class='d{kind}' title='{title}'>{piece.document}{share}{more}</span>"
    tokens = []
    for t, text in enumerate(piece.tokens, piece.start):
        target = f" → {labels[t]}" if labels[t] >= 0 else ""
        tokens.append(f"<span title='{t}: {ids[t]}{target}'>{html.escape(text)}</span>")
    return f"{mark}<{tag} class='{name[0]}'>{''.join(tokens)}</{tag}>"


def _class_css(name: str) -> str:
    share = {"supervised": 0.36, "context": 0.17, "filtered": 0.2, "padding": 0.35}[name]
    line = (
        f"border-bottom:{2 if name == 'supervised' else 1}px solid {CLASS[name]}"
        if name != "padding"
        else f"color:{CLASS_TEXT[name]}"
    )
    return f".moekit-show .{name[0]}{{background:{tint(CLASS[name], share)};{line}}}"


_STYLE = (
    "<style>"
    f".moekit-show{{font:13px/1.45 system-ui,-apple-system,'Segoe UI',sans-serif;color:{INK};background:#fff;"
    f"max-width:960px;padding:10px 14px;border:1px solid {GRID};border-radius:8px}}"
    ".moekit-show p{margin:0 0 8px;max-width:80ch}.moekit-show .n{font-weight:600}"
    ".moekit-show .l{display:grid;grid-template-columns:repeat(auto-fit,minmax(400px,1fr));gap:2px 24px;"
    f"margin-bottom:10px;color:{MUTED}}}.moekit-show .k .n{{color:{INK};font-variant-numeric:tabular-nums}}"
    f".moekit-show .w{{background:#FFF4E5;border-left:4px solid #D55E00;padding:6px 10px;color:{INK}}}"
    f".moekit-show .h{{font-weight:600;padding-top:8px;border-top:1px solid {GRID}}}"
    f".moekit-show .h span{{font-weight:400;color:{MUTED};margin-left:8px}}"
    ".moekit-show .t{font:13px/1.9 ui-monospace,'SF Mono',Menlo,Consolas,'DejaVu Sans Mono',monospace;"
    "white-space:pre-wrap;overflow-wrap:anywhere;padding:4px 0 10px}"
    ".moekit-show b,.moekit-show i{font-weight:normal;font-style:normal}"
    f".moekit-show .k>*:first-child,.moekit-show .p{{padding:1px 5px;border-radius:2px;color:{INK}}}"
    ".moekit-show .t b>span+span,.moekit-show .t s>span+span,.moekit-show .t>.c>span+span"
    "{box-shadow:-1px 0 0 #fff}"
    f".moekit-show .d{{font:600 11px/1 system-ui,sans-serif;color:#fff;background:{MUTED};border-radius:3px;"
    f"padding:2px 5px;margin:0 3px 0 5px;vertical-align:2px}}.moekit-show .c2{{background:{INK}}}"
    f".moekit-show .e{{color:{MUTED};font-family:system-ui,sans-serif}}"
    + "".join(_class_css(name) for name in CLASSES)
    + f".moekit-show s{{text-decoration-color:{CLASS['filtered']}}}</style>"
)

"""Families of answers to one prompt, in rows: DPO's pairs, GRPO's groups, PPO's single answers.

A family is a prompt of P tokens and G answers. Unshared, every answer is a document of its own, prompt and answer.
Shared, the prompt without its last token is one document, and every answer continues it: a child that starts with the
prompt's last token. The model then computes the prompt once, and (G - 1)(P - 1) positions are saved; every position
that predicts an answer's token is a child's in both forms, so all that is computed at labels is the same.

Axis letters: B rows, T positions in a row, F families, P pieces (a family, or a part of one that had to be split).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError
from .batch import IGNORE, Batch
from .pack import best_fit_decreasing
from .report import Report

Labels = Literal["answer", "last"]


@dataclass(frozen=True, eq=False)
class Sample:
    """A prompt and answers to it, as ids, with values for the objective.

    Args:
        prompt: at least one id.
        answers: ids of each, the token that ends it included. An empty one is left out of the rows and reported.
        fields: for every answer, values by name: one for each of its labels (a tensor, or numbers, which become
            float32). They come to stand where the label stands, as ``Batch.extra[name]``.
    """

    prompt: Sequence[int]
    answers: Sequence[Sequence[int]]
    fields: Sequence[Mapping[str, Any]] = ()
    source: str = "sample"
    index: int = 0


def family_rows(
    samples: Sequence[Sample], length: int, share: bool = True, *, whole: bool = False, labels: Labels = "answer",
    pad_id: int = 0, ignore_index: int = IGNORE, report: Report | None = None,
) -> Batch:  # fmt: skip
    """Rows of `length` positions that hold all families, best fit first: labels on the answers' tokens only.

    Args:
        samples: the families of a step. Their order, and the answers' order, give the numbers in `extra`.
        length: T.
        share: compute a family's prompt once.
        whole: a family is in one row or left out (pairs, sequence-level ratios of a group). Otherwise one that does
            not fit in a row is split, and each part has the prompt; unshared answers go wherever there is room.
        labels: "answer" = every token of the answer is predicted by the position before it; "last" = one label, at the
            answer's last token itself, for what is read there (a reward); its value means nothing.
        report: `rows`, `pieces`, `tokens`, `supervised`, `padding` and `shared` (positions saved) are added to its
            counts, and everything that was left out or split is listed.
    Returns:
        [B, T]. ``extra``: the samples' fields at the labels, else 0; ``"family"`` (place in `samples`) at all positions
        of a family, ``"answer"`` (0, 1, ... over the answers of all samples, those left out included) at an answer's
        document (unshared: its prompt too), both int64, else -1. With `position` they say which token of which
        sequence stands at a position.
    Raises DataError: a sample without prompt, or fields that do not fit its answers.

    >>> pair = Sample([1, 2, 3], [[7, 0], [8, 9, 0]])
    >>> b = family_rows([pair], 10)
    >>> b.input_ids.tolist(), b.parent.tolist()
    ([[1, 2, 3, 7, 0, 3, 8, 9, 0, 0]], [[-1, -1, 0, 0, 0, 0, 0, 0, 0, -1]])
    >>> b.labels.tolist(), b.position.tolist()
    ([[-100, -100, 7, 0, -100, 8, 9, 0, -100, -100]], [[0, 1, 2, 3, 4, 2, 3, 4, 5, 0]])
    """
    report = Report() if report is None else report
    kinds = _kinds(samples, labels)
    pieces = [(f, some) for f, s in enumerate(samples) for some in _pieces(s, length, share, whole, report)]
    row_P = best_fit_decreasing(np.array([_size(samples[f], some, share) for f, some in pieces], np.int64), length)
    shape = (int(row_P.max(initial=-1)) + 1, length)
    ids, label = np.full(shape, pad_id, np.int64), np.full(shape, ignore_index, np.int64)
    segment, parent, position = np.full(shape, -1, np.int64), np.full(shape, -1, np.int64), np.zeros(shape, np.int64)
    family, answer = np.full(shape, -1, np.int64), np.full(shape, -1, np.int64)
    extra = {name: torch.zeros(shape, dtype=kind) for name, kind in kinds.items()}
    first_F = np.cumsum([0, *(len(s.answers) for s in samples)])
    at_B, segments_B = np.zeros(shape[0], np.int64), np.zeros(shape[0], np.int64)
    saved = 0

    def put(row: int, f: int, tokens: Sequence[int], first: int) -> slice:
        span = slice(int(at_B[row]), int(at_B[row]) + len(tokens))
        ids[row, span], segment[row, span], family[row, span] = tokens, segments_B[row], f
        position[row, span] = np.arange(first, first + len(tokens))
        at_B[row], segments_B[row] = span.stop, segments_B[row] + 1
        return span

    for (f, some), row in zip(pieces, row_P.tolist()):
        prompt, up, start = list(samples[f].prompt), -1, 0
        if _shares(samples[f], some, share):
            up, start = int(segments_B[row]), len(prompt) - 1
            put(row, f, prompt[:-1], 0)
            saved += (len(some) - 1) * start
        for j in some:
            tokens = list(samples[f].answers[j])
            span = put(row, f, prompt[start:] + tokens, start)
            parent[row, span], answer[row, span] = up, first_F[f] + j
            to = slice(span.stop - 1, span.stop)
            if labels == "answer":
                to = slice(to.start - len(tokens), to.start)
            label[row, to] = tokens[to.start - to.stop :]
            for name in kinds:
                extra[name][row, to] = torch.as_tensor(samples[f].fields[j][name]).to(kinds[name])
    real = int(at_B.sum())
    report.counts.update(rows=shape[0], pieces=len(pieces), tokens=real, shared=saved, padding=ids.size - real,
                         supervised=int((label != ignore_index).sum()))  # fmt: skip
    made = [torch.from_numpy(x) for x in (ids, label, segment, position, parent, family, answer)]
    return Batch.make(
        made[0], labels=made[1], segment=made[2], position=made[3], parent=made[4], ignore_index=ignore_index,
        extra={**extra, "family": made[5], "answer": made[6]},
    )  # fmt: skip


def family_size(prompt: int, answers: Sequence[int], share: bool = True) -> int:
    """Positions of a family, from the lengths of its prompt and of its answers.
    >>> family_size(3, [2, 3]), family_size(3, [2, 3], share=False)
    (9, 11)
    """
    saved = (len(answers) - 1) * (prompt - 1) if share and answers else 0
    return len(answers) * prompt + sum(answers) - saved


def with_values(batch: Batch, name: str, value_M: Tensor) -> Batch:
    """The batch with `extra[name]`: [M] values at ``batch.flat.label_index_M``, in that order, and 0 elsewhere."""
    flat = batch.flat
    value_N = value_M.new_zeros(flat.positions, device="cpu")
    value_N[flat.label_index_M.cpu()] = value_M.detach().cpu()
    return replace(batch, extra={**batch.extra, name: flat.to_rows(value_N)})


def _size(sample: Sample, some: list[int], share: bool) -> int:
    return family_size(len(sample.prompt), [len(sample.answers[j]) for j in some], share)


def _shares(sample: Sample, some: list[int], share: bool) -> bool:
    return share and len(some) > 1 and len(sample.prompt) > 1


def _pieces(s: Sample, length: int, share: bool, whole: bool, report: Report) -> list[list[int]]:
    """The answers of a family that go into one row together, as lists of their places."""
    told = s.source, s.index
    if not len(s.prompt):
        raise DataError(f"{s.source}, {s.index}: a prompt needs at least one token, to predict the answer's first from")
    some = [j for j, answer in enumerate(s.answers) if len(answer)]
    for j in sorted({*range(len(s.answers))} - {*some}):
        report.add(*told, "rows_without_target", f"answer {j} is empty")
    if whole:
        size = _size(s, some, share)
        if size > length:
            report.add(*told, "dropped", f"the family of {size} tokens does not fit in a row of {length}")
        return [some] if len(some) == len(s.answers) and 0 < size <= length else []
    room = length - len(s.prompt)
    for j in some:
        if len(s.answers[j]) > room:
            n = len(s.prompt) + len(s.answers[j])
            report.add(*told, "dropped", f"prompt and answer {j} have {n} tokens, a row {length}")
    some = [j for j in some if len(s.answers[j]) <= room]
    if not share or len(s.prompt) == 1:
        return [[j] for j in some]
    part = best_fit_decreasing(np.array([1 + len(s.answers[j]) for j in some], np.int64), room + 1)
    parts = [[some[i] for i in np.flatnonzero(part == p)] for p in range(int(part.max(initial=-1)) + 1)]
    if len(parts) > 1:
        report.add(*told, "split", f"{len(some)} answers in {len(parts)} rows, each with the prompt")
    return parts


def _kinds(samples: Sequence[Sample], labels: Labels) -> dict[str, torch.dtype]:
    """Names and dtypes of the fields, after a look at all of them."""
    kinds: dict[str, torch.dtype] = {}
    names = next(({*s.fields[0]} for s in samples if s.fields), set())
    for s in samples:
        given = s.fields or [{}] * len(s.answers)
        if len(given) != len(s.answers):
            raise DataError(f"{s.source}, {s.index}: fields of {len(given)} answers, there are {len(s.answers)}")
        for j, (answer, fields) in enumerate(zip(s.answers, given)):
            want = len(answer) if labels == "answer" else min(1, len(answer))
            if {*fields} != names:
                raise DataError(f"{s.source}, {s.index}, answer {j}: fields {sorted(fields)}, others {sorted(names)}")
            for name, values in fields.items():
                if len(values) != want:
                    what = f"{len(values)} values of {name!r} for {want} labels"
                    raise DataError(f"{s.source}, {s.index}, answer {j}: {what}")
                kind = values.dtype if isinstance(values, Tensor) else torch.float32
                kinds[name] = torch.promote_types(kinds.get(name, kind), kind)
    return kinds

"""Preference pairs: one prompt, a chosen and a rejected answer, as token ids and in rows.

Both answers are rendered by the chat template as the whole conversations that they end, like any other
(`moekit.data.chat`); the prompt is what comes before the first token of the assistant's turn, and must be the same
tokens in both. What cannot be used, or teaches nothing, is left out and listed in the report.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from ..errors import DataError
from .batch import Batch
from .chat import Document, load_tokenizer, render_all
from .dataset import pad_id
from .families import Labels, Sample, family_rows, family_size
from .report import Report
from .source import Example, Progress, as_messages, open_records

__all__ = ["Pair", "Pairs", "Sample", "as_pair", "family_rows", "load_pairs"]

FORMS = '"chosen" and "rejected", and "prompt" where they do not begin with it: each a text or a list of messages'


@dataclass(frozen=True, eq=False)
class Pair:
    """Ids of a prompt and of its two answers, the tokens that end them included."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    source: str = "pair"
    index: int = 0


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs that make batches: `pairs.batch(indices)`; it is what `moekit.data.stream.RowStream` takes for rows.

    Args:
        pairs: all that a row of `length` positions can hold as a family.
        length: T.
        share: compute a pair's prompt once.
        labels: where they stand, see `family_rows`: "last" for a reward model.
        reference: reference log-probs of an answer's tokens, ``(prompt, answer) -> [len(answer)]``; they become
            ``extra["ref_logprob"]``. None = they come from elsewhere.
    """

    pairs: Sequence[Pair]
    length: int
    share: bool = True
    pad_id: int = 0
    report: Report | None = None
    reference: Callable[[Sequence[int], Sequence[int]], Any] | None = None
    labels: Labels = "answer"

    def __len__(self) -> int:
        return len(self.pairs)

    @cached_property
    def content(self) -> str:
        """Hash of all token ids, pair after pair."""
        digest = hashlib.blake2b(digest_size=16)
        for p in self.pairs:
            for part in (p.prompt, p.chosen, p.rejected):
                digest.update(np.array([len(part), *part], np.int64).data)
        return digest.hexdigest()

    @property
    def fingerprint(self) -> str:
        """Hash of content, T and sharing: two with the same one give the same batches."""
        return f"{self.content} {self.length} {self.share} {self.labels}"

    def sample(self, index: int) -> Sample:
        """A pair as a family: answer 0 is the chosen one, with the fields that the objective reads."""
        p, fields = self.pairs[index], []
        for answer, mark in ((p.chosen, 1.0), (p.rejected, 0.0)):
            fields.append({"chosen": [mark] * (len(answer) if self.labels == "answer" else 1)})
            if self.reference is not None:
                fields[-1]["ref_logprob"] = self.reference(p.prompt, answer)
        return Sample(p.prompt, [p.chosen, p.rejected], fields, p.source, p.index)

    def batch(self, indices: Sequence[int] | np.ndarray | slice = slice(None)) -> Batch:
        """The pairs `indices` in rows [B, T]; no pair is split, and B is as small as best fit makes it, maybe 0."""
        chosen, report = np.arange(len(self))[indices].tolist(), Report()
        if not chosen:
            return self.batch([0]).empty()
        samples = [self.sample(i) for i in chosen]
        batch = family_rows(
            samples, self.length, self.share, whole=True, labels=self.labels, pad_id=self.pad_id, report=report
        )
        if report.events:
            raise DataError(f"a pair cannot be put in a row: {report.events[0]}; make Pairs with load_pairs")
        return batch

    def size(self, index: int) -> int:
        """Positions that a pair takes."""
        p = self.pairs[index]
        return family_size(len(p.prompt), [len(p.chosen), len(p.rejected)], self.share)


def as_pair(record: Any, source: str = "pair", index: int = 0) -> tuple[Example, Example]:
    """The conversations that end with the chosen and with the rejected answer of one record.
    Raises DataError: it has not the form of a pair, or no prompt.

    >>> chosen, rejected = as_pair({"prompt": "2 + 2 =", "chosen": "4", "rejected": "5"})
    >>> chosen.messages[1]["content"], rejected.messages[1]["content"], chosen.first
    ('4', '5', 1)
    """
    where = Example([], source, index).where
    if not isinstance(record, Mapping):
        raise DataError(f"{where}: a pair must be an object, got {type(record).__name__}; wanted {FORMS}")
    if record.get("chosen") is None or record.get("rejected") is None:
        raise DataError(f"{where}: no pair among the fields {', '.join(map(str, record)) or 'none'}; wanted {FORMS}")
    both = [as_messages(record[name], name, where, "assistant") for name in ("chosen", "rejected")]
    if record.get("prompt") is not None:
        prompt = as_messages(record["prompt"], "prompt", where, "user")
        both = [m[len(prompt) :] if m[: len(prompt)] == prompt else m for m in both]
    else:
        same = [a == b for a, b in zip(*both)]
        prompt = both[0][: min((same + [False]).index(False), len(both[0]) - 1, len(both[1]) - 1)]
        both = [m[len(prompt) :] for m in both]
    if not prompt or not all(both):
        raise DataError(f"{where}: a pair needs a prompt and two answers; wanted {FORMS}")
    extra = {name: value for name, value in record.items() if name not in ("prompt", "chosen", "rejected")}
    chosen, rejected = (Example(prompt + answer, source, index, len(prompt), extra) for answer in both)
    return chosen, rejected


def load_pairs(
    data: Any, tokenizer: Any, length: int = 512, *, share: bool = True,
    over_long: Literal["drop", "truncate"] = "drop", reject: bool = False, progress: Progress | None = None,
) -> Pairs:  # fmt: skip
    """Read, render and check preference pairs. `pairs.report` says what became of every record.

    Args:
        data: a .jsonl or .parquet file, a folder of `datasets`, a `datasets.Dataset`, or a list of dictionaries with
            `chosen` and `rejected` (texts or messages), and `prompt` where they do not begin with it.
        tokenizer: a Hugging Face tokenizer with a chat template, or its folder.
        length: positions of a row; a pair must fit in one.
        share: whether its prompt counts once.
        over_long: what becomes of a pair that does not fit: "drop" it, or "truncate" both answers to one length.
        reject: leave out records that cannot be used, and report them. False = raise at the first.
    Raises DataError: a record that cannot be used, with its line; two renderings whose prompts differ; nothing left.
    """
    tokenizer, report, inner = load_tokenizer(tokenizer), Report(), Report()
    name, records = open_records(data)
    examples: list[Example] = []
    for index, record in records:
        report.counts["examples"] += 1
        try:
            examples += as_pair(record, name, index)
        except DataError as problem:
            if not reject:
                raise
            report.add(name, index, "rejected", str(problem))
    found: dict[int, list[Document]] = {}
    for document in render_all(examples, tokenizer, report=inner, reject=reject, progress=progress):
        found.setdefault(document.index, []).append(document)
    pairs = []
    for index in dict.fromkeys(e.index for e in examples):
        documents = found.get(index, [])
        try:
            if len(documents) < 2:
                raise DataError(next(e.why for e in inner.events if e.index == index))
            pair = _cut(_split(*documents), length, share, over_long, report)
        except DataError as problem:
            if not reject:
                raise
            report.add(name, index, "rejected", str(problem))
            continue
        if pair is not None:
            pairs.append(pair)
    if not pairs:
        first = next((e.why for e in report.events), "there are none")
        raise DataError(f"none of the {report.counts['examples']} records of {name} is a pair to learn from: {first}")
    report.counts["documents"] = 2 * len(pairs)
    return Pairs(pairs, length, share, pad_id(tokenizer), report)


def _split(chosen: Document, rejected: Document) -> Pair:
    """Prompt and answers of two rendered conversations."""
    where = Example([], chosen.source, chosen.index).where
    parts = []
    for document in (chosen, rejected):
        place = np.flatnonzero(document.supervised)
        if place[-1] - place[0] + 1 != len(place):
            raise DataError(f"{where}: an answer of several assistant turns; put all but the last into the prompt")
        ids = document.ids.tolist()
        parts.append((ids[: place[0]], ids[place[0] : place[-1] + 1]))
    (prompt, first), (other, second) = parts
    if prompt != other:
        raise DataError(f"{where}: the prompt is not the same tokens before the two answers, so they are no pair")
    if not prompt:
        raise DataError(f"{where}: no token comes before the answers, so nothing predicts their first token")
    return Pair(prompt, first, second, chosen.source, chosen.index)


def _cut(pair: Pair, length: int, share: bool, over_long: str, report: Report) -> Pair | None:
    """The pair as it fits in a row, or None: it was left out, and the report says why."""
    told, answers = (pair.source, pair.index), [pair.chosen, pair.rejected]
    size = family_size(len(pair.prompt), [*map(len, answers)], share)
    if size > length:
        spare = length - family_size(len(pair.prompt), [0, 0], share)
        if over_long == "drop" or spare < 2:
            report.add(*told, "dropped", f"the pair takes {size} positions, a row has {length}")
            return None
        keep = max(spare // 2, spare - min(map(len, answers)))  # the shorter one stays whole if it can
        answers = [a[:keep] for a in answers]
        report.add(*told, "truncated", f"answers of {len(pair.chosen)} and {len(pair.rejected)} tokens cut to {keep}")
    if answers[0] == answers[1]:
        report.add(*told, "rejected", f"both answers are the same {len(answers[0])} tokens: there is nothing to prefer")
        return None
    return Pair(pair.prompt, answers[0], answers[1], *told)

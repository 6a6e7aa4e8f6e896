"""Chats to token ids with a mask of what is learned, taken from the full rendering by the tokenizer's chat template.

The ids are always those of the whole conversation rendered at once, for that is what a model sees when it is used. The
mask marks the assistant's turns with their end-of-turn token: from the template's `{% generation %}` spans where it
has them, else proved by `moekit.data.spans`. A conversation whose mask cannot be proved, or would be empty, is an
error and never a silent nothing."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..errors import DataError
from .report import Report
from .source import Example, Message, Progress, as_example
from .spans import Refused, Template, Unproved

CHUNK = 256  # conversations tokenized at once
Supervise = Literal["response", "all"]


@dataclass(frozen=True, eq=False)
class Document:
    """Token ids, a mask of the targets (`supervised[i]`: token i itself is to be predicted), and their origin."""

    ids: np.ndarray  # [n] int32
    supervised: np.ndarray  # [n] bool
    source: str = "document"
    index: int = 0  # line number (from 1) in JSONL, else row (from 0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", np.asarray(self.ids, np.int32))
        object.__setattr__(self, "supervised", np.asarray(self.supervised, bool))
        if self.ids.ndim != 1 or self.ids.shape != self.supervised.shape:
            shapes = f"ids {self.ids.shape}, mask {self.supervised.shape}"
            raise DataError(f"{self.source}, {self.index}: {shapes}; they must agree")

    def __len__(self) -> int:
        return len(self.ids)


def load_tokenizer(tokenizer: Any) -> Any:
    """A Hugging Face tokenizer: `tokenizer` itself, or what is in the folder of that name.
    Raises DataError: no such folder, no chat template, or a tokenizer that cannot say which characters a token covers.
    """
    if isinstance(tokenizer, (str, Path)):
        from transformers import AutoTokenizer

        if not Path(tokenizer).is_dir():
            raise DataError(f"no such tokenizer folder: {tokenizer}")
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(tokenizer), local_files_only=True)
        except Exception as problem:  # noqa: BLE001 (whatever is wrong with the folder)
            raise DataError(f"{tokenizer} does not hold a tokenizer: {str(problem).splitlines()[0]}") from None
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(f"{_name(tokenizer)} is not a tokenizer of the `tokenizers` library; masks need its offsets")
    if not getattr(tokenizer, "chat_template", None):
        how = "set tokenizer.chat_template, or train one that has with moekit.data.tokenizer.train_tokenizer"
        raise DataError(f"the tokenizer {_name(tokenizer)} has no chat template; {how}")
    try:
        tokenizer.get_chat_template()
    except ValueError as problem:  # several named ones, none of them the default
        raise DataError(f"the tokenizer {_name(tokenizer)} has no default chat template: {problem}") from None
    return tokenizer


def render(example: Example | dict[str, Any], tokenizer: Any, supervise: Supervise = "response") -> Document:
    """`render_all` for one conversation."""
    return render_all([example], tokenizer, supervise)[0]


def render_all(
    examples: Iterable[Example | dict[str, Any]], tokenizer: Any, supervise: Supervise = "response", *,
    report: Report | None = None, reject: bool = False, progress: Progress | None = None,
) -> list[Document]:  # fmt: skip
    """Render conversations as documents: ids of the full rendering and a mask of the assistant's turns.
    Args:
        examples: conversations (`moekit.data.source`).
        tokenizer: a Hugging Face tokenizer or its folder.
        supervise: "response" = the assistant's turns; "all" = every token.
        report: counts `examples` and lists rejected ones.
        reject: leave out conversations that cannot be used, and report them. False = raise.
        progress: called as `progress(done, total, "rendering")`.
    Raises DataError: the template refuses a conversation or ignores a message, there is no assistant message, or the
        assistant's turns cannot be found or have no token; names the example and the template."""
    tokenizer = load_tokenizer(tokenizer)
    report = Report() if report is None else report
    checked = [e if isinstance(e, Example) else as_example(e, index=i) for i, e in enumerate(examples)]
    report.counts["examples"] += len(checked)
    work = _Renderer(tokenizer, supervise)
    documents: list[Document] = []
    for at in range(0, len(checked), CHUNK):
        chunk = checked[at : at + CHUNK]
        try:
            documents += work.chunk(chunk)
        except DataError:
            if not reject:
                raise
            for example in chunk:
                try:
                    documents += work.chunk([example])
                except DataError as problem:
                    report.add(example.source, example.index, "rejected", str(problem))
        if progress:
            progress(min(at + CHUNK, len(checked)), len(checked), "rendering")
    if checked and not documents:
        first = report.select("rejected")[0].why
        raise DataError(f"none of {len(checked)} conversations can be rendered; first: {first}")
    return documents


class _Renderer:
    """Renders chunks of conversations with one tokenizer."""

    def __init__(self, tokenizer: Any, supervise: str):
        self.tokenizer, self.template, self.supervise = tokenizer, Template(tokenizer), supervise
        self.name = f"chat template of {_name(tokenizer)}"
        self.special = np.zeros(len(tokenizer), bool)
        self.special[list(tokenizer.get_added_vocab().values())] = True
        self.warned = False

    def chunk(self, examples: Sequence[Example]) -> list[Document]:
        for example in examples:
            self._check(example)
        if self.supervise == "response" and self.template.marked:
            return self._marked(examples)
        wanted = self.supervise == "response"
        texts = [self._ask(e, self.template.text) for e in examples]
        spans = [self._spans(e, text) if wanted else [] for e, text in zip(examples, texts)]
        out = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=wanted, verbose=False)
        masks = [np.ones(len(ids), bool) for ids in out["input_ids"]]
        if wanted:
            masks = [_overlap(np.array(o, np.int64).reshape(-1, 2), s) for o, s in zip(out["offset_mapping"], spans)]
        return [self._document(*each) for each in zip(examples, out["input_ids"], masks)]

    def _check(self, example: Example) -> None:
        turns = [m["role"] for m in example.messages[example.first :]]
        if self.supervise == "response" and "assistant" not in turns:
            raise DataError(
                f"{example.where}: no assistant message to learn (roles: {', '.join(turns)}); remove the example, or "
                'learn every token with supervise="all"'
            )
        if (unseen := self._ask(example, self.template.missing)) is not None:
            what = f"messages[{unseen}] of role {example.messages[unseen]['role']!r}"
            raise DataError(
                f"{example.where}: the {self.name} leaves out {what}; use another role, or remove the message"
            )

    def _ask(self, example: Example, question: Callable[[list[Message]], Any]) -> Any:
        """What the template says of a conversation."""
        try:
            return question(example.messages)
        except Refused as problem:
            roles = ", ".join(m["role"] for m in example.messages)
            refused = f"{example.where}: the {self.name} refuses this conversation (roles: {roles}): {problem}"
            raise DataError(refused) from None

    def _spans(self, example: Example, text: str) -> list[tuple[int, int]]:
        try:
            found = self.template.spans(example.messages, text)
        except Unproved as problem:
            raise DataError(
                f"{example.where}: cannot tell which tokens of the conversation are the assistant's, because the "
                f"{self.name} has no {{% generation %}} spans and {problem}; put the assistant's turns of the template "
                "between {% generation %} and {% endgeneration %}"
            ) from None
        return [span for at, span in sorted(found.items()) if at >= example.first]

    def _marked(self, examples: Sequence[Example]) -> list[Document]:
        """Ids and masks by the template's own generation spans, taken as they are."""
        try:
            out = self.tokenizer.apply_chat_template(
                [e.messages for e in examples], return_dict=True, return_assistant_tokens_mask=True,
                tokenizer_kwargs={"verbose": False},
            )  # fmt: skip
        except Exception:
            for example in examples:  # which one?
                self._ask(example, self.template.text)
            raise
        documents = []
        for example, ids, mask in zip(examples, out["input_ids"], out["assistant_masks"]):
            ids, mask = np.asarray(ids, np.int32), np.asarray(mask, bool)
            self._check_stops(ids, mask)
            documents.append(self._document(example, ids, self._after_prompt(example, mask)))
        return documents

    def _check_stops(self, ids: np.ndarray, mask: np.ndarray) -> None:
        """Warn, once, of a template that marks the text of a turn but not the token that ends it."""
        ends, special = np.flatnonzero(mask[:-1] & ~mask[1:]), self.special[ids]
        if not self.warned and (special[ends + 1] & ~special[ends]).any():
            self.warned = True
            what = f"the {self.name} has {{% generation %}} spans without the end-of-turn token, so the model does not"
            warnings.warn(f"{what} learn to end its turn; move {{% endgeneration %}} behind that token", stacklevel=2)

    def _after_prompt(self, example: Example, mask: np.ndarray) -> np.ndarray:
        """Take the assistant's turns of a given prompt out of the mask."""
        given = sum(m["role"] == "assistant" for m in example.messages[: example.first])
        if not given:
            return mask
        starts = np.flatnonzero(mask & ~np.append(False, mask[:-1]))
        turns = sum(m["role"] == "assistant" for m in example.messages)
        if len(starts) != turns:
            marks = f"the {self.name} marks {len(starts)} spans for {turns} assistant messages"
            raise DataError(f"{example.where}: {marks}, so the prompt's turns cannot be told from the completion's")
        return mask & (np.arange(len(mask)) >= starts[given])

    def _document(self, example: Example, ids: Any, mask: np.ndarray) -> Document:
        if not mask.any():
            must = "every assistant message must have at least its text or end-of-turn token to learn"
            raise DataError(f"{example.where}: by the {self.name} no token here is the assistant's; {must}")
        return Document(ids, mask, example.source, example.index)


def _overlap(offset: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Tokens of which at least one character lies in a span: the rule of Transformers' `assistant_masks`."""
    mask = np.zeros(len(offset), bool)
    for start, stop in spans:
        mask |= (offset[:, 1] > start) & (offset[:, 0] < stop)
    return mask


def _name(tokenizer: Any) -> str:
    return repr(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)

"""Where the assistant's turns are in a rendered conversation, proved against the full rendering.

A turn's span starts after the generation prompt (where a model would start to write) and ends with the text that
closes the turn, the end-of-turn token included. Templates that mark it with `{% generation %}` need none of this. For
the others, spans are derived from renderings of the whole conversation (message by message is wrong as soon as a
template treats a turn by its place: reasoning kept in the last turn only, a beginning-of-text token):

1. *Placeholders.* Rendered with a placeholder for every text, the template shows its own text around each turn; that
   is the same for all conversations with the same roles and fields. Then each assistant message alone is replaced.
   What comes before and after the placeholder must be what the full rendering begins and ends with; the rest, with
   the text that closes the turn, is the span.
2. *Prefix differences*, where a template looks into the texts so that this cannot be. The rendering up to the turn,
   with generation prompt, and the rendering that ends with the turn must both be prefixes of the full rendering; the
   span lies between. There must be a generation prompt.

Where neither can be proved, `Unproved` says why."""

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from .source import Message

NOT_TEXT = ("role", "name", "id", "type", "tool_call_id")  # fields that a template uses as labels
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]  # characters of the rendering


class Unproved(Exception):
    """The spans could not be proved against the full rendering."""


class Refused(Exception):
    """The template raised an error."""


class Turn(NamedTuple):
    """The template's own text around the text of a message."""

    gap: str  # between the text before it and its own
    into: int  # characters of `gap` that come before the turn: up to where a model would start to write
    closing: str  # behind it, what closes the turn


Skeleton = tuple[dict[int, Turn], list[int]]  # assistant messages, and messages whose content is not rendered


class Template:
    """A tokenizer's chat template, with what was learned about it so far."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.marked = bool(GENERATION.search(tokenizer.get_chat_template()))
        special = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, special))})" if special else r"(?!)()")
        self._known: dict[Any, Skeleton] = {}

    def text(self, messages: Sequence[Message], prompt: bool = False) -> str:
        """The rendering of `messages`, with the generation prompt behind it if `prompt`."""
        try:
            return self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
        except Exception as problem:  # noqa: BLE001 (a template can raise anything)
            raise Refused(f"{type(problem).__name__}: {problem}") from None

    def spans(self, messages: list[Message], full: str) -> dict[int, Span]:
        """Character span of every assistant message (by its place) in the rendering `full`.
        Raises Unproved: they cannot be proved, or a message is not rendered."""
        try:
            found = self._one_by_one(messages, full)
        except (Unproved, Refused) as first:
            try:
                found = self._prefixes(messages, full)
            except (Unproved, Refused) as second:
                raise Unproved(f"{first}; {second}") from None
        stop = 0
        for at, span in sorted(found.items()):
            if not stop <= span[0] < span[1] <= len(full):
                raise Unproved(f"message {at} has the span {span}, which is empty or overlaps another turn's")
            stop = span[1]
        return found

    def missing(self, messages: list[Message]) -> int | None:
        """The place of a message whose text is not in the rendering because the template has no use for its role."""
        for at in self._skeleton(messages)[1]:
            text = messages[at]["content"].strip()
            if text and text not in self.text(messages):
                return at
        return None

    def _skeleton(self, messages: list[Message]) -> Skeleton:
        """What the template writes around the texts of all conversations with these roles and fields."""
        key = tuple(
            tuple((k, None if k == "content" else bool(v) if _is_text(k, v) else repr(v)) for k, v in m.items())
            for m in messages
        )
        if key not in self._known:
            if len(self._known) >= 4096:  # fields that are not text, such as tool calls, make many
                self._known.clear()
            try:
                self._known[key] = self._make_skeleton(messages)
            except Refused:  # of placeholders
                self._known[key] = {}, []
        return self._known[key]

    def _make_skeleton(self, messages: list[Message]) -> Skeleton:
        masked, turns = [_mask(m, at) for at, m in enumerate(messages)], {}
        parts = PLACEHOLDER.split(self.text(masked))  # literal, message, field, literal, message, ...
        for at, message in enumerate(messages):
            mine = [k for k in range(1, len(parts), 3) if int(parts[k]) == at]
            if message["role"] == "assistant" and mine:
                gap, after = parts[mine[0] - 1], parts[mine[-1] + 2]
                closing = after[: self._closing(after, masked, at)]
                turns[at] = Turn(gap, self._after_header(gap, masked, at), closing)
        seen = {int(at) for at, field in zip(parts[1::3], parts[2::3]) if field == "content"}
        return turns, [at for at in range(len(messages)) if at not in seen]

    def _after_header(self, gap: str, messages: list[Message], at: int) -> int:
        """How much of `gap`, the template's text before message `at`, is given: up to where a model would start.

        That is behind the generation prompt. Where the gap does not have it, the text itself is where the turn
        begins; but a template without one may leave white space to the model, behind all that the prompt ends with."""
        before = messages[:at] or [{"role": "user", "content": "x"}]
        try:
            plain, prompted = self.text(before), self.text(before, prompt=True)
        except Refused:
            return len(gap)
        header = prompted[len(plain) :] if prompted.startswith(plain) else ""
        if header:
            found = gap.rfind(header)
            return found + len(header) if found >= 0 else len(gap)
        bare = len(gap.rstrip())
        return next((k for k in range(len(gap), max(bare, 1) - 1, -1) if at and plain.endswith(gap[:k])), len(gap))

    def _closing(self, after: str, messages: list[Message], at: int) -> int:
        """How much of `after`, the text behind message `at`, closes the turn: what also closes it as the last."""
        if at == len(messages) - 1:
            return self._trim(after)
        try:
            last = PLACEHOLDER.split(self.text(messages[: at + 1]))
        except Refused:
            return 0
        if len(last) < 4 or last[-3] != str(at):
            return 0
        last = last[-1]
        if after.startswith(last):
            return self._trim(last)
        pairs = zip(self._special.split(after), self._special.split(last))
        return self._trim("".join(ours for ours, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))

    def _trim(self, tail: str) -> int:
        """Length of `tail` without the white space behind its last special token: no model writes past that token."""
        bare = tail.rstrip()
        ends = [m.end() for m in self._special.finditer(bare)]
        return len(bare) if ends and ends[-1] == len(bare) and bare else len(tail)

    def _one_by_one(self, messages: list[Message], full: str) -> dict[int, Span]:
        found, (turns, _) = {}, self._skeleton(messages)
        for at in [at for at, message in enumerate(messages) if message["role"] == "assistant"]:
            text = self.text([*messages[:at], _mask(messages[at], at), *messages[at + 1 :]])
            places = [m.span() for m in PLACEHOLDER.finditer(text)]
            if not places or at not in turns:
                raise Unproved(f"the template does not render the text of message {at}")
            turn, (start, stop) = turns[at], (places[0][0], places[-1][1])
            begin = start - len(turn.gap) + turn.into if text[:start].endswith(turn.gap) else start
            after = text[stop:]
            end = len(full) - len(after)
            if full[:begin] != text[:begin] or not full.endswith(after) or end < begin:
                raise Unproved(f"the rendering around message {at} changes with the text of that message")
            found[at] = begin, end + len(turn.closing) * after.startswith(turn.closing)
        return found

    def _prefixes(self, messages: list[Message], full: str) -> dict[int, Span]:
        found = {}
        for at, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if not at:
                raise Unproved("the assistant has the first message, so nothing shows where its turn begins")
            plain, before = self.text(messages[:at]), self.text(messages[:at], prompt=True)
            through = self.text(messages[: at + 1])
            if not full.startswith(through) or not through.startswith(before) or before == plain:
                raise Unproved(f"the rendering up to message {at} is not a prefix of the full rendering")
            found[at] = len(before), len(before) + self._trim(through[len(before) :])
        return found


PLACEHOLDER = re.compile("\ue0f1(\\d+)\ue0f2([^\ue0f3]+)\ue0f3")  # private-use characters; never in a text by chance


def _is_text(field: str, value: Any) -> bool:
    return isinstance(value, str) and field not in NOT_TEXT


def _mask(message: Message, at: int) -> Message:
    """The message with a placeholder for every text (an empty content, too)."""
    return {
        k: f"\ue0f1{at}\ue0f2{k}\ue0f3" if _is_text(k, v) and (v or k == "content") else v for k, v in message.items()
    }

"""Where the assistant's turns are in a rendered conversation, proved against the full rendering.

A turn's span starts after the generation prompt (where a model would start to write) and ends with the text that
closes the turn, the end-of-turn token included. Templates that mark it with `{% generation %}` need none of this. For
the others, spans are derived from renderings of the whole conversation (message by message is wrong as soon as a
template treats a turn by its place: reasoning kept in the last turn only, a beginning-of-text token):

1. *Skeleton.* The conversation is rendered with a placeholder for every text. That tells the template's own text from
   the messages' text. Conversations with the same roles and fields share one skeleton. If the skeleton, filled with
   the texts, is the full rendering, the spans follow.
2. *One placeholder.* If not (the template looks into the texts), each assistant message alone is replaced. What comes
   before and after the placeholder must be what the full rendering begins and ends with; the span is the rest.
3. *Prefix differences.* The rendering up to the turn, with generation prompt, and the rendering that ends with the
   turn must both be prefixes of the full rendering; the span lies between. There must be a generation prompt.

Where none of them can be proved, `Unproved` says why.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from .source import Message

NOT_TEXT = ("role", "name", "id", "type", "tool_call_id")  # fields that a template uses as labels
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]  # characters of the rendering


class Unproved(Exception):
    """The spans could not be proved against the full rendering."""


class Refused(Exception):
    """The template raised an error."""


@dataclass(frozen=True)
class Skeleton:
    """A rendering with placeholders: `literals[k]`, then the text of `slots[k]`, and so on; one more literal."""

    literals: list[str]
    slots: list[tuple[int, str]]  # (message, field)
    begin: dict[int, tuple[int, int]]  # message -> (literal, characters into it) where its turn begins
    tail: dict[int, tuple[int, int]]  # message -> (literal, characters of it) that closes its turn
    unseen: tuple[int, ...]  # messages whose content is not in the rendering


class Template:
    """A tokenizer's chat template, with what was learned about it so far."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.marked = bool(GENERATION.search(tokenizer.get_chat_template()))
        special = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, special))})" if special else r"(?!)()")
        self._skeletons: dict[Any, Skeleton | None] = {}

    def text(self, messages: Sequence[Message], prompt: bool = False) -> str:
        """The rendering of `messages`, with the generation prompt behind it if `prompt`."""
        try:
            return self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
        except Exception as problem:  # noqa: BLE001 (a template can raise anything)
            raise Refused(f"{type(problem).__name__}: {problem}") from None

    def spans(self, messages: list[Message], full: str) -> dict[int, Span]:
        """Character span of every assistant message (by its place) in the rendering `full`.

        Raises Unproved: they cannot be proved, or a message is not rendered.
        """
        skeleton = self.skeleton(messages)
        found = _fill(skeleton, messages, full) if skeleton else None
        if found is None:
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
        skeleton = self.skeleton(messages)
        for at in skeleton.unseen if skeleton else ():
            text = messages[at]["content"].strip()
            if text and text not in self.text(messages):
                return at
        return None

    def skeleton(self, messages: list[Message]) -> Skeleton | None:
        """The skeleton of all conversations with these roles and fields; None if the template refuses placeholders."""
        key = tuple(
            tuple((k, None if k == "content" else bool(v) if _is_text(k, v) else repr(v)) for k, v in m.items())
            for m in messages
        )
        if key not in self._skeletons:
            if len(self._skeletons) >= 4096:  # fields that are not text, such as tool calls, make many
                self._skeletons.clear()
            try:
                self._skeletons[key] = self._make_skeleton(messages)
            except Refused:
                self._skeletons[key] = None
        return self._skeletons[key]

    def _make_skeleton(self, messages: list[Message]) -> Skeleton:
        masked = [_mask(m, at) for at, m in enumerate(messages)]
        parts = PLACEHOLDER.split(self.text(masked))
        literals = parts[::3]
        slots = [(int(at), field) for at, field in zip(parts[1::3], parts[2::3])]
        begin, tail = {}, {}
        for at, message in enumerate(messages):
            mine = [k for k, slot in enumerate(slots) if slot[0] == at]
            if message["role"] != "assistant" or not mine or mine != list(range(mine[0], mine[-1] + 1)):
                continue
            gap, after = literals[mine[0]], literals[mine[-1] + 1]
            begin[at] = mine[0], self._after_header(gap, masked, at)
            tail[at] = mine[-1] + 1, self._closing(after, masked, at)
        unseen = set(range(len(messages))) - {at for at, field in slots if field == "content"}
        return Skeleton(literals, slots, begin, tail, tuple(sorted(unseen)))

    def _after_header(self, gap: str, messages: list[Message], at: int) -> int:
        """How much of `gap`, the template's text before message `at`, is given: up to where a model would start.

        That is behind the generation prompt. Where the gap does not have it, the text itself is where the turn
        begins; but a template without one may leave white space to the model, behind all that the prompt ends with.
        """
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
        found = {}
        for at in range(len(messages)):
            if messages[at]["role"] != "assistant":
                continue
            masked = [*messages[:at], _mask(messages[at], at), *messages[at + 1 :]]
            text = self.text(masked)
            places = [m.span() for m in PLACEHOLDER.finditer(text) if int(m[1]) == at]
            if not places:
                raise Unproved(f"the template does not render the text of message {at}")
            start, stop = places[0][0], places[-1][1]
            gap = self._gap(messages, at) if at else text[:start]
            begin = start
            if text[:start].endswith(gap):
                begin = start - len(gap) + self._after_header(gap, masked, at)
            after = text[stop:]
            end = len(full) - len(after)
            if full[:begin] != text[:begin] or not full.endswith(after) or end < begin:
                raise Unproved(f"the rendering around message {at} changes with the text of that message")
            found[at] = begin, end + self._closing(after, masked, at)
        return found

    def _gap(self, messages: list[Message], at: int) -> str:
        """The template's own text between the text of message `at - 1` and that of message `at`; empty if unknown."""
        pair = [_mask(messages[at - 1], at - 1), _mask(messages[at], at)]
        text = self.text([*messages[: at - 1], *pair, *messages[at + 1 :]])
        before = [m.end() for m in PLACEHOLDER.finditer(text) if int(m[1]) == at - 1]
        mine = [m.start() for m in PLACEHOLDER.finditer(text) if int(m[1]) == at]
        return text[before[-1] : mine[0]] if before and mine and before[-1] <= mine[0] else ""

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


def _fill(skeleton: Skeleton, messages: list[Message], full: str) -> dict[int, Span] | None:
    """Spans of the assistant's turns if `full` is the skeleton filled with the messages' texts, else None."""
    starts = [0]  # starts[k]: where literal k starts in `full`
    for k, (at, field) in enumerate(skeleton.slots):
        place = starts[-1] + len(skeleton.literals[k])
        text, follow = messages[at][field], skeleton.literals[k + 1]
        if not full.startswith(skeleton.literals[k], starts[-1]):
            return None
        for form in (text, text.strip(), text.lstrip(), text.rstrip()):  # templates may trim
            if full.startswith(form, place) and full.startswith(follow, place + len(form)):
                starts.append(place + len(form))
                break
        else:
            return None
    if full[starts[-1] :] != skeleton.literals[-1]:
        return None
    found = {}
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            if at not in skeleton.begin:
                return None
            (k, into), (last, length) = skeleton.begin[at], skeleton.tail[at]
            found[at] = starts[k] + into, starts[last] + length
    return found

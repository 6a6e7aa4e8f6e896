"""Reasoning-gym tasks as chats: a question, its answer, and the task's own scorer.

Training and held-out questions are told apart by a hash of the question's text, so that they are disjoint whatever
the sizes and seeds, also where a task has few different questions. reasoning-gym comes with the `rl` extra."""

import difflib
import json
import zlib
from functools import cache
from typing import Any, Literal

from ..errors import BackendError, DataError
from .source import CHATS

HELD_OUT_SHARE = 5  # one question in five is held out

# Settings under which a model of a few million parameters, trained for minutes on a CPU, gets somewhere: short
# prompts, short answers. Tasks that are not listed have reasoning-gym's own defaults.
SMALL: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 30},
    "count_bits": {"min_n": 1, "max_n": 1023},
    "letter_counting": {"min_words": 1, "max_words": 2},
    "spell_backward": {"min_word_len": 3, "max_word_len": 4},
    "leg_counting": {"min_animals": 1, "max_animals": 1, "max_instances": 9},
    "calendar_arithmetic": {"tasks": ["is_leap_year"], "leap_year_range": 900},
}


def our_chats() -> list[dict[str, Any]]:
    """The conversations of our own chat file, on mixtures of experts and on everyday facts, for `build`.
    >>> our_chats()[0]["messages"][0]
    {'role': 'user', 'content': 'What is a mixture-of-experts layer?'}
    """
    return [json.loads(line) for line in CHATS.read_text(encoding="utf-8").splitlines()]


def make_task(
    name: str, split: Literal["train", "heldout"], size: int, seed: int = 0, **settings: Any
) -> list[dict[str, Any]]:
    """Items of a task, all with different questions, as chats that `moekit.data.dataset.build` takes.
    Args:
        name: a reasoning-gym task; `SMALL` lists those that suit a small model.
        split: "train" or "heldout"; no question is in both.
        size: how many items.
        seed: which ones; the same seed and settings give the same items.
        settings: reasoning-gym's settings of the task, on top of `SMALL[name]`.
    Returns: `size` dictionaries with `messages` (user: the question, assistant: the answer), and for `score`: `task`,
        `settings`, `entry` (question, answer and metadata as reasoning-gym made them).
    Raises:
        BackendError: reasoning-gym is not installed.
        DataError: no such task or setting, or it has fewer different questions than asked for."""
    if split not in ("train", "heldout"):
        raise DataError(f"split={split!r} is not 'train' or 'heldout'")
    if size < 1:
        raise DataError(f"size={size} must be at least 1")
    settings = {**SMALL.get(name, {}), **settings}
    generated = _generator(name, 100 * size + 10_000, seed, settings)
    items: dict[str, dict[str, Any]] = {}
    new = at = 0
    while at < len(generated) and at - new < 2000 + 10 * len(items):  # so long without a new one: there are no more
        entry, at = generated[at], at + 1
        question, answer = entry["question"].strip(), entry["answer"]
        held_out = zlib.crc32(question.encode()) % HELD_OUT_SHARE == 0
        if held_out != (split == "heldout") or question in items:
            continue
        if not isinstance(answer, str):
            raise DataError(f"task {name!r} gives no answer to learn from for the question {question[:80]!r}")
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        items[question] = {"messages": messages, "task": name, "settings": settings, "entry": entry}
        new = at
        if len(items) == size:
            return list(items.values())
    gave = f"{name!r} with {settings or 'default settings'} gave {len(items)} different {split} questions in {at} tries"
    raise DataError(f"task {gave}, {size} were asked for; ask for fewer, or widen its settings")


def make_pairs(
    name: str, split: Literal["train", "heldout"], size: int, seed: int = 0, **settings: Any
) -> list[dict[str, Any]]:
    """Preference pairs of a task, for `moekit.data.preference.load_pairs`: the right answer, and another item's answer
    that the task's scorer does not call right. Arguments and items as in `make_task`; `prompt`, `chosen` and `rejected`
    take the place of `messages`.
    Raises DataError: a question to which all answers are right."""
    items, pairs = make_task(name, split, size, seed, **settings), []
    answers = list(dict.fromkeys(item["entry"]["answer"] for item in items))
    for at, item in enumerate(items):
        others = (answers[(at + k) % len(answers)] for k in range(1, len(answers) + 1))
        wrong = next((a for a in others if score(item, a) < 1.0), None)
        if wrong is None:
            raise DataError(f"task {name!r}: no wrong answer among {len(answers)}; ask for more than {size} items")
        question, answer = (m["content"] for m in item.pop("messages"))
        pairs.append({"prompt": question, "chosen": answer, "rejected": wrong, **item})
    return pairs


def score(item: dict[str, Any], answer: str) -> float:
    """How good `answer` is for an item of `make_task`, from 0 to 1, by reasoning-gym's own scorer of the task.

    White space around the answer is taken off first. 1.0 means right; a scorer may give part of a point, for example
    for an answer that holds the right one among other text."""
    return float(_scorer(item["task"], json.dumps(item["settings"]))(answer.strip(), item["entry"]))


@cache
def _scorer(name: str, settings: str) -> Any:
    return _generator(name, 1, 0, json.loads(settings)).score_answer


def _generator(name: str, size: int, seed: int, settings: dict[str, Any]) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as problem:
        raise BackendError(f"tasks need reasoning-gym ({problem}); install it: pip install 'moekit[rl]'") from None
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.4)
        raise DataError(f"reasoning-gym has no task {name!r}; close: {', '.join(close) or 'none'}")
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **settings)
    except (TypeError, AssertionError, ValueError) as problem:
        raise DataError(f"task {name!r} refuses the settings {settings}: {problem}") from None

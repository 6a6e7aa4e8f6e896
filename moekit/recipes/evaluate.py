"""Answers from a model, and how good they are: exact match by the task's scorer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checkpoint.save import MANIFEST, latest, read_manifest
from ..data.chat import load_tokenizer
from ..data.source import as_example, load_examples
from ..data.tasks import score
from ..errors import CheckpointError, DataError
from ..learner.weights import from_checkpoint, load
from ..model.transformer import Transformer
from ..rollout.embedded import EmbeddedEngine
from ..rollout.engine import Sampling, Told
from .setup import CHECKPOINTS, EXPORT


def open_model(
    path: str | Path, tokenizer: str | Path | None = None, *, dtype: str | None = None, device: str = "cpu"
) -> tuple[Transformer, Any]:
    """A model and its tokenizer from a Hugging Face folder, a checkpoint, or a run folder.
    Args:
        path: of a run folder the export is taken, or the newest checkpoint when there is none.
        tokenizer: a tokenizer folder; None = the model folder's, or the one that the checkpoint's run was given.
        dtype: "float32", "bfloat16" or "float64"; None = as stored.
        device: where the parameters go.
    Raises:
        CheckpointError, NumericsError: no such model, or a broken one.
        DataError: no tokenizer."""
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"no such model folder: {folder}; a Hugging Face folder, a checkpoint or a run is wanted")
    if (folder / EXPORT / "config.json").exists():
        folder = folder / EXPORT
    else:
        folder = latest(folder / CHECKPOINTS) or folder
    if not (folder / MANIFEST).exists():
        return load(folder, dtype=dtype, device=device), load_tokenizer(tokenizer or folder)
    model = from_checkpoint(folder, dtype=dtype, device=device)
    config = read_manifest(folder)["extra"].get("config", {})
    return model, load_tokenizer(tokenizer or config.get("tokenizer") or config.get("model") or folder)


def conversation(prompt: str | Sequence[dict[str, Any]], system: str | None = None) -> list[dict[str, Any]]:
    """The messages that a model is to answer: a text is a user's message."""
    start = [{"role": "system", "content": system}] if system is not None else []
    return [*start, *([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)]


def stop_ids(model: Transformer, tokenizer: Any) -> tuple[int, ...]:
    """The end-of-turn tokens of tokenizer and model."""
    return tuple(sorted({tokenizer.eos_token_id, model.config.eos_id} - {None}))


def generate(
    model: Transformer, tokenizer: Any, prompts: Sequence[str | Sequence[dict[str, Any]]], *,
    system: str | None = None, batch: int = 32, told: Told | None = None, temperature: float = 0.0, **how: Any,
) -> list[str]:  # fmt: skip
    """Answers as text, without the stop token.
    Args:
        model, tokenizer: see `open_model`.
        prompts: each a text, taken as a user's message, or a list of messages that the assistant is to answer.
        system: a system message to begin with.
        batch: answers that decode together.
        told: called as `told(done, total)` as prompts are finished.
        temperature: 0 = the most likely token; else tokens are drawn from softmax(logits / temperature). What is drawn
            for prompt i depends on the seed and i, and not on the other prompts.
        how: `max_new_tokens`, `seed`, `top_k`, `top_p`, `stop_ids` and the rest of `moekit.rollout.engine.Sampling`.
    Raises ConfigError: an empty prompt, one that leaves no room for its answer, or a setting that cannot be.
    >>> generate(model, tokenizer, ["What is 3 + 4?"])              # doctest: +SKIP
    ['7']
    """
    how = {"stop_ids": stop_ids(model, tokenizer), **how, "temperature": temperature}
    how["stop_ids"] = tuple(how["stop_ids"])
    chats = [conversation(p, system) for p in prompts]
    ids = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
    engine = EmbeddedEngine.of(model, lambda: 0, slots=batch)
    answers = [r.answers[0] for r in engine.generate(ids, Sampling(**how), told=told)]
    ends = [len(a.ids) - (a.ids[-1] in how["stop_ids"]) for a in answers]
    return [tokenizer.decode(a.ids[:end], skip_special_tokens=True) for a, end in zip(answers, ends)]


def read_items(path: str | Path) -> list[dict[str, Any]]:
    """Held-out conversations as items for `evaluate`; a record may carry the task, settings and entry of its task.
    Raises DataError: see `moekit.data.source.load_examples`."""
    return [{**e.extra, "messages": e.messages} for e in load_examples(path)]


def evaluate(
    model: Transformer, tokenizer: Any, items: Sequence[dict[str, Any]], *, max_new_tokens: int = 64, **how: Any
) -> dict[str, Any]:
    """How many held-out questions the model answers right.

    The last assistant message of each item is the right answer, what comes before it the prompt. Items of
    `moekit.data.tasks.make_task` are scored by their task's own scorer; others by equality, white space around the
    text aside.
    Returns: `score` (mean, 0 to 1), `exact` (share of items with score 1), `items`, `tasks` (the same three for each
        task) and `answers` (question, wanted, answer and score of each item).
    Raises DataError: no items, or one whose last message is not the assistant's."""
    if not items:
        raise DataError("there are no items to evaluate on")
    chats = [as_example(item, "item", i).messages for i, item in enumerate(items)]
    for i, chat in enumerate(chats):
        if chat[-1]["role"] != "assistant" or len(chat) < 2:
            raise DataError(f"item {i} does not end with the assistant's answer to something ({chat[-1]['role']!r})")
    found = generate(model, tokenizer, [c[:-1] for c in chats], max_new_tokens=max_new_tokens, **how)
    answers, tasks = [], {}
    for item, chat, answer in zip(items, chats, found):
        wanted = chat[-1]["content"]
        points = score(item, answer) if "entry" in item else float(answer.strip() == wanted.strip())
        answers.append({"question": chat[-2]["content"], "wanted": wanted, "answer": answer, "score": points})
        tasks.setdefault(item.get("task", "chats"), []).append(points)
    by_task = {name: _sums(points) for name, points in sorted(tasks.items())}
    return {**_sums([a["score"] for a in answers]), "tasks": by_task, "answers": answers}


def _sums(points: list[float]) -> dict[str, Any]:
    n = len(points)
    return {"score": sum(points) / n, "exact": sum(p == 1.0 for p in points) / n, "items": n}

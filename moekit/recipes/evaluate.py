"""Answers from a model, and how good they are: plain cached decoding, exact match by the task's scorer, loss.

Prompts of different lengths share one batch and get the answers that they would get alone: positions count from each
prompt's own start, padding is seen by nobody, and every prompt has its own random numbers.

Axis letters: B prompts of a batch, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.save import MANIFEST, latest, read_manifest
from ..data.chat import load_tokenizer
from ..data.pack import Rows
from ..data.source import as_example, load_examples
from ..data.tasks import score
from ..errors import CheckpointError, ConfigError, DataError
from ..learner.weights import from_checkpoint, load
from ..model.decode import Cache, decode, prefill
from ..model.transformer import Transformer
from .setup import CHECKPOINTS, EXPORT

Told = Callable[[int, int], None]  # told(done, total)


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


@dataclass(frozen=True)
class Sampled:
    """What followed one prompt: token ids without the stop token, and whether it stopped by itself."""

    ids: list[int]
    stopped: bool


@torch.no_grad()
def sample(
    model: Transformer, prompts: Sequence[Sequence[int]], *, max_new_tokens: int = 128, temperature: float = 0.0,
    seed: int = 0, stop_ids: Sequence[int] = (), batch: int = 32, told: Told | None = None,
) -> list[Sampled]:  # fmt: skip
    """Continue token ids, by the most likely token or by sampling.
    Args:
        prompts: at least one token each; lengths may differ.
        max_new_tokens: the most tokens to add; prompt and answer must fit into the model's positions.
        temperature: 0 = the most likely token; else tokens are drawn from softmax(logits / temperature).
        seed: prompt i is drawn with a generator of its own, seeded with seed + i, so its answer does not depend on
            which other prompts are there.
        stop_ids: tokens that end an answer.
        batch: prompts decoded together.
        told: called as `told(done, total)` as prompts are finished.
    Raises ConfigError: an empty prompt, one that leaves no room for its answer, or a negative temperature.
    Cost: one pass over each prompt, then one over a token a step; rows that have stopped are dropped from the batch
    when half of it has."""
    if temperature < 0 or max_new_tokens < 1:
        raise ConfigError(f"temperature={temperature} must be >= 0 and max_new_tokens={max_new_tokens} at least 1")
    for i, p in enumerate(prompts):
        if not p or len(p) + max_new_tokens > model.config.max_positions:
            raise ConfigError(
                f"prompt {i} has {len(p)} tokens; with max_new_tokens={max_new_tokens} and the model's "
                f"{model.config.max_positions} positions it needs 1 to {model.config.max_positions - max_new_tokens}"
            )
    out: dict[int, Sampled] = {}
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # neighbours in length share a batch
    for at in range(0, len(order), batch):
        chosen, how = order[at : at + batch], (model, max_new_tokens, temperature, frozenset(stop_ids))
        out |= zip(chosen, _sample([list(prompts[i]) for i in chosen], [seed + i for i in chosen], *how))
        if told:
            told(len(out), len(prompts))
    return [out[i] for i in range(len(prompts))]


def _sample(
    prompts: list[list[int]], seeds: list[int], model: Transformer, most: int, temperature: float, stops: frozenset[int]
) -> list[Sampled]:
    """One batch of `sample`."""
    draws = [torch.Generator().manual_seed(s) for s in seeds]
    ids: list[list[int]] = [[] for _ in prompts]
    stopped = [False] * len(prompts)
    rows = list(range(len(prompts)))  # the prompt of each row of the cache
    logits_BV, cache = prefill(model, prompts, max(map(len, prompts)) + most)
    for step in range(most):
        token_B = _choose(logits_BV, temperature, [draws[i] for i in rows])
        for i, token in zip(rows, token_B.tolist()):
            if not stopped[i]:
                stopped[i] = token in stops
                ids[i] += [] if stopped[i] else [token]
        alive = [r for r, i in enumerate(rows) if not stopped[i]]
        if not alive or step + 1 == most:
            break
        if len(alive) <= len(rows) // 2:
            keep = torch.tensor(alive, device=token_B.device)
            cache = Cache(cache.keys[:, keep], cache.values[:, keep], cache.length_B[keep])
            token_B, rows = token_B[keep], [rows[r] for r in alive]
        logits_BV = decode(model, token_B, cache)
    return [Sampled(i, s) for i, s in zip(ids, stopped)]


def _choose(logits_BV: Tensor, temperature: float, draws: list[torch.Generator]) -> Tensor:
    """The next token of each row: the largest logit, or where a uniform number falls in the cumulative distribution."""
    if temperature == 0:
        return logits_BV.argmax(-1)
    cumulative_BV = (logits_BV.double() / temperature).softmax(-1).cumsum(-1)
    uniform_B = torch.tensor([torch.rand((), generator=g, dtype=torch.float64) for g in draws])
    at_B1 = uniform_B.to(cumulative_BV.device)[:, None] * cumulative_BV[:, -1:]
    return torch.searchsorted(cumulative_BV, at_B1, right=True)[:, 0].clamp(max=logits_BV.shape[1] - 1)


def generate(
    model: Transformer, tokenizer: Any, prompts: Sequence[str | Sequence[dict[str, Any]]], *,
    system: str | None = None, **how: Any,
) -> list[str]:  # fmt: skip
    """Answers as text.
    Args:
        model, tokenizer: see `open_model`.
        prompts: each a text, taken as a user's message, or a list of messages that the assistant is to answer.
        system: a system message to begin with.
        how: `max_new_tokens`, `temperature`, `seed`, `stop_ids`, `batch`, `told`: see `sample`. Stop ids default to
            the end-of-turn tokens of tokenizer and model.
    >>> generate(model, tokenizer, ["What is 3 + 4?"])              # doctest: +SKIP
    ['7']
    """
    start = [{"role": "system", "content": system}] if system is not None else []
    chats = [[*start, *([{"role": "user", "content": p}] if isinstance(p, str) else p)] for p in prompts]
    ids = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
    ends = {tokenizer.eos_token_id, model.config.eos_id} - {None}
    found = sample(model, ids, **{"stop_ids": sorted(ends), **how})
    return [tokenizer.decode(f.ids, skip_special_tokens=True) for f in found]


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


@torch.no_grad()
def token_loss(model: Transformer, rows: Rows, *, batch: int = 8, told: Told | None = None) -> dict[str, float]:
    """Mean negative log-probability of the supervised tokens of `rows`: `loss` and `supervised_tokens`."""
    total, count = 0.0, 0
    for at in range(0, len(rows), batch):
        logprob_M = model(rows.batch(slice(at, at + batch)), elide="padding+last_layer").logprob_M
        total, count = total - float(logprob_M.sum(dtype=torch.float64)), count + logprob_M.numel()
        if told:
            told(min(at + batch, len(rows)), len(rows))
    return {"loss": total / count if count else float("nan"), "supervised_tokens": count}

"""Answers in a cell: every token with its log-prob, its experts and the version of the weights that sampled it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..model.transformer import Transformer
from ..rollout.embedded import EmbeddedEngine
from ..rollout.engine import Engine, Sampling
from ..viz.answers import Answers, draw_answers
from .evaluate import conversation, open_model, stop_ids


def generate(
    model: Transformer | Engine | str | Path, prompt: str | Sequence[Any], tokenizer: Any = None, *,
    system: str | None = None, n: int = 1, max_new_tokens: int = 64, temperature: float = 1.0, **how: Any,
) -> Answers:  # fmt: skip
    """Sample answers to one prompt and draw them.

    Args:
        model: a model, an engine, or the folder of a model, a checkpoint or a run.
        prompt: a text (a user's message), a list of messages, or token ids.
        tokenizer: needed for text with a model that is not a folder; its end-of-turn token is a stop id by default.
        system: a system message to begin with.
        n: answers.
        max_new_tokens, temperature, how: see `moekit.rollout.engine.Sampling`.

    Returns: Answers, which displays itself; `rollout` and `texts` hold what was sampled.
    Raises ConfigError: text without a tokenizer, or a prompt that leaves no room.
    >>> from moekit.model.presets import preset
    >>> answers = generate(Transformer(preset("tiny")), [5, 6, 7], n=2, max_new_tokens=4)
    >>> [len(a.ids) for a in answers.rollout.answers]
    [4, 4]
    """
    if isinstance(model, str | Path):
        model, tokenizer = open_model(model, tokenizer)
    engine: Any = EmbeddedEngine.of(model, lambda: 0) if isinstance(model, Transformer) else model
    if isinstance(prompt, str) or any(isinstance(p, dict) for p in prompt):
        if tokenizer is None:
            raise ConfigError(
                "a prompt of text needs a tokenizer; give generate(model, prompt, tokenizer), or token ids"
            )
        chat = conversation(prompt, system)
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    else:
        ids = [int(i) for i in prompt]
    if tokenizer is not None and hasattr(engine, "model"):
        how = {"stop_ids": stop_ids(engine.model, tokenizer), **how}
    sampling = Sampling(n=n, max_new_tokens=max_new_tokens, temperature=temperature, **how)
    (rollout,) = engine.generate([ids], sampling)
    return draw_answers(rollout, tokenizer)

"""A start in seconds for notebooks: a small model that has half learnt to write digits in reverse, and data around it.

The question "reverse 4 1 7" has the answer "7 1 4". The words are few, so that a tiny tokenizer gives each its own
token, and a model of two layers is half way after some fifty steps, a few seconds on one core.
"""

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config import DataConfig, LearnerConfig, ModelConfig, RouterLossConfig
from ..data.dataset import build
from ..data.stream import RowStream
from ..data.tokenizer import train_tokenizer
from ..learner.learner import Learner
from ..learner.weights import export
from ..model.presets import preset
from ..model.transformer import Transformer
from ..objectives.sft import SFT

# Normalised queries and keys and small first weights learn this task in about a third of the steps.
FAST: dict[str, Any] = {"qk_norm": "head", "init_std": 0.06, "family": "qwen3_moe"}


@dataclass(frozen=True)
class Start:
    """Where `small_start` put things, and what it made."""

    model: str  # a Hugging Face folder with a tokenizer
    chats: str  # questions with their right answers
    held_out: str  # others
    pairs: str  # the same questions as `chats`, a right and a wrong answer to each
    held_out_pairs: str
    shape: ModelConfig
    tokenizer: Any
    losses: list[float]


def questions(size: int, seed: int = 0, digits: tuple[int, int] = (2, 4)) -> list[tuple[str, str, str]]:
    """Different questions, the right answer and a wrong one (two neighbours swapped) to each.

    >>> questions(1, seed=1)
    [('reverse 9 1', '1 9', '9 1')]
    """
    r, found = random.Random(seed), dict[str, tuple[str, str]]()
    while len(found) < size:
        some = r.sample("0123456789", r.randint(*digits))
        right, at = some[::-1], r.randrange(len(some) - 1)
        wrong = [*right[:at], right[at + 1], right[at], *right[at + 2 :]]
        found["reverse " + " ".join(some)] = " ".join(right), " ".join(wrong)
    return [(question, *answers) for question, answers in found.items()]


def small_start(
    folder: str | Path, *, steps: int = 60, lr: float = 5e-3, rows: int = 8, size: int = 1200, held_out: int = 100,
    digits: tuple[int, int] = (2, 4), seed: int = 0, **shape: Any,
) -> Start:  # fmt: skip
    """Make data and a tokenizer, train a small model on the right answers in this process, and export it.

    Args:
        folder: everything is written there.
        steps, lr, rows: of the fine-tuning; `rows` of one step. Fewer steps leave more to learn.
        size, held_out: questions to train on, and others.
        digits: fewest and most digits of a question.
        shape: what differs from the preset "tiny".
    """
    folder, asked = Path(folder), questions(size + held_out, seed, digits)
    folder.mkdir(parents=True, exist_ok=True)
    chat = lambda q, right, _: {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": right}]}
    pair = lambda q, right, wrong: {"prompt": q, "chosen": right, "rejected": wrong}
    files = {"chats": (chat, asked[:size]), "held_out": (chat, asked[size:]), "pairs": (pair, asked[:size]),
             "held_out_pairs": (pair, asked[size:])}  # fmt: skip
    for name, (form, some) in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(form(*one)) + "\n" for one in some))
    tokenizer = train_tokenizer([q for q, *_ in asked], 300, folder / "tokenizer", min_frequency=len(asked) // 5)
    ids = {f"{name}_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    model = Transformer(replace(preset("tiny"), vocab=len(tokenizer), **FAST, **ids, **shape), seed=seed)
    data: Any = build(str(folder / "chats.jsonl"), tokenizer, DataConfig(length=96))
    config = LearnerConfig(lr=lr, warmup_steps=10, schedule="cosine", total_steps=max(steps, 11), min_lr_ratio=0.2,
                           router=RouterLossConfig(balance=0.01))  # fmt: skip
    learner, stream = Learner(model, SFT(), config), RowStream(data, rows, seed)
    losses = [learner.step(stream.next())["loss/sft"] for _ in range(steps)]
    export(model, folder / "model", folder / "tokenizer", overwrite=True)
    paths = {name: str(folder / f"{name}.jsonl") for name in files}
    return Start(str(folder / "model"), **paths, shape=model.config, tokenizer=tokenizer, losses=losses)

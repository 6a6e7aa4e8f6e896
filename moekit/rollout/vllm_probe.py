"""The proof of an update: what vLLM says of a fixed text, against what the weights that it was sent give.

A reading has two parts: the log-probs of the text, which vLLM computes from the ids alone, and tokens that it samples
after the text, which it reads through its prefix cache, where keys of old weights may have stayed.

How far a reading may be from the learner's own:

*float32*: no token further than 1e-4 nats. Seen: 3e-6 when right, above 1 when wrong.

*bfloat16*: single tokens say nothing. Where two experts are nearly tied, rounding picks the other one: of 300 tokens
the furthest was 0.03 to 2.6 nats away although all was right, and a wrong expert moves no token further. Means tell.
The learner measures what rounding does to the very weights and text: r = the mean over the text of |log-prob in
bfloat16 - log-prob in float32 of the same rounded weights|. vLLM, which rounds elsewhere, was found at 0.35 to 2.3 r
from the float32 values (12 models of 8 experts, log-probs spread by 0.2, 0.7 and 1.4 nats, r = 0.0012 to 0.088); one
expert of one layer with another model's `down` at 3.8 to 16 r, another model at 16 to 200 r. So the mean may be 3 r. Of
the few tokens after the text it is the median: one flipped route does not move it, foreign keys move all of them.

Axis letters: P tokens of the text, A tokens after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import ModelConfig
from ..errors import EngineError
from ..model.transformer import Transformer
from .embedded import EmbeddedEngine
from .engine import Answer, Sampling
from .vllm_messages import PLAIN, Link, parse, parse_prompt

LENGTH, AFTER = 300, 8  # tokens of the text, longer than two blocks of vLLM's cache on CPU, and after it
TOLERANCE = {"float32": 1e-4, "bfloat16": None}  # nats, of any token; None = by its own rounding, of their mean
ROUNDING = 3.0  # times r


@dataclass(frozen=True)
class Reading:
    """What vLLM says of a text."""

    text_P: Tensor  # [P - 1], of the tokens after the first
    after: Answer


@dataclass(frozen=True)
class Proof:
    """How far vLLM is from the weights that it was sent, in nats, how far it may be, and if the old ones are further
    (more than twice as far: then vLLM cannot be serving those)."""

    gap: float
    limit: float
    apart: bool


def probe_ids(config: ModelConfig) -> list[int]:
    """The text: the same for every model with this vocabulary."""
    length = min(LENGTH, config.max_positions - AFTER - 1)
    return torch.randint(config.vocab, (length,), generator=torch.Generator().manual_seed(22)).tolist()


def read(link: Link, ids: list[int], initial: int) -> tuple[Reading, dict[str, Any]]:
    """A reading, and the reply that has the tokens after the text. Raises EngineError."""
    found: dict[int, Any] = {}
    link.ask([(ids, {**PLAIN, "prompt_logprobs": 0})], found.__setitem__)
    text_P = parse_prompt(found[0], ids)
    link.ask([(ids, {**PLAIN, "max_tokens": AFTER})], found.__setitem__)
    return Reading(text_P, parse(found[0], ids, initial)[0]), found[0]


def score(model: Transformer, ids: list[int], after: list[int]) -> Tensor:
    """[P - 1 + A] float32: log-probs of all tokens after the first."""
    engine = EmbeddedEngine.of(model, lambda: 0)
    return engine.score([ids[:1]], [[ids[1:] + after]], Sampling())[0].answers[0].logprobs


def prove(
    model: Transformer, ids: list[int], now: Reading, before: Reading | None, *, dtype: str,
    tolerance: float | None = None, expected: Tensor | None = None,
) -> Proof:  # fmt: skip
    """Hold a reading against the weights that were sent.

    Args:
        model: with these weights, in the dtype that vLLM serves in.
        now, before: after the update and before it; None = it could not be asked.
        dtype: as of `VLLMEngine`.
        tolerance: nats in place of the limits above.
        expected: [P - 1], in place of the model's log-probs of the text.

    Raises EngineError: a part of the reading is too far off.

    Cost: a forward over the text. In bfloat16 two, and a float32 copy of the weights for a moment.
    """
    limit, wide = TOLERANCE[dtype] if tolerance is None else tolerance, model
    if rough := dtype != "float32":
        wide = Transformer(model.config, seed=None, device=model.device)
        wide.load_state_dict(model.state_dict())
    want_P, want_A = score(wide, ids, now.after.ids).split((len(ids) - 1, len(now.after.ids)))
    if limit is None:
        limit = ROUNDING * float((score(model, ids, [])[: len(want_P)] - want_P).abs().mean())
    want_P = want_P if expected is None else expected

    def gap(a: Tensor, b: Tensor, fold: Any = torch.mean) -> float:
        return float((fold if rough else torch.max)((a - b).abs().nan_to_num(torch.inf)))

    text, cached = gap(now.text_P, want_P), gap(now.after.logprobs, want_A, torch.median)
    if max(text, cached) > limit:
        raise EngineError(
            f"vLLM does not serve the weights that it was sent: log-probs of the probe differ by {text:.3g}, more than "
            f"{limit:.3g} is not rounding (after the text, through its prefix cache by {cached:.3g})"
        )
    return Proof(max(text, cached), limit, before is not None and gap(want_P, before.text_P) > 2 * limit)

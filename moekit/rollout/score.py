"""Log-probs and experts of given answers, by whole forward passes of the model: what the cache must agree with.

Axis letters: N positions seen flat, M answer tokens, L layers that route, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.batch import Batch
from .engine import Sampling
from .kv_cache import ordinary
from .passes import Passes
from .sampling import logprob_of

ROWS = 2048  # logits at once
Pair = tuple[list[int], list[int]]  # prompt, answer
Scored = tuple[Tensor, Tensor | None]  # log-probs [answer] float32; experts [prompt + answer, L, K] int16


def score(
    passes: Passes, pairs: Sequence[Pair], sampling: Sampling, budget: int = 4096
) -> list[Scored]:  # fmt: skip
    """Score answers to prompts under the distribution that `sampling` draws from.

    Args:
        pairs: (prompt, answer) token ids, a prompt of one token at least.
        budget: tokens in one forward pass, or one sequence.

    Returns:
        For each pair the log-probs of its answer, -inf where top-k or top-p leaves a token out, and the experts chosen
        at every position. The last position is read by the model here and by no engine: -1, as in sampled answers.
    """
    out, at = list[Scored](), 0
    while at < len(pairs):
        stop, tokens = at, 0
        while stop < len(pairs) and (stop == at or tokens + sum(map(len, pairs[stop])) <= budget):
            stop, tokens = stop + 1, tokens + sum(map(len, pairs[stop]))
        sizes, found = [len(p) + len(a) for p, a in pairs[at:stop]], _score(passes, pairs[at:stop], sampling)
        parts: list[Any] = [[None] * len(sizes) if (y := ordinary(x)) is None else y.split(sizes) for x in found]
        out += [(lp[len(p) :].clone(), e) for (p, _), lp, e in zip(pairs[at:stop], *parts)]
        at = stop
    return out


@torch.inference_mode()
def _score(passes: Passes, chunk: Sequence[Pair], sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """[N] log-prob of each token, and [N, L, K] experts, all pairs one after the other."""
    sizes = torch.tensor([len(p) + len(a) for p, a in chunk])
    ids_N = torch.tensor([i for p, a in chunk for i in (*p, *a)])
    segment_N = torch.repeat_interleave(torch.arange(len(chunk)), sizes)
    answer_N = torch.cat([(torch.arange(len(p) + len(a)) >= len(p)) for p, a in chunk])
    predicts_N = torch.cat((answer_N[1:], answer_N.new_zeros(1)))  # the next token belongs to an answer
    label_N = torch.where(predicts_N, ids_N.roll(-1), -100)
    out = passes.score(Batch.make(ids_N[None], labels=label_N[None], segment=segment_N[None]).flat)
    parts = zip(out.hidden_MD.split(ROWS), out.flat.label_M.split(ROWS))
    scores = [logprob_of(F.linear(h, passes.model.head_weight), t, sampling).float() for h, t in parts]
    order_N = out.flat.order_N
    logprob_N = torch.zeros(len(ids_N), device=order_N.device)
    logprob_N[order_N[out.flat.label_index_M] + 1] = torch.cat(scores)  # stands at the token now
    if not out.routes:
        return logprob_N, None
    flat_NLK = torch.stack([r.expert_NK for r in out.routes], 1).to(torch.int16)
    experts_NLK = torch.empty_like(flat_NLK).index_copy_(0, order_N, flat_NLK)
    experts_NLK[sizes.cumsum(0) - 1] = -1
    return logprob_N, experts_NLK

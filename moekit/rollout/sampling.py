"""From logits to a token and its log-probability, and random numbers that depend on nothing but what they are for.

Axis letters: S rows, V vocabulary, C candidates (V, or the tokens that top-k leaves).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .engine import Sampling

GOLDEN, WORD = 0x9E3779B97F4A7C15, 2**64 - 1
BITS = 48  # of a uniform number: u * total < total then holds in float64


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014), uint64 -> uint64, a bijection."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw_key(seed: int, prompt_id: int, sample: int) -> int:
    """The random stream of one answer, 64 bits."""
    key = np.zeros(1, np.uint64)
    for number in (seed, prompt_id, sample):
        key = _mix(key + np.uint64((number * GOLDEN + GOLDEN) & WORD))
    return int(key[0])


def uniform(key_S: np.ndarray, position_S: np.ndarray) -> np.ndarray:
    """float64 in (0, 1): number `position` of each stream (splitmix64 with the key as its state).

    >>> uniform(np.array([0], np.uint64), np.array([0])).round(6).tolist()
    [0.883311]
    """
    state = key_S + (position_S.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    return ((_mix(state) >> np.uint64(64 - BITS)).astype(np.float64) + 0.5) / 2.0**BITS


def distribution(logits_SV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """What is sampled from: log-probs [S, C] in float32 at least, and the candidates' token ids (None = all, in order).

    Tokens that top-p cuts have log-prob -inf. With temperature 0 the untempered, uncut distribution.
    """
    wide = torch.promote_types(logits_SV.dtype, torch.float32)
    z_SC, index_SC = logits_SV.to(wide), None
    if sampling.temperature not in (0, 1):
        z_SC = z_SC / sampling.temperature
    if sampling.temperature and 0 < sampling.top_k < z_SC.shape[1]:
        z_SC, index_SC = z_SC.topk(sampling.top_k, -1)
    if sampling.temperature and sampling.top_p < 1:
        if index_SC is None:
            z_SC, index_SC = z_SC.sort(dim=-1, descending=True, stable=True)
        prob_SC = z_SC.double().softmax(-1)
        z_SC = z_SC.masked_fill(prob_SC.cumsum(-1) - prob_SC >= sampling.top_p, -torch.inf)  # the first always stays
    return z_SC.log_softmax(-1), index_SC


def choose(logits_SV: Tensor, sampling: Sampling, uniform_S: Tensor) -> tuple[Tensor, Tensor]:
    """A token [S] for each row and its log-prob [S]: where the uniform number falls in the cumulative distribution."""
    logprob_SC, index_SC = distribution(logits_SV, sampling)
    if sampling.temperature == 0:
        at_S1 = logprob_SC.argmax(-1, keepdim=True)
    else:
        cumulative_SC = logprob_SC.exp().cumsum(-1, dtype=torch.float64)
        at_S1 = torch.searchsorted(cumulative_SC, uniform_S[:, None] * cumulative_SC[:, -1:], right=True)
    token_S1 = at_S1 if index_SC is None else index_SC.gather(-1, at_S1)
    return token_S1[:, 0], logprob_SC.gather(-1, at_S1)[:, 0]


def logprob_of(logits_SV: Tensor, token_S: Tensor, sampling: Sampling) -> Tensor:
    """[S], the log-prob of given tokens; -inf where top-k or top-p leaves a token out."""
    logprob_SC, index_SC = distribution(logits_SV, sampling)
    if index_SC is None:
        return logprob_SC.gather(-1, token_S[:, None])[:, 0]
    return logprob_SC.masked_fill(index_SC != token_S[:, None], -torch.inf).amax(-1)

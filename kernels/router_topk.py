"""Fused choice of experts: scores, the K largest per position, and rows per expert, in one read of the logits.

Only what has no gradient: gates are gathered from the logits by torch, whose autograd knows their gradient.
Axis letters: N positions, E experts, K experts per position.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

SCORES = {"softmax": 1, "topk_softmax": 1, "sigmoid": 2}  # by the router's gate; 0 = the logits themselves
TILE = 2048  # scores of one program


def choose(
    logits_NE: Tensor, top_k: int, *, gate: str, bias_E: Tensor | None = None, counted_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The K experts of largest score + bias, best first, and how many positions chose each expert.

    score = softmax(z) or sigmoid(z). Without a bias the logits themselves are ranked: the same order, fewer ties.

    Args:
        logits_NE: [N, E] float32, E at most 1024.
        top_k, gate: K, 1 to min(E, 16); "softmax", "sigmoid" or "topk_softmax".
        bias_E, counted_N: [E] float32, for the choice alone; [N] bool, and what is not counted still chooses.
    Returns:
        expert_NK int64, distinct within a row, and count_E int64, which sums to K * (counted positions).

    Of equal scores the lowest index comes first, +0 equals -0, NaN ranks above all, and K distinct experts come out of
    any row. `torch.topk` puts NaN first too but promises no order of equals; its scores may differ in the last bit, so
    that near-ties under a bias can go the other way. Counts come from integer atomics: equal bits in every run.
    """
    N, E = logits_NE.shape
    if gate not in SCORES or not 1 <= top_k <= min(E, 16) or E > 1024:
        raise ValueError(f"choose: gate={gate!r}, top_k={top_k}, E={E}; needs 1 <= top_k <= min(E, 16), E <= 1024")
    for t, shape, kind in ((logits_NE, (N, E), "float32"), (bias_E, (E,), "float32"), (counted_N, (N,), "bool")):
        if t is not None and (t.shape != shape or t.dtype != getattr(torch, kind)):
            raise ValueError(f"choose: {t.dtype} {list(t.shape)} where {kind} {list(shape)} is needed")
    logits, bias, counted = (None if t is None else t.contiguous() for t in (logits_NE, bias_E, counted_N))
    expert_NK, count_E = logits_NE.new_empty(N, top_k, dtype=torch.int64), logits_NE.new_zeros(E, dtype=torch.int64)
    wide = max(triton.next_power_of_2(E), 16)
    tile = (E, top_k, 0 if bias is None else SCORES[gate], TILE // wide, wide)
    _choose[(triton.cdiv(N, TILE // wide),)](logits, bias, counted, expert_NK, count_E, N, *tile)
    return expert_NK, count_E


@triton.jit
def _choose(
    logits, bias, counted, expert, count, N,
    E: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    LOWEST: tl.constexpr = -(1 << 60)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    e = tl.arange(0, BLOCK_E)
    real, column = n < N, (e < E)[None, :]
    z = tl.load(logits + tl.minimum(n, N - 1)[:, None] * E + e[None, :], mask=column, other=float("-inf"))
    if SCORE == 1:
        z = tl.exp(z - tl.max(z, 1)[:, None])
        z = z / tl.sum(z, 1)[:, None]
    elif SCORE == 2:
        z = tl.sigmoid(z)
    if bias is not None:
        z += tl.load(bias + e, mask=e < E, other=0.0)[None, :]
    # an integer that sorts as the score does, and below it the index, so that no two are equal
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
    key = tl.where(column, (bits.to(tl.int64) << 10) | (1023 - e)[None, :], LOWEST)
    for k in tl.static_range(K):
        best = tl.max(key, 1)
        tl.store(expert + n * K + k, 1023 - (best & 1023), mask=real)
        key = tl.where(key == best[:, None], LOWEST, key)
    if counted is not None:
        real = real & (tl.load(counted + n, mask=real, other=0) != 0)
    chosen = (key == LOWEST) & column & real[:, None]
    tl.atomic_add(count + e, tl.sum(chosen.to(tl.int64), 0), mask=e < E)

"""Rows into expert order and back, in Triton: a plan without a sort, a gather, and a combine with gates.

`place_NK[n, k]` is the row of choice k of position n, `slot_R[r]` the choice (of the flattened [N*K]) of row r: each
undoes the other, and -1 stands for none. All floats are gathered, none is added by atomics: equal inputs, equal bits.
Rows that no place names, such as the room at the end of a buffer, are never read and may hold NaN.
Axis letters: N positions, K experts per position, R rows, E experts, D width, B blocks of choices.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .grouped_gemm import narrow
from .permute import Sorted

BLOCK = 256  # choices of one program of the plan
TILE = (8, 256)  # rows, columns


def plan_rows(expert_NK: Tensor, experts: int) -> tuple[Sorted, Tensor]:
    """`sort_rows` by counting, and the inverse of its order; the same integers, bit for bit.

    expert_NK is int64. What is outside [0, E) is sent nowhere: its place is -1, and so are position and slot of as many
    rows past offset_E[-1]. Cost: 256 comparisons a choice, and N*K/256 * E integers of scratch. No host read.
    """
    (N, K), flat_R = expert_NK.shape, expert_NK.reshape(-1).contiguous()
    R, rank_R = N * K, torch.empty_like(flat_R)
    count_BE = flat_R.new_zeros(triton.cdiv(R, BLOCK), experts)
    _rank_kernel[(count_BE.shape[0],)](flat_R, rank_R, count_BE, R, experts, BLOCK, 8)
    offset_E = count_BE.sum(0).cumsum(0)
    first_BE = count_BE.cumsum(0) - count_BE + (offset_E - count_BE.sum(0))
    index_R, sent_R = torch.arange(R, device=flat_R.device), (flat_R >= 0) & (flat_R < experts)
    at_R = first_BE.view(-1)[index_R // BLOCK * experts + flat_R.clamp(0, experts - 1)] + rank_R
    slot_R = flat_R.new_full((R + 1,), -1).scatter_(0, torch.where(sent_R, at_R, R), index_R)[:R]
    return Sorted(slot_R // max(K, 1), slot_R, offset_E), torch.where(sent_R, at_R, -1).view(N, K)


def permute(x_ND: Tensor, rows: Sorted, place_NK: Tensor) -> Tensor:
    """[R, D]: row r is x[row_r], zero where that is -1. d x_n = sum_k d row[place_nk], added in float32."""
    if x_ND.shape[0] != place_NK.shape[0]:
        raise ValueError(f"permute: x has {x_ND.shape[0]} positions, the plan {place_NK.shape[0]}")
    return _Sum.apply(x_ND, None, rows.row_R[:, None], place_NK, None)  # type: ignore[no-any-return]


def combine(rows_RD: Tensor, gate_NK: Tensor, rows: Sorted, place_NK: Tensor) -> Tensor:
    """y_n = sum_k gate_nk row[place_nk], added in float32 in the order of k; a place of -1 adds nothing.

    `rows_RD` is float32, bfloat16 or float16, and so is y; the gates may have another of these dtypes.
    Gradients: d row_r = gate dy, zero in rows of no choice; d gate_nk = <dy_n, row>, zero where the place is -1.
    """
    if rows_RD.shape[0] != rows.rows or gate_NK.shape != place_NK.shape:
        shapes = [list(t.shape) for t in (rows_RD, rows.slot_R, gate_NK, place_NK)]
        raise ValueError(f"combine: rows, slots, gates, places of {shapes}; needs [R, D], [R], [N, K], [N, K]")
    return _Sum.apply(rows_RD, gate_NK, place_NK, rows.row_R[:, None], rows.slot_R)  # type: ignore[no-any-return]


def _sum(x: Tensor, gate_NK: Tensor | None, at_NK: Tensor) -> Tensor:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"rows are {x.dtype}; needs float32, bfloat16 or float16")
    (N, K), D = at_NK.shape, x.shape[1]
    args = [None if t is None else t.contiguous() for t in (x, gate_NK, at_NK)]
    out = x.new_empty(N, D)
    _sum_kernel[(triton.cdiv(N, TILE[0]), triton.cdiv(D, TILE[1]))](*args, out, N, D, K, *TILE)
    return out


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, gate_NK, at_NK, back, slot_R):
        ctx.save_for_backward(x if gate_NK is not None else None, gate_NK, at_NK, back, slot_R)
        return _sum(x, gate_NK, at_NK)

    @staticmethod
    def backward(ctx: Any, dy_ND):
        x, gate_NK, at_NK, back, slot_R = ctx.saved_tensors
        if gate_NK is None:
            return _sum(dy_ND, None, back), None, None, None, None
        gate_R1 = F.pad(gate_NK.reshape(-1), (0, 1))[slot_R][:, None]  # slot -1 reads the padding
        (N, K), D, dgate_NK = at_NK.shape, x.shape[1], gate_NK.new_empty(gate_NK.shape)
        args = [t.contiguous() for t in (x, dy_ND, at_NK)]
        _dgate_kernel[(triton.cdiv(N, TILE[0]), K)](*args, dgate_NK, N, D, K, *TILE)
        return _sum(dy_ND, gate_R1, back), dgate_NK, None, None, None


@triton.jit
def _rank_kernel(expert, rank, count, R, E, BLOCK: tl.constexpr, PART: tl.constexpr):
    """How many choices of this block have the same expert: earlier ones into `rank`, all into `count`."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(expert + r, mask=r < R, other=-1)
    before, every = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for part in range(0, BLOCK, PART):
        j = tl.program_id(0) * BLOCK + part + tl.arange(0, PART)
        same = e[:, None] == tl.load(expert + j, mask=j < R, other=-1)[None, :]
        every += tl.sum(same.to(tl.int32), 1)
        before += tl.sum((same & (j[None, :] < r[:, None])).to(tl.int32), 1)
    tl.store(rank + r, before.to(tl.int64), mask=r < R)
    at = tl.program_id(0).to(tl.int64) * E + e
    tl.store(count + at, every.to(tl.int64), mask=(e >= 0) & (e < E))  # all of an expert write the same number


@triton.jit
def _sum_kernel(x, gate, place, out, N, D, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for k in tl.static_range(K):
        at = tl.load(place + n * K + k, mask=n < N, other=-1)
        tile = tl.load(x + at[:, None] * D + d, mask=(at >= 0)[:, None] & (d < D), other=0.0).to(tl.float32)
        if gate is not None:
            tile *= tl.load(gate + n * K + k, mask=at >= 0, other=0.0).to(tl.float32)[:, None]
        total += tile
    tl.store(out + n[:, None] * D + d, narrow(total, out.dtype.element_ty), mask=(n < N)[:, None] & (d < D))


@triton.jit
def _dgate_kernel(rows, dy, place, dgate, N, D, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    at = tl.load(place + n * K + tl.program_id(1), mask=n < N, other=-1)
    total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)[None, :]
        real = (at >= 0)[:, None] & (d < D)
        row = tl.load(rows + at[:, None] * D + d, mask=real, other=0.0).to(tl.float32)
        total += row * tl.load(dy + n[:, None] * D + d, mask=real, other=0.0).to(tl.float32)
    tl.store(dgate + n * K + tl.program_id(1), narrow(tl.sum(total, 1), dgate.dtype.element_ty), mask=n < N)

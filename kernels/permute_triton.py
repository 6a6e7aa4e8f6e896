"""Rows into expert order and back, in Triton: a plan without a sort, a gather, and a combine with gates.

`place_NK[n, k]` is the row of choice k of position n, `slot_R[r]` the choice (of the flattened [N*K]) of row r: each
undoes the other, and -1 stands for none. All floats are gathered, none is added by atomics: equal inputs, equal bits.
Rows that no place names, such as the room at the end of a buffer, are never read and may hold NaN.

Axis letters: N positions, K experts per position, R rows, E experts, D width, B blocks of choices.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .permute import Sorted

BLOCK = 256  # choices of one program of the plan
TILE = (8, 256)  # rows, columns


def plan_rows(expert_NK: Tensor, experts: int) -> tuple[Sorted, Tensor]:
    """`sort_rows` by counting, and the inverse of its order; the same integers, bit for bit.

    Args:
        expert_NK: [N, K] int64; what is outside [0, E) is sent nowhere.

    Returns:
        N*K rows, those past offset_E[-1] with position and slot -1; and place_NK, -1 for what is sent nowhere.

    Cost: 256 comparisons a choice, and N*K/256 * E integers of scratch. No host read.
    """
    (N, K), flat_R = expert_NK.shape, expert_NK.reshape(-1).contiguous()
    R, rank_R = N * K, torch.empty_like(flat_R)
    count_BE = flat_R.new_zeros(triton.cdiv(R, BLOCK), experts)
    _rank[(count_BE.shape[0],)](flat_R, rank_R, count_BE, R, experts, BLOCK, 32)
    count_E = count_BE.sum(0)
    offset_E = count_E.cumsum(0)
    first_BE = count_BE.cumsum(0) - count_BE + (offset_E - count_E)
    index_R, sent_R = torch.arange(R, device=flat_R.device), (flat_R >= 0) & (flat_R < experts)
    at_R = first_BE.view(-1)[index_R // BLOCK * experts + flat_R.clamp(0, experts - 1)] + rank_R
    slot_R = flat_R.new_full((R + 1,), -1).scatter_(0, torch.where(sent_R, at_R, R), index_R)[:R]
    return Sorted(slot_R // max(K, 1), slot_R, offset_E), torch.where(sent_R, at_R, -1).view(N, K)


def permute(x_ND: Tensor, slot_R: Tensor, place_NK: Tensor) -> Tensor:
    """[R, D]: row r is x[slot_r // K], zero where slot_r = -1. d x_n = sum_k d row[place_nk], added in float32."""
    return _Permute.apply(x_ND, slot_R, place_NK)  # type: ignore[no-any-return]


def combine(rows_RD: Tensor, gate_NK: Tensor, slot_R: Tensor, place_NK: Tensor) -> Tensor:
    """y_n = sum_k gate_nk row[place_nk], added in float32 in the order of k; a place of -1 adds nothing.

    Args:
        rows_RD: [R, D] float32, bfloat16 or float16; y has this dtype. The gates may have another.
        slot_R, place_NK: int64, as `plan_rows` makes them.

    Gradients: d row_r = gate dy, zero in rows of no choice; d gate_nk = <dy_n, row>, zero where the place is -1.
    """
    return _Combine.apply(rows_RD, gate_NK, slot_R, place_NK)  # type: ignore[no-any-return]


def _run(kernel: Any, x: Tensor, gate_NK: Tensor | None, index: Tensor, rows: int, K: int) -> Tensor:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or index.dtype != torch.int64:
        raise ValueError(f"rows are {x.dtype}, indices {index.dtype}; needs float32, bfloat16 or float16, and int64")
    D, out = x.shape[1], x.new_empty(rows, x.shape[1])
    x, gate_NK, index = x.contiguous(), None if gate_NK is None else gate_NK.contiguous(), index.contiguous()
    kernel[(triton.cdiv(rows, TILE[0]), triton.cdiv(D, TILE[1]))](x, gate_NK, index, out, rows, D, K, *TILE)
    return out


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND, slot_R, place_NK):
        if x_ND.shape[0] != place_NK.shape[0]:
            raise ValueError(f"permute: x has {x_ND.shape[0]} positions, the plan {place_NK.shape[0]}")
        ctx.save_for_backward(place_NK)
        return _run(_gather, x_ND, None, slot_R, slot_R.shape[0], place_NK.shape[1])

    @staticmethod
    def backward(ctx: Any, drows_RD):  # pyright: ignore[reportIncompatibleMethodOverride]
        (place_NK,) = ctx.saved_tensors
        return _run(_sum, drows_RD, None, place_NK, *place_NK.shape), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD, gate_NK, slot_R, place_NK):
        if rows_RD.shape[0] != slot_R.shape[0] or gate_NK.shape != place_NK.shape:
            shapes = [list(t.shape) for t in (rows_RD, gate_NK, slot_R, place_NK)]
            raise ValueError(f"combine: rows, gates, slots, places of {shapes}; needs [R, D], [N, K], [R], [N, K]")
        ctx.save_for_backward(rows_RD, gate_NK, slot_R, place_NK)
        return _run(_sum, rows_RD, gate_NK, place_NK, *place_NK.shape)

    @staticmethod
    def backward(ctx: Any, dy_ND):  # pyright: ignore[reportIncompatibleMethodOverride]
        rows_RD, gate_NK, slot_R, place_NK = (t.contiguous() for t in ctx.saved_tensors)
        (N, K), dgate_NK, dy_ND = place_NK.shape, torch.empty_like(gate_NK), dy_ND.contiguous()
        _dgate[(triton.cdiv(N, TILE[0]), K)](rows_RD, dy_ND, place_NK, dgate_NK, N, dy_ND.shape[1], K, *TILE)
        return _run(_gather, dy_ND, gate_NK, slot_R, slot_R.shape[0], K), dgate_NK, None, None


@triton.jit
def _rank(expert, rank, count, R, E, BLOCK: tl.constexpr, PART: tl.constexpr):
    """How many choices of this block have the same expert: earlier ones into `rank`, all into `count`."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(expert + r, mask=r < R, other=-1)
    before, every = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    for part in range(0, BLOCK, PART):
        j = tl.program_id(0) * BLOCK + part + tl.arange(0, PART)
        same = e[:, None] == tl.load(expert + j, mask=j < R, other=-1)[None, :]
        every += tl.sum(same.to(tl.int32), 1)
        before += tl.sum((same & (j[None, :] < r[:, None])).to(tl.int32), 1)
    tl.store(rank + r, before, mask=r < R)
    at = tl.program_id(0).to(tl.int64) * E + e
    tl.store(count + at, every, mask=(e >= 0) & (e < E))  # all choices of an expert write the same number


@triton.jit
def _gather(x, gate, slot, out, R, D, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    r = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    s = tl.load(slot + r, mask=r < R, other=-1)
    tile = tl.load(x + (s // K)[:, None] * D + d, mask=(s >= 0)[:, None] & (d < D), other=0.0)
    if gate is not None:
        tile = tile.to(tl.float32) * tl.load(gate + s, mask=s >= 0, other=0.0).to(tl.float32)[:, None]
    tl.store(out + r.to(tl.int64)[:, None] * D + d, tile, mask=(r < R)[:, None] & (d < D))


@triton.jit
def _sum(rows, gate, place, out, N, D, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for k in tl.static_range(K):
        at = tl.load(place + n * K + k, mask=n < N, other=-1)
        tile = tl.load(rows + at[:, None] * D + d, mask=(at >= 0)[:, None] & (d < D), other=0.0).to(tl.float32)
        if gate is not None:
            tile *= tl.load(gate + n * K + k, mask=at >= 0, other=0.0).to(tl.float32)[:, None]
        total += tile
    tl.store(out + n[:, None] * D + d, total, mask=(n < N)[:, None] & (d < D))


@triton.jit
def _dgate(rows, dy, place, dgate, N, D, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    at = tl.load(place + n * K + tl.program_id(1), mask=n < N, other=-1)
    total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)[None, :]
        real = (at >= 0)[:, None] & (d < D)
        row = tl.load(rows + at[:, None] * D + d, mask=real, other=0.0).to(tl.float32)
        total += row * tl.load(dy + n[:, None] * D + d, mask=real, other=0.0).to(tl.float32)
    tl.store(dgate + n * K + tl.program_id(1), tl.sum(total, 1), mask=n < N)


_TYPES = dict.fromkeys(("x", "rows", "dy", "out"), "*bf16:16") | dict.fromkeys(("gate", "dgate"), "*fp32:16")
_TYPES |= dict.fromkeys(("expert", "rank", "count", "slot", "place"), "*i64:16")
_TYPES |= {"N": "i32", "R": "i32", "E": "i32", "D": "i32:16"}
_SIZES = {"K": 8, "BLOCK_N": TILE[0], "BLOCK_D": TILE[1]}
AOT: list[Any] = [("plan rank", _rank, _TYPES, {"BLOCK": BLOCK, "PART": 32}, 4, 3)]
AOT += [(n, f, _TYPES, _SIZES, 4, 3) for n, f in (("permute", _gather), ("combine", _sum), ("combine dgate", _dgate))]

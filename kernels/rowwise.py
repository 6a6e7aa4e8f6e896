"""Rows written to, and read from, the memory of other GPUs by their addresses: one-sided, no collective.

The addresses are those of torch symmetric memory: `torch.tensor(handle.buffer_ptrs, device=...)`, plus the bytes before
the window. Nothing here waits: a put is seen by its owner after `handle.barrier()`, and a get must come after one.

Axis letters: W ranks, R rows sent or fetched, D width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = (4, 512)  # rows, columns
PROGRAMS = 512  # at most; enough to fill a link, few enough to leave the matrix units to others


def put(rows: Tensor, peer_W: Tensor, rank_R: Tensor, row_R: Tensor, *, copies: int = 1) -> None:
    """buffer of rank_r, row row_r := rows[r // copies]. A negative row_r is not sent.

    Args:
        rows: [R / copies, D], contiguous. With `copies` = K the K choices of a position are sent from its one row.
        peer_W: [W] int64 on the device, where each rank's buffer of rows [room, D] in the dtype of `rows` begins.
        rank_R, row_R: [R] int64, 0 <= rank < W, row < room, no two alike: what is at an address is not checked.
    """
    _launch(rows, peer_W, rank_R, row_R, copies, False)


def get(out_RD: Tensor, peer_W: Tensor, rank_R: Tensor, row_R: Tensor) -> Tensor:
    """out[r] := row row_r of the buffer of rank_r, zero where row_r is negative; returns `out_RD` (contiguous)."""
    _launch(out_RD, peer_W, rank_R, row_R, 1, True)
    return out_RD


def _launch(near: Tensor, peer_W: Tensor, rank_R: Tensor, row_R: Tensor, copies: int, fetch: bool) -> None:
    R, kinds = rank_R.shape[0], {peer_W.dtype, rank_R.dtype, row_R.dtype}
    fits = near.dim() == 2 and near.shape[0] * copies == R and rank_R.shape == row_R.shape == (R,)
    if not fits or not near.is_contiguous() or kinds != {torch.int64}:
        raise ValueError(
            f"rowwise: rows {tuple(near.shape)} x {copies}, ranks {tuple(rank_R.shape)}, destination rows "
            f"{tuple(row_R.shape)}, indices {kinds}; needs contiguous [R / copies, D], [R], [R], all int64"
        )
    D = near.shape[1]
    wide = D * near.element_size() % 16 == 0  # all rows begin at 16 bytes, if the buffers do (symmetric memory does)
    grid = (min(triton.cdiv(R, TILE[0]), PROGRAMS),)
    args = (near, peer_W.contiguous(), rank_R.contiguous(), row_R.contiguous(), R, D)
    _move[grid](*args, copies, fetch, wide, *TILE)


@triton.jit
def _move(
    near, peer, rank, row, R, D,
    COPIES: tl.constexpr, FETCH: tl.constexpr, WIDE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    for start in range(tl.program_id(0) * BLOCK_R, R, tl.num_programs(0) * BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        at = tl.load(row + r, mask=r < R, other=-1)
        address = tl.load(peer + tl.load(rank + r, mask=at >= 0, other=0), mask=at >= 0, other=0)
        far = (address + at * D * (near.dtype.element_ty.primitive_bitwidth // 8))[:, None]
        far = far.to(tl.pointer_type(near.dtype.element_ty))
        if WIDE:
            far = tl.multiple_of(far, (16, 1))
        own = near + (r // COPIES).to(tl.int64)[:, None] * D
        for first in range(0, D, BLOCK_D):
            d = first + tl.arange(0, BLOCK_D)[None, :]
            moved = (at >= 0)[:, None] & (d < D)
            if FETCH:
                tl.store(own + d, tl.load(far + d, mask=moved, other=0.0), mask=(r < R)[:, None] & (d < D))
            else:
                tl.store(far + d, tl.load(own + d, mask=moved), mask=moved)


_TYPES = {"near": "*bf16:16", "peer": "*i64:16", "rank": "*i64:16", "row": "*i64:16", "R": "i32", "D": "i32:16"}
AOT = [
    (name, _move, _TYPES, {"COPIES": c, "FETCH": f, "WIDE": True, "BLOCK_R": TILE[0], "BLOCK_D": TILE[1]}, 4, 3)
    for name, c, f in (("rowwise put", 8, False), ("rowwise get", 1, True))
]

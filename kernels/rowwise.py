"""Rows written to, and read from, the memory of other GPUs by their addresses: one-sided, no collective.

The addresses are those of torch symmetric memory: `torch.tensor(handle.buffer_ptrs, device=...)`, plus the bytes before
the window, a multiple of 16. Nothing here waits: a put is seen after `handle.barrier()`, a get must come after one.
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
    R, D, kinds = rank_R.shape[0], near.shape[-1], {peer_W.dtype, rank_R.dtype, row_R.dtype}
    fits = near.dim() == 2 and near.shape[0] * copies == R and rank_R.shape == row_R.shape == (R,)
    if not fits or not near.is_contiguous() or kinds != {torch.int64}:
        raise ValueError(f"rowwise: {list(near.shape)} x {copies}, {R}; needs contiguous [R / copies, D] and int64 [R]")
    wide = D * near.element_size() % 16 == 0  # all rows begin at 16 bytes, if the buffers do (symmetric memory does)
    args = (near, *(t.contiguous() for t in (peer_W, rank_R, row_R)), R, D, copies, fetch, wide, *TILE)
    _move[(min(triton.cdiv(R, TILE[0]), PROGRAMS),)](*args)


@triton.jit
def _move(
    near, peer, rank, row, R, D,
    COPIES: tl.constexpr, FETCH: tl.constexpr, WIDE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    for start in range(tl.program_id(0) * BLOCK_R, R, tl.num_programs(0) * BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        at = tl.load(row + r, mask=r < R, other=-1)
        address = tl.load(peer + tl.load(rank + r, mask=at >= 0, other=0), mask=at >= 0, other=0)
        far = address[:, None].to(near.dtype) + at[:, None] * D
        if WIDE:
            far = tl.multiple_of(far, (16, 16))
        own = near + (r // COPIES).to(tl.int64)[:, None] * D
        for first in range(0, D, BLOCK_D):
            d = first + tl.arange(0, BLOCK_D)[None, :]
            moved = (at >= 0)[:, None] & (d < D)
            if FETCH:
                tl.store(own + d, tl.load(far + d, mask=moved, other=0.0), mask=(r < R)[:, None] & (d < D))
            else:
                tl.store(far + d, tl.load(own + d, mask=moved), mask=moved)

"""MXFP8 in Triton: quantise along rows, columns or both in one pass, and the block-scaled grouped matmul.

Every byte is that of `mxfp8.py`: codes and scales are made with integer arithmetic. On sm_100 `tl.dot_scaled` runs on
the block-scaled matrix unit; on sm_90 Triton reads codes back into bfloat16 and multiplies there: the same numbers,
save scales at the ends of bfloat16's range. The interpreter has no scaled dot: there codes are read back into float32.

Axis letters: R rows in expert order, K contraction axis, M outputs, E experts.
"""

import math
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .grouped_gemm import INTERPRET, _programs, narrow
from .mxfp8 import BLOCK, Mode, Quantised


@triton.jit
def _encode(x, FLOOR: tl.constexpr, P: tl.constexpr, Q: tl.constexpr):
    """Codes [P, Q] and scales [P, Q / 32] of a float32 tile, blocks along the second axis."""
    x = tl.reshape(x, [P, Q // 32, 32])
    bits = x.to(tl.int32, bitcast=True)
    amax = tl.max(bits & 0x7FFFFFFF, 2)  # as integers: NaN > infinity > finite
    scale = (amax >> 23) - 8
    if not FLOOR:
        scale += ((amax & 0x7FFFFF) > 0x600000).to(tl.int32)
    scale = tl.maximum(scale, 0)
    scale = tl.where(amax == 0x7F800000, 254, scale)
    scale = tl.where(amax > 0x7F800000, 255, scale)
    power = tl.where(scale == 0, 127, tl.where(scale >= 254, 1, 254 - scale)) << 23
    y = x * power.to(tl.float32, bitcast=True)[:, :, None]
    y = tl.where((scale == 254)[:, :, None], y * 0.5, y)  # 2^-127 in two steps: as one number it is a subnormal
    size = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960  # 3 bits stay; exponent bias 127 -> 7
    small = (tl.abs(y) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # in steps of 2^-9, rounded by the adder
    code = tl.minimum(tl.where(size < 0x3C800000, small, normal), 0x7E) | ((bits >> 24) & 0x80)
    code = tl.where((scale == 255)[:, :, None], 0x7F, code)
    return tl.reshape(code, [P, Q]).to(tl.uint8), scale.to(tl.uint8)


@triton.jit
def _decode(code, scale, P: tl.constexpr, Q: tl.constexpr):
    """float32 [P, Q] of a tile of codes; the interpreter's stand-in for the scaled dot."""
    s = scale.to(tl.int32)
    power = tl.where(s == 0, 0x400000, tl.where(s == 255, 0x7FC00000, s << 23)).to(tl.float32, bitcast=True)
    value = tl.reshape(code.to(tl.float8e4nv, bitcast=True).to(tl.float32), [P, Q // 32, 32])
    return tl.reshape(value * power[:, :, None], [P, Q])


@triton.jit
def _quantise_kernel(
    x_ptr, code_ptr, scale_ptr, turned_ptr, turned_scale_ptr, R, K, x_batch, x_row, x_col,
    FLOOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of one matrix; rows past R are zeros, and are stored for columns up to a multiple of 32."""
    across, batch = tl.cdiv(K, BLOCK_K), tl.program_id(1).to(tl.int64)
    r = tl.program_id(0) // across * BLOCK_R + tl.arange(0, BLOCK_R)
    k = tl.program_id(0) % across * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (r < R)[:, None] & (k < K)[None, :]
    at = x_ptr + batch * x_batch + r.to(tl.int64)[:, None] * x_row + k.to(tl.int64)[None, :] * x_col
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if ROWS:
        code, scale = _encode(x, FLOOR, BLOCK_R, BLOCK_K)
        row = batch * R + r
        tl.store(code_ptr + row[:, None] * K + k[None, :], code, mask=inside)
        b = tl.program_id(0) % across * (BLOCK_K // 32) + tl.arange(0, BLOCK_K // 32)
        tl.store(scale_ptr + row[:, None] * (K // 32) + b, scale, mask=(r < R)[:, None] & (b < K // 32)[None, :])
    if COLUMNS:
        blocks = tl.cdiv(R, 32)
        code, scale = _encode(tl.trans(x), FLOOR, BLOCK_K, BLOCK_R)
        row = batch * K + k
        there = (k < K)[:, None] & (r < blocks * 32)[None, :]
        tl.store(turned_ptr + row[:, None] * (blocks * 32) + r[None, :], code, mask=there)
        b = tl.program_id(0) // across * (BLOCK_R // 32) + tl.arange(0, BLOCK_R // 32)
        tl.store(turned_scale_ptr + row[:, None] * blocks + b, scale, mask=(k < K)[:, None] & (b < blocks)[None, :])


@triton.jit
def _scaled_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, y_ptr, offset_ptr, R, M, K, E,
    EXPERTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y_r = x_r @ w_e.T, persistent; the room, rows from offset[E - 1] to R, is one more group with an empty sum."""
    at_E = tl.arange(0, EXPERTS)  # more than E, so that the room has a place
    stop_E = tl.load(offset_ptr + at_E, mask=at_E < E, other=0).to(tl.int32)
    stop_E = tl.where(at_E == E, R, stop_E)
    start_E = tl.load(offset_ptr + at_E - 1, mask=(at_E > 0) & (at_E <= E), other=0).to(tl.int32)
    end_E = tl.cumsum((stop_E - start_E + BLOCK_R - 1) // BLOCK_R, 0)
    across = tl.cdiv(M, BLOCK_M)
    for tile in range(tl.program_id(0), tl.max(end_E) * across, tl.num_programs(0)):
        down, col = tile // across, tile % across
        e = tl.sum((end_E <= down).to(tl.int32))
        before = tl.max(tl.where(at_E < e, end_E, 0))
        start = tl.sum(tl.where(at_E == e, start_E, 0))
        stop = tl.sum(tl.where(at_E == e, stop_E, 0))
        r = start + (down - before) * BLOCK_R + tl.arange(0, BLOCK_R)
        m = col * BLOCK_M + tl.arange(0, BLOCK_M)
        k, b = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // 32)
        here, row, out = (r < stop) & (e < E), r.to(tl.int64), e.to(tl.int64) * M + m
        acc = tl.zeros((BLOCK_R, BLOCK_M), tl.float32)
        for at in range(0, tl.where(e < E, K, 0), BLOCK_K):
            near, near_b = (at + k < K)[None, :], (at // 32 + b < K // 32)[None, :]
            wide = (m < M)[:, None]
            x = tl.load(x_ptr + row[:, None] * K + at + k[None, :], mask=here[:, None] & near, other=0)
            w = tl.load(w_ptr + out[:, None] * K + at + k[None, :], mask=wide & near, other=0)
            x_at = x_scale_ptr + row[:, None] * (K // 32) + at // 32 + b[None, :]
            w_at = w_scale_ptr + out[:, None] * (K // 32) + at // 32 + b[None, :]
            x_scale = tl.load(x_at, mask=here[:, None] & near_b, other=127)
            w_scale = tl.load(w_at, mask=wide & near_b, other=127)
            if INTERPRET:
                w32 = _decode(w, w_scale, BLOCK_M, BLOCK_K)
                acc = tl.dot(_decode(x, x_scale, BLOCK_R, BLOCK_K), tl.trans(w32), acc, input_precision="ieee")
            else:
                acc = tl.dot_scaled(x, x_scale, "e4m3", tl.trans(w), w_scale, "e4m3", acc)
        y_at = y_ptr + row[:, None] * M + m[None, :]
        tl.store(y_at, narrow(acc, y_ptr.dtype.element_ty), mask=(r < stop)[:, None] & (m < M)[None, :])


def _launch(x: Tensor, mode: Mode = "ceil", *, rows: bool, columns: bool) -> Any:
    """[..., R, K] -> `mxfp8.quantise`, `quantise_columns` or both, x being read once; 1.03 bytes an element each."""
    if (rows and x.shape[-1] % BLOCK) or mode not in ("ceil", "floor"):
        raise ValueError(f"quantise: {tuple(x.shape)} along the last axis must be a multiple of {BLOCK}, mode={mode!r}")
    x = x.detach().float() if x.dtype == torch.float64 else x.detach()
    *lead, R, K = x.shape
    flat, tall = x.reshape(math.prod(lead), R, K), -(-R // BLOCK) * BLOCK
    room = lambda *shape: x.new_empty(*lead, *shape, dtype=torch.uint8)
    code, scale = (room(R, K), room(R, K // BLOCK)) if rows else (None, None)
    turned, turned_scale = (room(K, tall), room(K, tall // BLOCK)) if columns else (None, None)
    block_r, block_k = (64, 64) if columns else (16, 256)
    if x.numel():
        _quantise_kernel[triton.cdiv(tall if columns else R, block_r) * triton.cdiv(K, block_k), flat.shape[0]](
            flat, code, scale, turned, turned_scale, R, K, *flat.stride(),
            FLOOR=mode == "floor", ROWS=rows, COLUMNS=columns, BLOCK_R=block_r, BLOCK_K=block_k, num_warps=4,
        )  # fmt: skip
    pairs = ((code, scale), (turned, turned_scale))
    found = [Quantised(c.view(torch.float8_e4m3fn), s, mode) for c, s in pairs if c is not None and s is not None]
    return found if rows and columns else found[0]


quantise = partial(_launch, rows=True, columns=False)
quantise_columns = partial(_launch, rows=False, columns=True)
quantise_both = partial(_launch, rows=True, columns=True)


def grouped_mm(x: Quantised, w: Quantised, offset_E: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`mxfp8.grouped_mm`; no host read. An expert of n rows costs ceil(n / 128) tiles."""
    (R, K), (E, M, _) = x.code.shape, w.code.shape
    if w.code.shape[-1] != K or E != offset_E.shape[0] or not (x.code.is_contiguous() and w.code.is_contiguous()):
        raise ValueError(f"grouped_mm: x {tuple(x.code.shape)}, w {tuple(w.code.shape)}, {offset_E.shape[0]} experts")
    y = torch.empty(R, M, dtype=dtype, device=x.code.device)
    if R and M:
        _scaled_kernel[(_programs(y.device),)](
            x.code.view(torch.uint8), x.scale, w.code.view(torch.uint8), w.scale, y, offset_E, R, M, K, E,
            EXPERTS=triton.next_power_of_2(E + 1), **TILE, num_warps=8, num_stages=3,
        )  # fmt: skip
    return y


# a depth of 128 spills on sm_90; 64 rows lose the block-scaled unit on sm_100
TILE = {"BLOCK_R": 128, "BLOCK_M": 128, "BLOCK_K": 64}

"""Grouped matrix products in Triton: rows in expert order times their expert's weight, and the weight's gradient.

One kernel does forward and dgrad (w and its transpose differ by strides only), one does wgrad. Both are persistent: a
fixed number of programs walks all tiles, and a tile finds its expert by a search over the device offsets, so the host
reads nothing. Rows at and past offset_E[-1] (the room) are never read, and may hold NaN.

Fused where it pays: gathering rows on load (x is never copied to expert order: saves writing and reading R*D numbers)
and scattering on store. A weighted combine in the epilogue is left out: K choices of a position end in different tiles,
so it takes float32 atomics, whose order changes from run to run, and K read-modify-writes of 4 bytes where the scatter
writes 2. The gates multiply the activation instead (`swiglu.py`), and K scattered rows of a position are then added.

Axis letters: R routed rows, E experts, K and M input and output width of a product, S rows of the scattered output.
"""
# pyright: reportArgumentType=false, reportCallIssue=false
# (a launch takes plain values where the kernel says tl.constexpr, and num_warps, which it does not name)

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from .tuning import Tile, gemm_tile, weight_tile

INTERPRET = tl.constexpr(knobs.runtime.interpret)  # its bfloat16 products are wrong: multiply in float32 there


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b in float32."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def narrow(x, kind: tl.constexpr):
    """x in dtype `kind`, to the nearest; the interpreter would cut bfloat16 off towards zero."""
    if INTERPRET and kind == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(kind)


@triton.jit(do_not_specialize=["R"])
def _rows_kernel(
    x_ptr, w_ptr, y_ptr, offset_ptr, row_ptr, place_ptr,
    R, M, K, E, x_row, x_col, w_expert, w_out, w_in, y_row, y_col,
    EXPERTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, CLEAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y[place[r]] = x[row[r]] @ w[e].T; with CLEAR the room is one more group, whose product has no terms."""
    at_E = tl.arange(0, EXPERTS)  # more than E, so that the room has a place
    stop_E = tl.load(offset_ptr + at_E, mask=at_E < E, other=0)
    last = tl.max(stop_E)
    stop_E = tl.where(at_E < E, stop_E, tl.where(at_E == E, R if CLEAR else last, 0))
    start_E = tl.where(at_E == 0, 0, tl.load(offset_ptr + at_E - 1, mask=(at_E > 0) & (at_E <= E), other=0))
    tiles_E = tl.maximum(stop_E - start_E, 0) // BLOCK_R + (tl.maximum(stop_E - start_E, 0) % BLOCK_R > 0)
    end_E = tl.cumsum(tiles_E.to(tl.int32), 0)
    across = tl.cdiv(M, BLOCK_M)
    for tile in range(tl.program_id(0), tl.max(end_E) * across, tl.num_programs(0)):
        down, col = tile // across, tile % across
        e = tl.sum((end_E <= down).to(tl.int32))
        before = tl.max(tl.where(at_E < e, end_E, 0))
        start = tl.sum(tl.where(at_E == e, start_E, 0)).to(tl.int32)
        stop = tl.sum(tl.where(at_E == e, stop_E, 0)).to(tl.int32)
        r = start + (down - before) * BLOCK_R + tl.arange(0, BLOCK_R)
        m = col * BLOCK_M + tl.arange(0, BLOCK_M)
        k = tl.arange(0, BLOCK_K)
        here = r < stop
        full = (r < stop) & (e < E)
        source = tl.load(row_ptr + r, mask=full, other=0) if GATHER else r
        x_at = x_ptr + source.to(tl.int64)[:, None] * x_row + k[None, :] * x_col
        w_at = w_ptr + e.to(tl.int64) * w_expert + m.to(tl.int64)[None, :] * w_out + k[:, None] * w_in
        acc = tl.zeros((BLOCK_R, BLOCK_M), tl.float32)
        for left in range(tl.where(e < E, K, 0), 0, -BLOCK_K):
            a = tl.load(x_at, mask=full[:, None] & (k < left)[None, :], other=0.0)
            b = tl.load(w_at, mask=(m < M)[None, :] & (k < left)[:, None], other=0.0)
            acc = _dot(a, b, acc, PRECISION)
            x_at += BLOCK_K * x_col
            w_at += BLOCK_K * w_in
        place = tl.load(place_ptr + r, mask=here, other=0) if SCATTER else r
        y_at = y_ptr + place.to(tl.int64)[:, None] * y_row + m[None, :] * y_col
        tl.store(y_at, narrow(acc, y_ptr.dtype.element_ty), mask=here[:, None] & (m < M)[None, :])


@triton.jit
def _weight_kernel(
    dy_ptr, x_ptr, dw_ptr, offset_ptr, dy_row_ptr, x_row_ptr,
    M, K, E, dy_row, dy_col, x_row, x_col, w_expert, w_out, w_in,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    GATHER_DY: tl.constexpr, GATHER_X: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dw[e] (+)= dy_e.T @ x_e: a tile of the weight sums over all rows of its expert, so its order is fixed."""
    across = tl.cdiv(K, BLOCK_K)
    tiles = tl.cdiv(M, BLOCK_M) * across
    for tile in range(tl.program_id(0), tiles * E, tl.num_programs(0)):
        e, inside = tile // tiles, tile % tiles
        start = tl.load(offset_ptr + e - 1, mask=e > 0, other=0).to(tl.int32)
        stop = tl.load(offset_ptr + e).to(tl.int32)
        m = (inside // across) * BLOCK_M + tl.arange(0, BLOCK_M)
        k = (inside % across) * BLOCK_K + tl.arange(0, BLOCK_K)
        inner = (m < M)[:, None] & (k < K)[None, :]
        w_at = dw_ptr + tl.cast(e, tl.int64) * w_expert + m.to(tl.int64)[:, None] * w_out + k[None, :] * w_in
        if ADD:  # the sum starts from what is there: adding at the end would hold two tiles in registers
            acc = tl.load(w_at, mask=inner, other=0.0).to(tl.float32)
        else:
            acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
        for first in range(start, stop, BLOCK_R):
            r = first + tl.arange(0, BLOCK_R)
            dy_r = tl.load(dy_row_ptr + r, mask=r < stop, other=0) if GATHER_DY else r
            x_r = tl.load(x_row_ptr + r, mask=r < stop, other=0) if GATHER_X else r
            dy_at = dy_ptr + dy_r.to(tl.int64)[:, None] * dy_row + m[None, :] * dy_col
            x_at = x_ptr + x_r.to(tl.int64)[:, None] * x_row + k[None, :] * x_col
            dy = tl.load(dy_at, mask=(r < stop)[:, None] & (m < M)[None, :], other=0.0)
            x = tl.load(x_at, mask=(r < stop)[:, None] & (k < K)[None, :], other=0.0)
            acc = _dot(tl.trans(dy), x, acc, PRECISION)
        tl.store(w_at, narrow(acc, dw_ptr.dtype.element_ty), mask=inner)


@cache
def _programs(device: torch.device) -> int:
    """One a multiprocessor; 3 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def _check(name: str, precision: str | None, *tensors: Tensor) -> str:
    """The precision in force."""
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    if any(t.dtype != tensors[0].dtype or t.dtype not in kinds for t in tensors):
        raise ValueError(f"{name}: dtypes {[str(t.dtype) for t in tensors]}; they must be equal and one of {kinds}")
    if precision not in ("ieee", "tf32", None):
        raise ValueError(f"{name}: precision {precision!r} does not exist; choose 'ieee' or 'tf32'")
    return precision or ("tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee")


def grouped_gemm(
    x: Tensor,
    w_EMK: Tensor,
    offset_E: Tensor,
    row_R: Tensor | None = None,
    place_R: Tensor | None = None,
    out: Tensor | None = None,
    clear: bool = False,
    precision: str | None = None,
    programs: int | None = None,
    tile: Tile | None = None,
) -> Tensor:
    r"""Each row times its expert's weight.

    y[place_r] = w_e @ x[row_r],  e = the first with r < offset_e

    Args:
        x: [N, K], any strides; float32, bfloat16 or float16.
        w_EMK: [E, M, K], any strides: `w.mT` gives dgrad, dx_r = dy_r @ w_e.
        offset_E: [E] int64 or int32, where the rows of each expert end.
        row_R: [R] positions that rows copy; None = x is in expert order and R = N.
        place_R: [R] where results go, all different; None = r.
        out: [S, M] to write into; None = new, S = R. Made by the caller when place_R leaves rows of it out.
        clear: write zero to the results of the room; otherwise they are not written.
        precision: of float32 products: "ieee" or "tf32"; None = as torch's matmul (not TF32 unless asked for there).
        programs: how many walk the tiles; None = one a multiprocessor.

    Cost: R*M*K multiply-adds, summed in float32; no host read. An expert of n rows costs ceil(n / tile rows) tiles.
    """
    (N, K), (E, M, _) = x.shape, w_EMK.shape
    R = N if row_R is None else row_R.shape[0]
    precision = _check("grouped_gemm", precision, x, w_EMK)
    if w_EMK.shape[2] != K or offset_E.shape != (E,) or (place_R is not None and place_R.shape[0] != R):
        raise ValueError(
            f"grouped_gemm: x {tuple(x.shape)}, w {tuple(w_EMK.shape)}, {offset_E.shape[0]} offsets differ"
        )
    y = x.new_empty(R, M) if out is None else out
    if not R or not M:
        return y
    t = tile or gemm_tile(R, E, x.dtype)
    _rows_kernel[(programs or _programs(x.device),)](
        x, w_EMK, y, offset_E, row_R, place_R, R, M, K, E, *x.stride(), *w_EMK.stride(), *y.stride(),
        EXPERTS=triton.next_power_of_2(E + 1), BLOCK_R=t.rows, BLOCK_M=t.cols, BLOCK_K=t.depth,
        GATHER=row_R is not None, SCATTER=place_R is not None, CLEAR=clear, PRECISION=precision, **t.launch,
    )  # fmt: skip
    return y


def grouped_wgrad(
    dy: Tensor,
    x: Tensor,
    offset_E: Tensor,
    out_EMK: Tensor,
    dy_row_R: Tensor | None = None,
    x_row_R: Tensor | None = None,
    add: bool = False,
    precision: str | None = None,
    programs: int | None = None,
    tile: Tile | None = None,
) -> Tensor:
    r"""Gradient of each expert's weight, into `out_EMK`.

    dw_e (+)= sum over rows r of e of dy[dy_row_r] x[x_row_r]^T

    Args:
        dy: [N, M]; x: [N', K]; any strides, one dtype.
        offset_E: [E], where the rows of each expert end.
        out_EMK: [E, M, K], any float dtype and strides; the sum over rows is float32 and rounded once.
        dy_row_R, x_row_R: positions that rows copy; None = in expert order.
        add: add to what is there; otherwise overwrite, with exact zero for an expert without rows.

    Cost: R*M*K multiply-adds; no atomics, so equal inputs give bitwise equal results; no host read.
    """
    E, M, K = out_EMK.shape
    precision = _check("grouped_wgrad", precision, dy, x)
    if dy.shape[1] != M or x.shape[1] != K or offset_E.shape != (E,):
        raise ValueError(f"grouped_wgrad: dy {(*dy.shape,)}, x {(*x.shape,)} do not fit {(*out_EMK.shape,)}")
    t = tile or weight_tile(x.dtype)
    if out_EMK.numel():
        _weight_kernel[(programs or _programs(x.device),)](
            dy, x, out_EMK, offset_E, dy_row_R, x_row_R, M, K, E, *dy.stride(), *x.stride(), *out_EMK.stride(),
            BLOCK_M=t.rows, BLOCK_K=t.cols, BLOCK_R=t.depth, GATHER_DY=dy_row_R is not None,
            GATHER_X=x_row_R is not None, ADD=add, PRECISION=precision, **t.launch,
        )  # fmt: skip
    return out_EMK

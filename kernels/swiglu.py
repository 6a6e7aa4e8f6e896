"""SwiGLU of rows in expert order in Triton, with the gate of the row, over the rows that experts have.

h_r = gate_r * silu(g_r) * u_r. The backward recomputes the activation from the pre-activations and gives in one pass
what the three products after it need: d(g, u), the gated h again (for down's gradient), and the gate's gradient. Rows
at and past offset_E[-1] (the room) are neither read nor written: the products that follow do not read them either. Not
fused into the product before it: the backward needs g and u, so they are written anyway, and h costs F numbers a row.

Axis letters: R routed rows, E experts, F expert width, S = N*K slots of the gates.
"""
# pyright: reportArgumentType=false, reportCallIssue=false
# (a launch takes plain values where the kernel says tl.constexpr, and num_warps, which it does not name)

import triton
import triton.language as tl
from torch import Tensor

from .grouped_gemm import narrow
from .tuning import ELEMENTWISE as TILE


@triton.jit
def _forward_kernel(
    pre_ptr, gate_ptr, slot_ptr, h_ptr, offset_ptr, E, F, pre_row, h_row,
    GATED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    here = r < tl.load(offset_ptr + E - 1)
    mask = here[:, None] & (f < F)[None, :]
    at = pre_ptr + r.to(tl.int64)[:, None] * pre_row + f[None, :]
    g = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(at + F, mask=mask, other=0.0).to(tl.float32)
    h = g * tl.sigmoid(g) * u
    if GATED:
        h *= tl.load(gate_ptr + tl.load(slot_ptr + r, mask=here, other=0), mask=here, other=0.0).to(tl.float32)[:, None]
    tl.store(h_ptr + r.to(tl.int64)[:, None] * h_row + f[None, :], narrow(h, h_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dh_ptr, pre_ptr, gate_ptr, slot_ptr, dpre_ptr, h_ptr, dgate_ptr, offset_ptr, E, F, dh_row, pre_row, dpre_row, h_row,
    GATED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """A program has whole rows, because the gate's gradient is a sum over them."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    here = r < tl.load(offset_ptr + E - 1)
    wide_r = r.to(tl.int64)[:, None]
    gate, slot = tl.full((BLOCK_R,), 1.0, tl.float32), r
    if GATED:
        slot = tl.load(slot_ptr + r, mask=here, other=0)
        gate = tl.load(gate_ptr + slot, mask=here, other=0.0).to(tl.float32)
    dgate = tl.zeros((BLOCK_R,), tl.float32)
    for first in range(0, F, BLOCK_F):
        f = first + tl.arange(0, BLOCK_F)
        mask = here[:, None] & (f < F)[None, :]
        at = pre_ptr + wide_r * pre_row + f[None, :]
        g = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        u = tl.load(at + F, mask=mask, other=0.0).to(tl.float32)
        dh = tl.load(dh_ptr + wide_r * dh_row + f[None, :], mask=mask, other=0.0).to(tl.float32)
        s = tl.sigmoid(g)
        act = g * s
        dgate += tl.sum(dh * act * u, 1)
        dh *= gate[:, None]
        kind: tl.constexpr = dpre_ptr.dtype.element_ty
        out = dpre_ptr + wide_r * dpre_row + f[None, :]
        tl.store(out, narrow(dh * u * s * (1.0 + g * (1.0 - s)), kind), mask=mask)
        tl.store(out + F, narrow(dh * act, kind), mask=mask)
        tl.store(h_ptr + wide_r * h_row + f[None, :], narrow(act * u * gate[:, None], kind), mask=mask)
    if GATED:
        tl.store(dgate_ptr + slot, narrow(dgate, dgate_ptr.dtype.element_ty), mask=here)


def _gates(name: str, pre: Tensor, gate_S: Tensor | None, slot_R: Tensor | None) -> None:
    if pre.stride(-1) != 1 or (gate_S is None) != (slot_R is None):
        raise ValueError(f"{name}: rows must be contiguous (stride {pre.stride()}), gates and slots come together")


def swiglu(pre_R2F: Tensor, offset_E: Tensor, gate_S: Tensor | None = None, slot_R: Tensor | None = None) -> Tensor:
    r"""silu(g) * u, times the row's gate.

    h_r = gate[slot_r] * silu(g_r) * u_r

    Args:
        pre_R2F: [R, 2F], g first; rows contiguous.
        offset_E: [E], where the rows of each expert end; rows past the last are not read.
        gate_S, slot_R: gates, flat and contiguous, and the one that belongs to each row; None = 1.

    Returns [R, F]; rows past offset_E[-1] are not written. Arithmetic in float32, one rounding.
    """
    _gates("swiglu", pre_R2F, gate_S, slot_R)
    R, F = pre_R2F.shape[0], pre_R2F.shape[1] // 2
    h = pre_R2F.new_empty(R, F)
    if h.numel():
        _forward_kernel[(triton.cdiv(R, TILE.rows), triton.cdiv(F, TILE.cols))](
            pre_R2F, gate_S, slot_R, h, offset_E, offset_E.shape[0], F, pre_R2F.stride(0), h.stride(0),
            GATED=gate_S is not None, BLOCK_R=TILE.rows, BLOCK_F=TILE.cols, **TILE.launch,
        )  # fmt: skip
    return h


def swiglu_backward(
    dh_RF: Tensor, pre_R2F: Tensor, offset_E: Tensor, gate_S: Tensor | None = None, slot_R: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    r"""Gradients of `swiglu`, and its result once more.

    du = gate dh silu(g),  dg = gate dh u silu'(g),  dgate[slot_r] = <dh_r, silu(g_r) * u_r>

    Args: `dh_RF` [R, F], rows contiguous; the others as in `swiglu`. Returns (dpre [R, 2F], h [R, F], dgate [S] or
    None): rows past offset_E[-1] are not written, and the gradient of a gate without a row is zero.
    """
    _gates("swiglu_backward", pre_R2F, gate_S, slot_R)
    (R, F), E = dh_RF.shape, offset_E.shape[0]
    dpre, h = pre_R2F.new_empty(R, 2 * F), pre_R2F.new_empty(R, F)
    dgate = None if gate_S is None else gate_S.new_zeros(gate_S.shape)
    if R:
        _backward_kernel[(triton.cdiv(R, TILE.rows),)](
            dh_RF, pre_R2F, gate_S, slot_R, dpre, h, dgate, offset_E, E, F, dh_RF.stride(0), pre_R2F.stride(0),
            dpre.stride(0), h.stride(0), GATED=gate_S is not None, BLOCK_R=TILE.rows, BLOCK_F=TILE.cols,
            **TILE.launch,
        )  # fmt: skip
    return dpre, h, dgate

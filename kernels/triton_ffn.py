"""The expert feed-forward out of Triton kernels: `ragged.MoEFFN` without a host read, for CUDA.

Forward: gathered product, gated SwiGLU, product scattered to slots, sum over the K slots of a position (in float32).
Backward recomputes the activation; weight gradients go straight to where they are kept. Kept: pre-activations [R, 2F].
Rows at and past offset_E[-1] are room: never read, zero in y and dx.

Axis letters: N positions, K experts per position, R routed rows, S = N*K slots, E experts, D width, F expert width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .grouped_gemm import grouped_gemm, grouped_wgrad
from .swiglu import swiglu, swiglu_backward


def _scattered(x: Tensor, w: Tensor, offset_E: Tensor, place_R: Tensor | None, like_ND: Tensor, choices: int) -> Tensor:
    """[N, D]: products of all rows put to their slots and summed over the slots of a position."""
    rows, slots = x.shape[0], like_ND.shape[0] * choices
    covered = place_R is None or rows == slots  # else slots without a row are zero as well
    y_SD = (x.new_empty if covered else x.new_zeros)(slots, like_ND.shape[1])
    grouped_gemm(x, w, offset_E, place_R=place_R, out=y_SD, clear=True)
    return y_SD if choices == 1 else y_SD.view(like_ND.shape[0], choices, y_SD.shape[1]).sum(1)


def _weight(dy, x, offset_E, weight: Tensor, slot: Any, dy_row_R=None, x_row_R=None) -> Tensor | None:
    """The weight's gradient into its slot (None for autograd), or anew."""
    target = torch.empty_like(weight) if slot is None else slot.view
    grouped_wgrad(dy, x, offset_E, target, dy_row_R, x_row_R, slot is not None and slot.filled)
    if slot is None:
        return target
    slot.filled = True
    return None


class TritonFFN(torch.autograd.Function):
    """y_n = sum_k gate_nk * down_e @ (silu(g) * u), (g, u) = gate_up_e @ x_n; without gates K = 1.

    row_R: the position of a row; slot_R: its slot; both None when row, position and slot are one.
    """

    @staticmethod
    def forward(ctx, x_ND, gate_NK, gate_up_E2FD, down_EDF, row_R, slot_R, offset_E, slots: tuple[Any, Any]):
        pre_R2F = grouped_gemm(x_ND, gate_up_E2FD, offset_E, row_R)
        gate_S = None if gate_NK is None else gate_NK.reshape(-1).contiguous()
        h_RF = swiglu(pre_R2F, offset_E, gate_S, None if gate_S is None else slot_R)
        ctx.save_for_backward(x_ND, gate_NK, gate_up_E2FD, down_EDF, row_R, slot_R, offset_E, pre_R2F)
        ctx.slots, ctx.choices = slots, 1 if gate_NK is None else gate_NK.shape[1]
        return _scattered(h_RF, down_EDF, offset_E, slot_R, x_ND, ctx.choices)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_ND):
        x_ND, gate_NK, gate_up_E2FD, down_EDF, row_R, slot_R, offset_E, pre_R2F = ctx.saved_tensors
        need = ctx.needs_input_grad
        gate_S = None if gate_NK is None else gate_NK.reshape(-1).contiguous()
        dh_RF = grouped_gemm(dy_ND, down_EDF.mT, offset_E, row_R)
        dpre, h, dgate = swiglu_backward(dh_RF, pre_R2F, offset_E, gate_S, None if gate_S is None else slot_R)
        del dh_RF
        dx = ddown = dgate_up = None
        if need[3]:
            ddown = _weight(dy_ND, h, offset_E, down_EDF, ctx.slots[1], dy_row_R=row_R)
        if need[2]:
            dgate_up = _weight(dpre, x_ND, offset_E, gate_up_E2FD, ctx.slots[0], x_row_R=row_R)
        if need[0]:
            dx = _scattered(dpre, gate_up_E2FD.mT, offset_E, slot_R, x_ND, ctx.choices)
        dgate = dgate.view(gate_NK.shape) if dgate is not None and gate_NK is not None and need[1] else None
        return dx, dgate, dgate_up, ddown, None, None, None, None


def moe_ffn(x_ND, rows: Any, gate_NK, gate_up_E2FD, down_EDF, slots=(None, None)) -> Tensor:
    """See `moekit.ops.moe_ffn`."""
    return TritonFFN.apply(x_ND, gate_NK, gate_up_E2FD, down_EDF, rows.row_R, rows.slot_R, rows.offset_E, slots)


def expert_ffn(x_RD, offset_E, gate_up_E2FD, down_EDF, order_R=None, slots=(None, None)) -> Tensor:
    """See `moekit.ops.expert_ffn`."""
    return TritonFFN.apply(x_RD, None, gate_up_E2FD, down_EDF, order_R, order_R, offset_E, slots)
